"""What every backend has to do, on every way that it offers: two processes, real bytes.

The suite is the same for backends of other packages; see conftest.py.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, TransferState, errors
from kvxfer.models import layout_for
from kvxfer.peers.remote import Peer as RemotePeer
from tests.processes import descriptors, until

from .conftest import Pair
from .peer import Peer, read
from .reference import assert_same_contents, assert_untouched, contents

LAYERS = ("layers.0", "layers.1", "layers.2")


def paged(num_blocks: int = 48, block_tokens: int = 16, order: str = "NHD", **options) -> CacheLayout:
    defaults = {"kv_heads": 4, "head_dim": 32, "dtype": "float16", "fingerprint": {"model": "conformance"}}
    return CacheLayout.paged(
        layers=LAYERS, num_blocks=num_blocks, block_tokens=block_tokens, order=order, **(defaults | options)
    )


PAIRS = {
    "equal": (paged(), paged()),
    "more blocks there": (paged(96), paged(32)),
    "NHD to HND": (paged(), paged(order="HND")),
    "HND to NHD": (paged(order="HND"), paged()),
    "smaller blocks": (paged(block_tokens=32), paged(block_tokens=8, num_blocks=64)),
    "larger blocks": (paged(block_tokens=4, num_blocks=128), paged(block_tokens=24)),
    "odd block sizes": (paged(block_tokens=7), paged(block_tokens=5, num_blocks=64, order="HND")),
    "odd head size": (paged(head_dim=3, kv_heads=1), paged(head_dim=3, kv_heads=1)),
}


def blocks_of(layout: CacheLayout, tokens: int, seed: int) -> dict[str, list[int]]:
    group = layout.groups[0]
    ids = np.random.default_rng(seed).permutation(group.num_blocks)[: group.blocks_for(tokens)]
    return {group.name: ids.tolist()}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_a_fetch_brings_every_byte_and_touches_no_other(road: Pair, pair: str, tokens: int) -> None:
    src, dst = PAIRS[pair]
    name, cache, arrays = road.caches(src, dst)
    src_blocks, dst_blocks = blocks_of(src, tokens, 1), blocks_of(dst, tokens, 2)
    before = read(arrays)
    ticket = road.peer.publish(name, src_blocks, tokens=tokens)
    stats = cache.fetch(ticket, into=dst_blocks).wait(20)
    there = road.peer.contents(name)
    assert_same_contents(contents(src, there, src_blocks, tokens), contents(dst, read(arrays), dst_blocks, tokens))
    assert_untouched(dst, before, read(arrays), dst_blocks)
    assert (stats.backend, stats.way, stats.wire) == (road.backend, road.way, "raw")
    assert stats.bytes > 0 and stats.seconds > 0


@pytest.mark.parametrize("pair", PAIRS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("layerwise", [False, True], ids=["at-once", "layerwise"])
def test_a_send_brings_every_byte_and_touches_no_other(road: Pair, pair: str, layerwise: bool) -> None:
    src, dst = PAIRS[pair]
    tokens = 77
    name, cache, arrays = road.caches(src, dst)
    src_blocks, dst_blocks = blocks_of(src, tokens, 3), blocks_of(dst, tokens, 4)
    before = read(arrays)
    reservation = cache.reserve(dst_blocks, tokens=tokens)
    send = road.peer.send(name, bytes(reservation.ticket), src_blocks, layerwise=layerwise)
    if layerwise:
        assert not reservation.done()
        for layer in reversed(LAYERS):
            road.peer.layer_ready(send, layer)
    reservation.wait(20)
    assert road.peer.wait(send).way == road.way
    there = road.peer.contents(name)
    assert_same_contents(contents(src, there, src_blocks, tokens), contents(dst, read(arrays), dst_blocks, tokens))
    assert_untouched(dst, before, read(arrays), dst_blocks)
    assert road.here.metrics.reservations == 0


@pytest.mark.parametrize("tokens", [129, 700])
def test_groups_of_a_compressed_cache(road: Pair, tokens: int) -> None:
    layout = layout_for("deepseek-ai/DeepSeek-V4.1-Flash", "vllm", num_blocks=64)
    name, cache, arrays = road.caches(layout, layout)
    lists = []
    for seed in (1, 2):
        counts = [group.blocks_to_move(tokens) for group in layout.groups]
        ids = np.random.default_rng(seed).permutation(64)[: sum(counts)]
        split = np.split(ids, np.cumsum(counts)[:-1])
        lists.append({group.name: part.tolist() for group, part in zip(layout.groups, split, strict=True)})
    src_blocks, dst_blocks = lists
    ticket = road.peer.publish(name, src_blocks, tokens=tokens)
    cache.fetch(ticket, into=dst_blocks).wait(20)
    there = road.peer.contents(name)["slab"].reshape(64, -1)
    here = read(arrays)["slab"].reshape(64, -1)
    for group in layout.groups:
        stride, used = here.shape[1], layout.block_bytes(group.name)
        assert 0 < used <= stride
        for left, right in zip(src_blocks[group.name], dst_blocks[group.name], strict=True):
            assert np.array_equal(there[left, :used], here[right, :used]), group.name
            assert not here[right, used:].any()


def test_a_suffix_is_all_that_moves(road: Pair) -> None:
    layout = paged()
    name, cache, arrays = road.caches(layout, layout)
    src_blocks, dst_blocks = blocks_of(layout, 100, 5), blocks_of(layout, 100, 6)
    suffix = {"full": dst_blocks["full"][-3:]}
    ticket = road.peer.publish(name, src_blocks, tokens=100)
    stats = cache.fetch(ticket, into=suffix).wait(20)
    there = road.peer.contents(name)
    tail = {"full": src_blocks["full"][-3:]}
    assert_same_contents(contents(layout, there, tail, 100, 64), contents(layout, read(arrays), suffix, 100, 64))
    assert stats.bytes == 3 * layout.block_bytes("full")
    after = read(arrays)
    assert_untouched(layout, {k: np.zeros_like(v) for k, v in after.items()}, after, suffix)


def test_nothing_to_fetch_is_done_and_releases(road: Pair) -> None:
    layout = paged()
    name, cache, arrays = road.caches(layout, layout)
    ticket = road.peer.publish(name, blocks_of(layout, 40, 1), tokens=40)
    assert cache.fetch(ticket, into={"full": []}).wait(20).bytes == 0
    assert road.peer.lease_state(ticket, wait_s=5) == "released"
    assert not any(array.any() for array in arrays.values())


def test_many_transfers_at_once(road: Pair) -> None:
    layout = paged(256)
    name, cache, arrays = road.caches(layout, layout)
    src = np.random.default_rng(1).permutation(256).reshape(32, 8).tolist()
    dst = np.random.default_rng(2).permutation(256).reshape(32, 8).tolist()
    tickets = [road.peer.publish(name, {"full": ids}, tokens=128) for ids in src]
    transfers = [cache.fetch(t, into={"full": ids}) for t, ids in zip(tickets, dst, strict=True)]
    for transfer in transfers:
        transfer.wait(20)
    there = road.peer.contents(name)
    for left, right in zip(src, dst, strict=True):
        assert_same_contents(
            contents(layout, there, {"full": left}, 128), contents(layout, read(arrays), {"full": right}, 128)
        )
    assert all(road.peer.lease_state(ticket, wait_s=5) == "released" for ticket in tickets)


def test_a_fetch_may_come_before_its_blocks_are_published(road: Pair) -> None:
    layout = paged()
    name, cache, _ = road.caches(layout, layout)
    blocks = blocks_of(layout, 40, 1)
    ticket = road.peer.issue(layout, blocks, tokens=40, cache=name)
    transfer = cache.fetch(ticket, into=blocks_of(layout, 40, 2))
    with pytest.raises(errors.DeadlineExceeded):
        transfer.wait(0.1)
    assert transfer.state is TransferState.POSTED
    road.peer.publish(name, blocks, tokens=40, ticket=ticket)
    assert transfer.wait(20).bytes == 3 * layout.block_bytes("full")


def test_a_fetch_releases_the_lease(road: Pair) -> None:
    layout = paged()
    name, cache, _ = road.caches(layout, layout)
    ticket = road.peer.publish(name, blocks_of(layout, 40, 1), tokens=40)
    assert road.peer.lease_state(ticket) == "live"
    cache.fetch(ticket, into=blocks_of(layout, 40, 2)).wait(20)
    assert road.peer.lease_state(ticket, wait_s=5) == "released"


@pytest.mark.parametrize("how", ["expired", "released"])
def test_an_ended_lease_is_never_fetched(road: Pair, how: str) -> None:
    layout = paged()
    name, cache, _ = road.caches(layout, layout)
    ticket = road.peer.publish(name, blocks_of(layout, 40, 1), tokens=40, ttl_s=0.05 if how == "expired" else 30)
    if how == "released":
        road.peer.release(ticket)
    assert road.peer.lease_state(ticket, wait_s=5) == how
    transfer = cache.fetch(ticket, into=blocks_of(layout, 40, 2))
    with pytest.raises(errors.LeaseExpired):
        transfer.wait(20)
    assert transfer.state is TransferState.FAILED


def test_a_renewed_lease_lives_on(road: Pair) -> None:
    layout = paged()
    name, cache, _ = road.caches(layout, layout)
    ticket = road.peer.publish(name, blocks_of(layout, 40, 1), tokens=40, ttl_s=0.5)
    road.here.renew(ticket, 30)
    assert road.peer.lease_state(ticket, wait_s=1.0) == "live"
    cache.fetch(ticket, into=blocks_of(layout, 40, 2)).wait(20)


def test_a_ticket_is_good_for_one_fetch(road: Pair) -> None:
    layout = paged()
    name, cache, _ = road.caches(layout, layout)
    ticket = road.peer.publish(name, blocks_of(layout, 40, 1), tokens=40)
    cache.fetch(ticket, into=blocks_of(layout, 40, 2)).wait(20)
    with pytest.raises(errors.InvalidTicket, match="used"):
        cache.fetch(ticket, into=blocks_of(layout, 40, 2))


def test_a_cancelled_reservation_gives_its_blocks_back_once(road: Pair) -> None:
    layout = paged()
    name, cache, arrays = road.caches(layout, layout)
    reservation = cache.reserve(blocks_of(layout, 40, 1), tokens=40)
    send = road.peer.send(name, bytes(reservation.ticket), blocks_of(layout, 40, 2), layerwise=True)
    road.peer.layer_ready(send, LAYERS[0])
    deadline = time.monotonic() + 10
    while reservation.state is not TransferState.MOVING and time.monotonic() < deadline:
        time.sleep(0.001)
    assert reservation.state is TransferState.MOVING
    reservation.cancel()
    with pytest.raises(errors.Cancelled):
        reservation.wait(10)
    after = read(arrays)
    with pytest.raises(errors.KvxferError):
        road.peer.layer_ready(send, LAYERS[1])
        road.peer.wait(send)
    assert all(np.array_equal(after[key], now) for key, now in read(arrays).items())


def test_a_reservation_that_nobody_fills_runs_out(road: Pair) -> None:
    layout = paged()
    _, cache, _ = road.caches(layout, layout)
    reservation = cache.reserve(blocks_of(layout, 40, 1), tokens=40, ttl_s=0.1)
    with pytest.raises(errors.DeadlineExceeded, match="waiting for a sender"):
        reservation.wait(10)


def test_callbacks_and_await(road: Pair) -> None:
    layout = paged()
    name, cache, _ = road.caches(layout, layout)
    seen: list[str] = []
    called = threading.Event()

    def callback(transfer: kvxfer.Transfer) -> None:
        seen.append(threading.current_thread().name)
        called.set()

    ticket = road.peer.publish(name, blocks_of(layout, 40, 1), tokens=40)

    async def fetch() -> kvxfer.TransferStats:
        transfer = cache.fetch(ticket, into=blocks_of(layout, 40, 2))
        transfer.add_done_callback(callback)
        return await transfer

    assert asyncio.run(fetch()).bytes == 3 * layout.block_bytes("full")
    assert called.wait(5) and seen == ["kvxfer-progress-here"]


def test_what_does_not_fit_is_refused_with_nothing_written(road: Pair) -> None:
    src, dst = paged(), paged(head_dim=16)
    name, cache, arrays = road.caches(src, dst)
    ticket = road.peer.publish(name, blocks_of(src, 40, 1), tokens=40)
    with pytest.raises(errors.LayoutMismatch, match=r"bytes of a head|head"):
        cache.fetch(ticket, into=blocks_of(dst, 40, 2)).wait(20)
    other = paged(fingerprint={"model": "another"})
    name, cache, more = road.caches(src, other)
    ticket = road.peer.publish(name, blocks_of(src, 40, 1), tokens=40)
    with pytest.raises(errors.FingerprintMismatch, match="model"):
        cache.fetch(ticket, into=blocks_of(other, 40, 2)).wait(20)
    assert not any(array.any() for array in (*arrays.values(), *more.values()))


def test_nothing_is_left_over(road: Pair) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        here, there = road.here.metrics, road.peer.metrics()
        if not (here.transfers or here.staging_lent_bytes or there.staging_lent_bytes or there.transfers):
            break
        time.sleep(0.01)
    assert (here.transfers, here.reservations, here.staging_lent_bytes, here.quarantined) == (0, 0, 0, 0)
    assert (there.transfers, there.reservations, there.staging_lent_bytes, there.quarantined) == (0, 0, 0, 0)


def test_peers_that_left_are_forgotten(road: Pair) -> None:
    """Nothing holds what was known of them, not even for a while: with it go mappings, descriptors and memory."""
    directory, layout, opened = road.here._node.directory, paged(), []
    name, cache, _ = road.caches(layout, layout)
    others = {*directory.peers, *directory.lost}

    def known() -> int:
        gc.collect()
        return sum(isinstance(found, RemotePeer) for found in gc.get_objects())

    for _ in range(3):
        with Peer(road.backend, ways=(road.way,)) as peer:
            peer.register(name, layout, road.memory, seed=1)
            cache.fetch(peer.publish(name, {"full": [1]}, tokens=16), into={"full": [2]}).wait(30)
        until(lambda: not {*directory.peers, *directory.lost} - others, what="the peer forgotten")
        # What its backend began to take down may hold it for a moment.
        until(lambda: known() == len({*directory.peers, *directory.lost}), what="nothing held")
        opened.append(sum(descriptors().values()))
    assert opened[1] == opened[2], opened
