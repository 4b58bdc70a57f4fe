"""Launches the kernels whose hardware counters are worth reading, a few times each, and little else:

    ncu --clock-control none --section SpeedOfLight --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis \
        --section WarpStateStats --section Occupancy python benchmarks/kernel_counters.py [--gpus 2] [--megabytes 1024]

NVFP4 pack within a GPU and, with a second one, into its memory; unpack; the copy of scattered blocks of 4 KiB within a
GPU on all multiprocessors, and into the other on 16.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_cuda_formats
from bench_cuda_copy import Clock, Pools, scattered

from kvxfer import cuda

TWICE = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2))
    parser.add_argument("--megabytes", type=int, default=1024, help="of bf16, or copied")
    options = parser.parse_args()
    nbytes, gpus = options.megabytes << 20, options.gpus
    if gpus > 1:
        cuda.enable_peer_access(0, 1)
        cuda.enable_peer_access(1, 0)
    caches = bench_cuda_formats.Caches(nbytes, gpus)
    bench_cuda_formats.Bench(caches, TWICE, gpus > 1).format("nvfp4", (0,))
    clock, pools = Clock(0), Pools(2 * nbytes, gpus)
    for gpu in range(gpus):
        plan = scattered(4096, nbytes, pools.nbytes)
        bases = [pools.bases(side, at, 1, pools.nbytes) for side, at in (("src", 0), ("dst", gpu))]
        with cuda.PreparedCudaPlan(plan, device=0, src_bases=bases[0], dst_bases=bases[1]) as prepared:
            prepared.upload(stream=clock.stream.address)
            for _ in range(TWICE):
                prepared.copy(list(plan.chunks(1 << 62)), stream=clock.stream.address, max_sms=16 * gpu)
            clock.stream.synchronise()


if __name__ == "__main__":
    main()
