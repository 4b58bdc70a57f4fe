"""What staging costs the one who fills it, by how long ago the other end has read it: two processors, one process.

    python benchmarks/bench_staging.py [--json FILE] [--block-kib 64]

One thread fills chunks of staging, taking turns among so many of them, and another on another processor scatters each
before the next one is filled. Rates are by the processor time of the thread that fills. *In the caches* is an ordinary
gather, *past the caches* one that leaves nothing in them, *by the kernel* what a transport within a host does: a chunk
that was gathered elsewhere is written with process_vm_writev.

Whether two processors of a virtual machine share a core, and with it caches, may change from one second to the next;
rows take turns.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bench_shm
import timing

from kvxfer import _native
from kvxfer.kernels import PreparedPlan, bases
from kvxfer.plan import Chunk, join
from kvxfer.transfers.staging import CHUNK_BYTES

TOTAL = 256 << 20
SLOTS = (1, 2, 4, 8, 16)
HOWS = ("in the caches", "past the caches", "by the kernel")


class Copies:
    """Scattered blocks that go through staging to other scattered blocks."""

    def __init__(self, block_bytes: int) -> None:
        count = TOTAL // block_bytes
        layout = bench_shm.layout_of(block_bytes, count)
        rng = np.random.default_rng(1)
        ids = [rng.permutation(count).astype(np.int32) for _ in range(2)]
        plan = join([layout], layout)[0].plan({"full": ids[0]}, {"full": ids[1]}, tokens=16 * count)
        self._prepared, self._chunks = PreparedPlan(plan), list(plan.chunks(CHUNK_BYTES))
        self._arrays = [bench_shm.allocate(layout, "private")["kv"] for _ in range(2)]
        self._src, self._dst = (bases([array.ctypes.data]) for array in self._arrays)
        self._staging, self._outbox = (bench_shm.private(slots * CHUNK_BYTES) for slots in (max(SLOTS), 1))

    def fill_s(self, how: str, slots: int, _: None) -> float:
        """Processor seconds of filling `slots` chunks in turn until everything has gone through them."""
        filled, empty, spent = threading.Semaphore(0), threading.Semaphore(1), []

        def each_chunk(processor: int, wait: threading.Semaphore, work: Callable, then: threading.Semaphore) -> None:
            os.sched_setaffinity(0, {processor})
            for number, chunk in enumerate(self._chunks):
                wait.acquire()
                work(chunk, self._staging.ctypes.data + number % slots * CHUNK_BYTES)
                then.release()

        def fill(chunk: Chunk, address: int) -> None:
            spent.append(self._fill_s(how, chunk, address))

        def scatter(chunk: Chunk, address: int) -> None:
            self._prepared.scatter(chunk, address, self._dst)

        first, second, *_ = sorted(os.sched_getaffinity(0))
        ends = [(first, empty, fill, filled), (second, filled, scatter, empty)]
        threads = [threading.Thread(target=each_chunk, args=end) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(spent)

    def _fill_s(self, how: str, chunk: Chunk, address: int) -> float:
        if how != "by the kernel":
            past = how == "past the caches"
            return timing.thread_clock(lambda: self._prepared.gather(chunk, self._src, address, past_caches=past))
        self._prepared.gather(chunk, self._src, self._outbox.ctypes.data)
        run = np.array([[self._outbox.ctypes.data, address, chunk.wire_bytes]], np.uint64)
        return timing.thread_clock(lambda: _native.move_process_memory(os.getpid(), True, run.ctypes.data, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--block-kib", type=int, default=64, help="bytes of a block (default %(default)s KiB)")
    parser.add_argument("--calls", type=int, default=15, help="measured calls of each row (default %(default)s)")
    args = parser.parse_args()
    copies = Copies(args.block_kib << 10)
    cases = {(how, slots): functools.partial(copies.fill_s, how, slots) for how in HOWS for slots in SLOTS}
    results = timing.measure_together(cases, [None], calls=args.calls, clock=lambda call: call())
    rows = [
        {
            "how": how,
            "slots": slots,
            "gb_s": found.rate(TOTAL),
            "low": TOTAL / found.high_s / 1e9,
            "high": TOTAL / found.low_s / 1e9,
        }
        for (how, slots), found in results.items()
    ]
    for row in rows:
        spread = f"{row['low']:.1f}..{row['high']:.1f}"
        print(f"{row['how']:<16} {row['slots']:>3} chunks: {row['gb_s']:5.1f} GB/s of processor time, {spread}")
    if args.json:
        timing.save(args.json, timing.environment(block_kib=args.block_kib), rows)


if __name__ == "__main__":
    main()
