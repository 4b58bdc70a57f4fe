"""The kernels' item mapping, walked on the host: every plan of the property tests, without a GPU.

The walk shares the kernels' tables, index arithmetic and choice of vector width, and takes every warp, batch and
vector in turn.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.cuda.native import native
from kvxfer.cuda.plan import prepare
from kvxfer.errors import InvalidRequest, MissingExtra
from kvxfer.plan import ROW, Chunk, PlanPart, Segments, TransferPlan
from tests.property import test_plans

try:
    native()
except MissingExtra as reason:
    pytest.skip(str(reason), allow_module_level=True)

SMS = 3


class HostWalk:
    """A plan whose tables lie in host memory."""

    def __init__(
        self, plan: TransferPlan, src_bases: np.ndarray | None, dst_bases: np.ndarray | None
    ) -> None:
        self.plan = plan
        self.parts = [prepare(part, src_bases, dst_bases) for part in plan.parts]
        self.tables = []
        for part in self.parts:
            memory = np.zeros(part.table_bytes + 16, np.uint8)
            address = -(-memory.ctypes.data // 16) * 16
            part.fill(address)
            part.bind(address)
            self.tables.append(memory)

    def walk(self, direction: int, *chunks: Chunk, wire: int = 0) -> None:
        """All chunks as one call, as few launches as a device would see."""
        ranges = [(self.parts[chunk.part], chunk.first, chunk.count, wire) for chunk in chunks]
        assert native().walk_moves(direction, ranges, SMS) == 0, "misaligned"


def aligned(nbytes: int) -> np.ndarray:
    """Zero bytes that start on 16."""
    memory = np.zeros(nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + nbytes]


def by_copy(plan: TransferPlan, src: np.ndarray, dst: np.ndarray, limit: int) -> None:
    walk = HostWalk(plan, src, dst)
    walk.walk(native().COPY, *plan.chunks(limit))


def by_packing(plan: TransferPlan, src: np.ndarray, dst: np.ndarray, limit: int) -> None:
    gather, scatter = HostWalk(plan, src, None), HostWalk(plan, None, dst)
    for chunk in plan.chunks(limit):
        wire, expected = aligned(chunk.wire_bytes + 32), aligned(chunk.wire_bytes + 32)
        wire[:], expected[:] = 0xEE, 0xEE
        gather.walk(native().GATHER, chunk, wire=wire.ctypes.data + 16)
        test_plans.PreparedPlan(plan).gather(chunk, src, expected.ctypes.data + 16)
        assert np.array_equal(wire, expected), "the packed order differs from the CPU's"
        scatter.walk(native().SCATTER, chunk, wire=wire.ctypes.data + 16)


@pytest.mark.parametrize(
    "family",
    [
        test_plans.test_attention_between_any_two_layouts,
        test_plans.test_latents_between_byte_orders_and_block_sizes,
        test_plans.test_sliding_windows,
        test_plans.test_rings_of_unequal_capacity,
        test_plans.test_linear_attention_state_between_ranks,
    ],
)
def test_every_plan_lands_where_the_reference_says(family, monkeypatch):
    monkeypatch.setattr(test_plans, "by_copy", by_copy)
    monkeypatch.setattr(test_plans, "by_packing", by_packing)
    family()


def whole_rows(sizes: list[int], segments: int, *, stride: int = 0) -> TransferPlan:
    """A plan of whole rows of these sizes, each row in a region of its own; block b to block b."""
    rows = np.zeros(len(sizes), ROW)
    rows["src_region"] = rows["dst_region"] = np.arange(len(sizes))
    rows["src_block_stride"] = rows["dst_block_stride"] = stride or sizes
    rows["heads"] = rows["channels"] = 1
    rows["unit_bytes"] = sizes
    ids = np.arange(segments, dtype=np.int32)
    part = PlanPart(rows=rows, segments=Segments(src_block=ids, dst_block=ids[::-1].copy()))
    return TransferPlan(parts=(part,), src_regions=len(sizes), dst_regions=len(sizes))


@pytest.mark.parametrize(
    "sizes",
    [[1], [6], [16], [512], [4096], [4112], [65536], [100_016], [4096, 512], [528, 16384, 6], [8192] * 101],
    ids=str,
)
def test_whole_rows_of_any_sizes(sizes):
    plan = whole_rows(sizes, 5)
    src = [np.random.default_rng(i).integers(0, 256, 5 * n, np.uint8) for i, n in enumerate(sizes)]
    dst = [np.zeros_like(array) for array in src]
    by_copy(plan, *(np.array([a.ctypes.data for a in side], np.uint64) for side in (src, dst)), 1 << 20)
    for n, before, after in zip(sizes, src, dst, strict=True):
        assert np.array_equal(before.reshape(5, n)[::-1], after.reshape(5, n))


@pytest.mark.parametrize(
    ("sizes", "offset", "width"),
    [([4096], 0, 16), ([4096], 8, 8), ([6], 0, 2), ([4096, 12], 0, 4), ([7], 0, 1)],
)
def test_the_vector_width_follows_from_sizes_and_addresses(sizes, offset, width):
    bases = np.array([4096 + offset] * len(sizes), np.uint64)
    part = prepare(whole_rows(sizes, 2).parts[0], bases, bases)
    assert part.vector_bytes(native().COPY) == width


@pytest.mark.parametrize("stride", ["block", "entry", "head", "channel"])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_every_stride_narrows_the_vector(side, stride):
    rows = np.zeros(1, ROW)
    rows["heads"] = rows["channels"] = 2
    rows["unit_bytes"], rows["tokens_per_entry"] = 32, 1
    for name in ("block", "entry", "head", "channel"):
        rows[f"src_{name}_stride"] = rows[f"dst_{name}_stride"] = 4096
    rows[f"{side}_{stride}_stride"] = 4100
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    segments = Segments(src_block=zero, dst_block=zero, src_token=zero, dst_token=zero, tokens=one)
    bases = np.array([4096], np.uint64)
    part = prepare(PlanPart(rows=rows, segments=segments), bases, bases)
    packing, other = (
        (native().GATHER, native().SCATTER) if side == "src" else (native().SCATTER, native().GATHER)
    )
    assert [part.vector_bytes(d) for d in (native().COPY, packing, other)] == [4, 4, 16]


def test_one_odd_side_does_not_narrow_the_other():
    odd, even = np.array([4097], np.uint64), np.array([4096], np.uint64)
    part = prepare(whole_rows([4096], 2).parts[0], even, odd)
    widths = [part.vector_bytes(d) for d in (native().COPY, native().GATHER, native().SCATTER)]
    assert widths == [1, 16, 1]


def test_a_unit_of_4_gib_is_refused():
    with pytest.raises(InvalidRequest, match="4 GiB or more"):
        prepare(whole_rows([1 << 32], 1).parts[0], None, None)


def test_offsets_past_4_gib():
    """Addresses only: blocks that lie 3 GiB apart in a span of address space that is never backed."""
    import mmap

    stride, blocks = 3 << 30, 3
    spans = [
        mmap.mmap(-1, stride * blocks, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000) for _ in range(2)
    ]
    src, dst = (np.frombuffer(span, np.uint8) for span in spans)
    for block in range(blocks):
        src[block * stride : block * stride + 512] = block + 1
    plan = whole_rows([512], blocks, stride=stride)
    by_copy(plan, np.array([src.ctypes.data], np.uint64), np.array([dst.ctypes.data], np.uint64), 1 << 20)
    for block in range(blocks):
        assert (dst[block * stride : block * stride + 512] == blocks - block).all()


def test_many_parts_share_launches():
    """More parts than one launch takes, of uneven sizes and widths."""
    sizes = [4096, 16, 16384, 6, 48, 512, 528, 100_016, 32, 64, 1024, 16, 80]
    counts = [300, 1, 5, 7, 2, 90, 3, 2, 1, 1, 40, 2, 3]
    parts, src, dst = [], [], []
    for region, (nbytes, count) in enumerate(zip(sizes, counts, strict=True)):
        rows = whole_rows([nbytes], 1).parts[0].rows
        rows["src_region"] = rows["dst_region"] = region
        ids = np.random.default_rng(region).permutation(count).astype(np.int32)
        parts.append(PlanPart(rows=rows, segments=Segments(src_block=ids, dst_block=ids[::-1].copy())))
        src.append(np.random.default_rng(region).integers(0, 256, (count, nbytes), np.uint8))
        dst.append(np.zeros_like(src[-1]))
    plan = TransferPlan(parts=tuple(parts), src_regions=len(sizes), dst_regions=len(sizes))
    by_copy(plan, *(np.array([a.ctypes.data for a in side], np.uint64) for side in (src, dst)), 1 << 30)
    for part, before, after in zip(parts, src, dst, strict=True):
        assert np.array_equal(after[part.segments.dst_block], before[part.segments.src_block])
