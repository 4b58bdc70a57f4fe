"""Shared memory between two processes: scattered blocks, three ways, against a plain gather in one process.

    python benchmarks/bench_shm.py [--json FILE] [--megabytes 256] [--calls 15]

Rows: ours (a whole fetch, from the call to the confirmed end), peers on the same blocks (NumPy indexing), and ceilings
of the same run (the same kernel on the same blocks within one process; memcpy of one piece). Bytes are counted once.
"""

from __future__ import annotations

import argparse
import collections
import mmap
import multiprocessing
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import timing

import kvxfer
from kvxfer import CacheLayout
from kvxfer.kernels import PreparedPlan, bases
from kvxfer.layout import Group, Plane, Record, Region, Slice
from kvxfer.plan import join

Backends = str | list[str] | Callable[[], list]  # a function is called in the process where they are used
BLOCK_KIB = (4, 16, 64)
WAYS = {"mapped": "shared", "direct": "private", "packed": "private"}
CONTROL_ROUNDS = 1000


def layout_of(block_bytes: int, num_blocks: int) -> CacheLayout:
    """One layer whose blocks are `block_bytes` long."""
    plane = Plane(
        name="kv", dtype="uint8", offset=0, entries=16, entry_stride=block_bytes // 16, unit_bytes=block_bytes // 16
    )
    record = Record(tag=f"bench.{block_bytes}", nbytes=block_bytes, planes=(plane,))
    piece = Slice(layer="layers.0", region="kv", offset=0, block_stride=block_bytes, record=record.tag)
    return CacheLayout(
        regions=(Region(name="kv", nbytes=block_bytes * num_blocks),),
        records=(record,),
        groups=(Group(name="full", block_tokens=16, num_blocks=num_blocks, slices=(piece,)),),
        fingerprint={"model": "bench"},
    )


def allocate(layout: CacheLayout, memory: str) -> dict[str, np.ndarray]:
    """Touched memory for every region: shared, private, gpu (CuPy), or finite (gpu, without NaN and infinity)."""
    if memory in ("gpu", "finite"):
        import cupy

        largest = 256 if memory == "gpu" else 64
        return {r.name: cupy.random.randint(0, largest, r.nbytes, dtype=cupy.uint8) for r in layout.regions}
    make = kvxfer.shared_empty if memory == "shared" else private
    arrays = {region.name: make(region.nbytes) for region in layout.regions}
    for array in arrays.values():
        array[:] = np.random.default_rng(0).integers(0, 256, len(array), np.uint8)
    return arrays


def private(nbytes: int) -> np.ndarray:
    """Memory of this process that begins at a page, as engines' allocators give large tensors."""
    memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    return memory[-memory.ctypes.data % mmap.PAGESIZE :][:nbytes]


def prefill(pipe: Connection, secret: bytes, gpu: str | None, backends: Backends, more: dict) -> None:
    """The other process: publishes whatever it is told to, until the pipe closes. `more` are limits."""
    if gpu is not None:  # before anything of CUDA is loaded
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    # Many leases of many blocks are alive at once here, so that none is published while something is measured.
    limits = kvxfer.Limits(lease_record_bytes=128 << 20, **more)
    backends = backends() if callable(backends) else backends
    with kvxfer.Connector("prefill", backends=backends, secret=secret, limits=limits) as connector:
        keep, caches = [], {}
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            if message[0] == "register":
                _, name, layout, memory = message
                keep.append(allocate(layout, memory))
                caches[name] = connector.register(keep[-1], layout, name=name)
                pipe.send(None)
            else:
                _, name, blocks, times, *rest = message
                lists, tokens = (blocks, rest[0]) if rest else ({"full": blocks}, 16 * len(blocks))
                started = time.perf_counter()
                ahead = "raw" if message[0] == "pack" else None
                packed = connector.metrics.packed_ahead_total.get("packed", 0) + times if ahead else 0
                leases = [caches[name].publish(lists, tokens=tokens, ttl_s=600, pack_ahead=ahead) for _ in range(times)]
                seconds = (time.perf_counter() - started) / times
                while connector.metrics.packed_ahead_total.get("packed", 0) < packed:
                    time.sleep(0.01)
                pipe.send(([bytes(lease.ticket) for lease in leases], seconds))


class Prefill:
    """The prefill process, seen from here."""

    def __init__(
        self, secret: bytes, gpu: str | None = None, backends: Backends = "auto", **limits: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=prefill, args=(theirs, secret, gpu, backends, limits), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *message: object) -> object:
        """One request and its answer."""
        self.pipe.send(message)
        return self.pipe.recv()


TICKETS_WAY_S = 2e-3  # from the publisher to whoever fetches, through a router: milliseconds


def one_by_one(peer: Prefill, tickets: collections.deque[bytes], name: str, *what: object) -> Callable[[], None]:
    """What to call before each fetch: the lease that it is of is published, and its ticket comes, as in a pool."""

    def publish() -> None:
        tickets.extend(peer.ask("publish", name, *what)[0])
        time.sleep(TICKETS_WAY_S)

    return publish


