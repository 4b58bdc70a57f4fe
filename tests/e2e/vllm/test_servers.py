"""SmolLM2 behind vllm-router: real servers, started with the lines of docs/vllm.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import requests

from tests.processes import until

from . import models
from .comparing import assert_same as assert_same_within
from .engine import Answer
from .environment import Ports, for_server
from .servers import FOR_CPU, Server, launch_line, program, with_options

TEXTS = [
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who " + "walked along the shore and " * 60,
    "A list of numbers: " + ", ".join(map(str, range(400))),
]
CHUNK = ["--max-num-batched-tokens", "256"]
"""Tokens that prefill computes in a step."""
ROUTER_QUIET = ["--log-level", "warning", "--prometheus-port"]
assert_same = partial(assert_same_within, tolerance=1e-4)
"""Thirty layers of a trained model: another batch changes its log-probabilities by 2e-5."""


@dataclass
class Pools:
    prefill: Server
    decode: Server
    router: Server
    finder: Server
    """A router that is told of no engine, and hears of these two."""
    front: Server
    """The front end that streams."""
    alone: Server
    """A server that knows no connector."""


@pytest.fixture(scope="module")
def pools(log_folder: Callable[[str], Path]) -> Iterator[Pools]:
    model, ports = str(models.folder("smollm2")), Ports(11)
    p, d, r, f, a, s, meeting, connector, _, *metrics = range(ports.first, ports.first + 11)
    discovery = f"127.0.0.1:{meeting}"
    prefill = launch_line("prefill", {"MODEL": model, "8100": str(p)})
    decode = launch_line("decode", {"MODEL": model, "8200": str(d)})
    both = {"stream": True, "discovery_address": discovery}
    own = {"stream_layers": True, "port": connector, "http_address": f"127.0.0.1:{p}"}
    prefill = with_options(prefill, **own, **both)
    decode = with_options(decode, http_address=f"127.0.0.1:{d}", **both)
    front = launch_line("front", {"8000": str(s), "8100": str(p), "5600": str(connector), "8200": str(d)})
    router = launch_line("router", {"8000": str(r), "8100": str(p), "8200": str(d)})
    finder = launch_line("router with discovery", {"8000": str(f), "127.0.0.1:30001": discovery})
    started: list[Server] = []

    def start(name: str, words: list[str], *, port: int, core: int) -> Server:
        started.append(Server(name, words, log_folder(name), port=port, environment=for_server(core=core)))
        return started[-1]

    try:
        yield Pools(
            prefill=start("prefill", prefill + FOR_CPU + CHUNK, port=p, core=0),
            decode=start("decode", decode + FOR_CPU, port=d, core=1),
            alone=start("alone", [*program("vllm"), "serve", model, "--port", str(a), *FOR_CPU], port=a, core=1),
            router=start("router", [*router, *ROUTER_QUIET, str(metrics[0])], port=r, core=0),
            front=start("front", front, port=s, core=0),
            finder=start("finder", [*finder, *ROUTER_QUIET, str(metrics[1])], port=f, core=0),
        )
    finally:
        for server in started:
            server.kill()
        ports.close()


@pytest.fixture(scope="module")
def ready(pools: Pools) -> Pools:
    for server in (pools.prefill, pools.decode, pools.alone, pools.router, pools.front):
        server.ready()
    return pools


def test_texts_through_the_router(ready: Pools) -> None:
    """The answers of a server alone, all at once, and nothing is computed in decode but each prompt's last token."""
    with ThreadPoolExecutor(len(TEXTS)) as clients:
        answers = list(clients.map(ready.router.complete, TEXTS))
    assert_same(answers, [ready.alone.complete(text) for text in TEXTS])
    fetched = ready.decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    computed = ready.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert fetched > 1000 and computed <= len(TEXTS), (fetched, computed)


