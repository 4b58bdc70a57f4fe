"""What vLLM expects of a connector: a prefill and a decode engine whose schedulers and aggregators are vLLM's own.

`Engine.step` raises when a request's cache does not hold what it should, and when a report breaks the contract.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from vllm.v1.engine import FinishReason

from .engine import BLOCK_TOKENS, TO_PREFILL, WINDOW, Engine

Start = Callable[..., Engine]
LENGTHS = (1, 2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 200, 700)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [(31 * seed + 13 * place * place + place) % 997 + 1 for place in range(tokens)]


def settle(*engines: Engine) -> None:
    for engine in engines:
        engine.settle()


def test_prompts_of_any_length(start: Start) -> None:
    prefill, decode = start(), start()
    for tokens in LENGTHS:
        kv = prefill.prefill(prompt(tokens, tokens))
        [answer] = decode.run(decode.add(prompt(tokens, tokens), kv=kv, max_tokens=3))
        assert answer.computed == [1, 1, 1]
        assert answer.external_tokens == tokens or tokens == 1
    settle(prefill, decode)
    assert prefill.total("released") == decode.total("bytes") == len(LENGTHS)
    assert decode.total("failed") == prefill.total("expired") == 0


def test_many_at_once_and_in_chunks(start: Start) -> None:
    prefill, decode = start(max_batched_tokens=100), start(max_batched_tokens=64)
    prompts = [prompt(tokens, seed) for seed, tokens in enumerate((5, 31, 64, 99, 150, 333))]
    first = prefill.run(*[prefill.add(p, kv=TO_PREFILL) for p in prompts])
    prefill.step()
    answers = decode.run(*[decode.add(p, kv=a.kv, max_tokens=4) for p, a in zip(prompts, first, strict=True)])
    assert [answer.external_tokens for answer in answers] == [len(p) for p in prompts]
    settle(prefill, decode)


def test_decode_asks_before_prefill_has_published(start: Start) -> None:
    prefill, decode = start(), start()
    kv = prefill.prefill(prompt(90), published=False)
    request = decode.add(prompt(90), kv=kv, max_tokens=2)
    for _ in range(50):
        decode.step()
    assert request not in decode.answers
    prefill.step()
    assert decode.run(request)[0].external_tokens == 90
    settle(prefill, decode)


def test_an_idle_step_waits_for_what_it_has_ordered(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.vllm.worker._LINGER_S", 60.0)
    prefill, decode = start(), start()
    soon, late = prefill.prefill(prompt(200, 1)), prefill.prefill(prompt(90), published=False)
    request = decode.add(prompt(200, 1), kv=soon, max_tokens=4)
    decode.step()
    assert request in decode.scheduler.finished_recving_kv_req_ids
    decode.step()  # computes: nothing is waited for from here on
    waiting = decode.add(prompt(90), kv=late, max_tokens=2)
    began = time.monotonic()
    decode.step()
    assert time.monotonic() - began < 30
    prefill.step()
    decode.run(request, waiting)
    settle(prefill, decode)


def test_what_decode_has_cached_is_not_fetched(start: Start) -> None:
    prefill, decode = start(), start()
    shared = prompt(4 * BLOCK_TOKENS)
    decode.run(decode.add([*shared, 5], max_tokens=1))
    longer = shared + prompt(40, 9)
    [answer] = decode.run(decode.add(longer, kv=prefill.prefill(longer), max_tokens=2))
    assert (answer.local_tokens, answer.external_tokens) == (len(shared), 40)
    settle(prefill, decode)


def test_a_full_local_hit_only_releases(start: Start) -> None:
    prefill, decode = start(window=True), start(window=True)
    whole = prompt(2 * BLOCK_TOKENS + 1)  # with a window the last token is never handed over
    for _ in range(2):
        [answer] = decode.run(decode.add(whole, kv=prefill.prefill(whole), max_tokens=2))
    assert (answer.local_tokens, answer.external_tokens) == (2 * BLOCK_TOKENS, 0)
    settle(prefill, decode)
    assert prefill.total("released") == 2


# --- requests that end early --------------------------------------------------------------------------------


def test_a_rejected_request_releases(start: Start) -> None:
    prefill, decode = start(), start()
    kv = prefill.prefill(prompt(100))
    decode.reject(kv)
    decode.step()
    settle(prefill, decode)
    assert prefill.total("released") == 1


def test_a_prompt_that_looks_like_a_rejected_one(start: Start) -> None:
    prefill, decode = start(), start()
    [answer] = decode.run(decode.add([0], kv=prefill.prefill([5]), max_tokens=2))
    assert answer.status is FinishReason.LENGTH
    settle(prefill, decode)
    assert decode.total("bytes") == 0


def test_aborted_before_it_is_scheduled(start: Start) -> None:
    prefill, decode = start(), start()
    request = decode.add(prompt(100), kv=prefill.prefill(prompt(100)))
    decode.abort(request)
    decode.step()
    settle(prefill, decode)
    assert (prefill.total("released"), decode.total("bytes")) == (1, 0)


def test_aborted_while_it_waits_for_its_blocks(start: Start) -> None:
    prefill, decode = start(), start()
    kv = prefill.prefill(prompt(100), published=False)
    request = decode.add(prompt(100), kv=kv)
    decode.step()
    assert decode.free_blocks() == decode.cache.num_blocks - 1 - 4
    decode.abort(request)
    settle(decode, prefill)  # though prefill had not published yet
    assert (prefill.total("released"), decode.total("failed")) == (1, 0)  # nobody wants it: no failure
    assert not decode.side._failed


def test_aborted_when_its_blocks_have_come(start: Start) -> None:
    prefill, decode = start(), start()
    request = decode.add(prompt(100), kv=prefill.prefill(prompt(100)), max_tokens=100)
    while not decode._computed.get(request):
        prefill.step()
        decode.step()
    decode.abort(request)
    settle(prefill, decode)


def test_prefill_that_is_aborted_keeps_nothing(start: Start) -> None:
    prefill = start(max_batched_tokens=64)
    request = prefill.add(prompt(300), kv=TO_PREFILL)
    prefill.step()
    prefill.abort(request)
    settle(prefill)
    assert prefill.answers[request].kv is None


# --- tickets ------------------------------------------------------------------------------------------------


def test_another_prompts_ticket_is_refused(start: Start) -> None:
    prefill, decode = start(), start()
    kv = prefill.prefill(prompt(100))
    [answer] = decode.run(decode.add(prompt(100, 1), kv=kv, max_tokens=2))
    assert (answer.external_tokens, answer.computed, answer.status) == (0, [100, 1], FinishReason.LENGTH)
    [honest] = decode.run(decode.add(prompt(100), kv=kv, max_tokens=2))
    assert honest.external_tokens == 100
    settle(prefill, decode)
    assert (decode.total("refused"), decode.total("failed")) == (1, 0)


@pytest.mark.parametrize("change", ["altered", "of another secret", "no text", "not ascii", "salt", "shorter prompt"])
def test_tickets_that_are_refused(start: Start, change: str) -> None:
    prefill = start(secret="quite another secret") if change == "of another secret" else start()
    decode = start()
    kv = prefill.prefill(prompt(100))
    asked = prompt(100)
    more = {}
    if change == "altered":
        kv["kvxfer_ticket"] = "AAAA" + kv["kvxfer_ticket"][4:]
    elif change == "not ascii":
        kv["kvxfer_ticket"] = "\u00e9" * 40
    elif change == "no text":
        kv["kvxfer_ticket"] = 5
    elif change == "salt":
        more["cache_salt"] = "someone else's"
    elif change == "shorter prompt":
        asked = asked[:99]
    [answer] = decode.run(decode.add(asked, kv=kv, **more))
    assert (answer.external_tokens, answer.status) == (0, FinishReason.LENGTH)
    settle(decode)
    assert decode.total("refused") == 1


@pytest.mark.parametrize("beside", ["window", "state"])
def test_a_prompt_that_prefill_has_computed_to_its_end(start: Start, beside: str) -> None:
    """Decode could not compute the last token anew: the window, or the state, has moved on."""
    options = {beside: True, "prefix_caching": False}
    prefill, decode = start(**options), start(**options)
    [answer] = prefill.run(prefill.add(prompt(100), kv={**TO_PREFILL, "_p_side_truncated": True}))
    prefill.step()
    [answer] = decode.run(decode.add(prompt(100), kv=answer.kv, max_tokens=2))
    assert (answer.external_tokens, answer.computed) == (0, [100, 1])
    settle(prefill, decode)
    assert prefill.total("released") == 1


def test_one_ticket_for_several_answers(start: Start) -> None:
    """n=2: one fetch, and the other finds the prefix that the first has left."""
    prefill, decode = start(), start()
    kv = prefill.prefill(prompt(100))
    answers = decode.run(*[decode.add(prompt(100), kv=kv, max_tokens=2) for _ in range(2)])
    assert sorted(answer.external_tokens for answer in answers) == [0, 100]
    assert sorted(answer.local_tokens for answer in answers) == [0, 96]
    settle(prefill, decode)
    assert (decode.total("bytes"), decode.total("failed"), prefill.total("released")) == (1, 0, 1)


def test_prompt_log_probabilities_take_nothing(start: Start) -> None:
    """Such a request computes its whole prompt."""
    prefill, decode = start(), start()
    kv = prefill.prefill(prompt(100))
    request = decode.request(prompt(100), kv=kv, max_tokens=1)
    request.skip_reading_prefix_cache = True
    decode.scheduler.add_request(request)
    assert decode.run(request.request_id)[0].external_tokens == 0
    settle(prefill, decode)
    assert prefill.total("released") == 1


# --- leases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_lease_that_ran_out(start: Start, policy: str) -> None:
    prefill, decode = start(lease_s=0.2, num_blocks=8), start(policy=policy)
    kv = prefill.prefill(prompt(100))
    settle(prefill)
    prefill.run(prefill.add(prompt(200, 3)))  # which takes the blocks
    request = decode.add(prompt(100), kv=kv, max_tokens=2)
    [answer] = decode.run(request)
    assert answer.status is (FinishReason.LENGTH if policy == "recompute" else FinishReason.ERROR)
    assert answer.computed == ([100, 1] if policy == "recompute" else [])
    settle(decode)
    assert (prefill.total("expired"), decode.total("failed")) == (1, 1)  # and it was not offered again


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_vllm_wants_less_than_was_offered(start: Start, policy: str) -> None:
    prefill, decode = start(), start(policy=policy)
    decode.cap_loads(2 * BLOCK_TOKENS)
    [answer] = decode.run(decode.add(prompt(200), kv=prefill.prefill(prompt(200)), max_tokens=2))
    assert answer.status is (FinishReason.LENGTH if policy == "recompute" else FinishReason.ERROR)
    assert answer.computed == ([200, 1] if policy == "recompute" else [])
    settle(prefill, decode)
    assert (prefill.total("released"), decode.total("failed"), decode.total("bytes")) == (1, 1, 0)
    assert not decode.leftovers()


def test_failed_loads_do_not_hold_each_other_up(start: Start) -> None:
    """A prompt needs more blocks to be computed than to be fetched, for a window's start slides out."""
    prefill = start(lease_s=0.2, num_blocks=64, window=True)
    decode = start(policy="recompute", num_blocks=32, window=True)
    prompts = [prompt(6 * BLOCK_TOKENS + 10, seed) for seed in range(3)]
    kvs = [prefill.prefill(p) for p in prompts]
    settle(prefill)
    requests = [decode.add(p, kv=kv, max_tokens=2 * BLOCK_TOKENS) for p, kv in zip(prompts, kvs, strict=True)]
    assert [answer.status for answer in decode.run(*requests)] == [FinishReason.LENGTH] * 3
    settle(decode)


