"""A prefill and a decode engine answer as a single engine does: the same tokens with the same log-probabilities."""

from __future__ import annotations

import pytest

from tests.processes import until

from . import connectors
from .comparing import TOLERANCE, assert_same, deviation, hand_over, prompt
from .conftest import Reference, Start
from .corruption import KINDS
from .engine import TO_PREFILL, Engine, Request

BLOCK = 32
Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module", params=connectors.BOTH)
def connector(request: pytest.FixtureRequest) -> dict:
    return getattr(connectors, request.param)()


@pytest.fixture(scope="module")
def pair(start: Start, connector: dict) -> Pair:
    return start("prefill", connector=connector, core=0), start("decode", connector=connector, core=1)


@pytest.fixture(autouse=True)
def blocks_return(pair: Pair) -> None:
    """After every test all blocks of both engines are free again."""
    before = [engine.free_blocks() for engine in pair]
    yield
    pair[1].corrupt(None)
    for engine, blocks in zip(pair, before, strict=True):
        until(lambda engine=engine, blocks=blocks: engine.idle() and engine.free_blocks() == blocks, 20, "blocks free")


@pytest.mark.parametrize("tokens", [1, 2, 20, BLOCK, BLOCK + 1, 4 * BLOCK, 200, 1500, 3000])
def test_prompts_of_any_length(pair: Pair, reference: Reference, tokens: int) -> None:
    x = prompt(tokens)
    [answer] = hand_over(*pair, x)
    assert_same([answer], reference(x))
    assert answer.computed_tokens == 1  # the last, from which the first new token comes


def test_eight_at_once(pair: Pair, reference: Reference) -> None:
    prompts = [prompt(tokens, seed=8) for tokens in (5, 31, 64, 150, 333, 700, 1100, 1500)]
    answers = hand_over(*pair, *prompts)
    assert_same(answers, reference(*prompts))
    assert [answer.computed_tokens for answer in answers] == [1] * 8


def test_a_prompt_that_decode_has_already(pair: Pair, reference: Reference) -> None:
    x = prompt(300, seed=1)
    for _ in range(2):
        [answer] = hand_over(*pair, x)
        assert_same([answer], reference(x))
        assert answer.computed_tokens == 1


def test_half_a_prefix_is_reused(pair: Pair, reference: Reference) -> None:
    """The rest alone is fetched; what is reused are blocks that came from the other engine."""
    first, rest = prompt(6 * BLOCK, seed=2), prompt(100, seed=3)
    second = first[: 3 * BLOCK] + rest
    assert_same(hand_over(*pair, first), reference(first))
    [answer] = hand_over(*pair, second)
    assert_same([answer], reference(second))
    assert answer.computed_tokens == 1


def test_prefill_in_chunks(pair: Pair, start: Start, connector: dict, reference: Reference) -> None:
    chunked = start("chunked", connector=connector, max_num_batched_tokens=128, enable_chunked_prefill=True)
    prompts = [prompt(tokens, seed=4) for tokens in (100, 1000, 1500)]
    assert_same(hand_over(chunked, pair[1], *prompts), reference(*prompts))


def test_several_answers_to_one_prompt(pair: Pair, reference: Reference) -> None:
    x = prompt(200, seed=5)
    [answer] = hand_over(*pair, x, n=2)
    [expected] = reference(x)
    assert [choice.tokens for choice in answer.choices] == [expected.tokens] * 2
    for choice in answer.choices:
        assert choice.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_an_answer_that_stops_early(pair: Pair, reference: Reference) -> None:
    x = prompt(200, seed=6)
    [whole] = reference(x)
    end = whole.tokens[4]
    [answer] = hand_over(*pair, x, stop=(end,))
    assert answer.finish == "stop"
    assert answer.tokens == whole.tokens[: whole.tokens.index(end) + 1]


def test_prefill_that_stops_early(pair: Pair, reference: Reference) -> None:
    """The one token that prefill makes may be one that ends the answer."""
    x = prompt(200, seed=7)
    [expected] = reference(x)
    stop = (expected.tokens[0],)
    p, d = pair
    [handed] = p.generate(Request(prompt=x, max_tokens=1, kv=TO_PREFILL, stop=stop))
    [answer] = d.generate(Request(prompt=x, kv=handed.kv, stop=stop))
    assert (answer.finish, answer.tokens) == ("stop", expected.tokens[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_damage_would_be_noticed(pair: Pair, reference: Reference, kind: str) -> None:
    """What these tests are worth: wrong blocks make answers that they tell from right ones.

    The order of full blocks is invisible to attention over all of them, since positions are in the keys: it takes a
    prompt that reuses half of them.
    """
    p, d = pair
    x = prompt(8 * BLOCK + 10, seed=100 + KINDS.index(kind))
    y = x[: 4 * BLOCK] + prompt(50, seed=200)
    d.corrupt(kind)
    [first] = hand_over(p, d, x)
    d.corrupt(None)
    [second] = hand_over(p, d, y)
    expected = reference(x, y)
    d.forget()
    noticed = max(deviation(first, expected[0]), deviation(second, expected[1]))
    assert noticed > 100 * TOLERANCE
