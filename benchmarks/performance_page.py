"""Fills docs/performance.md from the JSON in benchmarks/results: tables and what they were measured on.

python benchmarks/performance_page.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import tables

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
SMS = (4, 8, 16, 32, 64, 132)
VARIANT = "768x8"


def load(name: str) -> tuple[dict, list[dict]]:
    """The environment and the results of one file."""
    content = json.loads((RESULTS / name).read_text())
    return content["environment"], content["results"]


def shm() -> str:
    """Host memory between two processes."""
    environment, [result] = load("shm.json")
    kinds = list(dict.fromkeys(row["row"] for row in result["rows"]))
    sizes = list(dict.fromkeys(row["block_kib"] for row in result["rows"]))
    cells = {(row["row"], row["block_kib"]): row for row in result["rows"]}
    body = [
        [kind]
        + [
            f"{cells[kind, size]['gigabytes_per_s']:.2f} ({cells[kind, size]['low']:.2f} to "
            f"{cells[kind, size]['high']:.2f}), x{cells[kind, size]['of_plain_gather']:.2f}"
            for size in sizes
        ]
        for kind in kinds
    ]
    control, plan = result["control"], result["plan"]
    return (
        tables.markdown(
            ["GB/s: median (quartiles), ratio to the same kernel"] + [f"{s} KiB blocks" for s in sizes], body
        )
        + f"\n\nOne block: publish {control['publish_us']:.0f} us, fetch p50 {control['fetch_p50_us']:.0f} us, "
        f"p99 {control['fetch_p99_us']:.0f} us. A plan of {plan['blocks']:,} blocks: {plan['median_ms']:.1f} ms.\n\n"
        f"{_where(environment)}"
    )


def cuda_copy() -> str:
    """The copy kernel on GPUs."""
    environment, results = load("h200x2/cuda_copy.json")
    ceilings = {r["way"]: r["gb_s"] for r in results if r["what"] == "ceiling: one piece"}
    sections = []
    for way, title in (("push", "into the peer (push)"), ("pull", "out of the peer (pull)"), ("local", "within a GPU")):
        rows = [r for r in results if r["what"] == "copy" and r["way"] == way and r.get("variant", VARIANT) == VARIANT]
        cells = {(r["piece"], r["max_sms"]): r["gb_s"] for r in rows}
        pieces = sorted({r["piece"] for r in rows})
        body = [[f"{piece:,} B"] + [f"{cells[piece, sms]:.0f}" for sms in SMS] for piece in pieces]
        peers = [r for r in results if r["what"].startswith("peer") and r["way"] == way]
        others = "; ".join(f"{r['what'].removeprefix('peer: ')} {r['piece']:,} B {r['gb_s']:.1f}" for r in peers)
        sections.append(
            f"**{title}**, GB/s; one piece of as many bytes: {ceilings[way]:.0f}. Others on the same blocks: {others}."
            "\n\n" + tables.markdown(["scattered pieces"] + [f"{sms} SMs" for sms in SMS], body)
        )
    return "\n\n".join(sections) + f"\n\n{_where(environment)}"


def cuda_formats() -> str:
    """Formats on a GPU."""
    environment, results = load("h200x2/cuda_formats.json")
    ceilings = [r for r in results if r["what"].startswith("ceiling")]
    rows = [r for r in results if r.get("max_sms") == SMS[-1]]
    cells = {(r["wire"], r["cache"], r["what"]): r["tb_s"] for r in rows}
    ways = list(dict.fromkeys(r["what"] for r in rows))
    body = [
        [f"`{wire}`", cache] + [f"{cells[wire, cache, way]:.2f}" for way in ways]
        for wire, cache in dict.fromkeys((r["wire"], r["cache"]) for r in rows)
    ]
    best = ", ".join(f"{r['what'].removeprefix('ceiling: ')} {r['tb_s']:.2f}" for r in ceilings)
    return (
        tables.markdown(["wire format", "cache", *ways], body) + f"\n\nCeilings, TB/s: {best}.\n\n{_where(environment)}"
    )


def cuda_ipc() -> str:
    """Whole fetches between GPUs of two processes."""
    environment, [result] = load("h200x2/cuda_ipc.json")
    body = [
        [
            f"{row['block_kib']} KiB",
            row["row"],
            f"{row['gigabytes_per_s']:.0f} ({row['low']:.0f} to {row['high']:.0f})",
            f"{row['of_ceiling']:.2f}",
        ]
        for row in result["rows"]
    ]
    control = result["control"]
    return (
        tables.markdown(["blocks", "", "GB/s: median (quartiles)", "of one plain copy"], body)
        + f"\n\nOne plain copy: {result['ceiling']['gigabytes_per_s']:.0f} GB/s. One block: fetch p50 "
        f"{control['fetch_p50_us']:.0f} us, p99 {control['fetch_p99_us']:.0f} us.\n\n{_where(environment)}"
    )


def _where(environment: dict) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in environment.items() if value not in ("unknown", ""))
    return f"Measured on: {shown}."


def main() -> None:
    for name, make in (("shm", shm), ("cuda-copy", cuda_copy), ("cuda-formats", cuda_formats), ("cuda-ipc", cuda_ipc)):
        tables.replace(PAGE, name, make())


if __name__ == "__main__":
    main()
