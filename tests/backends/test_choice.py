"""Direct or packed: the way that the link's costs speak for is the way that is taken, and it is said why."""

from __future__ import annotations

import pytest

import kvxfer
from kvxfer import Costs

from .conftest import Pair
from .peer import SECRET, make_arrays, placed
from .test_conformance import paged

CHEAP_RUNS = Costs(operation_s=1e-5, run_s=1e-9, bytes_per_s=1e10)
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
