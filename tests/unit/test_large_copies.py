"""Calls of a MiB and more store past the caches: the same bytes, wherever blocks begin, and not one beside them."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer import CacheLayout
from kvxfer.kernels import PreparedPlan, bases
from kvxfer.layout import Group, Padding, Plane, Record, Region, Slice
from kvxfer.plan import Chunk, join

TOTAL = 3 << 20


def layout_of(block_bytes: int, stride: int, offset: int, num_blocks: int) -> CacheLayout:
    """Blocks of `block_bytes`, `stride` apart: what lies between them belongs to others."""
    unit = block_bytes // 16
    plane = Plane(name="kv", dtype="uint8", offset=0, entries=16, entry_stride=unit, unit_bytes=unit)
    record = Record(tag=f"large.{block_bytes}", nbytes=block_bytes, planes=(plane,))
    piece = Slice(layer="layers.0", region="kv", offset=offset, block_stride=stride, record=record.tag)
    gap = stride - block_bytes
    padding = (Padding(name="others'", offset=block_bytes, nbytes=gap),) if gap else ()
    group = Group(name="full", block_tokens=16, num_blocks=num_blocks, slices=(piece,), padding=padding)
    return CacheLayout(
        regions=(Region(name="kv", nbytes=offset + stride * num_blocks),),
        records=(record,),
        groups=(group,),
        fingerprint={"model": "large"},
    )


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("block_bytes", "gap", "offset", "shift"),
    [(1024, 0, 0, 0), (1008, 16, 0, 0), (4096, 0, 0, 16), (4096, 112, 48, 1), (65536, 16, 16, 63), (1040, 8, 3, 5)],
)
def test_large_calls_move_the_same_bytes(block_bytes, gap, offset, shift, threads, past_caches):
    count, stride = TOTAL // block_bytes, block_bytes + gap
    layout = layout_of(block_bytes, stride, offset, count)
    rng = np.random.default_rng(block_bytes + shift)
    source, guarded = (rng.integers(0, 256, layout.regions[0].nbytes + 128, np.uint8) for _ in range(2))
    src_ids, dst_ids = (rng.permutation(count)[: count - 3].astype(np.int32) for _ in range(2))
    plan = join([layout], layout)[0].plan({"full": src_ids}, {"full": dst_ids}, tokens=16 * len(src_ids))
    prepared, [whole] = PreparedPlan(plan), [Chunk(part=0, first=0, count=len(src_ids), wire_bytes=plan.wire_bytes)]
    expected = guarded.copy()
    for src, dst in zip(src_ids, dst_ids, strict=True):
        at, to = shift + offset + int(src) * stride, 64 - shift + offset + int(dst) * stride
        expected[to : to + block_bytes] = source[at : at + block_bytes]
    src_bases, dst_bases = bases([source.ctypes.data + shift]), bases([guarded.ctypes.data + 64 - shift])
    packed, copied = guarded.copy(), guarded
    prepared.copy(whole, src_bases, dst_bases, threads=threads)
    wire = np.zeros(plan.wire_bytes + 1, np.uint8)
    prepared.gather(whole, src_bases, wire.ctypes.data + 1, threads=threads, past_caches=past_caches)
    prepared.scatter(whole, wire.ctypes.data + 1, bases([packed.ctypes.data + 64 - shift]), threads=threads)
    assert np.array_equal(copied, expected) and np.array_equal(packed, expected)
