"""How long a fetch takes while the publisher's main thread holds the GIL.

    python benchmarks/bench_gil.py [--json FILE] [--fetches 1000] [--ways mapped direct packed]

A prefill process publishes leases of one block; this process fetches them one by one: first with the prefill process at
rest, then with its main thread in calls that hold the GIL for tens of milliseconds each. Interpreters hand the GIL over
between bytecodes only, so nothing of the publisher's Python runs during such a call.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import timing
from processes import Process, Side


def fetch_times(prefill: Process, decode: Side, fetches: int, held: bool) -> np.ndarray:
    """Seconds of each fetch. Fetches come in rounds, so that the GIL is held during all of them."""
    seconds: list[float] = []
    while len(seconds) < fetches:
        tickets = [prefill.publish([block % 64]) for block in range(100)]
        prefill.post("hold_gil", 3.0 if held else 0.0)
        begun = time.monotonic()
        for ticket in tickets:
            if held and time.monotonic() - begun > 2.5:
                break
            started = time.perf_counter()
            decode.cache.fetch(ticket, into={"full": [1]}).wait(30)
            seconds.append(time.perf_counter() - started)
        prefill.answer()
    return np.array(seconds[:fetches])


def summary(seconds: np.ndarray) -> dict[str, float]:
    """Percentiles in microseconds."""
    p50, p90, p99 = np.quantile(seconds, [0.5, 0.9, 0.99]) * 1e6
    return {"p50_us": round(p50, 1), "p90_us": round(p90, 1), "p99_us": round(p99, 1)}


def measure(way: str, fetches: int) -> dict[str, object]:
    """One way: quiet, held, and the ratios."""
    shared = way == "mapped"
    prefill, decode = Process("prefill", fill=1, shared=shared), Side("decode", ways=(way,), shared=shared)
    try:
        fetch_times(prefill, decode, 100, held=False)  # warm
        quiet, held = (summary(fetch_times(prefill, decode, fetches, held)) for held in (False, True))
    finally:
        decode.close()
        prefill.discard()
    return {
        "quiet": quiet,
        "gil_held": held,
        "p50_ratio": round(held["p50_us"] / quiet["p50_us"], 2),
        "p99_ratio": round(held["p99_us"] / quiet["p99_us"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fetches", type=int, default=1000)
    parser.add_argument("--ways", nargs="+", default=["mapped", "direct", "packed"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    print(f"{options.fetches} fetches of one block; microseconds")
    print(f"{'way':<10}{'publisher':<12}{'p50':>10}{'p90':>10}{'p99':>10}{'p50 ratio':>12}{'p99 ratio':>12}")
    results = []
    for way in options.ways:
        result = measure(way, options.fetches)
        results.append({"way": way, "fetches": options.fetches, **result})
        for label, key in (("at rest", "quiet"), ("holds GIL", "gil_held")):
            cells = "".join(f"{result[key][name]:>10.1f}" for name in ("p50_us", "p90_us", "p99_us"))
            ratios = f"{result['p50_ratio']:>12.2f}{result['p99_ratio']:>12.2f}" if key == "gil_held" else ""
            print(f"{way:<10}{label:<12}{cells}{ratios}")
    if options.json:
        timing.save(options.json, timing.environment(), results)


if __name__ == "__main__":
    main()
