"""Streamed prompts whose last step goes to decode layer by layer, while it is at work.

The engine calls `after_layer` when its first rank has computed a layer: what happens then happens in the midst of a
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from kvxfer.errors import InvalidRequest, TransferError
from kvxfer.layout import GroupKind
from kvxfer.vllm import KvxferConnector, engine, notices, versions
from kvxfer.vllm.intake import _Receiving
from kvxfer.vllm.layerwise import Layerwise
from kvxfer.vllm.notices import Reserved
from tests.processes import until

from .engine import BLOCK_TOKENS, TO_PREFILL, Engine
from .model import LAYERS
from .test_contract import prompt
from .test_streaming import CHUNK, LENGTH, Pair, expected

Start = Callable[..., Engine]
AT_ONCE = {"max_batched_tokens": 4096}


def pair_of(start: Start, *, chunks: bool = False, prefill: dict[str, Any] | None = None, **options: Any) -> Pair:
    """A pair whose prefill engine sends by layers; it computes the prompt in one step, or in `chunks`."""
    own = {"stream_layers": True, **({} if chunks else AT_ONCE), **(prefill or {})}
    pair = Pair.start(start, prefill=own, **options)
    for side in (pair.prefill, pair.decode):
        side.step()  # ranks tell their schedulers where they listen
    return pair


def layerwise(pair: Pair) -> Layerwise:
    return pair.prefill.ranks[0].connector._worker._layerwise


def is_sent(pair: Pair, rank: int = 0) -> bool:
    """Whether a rank of decode has reserved blocks, and its like has taken them up. Ranks have their steps in turn."""
    intake = pair.decode.ranks[rank].connector._worker._intakes.get(pair.target)
    return intake is not None and isinstance(intake._running, _Receiving) and intake._running.transfer.claimed


def is_last_step(pair: Pair) -> bool:
    request = pair.prefill.scheduler.requests.get(pair.source)
    return request is not None and request.num_computed_tokens >= request.num_prompt_tokens  # advanced by schedule()


def arrived(pair: Pair, layer: int) -> bool:
    """Whether decode has all of a layer that prefill computes."""
    table = pair.decode.scheduler.kv_cache_manager.get_block_ids(pair.target)[0]
    tokens = pair.prompt[: pair.prefill.scheduler.requests[pair.source].num_prompt_tokens]
    try:
        pair.decode.ranks[0].model.check(0, layer, table, tokens, 0)
    except AssertionError:
        return False
    return True


def meet_within(pair: Pair, seen: list[int], *, each: bool = True) -> None:
    """Have decode reserve blocks during the last step, and where `each` layer shall come before the next is computed,
    wait for it. `seen` is given the layers that had arrived before the step was over."""

    def after_layer(layer: int) -> None:
        if not is_last_step(pair) or layer >= LAYERS:
            return
        if layer == 0:
            until(lambda: pair.decode.step() or is_sent(pair), 10, "a reservation")
        if each:
            until(lambda: arrived(pair, layer), 30, f"layer {layer}")
            seen.append(layer)

    pair.prefill.after_layer = after_layer


def fetched_bytes(pair: Pair) -> int:
    return sum(sum(stats["bytes"]) for stats in pair.decode.stats)


# --- what moves when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [False, True], ids=["at once", "in chunks"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decode": {"block_tokens": 64}},
        {"prefill": {"block_tokens": 64}},
        {"window": True},
        {"window": True, "decode": {"block_tokens": 64}},
        {"ways": ["packed"]},
    ],
    ids=str,
)
def test_layers_come_while_the_step_is_at_work(start: Start, options: dict[str, Any], chunks: bool) -> None:
    pair = pair_of(start, chunks=chunks, **options).ask_decode()
    seen: list[int] = []
    meet_within(pair, seen)
    pair.ask_prefill()
    answer = pair.finish()
    assert seen == list(range(LAYERS))
    assert (answer.status, answer.computed) == (FinishReason.LENGTH, [1, 1])
    assert pair.decode.total("layerwise") == 1
    assert pair.decode.total("failed") == pair.decode.total("given_up") == pair.prefill.total("expired") == 0
    if not chunks and "window" not in options:
        assert fetched_bytes(pair) == 0


@pytest.mark.parametrize("options", [{}, {"window": True}], ids=str)
def test_every_rank_sends_to_its_like(start: Start, options: dict[str, Any]) -> None:
    pair = pair_of(start, ranks=2, **options).ask_decode()
    meet_within(pair, [], each=False)
    pair.ask_prefill().prefill.step()
    until(lambda: is_sent(pair, rank=1), 10, "the second rank")
    answer = pair.finish()
    assert (answer.status, answer.computed) == (FinishReason.LENGTH, [1, 1])
    assert pair.decode.total("layerwise") == 2
    assert pair.decode.total("failed") == pair.decode.total("given_up") == 0


def test_decode_needs_no_further_word(start: Start) -> None:
    """Where nothing but full attention has a cache, the last layer ends the load; prefill's lease ends by itself."""
    pair = pair_of(start).ask_decode()
    meet_within(pair, [])
    pair.ask_prefill().prefill.step()
    [answer] = pair.decode.run(pair.target)
    assert answer.computed == [1, 1]
    pair.settle()
    assert (pair.prefill.total("released"), pair.prefill.total("expired")) == (1, 0)


