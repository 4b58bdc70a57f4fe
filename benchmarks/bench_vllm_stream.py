"""From prefill's end to decode's first token, with a prompt handed over at its end and while it is computed.

    python benchmarks/bench_vllm_stream.py --json FILE [--page FILE] [--tokens 1537] [--chunk 256] [--calls 6]
    python benchmarks/bench_vllm_stream.py --json FILE --page FILE --only-show

SmolLM2-135M in float32, a prefill and a decode server on one core each. This script is the front end: both engines are
asked at once where the prompt is streamed, and decode with prefill's answer where it is not. Prompts take turns. The
ceiling is the same prompt once more, in decode's own cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import tables
import timing

from kvxfer.vllm.front import for_decode, for_prefill
from tests.e2e.vllm import models
from tests.e2e.vllm.engine import TO_PREFILL
from tests.e2e.vllm.environment import Ports, for_server
from tests.e2e.vllm.servers import FOR_CPU, Server, launch_line, with_options

VOCABULARY = (1000, 40000)
PARTS = "vllm:kvxfer_streamed_parts_total"
BYTES = "vllm:kvxfer_fetch_bytes_sum"


class Pair:
    """Two servers that stream when they are asked to, with a handful of ways to take a prompt through them."""

    def __init__(self, stack: ExitStack, chunk: int) -> None:
        ports, logs = Ports(4), Path(tempfile.mkdtemp(prefix="bench-vllm-stream-"))
        stack.callback(ports.close)
        print(f"logs: {logs}", flush=True)
        model = str(models.folder("smollm2"))
        self.endpoint = f"tcp://127.0.0.1:{ports.first + 2}"

        def serve(name: str, page_port: str, core: int, *more: str, **options: Any) -> Server:
            port = ports.first + core
            words = with_options(launch_line(name, {"MODEL": model, page_port: str(port)}), stream=True, **options)
            log, environment = logs / f"{name}.log", for_server(core=core)
            server = Server(name, [*words, *FOR_CPU, *more], log, port=port, environment=environment)
            stack.callback(server.kill)
            return server

        self.prefill = serve("prefill", "8100", 0, "--max-num-batched-tokens", str(chunk), port=ports.first + 2)
        self.decode = serve("decode", "8200", 1)
        self.prefill.ready(), self.decode.ready()

    def _ask(self, server: Server, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """When the answer was there, and the answer."""
        answer = server.post("/v1/completions", body)
        return time.perf_counter(), answer

    def at_the_end(self, body: dict[str, Any]) -> tuple[float, float]:
        """When prefill's and decode's answers were there."""
        prefilled, answer = self._ask(self.prefill, body | {"kv_transfer_params": TO_PREFILL})
        return prefilled, self._ask(self.decode, body | {"kv_transfer_params": answer["kv_transfer_params"]})[0]

    def streamed(self, body: dict[str, Any]) -> tuple[float, float]:
        """The same, with both asked at once."""
        key = uuid.uuid4().hex
        with ThreadPoolExecutor(2) as clients:
            prefilled = clients.submit(self._ask, self.prefill, for_prefill(body, key))
            decoded = clients.submit(self._ask, self.decode, for_decode(body, key, self.endpoint))
            return prefilled.result()[0], decoded.result()[0]


def measure(tokens: int, chunk: int, calls: int) -> list[dict[str, Any]]:
    """A row for each way."""
    generator = random.Random(0)

    def body(length: int) -> dict[str, Any]:
        prompt = [generator.randrange(*VOCABULARY) for _ in range(length)]
        return {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}

    samples: dict[str, list[tuple[float, float]]] = {"at the end": [], "streamed": []}
    moved: dict[str, dict[str, float]] = {}
    cached = []
    with ExitStack() as stack:
        pair = Pair(stack, chunk)
        ways = {"at the end": pair.at_the_end, "streamed": pair.streamed}
        for way in ways.values():  # connections, and what is computed once
            way(body(2 * chunk))
        for way in [*ways] * calls:
            request, began = body(tokens), time.perf_counter()
            prefilled, decoded = ways[way](request)
            samples[way].append((decoded - prefilled, decoded - began))
            asked = time.perf_counter()
            cached.append(pair._ask(pair.decode, request)[0] - asked)
            print(f"{way}: {samples[way][-1][0] * 1e3:.1f} ms of {samples[way][-1][1]:.2f} s", flush=True)
        time.sleep(2)  # engines report now and then
        totals = {name: pair.decode.metric(name) for name in (PARTS, BYTES)}
    moved["streamed"] = {"parts": totals[PARTS] / (calls + 1)}
    moved["at the end"] = {"parts": 0.0}
    rows = [
        {
            "way": way,
            "after_prefill_ms": [1e3 * after for after, _ in taken],
            "first_token_ms": [1e3 * whole for _, whole in taken],
            "bytes_in_all": totals[BYTES],
            **moved[way],
        }
        for way, taken in samples.items()
    ]
    return [
        *rows,
        {"way": "in decode's cache", "after_prefill_ms": [1e3 * seconds for seconds in cached], "parts": 0.0},
    ]


def table(content: dict[str, Any]) -> str:
    """The numbers in Markdown, and what they were measured on."""

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    rows = [
        [
            row["way"],
            spread(row["after_prefill_ms"]),
            spread(row["first_token_ms"]) if "first_token_ms" in row else "-",
            f"{row['parts']:.1f}",
        ]
        for row in content["results"]
    ]
    head = ["handed over", "prefill's answer to first token, ms", "request to first token, ms", "parts a prompt"]
    measured_on = ", ".join(f"{key} {value}" for key, value in content["environment"].items())
    return f"{tables.markdown(head, rows)}\n\nMedian (least to most). Measured on: {measured_on}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    parser.add_argument("--page", type=Path, help="page of the documentation that gets the table")
    parser.add_argument("--only-show", action="store_true", help="the table of what is in the JSON file already")
    parser.add_argument(
        "--tokens", type=int, default=1537, help="whole blocks of 128 and one, so that the cache serves all but that"
    )
    parser.add_argument("--chunk", type=int, default=256, help="tokens that prefill computes in a step")
    parser.add_argument("--calls", type=int, default=6)
    options = parser.parse_args()
    if not options.only_show:
        load_before = os.getloadavg()[0]
        results = measure(options.tokens, options.chunk, options.calls)
        settings = {
            "model": "SmolLM2-135M, float32",
            "prompt_tokens": options.tokens,
            "chunk_tokens": options.chunk,
            "calls": options.calls,
            "cores": os.cpu_count(),
            "load_average": f"{load_before:.1f} at the start, {os.getloadavg()[0]:.1f} at the end",
        }
        timing.save(options.json, timing.environment(**settings), results)
    content = json.loads(options.json.read_text())
    if options.page:
        tables.replace(options.page, "streaming", table(content))
    print(table(content))


if __name__ == "__main__":
    main()
