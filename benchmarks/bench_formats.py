"""Speed of every wire format on this CPU: gather and pack, unpack and scatter, against memcpy of the same
bytes.

    python benchmarks/bench_formats.py [--json FILE] [--docs docs/formats.md] [--megabytes 64] [--calls 15]

Blocks of a bf16 cache (16 tokens, 8 KV heads of 128) are scattered at random. Bytes are those of the cache,
counted once; the ratio is to a memcpy of as many bytes in one piece, in the same run, taking turns call by call.
One thread's work is timed by its processor time, the scaling to two threads by the best wall time of each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import tables
import timing

from kvxfer import formats, kernels
from kvxfer.errors import InvalidRequest
from kvxfer.formats import elements
from kvxfer.layout import CacheLayout

NAMES = (
    "raw",
    "fp8_e4m3",
    "fp8_e4m3:tensor",
    "mxfp8",
    "nvfp4",
    "nvfp4:four_over_six",
    "mxfp4",
    "mxfp4:hadamard",
    "int4",
    "int4:asym",
    "mixed",
)
ISAS = ("avx512", "avx2", "portable")
HEAD_DIM = 128


class Caches:
    """One set of buffers: a filled source cache, a destination cache, and room for the packed bytes."""

    def __init__(self, layout: CacheLayout, seed: int) -> None:
        nbytes = layout.regions[0].nbytes
        values = np.random.default_rng(seed).standard_normal(nbytes // 2).astype(np.float32)
        self.src = elements.to_bf16(values).view(np.uint8)
        self.dst = np.full(nbytes, 1, np.uint8)  # touched, so that no page is made while the clock runs
        self.wire = np.full(nbytes + (1 << 20), 1, np.uint8)
        self.src_bases, self.dst_bases = (kernels.bases([a.ctypes.data]) for a in (self.src, self.dst))


def bench(name: str, layout: CacheLayout, caches: list[Caches], calls: int) -> dict:
    """One format with the instruction set in use."""
    count = layout.groups[0].num_blocks
    rng = np.random.default_rng(2)
    (join,) = formats.join_packed([layout], layout, name)
    blocks = [{"full": rng.permutation(count)} for _ in range(2)]
    plan = join.plan(*blocks, tokens=count * 16)
    prepared = kernels.PreparedPackedPlan(plan)
    (chunk,) = plan.chunks(1 << 40)

    def pack(threads: int):
        return lambda c: prepared.pack(chunk, c.src_bases, c.wire.ctypes.data, threads=threads)

    def unpack(threads: int):
        return lambda c: prepared.unpack(chunk, c.wire.ctypes.data, c.dst_bases, threads=threads)

    for c in caches:
        pack(2)(c)  # what is unpacked are real packed bytes
    timings = timing.measure_together(
        {"memcpy": lambda c: np.copyto(c.dst, c.src), "pack": pack(1), "unpack": unpack(1)},
        caches,
        calls=calls,
        clock=timing.thread_clock,
    )
    threads = timing.measure_together(
        {f"{verb.__name__} {n}": verb(n) for verb in (pack, unpack) for n in (1, 2)}, caches, calls=calls
    )
    memcpy = timings["memcpy"].median_s
    return {
        "format": name,
        "isa": kernels.cpu_isa(),
        "cache_bytes": plan.nbytes,
        "wire_bytes": plan.wire_bytes,
        "memcpy_gb_s": timings["memcpy"].rate(plan.nbytes),
        "pack_gb_s": timings["pack"].rate(plan.nbytes),
        "unpack_gb_s": timings["unpack"].rate(plan.nbytes),
        "pack_to_memcpy": memcpy / timings["pack"].median_s,
        "unpack_to_memcpy": memcpy / timings["unpack"].median_s,
        "pack_scaling_2_threads": threads["pack 1"].best_s / threads["pack 2"].best_s,
        "unpack_scaling_2_threads": threads["unpack 1"].best_s / threads["unpack 2"].best_s,
        "timings": timings,
        "timings_by_threads": threads,
    }


def table(results: list[dict]) -> str:
    """The results as a Markdown table."""
    head = (
        "format",
        "instructions",
        "bits a value",
        "pack GB/s",
        "of memcpy",
        "unpack GB/s",
        "of memcpy",
        "2 threads: pack",
        "unpack",
    )
    rows = [
        (
            f"`{r['format']}`",
            r["isa"],
            f"{16 * r['wire_bytes'] / r['cache_bytes']:.3g}",
            f"{r['pack_gb_s']:.1f}",
            f"{r['pack_to_memcpy']:.2f}",
            f"{r['unpack_gb_s']:.1f}",
            f"{r['unpack_to_memcpy']:.2f}",
            f"x{r['pack_scaling_2_threads']:.2f}",
            f"x{r['unpack_scaling_2_threads']:.2f}",
        )
        for r in results
    ]
    return tables.markdown(head, rows)


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--docs", type=Path, help="put the table into this page")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument("--isa", nargs="*", default=list(ISAS))
    parser.add_argument("formats", nargs="*", default=list(NAMES))
    arguments = parser.parse_args()
    layout = CacheLayout.paged(
        layers=["0"],
        num_blocks=max(1, arguments.megabytes * 16),
        block_tokens=16,
        kv_heads=8,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
    )
    caches = [Caches(layout, seed) for seed in range(2)]
    results = []
    for isa in arguments.isa:
        try:
            kernels.choose_cpu_isa(isa)
        except InvalidRequest:
            print(f"this CPU has no {isa}", file=sys.stderr)
            continue
        results += [bench(name, layout, caches, arguments.calls) for name in arguments.formats]
    environment = timing.environment(numpy=np.__version__, megabytes=arguments.megabytes)
    print(table(results))
    if arguments.json:
        timing.save(arguments.json, environment, results)
    if arguments.docs:
        memcpy = sorted(r["memcpy_gb_s"] for r in results)[len(results) // 2]
        note = (
            f"{environment['cpu']}, {environment['system']}; memcpy {memcpy:.1f} GB/s (median of the runs); "
            f"{arguments.megabytes} MiB of bf16 cache, {arguments.calls} calls a row."
        )
        tables.replace(arguments.docs, "speed", f"{note}\n\n{table(results)}")


if __name__ == "__main__":
    main()
