"""From prefill's end to decode's first token, with a prompt handed over at its end and while it is computed.

    python benchmarks/bench_vllm_stream.py --json FILE [--page FILE] [--tokens 1665] [--chunk 512] [--calls 6]
    python benchmarks/bench_vllm_stream.py --json FILE --shape qwen2.5-14b-kv --tokens 8193 32001 --chunk 8704
    python benchmarks/bench_vllm_stream.py --json FILE --page FILE --only-show

SmolLM2-135M in float32, with a core for each server; or a model of a `--shape` on GPUs, prefill on the first, decode on
the last. There are two prefill servers, of which one sends the last step's layers one by one; they take turns, and one
is idle while the other works. This script is the front end: both engines are asked at once where the prompt is
streamed, and decode with prefill's answer where it is not. The ceiling is the same prompt once more, in decode's own
cache.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
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
import vllm_engines

from kvxfer.vllm.front import for_decode, for_prefill
from tests.e2e.vllm import models
from tests.e2e.vllm.engine import TO_PREFILL
from tests.e2e.vllm.environment import Ports, for_server
from tests.e2e.vllm.servers import FOR_CPU, Server, launch_line, with_options

VOCABULARY = (1000, 40000)
COUNTERS = {
    "parts": "vllm:kvxfer_streamed_parts_total",
    "layerwise": "vllm:kvxfer_layerwise_prompts_total",
    "fetched_bytes": "vllm:kvxfer_fetch_bytes_sum",
    "given_up": "vllm:kvxfer_streams_given_up_total",
    "failed": "vllm:kvxfer_failed_fetches_total",
}
"""Of decode; a prompt's share of each."""
GPU_CACHE_BYTES = 8 << 30