def test_leases_are_renewed_while_a_request_waits(start: Start) -> None:
    prefill, decode = start(lease_s=1.5), start(num_blocks=8)
    decode.add(prompt(150, 5), max_tokens=70)
    decode.step()
    kv = prefill.prefill(prompt(150))
    waiting = decode.add(prompt(150), kv=kv, max_tokens=2)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        decode.step()
        prefill.step()
        time.sleep(0.05)
    assert prefill.total("expired") == 0
    assert decode.run(waiting)[0].external_tokens == 150
    settle(prefill, decode)


def test_prompts_wait_while_leases_hold_too_much(start: Start) -> None:
    prefill, decode = start(num_blocks=16, max_leased_share=0.4), start()
    first = prefill.prefill(prompt(7 * BLOCK_TOKENS))
    second = prefill.add(prompt(100, 1), kv=TO_PREFILL)
    local = prefill.add(prompt(100, 2))
    prefill.run(local)  # what is decoded here does not wait
    for _ in range(20):
        prefill.step()
    assert second not in prefill.answers
    decode.run(decode.add(prompt(7 * BLOCK_TOKENS), kv=first))
    [answer] = prefill.run(second)
    prefill.step()
    decode.run(decode.add(prompt(100, 1), kv=answer.kv))
    settle(prefill, decode)


