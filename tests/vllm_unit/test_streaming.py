"""Prompts that are handed over while prefill computes them: both engines get the request at once.

What is awaited are events, such as a lease that decode has let go of, so nothing here depends on who is faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from kvxfer.vllm import notices
from kvxfer.vllm.notices import Ask, Leave, News
from tests.processes import until

from .engine import BLOCK_TOKENS, TO_DECODE, TO_PREFILL, WINDOW, Answer, Engine
from .test_contract import prompt, settle

Start = Callable[..., Engine]
LENGTH = 700
CHUNK = 100  # tokens that prefill computes in a step
_ids = (f"stream-{number}" for number in itertools.count())


class Pair:
    """A prefill and a decode engine that stream, and one prompt that both get."""

    def __init__(self, prefill: Engine, decode: Engine, prompt: list[int]) -> None:
        self.prefill, self.decode, self.prompt = prefill, decode, prompt
        self.id = next(_ids)
        self.source = self.target = ""

    @classmethod
    def start(
        cls,
        start: Start,
        *,
        tokens: int = LENGTH,
        policy: str = "recompute",
        timeout_s: float = 60.0,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        **both: Any,
    ) -> Pair:
        """Two new engines, with the options of either and of both."""
        options = {"stream": True, "stream_timeout_s": timeout_s, "limits": {"dial_timeout_s": 1.0}, **both}
        return cls(
            start(**{"max_batched_tokens": CHUNK, **options, **(prefill or {})}),
            start(**{"policy": policy, **options, **(decode or {})}),
            prompt(tokens),
        )

    def ask_prefill(self) -> Pair:
        self.source = self.prefill.add(self.prompt, kv={**TO_PREFILL, "kvxfer_stream": {"id": self.id}})
        return self

    def ask_decode(self) -> Pair:
        self.target = self.decode.add(self.prompt, kv=self.for_decode(), max_tokens=2)
        return self

    def for_decode(self) -> dict[str, Any]:
        """kv_transfer_params of decode's request."""
        return {**TO_DECODE, "kvxfer_stream": {"id": self.id, "prefill": self.prefill.endpoint}}

    def heard(self, *engines: Engine) -> None:
        """Until there is a word of the other engine that has not been read yet."""
        for engine in engines:
            until(lambda engine=engine: engine.side._unread, 30, "a notice")

    def begin(self) -> Pair:
        """Both engines know of the prompt, and prefill has computed the first chunk."""
        self.ask_decode().ask_prefill()
        self.decode.step()
        self.heard(self.prefill)
        until(lambda: self.prefill.step() or self.source in self.prefill._computed, 30, "a first chunk")
        return self

    def meet(self) -> Pair:
        """Also, decode has blocks for it all."""
        self.begin().allocate()
        return self

    def allocate(self) -> None:
        """Until decode has blocks, and prefill could know it."""
        until(lambda: self.decode.step() or self.loads(), 30, "blocks of decode")
        self.heard(self.prefill)

    def loads(self) -> bool:
        """Whether decode has blocks that wait for the prompt."""
        return self.target in self.decode.ranks[0].connector._worker._intakes

    def leased(self) -> bool:
        """Whether a part of a prompt is leased now by any rank."""
        parts = [lease for rank in self.prefill.ranks for lease in rank.connector._worker._parts.values()]
        return any(not lease.released.is_set() for lease in parts)

    def advance(self) -> int:
        """A step of prefill; then decode takes what that has leased. Returns how many parts decode has taken so far."""
        self.prefill.step()
        until(lambda: self.decode.step() or not self.leased(), 30, "decode to let go of a part")
        return self.decode.total("parts")

    def take_parts(self, count: int) -> None:
        """Advance until decode has taken so many parts."""
        while self.advance() < count:
            assert self.source not in self.prefill.answers, "the prompt was done too soon"

    def finish(self) -> Answer:
        """Until decode has answered and all blocks of both engines are free."""
        both = self.prefill, self.decode
        until(lambda: [e.step() for e in both] and self.target in self.decode.answers, 60, "an answer")
        self.settle()
        return self.decode.answers[self.target]

    def settle(self) -> None:
        """Everything has been given back."""
        both = self.prefill, self.decode
        free = [engine.cache.num_blocks - 1 for engine in both]

        def settled() -> bool:
            for engine in both:
                engine.step()
            idle = not any(engine.side._streams_in._streams or engine.side._streams_out._streams for engine in both)
            return idle and [engine.free_blocks() for engine in both] == free and not self.prefill.slots_in_use()

        until(settled, 60, "both engines to be idle")
        assert not any(engine.side._streams_in._ids or engine.side._streams_out._ids for engine in both)
        assert not self.prefill.side._streams_out._parts


