"""Where one fetch spends its time: the calls of both processes on one clock, and what each took.

    python benchmarks/timeline.py --backend nixl --memory private --megabytes 64 --piece-kib 64 [--wire nvfp4]

The calls below are wrapped while they are watched, which costs each about a microsecond; the package itself knows
nothing of it. Of the fetches after a warm-up the one with the median time is shown: milliseconds since its call, what a
call took, D for decode or P for prefill, the thread, the call.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import secrets
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bench_shm
from bench_cuda_ipc import on_gpu

import kvxfer
from kvxfer import CacheLayout, Limits

WATCHED = {
    "kvxfer.cache": {"Cache": ("fetch",)},
    "kvxfer.transfers.transfer": {"Transfer": ("wait",)},
    "kvxfer.peers.remote": {"RemoteTable": ("published", "word_state")},
    "kvxfer.formats.plan": {"PackedJoin": ("plan",)},
    "kvxfer.transfers.packed": {
        "PackedSource": ("__init__", "queue_stage", "_get_ready", "_gather", "_pack", "_announce", "credit"),
        "PackedSink": ("__init__", "take", "_launch", "_scatter", "_unpacked", "_give_credit"),
    },
    "kvxfer.transfers.moves": {"InOrder": ("_ended",)},
    "kvxfer.cuda.mover": {"CudaPackedPlan": ("_ready",)},
    "kvxfer.cuda.lanes": {"Lane": ("finish",)},
    "kvxfer.backends.nixl": {"NixlLink": ("post", "read")},
    "kvxfer.backends.nccl_link": {"NcclLink": ("post", "read")},
    "kvxfer.backends.nccl_ends": {
        "Writer": ("_issue", "_have_passed", "hear"),
        "Taker": ("tell", "_issue", "_have_passed", "hear"),
    },
}
LAYERS = 32

Call = tuple[float, float, str, str]  # begin, end, thread, name
_calls: list[Call] = []


def watch() -> None:
    """Wrap what is watched, in this process."""
    for module, owners in WATCHED.items():
        found = importlib.import_module(module)
        for owner, names in owners.items():
            for name in names:
                _wrap(getattr(found, owner, None), name)


def _wrap(owner: type | None, name: str) -> None:
    original = getattr(owner, name, None)
    if original is None:
        raise SystemExit(f"timeline: {owner} has no {name} any more")
    label = f"{owner.__name__}.{name}"

    @functools.wraps(original)
    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*args, **options)
        finally:
            heard = f" {type(args[1]).__name__}" if name == "hear" else ""
            _calls.append((began, time.perf_counter(), threading.current_thread().name, label + heard))

    setattr(owner, name, timed)


def prefill(
    pipe: Connection, report: Connection, secret: bytes, gpu: str | None, backend: str, limits: dict[str, int]
) -> None:
    """The other process: that of every benchmark, and in the end what it was seen to do."""
    watch()
    bench_shm.prefill(pipe, secret, gpu, [backend], limits)
    report.send(_calls)


def paged(megabytes: int, on_the_gpu: bool) -> CacheLayout:
    """bf16 blocks of 16 tokens, 64 KiB in each layer."""
    layout = CacheLayout.paged(
        layers=[f"layers.{i}" for i in range(LAYERS)],
        num_blocks=max(1, (megabytes << 20) // (64 << 10) // LAYERS),
        block_tokens=16,
        kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
    )
    return on_gpu(layout) if on_the_gpu else layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="nixl", help="default %(default)s")
    parser.add_argument("--way", default="packed", choices=("mapped", "direct", "packed"))
    parser.add_argument("--wire", default="raw")
    parser.add_argument("--memory", default="private", choices=("private", "shared", "gpu", "finite"))
    parser.add_argument("--gpu", help="what prefill sees, for memory gpu and finite (the same without NaN)")
    parser.add_argument("--megabytes", type=int, default=64, help="moved by a fetch (default %(default)s MiB)")
    parser.add_argument("--chunk-mib", type=int, default=4)
    parser.add_argument("--staging-mib", type=int, default=64)
    parser.add_argument("--max-sms", type=int, default=16)
    parser.add_argument("--mover-threads", type=int, default=2)
    parser.add_argument("--fetches", type=int, default=9)
    options = parser.parse_args()
    limits = {
        "chunk_bytes": options.chunk_mib << 20,
        "staging_bytes": options.staging_mib << 20,
        "max_sms": options.max_sms,
        "mover_threads": options.mover_threads,
    }
    secret, context = secrets.token_bytes(32), multiprocessing.get_context("spawn")
    (pipe, theirs), (report, reporting) = context.Pipe(), context.Pipe()
    arguments = (theirs, reporting, secret, options.gpu, options.backend, limits)
    process = context.Process(target=prefill, args=arguments, daemon=True)
    process.start()
    theirs.close()
    watch()
    layout = paged(options.megabytes, options.memory in ("gpu", "finite"))
    (group,) = layout.groups
    ids = [np.random.default_rng(seed).permutation(group.num_blocks).astype(np.int32) for seed in (1, 2)]

    def ask(*message: object) -> Any:
        pipe.send(message)
        return pipe.recv()

    ask("register", "kv", layout, options.memory)
    settings = {"backends": [options.backend], "ways": (options.way,), "secret": secret, "limits": Limits(**limits)}
    with kvxfer.Connector("decode", **settings) as connector:
        cache = connector.register(bench_shm.allocate(layout, options.memory), layout, name="kv")
        tokens = group.num_blocks * group.block_tokens
        fetches = []
        for _ in range(options.fetches + 2):
            (ticket,), _ = ask("publish", "kv", {group.name: ids[0]}, 1, tokens)
            time.sleep(bench_shm.TICKETS_WAY_S)
            began = time.perf_counter()
            stats = cache.fetch(ticket, into={group.name: ids[1]}, wire=options.wire, timeout_s=60).wait()
            fetches.append((time.perf_counter() - began, began))
            time.sleep(0.01)  # what comes after it is not the next one's
    pipe.close()
    theirs_seen: list[Call] = report.recv()
    process.join(20)
    fetches = fetches[2:]  # the first ones connect, and load kernels
    seconds, began = sorted(fetches)[len(fetches) // 2]
    everyone = sorted([(*call, "D") for call in _calls] + [(*call, "P") for call in theirs_seen])
    for begin, end, thread, name, side in everyone:
        if began - 1e-4 <= begin <= began + seconds + 1e-3:
            print(f"{(begin - began) * 1e3:9.3f} {(end - begin) * 1e3:8.3f} {side} {_short(thread):10} {name}")
    low, high = min(fetches)[0], max(fetches)[0]
    print(
        f"{stats.way}, {stats.backend}, {stats.wire}: {stats.bytes:,} bytes in {seconds * 1e3:.3f} ms "
        f"({low * 1e3:.3f} to {high * 1e3:.3f}), {stats.bytes / seconds / 1e9:.2f} GB/s"
    )


def _short(thread: str) -> str:
    return "mover" + thread.rsplit("-", 1)[-1] if "-mover-" in thread else thread.removeprefix("kvxfer-").split("-")[0]


if __name__ == "__main__":
    main()
