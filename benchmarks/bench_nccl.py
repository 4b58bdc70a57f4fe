"""Two GPUs, one run: fetches over the NCCL backend, NCCL's own rate for one buffer, and the other backends on the same.

    python benchmarks/bench_nccl.py [--json FILE] [--steps plain,fetch,...] [--megabytes 1024] [--calls 9]

Needs two GPUs, CuPy and nccl4py. This process owns GPU 0, the others GPU 1 (KVXFER_PEER_GPU=0: the same one, which NCCL
2.30 or newer allows where NCCL_MULTI_RANK_GPU_ENABLE=1). A call of ours is a whole fetch, from the
call to the confirmed end, out of blocks that are scattered over 64 layers; the ceiling is NCCL's send and receive of
one buffer, in the same run. Bytes are counted once. What is measured is saved after every step.

Steps, in this order: `plain` (NCCL alone), `fetch` (pieces of 4 KiB to 1 MiB, raw), `others` (the same over cuda_ipc
and nixl), `nvfp4` (bf16 in that wire format), `latency` (requests of 16 tokens), `ctas` (what fewer thread blocks
cost), `sms` (what more of them for gathering and scattering bring), `chunks` (by the size of chunks).
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import itertools
import multiprocessing
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bench_shm
import timing
from bench_cuda_ipc import on_gpu
from bench_gpu import LAYERS, halves, layered

import kvxfer
from kvxfer import CacheLayout, Limits, cuda
from kvxfer.backends.nccl import MAX_CTAS, NcclBackend
from kvxfer.models import layout_for

PIECES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
PLAIN_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
CEILINGS = {16 << 20: "16 MiB", 256 << 20: "256 MiB"}
MODEL = "Qwen2.5-14B"
CHUNK_BYTES, STAGING_BYTES, SMS = 64 << 20, 1 << 30, 32
LARGER = 4  # times the bytes
PEER_GPU = os.environ.get("KVXFER_PEER_GPU", "1")

Rows = Iterator[dict[str, Any]]


def nccl_with(**options: int) -> list:
    """The backend, made in the process that uses it."""
    return [NcclBackend(**options)]


# --- NCCL alone -----------------------------------------------------------------------------------------------


def plain_end(pipe: Connection | None, rank: int, unique_id: bytes) -> Callable[[int], None]:
    """A function that sends (rank 1) or receives (rank 0) one buffer and waits for it."""
    nccl = importlib.import_module("nccl.bindings.nccl")
    importlib.import_module("cuda.core").Device(0).set_current()
    config = nccl.Config()  # lives until NCCL has read it
    comm = nccl.comm_init_rank_scalable(2, rank, 1, bytearray(unique_id), config.ptr)
    memory, stream = cuda.DeviceMemory(max(PLAIN_BYTES), device=0), cuda.Stream(device=0)
    uint8 = int(nccl.DataType.Uint8)

    def move(nbytes: int) -> None:
        if rank:
            nccl.send(memory.address, nbytes, uint8, 0, comm, stream.address)
        else:
            nccl.recv(memory.address, nbytes, uint8, 1, comm, stream.address)
        stream.synchronise()

    if pipe is not None:
        while nbytes := pipe.recv():
            move(nbytes)
    return move


def plain_process(pipe: Connection, unique_id: bytes) -> None:
    """The other process of NCCL's own rows."""
    os.environ["CUDA_VISIBLE_DEVICES"] = PEER_GPU
    plain_end(pipe, 1, unique_id)


