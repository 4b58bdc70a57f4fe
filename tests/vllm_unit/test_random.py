"""Any order of events: hand-offs, streams, wrong tickets, aborts, preemptions, slow ranks, expiry, little memory.

Whatever happens: requests that are not aborted end, no cache holds a wrong number, no report comes twice, at last every
block of both engines is free and nothing is left of any request, and the next one is handed over as if nothing had
happened.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable

import pytest
from vllm.v1.engine import FinishReason

from tests.processes import until

from .engine import TO_DECODE, TO_PREFILL, Engine
from .test_contract import prompt, settle
from .test_streaming import Pair

EVENTS = 150
MANY_EVENTS = 6000
SETTINGS = {
    "full": {},
    "window": {"window": True},
    "ranks": {"ranks": 2},
    "window, ranks": {"window": True, "ranks": 2},
    "state": {"state": True, "prefix_caching": False},
    "stream": {"stream": True},
    "stream, window, ranks": {"stream": True, "window": True, "ranks": 2},
    "layers": {"stream": True, "stream_layers": True},
    "layers, window, ranks": {"stream": True, "stream_layers": True, "window": True, "ranks": 2},
}
CONDITIONS = ((5.0, 2.0, "recompute"), (0.05, 0.3, "recompute"), (0.05, 0.3, "fail"))
"""How long leases last, how long decode waits for a stream, and what becomes of a failed load, by seed."""
_ids = (f"any-{number}" for number in itertools.count())


def live(start: Callable[..., Engine], setting: str, seed: int, events: int) -> tuple[Engine, Engine, int]:
    """A prefill and a decode engine after so many events, once all requests have ended; and how many there were."""
    draw = random.Random(f"{setting} {seed}")
    lease_s, stream_timeout_s, policy = CONDITIONS[seed]
    options = {"stream_timeout_s": stream_timeout_s, **SETTINGS[setting]}
    streams = "stream" in options
    blocks, chunk = (90, 30) if streams else (40, 200)
    prefill = start(num_blocks=blocks, lease_s=lease_s, max_batched_tokens=chunk, **options)
    decode = start(num_blocks=min(blocks, 60), policy=policy, max_batched_tokens=200, **options)
    both = prefill, decode
    prefilling: dict[str, list[int]] = {}  # by request: its prompt
    handed: list[tuple[list[int], dict]] = []
    decoding: list[str] = []
    aborted: set[str] = set()

    def new_prefill() -> None:
        p = prompt(draw.randint(1, 300), draw.randrange(4))
        prefilling[prefill.add(p, kv=TO_PREFILL)] = p

    def new_stream() -> None:
        """The same to both; or one side never hears of it, or of another prompt."""
        p, key = prompt(draw.randint(1, 900), draw.randrange(40)), {"id": next(_ids), "prefill": prefill.endpoint}
        sides = draw.choice([(prefill, decode), (decode, prefill), (prefill, decode), (prefill,), (decode,)])
        for engine in sides:
            wrong = draw.random() < 0.1
            kv = {**(TO_PREFILL if engine is prefill else TO_DECODE), "kvxfer_stream": key}
            tokens = 1 if engine is prefill else draw.randint(1, 20)
            request = engine.add(p[::-1] if wrong else p, kv=kv, max_tokens=tokens)
            if engine is decode:
                decoding.append(request)
            for _ in range(draw.randint(0, 2)):
                draw.choice(both).step()

    def preempt() -> None:
        """All running requests of an engine. vLLM then objects to blocks that loads or leases hold."""
        with contextlib.suppress(RuntimeError):
            draw.choice(both).scheduler.reset_prefix_cache(reset_running_requests=True)

    def new_decode() -> None:
        if handed:
            p, kv = draw.choice(handed) if draw.random() < 0.2 else handed.pop(draw.randrange(len(handed)))
            wrong = draw.random() < 0.15
            decoding.append(decode.add(p[::-1] if wrong else p, kv=kv, max_tokens=draw.randint(1, 20)))

    def abort() -> None:
        engine = draw.choice(both)
        live = [one for one in engine.scheduler.requests.values() if not one.is_finished()]
        if live:
            request = draw.choice(live).request_id
            engine.abort(request)
            aborted.add(request)

    def reject() -> None:
        if handed:
            decode.reject(handed.pop()[1])

    def lag() -> None:
        for engine in both:
            for rank in engine.ranks:
                rank.silent = draw.random() < 0.3

    def step() -> None:
        for engine in draw.choice([(prefill,), (decode,), both]):
            for _ in range(draw.randint(1, 5)):
                engine.step()
                if streams:
                    time.sleep(0.002)  # what engines do meanwhile, with words on their way
        for request in [request for request in prefilling if request in prefill.answers]:
            kv = prefill.answers[request].kv
            if kv is not None:
                handed.append((prefilling[request], kv))
            del prefilling[request]

    def in_the_midst(layer: int) -> None:
        """Between two layers of prefill's step."""
        for _ in range(draw.choice((0, 0, 0, 4))):
            decode.step()
            time.sleep(0.002)

    if SETTINGS[setting].get("stream_layers"):
        prefill.after_layer = in_the_midst
    weights = {new_prefill: 20, new_decode: 25, abort: 6, reject: 3, lag: 5, preempt: 2, step: 40}
    if streams:
        weights |= {new_prefill: 4, new_decode: 8, new_stream: 15, abort: 3, step: 68}
    for event in draw.choices(list(weights), weights=list(weights.values()), k=events):
        event()
    for engine in both:
        for rank in engine.ranks:
            rank.silent = False
    for engine in both:
        for request in list(engine.scheduler.requests.values()):
            if not request.is_finished() and request.request_id not in decoding:
                engine.abort(request.request_id)
    until(lambda: step() or decode.answers.keys() >= set(decoding), 120, "all answers")
    for _, kv in handed:
        decode.reject(kv)
    settle(*both)
    ended = [decode.answers[request].status for request in decoding if request not in aborted]
    assert set(ended) <= {FinishReason.LENGTH} | ({FinishReason.ERROR} if policy == "fail" else set())
    return prefill, decode, sum(len(engine.answers) for engine in both)


