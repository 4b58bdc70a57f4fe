"""Any order of events: hand-offs, wrong tickets, aborts, rejections, slow ranks, expiry, little memory.

Whatever happens: requests that are not aborted end, no cache holds a wrong number, no report comes twice, at last every
block of both engines is free, and the next request is handed over as if nothing had happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from vllm.v1.engine import FinishReason

from .engine import TO_PREFILL, Engine
from .test_contract import prompt, settle

EVENTS = 150
SETTINGS = {
    "full": {},
    "window": {"window": True},
    "ranks": {"ranks": 2},
    "window, ranks": {"window": True, "ranks": 2},
    "state": {"state": True, "prefix_caching": False},
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("setting", SETTINGS)
def test_any_order_of_events(start: Callable[..., Engine], setting: str, seed: int) -> None:
    draw = random.Random(f"{setting} {seed}")
    options = SETTINGS[setting]
    prefill = start(num_blocks=40, lease_s=(5.0, 0.05)[seed % 2], max_batched_tokens=200, **options)
    decode = start(num_blocks=40, policy="recompute", max_batched_tokens=200, **options)
    both = prefill, decode
    prefilling: dict[str, list[int]] = {}  # by request: its prompt
    handed: list[tuple[list[int], dict]] = []
    decoding: list[str] = []
    aborted: set[str] = set()

    def new_prefill() -> None:
        p = prompt(draw.randint(1, 300), draw.randrange(4))
        prefilling[prefill.add(p, kv=TO_PREFILL)] = p

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
        for request in [request for request in prefilling if request in prefill.answers]:
            kv = prefill.answers[request].kv
            if kv is not None:
                handed.append((prefilling[request], kv))
            del prefilling[request]

    for _ in range(EVENTS):
        draw.choices([new_prefill, new_decode, abort, reject, lag, step], weights=[20, 25, 6, 3, 5, 40])[0]()
    for engine in both:
        for rank in engine.ranks:
            rank.silent = False
    for engine in both:
        for request in list(engine.scheduler.requests.values()):
            if not request.is_finished() and request.request_id not in decoding:
                engine.abort(request.request_id)
    while not decode.answers.keys() >= set(decoding):
        step()
    for _, kv in handed:
        decode.reject(kv)
    settle(*both)
    ended = [decode.answers[request].status for request in decoding if request not in aborted]
    assert set(ended) <= {FinishReason.LENGTH}

    fresh = prompt(100, 9)
    [answer] = decode.run(decode.add(fresh, kv=prefill.prefill(fresh), max_tokens=2))
    assert answer.status == FinishReason.LENGTH
    if seed % 2 == 0:  # the others' leases may end at any time
        assert answer.local_tokens + answer.external_tokens >= len(fresh) - 1
        assert answer.external_tokens
    settle(*both)