def plain(calls: int) -> Rows:
    """One buffer from GPU 1 to GPU 0, sent and received, the host waiting for each. NCCL's choice of CTAs."""
    nccl = importlib.import_module("nccl.bindings.nccl")
    unique_id = bytes(nccl.get_unique_id())
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=plain_process, args=(theirs, unique_id), daemon=True)
    process.start()
    move = plain_end(None, 0, unique_id)

    def once(nbytes: int) -> None:
        ours.send(nbytes)
        move(nbytes)

    for nbytes in PLAIN_BYTES:
        # The word to the other process takes some 20 us, which are not NCCL's: several buffers a call.
        each = max(1, min(20, (256 << 20) // nbytes))

        def many(_: None, nbytes: int = nbytes, each: int = each) -> None:
            for _ in range(each):
                once(nbytes)

        result = timing.measure(many, [None], calls=calls)
        yield {"what": "plain", "bytes_each": nbytes} | rate(each * nbytes, result) | {
            "us_each": result.median_s / each * 1e6
        }
    ours.send(0)
    process.join(10)


# --- ours and the other backends ------------------------------------------------------------------------------


class Bench:
    """Fetches out of a process that owns the other GPU."""

    def __init__(self, calls: int, total: int) -> None:
        self.calls, self.total = calls, total
        self.secret = secrets.token_bytes(32)
        self._names = itertools.count()
        self._peers: dict[tuple, bench_shm.Prefill] = {}

    def close(self) -> None:
        """End the other processes."""
        for peer in self._peers.values():
            peer.pipe.close()
            peer.process.join(20)

    def _peer(self, backends: Any, limits: dict[str, int]) -> bench_shm.Prefill:
        key = (str(backends), *limits.values())
        if key not in self._peers:
            self._peers[key] = bench_shm.Prefill(self.secret, gpu=PEER_GPU, backends=backends, **limits)
        return self._peers[key]

    def fetches(
        self,
        layout: CacheLayout,
        tokens: int,
        *,
        backends: Any,
        way: str = "packed",
        wire: str = "raw",
        memory: str = "gpu",
        calls: int | None = None,
        max_sms: int = SMS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> tuple[timing.Timing, kvxfer.TransferStats]:
        """Seconds of a fetch of all blocks, scattered on both sides."""
        calls, name = calls or self.calls, f"bench-{next(self._names)}"
        limits = {
            "max_sms": max_sms,
            "chunk_bytes": chunk_bytes,
            "staging_bytes": max(STAGING_BYTES, 4 * chunk_bytes),
        }
        peer = self._peer(backends, limits)
        peer.ask("register", name, layout, memory)
        (group,) = layout.groups
        ids = [np.random.default_rng(seed).permutation(group.num_blocks).astype(np.int32) for seed in (1, 2)]
        tickets: collections.deque[bytes] = collections.deque()
        before = bench_shm.one_by_one(peer, tickets, name, {group.name: ids[0]}, 1, tokens)
        here = backends() if callable(backends) else backends
        options = {"backends": here, "ways": (way,), "limits": Limits(**limits)}
        with kvxfer.Connector(f"decode-{name}", secret=self.secret, **options) as connector:
            cache = connector.register(bench_shm.allocate(layout, memory), layout, name=name)
            stats: list[kvxfer.TransferStats] = []

            def fetch(_: None) -> None:
                into = {group.name: ids[1]}
                stats[:] = [cache.fetch(tickets.popleft(), into=into, wire=wire, timeout_s=60).wait()]
                assert stats[0].way == way, stats[0]

            result = timing.measure(fetch, [None], calls=calls, before=before)
        tidy()
        return result, stats[0]

    def of_pieces(self, piece: int, times: int = 1, **options: Any) -> dict[str, Any]:
        """One row: a cache whose blocks are `piece` bytes in each of 64 layers."""
        blocks = max(1, times * self.total // piece // LAYERS)
        result, stats = self.fetches(layered(piece, blocks), 16 * blocks, **options)
        return {"piece": piece, "backend": stats.backend, "way": stats.way} | rate(stats.bytes, result)

    def fetch(self) -> Rows:
        """Raw, by the size of pieces."""
        for piece in PIECES:
            yield {"what": "fetch", **self.of_pieces(piece, backends=nccl_with)}
        yield {"what": "fetch", **self.of_pieces(64 << 10, LARGER, backends=nccl_with)}

    def others(self) -> Rows:
        """The same work over the backends that can do it here."""
        for backends, way in ((["cuda_ipc"], "mapped"), (["nixl"], "packed")):
            for piece in (4 << 10, 64 << 10):
                try:
                    yield {"what": "other", **self.of_pieces(piece, backends=backends, way=way, calls=5)}
                except (kvxfer.KvxferError, EOFError, ConnectionError) as error:
                    yield {"what": "other", "backend": backends[0], "piece": piece, "failed": str(error)[:200]}

    def nvfp4(self) -> Rows:
        """bf16 blocks that cross as NVFP4. Bytes are of bf16."""
        layout, tokens = halves(LARGER * self.total)
        for wire, sms in (("nvfp4", SMS), ("nvfp4", 64), ("raw", SMS)):
            result, stats = self.fetches(
                layout, tokens, backends=nccl_with, wire=wire, memory="finite", max_sms=sms
            )
            yield {"what": "wire", "wire": wire, "max_sms": sms, "wire_bytes": stats.wire_bytes} | rate(
                stats.bytes, result
            )

    def latency(self) -> Rows:
        """Requests of 16 tokens, one after another: of one layer, and of a model."""
        for name, layout in (
            ("one layer of 64 KiB", layered(64 << 10, 1, 1)),
            (MODEL, on_gpu(layout_for(MODEL, num_blocks=1))),
        ):
            result, stats = self.fetches(
                layout, 16, backends=nccl_with, calls=200, chunk_bytes=4 << 20
            )
            yield {"what": "latency", "request": name, "bytes": stats.bytes, "calls": result.calls} | {
                "p50_us": result.median_s * 1e6,
                "low_us": result.low_s * 1e6,
                "high_us": result.high_s * 1e6,
                "best_us": result.best_s * 1e6,
            }

    def ctas(self) -> Rows:
        """By the bound on NCCL's thread blocks; 0 leaves the number to NCCL."""
        for max_ctas in (2, 4, 8, 16, 32, 0):
            row = self.of_pieces(16 << 10, backends=functools.partial(nccl_with, max_ctas=max_ctas), calls=5)
            yield {"what": "ctas", "max_ctas": max_ctas, **row}

    def sms(self) -> Rows:
        """By the bound on multiprocessors for gathering and scattering."""
        for sms in (8, 16, 64):
            row = self.of_pieces(16 << 10, backends=nccl_with, max_sms=sms, calls=5)
            yield {"what": "sms", "max_sms": sms, **row}

    def chunks(self) -> Rows:
        """By the size of chunks."""
        for chunk_bytes in (4 << 20, 16 << 20, 128 << 20):
            row = self.of_pieces(16 << 10, backends=nccl_with, chunk_bytes=chunk_bytes, calls=5)
            yield {"what": "chunks", "chunk_bytes": chunk_bytes, **row}


def rate(nbytes: int, result: timing.Timing) -> dict[str, Any]:
    """Bytes, and what they took."""
    return {
        "nbytes": nbytes,
        "gb_s": result.rate(nbytes),
        "low": nbytes / result.high_s / 1e9,
        "high": nbytes / result.low_s / 1e9,
        "milliseconds": result.median_s * 1e3,
    }


def tidy() -> None:
    """Give the memory of caches that are gone back to the device."""
    importlib.import_module("cupy").get_default_memory_pool().free_all_blocks()


def with_ceiling(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row, with its ratio to what NCCL does with one buffer, where that was measured."""
    for other in rows:
        if other["what"] == "plain" and other["bytes_each"] in CEILINGS and row["what"] in ("fetch", "other", "ctas"):
            row[f"of NCCL at {CEILINGS[other['bytes_each']]}"] = row["gb_s"] / other["gb_s"] if "gb_s" in row else 0
    return row


def line(row: dict[str, Any]) -> str:
    """What a person reads of a row."""
    shown = {key: value for key, value in row.items() if key not in ("nbytes", "low", "high")}
    if "low" in row:
        shown["quartiles"] = f"{row['low']:.0f}..{row['high']:.0f}"
    return "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--steps", default="", help="comma-separated; default: all")
    parser.add_argument("--megabytes", type=int, default=1024, help="moved by a call (default %(default)s MiB)")
    parser.add_argument("--calls", type=int, default=9, help="measured calls of each row (default %(default)s)")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # before anything of CUDA is loaded
    if reason := cuda.why_unavailable():
        raise SystemExit(f"bench_nccl needs two GPUs: {reason}")
    backend = NcclBackend()
    library, missing = str(backend.libnccl), backend.libnccl.missing
    backend.close()
    one_sided = f"no, it lacks {missing[0]}" if missing else "tried"
    print(f"{library}; one-sided: {one_sided}; max_ctas {MAX_CTAS}", flush=True)
    bench = Bench(args.calls, args.megabytes << 20)
    steps: dict[str, Callable[[], Rows]] = {
        "plain": lambda: plain(args.calls),
        "fetch": bench.fetch,
        "others": bench.others,
        "nvfp4": bench.nvfp4,
        "latency": bench.latency,
        "ctas": bench.ctas,
        "sms": bench.sms,
        "chunks": bench.chunks,
    }
    wanted = args.steps.split(",") if args.steps else list(steps)
    if unknown := set(wanted) - steps.keys():
        raise SystemExit(f"unknown steps {sorted(unknown)}; there are {', '.join(steps)}")
    environment = timing.environment(
        library=library.split(" (")[0],
        one_sided=not missing,
        driver=cuda.driver_version(),
        gpus=1 if PEER_GPU == "0" else 2,
    )
    results: list[dict[str, Any]] = []
    failed = False
    for name in wanted:
        started = time.perf_counter()
        try:
            for row in steps[name]():
                results.append(with_ceiling(row, results))
                print(line(row), flush=True)
        except Exception:  # what the other steps measure is worth having
            failed = True
            traceback.print_exc()
            results.append({"what": name, "failed": traceback.format_exc(limit=1).splitlines()[-1]})
        print(f"-- {name}: {time.perf_counter() - started:.1f} s", flush=True)
        if args.json:
            timing.save(args.json, environment, results)
    bench.close()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
