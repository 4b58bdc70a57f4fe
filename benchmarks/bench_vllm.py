"""`vllm bench serve` against a prefill and a decode server on a CPU: ours, NixlConnector, and one server alone.

    python benchmarks/bench_vllm.py --json FILE [--plot FILE] [--page FILE] [--requests 120] [--rate 4]
    python benchmarks/bench_vllm.py --json FILE --plot FILE --only-show

A small model in float32 behind vllm-router, short and long prompts mixed, every variant with the same ones. Servers
and client share the machine: this says whether disaggregation holds up, and at what cost, not how fast a network is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import tables
import timing

from tests.e2e.vllm import connectors, models
from tests.e2e.vllm.environment import COMMON, Ports, for_server
from tests.e2e.vllm.servers import FOR_CPU, Server, launch_line, program, with_options

VARIANTS = ("kvxfer", "nixl", "alone")
METRICS = ("ttft", "tpot", "e2el")
PERCENTILES = (50, 95, 99)
MEAN_INPUT_TOKENS, SPREAD, OUTPUT_TOKENS = 800, 0.9, 32
"""Prompts of 80 to 1,520 tokens."""


def start(stack: ExitStack, variant: str, model: Path, logs: Path) -> tuple[str, list[Server]]:
    """The servers of a variant, ready; and where clients send their requests."""
    ports = Ports(6)
    stack.callback(ports.close)
    p, d, r, metrics, *sides = range(ports.first, ports.first + 6)

    def serve(name: str, words: Sequence[str], port: int, **environment: Any) -> Server:
        log = logs / f"{variant}-{name}.log"
        server = Server(name, words, log, port=port, environment=for_server(**environment))
        stack.callback(server.kill)
        return server

    if variant == "alone":
        words = [program("vllm"), "serve", str(model), "--port", str(p), *FOR_CPU]
        return f"http://127.0.0.1:{p}", [serve("server", words, p, core=0).ready()]
    servers = []
    for core, (name, page_port, port) in enumerate((("prefill", "8100", p), ("decode", "8200", d))):
        words = launch_line(name, {"MODEL": str(model), page_port: str(port)}) + FOR_CPU
        side = None
        if variant == "nixl":
            place, side = words.index("--kv-transfer-config") + 1, sides[core]
            role = json.loads(words[place])["kv_role"]
            words[place] = json.dumps(connectors.nixl() | {"kv_role": role})
        else:
            words = with_options(words, lease_s=120.0)
        servers.append(serve(name, words, port, core=core, nixl_port=side))
    router = launch_line("router", {"8000": str(r), "8100": str(p), "8200": str(d)})
    servers.append(serve("router", [*router, "--log-level", "warning", "--prometheus-port", str(metrics)], r, core=0))
    return f"http://127.0.0.1:{r}", [server.ready() for server in servers]


def load(url: str, model: Path, requests: int, rate: float) -> dict[str, Any]:
    """What `vllm bench serve` reports."""
    with tempfile.TemporaryDirectory() as folder:
        # fmt: off
        subprocess.run(
            [
                program("vllm"), "bench", "serve", "--backend", "vllm", "--base-url", url, "--endpoint",
                "/v1/completions", "--model", "m", "--tokenizer", str(model), "--dataset-name", "random",
                "--random-input-len", str(MEAN_INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS),
                "--random-range-ratio", json.dumps({"input": SPREAD, "output": 0.0}),
                "--num-prompts", str(requests), "--request-rate", str(rate), "--seed", "1",
                "--percentile-metrics", ",".join(METRICS), "--metric-percentiles", ",".join(map(str, PERCENTILES)),
                "--ignore-eos", "--temperature", "0", "--disable-tqdm",
                "--save-result", "--result-dir", folder, "--result-filename", "result.json",
            ],
            check=True,
            env=for_server(core=0) | COMMON,
        )
        # fmt: on
        return json.loads((Path(folder) / "result.json").read_text())


def measure(variant: str, model: Path, logs: Path, requests: int, rate: float) -> dict[str, Any]:
    """One variant: percentiles in milliseconds."""
    with ExitStack() as stack:
        url, servers = start(stack, variant, model, logs)
        load(url, model, 4, rate)  # connections, and what is computed once
        before = servers[0].metric("vllm:prompt_tokens_total")
        result = load(url, model, requests, rate)
        row: dict[str, Any] = {
            "variant": variant,
            "completed": result["completed"],
            "failed": result.get("failed", requests - result["completed"]),
            "prompt_tokens_through_first_server": servers[0].metric("vllm:prompt_tokens_total") - before,
        }
        if variant != "alone":
            fetched = servers[1].metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
            row["prompt_tokens_fetched_with_warm_up"] = fetched
        for metric in METRICS:
            for percentile in PERCENTILES:
                row[f"{metric}_p{percentile}_ms"] = result[f"p{percentile}_{metric}_ms"]
        return row


def plot(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Bars: a panel a metric, a group a percentile, a bar a variant."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvxfer"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for panel, metric, title in zip(panels, METRICS, ("Time to first token", "Time per output token"), strict=False):
        for index, row in enumerate(results):
            places = [place + 0.27 * (index - (len(results) - 1) / 2) for place in range(len(PERCENTILES))]
            heights = [row[f"{metric}_p{percentile}_ms"] for percentile in PERCENTILES]
            panel.bar(places, heights, 0.25, label=row["variant"])
        panel.set_xticks(range(len(PERCENTILES)), [f"p{percentile}" for percentile in PERCENTILES])
        panel.set_title(title, fontsize=10)
        panel.set_ylabel("ms")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def table(content: dict[str, Any]) -> str:
    """The same numbers in Markdown, and what they were measured on."""
    percentiles = " / ".join(f"p{percentile}" for percentile in PERCENTILES)
    rows = [
        [row["variant"]]
        + [" / ".join(f"{row[f'{m}_p{p}_ms']:.1f}" for p in PERCENTILES) for m in METRICS]
        + [f"{row['completed']} of {row['completed'] + row['failed']}"]
        for row in content["results"]
    ]
    head = ["", f"first token, ms: {percentiles}", f"each further token: {percentiles}", f"whole answer: {percentiles}"]
    measured_on = ", ".join(f"{key} {value}" for key, value in content["environment"].items())
    return f"{tables.markdown([*head, 'answered'], rows)}\n\nMeasured on: {measured_on}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="write the results here")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", type=Path, help="page of the documentation that gets the table")
    parser.add_argument("--only-show", action="store_true", help="plot and table of what is in the JSON file already")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, at random moments")
    options = parser.parse_args()
    if not options.only_show:
        model, logs = models.folder("gqa"), Path(tempfile.mkdtemp(prefix="bench-vllm-"))
        print(f"logs: {logs}", flush=True)
        results: list[dict[str, Any]] = []
        load_before = os.getloadavg()[0]
        for variant in options.variants:
            began = time.monotonic()
            results.append(measure(variant, model, logs, options.requests, options.rate))
            print(json.dumps(results[-1]), f"{time.monotonic() - began:.0f} s", flush=True)
        settings = {
            "model": "4 layers, 2 KV heads of 64, float32",
            "requests": options.requests,
            "rate_per_s": options.rate,
            "input_tokens": f"{MEAN_INPUT_TOKENS} +-{SPREAD:.0%}",
            "output_tokens": OUTPUT_TOKENS,
            "cores": os.cpu_count(),
            "load_average": f"{load_before:.1f} at the start, {os.getloadavg()[0]:.1f} at the end",
        }
        timing.save(options.json, timing.environment(**settings), results)
    content = json.loads(options.json.read_text())
    if options.plot:
        plot(options.plot, content["results"])
    if options.page:
        tables.replace(options.page, "latency", table(content))


if __name__ == "__main__":
    main()
