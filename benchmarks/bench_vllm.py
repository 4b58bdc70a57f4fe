"""`vllm bench serve` against a prefill and a decode server: ours, NixlConnector, and one server alone.

    python benchmarks/bench_vllm.py --json FILE [--plot FILE] [--page FILE] [--requests 120] [--rate 4] [--rounds 5]
    python benchmarks/bench_vllm.py --json FILE --gpus 2 [--shape qwen2.5-14b] [--prompts 500 15000] [--output 64]
    python benchmarks/bench_vllm.py --json FILE --plot FILE --only-show

The servers of docs/vllm.md behind vllm-router, short and long prompts mixed, every variant with the same ones; random
weights. On GPUs prefill is on the first, decode on the second, and one server alone on the first; with one GPU all
share it. Servers of all variants start at once where they fit into memory; load goes to one variant after the other.

Without GPUs a small model in float32: servers and client share the machine's cores, so this says whether disaggregation
holds up, and at what cost, not how fast a network is.

The slowest requests of a round are those of its one or two densest moments, the same ones in every variant. Whatever
else the machine does just then decides about them. So there are several rounds, each with other prompts and moments,
all variants take turns in each, percentiles are those of all rounds together, and how many cores others have taken
meanwhile is said.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import latency
import tables
import timing
import vllm_engines

from tests.e2e.vllm import connectors
from tests.e2e.vllm.engine import EngineFailed
from tests.e2e.vllm.environment import Ports
from tests.e2e.vllm.servers import Server, launch_line, program, with_options

ROLES = {"kvxfer": ("prefill", "decode"), "nixl": ("prefill", "decode"), "alone": ("server",)}
"""The engines of each variant."""
DEVICE = {"prefill": 0, "decode": 1, "server": 0}
PAGE_PORT = {"prefill": "8100", "decode": "8200"}
MAX_SEQUENCES = 64
ENGINE_BYTES = 4 << 30
"""What an engine takes of a GPU besides weights and KV cache, activations of 8,192 tokens included; generously."""
SHARE_OF_GPU = 0.95


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests at random moments, prompts of any length between two."""

    requests: int
    rate_per_s: float
    prompts: tuple[int, int]
    output_tokens: int


ON_CPU = Load(requests=120, rate_per_s=4.0, prompts=(80, 1520), output_tokens=32)
ON_GPUS = Load(requests=60, rate_per_s=1.0, prompts=(500, 15000), output_tokens=64)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all variants have in common. Without `gpus`, engines run on CPU cores."""

    shape: dict[str, int]
    model: Path
    gpus: Sequence[vllm_engines.Gpu]
    kv_cache_bytes: int
    load: Load
    rounds: int
    logs: Path

    def environment(self, device: int, nixl_port: int | None = None) -> dict[str, str]:
        return vllm_engines.environment(device, on_cpu=not self.gpus, nixl_port=nixl_port)

    def device(self, role: str) -> int:
        """The GPU or core of an engine."""
        return min(DEVICE[role], len(self.gpus) - 1) if self.gpus else DEVICE[role]

    def words(self, role: str) -> list[str]:
        """What is added to an engine's launch line."""
        added = vllm_engines.launch_words(
            context_tokens=self.load.prompts[1] * 5 // 4 + self.load.output_tokens,  # texts are bounded without spaces
            kv_cache_bytes=self.kv_cache_bytes,
            generates=role != "prefill",
            on_cpu=not self.gpus,
        )
        tokenizer = str(vllm_engines.tokenizer(self.model))
        return [*added, "--tokenizer", tokenizer, "--max-num-seqs", str(MAX_SEQUENCES)]