class Pair:
    """Servers that stream when they are asked to, with a handful of ways to take a prompt through them."""

    def __init__(self, stack: ExitStack, logs: Path, shape: str | None, tokens: int, chunk: int) -> None:
        self._ports = Ports(5)
        stack.callback(self._ports.close)
        print(f"logs: {logs}", flush=True)
        self._stack, self._shape, self._tokens, self._logs = stack, shape, tokens, logs
        self._model = vllm_engines.write_model(vllm_engines.SHAPES[shape]) if shape else models.folder("smollm2")
        self._gpus = len(vllm_engines.gpus()) if shape else 0
        chunked = ["--max-num-batched-tokens", str(chunk)]
        endpoints = [self._ports.first + 3, self._ports.first + 4]
        self.endpoints = [f"tcp://127.0.0.1:{port}" for port in endpoints]
        # Ports of workers follow those of schedulers: only one of each engine is given.
        self.prefill = [
            self._serve("prefill", 0, chunked, "prefill", port=endpoints[0]),
            self._serve("prefill-by-layers", 0, chunked, "prefill", port=0, stream_layers=True),
        ]
        self.decode = self._serve("decode", 1, [], "decode")
        for server in (*self.prefill, self.decode):
            server.ready()
        self.endpoints[1] = _endpoint_in(self.prefill[1].log)

    def _serve(self, name: str, place: int, more: list[str], line: str, **options: Any) -> Server:
        port = self._ports.first + {"prefill": 0, "prefill-by-layers": 1, "decode": 2}[name]
        page_port = "8100" if line == "prefill" else "8200"
        words = with_options(
            launch_line(line, {"MODEL": str(self._model), page_port: str(port)}), stream=True, **options
        )
        if self._shape is None:
            words, environment = [*words, *FOR_CPU], for_server(core=place)
        else:
            words += ["--skip-tokenizer-init"]
            words += vllm_engines.launch_words(
                context_tokens=self._tokens + 1000,
                kv_cache_bytes=GPU_CACHE_BYTES,
                generates=line == "decode",
                on_cpu=False,
            )
            environment = vllm_engines.environment(min(place, self._gpus - 1), on_cpu=False)
        server = Server(name, [*words, *more], self._logs / f"{name}.log", port=port, environment=environment)
        self._stack.callback(server.kill)
        return server

    def _ask(self, server: Server, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """When the answer was there, and the answer."""
        answer = server.post("/v1/completions", body)
        return time.perf_counter(), answer

    def at_the_end(self, body: dict[str, Any]) -> tuple[float, float]:
        """When prefill's and decode's answers were there."""
        prefilled, answer = self._ask(self.prefill[0], body | {"kv_transfer_params": TO_PREFILL})
        return prefilled, self._ask(self.decode, body | {"kv_transfer_params": answer["kv_transfer_params"]})[0]

    def streamed(self, body: dict[str, Any], *, by_layers: bool = False) -> tuple[float, float]:
        """The same, with both asked at once."""
        key, number = uuid.uuid4().hex, int(by_layers)
        with ThreadPoolExecutor(2) as clients:
            prefilled = clients.submit(self._ask, self.prefill[number], for_prefill(body, key))
            decoded = clients.submit(self._ask, self.decode, for_decode(body, key, self.endpoints[number]))
            return prefilled.result()[0], decoded.result()[0]


def _endpoint_in(log: Path) -> str:
    """Where a server's log says that its scheduler listens."""
    return re.findall(r"peers reach this engine at (\S+)", log.read_text())[-1]


def measure(logs: Path, shape: str | None, lengths: list[int], chunk: int, calls: int) -> list[dict[str, Any]]:
    """A row for each length and way."""
    generator = random.Random(0)
    first, last = VOCABULARY if shape is None else (4, vllm_engines.SHAPES[shape]["vocab_size"])

    def body(length: int) -> dict[str, Any]:
        prompt = [generator.randrange(first, last) for _ in range(length)]
        return {"model": "m", "prompt": prompt, "max_tokens": 1, "ignore_eos": True} | (
            {} if shape is None else {"detokenize": False}
        )

    rows = []
    with ExitStack() as stack:
        pair = Pair(stack, logs, shape, max(lengths), chunk)
        ways = {
            "at the end": pair.at_the_end,
            "streamed": pair.streamed,
            "streamed, its end by layers": functools.partial(pair.streamed, by_layers=True),
        }
        for take in [*ways.values()] * 2:  # connections, and what is computed once
            take(body(max(lengths)))
        for tokens in lengths:
            cached = []
            for way, take in ways.items():
                samples, before = [], _counters(pair.decode)
                for _ in range(calls):
                    request, began = body(tokens), time.perf_counter()
                    prefilled, decoded = take(request)
                    samples.append((decoded - prefilled, decoded - began))
                    asked = time.perf_counter()
                    cached.append(pair._ask(pair.decode, request)[0] - asked)
                    print(
                        f"{tokens} tokens, {way}: {samples[-1][0] * 1e3:.1f} ms of {samples[-1][1]:.3f} s", flush=True
                    )
                rows.append(
                    {
                        "tokens": tokens,
                        "way": way,
                        "after_prefill_ms": [1e3 * after for after, _ in samples],
                        "first_token_ms": [1e3 * whole for _, whole in samples],
                    }
                    | {name: (now - before[name]) / calls for name, now in _counters(pair.decode).items()}
                )
            row = {
                "tokens": tokens,
                "way": "in decode's cache",
                "after_prefill_ms": [1e3 * seconds for seconds in cached],
            }
            rows.append(row)
    return rows


def _counters(decode: Server) -> dict[str, float]:
    time.sleep(2)  # engines report now and then
    return {name: decode.metric(metric) for name, metric in COUNTERS.items()}


def table(content: dict[str, Any]) -> str:
    """The numbers in Markdown, and what they were measured on."""

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    rows = [
        [
            f"{row['tokens']:,}",
            row["way"],
            spread(row["after_prefill_ms"]),
            spread(row["first_token_ms"]) if "first_token_ms" in row else "-",
            f"{row['parts']:.1f}" if "parts" in row else "-",
            f"{row['layerwise']:.1f}" if "parts" in row else "-",
        ]
        for row in content["results"]
    ]
    times = ["prefill's answer to first token, ms", "request to first token, ms"]
    head = ["prompt", "handed over", *times, "parts", "ends by layers"]
    measured_on = ", ".join(f"{key} {value}" for key, value in content["environment"].items())
    return f"{tables.markdown(head, rows)}\n\nMedian (least to most). Measured on: {measured_on}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    parser.add_argument("--page", type=Path, help="page of the documentation that gets the table")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="for the servers' logs")
    parser.add_argument("--only-show", action="store_true", help="the table of what is in the JSON file already")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1665],
        help="whole blocks of 128 and one, so that the cache serves all but that",
    )
    parser.add_argument("--chunk", type=int, default=512, help="tokens that prefill computes in a step")
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--shape", choices=list(vllm_engines.SHAPES), help="a model of random weights, on GPUs")
    options = parser.parse_args()
    if not options.only_show:
        load_before = os.getloadavg()[0]
        logs = options.logs or Path(tempfile.mkdtemp(prefix="bench-vllm-stream-"))
        logs.mkdir(parents=True, exist_ok=True)
        results = measure(logs, options.shape, options.tokens, options.chunk, options.calls)
        on = vllm_engines.versions(vllm_engines.gpus()) if options.shape else {}
        settings = on | {
            "model": f"{options.shape}, bfloat16" if options.shape else "SmolLM2-135M, float32",
            "chunk_tokens": options.chunk,
            "calls": options.calls,
            "cores": os.cpu_count(),
            "load_average": f"{load_before:.1f} at the start, {os.getloadavg()[0]:.1f} at the end",
        }
        timing.save(options.json, timing.environment(**settings), results)
    content = json.loads(options.json.read_text())
    if options.page:
        mark = "streaming-gpu" if "gpu" in content["environment"] else "streaming"
        tables.replace(options.page, mark, table(content))
    print(table(content))


if __name__ == "__main__":
    main()
