"""Scales per tensor, which are not in the cache, are applied between caches of other formats."""

from __future__ import annotations

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, errors

from .peer import SECRET


def paged(dtype: str) -> CacheLayout:
    return CacheLayout.paged(layers=["l"], num_blocks=4, block_tokens=4, kv_heads=2, head_dim=16, dtype=dtype)


@pytest.mark.parametrize("scale", [1.0, 0.5, 4.0])
def test_fp8_with_a_scale_arrives_as_what_it_stands_for(scale: float) -> None:
    codes = np.random.default_rng(1).integers(0, 0x78, 4 * 2 * 4 * 2 * 16, np.uint8)  # finite and positive
    powers = np.where(codes >> 3 == 0, 2.0**-9 * (codes & 7), (1 + (codes & 7) / 8) * 2.0 ** ((codes >> 3) - 7.0))
    with kvxfer.Connector("both", secret=SECRET) as connector:
        scales = {"l": {"k": scale, "v": scale}}
        source = connector.register({"l": codes}, paged("float8_e4m3fn"), name="fp8", scales=scales)
        target = np.zeros(len(codes), np.float32)
        into = connector.register({"l": target}, paged("float32"), name="fp32")
        lease = source.publish({"full": [0, 1, 2, 3]}, tokens=16)
        into.fetch(lease.ticket, into={"full": [0, 1, 2, 3]}).wait(10)
    assert np.array_equal(target, (powers * scale).astype(np.float32))


def test_scales_are_checked() -> None:
    with kvxfer.Connector("both", secret=SECRET) as connector:
        for scales in ({"x": {"k": 1.0}}, {"l": {"k": -1.0}}, {"l": {"k": "1"}}, {"l": 1.0}, 3):
            with pytest.raises(errors.InvalidRequest, match="scale"):
                connector.register({"l": np.zeros(1024, np.uint8)}, paged("float8_e4m3fn"), scales=scales)
