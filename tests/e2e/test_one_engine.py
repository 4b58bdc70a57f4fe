"""One connector that is prefill and decode at once fetches its own tickets."""

from __future__ import annotations

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout
from tests.backends.peer import SECRET, make_arrays


@pytest.mark.parametrize("road", ["mapped-shared", "direct-private", "packed-private"])
def test_a_connector_fetches_from_itself(road: str) -> None:
    way, memory = road.split("-")
    layout = CacheLayout.paged(
        layers=["layers.0"], num_blocks=16, block_tokens=4, kv_heads=2, head_dim=8, dtype="float16"
    )
    with kvxfer.Connector("both", ways=(way,), secret=SECRET) as connector:
        arrays = make_arrays(layout, memory, seed=1)
        cache = connector.register(arrays, layout)
        lease = cache.publish({"full": [1, 2, 3]}, tokens=12)
        stats = cache.fetch(lease.ticket, into={"full": [9, 8, 7]}).wait(10)
        assert stats.way == way and lease.released.wait(5)
        blocks = arrays["layers.0"].reshape(16, -1)
        assert np.array_equal(blocks[[1, 2, 3]], blocks[[9, 8, 7]])
