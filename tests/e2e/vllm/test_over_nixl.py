"""The hand-off with NIXL as the only backend, as between hosts: the same tokens with the same log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.network import Network, why_not

from . import connectors
from .comparing import assert_same, hand_over, prompt
from .conftest import Reference, Start
from .engine import Engine

BLOCK = 32
Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module", params=[["direct"], ["packed"]], ids="-".join)
def pair(request: pytest.FixtureRequest, start: Start) -> Pair:
    connector = connectors.kvxfer(backends=["nixl"], ways=request.param)
    return start("prefill", connector=connector, core=0), start("decode", connector=connector, core=1)


@pytest.mark.parametrize("tokens", [20, BLOCK + 1, 1500])
def test_answers_are_the_same(pair: Pair, reference: Reference, tokens: int) -> None:
    x = prompt(tokens, seed=11)
    [answer] = hand_over(*pair, x)
    assert_same([answer], reference(x))
    assert answer.computed_tokens == 1


def test_half_a_prefix_is_reused(pair: Pair, reference: Reference) -> None:
    first, rest = prompt(6 * BLOCK, seed=12), prompt(100, seed=13)
    second = first[: 3 * BLOCK] + rest
    assert_same(hand_over(*pair, first), reference(first))
    [answer] = hand_over(*pair, second)
    assert_same([answer], reference(second))
    assert answer.computed_tokens == 1


def test_several_at_once(pair: Pair, reference: Reference) -> None:
    prompts = [prompt(tokens, seed=14) for tokens in (31, 64, 333, 700)]
    assert_same(hand_over(*pair, *prompts), reference(*prompts))


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Network]:
    if why_not():
        pytest.skip(f"hosts cannot be made: {why_not()}")
    network = Network(2)
    yield network
    network.close()


def test_prefill_and_decode_on_two_hosts(two_hosts: Network, start: Start, reference: Reference) -> None:
    """Network namespaces with an address each: over TCP, and by the address that prefill tells."""
    pair = []
    for core, (name, host) in enumerate(zip(("prefill", "decode"), two_hosts.hosts, strict=True)):
        connector = connectors.kvxfer(backends=["nixl"], host=host.address)
        pair.append(start(f"{name} on a host", connector=connector, core=core, on=host).ready())
    for tokens in (20, 700):
        x = prompt(tokens, seed=15)
        [answer] = hand_over(*pair, x)
        assert_same([answer], reference(x))
        assert answer.computed_tokens == 1
