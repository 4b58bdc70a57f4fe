"""What a fetch costs the host, step by step and as a whole: one process's Python and C++, with nothing to be moved.

    python benchmarks/bench_host.py [--json FILE] [--calls 400]

Steps are timed by themselves, in the order of a fetch. Whole fetches go between two processes: in host memory (`shm`,
with the copy), and over the tests' stand-in for a GPU, on which launches move nothing, so that the host's part of a
fetch between GPUs is left; that needs the CUDA extension. Between two fetches the thread sleeps, as an engine's would,
and finds cold caches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import bench_shm
import timing

import kvxfer
from kvxfer import CacheLayout, Limits
from kvxfer import ticket as tickets
from kvxfer.control.messages import Role
from kvxfer.errors import MissingExtra
from kvxfer.models import layout_for
from kvxfer.plan import check_blocks, join
from kvxfer.plan.request import BlockTable, pairing_of

MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"
PAUSE_S = 0.0005
WARM_UP = 20
SMALL_BYTES = 4096


def one_layer(blocks: int) -> tuple[CacheLayout, list[dict[str, np.ndarray]], int]:
    """All blocks of a cache of one layer: layout, source and destination lists, tokens."""
    layout = bench_shm.layout_of(SMALL_BYTES, max(16, blocks))
    ids = [np.random.default_rng(seed).permutation(blocks).astype(np.int32) for seed in (1, 2)]
    return layout, [{"full": found} for found in ids], 16 * blocks


def model_request() -> tuple[CacheLayout, list[dict[str, np.ndarray]], int]:
    """64 tokens of the model, whose nine groups share one pool of blocks."""
    layout, lists = layout_for(MODEL, num_blocks=64), []
    for seed in (1, 2):
        ids, found = np.random.default_rng(seed).permutation(64).astype(np.int32), {}
        for group in layout.groups:
            count = min(group.blocks_for(64), group.tail_blocks)
            found[group.name], ids = ids[:count], ids[count:]
        lists.append(found)
    return layout, lists, 64


CASES: dict[str, Callable[[], tuple[CacheLayout, list[dict[str, np.ndarray]], int]]] = {
    "1 block": lambda: one_layer(1),
    "64 tokens of V4.1": model_request,
    "262,144 blocks": lambda: one_layer(1 << 18),
}


def timed(call: Callable[[], object], calls: int) -> float:
    """Microseconds of a call, the median."""
    samples = []
    for _ in range(calls):
        time.sleep(PAUSE_S)
        samples.append(timing.host_clock(call))
    return 1e6 * statistics.median(samples)


def steps(case: str, calls: int) -> dict[str, float]:
    """Microseconds of each step."""
    layout, (src, dst), tokens = CASES[case]()
    record = tickets.Record.of(tokens, check_blocks(layout, src, tokens=tokens, role="source")).encode()
    secret = secrets.token_bytes(32)
    signed = tickets.sign(
        secret, role=Role.FETCH, engine="prefill", generation=1, endpoint="tcp://127.0.0.1:5600", cache="default",
        slot=1, lease=1, request_id="request", tokens=tokens, ttl_s=30.0, record_bytes=len(record),
        digest=tickets.digest(record), fingerprint=bytes(16),
    )  # fmt: skip
    encoded, table, pairing = bytes(signed), BlockTable(layout), pairing_of(join([layout], layout)[0])
    checked = table.check(dst, tokens=tokens, role="destination")
    found = {
        "check the ticket's signature": timed(lambda: tickets.parse(encoded, secret), calls),
        "check the destination's ids: in range, none twice": timed(
            lambda: table.check(dst, tokens=tokens, role="destination"), calls
        ),
        "SHA-256 over the lease's record": timed(lambda: tickets.digest(record), calls),
        "read the record, check the source's ids, pair blocks": timed(
            lambda: pairing.request(record, checked, tokens=tokens), calls
        ),
    }
    try:
        found["tables of the launch, in pinned memory"] = _tables(layout, pairing, record, checked, tokens, calls)
    except MissingExtra:
        pass
    return found


def _tables(layout: CacheLayout, pairing: object, record: bytes, checked: object, tokens: int, calls: int) -> float:
    from tests.gpu import stand_in

    with stand_in.installed(moves=False):
        from kvxfer.cuda.lanes import Ending, Lanes
        from kvxfer.cuda.pairing import CudaPairing

        lanes, addresses = Lanes(0), np.full(len(layout.regions), 4096, np.uint64)
        on_gpu = CudaPairing(pairing, lanes, addresses, addresses, max_sms=16)
        request = pairing.request(record, checked, tokens=tokens)

        def launch() -> None:
            [lane] = lanes.take(1)
            on_gpu.launch(request, lane, after=(), ending=Ending()).end()

        return timed(launch, calls)


# --- whole fetches ------------------------------------------------------------------------------------------


def on_gpu(layout: CacheLayout) -> CacheLayout:
    """The layout, on the stand-in's device."""
    regions = tuple(msgspec.structs.replace(region, device="cuda:0") for region in layout.regions)
    return msgspec.structs.replace(layout, regions=regions)