def test_a_router_that_finds_its_engines(ready: Pools) -> None:
    def answer() -> Answer | None:
        try:
            return ready.finder.complete(TEXTS[1] + " in the rain")
        except requests.HTTPError:  # it has not heard of both yet
            return None

    fetches = ready.decode.metric("vllm:kvxfer_fetch_seconds_count")
    found = until(answer, 30, "an answer")
    assert_same([found], [ready.alone.complete(TEXTS[1] + " in the rain")])
    until(lambda: ready.decode.metric("vllm:kvxfer_fetch_seconds_count") > fetches, 10, "a fetch counted")


def test_prompts_that_are_streamed(ready: Pools) -> None:
    """Both engines get each request at once. Blocks come while prefill computes the next ones, and of a prompt's last
    chunk one layer while it computes another."""
    squares = ", ".join(str(number * number) for number in range(200))
    texts = [f"Squares of numbers: {squares}", "A prompt that no engine has seen yet and that fits into one chunk"]
    with ThreadPoolExecutor(len(texts)) as clients:
        answers = list(clients.map(ready.front.complete, texts))
    assert_same(answers, [ready.alone.complete(text) for text in texts])
    until(lambda: ready.decode.metric("vllm:kvxfer_streamed_parts_total") >= 2, 10, "parts counted")
    until(lambda: ready.decode.metric("vllm:kvxfer_layerwise_prompts_total") >= 1, 10, "layers counted")
    assert ready.decode.metric("vllm:kvxfer_streams_given_up_total") == 0


def test_what_the_page_says_of_logs_and_metrics(ready: Pools) -> None:
    ready.router.complete("How to see that it works")
    assert ready.decode.metric("vllm:kvxfer_fetch_seconds_count") >= 1
    assert ready.decode.metric("vllm:kvxfer_fetch_bytes_sum") == ready.decode.metric("vllm:kvxfer_wire_bytes_sum") > 0
    assert ready.decode.metric("vllm:kvxfer_failed_fetches_total") == 0
    until(lambda: ready.prefill.metric("vllm:kvxfer_released_leases_total") >= 1, 10, "a released lease counted")
    for server, lines in (
        (ready.prefill, ["peers reach this engine at tcp://", "rank 0 of 1 listens on"]),
        (ready.decode, ["KV comes the ", "KV Transfer metrics: "]),
    ):
        for line in lines:
            until(lambda server=server, line=line: line in server.log.read_text(), 10, f"{server.name} says {line!r}")


def test_a_conversation(ready: Pools) -> None:
    """The second turn contains the first, which decode has already."""
    turns = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    for _ in range(2):
        answers = [
            server.post("/v1/chat/completions", {"messages": turns, "max_tokens": 24})["choices"][0]["message"]
            for server in (ready.router, ready.alone)
        ]
        assert answers[0]["content"] == answers[1]["content"]
        turns += [answers[0], {"role": "user", "content": "And of Italy?"}]
    assert "Paris" in turns[1]["content"]


def test_a_stream_that_the_client_leaves(ready: Pools) -> None:
    with requests.post(
        ready.router.url + "/v1/completions",
        json={"model": "m", "prompt": TEXTS[2], "max_tokens": 2000, "ignore_eos": True, "stream": True},
        stream=True,
        timeout=60,
    ) as response:
        next(response.iter_lines())
    until(lambda: ready.decode.metric("vllm:num_requests_running") == 0, 30, "the request has ended in decode")
    assert_same([ready.router.complete(TEXTS[0])], [ready.alone.complete(TEXTS[0])])


def test_decode_answers_without_prefill(ready: Pools) -> None:
    """Killed last: what is left answers alone, by the policy of the page's line."""
    handed = ready.prefill.complete(
        TEXTS[1],
        1,
        kv_transfer_params={
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    )
    ready.prefill.kill()
    answer = ready.decode.complete(TEXTS[1] + " now", kv_transfer_params=handed.kv)
    assert_same([answer], [ready.alone.complete(TEXTS[1] + " now")])