# --- ranks, windows, unequal pools --------------------------------------------------------------------------


@pytest.mark.parametrize("window", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_tensor_parallelism(start: Start, ranks: tuple[int, int], window: bool) -> None:
    prefill, decode = (start(ranks=count, window=window) for count in ranks)
    for tokens in LENGTHS:
        kv = prefill.prefill(prompt(tokens, tokens))
        [answer] = decode.run(decode.add(prompt(tokens, tokens), kv=kv, max_tokens=2))
        assert answer.computed == [1, 1]
    settle(prefill, decode)


def test_a_request_waits_for_the_slowest_rank(start: Start) -> None:
    prefill, decode = start(ranks=2), start(ranks=2)
    kv = prefill.prefill(prompt(100))
    decode.ranks[1].silent = prefill.ranks[0].silent = True
    request = decode.add(prompt(100), kv=kv, max_tokens=2)
    for _ in range(100):
        prefill.step()
        decode.step()
        time.sleep(0.002)
    assert request not in decode.answers
    decode.ranks[1].silent = False
    decode.run(request)
    assert prefill.free_blocks() < prefill.cache.num_blocks - 1
    prefill.ranks[0].silent = False
    settle(prefill, decode)


@pytest.mark.parametrize("window", [False, True], ids=["full", "window"])
def test_aborted_with_ranks_apart(start: Start, window: bool) -> None:
    prefill, decode = start(ranks=2, window=window), start(ranks=2, window=window)
    request = decode.add(prompt(100), kv=prefill.prefill(prompt(100)))
    decode.ranks[0].silent = True
    decode.step()
    decode.abort(request)
    for _ in range(20):
        decode.step()
    assert decode.free_blocks() < decode.cache.num_blocks - 1
    decode.ranks[0].silent = False
    settle(decode, prefill)


def test_windows_at_every_length(start: Start) -> None:
    """The window's edge falls on every place of a block; a token too few would be noticed."""
    prefill, decode = start(window=True), start(window=True)
    for tokens in range(WINDOW - 2, WINDOW + 2 * BLOCK_TOKENS + 2):
        kv = prefill.prefill(prompt(tokens, tokens))
        [answer] = decode.run(decode.add(prompt(tokens, tokens), kv=kv, max_tokens=2))
        assert answer.computed == [1, 1]
    settle(prefill, decode)


@pytest.mark.parametrize("window", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("sizes", [(32, 64), (64, 32), (32, 96)], ids=str)
def test_unequal_block_sizes(start: Start, sizes: tuple[int, int], window: bool) -> None:
    prefill, decode = (start(block_tokens=size, window=window) for size in sizes)
    for tokens in (*LENGTHS, 63, 64, 65, 97):
        kv = prefill.prefill(prompt(tokens, tokens))
        [answer] = decode.run(decode.add(prompt(tokens, tokens), kv=kv, max_tokens=2))
        assert answer.computed == [1, 1]
    settle(prefill, decode)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_beside_attention(start: Start, ranks: int) -> None:
    """Decode computes the last token from the state before it."""
    options = {"state": True, "prefix_caching": False, "ranks": ranks}
    prefill, decode = start(**options), start(**options)
    for tokens in LENGTHS:
        kv = prefill.prefill(prompt(tokens, tokens))
        [answer] = decode.run(decode.add(prompt(tokens, tokens), kv=kv, max_tokens=2))
        assert (answer.external_tokens, answer.computed) == (tokens - 1, [1, 1])
    settle(prefill, decode)


def test_states_of_unequal_ranks_are_refused_by_name(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    options = {"state": True, "prefix_caching": False}
    prefill, decode = start(ranks=2, **options), start(policy="recompute", **options)
    [answer] = decode.run(decode.add(prompt(50), kv=prefill.prefill(prompt(50))))
    assert answer.computed == [50]
    settle(prefill, decode)
    assert "record vllm.state.mamba2/int64.2x4.r0of1: no source has it" in caplog.text


def test_another_model_is_refused_by_name(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = start(), start(model_changes={"vocab_size": 1001}, policy="recompute")
    [answer] = decode.run(decode.add(prompt(50), kv=prefill.prefill(prompt(50))))
    assert answer.computed == [50]
    settle(prefill, decode)
    assert "model.vocab_size: ours '1001', theirs '1000'" in caplog.text


def test_a_preempted_request_is_computed_again(start: Start) -> None:
    prefill, decode = start(), start(num_blocks=12)
    kv = prefill.prefill(prompt(4 * BLOCK_TOKENS))
    requests = [
        decode.add(prompt(4 * BLOCK_TOKENS, 7), max_tokens=100),
        decode.add(prompt(4 * BLOCK_TOKENS), kv=kv, max_tokens=100),
    ]
    answers = decode.run(*requests)
    assert answers[1].external_tokens == 4 * BLOCK_TOKENS
    assert sum(answers[1].computed) > 100  # it was preempted
    settle(prefill, decode)
    assert decode.total("bytes") == 1


def test_blocks_that_must_be_zero_are(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM zeroes new blocks, it leaves those of a load to the connector: each byte is written."""
    monkeypatch.setattr("vllm.v1.kv_cache_interface.KVCacheConfig.needs_kv_cache_zeroing", True)
    prefill, decode = start(block_tokens=32), start(block_tokens=64)
    request = decode.add(prompt(70), kv=prefill.prefill(prompt(70)), max_tokens=2)
    decode.step()
    [table] = decode.scheduler.kv_cache_manager.get_block_ids(request)
    decode.run(request)
    keys, values = decode.ranks[0].model._views(0)
    assert not keys[table[1], :, :, 8:].any() and not values[table[1], :, 8:].any()
    settle(prefill, decode)


def test_shutdown_with_everything_under_way(start: Start) -> None:
    prefill, decode = start(), start()
    kv = prefill.prefill(prompt(100), published=False)
    decode.add(prompt(100), kv=kv)
    decode.step()
    prefill.close()
    decode.close()


@pytest.mark.parametrize("drafts", [False, True])
def test_a_drafter_may_still_write_when_a_prompts_tokens_are_known(
    start: Start, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the lease begins when the GPU is done with the step. Caches on the CPU have no stream, so this looks at what
    a stream would be asked for."""
    prefill, decode = start(), start()
    worker = prefill.ranks[0].connector._worker
    asked = []
    monkeypatch.setattr(worker, "_stream", lambda: asked.append(1))
    monkeypatch.setattr(worker, "_drafts", drafts)
    kv = prefill.prefill(prompt(100))
    assert decode.run(decode.add(prompt(100), kv=kv))[0].external_tokens == 100
    assert bool(asked) == drafts