class Deployment:
    """The servers of one variant. The constructor starts its engines, and returns."""

    def __init__(self, variant: str, bench: Bench) -> None:
        self.variant, self.bench = variant, bench
        self._servers: list[Server] = []
        self._router: Server | None = None
        self._ports = Ports(6)
        self.engines = [self._engine(role) for role in ROLES[variant]]

    def ready(self) -> None:
        """Wait for the engines."""
        for engine in self.engines:
            engine.ready()

    def front(self) -> Server:
        """What clients talk to: a router, started at the first call, or the only server."""
        if self.variant == "alone":
            return self.engines[0]
        if self._router is not None:
            return self._router
        port, metrics = self._ports.first + 2, self._ports.first + 3
        pages = {"8000": str(port)} | {PAGE_PORT[role]: str(self._port(role)) for role in ROLES[self.variant]}
        words = [*launch_line("router", pages), "--log-level", "warning", "--prometheus-port", str(metrics)]
        self._router = self._serve("router", words, port, self.bench.environment(0)).ready()
        return self._router

    def pause(self) -> None:
        """Stop them where they would take others' cores."""
        if not self.bench.gpus:
            for server in self._servers:
                server.pause()

    def resume(self) -> None:
        """Let them go on."""
        for server in self._servers:
            server.resume()

    def cpu_s(self) -> float:
        """Processor seconds that they have taken so far."""
        times = [process.cpu_times() for server in self._servers for process in server.processes()]
        return sum(time.user + time.system for time in times)

    def close(self) -> None:
        """Kill them, as often as one likes."""
        for server in self._servers:
            server.kill()
        self._ports.close()

    def _port(self, role: str) -> int:
        return self._ports.first + DEVICE[role]

    def _engine(self, role: str) -> Server:
        port, model = self._port(role), str(self.bench.model)
        side = None
        if self.variant == "alone":
            words = [*program("vllm"), "serve", model, "--port", str(port)]
        else:
            words = launch_line(role, {"MODEL": model, PAGE_PORT[role]: str(port)})
        if self.variant == "nixl":
            side, place = port + 4, words.index("--kv-transfer-config") + 1
            words[place] = json.dumps(connectors.nixl() | {"kv_role": json.loads(words[place])["kv_role"]})
        elif self.variant == "kvxfer" and not self.bench.gpus:
            words = with_options(words, lease_s=120.0)  # a machine of few cores may stand still for seconds
        environment = self.bench.environment(self.bench.device(role), side)
        return self._serve(role, words + self.bench.words(role), port, environment)

    def _serve(self, name: str, words: Sequence[str], port: int, environment: dict[str, str]) -> Server:
        log = self.bench.logs / f"{self.variant}-{name}.log"
        self._servers.append(Server(f"{self.variant} {name}", words, log, port=port, environment=environment))
        return self._servers[-1]


