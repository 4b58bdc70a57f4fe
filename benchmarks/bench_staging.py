"""What staging costs the one who fills it, by how long ago the other end has read it: two processors, one process.

    python benchmarks/bench_staging.py [--json FILE] [--block-kib 64]

One thread gathers chunks into slots of staging, taking turns, and another on another processor scatters each before
the next one is filled. Rates are by the processor time of each thread. *In the caches* is an ordinary copy, *past the
caches* one that leaves nothing in them, *by the kernel* what a transport within a host does: a gathered chunk is
written from elsewhere with process_vm_writev.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
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
CALLS = 5


def rates(block_bytes: int, slots: int, how: str) -> tuple[float, float]:
    """GB/s of processor time: filling staging of `slots` chunks, and scattering out of it."""
    count = TOTAL // block_bytes
    layout = bench_shm.layout_of(block_bytes, count)
    rng = np.random.default_rng(1)
    ids = [rng.permutation(count).astype(np.int32) for _ in range(2)]
    plan = join([layout], layout)[0].plan({"full": ids[0]}, {"full": ids[1]}, tokens=16 * count)
    prepared, chunks = PreparedPlan(plan), list(plan.chunks(CHUNK_BYTES))
    source, target = (bench_shm.allocate(layout, "private")["kv"] for _ in range(2))
    src, dst = bases([source.ctypes.data]), bases([target.ctypes.data])
    staging, outbox = bench_shm.private(slots * CHUNK_BYTES), bench_shm.private(CHUNK_BYTES)
    filled, empty = threading.Semaphore(0), threading.Semaphore(1)
    seconds = {"fill": 0.0, "scatter": 0.0}

    def timed(what: str, call: Callable[[], None]) -> None:
        started = time.thread_time()
        call()
        seconds[what] += time.thread_time() - started

    def fill(chunk: Chunk, address: int) -> None:
        if how != "by the kernel":
            past = how == "past the caches"
            timed("fill", lambda: prepared.gather(chunk, src, address, past_caches=past))
            return
        prepared.gather(chunk, src, outbox.ctypes.data)
        run = np.array([[outbox.ctypes.data, address, chunk.wire_bytes]], np.uint64)
        timed("fill", lambda: _native.move_process_memory(os.getpid(), True, run.ctypes.data, 1))

    def each_slot(processor: int, wait: threading.Semaphore, work: Callable, then: threading.Semaphore) -> None:
        os.sched_setaffinity(0, {processor})
        for number, chunk in enumerate(chunks * CALLS):
            wait.acquire()
            work(chunk, staging.ctypes.data + number % slots * CHUNK_BYTES)
            then.release()

    def scatter(chunk: Chunk, address: int) -> None:
        timed("scatter", lambda: prepared.scatter(chunk, address, dst))

    first, second, *_ = sorted(os.sched_getaffinity(0))
    ends = [(first, empty, fill, filled), (second, filled, scatter, empty)]
    threads = [threading.Thread(target=each_slot, args=end) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(CALLS * TOTAL / spent / 1e9 for spent in seconds.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--block-kib", type=int, default=64, help="bytes of a block (default %(default)s KiB)")
    args = parser.parse_args()
    rows = []
    for how in HOWS:
        for slots in SLOTS:
            fill, scatter = rates(args.block_kib << 10, slots, how)
            rows.append({"how": how, "slots": slots, "fill_gb_s": fill, "scatter_gb_s": scatter})
            print(f"{how:<16} {slots:>3} chunks of staging: fill {fill:5.2f} GB/s, scatter {scatter:5.2f}")
    if args.json:
        timing.save(args.json, timing.environment(block_kib=args.block_kib), rows)


if __name__ == "__main__":
    main()
