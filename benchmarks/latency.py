"""Latencies that `vllm bench serve` reports, as a table and as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tables

METRICS = {"ttft": "first token", "tpot": "each further token", "e2el": "whole answer"}
PERCENTILES = (50, 95, 99)


def measured(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of variants that ran."""
    return [row for row in results if "error" not in row]


def table(content: dict[str, Any]) -> str:
    """The numbers of a result file in Markdown, which variants failed, and what they were measured on."""
    percentiles = " / ".join(f"p{percentile}" for percentile in PERCENTILES)
    rows = [
        [row["variant"]]
        + [" / ".join(f"{row[f'{metric}_p{p}_ms']:.1f}" for p in PERCENTILES) for metric in METRICS]
        + [_transfer(row), f"{row['completed']} of {row['completed'] + row['failed']}"]
        for row in measured(content["results"])
    ]
    first, *others = METRICS.values()
    head = ["", f"{first}, ms: {percentiles}", *(f"{name}: {percentiles}" for name in others)]
    failed = [row["variant"] for row in content["results"] if "error" in row]
    measured_on = ", ".join(f"{key} {value}" for key, value in content["environment"].items())
    said = [f"Did not run: {', '.join(failed)}."] if failed else []
    made = tables.markdown([*head, "transfer, mean", "answered"], rows)
    return "\n\n".join([made, *said, f"Measured on: {measured_on}."])


def _transfer(row: dict[str, Any]) -> str:
    """What the connector itself says of a prompt's way."""
    return f"{1e3 * row['fetch_seconds'] / row['fetch_transfers']:.1f}" if row.get("fetch_transfers") else ""


def plot(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Bars: a panel a metric, a group a percentile, a bar a variant."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvxfer"
    from matplotlib import pyplot

    rows = measured(results)
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for panel, metric, title in zip(panels, METRICS, ("Time to first token", "Time per output token"), strict=False):
        for index, row in enumerate(rows):
            places = [place + 0.27 * (index - (len(rows) - 1) / 2) for place in range(len(PERCENTILES))]
            heights = [row[f"{metric}_p{percentile}_ms"] for percentile in PERCENTILES]
            panel.bar(places, heights, 0.25, label=row["variant"])
        panel.set_xticks(range(len(PERCENTILES)), [f"p{percentile}" for percentile in PERCENTILES])
        panel.set_title(title, fontsize=10)
        panel.set_ylabel("ms")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