def arrays_of(layout: CacheLayout, backend: str) -> dict[str, object]:
    """Memory for every region."""
    if backend == "shm":
        return bench_shm.allocate(layout, "shared")
    from tests.gpu import stand_in

    return {region.name: stand_in.DeviceArray(np.zeros(region.nbytes, np.uint8)) for region in layout.regions}


def connect(name: str, backend: str, secret: bytes) -> kvxfer.Connector:
    """A connector of this process, on the stand-in's device for GPU memory."""
    if backend == "cuda_ipc":
        from tests.gpu import stand_in

        stand_in.install(moves=False)
    limits = Limits(lease_record_bytes=256 << 20)
    return kvxfer.Connector(name, backends=[backend], secret=secret, limits=limits)


def publisher(pipe: Connection, secret: bytes, case: str, backend: str, times: int) -> None:
    """The other process: publishes, and stays until the pipe closes."""
    layout, (src, _), tokens = CASES[case]()
    layout = layout if backend == "shm" else on_gpu(layout)
    with connect("prefill", backend, secret) as connector:
        cache = connector.register(arrays_of(layout, backend), layout, name="kv")
        leases = [cache.publish(src, tokens=tokens, ttl_s=600) for _ in range(times)]
        pipe.send([bytes(lease.ticket) for lease in leases])
        pipe.poll(600)


def fetches(case: str, backend: str, calls: int) -> dict[str, float]:
    """Microseconds of a whole fetch: until the call returned, until the first byte, until it was done."""
    secret, times = secrets.token_bytes(32), calls + WARM_UP
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=publisher, args=(theirs, secret, case, backend, times), daemon=True)
    process.start()
    theirs.close()
    layout, (_, dst), _ = CASES[case]()
    layout = layout if backend == "shm" else on_gpu(layout)
    with connect("decode", backend, secret) as connector:
        cache = connector.register(arrays_of(layout, backend), layout, name="kv")
        samples = []
        for ticket in pipe.recv():
            time.sleep(PAUSE_S)
            worked, began = time.thread_time(), time.perf_counter()
            transfer = cache.fetch(ticket, into=dst)
            returned = time.perf_counter()
            stats = transfer.wait()
            done = time.perf_counter()
            assert stats.way == "mapped"
            samples.append((returned - began, stats.posted_s, done - began, time.thread_time() - worked))
    pipe.close()
    process.join(20)
    names = ("returned_us", "first_byte_us", "done_us", "thread_us")
    columns = zip(*samples[WARM_UP:], strict=True)
    found = {name: 1e6 * statistics.median(column) for name, column in zip(names, columns, strict=True)}
    low, _, high = statistics.quantiles([done for _, _, done, _ in samples[WARM_UP:]], n=4)
    return found | {"low_us": 1e6 * low, "high_us": 1e6 * high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--calls", type=int, default=400, help="measured calls of each row (default %(default)s)")
    args = parser.parse_args()
    results = []
    for case in CASES:
        calls = args.calls if "262" not in case else max(10, args.calls // 20)
        found = steps(case, calls)
        results.append({"case": case, "steps": found})
        print(f"\n{case}")
        for name, microseconds in found.items():
            print(f"  {name:<54} {microseconds:>8.1f} us")
    backends = ["shm"]
    try:
        from kvxfer.cuda.native import native

        native()
        backends.append("cuda_ipc")
    except MissingExtra as error:
        print(f"\nno fetches over the stand-in for a GPU: {error}")
    for backend in backends:
        for case in list(CASES)[:2]:
            found = fetches(case, backend, args.calls)
            results.append({"case": case, "backend": backend} | found)
            at = {name.removesuffix("_us"): f"{microseconds:.0f}" for name, microseconds in found.items()}
            print(
                f"\n{backend}, {case}: done {at['done']} us ({at['low']} to {at['high']}), first byte "
                f"{at['first_byte']}, call returned {at['returned']}, processor time of the thread {at['thread']}"
            )
    if args.json:
        timing.save(args.json, timing.environment(), results)


if __name__ == "__main__":
    main()
