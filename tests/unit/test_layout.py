"""Layout constructors refuse what does not add up, whoever sent it."""

from __future__ import annotations

import msgspec
import pytest

from kvxfer.errors import InvalidLayout
from kvxfer.layout import CacheLayout, Group, GroupKind, Padding, Plane, Record, Region, Slice


def plane(name="k", offset=0, entries=4, entry_stride=8, unit_bytes=8, **more):
    return Plane(
        name=name,
        dtype="u8",
        offset=offset,
        entries=entries,
        entry_stride=entry_stride,
        unit_bytes=unit_bytes,
        **more,
    )


RECORD = Record(tag="r", nbytes=32, planes=(plane(),))


def layout(record=RECORD, num_blocks=4, **changes):
    given = {
        "block_tokens": 4,
        "offset": 0,
        "stride": record.nbytes,
        "region_bytes": num_blocks * 64,
        **changes,
    }
    group = {key: given[key] for key in ("kind", "window", "padding", "compression_ratio") if key in given}
    return CacheLayout(
        regions=(Region(name="m", nbytes=given["region_bytes"]),),
        records=(record,),
        groups=(
            Group(
                name="g",
                block_tokens=given["block_tokens"],
                num_blocks=num_blocks,
                slices=given.get(
                    "slices",
                    (
                        Slice(
                            layer="a",
                            region="m",
                            offset=given["offset"],
                            block_stride=given["stride"],
                            record="r",
                        ),
                    ),
                ),
                **group,
            ),
        ),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Record(tag="r", nbytes=31, planes=(plane(),)), "ends at byte 32 of a slice of 31"),
        (lambda: Record(tag="r", nbytes=40, planes=(plane(),)), r"nobody claims bytes 32\.\.40"),
        (lambda: Record(tag="r", nbytes=32, planes=(plane(entry_stride=4),)), "nobody|more than once"),
        (lambda: Record(tag="r", nbytes=32, planes=(plane(), plane())), "unique"),
        (
            lambda: Record(
                tag="r", nbytes=40, planes=(plane(),), padding=(Padding(name="p", offset=31, nbytes=9),)
            ),
            "more than once",
        ),
        (lambda: plane(entries=0), "counts must be 1 or more"),
        (lambda: plane(heads=2, head_start=3, total_heads=4), "do not lie in"),
        (lambda: layout(block_tokens=5), "4 entries of 1 tokens in a block of 5"),
        (lambda: layout(stride=64), r"nobody claims bytes 32\.\.64"),
        (lambda: layout(stride=16), "does not fit a block stride"),
        (lambda: layout(region_bytes=100), "ends at byte 128 of region"),
        (lambda: layout(window=3), "a window belongs to a sliding group"),
        (lambda: layout(kind=GroupKind.SLIDING), "a window belongs to a sliding group"),
        (lambda: layout(kind=GroupKind.STATE), "block_tokens must be 0"),
        (lambda: layout(num_blocks=0), "num_blocks must be"),
        (lambda: layout(compression_ratio=-1), "compression_ratio must be"),
        (
            lambda: layout(
                record=Record(tag="r", nbytes=16, planes=(plane(entries=2, tokens_per_entry=2),)),
                kind=GroupKind.RING,
            ),
            "one entry a row",
        ),
        (lambda: layout(slices=()), "no slices"),
    ],
)
def test_refused(make, message):
    with pytest.raises(InvalidLayout, match=message):
        make()


def test_named_padding_is_accepted():
    assert layout(stride=64, padding=(Padding(name="rest", offset=32, nbytes=32),))


def test_survives_the_handshake():
    ours = layout(kind=GroupKind.SLIDING, window=6)
    theirs = msgspec.msgpack.decode(msgspec.msgpack.encode(ours), type=CacheLayout)
    assert theirs == ours


def test_a_peer_cannot_send_a_layout_that_does_not_add_up():
    hostile = msgspec.msgpack.encode(
        {"tag": "r", "nbytes": 64 << 20, "planes": [{**msgspec.to_builtins(plane()), "entry_stride": 1}]}
    )
    with pytest.raises((msgspec.ValidationError, InvalidLayout)):
        msgspec.msgpack.decode(hostile, type=Record)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (64, 4), (65, 5), (80, 5), (81, 5), (1000, 5)]
)
def test_blocks_of_a_sliding_group(tokens, blocks):
    group = Group(name="w", block_tokens=16, num_blocks=99, slices=(), kind=GroupKind.SLIDING, window=64)
    assert group.blocks_to_move(tokens) == blocks
    needed = group.blocks_for(tokens) - group.first_needed_token(tokens) // 16
    assert needed <= blocks


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_a_ring_is_needed_while_an_entry_is_unfinished(tokens, blocks):
    group = Group(name="r", block_tokens=8, num_blocks=9, slices=(), kind=GroupKind.RING, compression_ratio=2)
    assert group.blocks_to_move(tokens) == blocks
