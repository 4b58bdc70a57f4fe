"""Direct or packed: the way that the link's costs speak for is the way that is taken, and it is said why."""

from __future__ import annotations

import contextlib
import time

import pytest

import kvxfer
from kvxfer import Costs
from kvxfer.backends.nixl import NixlLink
from kvxfer.transfers.packed import PackedSink

from .conftest import Pair
from .peer import SECRET, make_arrays, placed
from .test_conformance import paged

CHEAP_RUNS = Costs(operation_s=1e-5, run_s=1e-9, bytes_per_s=1e10)
NOT_SO_CHEAP_RUNS = Costs(operation_s=1e-5, run_s=2e-5, bytes_per_s=1e10)
DEAR_RUNS = Costs(operation_s=1e-5, run_s=1e-3, bytes_per_s=1e10)


@pytest.mark.parametrize(("costs", "way"), [(CHEAP_RUNS, "direct"), (DEAR_RUNS, "packed")])
def test_the_costs_decide(road: Pair, costs: Costs, way: str) -> None:
    if road.way != "direct":
        pytest.skip("needs memory that direct and packed can both move")
    layout = paged(num_blocks=256)
    name = next(road.names)
    road.peer.register(name, layout, road.memory, seed=3)
    with kvxfer.Connector(
        "chooser", backends=[road.backend], ways=("direct", "packed"), costs=costs, secret=SECRET
    ) as here:
        cache = here.register(make_arrays(layout, road.memory, None), placed(layout, road.memory), name=name)
        ids = list(range(0, 256, 2))
        ticket = road.peer.publish(name, {"full": ids}, tokens=16 * len(ids))
        stats = cache.fetch(ticket, into={"full": ids[::-1]}).wait(20)
    assert stats.way == way
    assert "384 runs" in stats.choice and "expected" in stats.choice


@pytest.mark.parametrize(("slow", "guess"), [("direct", CHEAP_RUNS), ("packed", NOT_SO_CHEAP_RUNS)])
def test_what_transfers_took_decides_in_the_end(road: Pair, slow: str, guess: Costs, monkeypatch) -> None:
    """The way that the first guess speaks for is made to take ten times as long as the other one does."""
    if road.way != "direct" or road.backend != "nixl":
        pytest.skip("needs a link on which direct and packed are weighed")
    fast = {"direct": "packed", "packed": "direct"}[slow]
    layout = paged(num_blocks=256)
    name, ids = next(road.names), list(range(0, 256, 2))
    road.peer.register(name, layout, road.memory, seed=3)

    def fetch(cache: kvxfer.Cache) -> kvxfer.TransferStats:
        ticket = road.peer.publish(name, {"full": ids}, tokens=16 * len(ids))
        return cache.fetch(ticket, into={"full": ids[::-1]}).wait(20)

    def cache_of(*ways: str) -> kvxfer.Cache:
        here = closing.enter_context(kvxfer.Connector("learner", backends=["nixl"], ways=ways, secret=SECRET))
        return here.register(make_arrays(layout, road.memory, None), placed(layout, road.memory), name=name)

    with contextlib.ExitStack() as closing:
        one_way, either = cache_of(fast), cache_of("direct", "packed")
        delay_s = 10 * max(fetch(one_way).seconds for _ in range(3))
        fetch(either)
        [peer] = either._node.directory.peers.values()
        while peer.costs is None:  # else the measurement might come after the guess
            time.sleep(0.01)
        peer.costs, peer.chooser = guess, None
        owner, method = {"direct": (NixlLink, "post"), "packed": (PackedSink, "take")}[slow]
        original = getattr(owner, method)

        def delayed(self: object, *arguments: object) -> object:
            if method == "take" or len(arguments[1]) > 1:
                time.sleep(delay_s)
            return original(self, *arguments)

        monkeypatch.setattr(owner, method, delayed)
        taken = [fetch(either) for _ in range(40)]
    ways = [stats.way for stats in taken]
    assert ways[0] == slow and ways[-5:].count(fast) >= 4, [(stats.way, stats.choice) for stats in taken]
