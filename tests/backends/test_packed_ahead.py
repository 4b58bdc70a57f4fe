"""Packed ahead: a lease that was packed when it was published is read without the publisher's help."""

from __future__ import annotations

import time

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, errors
from kvxfer.models import layout_for

from .conftest import Pair
from .peer import SECRET, Peer, make_arrays, placed, read
from .test_wire_formats import TOKENS, blocks_of, expected, model, paged

LAYOUTS = {
    "paged": paged("float16"),
    "packed FP4 pages": model("Qwen/Qwen3-0.6B", "nvfp4"),
    "sliding and full": CacheLayout(
        **{
            name: getattr(layout_for("openai/gpt-oss-20b", "vllm", num_blocks=64), name)
            for name in ("regions", "records", "groups")
        },
        fingerprint={},
    ),
}


@pytest.fixture
def packed(road: Pair) -> Pair:
    if road.way != "packed":
        pytest.skip("what is packed ahead is read the packed way")
    if road.backend.startswith("fake_nccl"):
        pytest.skip("a shelf that has no address here is read one-sidedly, or not at all")
    layout, until = paged("float16"), time.monotonic() + 20
    while True:  # the first one tells the peer of the shelf, which takes a message
        name, cache, _ = road.caches(layout, layout)
        ticket = publish(road, name, blocks_of(layout, 1), "raw")
        if cache.fetch(ticket, into=blocks_of(layout, 2)).wait(20).packed_ahead:
            return road
        assert time.monotonic() < until, "the shelf does not become known"


def publish(road: Pair, name: str, blocks: dict, wire: str) -> bytes:
    """A ticket, once its blocks have been packed."""
    before = road.peer.metrics().packed_ahead_total
    ticket = road.peer.publish(name, blocks, tokens=TOKENS, pack_ahead=wire)
    until = time.monotonic() + 20
    while road.peer.metrics().packed_ahead_total == before:
        assert time.monotonic() < until, "nothing was packed ahead"
        time.sleep(0.005)
    return ticket


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("left_out", [0, 2], ids=["all-blocks", "the-last-blocks"])
def test_what_arrives_is_what_the_packed_way_brings(packed: Pair, layout: str, left_out: int) -> None:
    layout = LAYOUTS[layout]
    wire = "raw" if "nvfp4" in layout.records[0].tag else "mixed" if layout is LAYOUTS["paged"] else "nvfp4"
    name, cache, arrays = packed.caches(layout, layout)
    packed.peer.mask(name, 0xBF)
    src_blocks, dst_blocks = blocks_of(layout, 1), blocks_of(layout, 2)
    dst_blocks = {group: ids[left_out:] for group, ids in dst_blocks.items()}
    stats = cache.fetch(publish(packed, name, src_blocks, wire), into=dst_blocks, wire=wire).wait(20)
    assert (stats.way, stats.packed_ahead, stats.conversation) == ("packed", True, False)
    truth = expected(layout, layout, wire, packed.peer.contents(name), src_blocks, dst_blocks)
    for region, array in read(arrays).items():
        assert truth[region].any()
        assert np.array_equal(array, truth[region]), region


@pytest.mark.parametrize("other", ["layout", "wire"])
def test_another_layout_or_wire_format_is_packed_on_request(packed: Pair, other: str) -> None:
    src = paged("float16")
    dst, wire = (paged("float16", order="HND"), "raw") if other == "layout" else (src, "fp8_e4m3")
    name, cache, arrays = packed.caches(src, dst)
    packed.peer.mask(name, 0xBF)
    src_blocks, dst_blocks = blocks_of(src, 1), blocks_of(dst, 2)
    stats = cache.fetch(publish(packed, name, src_blocks, "raw"), into=dst_blocks, wire=wire).wait(20)
    assert (stats.packed_ahead, stats.conversation) == (False, True)
    truth = expected(src, dst, wire, packed.peer.contents(name), src_blocks, dst_blocks)
    assert all(np.array_equal(array, truth[region]) for region, array in read(arrays).items())


def wait_for_an_empty_shelf(road: Pair) -> None:
    until = time.monotonic() + 20
    while road.peer.metrics().shelf_lent_bytes:
        assert time.monotonic() < until, "the shelf is not given back"
        time.sleep(0.005)


def test_the_shelf_is_given_back_with_the_lease(packed: Pair) -> None:
    layout = paged("float16")
    name, cache, _ = packed.caches(layout, layout)
    wait_for_an_empty_shelf(packed)  # earlier fetches have released their leases
    ticket = publish(packed, name, blocks_of(layout, 1), "raw")
    assert packed.peer.metrics().shelf_lent_bytes > 0
    packed.peer.release(ticket)
    wait_for_an_empty_shelf(packed)
    with pytest.raises(errors.LeaseExpired):
        cache.fetch(ticket, into=blocks_of(layout, 2)).wait(20)


def test_without_room_on_the_shelf_the_bytes_are_packed_on_request(packed: Pair) -> None:
    layout = paged("float16")
    with Peer(packed.backend, ways=("packed",), limits=kvxfer.Limits(shelf_bytes=256 << 10)) as peer:
        peer.register("kv", layout, packed.memory, seed=1)
        arrays = make_arrays(layout, packed.memory, None)
        with kvxfer.Connector("small", backends=[packed.backend], ways=("packed",), secret=SECRET) as here:
            cache = here.register(arrays, placed(layout, packed.memory))
            blocks = {"full": list(range(16))}
            ticket = peer.publish("kv", blocks, tokens=256, pack_ahead="raw")
            assert peer.metrics().packed_ahead_total == {"no room": 1}
            stats = cache.fetch(ticket, into=blocks).wait(20)
            assert (stats.packed_ahead, stats.conversation) == (False, True)
            assert all(
                np.array_equal(array[: 16 * 16384], there[: 16 * 16384])
                for array, there in zip(read(arrays).values(), peer.contents("kv").values(), strict=True)
            )