def bench_blocks(peer: Prefill, secret: bytes, block_kib: int, megabytes: int, calls: int) -> list[dict]:
    """All ways, for one block size."""
    block_bytes, count = block_kib << 10, (megabytes << 10) // block_kib
    layout = layout_of(block_bytes, count)
    rng = np.random.default_rng(1)
    src_ids, dst_ids = (rng.permutation(count).astype(np.int32) for _ in range(2))
    arrays = {memory: allocate(layout, memory) for memory in ("shared", "private")}
    local = allocate(layout, "shared")["kv"]
    target = arrays["shared"]["kv"]
    plan = join([layout], layout)[0].plan({"full": src_ids}, {"full": dst_ids}, tokens=16 * count)
    prepared = PreparedPlan(plan)
    src_bases, dst_bases = bases([local.ctypes.data]), bases([target.ctypes.data])

    def gather(_: None) -> None:
        for chunk in plan.chunks(8 << 20):
            prepared.copy(chunk, src_bases, dst_bases)

    by_block, into_block = local.reshape(count, -1), target.reshape(count, -1)
    functions = {
        "ceiling: memcpy in one piece": lambda _: np.copyto(target, local),
        "ceiling: same kernel, one process": gather,
        "peer: NumPy index, one process": lambda _: into_block.__setitem__(dst_ids, by_block[src_ids]),
    }
    connectors = []
    for way, memory in WAYS.items():
        name = f"{way}-{block_kib}"
        peer.ask("register", name, layout, memory)
        tickets, _ = peer.ask("publish", name, src_ids, calls + 3)
        connector = kvxfer.Connector(f"decode-{way}", ways=(way,), secret=secret)
        connectors.append(connector)
        cache = connector.register(arrays[memory], layout, name=name)
        functions[f"kvxfer {way}"] = _fetcher(cache, collections.deque(tickets), dst_ids, way)
    results = timing.measure_together(functions, [None], calls=calls)
    for connector in connectors:
        connector.close()
    total = block_bytes * count
    plain = results["ceiling: same kernel, one process"].rate(total)
    return [
        {
            "block_kib": block_kib,
            "row": row,
            "gigabytes_per_s": timing_.rate(total),
            "low": total / timing_.high_s / 1e9,
            "high": total / timing_.low_s / 1e9,
            "of_plain_gather": timing_.rate(total) / plain,
        }
        for row, timing_ in results.items()
    ]


def _fetcher(cache: kvxfer.Cache, tickets: collections.deque, ids: np.ndarray, way: str):
    def fetch(_: None) -> None:
        stats = cache.fetch(tickets.popleft(), into={"full": ids}, timeout_s=60).wait()
        assert stats.way == way, stats

    return fetch


def bench_control(peer: Prefill, secret: bytes, layout: CacheLayout | None = None, memory: str = "shared") -> dict:
    """Publish plus fetch of one block, without its bytes to speak of."""
    layout = layout or layout_of(4096, 16)
    peer.ask("register", "control", layout, memory)
    tickets, publish_s = peer.ask("publish", "control", np.array([3]), CONTROL_ROUNDS)
    samples = []
    with kvxfer.Connector("decode-control", secret=secret) as connector:
        cache = connector.register(allocate(layout, memory), layout, name="control")
        for ticket in tickets:
            started = time.perf_counter()
            cache.fetch(ticket, into={"full": [5]}).wait()
            samples.append(time.perf_counter() - started)
    samples = sorted(samples[10:])  # the first dials
    fetch_p50 = statistics.median(samples)
    return {
        "publish_us": publish_s * 1e6,
        "fetch_p50_us": fetch_p50 * 1e6,
        "fetch_p99_us": samples[int(0.99 * len(samples))] * 1e6,
        "publish_plus_fetch_p50_us": (publish_s + fetch_p50) * 1e6,
    }


def bench_plan(num_blocks: int = 1_000_000, calls: int = 9) -> dict:
    """A plan of a million scattered blocks."""
    layout = layout_of(4096, num_blocks)
    rng = np.random.default_rng(2)
    joined = join([layout], layout)[0]
    ids = [rng.permutation(num_blocks) for _ in range(2)]
    result = timing.measure(
        lambda _: PreparedPlan(joined.plan({"full": ids[0]}, {"full": ids[1]}, tokens=16 * num_blocks)),
        [None],
        calls=calls,
    )
    return {"blocks": num_blocks, "median_ms": result.median_s * 1e3, "high_ms": result.high_s * 1e3}


def table(rows: list[dict], control: dict, plan: dict) -> str:
    """What a person reads."""
    lines = [f"{'block':>7}  {'what':<36} {'GB/s':>7} {'quartiles':>15} {'of plain':>9}"]
    for row in rows:
        spread = f"{row['low']:.2f}..{row['high']:.2f}"
        lines.append(
            f"{row['block_kib']:>4} KiB  {row['row']:<36} {row['gigabytes_per_s']:>7.2f} {spread:>15} "
            f"{row['of_plain_gather']:>9.2f}"
        )
    lines.append("")
    lines.append(
        f"one block: publish {control['publish_us']:.0f} us, fetch p50 {control['fetch_p50_us']:.0f} us, "
        f"p99 {control['fetch_p99_us']:.0f} us"
    )
    lines.append(f"plan of {plan['blocks']:,} blocks: {plan['median_ms']:.1f} ms")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--megabytes", type=int, default=256, help="bytes moved by a call (default %(default)s MiB)")
    parser.add_argument("--calls", type=int, default=15, help="measured calls of each row (default %(default)s)")
    args = parser.parse_args()
    secret = secrets.token_bytes(32)
    peer = Prefill(secret)
    rows = [row for kib in BLOCK_KIB for row in bench_blocks(peer, secret, kib, args.megabytes, args.calls)]
    control, plan = bench_control(peer, secret), bench_plan()
    peer.pipe.close()
    print(table(rows, control, plan))
    if args.json:
        timing.save(args.json, timing.environment(), [{"rows": rows, "control": control, "plan": plan}])


if __name__ == "__main__":
    main()
