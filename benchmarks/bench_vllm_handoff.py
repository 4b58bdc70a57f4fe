"""A prompt's way from a prefill to a decode engine of vLLM: fresh and fragmented block pools, ours and NixlConnector.

    python benchmarks/bench_vllm_handoff.py --json FILE --logs FOLDER [--connectors kvxfer kvxfer:nvfp4:nccl nixl]

For two GPUs: engines of prefill on the first, of decode on the second. On one GPU they share it, which is right for the
host's part and for tokens, and says nothing of a link. All engines start at once; then one connector after the other is
measured. `--shape qwen2.5-14b-kv` has that model's cache and narrow feed-forward layers: three pairs fit on one GPU.

Weights are random and such that output depends on the context, so that tokens can be compared: with those of decode
alone, out of its own cache, where it computes in the same steps; and where it computes the whole prompt, which rounds
otherwise, unless VLLM_BATCH_INVARIANT=1 is set. Rows: the hand-off (decode's first token, with the prompt in prefill's
cache), its ceiling (the same prompt in decode's own cache), and the connector's own time for the bytes.
`--shape tiny --cpu` checks the script; `--tokens-only` leaves the rows out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import timing
import vllm_engines

from tests.e2e.vllm import connectors
from tests.e2e.vllm.engine import TO_PREFILL, Answer
from tests.e2e.vllm.environment import Ports
from tests.e2e.vllm.servers import Server, program

COMPARED_TOKENS = 16
CHURN_CLIENTS = 64
THROUGHPUT_CLIENTS = 4

SIZES: dict[str, dict[str, Any]] = {
    "qwen2.5-14b": {
        "lengths": (1024, 8192, 32000),
        "kv_cache_bytes": 16 << 30,
        "churn_requests": 700,
        "throughput": (16, 8192),
    },
    "qwen2.5-14b-kv": {
        "lengths": (1024, 8192, 32000),
        "kv_cache_bytes": 8 << 30,
        "churn_requests": 400,
        "throughput": (16, 8192),
    },
    "tiny": {
        "lengths": (128, 1024),
        "kv_cache_bytes": 64 << 20,
        "churn_requests": 60,
        "throughput": (8, 512),
    },
}
"""What is asked of engines of a shape."""
STAGED = {"max_sms": 64}  # what goes packed: a format is computed on the way


def start(
    name: str, connector: dict[str, Any], model: Path, shape: dict[str, Any], logs: Path, *, device: int, on_cpu: bool
) -> Server:
    """One engine on a GPU or on a core."""
    port, side = Ports(), Ports()
    words = [*program("vllm"), "serve", str(model), "--port", str(port.first), "--skip-tokenizer-init"]
    words += ["--kv-transfer-config", json.dumps(connector)]
    words += vllm_engines.launch_words(
        context_tokens=max(shape["lengths"]) + 1000,
        kv_cache_bytes=shape["kv_cache_bytes"],
        generates=name.startswith("decode"),
        on_cpu=on_cpu,
    )
    environment = vllm_engines.environment(device, on_cpu=on_cpu, nixl_port=side.first)
    return Server(name, words, logs / f"{name}.log", port=port.first, environment=environment)


@dataclass
class Pair:
    """Two engines, and the way that a request takes through them."""

    kind: str
    wire: str  # of kvxfer
    backend: str  # likewise; "auto" for the best
    prefill: Server
    decode: Server

    def ask(self, server: Server, prompt: Sequence[int], tokens: int, **more: Any) -> tuple[float, Answer]:
        """Seconds, and the answer. `more` is of the request."""
        # Log-probabilities would need a tokenizer, which names the tokens in the answer.
        body = {"detokenize": False, "logprobs": None, **more}
        began = time.perf_counter()
        answer = server.complete(prompt, tokens, **body)
        return time.perf_counter() - began, answer

    def hand_over(self, prompt: Sequence[int], tokens: int = 1) -> tuple[float, float, Answer]:
        """Seconds of prefill, seconds of decode, and decode's answer."""
        prefill_s, handed = self.ask(self.prefill, prompt, 1, kv_transfer_params=TO_PREFILL)
        decode_s, answer = self.ask(self.decode, prompt, tokens, kv_transfer_params=handed.kv)
        return prefill_s, decode_s, answer

    def counters(self) -> dict[str, float]:
        """The connector's own numbers."""
        time.sleep(1.5)  # engines report now and then
        return vllm_engines.counters(self.kind, self.decode)


