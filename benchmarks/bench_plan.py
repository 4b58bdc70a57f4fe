"""How long a plan takes: 101 regions x 8,000 fragmented blocks, equal and unequal block sizes.

``python benchmarks/bench_plan.py [--json FILE] [--regions N] [--blocks N] [--repeat N]``. Prints the median and
the spread in milliseconds of `Join.plan` (what every request pays) and of `join` (paid once per pair of
engines).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvxfer.layout import CacheLayout
from kvxfer.plan import join

sys.path.insert(0, str(Path(__file__).parent))
import timing


def layout(regions: int, num_blocks: int, block_tokens: int) -> CacheLayout:
    """One region a layer, Qwen2.5-14B's heads."""
    return CacheLayout.paged(
        layers=[f"layers.{i}" for i in range(regions)],
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
    )


def timed(action: Callable[[], object], repeat: int) -> dict[str, float]:
    """Milliseconds: median, least and most of `repeat` runs after one to warm up."""
    action()
    samples = []
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        samples.append((time.perf_counter() - start) * 1e3)
    return {"median_ms": statistics.median(samples), "min_ms": min(samples), "max_ms": max(samples)}


def cases(regions: int, blocks: int, repeat: int) -> list[dict[str, object]]:
    """One row for each pair of layouts."""
    rng = np.random.default_rng(0)
    rows = []
    for src_tokens, dst_tokens in ((16, 16), (16, 64), (64, 16), (16, 24)):
        tokens = blocks * 16 - 5
        src = layout(regions, 2 * blocks, src_tokens)
        dst = layout(regions, 2 * blocks, dst_tokens)
        lists = [
            {"full": rng.permutation(2 * blocks)[: -(-tokens // size)].astype(np.int32)}
            for size in (src_tokens, dst_tokens)
        ]
        (joined,) = join([src], dst)
        plan = joined.plan(*lists, tokens=tokens)
        rows.append(
            {
                "case": f"blocks of {src_tokens} -> {dst_tokens} tokens",
                "regions": regions,
                "blocks": blocks,
                "copies": plan.copies,
                "nbytes": plan.nbytes,
                "plan": timed(lambda j=joined, b=lists, n=tokens: j.plan(*b, tokens=n), repeat),
                "join": timed(lambda s=src, d=dst: join([s], d), max(3, repeat // 10)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--regions", type=int, default=101)
    parser.add_argument("--blocks", type=int, default=8000)
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    args = parser.parse_args()
    rows = cases(args.regions, args.blocks, args.repeat)
    print(f"{args.regions} regions x {args.blocks} blocks of 16 tokens, fragmented")
    print(f"{'case':<32}{'copies':>10}{'plan ms':>10}{'min..max':>18}{'join ms':>10}")
    for row in rows:
        plan, once = row["plan"], row["join"]
        spread = f"{plan['min_ms']:.2f}..{plan['max_ms']:.2f}"
        print(
            f"{row['case']:<32}{row['copies']:>10,}{plan['median_ms']:>10.2f}{spread:>18}{once['median_ms']:>10.2f}"
        )
    if args.json:
        timing.save(args.json, timing.environment(numpy=np.__version__), [{"rows": rows}])


if __name__ == "__main__":
    main()
