"""Layers that one side does not have: refused by default, and named where that is allowed."""

from __future__ import annotations

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, errors

from .conftest import Pair
from .peer import read
from .test_conformance import blocks_of


def paged(*layers: str) -> CacheLayout:
    return CacheLayout.paged(
        layers=layers, num_blocks=16, block_tokens=4, kv_heads=2, head_dim=16, dtype="float16", fingerprint={}
    )


def test_a_draft_layer_that_prefill_lacks(road: Pair) -> None:
    src, dst = paged("layers.0"), paged("layers.0", "draft.0")
    name, cache, arrays = road.caches(src, dst)
    src_blocks, dst_blocks = blocks_of(src, 10, 1), blocks_of(dst, 10, 2)
    ticket = road.peer.publish(name, src_blocks, tokens=10)
    with pytest.raises(errors.LayoutMismatch, match=r"draft\.0"):
        cache.fetch(ticket, into=dst_blocks).wait(20)
    stats = cache.fetch(ticket, into=dst_blocks, allow_missing=True).wait(20)
    assert stats.missing == ("draft.0",)
    here, there = read(arrays), road.peer.contents(name)["layers.0"].reshape(16, -1)
    assert not here["draft.0"].any()
    assert np.array_equal(here["layers.0"].reshape(16, -1)[dst_blocks["full"]], there[src_blocks["full"]])


def test_sending_without_the_draft_layer(road: Pair) -> None:
    src, dst = paged("layers.0"), paged("layers.0", "draft.0")
    name, cache, arrays = road.caches(src, dst)
    reservation = cache.reserve(blocks_of(dst, 10, 2), tokens=10)
    transfer = road.peer.send(name, bytes(reservation.ticket), blocks_of(src, 10, 1), allow_missing=True)
    reservation.wait(20)
    assert road.peer.wait(transfer).missing == ("draft.0",)
    assert read(arrays)["layers.0"].any() and not read(arrays)["draft.0"].any()
    assert isinstance(reservation, kvxfer.Reservation) and reservation.stats.bytes > 0