def compare_tokens(pair: Pair, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What decode answers after a hand-off, and alone, which is salted, so that nothing comes out of the hand-off's
    cache: computing the prompt, computing it again, and out of its own cache. Prompts have a token more than a whole
    number of blocks, which is then the only one computed, as after the hand-off."""
    handed = [pair.hand_over(prompt, COMPARED_TOKENS)[2].tokens for prompt in prompts]
    alone, again, cached = (
        [pair.ask(pair.decode, prompt, COMPARED_TOKENS, cache_salt=salt)[1].tokens for prompt in prompts]
        for salt in ("alone", "again", "again")
    )
    return {
        "answers_compared_with_decode_alone": len(prompts),
        "answers_equal_to_those_out_of_its_cache": sum(a == b for a, b in zip(handed, cached, strict=True)),
        "answers_with_equal_tokens": sum(a == b for a, b in zip(handed, alone, strict=True)),
        "answers_that_decode_repeats": sum(a == b for a, b in zip(alone, again, strict=True)),
        "different_answers": len({tuple(tokens) for tokens in alone}),
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
    }


def measure(
    pair: Pair, shape: dict[str, Any], calls: int, generator: random.Random, *, compared: int, tokens_only: bool
) -> dict[str, Any]:
    """Everything about one connector."""

    def prompt(tokens: int) -> list[int]:
        return [generator.randrange(4, shape["vocab_size"]) for _ in range(tokens)]

    def series(pool: str) -> list[dict[str, Any]]:
        rows, before = [], pair.counters()
        for tokens in shape["lengths"]:
            hits, handed = [], []
            for _ in range(calls):
                x = prompt(tokens)
                handed.append(pair.hand_over(x)[:2])
                hits.append(pair.ask(pair.decode, x, 1)[0])
            after = pair.counters()
            moved = {name: after[name] - before[name] for name in after}
            before = after
            rows.append(
                {
                    "pool": pool,
                    "tokens": tokens,
                    "prefill_ms": 1e3 * statistics.median(h[0] for h in handed),
                    "first_token_ms": 1e3 * statistics.median(h[1] for h in handed),
                    "first_token_ms_all": [1e3 * h[1] for h in handed],
                    "local_hit_ms": 1e3 * statistics.median(hits),
                    "transfer_ms": 1e3 * moved["seconds"] / max(moved["transfers"], 1),
                    **moved,
                }
            )
            print(pair.kind, pair.wire, pair.backend, json.dumps(rows[-1]), flush=True)
        return rows

    def churn(server: Server) -> None:
        sizes = [(generator.randrange(16, 400), generator.randrange(1, 40)) for _ in range(shape["churn_requests"])]
        with ThreadPoolExecutor(CHURN_CLIENTS) as clients:
            list(clients.map(lambda size: pair.ask(server, prompt(size[0]), size[1]), sizes))

    def prefill_rate(with_hand_over: bool) -> float:
        """Prompt tokens a second through prefill."""
        count, tokens = shape["throughput"]
        prompts = [prompt(tokens) for _ in range(count)]
        one = pair.hand_over if with_hand_over else lambda x: pair.ask(pair.prefill, x, 1)
        began = time.perf_counter()
        with ThreadPoolExecutor(THROUGHPUT_CLIENTS) as clients:
            list(clients.map(one, prompts))
        return count * tokens / (time.perf_counter() - began)

    for tokens in (100, max(shape["lengths"]), 2000):  # warms up kernels and connections
        pair.hand_over(prompt(min(tokens, max(shape["lengths"]))), 4)
    found: dict[str, Any] = {"connector": pair.kind, "wire": pair.wire, "backend": pair.backend}
    if not tokens_only:
        rows = series("fresh")
        with ThreadPoolExecutor(2) as both:
            list(both.map(churn, (pair.prefill, pair.decode)))
        found["rows"] = rows + series("fragmented")
        found["prefill_tokens_per_s"] = {"alone": prefill_rate(False), "handing_over": prefill_rate(True)}
    return found | compare_tokens(pair, [prompt(shape["lengths"][0] + 1) for _ in range(compared)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="write the results here")
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--connectors", nargs="+", default=["kvxfer", "nixl"], help="of kvxfer[:WIRE[:BACKEND]], nixl")
    parser.add_argument("--shape", default="qwen2.5-14b", choices=list(SIZES))
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--compared", type=int, default=8, help="prompts whose answers are compared")
    parser.add_argument("--tokens-only", action="store_true", help="compare answers, and measure nothing")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    began, sizes = time.monotonic(), vllm_engines.SHAPES[options.shape]
    model, shape = vllm_engines.write_model(sizes), sizes | SIZES[options.shape]
    results: list[dict[str, Any]] = []
    gpus = [] if options.cpu else vllm_engines.gpus()
    with ExitStack() as stack:
        pairs = []
        for name in options.connectors:
            kind, wire, backend = (*name.split(":"), "", "")[:3]
            servers = []
            for device, role in enumerate(("producer", "consumer")):
                extra = {"wire": wire or "raw"} if kind == "kvxfer" and role == "consumer" else {}
                if wire:  # what goes packed
                    extra |= {"limits": STAGED} | ({"backends": [backend]} if backend else {})
                connector = getattr(connectors, kind)(**extra) | {"kv_role": f"kv_{role}"}
                on = device if options.cpu else min(device, len(gpus) - 1)
                label = f"{'prefill' if device == 0 else 'decode'}-{name.replace(':', '-')}"
                servers.append(start(label, connector, model, shape, options.logs, device=on, on_cpu=options.cpu))
                stack.callback(servers[-1].kill)
            pairs.append(Pair(kind, wire or "raw", backend or "auto", *servers))
        for pair in pairs:
            try:
                pair.prefill.ready(), pair.decode.ready()
                print(f"{pair.kind}: engines are up after {time.monotonic() - began:.0f} s", flush=True)
                more = {"compared": options.compared, "tokens_only": options.tokens_only}
                results.append(measure(pair, shape, options.calls, random.Random(0), **more))
            except Exception as error:  # the other connector's numbers are worth having
                print(f"{pair.kind}: {type(error).__name__}: {error}", flush=True)
                said = f"{type(error).__name__}: {error}"[:2000]
                results.append({"connector": pair.kind, "wire": pair.wire, "backend": pair.backend, "error": said})
            found = {"shape": options.shape, "gpus": len(gpus)} | vllm_engines.versions(gpus)
            environment = timing.environment(**found)
            timing.save(options.json, environment, results)
            print(json.dumps(results[-1])[:4000], flush=True)
    print(f"the whole took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