def warm_up(front: Server, bench: Bench) -> None:
    """Connections, and what is computed once."""
    generator = random.Random(front.name)

    def ask(tokens: int) -> None:
        text = " ".join(f"w{generator.randrange(4, bench.shape['vocab_size'])}" for _ in range(tokens))
        front.post("/v1/completions", {"prompt": text, "max_tokens": 4, "ignore_eos": True})

    least, most = bench.load.prompts
    for tokens in (least, most):
        ask(tokens)
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(ask, [least, least, (least + most) // 2, most]))


def ask_all(url: str, bench: Bench, seed: int, log: Path) -> dict[str, Any]:
    """What `vllm bench serve` reports of a round."""
    load, (least, most) = bench.load, bench.load.prompts
    spread = {"input": (most - least) / (most + least), "output": 0.0}
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
        # fmt: off
        subprocess.run(
            [
                *program("vllm"), "bench", "serve", "--backend", "vllm", "--base-url", url, "--endpoint",
                "/v1/completions", "--model", "m", "--tokenizer", str(vllm_engines.tokenizer(bench.model)),
                "--dataset-name", "random", "--random-input-len", str((least + most) // 2),
                "--random-output-len", str(load.output_tokens), "--random-range-ratio", json.dumps(spread),
                "--num-prompts", str(load.requests), "--request-rate", str(load.rate_per_s), "--seed", str(seed),
                "--ignore-eos", "--temperature", "0", "--disable-tqdm",
                "--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "result.json",
            ],
            check=True,
            env=bench.environment(0),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=120 + 3 * load.requests / load.rate_per_s,
        )
        # fmt: on
        return json.loads((Path(folder) / "result.json").read_text())


@dataclass
class Measured:
    """What all rounds so far say of a variant."""

    milliseconds: dict[str, list[float]] = field(default_factory=lambda: {metric: [] for metric in latency.METRICS})
    counts: Counter[str] = field(default_factory=Counter)
    cores_of_others: list[float] = field(default_factory=list)  # of each round

    def row(self, variant: str) -> dict[str, Any]:
        """Percentiles in milliseconds, and what prefill computed and decode fetched meanwhile."""
        percentiles = {
            f"{metric}_p{percentile}_ms": float(np.percentile(values, percentile))
            for metric, values in self.milliseconds.items()
            for percentile in latency.PERCENTILES
        }
        return {"variant": variant, **self.counts, "cores_of_others": self.cores_of_others, **percentiles}


def measure(deployment: Deployment, seed: int, measured: Measured) -> None:
    """One round of one variant."""
    bench, variant, engines = deployment.bench, deployment.variant, deployment.engines

    def counters() -> dict[str, float]:
        time.sleep(1.5)  # engines report now and then
        found = {"prompt_tokens_through_first_server": engines[0].metric("vllm:prompt_tokens_total")}
        if variant != "alone":
            fetched = engines[1].metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
            moved = vllm_engines.counters(variant, engines[1])
            found |= {"prompt_tokens_fetched": fetched} | {f"fetch_{name}": value for name, value in moved.items()}
        return found

    def cpu_s() -> tuple[float, float]:
        client = resource.getrusage(resource.RUSAGE_CHILDREN)
        return _busy_s(), deployment.cpu_s() + client.ru_utime + client.ru_stime + time.process_time()

    front = deployment.front()
    warm_up(front, bench)
    before, (busy_before, ours_before), began = counters(), cpu_s(), time.monotonic()
    result = ask_all(front.url, bench, seed, bench.logs / f"{variant}-client.log")
    busy, ours = cpu_s()
    others = (busy - busy_before - ours + ours_before) / (time.monotonic() - began)
    measured.cores_of_others.append(round(max(0.0, others), 2))
    completed = result["completed"]
    measured.counts["completed"] += completed
    measured.counts["failed"] += result.get("failed", bench.load.requests - completed)
    measured.counts.update({name: value - before[name] for name, value in counters().items()})
    for first, others_after in zip(result["ttfts"], result["itls"], strict=True):
        if others_after:
            later = sum(others_after)
            found = {"ttft": first, "tpot": later / (bench.load.output_tokens - 1), "e2el": first + later}
            for metric in latency.METRICS:
                measured.milliseconds[metric].append(1e3 * found[metric])


def _busy_s() -> float:
    """Processor seconds of the machine so far in which it did something."""
    found = psutil.cpu_times()
    return found.user + found.nice + found.system + sum(getattr(found, name, 0.0) for name in ("irq", "softirq"))


def at_once(bench: Bench, variants: Sequence[str]) -> bool:
    """Whether the engines of all variants fit into memory. A machine without GPUs has room for small ones."""
    if not bench.gpus:
        return True
    engine_bytes = vllm_engines.weight_bytes(bench.shape) + bench.kv_cache_bytes + ENGINE_BYTES
    engines = Counter(bench.device(role) for variant in variants for role in ROLES[variant])
    return all(count * engine_bytes <= SHARE_OF_GPU * bench.gpus[gpu].nbytes for gpu, count in engines.items())


def measured(bench: Bench, variants: Sequence[str]) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Rows of the variants that have had a round, and under what circumstances they were made, again and again."""
    load_before = os.getloadavg()[0]
    together = at_once(bench, variants)
    rows: dict[str, dict[str, Any]] = {}
    for group in [variants] if together else [[variant] for variant in variants]:
        with ExitStack() as stack:
            deployments = [Deployment(variant, bench) for variant in group]
            for deployment in deployments:
                stack.callback(deployment.close)
            for deployment in deployments:  # none is measured while others' engines start
                with suppress(EngineFailed):  # said when it is measured
                    deployment.ready()
            for deployment in deployments:
                deployment.pause()
            found = {deployment.variant: Measured() for deployment in deployments}
            for number in range(bench.rounds):
                for deployment in deployments if number % 2 == 0 else reversed(deployments):
                    variant = deployment.variant
                    if "error" in rows.get(variant, {}):
                        continue
                    try:
                        deployment.resume()
                        deployment.ready()
                        measure(deployment, number + 1, found[variant])
                        deployment.pause()
                        rows[variant] = found[variant].row(variant)
                    except Exception as error:  # the other variants' numbers are worth having
                        rows[variant] = {"variant": variant, "error": f"{type(error).__name__}: {error}"[:2000]}
                        deployment.close()
                    yield (
                        [rows[name] for name in variants if name in rows],
                        {
                            "servers": _servers(bench, together),
                            "load_average": f"{load_before:.1f} at the start, {os.getloadavg()[0]:.1f} at the end",
                            "cores_of_others": _cores_of_others(rows),
                        },
                    )


def _servers(bench: Bench, together: bool) -> str:
    if not bench.gpus:
        return "started at once, those of other variants stopped during a round"
    return "started at once" if together else "one variant after the other"


def _cores_of_others(rows: dict[str, dict[str, Any]]) -> str:
    """How many cores who has no part in this has taken, from round to round."""
    taken = {name: row["cores_of_others"] for name, row in rows.items() if row.get("cores_of_others")}
    return "; ".join(f"{name} {min(cores):.1f} to {max(cores):.1f}" for name, cores in taken.items())


def described(bench: Bench, shape: str) -> dict[str, Any]:
    """What a result must be read with."""
    head_dim = bench.shape["hidden_size"] // bench.shape["num_attention_heads"]
    kv_heads, dtype = bench.shape["num_key_value_heads"], "bfloat16" if bench.gpus else "float32"
    found = {"model": f"{bench.shape['num_hidden_layers']} layers, {kv_heads} KV heads of {head_dim}, {dtype}"}
    if bench.gpus:
        found |= {"shape": shape, "gpus": len(bench.gpus), "kv_cache_gib": bench.kv_cache_bytes / (1 << 30)}
        found["alone"] = "on one GPU"
    return {
        **found,
        **vllm_engines.versions(bench.gpus),
        "vllm_router": importlib.metadata.version("vllm-router"),
        "rounds": bench.rounds,
        "requests": f"{bench.load.requests} a round",
        "rate_per_s": bench.load.rate_per_s,
        "input_tokens": "{:,} to {:,}".format(*bench.load.prompts),
        "output_tokens": bench.load.output_tokens,
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="write the results here")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="of servers and clients")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", type=Path, help="page of the documentation that gets the table")
    parser.add_argument("--only-show", action="store_true", help="plot and table of what is in the JSON file already")
    parser.add_argument("--variants", nargs="+", default=list(ROLES), choices=ROLES)
    parser.add_argument("--gpus", type=int, default=0, help="default: on CPU cores")
    parser.add_argument("--shape", choices=vllm_engines.SHAPES, help="default: tiny, on GPUs qwen2.5-14b")
    parser.add_argument("--kv-cache-gib", type=float, help="of each engine; default: 0.25, on GPUs 12")
    parser.add_argument("--requests", type=int, help="of each round")
    parser.add_argument("--rounds", type=int, help="default: 5, on GPUs 1")
    parser.add_argument("--rate", type=float, help="requests a second, at random moments")
    parser.add_argument("--prompts", type=int, nargs=2, metavar=("LEAST", "MOST"), help="tokens, uniformly between")
    parser.add_argument("--output", type=int, metavar="TOKENS", help="of each answer")
    options = parser.parse_args()
    if not options.only_show:
        gpus = vllm_engines.gpus()[: options.gpus] if options.gpus else []
        if len(gpus) < options.gpus:
            parser.error(f"there are {len(gpus)} GPUs, not {options.gpus}")
        usual = ON_GPUS if gpus else ON_CPU
        shape = options.shape or ("qwen2.5-14b" if gpus else "tiny")
        bench = Bench(
            shape=vllm_engines.SHAPES[shape],
            model=vllm_engines.write_model(vllm_engines.SHAPES[shape]),
            gpus=gpus,
            kv_cache_bytes=int((options.kv_cache_gib or (12 if gpus else 0.25)) * (1 << 30)),
            load=Load(
                requests=options.requests or usual.requests,
                rate_per_s=options.rate or usual.rate_per_s,
                prompts=tuple(options.prompts or usual.prompts),
                output_tokens=options.output or usual.output_tokens,
            ),
            rounds=options.rounds or (1 if gpus else 5),
            logs=options.logs or Path(tempfile.mkdtemp(prefix="bench-vllm-")),
        )
        bench.logs.mkdir(parents=True, exist_ok=True)
        print(f"logs: {bench.logs}", flush=True)
        settings, began = described(bench, shape), time.monotonic()
        for results, circumstances in measured(bench, options.variants):
            timing.save(options.json, timing.environment(**settings, **circumstances), results)
            print(json.dumps(results), f"after {time.monotonic() - began:.0f} s", flush=True)
    content = json.loads(options.json.read_text())
    if options.plot:
        latency.plot(options.plot, content["results"])
    if options.page:
        tables.replace(options.page, "latency", latency.table(content))


if __name__ == "__main__":
    main()