@pytest.mark.parametrize("seed", range(len(CONDITIONS)))
@pytest.mark.parametrize("setting", SETTINGS)
def test_any_order_of_events(start: Callable[..., Engine], setting: str, seed: int) -> None:
    both = prefill, decode = live(start, setting, seed, EVENTS)[:2]
    nothing_is_left(*both)

    fresh = prompt(100, 9)
    [answer] = decode.run(decode.add(fresh, kv=prefill.prefill(fresh), max_tokens=2))
    assert answer.status == FinishReason.LENGTH
    if not seed:  # the others' leases may end at any time
        assert answer.local_tokens + answer.external_tokens >= len(fresh) - 1
        assert answer.external_tokens
    settle(*both)
    if "stream" in setting and not seed:
        pair = Pair(prefill, decode, prompt(600, 50)).meet()
        pair.take_parts(decode.total("parts") + 2)
        assert pair.finish().computed == [1, 1]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_left_of_thousands_of_requests(start: Callable[..., Engine], setting: str) -> None:
    prefill, decode, requests = live(start, setting, 1, MANY_EVENTS)
    assert requests > 1500
    assert bool(decode.total("layerwise")) == SETTINGS[setting].get("stream_layers", False)
    nothing_is_left(prefill, decode)


def nothing_is_left(*engines: Engine) -> None:
    """Step until no side of any engine remembers a request, for a while."""
    deadline = time.monotonic() + 10
    while (found := [engine.leftovers() for engine in engines]) != [[]] * len(engines):
        assert time.monotonic() < deadline, found
        for engine in engines:
            engine.step()
        time.sleep(0.01)