def test_blocks_reserved_before_the_last_step(start: Start) -> None:
    """With chunks decode has its blocks long before; what parts bring does not come again by layers."""
    pair = pair_of(start, chunks=True).meet()
    pair.take_parts(2)
    parts = pair.decode.total("parts")
    seen: list[int] = []
    meet_within(pair, seen)
    pair.finish()
    assert parts == 2 and seen == list(range(LAYERS))
    block_bytes = pair.decode.ranks[0].connector._worker._cache.layout.block_bytes("0.full")
    whole = -(-LENGTH // BLOCK_TOKENS) * block_bytes
    assert whole - (2 * CHUNK // BLOCK_TOKENS + 3) * block_bytes <= fetched_bytes(pair) < whole


def test_what_decode_has_cached_is_not_sent(start: Start) -> None:
    pair = pair_of(start)
    cached = 9 * BLOCK_TOKENS
    pair.decode.run(pair.decode.add([*pair.prompt[:cached], 5]))
    sizes: list[int] = []
    worker = pair.decode.ranks[0].connector._worker
    ended = worker._reservation_ended
    worker._reservation_ended = lambda order, stats: (stats and sizes.append(stats.bytes)) or ended(order, stats)
    pair.ask_decode()
    meet_within(pair, [])
    answer = pair.ask_prefill().finish()
    assert (answer.local_tokens, answer.external_tokens) == (cached, LENGTH - cached)
    assert sizes == [(-(-LENGTH // BLOCK_TOKENS) - 9) * worker._cache.layout.block_bytes("0.full")]


def test_what_prefill_has_cached_is_sent(start: Start) -> None:
    pair = pair_of(start)
    pair.prefill.run(pair.prefill.add(pair.prompt[: 12 * BLOCK_TOKENS + 1]))
    pair.ask_decode()
    meet_within(pair, [])
    answer = pair.ask_prefill().finish()
    assert (answer.computed, answer.external_tokens, fetched_bytes(pair)) == ([1, 1], LENGTH, 0)


def test_many_in_one_step(start: Start) -> None:
    first = pair_of(start, num_blocks=100)
    both = first.prefill, first.decode
    pairs = [first, *(Pair(*both, prompt(tokens, tokens)) for tokens in (20, 64, 150, 333, 500))]
    for pair in pairs:
        pair.ask_decode().ask_prefill()

    def after_layer(layer: int) -> None:
        if layer == 0:
            until(lambda: both[1].step() or all(map(is_sent, pairs)), 30, "reservations")

    both[0].after_layer = after_layer
    both[0].step()
    both[0].after_layer = lambda layer: None
    targets = {pair.target for pair in pairs}
    until(lambda: [e.step() for e in both] and targets <= both[1].answers.keys(), 60, "answers")
    assert [both[1].answers[pair.target].computed for pair in pairs] == [[1, 1]] * len(pairs)
    assert both[1].total("layerwise") == len(pairs)
    assert fetched_bytes(first) == 0
    first.settle()


# --- where layers do not come, the lease brings everything --------------------------------------------------


def fetches_it_all(pair: Pair) -> None:
    answer = pair.finish()
    assert (answer.status, answer.computed) == (FinishReason.LENGTH, [1, 1])
    assert pair.decode.total("layerwise") == 0
    assert pair.decode.total("failed") == pair.decode.total("given_up") == 0


@pytest.mark.parametrize("options", [{"prefill": {"ranks": 2}}, {"decode": {"ranks": 2}}], ids=str)
def test_unequal_ranks(start: Start, options: dict[str, Any]) -> None:
    pair = pair_of(start, **options).ask_decode()
    pair.decode.step()
    pair.ask_prefill()

    def after_layer(layer: int) -> None:
        if layer == 0:
            until(lambda: pair.decode.step() or pair.loads(), 30, "blocks of decode")

    pair.prefill.after_layer = after_layer
    pair.prefill.step()
    pair.prefill.after_layer = lambda layer: None
    fetches_it_all(pair)


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_ranks_are_not_known_yet(start: Start, which: str) -> None:
    """As in an engine's first steps, where its scheduler is ahead of its workers."""
    pair = pair_of(start)
    for name in ("prefill", "decode"):
        side = getattr(pair, name).side
        if name == which:
            side._rank_endpoints = side._streams_in._endpoints = side._streams_out._endpoints = lambda: ()
    pair.ask_decode().ask_prefill()

    def after_layer(layer: int) -> None:
        if layer == 0:
            until(lambda: pair.decode.step() or pair.loads(), 30, "blocks of decode")
            for _ in range(20):
                pair.decode.step()

    pair.prefill.after_layer = after_layer
    pair.prefill.step()
    pair.prefill.after_layer = lambda layer: None
    assert not pair.decode.side._streams_in._reservations
    fetches_it_all(pair)


def test_decode_comes_when_the_step_is_over(start: Start) -> None:
    pair = pair_of(start).ask_prefill()
    pair.prefill.run(pair.source)
    pair.prefill.step()
    pair.ask_decode()
    fetches_it_all(pair)


def test_parts_that_did_not_come(start: Start) -> None:
    """Decode lacks what lies before the last step's tokens: prefill must keep its lease, which brings it all."""
    pair = pair_of(start, chunks=True).meet()
    intake = pair.decode.ranks[0].connector._worker._intakes[pair.target]
    fetch = intake._start_fetch

    def fails(*_: Any) -> Any:
        raise TransferError("the part does not come")

    def after_layer(layer: int) -> None:
        if is_last_step(pair) and layer == 0:
            until(lambda: pair.decode.step() or is_sent(pair) or (orders and not decode._reservations), 10, "a word")
            intake._start_fetch = fetch

    decode, make_room, orders = pair.decode.side._streams_in, intake.make_room, []
    intake.make_room = lambda order: (orders.append(order), make_room(order))
    intake._start_fetch, pair.prefill.after_layer = fails, after_layer
    fetches_it_all(pair)
    assert [order.first_token > 0 for order in orders] == [True]


@pytest.mark.skipif(not versions.REPORTS_FAILED_REQUESTS, reason="this version does not tell of such loads")
def test_another_connector_fails_to_load_within_the_step(start: Start) -> None:
    """vLLM then computes the tokens again: what the step has left of them, and of those behind them, is wrong."""
    pair = pair_of(start, prefill={"policy": "recompute", "check": False}).ask_decode()
    prefill, worker = pair.prefill.scheduler, pair.prefill.ranks[0].connector
    matched, loads = prefill.connector.get_num_new_matched_tokens, [4 * BLOCK_TOKENS]
    prefill.connector.get_num_new_matched_tokens = lambda *given: (loads.pop(), False) if loads else matched(*given)
    pair.ask_prefill()
    failed: list[set[int]] = []

    def after_layer(layer: int) -> None:
        if layer == 0 and not failed:
            failed.append(set(prefill.kv_cache_manager.get_block_ids(pair.source)[0][:4]))
            for _ in range(50):
                pair.decode.step()
                time.sleep(0.01)

    pair.prefill.after_layer = after_layer
    worker.get_block_ids_with_load_errors = lambda: failed[0]
    pair.prefill.step()
    del worker.get_block_ids_with_load_errors
    answer = pair.finish()
    assert (answer.status, answer.computed) == (FinishReason.LENGTH, [1, 1])
    later = Pair(pair.prefill, pair.decode, prompt(LENGTH, 9)).ask_decode()
    pair.prefill.after_layer = lambda layer: [pair.decode.step() for _ in range(20)]
    later.ask_prefill()
    fetches_it_all(later)


def test_an_endpoint_that_is_none(start: Start) -> None:
    """Nothing stays reserved under a ticket whose slot is given back."""
    pair = pair_of(start).ask_decode()
    pair.prefill.side._streams_out._endpoints = lambda: ("nowhere",)
    decode = pair.decode.side._streams_in
    ended: list[str] = []
    reservation_ended = decode.reservation_ended
    decode.reservation_ended = lambda request, ranks: (ended.append(request), reservation_ended(request, ranks))

    def after_layer(layer: int) -> None:
        if layer == 0 and not ended:
            until(lambda: pair.decode.step() or ended, 10, "a report")

    pair.prefill.after_layer = after_layer
    pair.ask_prefill().prefill.step()
    node = pair.decode.ranks[0].connector._worker._connector._node
    until(lambda: not node.promises and not node.active, 10, "nothing to be reserved")
    fetches_it_all(pair)


@pytest.mark.parametrize("has_all_layers", [True, False])
def test_layers_that_decode_may_lack(start: Start, has_all_layers: bool) -> None:
    """Those that no rank of prefill has; a pipeline's rank cannot tell."""
    pair = pair_of(start, decode={"allow_missing_layers": True}).ask_decode()
    side = layerwise(pair)
    assert side._has_all_layers
    side._has_all_layers = has_all_layers
    allowed: list[bool] = []
    send = side._cache.send
    side._cache.send = lambda *given, **options: allowed.append(options["allow_missing"]) or send(*given, **options)
    meet_within(pair, [])
    assert pair.ask_prefill().finish().computed == [1, 1]
    assert allowed == [has_all_layers]


def test_a_layer_that_is_computed_twice(start: Start) -> None:
    """As where a step runs in several batches: its first end says nothing."""
    pair = pair_of(start).ask_decode()
    meet_within(pair, [], each=False)
    meet = pair.prefill.after_layer

    def twice(layer: int) -> None:
        meet(layer)
        if layer == 0 and is_last_step(pair):
            pair.prefill.ranks[0].connector.save_kv_layer("model.layers.0.self_attn.attn", None, None)

    pair.prefill.after_layer = twice
    pair.ask_prefill()
    fetches_it_all(pair)


def test_blocks_for_another_prompt(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    pair = pair_of(start)
    other = pair.decode.ranks[0].connector._worker
    reservation = other._cache.reserve({"0.full": [1, 2]}, tokens=LENGTH, ttl_s=20.0, request_id="another#prompt")
    word = notices.encode(Reserved(id=pair.id, ticket=bytes(reservation.ticket)))
    other._connector.notify(pair.prefill.ranks[0].connector._worker._connector.endpoint, word)
    until(lambda: pair.id in layerwise(pair)._early, 30, "the word")
    pair.ask_prefill().prefill.step()
    assert "the blocks are for another prompt" in caplog.text
    assert layerwise(pair)._prompts[pair.source].send is None and not reservation.claimed
    reservation.cancel()
    pair.ask_decode()
    fetches_it_all(pair)


@pytest.mark.parametrize("payload", [b"", b"\x81", notices.encode(Reserved(id="x", ticket=b"no ticket"))])
def test_words_that_are_none_change_nothing(start: Start, payload: bytes) -> None:
    pair = pair_of(start).ask_decode()
    pair.decode.side._connector.notify(pair.prefill.ranks[0].connector._worker._connector.endpoint, payload)
    meet_within(pair, [])
    assert pair.ask_prefill().finish().computed == [1, 1]
    assert pair.decode.total("layerwise") == 1


# --- what ends early ----------------------------------------------------------------------------------------


def hold_last_layer(pair: Pair) -> Callable[[], None]:
    """Keep the last layer of the step from being reported, as on a GPU that is still at it. Returns what reports it."""
    side = layerwise(pair)
    held: list[tuple[Any, str]] = []
    tell = side._tell
    last = side._layers[LAYERS - 1]
    side._tell = lambda prompt, layer: held.append((prompt, layer)) if layer == last else tell(prompt, layer)
    return lambda: [tell(*one) for one in held]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_prefill_is_aborted_while_layers_are_sent(start: Start, policy: str) -> None:
    """What was being read is overwritten, and nothing of it counts."""
    pair = pair_of(start, policy=policy).ask_decode()
    meet_within(pair, [], each=False)
    release, meet = hold_last_layer(pair), pair.prefill.after_layer

    def then_abort(layer: int) -> None:
        meet(layer)
        if layer == LAYERS - 1 and is_last_step(pair):
            pair.prefill.abort(pair.source)

    pair.prefill.after_layer = then_abort
    pair.ask_prefill().prefill.step()
    other = pair.prefill.add(prompt(60 * BLOCK_TOKENS, 3))
    pair.prefill.step()
    release()
    pair.prefill.run(other)
    answer = pair.finish()
    assert (answer.status, answer.computed) == expected(policy)
    assert pair.decode.total("layerwise") == 0


def test_prefill_is_preempted_while_layers_are_sent(start: Start) -> None:
    """Another prompt gets the blocks; what has been read of them does not count."""
    pair = pair_of(start).ask_decode()
    meet_within(pair, [], each=False)
    release = hold_last_layer(pair)
    pair.source = pair.prefill.add(pair.prompt, kv={**TO_PREFILL, "kvxfer_stream": {"id": pair.id}}, max_tokens=2)
    pair.prefill.step()
    pair.prefill.after_layer = lambda layer: None
    pair.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    pair.prefill.add(prompt(40 * BLOCK_TOKENS, 3))
    pair.prefill.step()
    release()
    fetches_it_all(pair)


def test_packed_layers_that_are_written_before_the_stop_is_heard(start: Start) -> None:
    """Whoever moves bytes hears of a stop on another thread, and what was packed by then does not count either."""
    pair = pair_of(start, ways=["packed"]).ask_decode()
    meet_within(pair, [], each=False)
    release = hold_last_layer(pair)
    pair.ask_prefill().prefill.step()
    side = layerwise(pair)
    send = side._prompts[pair.source].send
    until(lambda: send._source is not None, 10, "a grant")
    send._stop_call = lambda: None
    side.forget(pair.source)
    release()
    fetches_it_all(pair)


def test_decode_is_aborted_while_layers_are_sent(start: Start) -> None:
    pair = pair_of(start).ask_decode()
    meet_within(pair, [], each=False)
    release = hold_last_layer(pair)
    pair.ask_prefill().prefill.step()
    pair.decode.abort(pair.target)
    pair.decode.step()
    release()
    pair.settle()
    assert pair.prefill.total("expired") == 0


def test_the_lease_ends_before_the_last_layer(start: Start) -> None:
    """Its blocks are given back, whatever is still being sent: decode computes the prompt."""
    pair = pair_of(start, lease_s=0.3).ask_decode()
    meet_within(pair, [], each=False)
    hold_last_layer(pair)
    pair.ask_prefill().prefill.run(pair.source)
    both = pair.prefill, pair.decode
    free = pair.prefill.cache.num_blocks - 1
    until(lambda: pair.prefill.step() or pair.prefill.free_blocks() == free, 30, "the lease to end")
    until(lambda: [e.step() for e in both] and pair.target in pair.decode.answers, 60, "an answer")
    assert pair.decode.answers[pair.target].computed == [LENGTH, 1]
    assert pair.decode.total("layerwise") == 0
    pair.settle()


def test_a_send_that_does_not_end(start: Start) -> None:
    """Decode does not wait for it as long as the lease would last."""
    pair = pair_of(start, lease_s=3.0).ask_decode()
    meet_within(pair, [], each=False)
    hold_last_layer(pair)
    pair.ask_prefill()
    fetches_it_all(pair)
    assert pair.prefill.total("expired") == 0


def test_prefill_dies_while_layers_are_sent(start: Start) -> None:
    pair = pair_of(start, timeout_s=2.0).ask_decode()
    meet_within(pair, [], each=False)
    hold_last_layer(pair)
    pair.ask_prefill().prefill.step()
    pair.prefill.close()
    [answer] = pair.decode.run(pair.target)
    assert (answer.status, answer.computed) == expected("recompute")
    assert pair.decode.total("layerwise") == 0


# --- options ------------------------------------------------------------------------------------------------


def test_layers_need_streams(start: Start) -> None:
    with pytest.raises(InvalidRequest, match="stream_layers needs stream"):
        start(stream_layers=True)


def test_graphs_are_piecewise() -> None:
    assert KvxferConnector.requires_piecewise_for_cudagraph({"stream": True, "stream_layers": True})
    assert not KvxferConnector.requires_piecewise_for_cudagraph({"stream": True})


@pytest.mark.parametrize("what", ["speculative_config", "use_ubatching"])
def test_where_a_layers_end_says_nothing(what: str) -> None:
    class Parallel:
        use_ubatching = what == "use_ubatching"

    class Config:
        speculative_config = object() if what == "speculative_config" else None
        parallel_config = Parallel

    with pytest.raises(InvalidRequest, match="stream_layers cannot be used with"):
        engine.check_layerwise(Config)


def test_groups_of_the_tests_are_those_that_count(start: Start) -> None:
    """A window's blocks are left to the lease, so a model with one is not done with the last layer."""
    pair = pair_of(start, window=True)
    kinds = {group.kind for group in pair.prefill.ranks[0].connector._worker.groups}
    assert kinds == {GroupKind.FULL, GroupKind.SLIDING}
    assert not pair.prefill.ranks[0].connector._worker._sends_all