# --- what moves when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ranks": 2},
        {"prefill": {"ranks": 2}},
        {"decode": {"ranks": 2}},
        {"decode": {"block_tokens": 64}},
        {"prefill": {"block_tokens": 64}},
        {"decode": {"block_tokens": 96}, "prefill": {"ranks": 2}},
        {"window": True},
        {"window": True, "ranks": 2, "decode": {"block_tokens": 64}},
        {"state": True, "prefix_caching": False},
        {"ways": ["packed"]},
    ],
    ids=str,
)
def test_parts_come_while_the_prompt_is_computed(start: Start, options: dict[str, Any]) -> None:
    """And every number that decode then reads is right: `Engine.step` looks at them all."""
    pair = Pair.start(start, **options).meet()
    pair.take_parts(2)
    answer = pair.finish()
    assert answer.status is FinishReason.LENGTH
    assert answer.computed == [1, 1]
    assert answer.external_tokens == LENGTH - ("window" in options or "state" in options)
    assert pair.decode.total("failed") == pair.decode.total("given_up") == pair.prefill.total("expired") == 0


@pytest.mark.parametrize("options", [{}, {"state": True, "prefix_caching": False}], ids=str)
def test_with_the_schedule_for_the_second_model_runner(
    start: Start, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That runner hears of resumed prompts as of new ones. It zeroes new blocks before it revokes leases of them, so
    that nothing is leased early where there is zeroing."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    pair = Pair.start(start, **options).meet()
    if not options:
        pair.take_parts(1)
    pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    if not options:
        pair.take_parts(2)
    answer = pair.finish()
    assert (answer.status, answer.computed) == (FinishReason.LENGTH, [1, 1])
    assert bool(pair.decode.total("parts")) == (not options)
    assert pair.decode.total("failed") == pair.decode.total("given_up") == 0


@pytest.mark.parametrize("window", [False, True])
def test_nothing_moves_twice(start: Start, window: bool) -> None:
    pair = Pair.start(start, window=window).meet()
    pair.take_parts(3)
    pair.finish()
    layout = pair.decode.ranks[0].connector._worker._cache.layout
    expected = -(-LENGTH // BLOCK_TOKENS) * layout.block_bytes("0.full")
    if window:
        last, first = LENGTH - 2, LENGTH - WINDOW  # tokens that decode's first step looks at
        expected += (last // BLOCK_TOKENS - first // BLOCK_TOKENS + 1) * layout.block_bytes("1.sliding")
    assert sum(sum(stats["bytes"]) for stats in pair.decode.stats) == expected


def test_what_decode_has_cached_is_not_fetched(start: Start) -> None:
    pair = Pair.start(start)
    cached = 9 * BLOCK_TOKENS
    pair.decode.run(pair.decode.add([*pair.prompt[:cached], 5]))
    pair.meet()
    pair.take_parts(1)
    answer = pair.finish()
    assert (answer.local_tokens, answer.external_tokens) == (cached, LENGTH - cached)
    fetched = sum(sum(stats["bytes"]) for stats in pair.decode.stats)
    blocks = -(-LENGTH // BLOCK_TOKENS) - 9
    assert fetched == blocks * pair.decode.ranks[0].connector._worker._cache.layout.block_bytes("0.full")


def test_what_prefill_has_cached_comes_at_once(start: Start) -> None:
    pair = Pair.start(start)
    cached = 12 * BLOCK_TOKENS
    pair.prefill.run(pair.prefill.add(pair.prompt[: cached + 1]))
    pair.meet()
    pair.take_parts(1)
    assert sum(pair.prefill._computed[pair.source]) <= 2 * CHUNK
    first = next(stats["bytes"] for stats in pair.decode.stats if stats["bytes"])
    block_bytes = pair.decode.ranks[0].connector._worker._cache.layout.block_bytes("0.full")
    assert first[0] >= 12 * block_bytes
    assert pair.finish().external_tokens == LENGTH


def test_prefill_comes_first(start: Start) -> None:
    pair = Pair.start(start).ask_prefill()
    for _ in range(3):
        pair.prefill.step()
    pair.ask_decode()
    pair.decode.step()
    pair.heard(pair.prefill)
    pair.prefill.step()
    pair.allocate()
    pair.take_parts(1)
    assert pair.finish().computed == [1, 1]


def test_prefill_is_done_before_decode_asks(start: Start) -> None:
    pair = Pair.start(start).ask_prefill()
    pair.prefill.run(pair.source)
    pair.ask_decode()
    answer = pair.finish()
    assert (answer.computed, answer.external_tokens, pair.decode.total("parts")) == ([1, 1], LENGTH, 0)


def test_prefill_is_done_while_the_request_waits_for_blocks(start: Start) -> None:
    """From then on it is a request like others that come with a ticket."""
    pair = Pair.start(start, decode={"num_blocks": 26})
    busy = pair.decode.add(prompt(200, 5), max_tokens=90)
    pair.decode.step()
    pair.ask_prefill()
    pair.prefill.run(pair.source)
    pair.ask_decode()
    pair.decode.step()
    pair.heard(pair.prefill)
    pair.prefill.step()
    pair.heard(pair.decode)
    pair.decode.step()
    assert pair.target in pair.decode.side._offers and busy not in pair.decode.answers
    pair.decode.run(busy)
    answer = pair.finish()
    assert (answer.computed, answer.external_tokens) == ([1, 1], LENGTH)


def test_nobody_holds_blocks_for_a_prompt_that_waits_in_prefill(start: Start) -> None:
    """However long that takes, as long as prefill says that it has the prompt."""
    pair = Pair.start(start, timeout_s=0.4, prefill={"num_blocks": 26})
    busy = pair.prefill.add(prompt(600, 5), max_tokens=200)
    while pair.prefill.scheduler.requests[busy].num_computed_tokens < 600:
        pair.prefill.step()
    pair.ask_decode().ask_prefill()
    words: list[News] = []
    take = pair.decode.side._streams_in.take
    pair.decode.side._streams_in.take = lambda news: words.append(news) or take(news)

    def answered() -> bool:
        pair.decode.step()
        if pair.prefill.side._unread:
            pair.prefill.step()
        return len(words) > 8  # more than two timeouts

    until(answered, 30, "answers")
    assert pair.source not in pair.prefill._computed
    assert not any(word.tokens for word in words)
    assert pair.decode.free_blocks() == pair.decode.cache.num_blocks - 1
    assert pair.finish().external_tokens == LENGTH


# --- the other side never comes -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_prefill_never_gets_the_prompt(start: Start, policy: str) -> None:
    """Nothing was loaded, so the policy for failed loads has no say."""
    pair = Pair.start(start, timeout_s=0.5, policy=policy).ask_decode()
    answer = pair.finish()
    assert (answer.status, answer.computed) == (FinishReason.LENGTH, [LENGTH, 1])
    assert pair.decode.total("given_up") == 1


def test_decode_never_asks(start: Start) -> None:
    pair = Pair.start(start, lease_s=0.3).ask_prefill()
    [answer] = pair.prefill.run(pair.source)
    assert answer.kv["kvxfer_ticket"]  # it could still be handed over as without streaming
    pair.settle()
    assert (pair.prefill.total("expired"), pair.prefill.total("released")) == (1, 0)


def test_decode_asks_when_the_lease_is_over(start: Start) -> None:
    pair = Pair.start(start, lease_s=0.1).ask_prefill()
    pair.prefill.run(pair.source)
    pair.settle()
    answer = pair.ask_decode().finish()
    assert (answer.computed, pair.decode.total("given_up")) == ([LENGTH, 1], 1)


def test_an_engine_without_requests_says_what_has_ended(start: Start) -> None:
    """It has no steps in which its scheduler could take the question."""
    pair = Pair.start(start, lease_s=0.1).ask_prefill()
    pair.prefill.run(pair.source)
    pair.settle()
    pair.ask_decode()
    pair.decode.run(pair.target, timeout_s=20.0)
    assert (pair.decode.answers[pair.target].computed, pair.decode.total("given_up")) == ([LENGTH, 1], 1)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:9", "nonsense", None])
def test_no_prefill_engine_at_that_address(start: Start, endpoint: str | None) -> None:
    pair = Pair.start(start)
    kv = {**TO_DECODE, "kvxfer_stream": {"id": "x", "prefill": endpoint}}
    pair.target = pair.decode.add(pair.prompt, kv=kv)
    assert pair.finish().computed == [LENGTH]
    assert pair.decode.total("given_up") + pair.decode.total("refused") == 1


def test_an_engine_that_does_not_stream_says_so(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair.start(start, prefill={"stream": False}, lease_s=0.3)
    pair.ask_decode().ask_prefill()
    assert pair.finish().computed == [LENGTH, 1]
    assert "this prefill engine does not stream" in caplog.text

    pair = Pair.start(start, decode={"stream": False}, lease_s=0.3)
    pair.ask_decode().ask_prefill()
    assert pair.finish().computed == [LENGTH, 1]
    assert "this decode engine does not" in caplog.text


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_vllm_wants_less_than_was_offered(start: Start, policy: str) -> None:
    pair = Pair.start(start, policy=policy)
    pair.decode.cap_loads(2 * BLOCK_TOKENS)
    pair.begin()
    until(lambda: pair.decode.step() or pair.decode.total("given_up"), 30, "an end of the stream")
    answer = pair.finish()
    assert (answer.status, answer.computed) == expected(policy)
    assert (pair.decode.total("failed"), pair.decode.total("bytes")) == (1, 0)


# --- requests that end early --------------------------------------------------------------------------------


def expected(policy: str) -> tuple[FinishReason, list[int]]:
    """What becomes of a request whose load has failed."""
    return (FinishReason.ERROR, []) if policy == "fail" else (FinishReason.LENGTH, [LENGTH, 1])


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("parts", [0, 2])
def test_prefill_is_aborted(start: Start, parts: int, policy: str) -> None:
    pair = Pair.start(start, policy=policy).meet()
    pair.take_parts(parts)
    pair.prefill.abort(pair.source)
    answer = pair.finish()
    assert (answer.status, answer.computed) == expected(policy)
    assert (pair.decode.total("given_up"), pair.decode.total("failed")) == (1, 1)


def test_prefill_is_aborted_with_a_part_on_its_way(start: Start) -> None:
    """What the part was read from is overwritten, and what was read does not count."""
    pair = Pair.start(start).meet()
    pair.take_parts(1)
    until(lambda: pair.prefill.step() or pair.leased(), 30, "a part")
    pair.prefill.abort(pair.source)
    other = pair.prefill.add(prompt(60 * BLOCK_TOKENS, 3))
    pair.prefill.step()
    assert not pair.leased()
    pair.prefill.run(other)
    answer = pair.finish()
    assert (answer.status, answer.computed) == expected("recompute")
    assert pair.decode.total("parts") == 1


def test_prefill_is_aborted_before_it_begins(start: Start) -> None:
    pair = Pair.start(start).ask_prefill()
    pair.ask_decode()
    pair.decode.step()
    pair.heard(pair.prefill)
    pair.prefill.abort(pair.source)
    assert pair.finish().computed == [LENGTH, 1]


@pytest.mark.parametrize("parts", [0, 2])
def test_decode_is_aborted(start: Start, parts: int) -> None:
    """Prefill hears of it, and leases nothing more to anybody."""
    pair = Pair.start(start).meet()
    pair.take_parts(parts)
    pair.decode.abort(pair.target)
    pair.decode.step()
    pair.heard(pair.prefill)
    [answer] = pair.prefill.run(pair.source)
    assert answer.kv is None
    pair.settle()
    assert pair.prefill.total("released") == 0


def test_decode_is_aborted_with_a_part_on_its_way(start: Start) -> None:
    pair = Pair.start(start).meet()
    until(lambda: pair.prefill.step() or pair.leased(), 30, "a part")
    pair.decode.step()
    pair.decode.abort(pair.target)
    pair.settle()


def test_a_part_does_not_outlive_the_whole(start: Start) -> None:
    """When the lease of all blocks ends they are given back, whatever decode still does with a part."""
    pair = Pair.start(start).meet()
    until(lambda: pair.prefill.step() or pair.leased(), 30, "a part")
    pair.prefill.run(pair.source)
    pair.prefill.step()
    assert pair.leased()
    pair.prefill.ranks[0].connector._worker._leases[pair.source].release()
    pair.prefill.step()
    assert not pair.leased()
    assert pair.finish().computed == [LENGTH, 1]


def test_decode_is_aborted_when_prefill_is_done(start: Start) -> None:
    pair = Pair.start(start).meet()
    pair.prefill.run(pair.source)
    pair.decode.abort(pair.target)
    pair.settle()
    assert pair.prefill.total("expired") == 0


def test_decode_leaves_while_prefill_computes_the_last_tokens(start: Start) -> None:
    """Prefill hears of it when it has already leased everything: the lease does not last until it runs out."""
    pair = Pair.start(start).meet()
    while pair.prefill.scheduler.requests[pair.source].num_computed_tokens < LENGTH - CHUNK:
        pair.advance()
    until(lambda: not pair.prefill.side._unread or pair.prefill.side._read_notices(), 30, "silence")
    take_output = pair.prefill.side.take_output

    def leave_first(output: Any) -> None:
        pair.decode.abort(pair.target)
        pair.decode.step()
        pair.heard(pair.prefill)
        take_output(output)

    pair.prefill.side.take_output = leave_first
    pair.prefill.step()
    pair.prefill.side.take_output = take_output
    assert pair.prefill.answers[pair.source].kv is not None
    pair.settle()
    assert (pair.prefill.total("released"), pair.prefill.total("expired")) == (1, 0)


def test_decode_is_aborted_before_it_has_blocks(start: Start) -> None:
    pair = Pair.start(start).ask_prefill()
    pair.ask_decode()
    pair.decode.step()
    pair.decode.abort(pair.target)
    pair.decode.step()
    until(lambda: len(pair.prefill.side._unread) == 2, 30, "Ask and Leave")
    [answer] = pair.prefill.run(pair.source)
    assert answer.kv is None
    pair.settle()


def test_decode_leaves_before_prefill_comes(start: Start) -> None:
    pair = Pair.start(start).ask_decode()
    pair.decode.step()
    pair.decode.abort(pair.target)
    pair.decode.step()
    until(lambda: len(pair.prefill.side._unread) == 2, 30, "Ask and Leave")
    pair.prefill.step()
    [answer] = pair.ask_prefill().prefill.run(pair.source)
    assert answer.kv is None
    pair.settle()


def test_a_rejected_request_lets_prefill_go(start: Start) -> None:
    pair = Pair.start(start).ask_prefill()
    pair.decode.reject(pair.for_decode())
    pair.decode.step()
    pair.heard(pair.prefill)
    [answer] = pair.prefill.run(pair.source)
    assert answer.kv is None
    pair.settle()


# --- prefill is preempted, or dies --------------------------------------------------------------------------


@pytest.mark.parametrize("on_its_way", [False, True], ids=["between parts", "a part on its way"])
def test_prefill_is_preempted(start: Start, on_its_way: bool) -> None:
    """Its blocks go to others, and are computed again elsewhere. What came before counts, and the rest follows."""
    pair = Pair.start(start, prefill={"num_blocks": 30, "prefix_caching": False}).meet()
    pair.take_parts(1)
    if on_its_way:
        until(lambda: pair.prefill.step() or pair.leased(), 30, "a part")
    table = list(pair.prefill.scheduler.kv_cache_manager.get_block_ids(pair.source)[0])
    request = pair.prefill.scheduler.requests[pair.source]
    pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions == 1
    other = pair.prefill.request(prompt(500, 3), kv=None, max_tokens=1)
    pair.prefill.scheduler.add_request(other)
    pair.prefill.scheduler.waiting.remove_request(other)
    pair.prefill.scheduler.waiting.prepend_request(other)
    pair.prefill.step()
    assert not pair.leased()
    pair.prefill.run(other.request_id)
    assert pair.source not in pair.prefill.answers
    for rank in pair.prefill.ranks:
        rank.model.spoil([block for block in table if block in free_blocks(pair.prefill)])
    assert pair.decode.total("parts") == 1
    answer = pair.finish()
    assert (answer.status, answer.computed) == (FinishReason.LENGTH, [1, 1])
    assert pair.decode.total("failed") == pair.decode.total("given_up") == 0


def test_nothing_is_leased_in_a_prompts_first_step(start: Start) -> None:
    """It may share blocks that another prompt fills in that very step."""
    pair = Pair.start(start, prefill={"max_batched_tokens": 250}).meet()
    before = list(pair.prefill._computed[pair.source])
    pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    other = pair.prefill.request(pair.prompt[:200], kv=None, max_tokens=1)
    pair.prefill.scheduler.add_request(other)
    pair.prefill.scheduler.waiting.remove_request(other)
    pair.prefill.scheduler.waiting.prepend_request(other)
    pair.prefill.step()
    assert pair.prefill._computed[pair.source] == [*before, 50]
    assert pair.prefill.scheduler.requests[pair.source].num_computed_tokens > 200  # with what it shares
    assert not pair.leased()
    pair.take_parts(1)
    assert pair.finish().computed == [1, 1]


def free_blocks(engine: Engine) -> set[int]:
    """Ids of the blocks that nobody has."""
    return {block.block_id for block in engine.scheduler.kv_cache_manager.block_pool.blocks if not block.ref_cnt}


def test_nothing_is_leased_before_all_ranks_are_known(start: Start) -> None:
    """Whoever used the ticket would learn of no ranks, and take the engine for one without a cache."""
    pair = Pair.start(start, tokens=1200)
    take, reports = pair.prefill.side._take_report, []
    pair.prefill.side._take_report = reports.append
    pair.meet()
    pair.prefill.step()
    pair.prefill.step()
    assert reports and not pair.leased()
    pair.prefill.side._take_report = take
    for report in reports:
        take(report)
    pair.take_parts(2)
    assert pair.finish().computed == [1, 1]


def test_preempted_for_want_of_blocks(start: Start) -> None:
    """As vLLM does it by itself: two prompts of which each has room alone."""
    pair = Pair.start(start, tokens=600, prefill={"num_blocks": 29, "max_batched_tokens": 16})
    first = pair.prefill.add(prompt(8 * BLOCK_TOKENS, 4), max_tokens=300)
    pair.meet()
    request = pair.prefill.scheduler.requests[pair.source]
    both = pair.prefill, pair.decode
    until(lambda: [e.step() for e in both] and {first} <= pair.prefill.answers.keys(), 60, "the other answer")
    assert pair.finish().computed == [1, 1]
    assert request.num_preemptions


@pytest.mark.parametrize(("parts", "policy"), [(0, "recompute"), (2, "fail")])
def test_prefill_dies(start: Start, parts: int, policy: str) -> None:
    pair = Pair.start(start, policy=policy, timeout_s=2.0).meet()
    pair.take_parts(parts)
    pair.prefill.close()
    [answer] = pair.decode.run(pair.target)
    assert (answer.status, answer.computed) == expected(policy)
    settle(pair.decode)
    assert (pair.decode.total("given_up"), pair.decode.total("failed")) == (1, 1)


def test_prefill_makes_no_progress(start: Start) -> None:
    """It answers, but computes nothing: decode does not keep its blocks for ever."""
    pair = Pair.start(start, timeout_s=0.5).meet()
    pair.take_parts(1)
    computed = pair.prefill.scheduler.requests[pair.source].num_computed_tokens

    def stand_still() -> bool:
        pair.decode.step()
        for endpoint, payload in list(pair.prefill.side._unread):
            assert isinstance(notices.decode(payload), Ask | Leave), endpoint
        pair.prefill.side._read_notices()
        return pair.target in pair.decode.answers

    until(stand_still, 30, "an end")
    assert pair.prefill.scheduler.requests[pair.source].num_computed_tokens == computed
    answer = pair.finish()
    assert (answer.status, answer.computed) == expected("recompute")


# --- several requests, wrong ones ---------------------------------------------------------------------------


def test_several_answers_to_one_prompt(start: Start) -> None:
    pair = Pair.start(start).meet()
    second = pair.decode.add(pair.prompt, kv=pair.for_decode())
    pair.take_parts(1)
    assert pair.finish().external_tokens == LENGTH
    [answer] = pair.decode.run(second)
    assert answer.local_tokens == (LENGTH - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    pair.settle()


def test_two_prompts_with_one_id(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair.start(start).meet()
    other = pair.prefill.add(prompt(50, 8), kv={**TO_PREFILL, "kvxfer_stream": {"id": pair.id}})
    assert "is the id of another one" in caplog.text
    [answer] = pair.prefill.run(other)
    pair.prefill.step()
    pair.decode.run(pair.decode.add(prompt(50, 8), kv=answer.kv))
    assert pair.finish().computed == [1, 1]


@pytest.mark.parametrize("tokens", [LENGTH, LENGTH // 2])
def test_another_prompt_in_decode(start: Start, caplog: pytest.LogCaptureFixture, tokens: int) -> None:
    pair = Pair.start(start)
    pair.ask_prefill()
    pair.prompt = prompt(tokens, 6)
    answer = pair.ask_decode().finish()
    assert answer.computed == [tokens, 1]
    assert pair.decode.total("bytes") == 0


def test_many_at_once(start: Start) -> None:
    """Each is a stream of its own, and chunks of several prompts lie in one step."""
    first = Pair.start(start, num_blocks=100)
    both = first.prefill, first.decode
    pairs = [first, *(Pair(*both, prompt(tokens, tokens)) for tokens in (20, 64, 150, 333, 500))]
    for pair in pairs:
        pair.ask_decode().ask_prefill()
    targets = {pair.target for pair in pairs}
    until(lambda: [e.step() for e in both] and targets <= both[1].answers.keys(), 60, "answers")
    assert [both[1].answers[pair.target].computed for pair in pairs] == [[1, 1]] * len(pairs)
    first.settle()


def test_prompt_log_probabilities_take_nothing(start: Start) -> None:
    pair = Pair.start(start).ask_prefill()
    request = pair.decode.request(pair.prompt, kv=pair.for_decode(), max_tokens=2)
    request.skip_reading_prefix_cache = True
    pair.decode.scheduler.add_request(request)
    pair.target = request.request_id
    assert pair.finish().computed == [LENGTH, 1]


@pytest.mark.parametrize("payload", [b"", b"\x81", notices.encode(Ask(id="x"))[:-1], b"\x82\xa4type\xa3ask\xa2id\xa0"])
def test_other_notices_are_dropped(start: Start, payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair.start(start)
    pair.decode.side._connector.notify(pair.prefill.endpoint, payload)
    pair.heard(pair.prefill)
    pair.prefill.step()
    assert "was dropped: not a notice of this connector" in caplog.text


def test_words_of_unknown_streams_change_nothing(start: Start) -> None:
    pair = Pair.start(start).meet()
    for word in (News(id="?", ended="why"), News(id=pair.id, ticket=b"no ticket")):
        pair.prefill.side._connector.notify(pair.decode.endpoint, notices.encode(word))
    pair.heard(pair.decode)
    answer = pair.finish()
    assert (answer.status, answer.computed) == expected("recompute")  # for the second word was of this one
