"""The conversion kernels walked on the host: tables, index arithmetic and the conversion code, without a GPU.

The walk shares all of these with the kernels, and takes every warp, batch and piece in turn; only the few instructions
that the device has of its own are not in it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvxfer.cuda.native import native
from kvxfer.cuda.packed import prepare_packed
from kvxfer.errors import InvalidRequest, MissingExtra
from kvxfer.formats.plan import PackedPart, PackedPlan
from kvxfer.plan import Chunk
from tests.gpu import formats
from tests.gpu.families import host_addresses
from tests.gpu.test_cuda_mapping import aligned
from tests.unit.test_formats_plan import attention

try:
    native()
except MissingExtra as reason:
    pytest.skip(str(reason), allow_module_level=True)

SMS = 3


class HostWalk:
    """A packed plan whose tables lie in host memory."""

    def __init__(self, plan: PackedPlan, src: list[np.ndarray] | None, dst: list[np.ndarray] | None) -> None:
        self._bases = [None if side is None else host_addresses(side) for side in (src, dst)]
        self._parts = [prepare_packed(part, *self._bases) for part in plan.parts]
        self._tables = [aligned(part.table_bytes) for part in self._parts]
        for part, memory in zip(self._parts, self._tables, strict=True):
            part.fill(memory.ctypes.data)
            part.bind(memory.ctypes.data)
        self.nonfinite = np.zeros(1, np.uint32)

    def walk(self, direction: int, chunk: Chunk, wire: int = 0) -> None:
        part, count = self._parts[chunk.part], self.nonfinite.ctypes.data
        misaligned = part.walk_on_host(direction, chunk.first, chunk.count, wire, count, SMS)
        assert misaligned == 0

    def kernels(self, direction: int) -> list[list[str]]:
        return [part.kernels(direction) for part in self._parts]


def on_16(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Copies that start on 16 bytes, as device memory does."""
    copies = [aligned(array.nbytes) for array in arrays]
    for copy, array in zip(copies, arrays, strict=True):
        copy[:] = array
    return copies


def assert_walked(case: formats.PackedCase, *, limit: int, copy: bool = True) -> None:
    src, unpacked, copied = on_16(case.src), on_16(case.dst), on_16(case.dst)
    pack, unpack = HostWalk(case.plan, src, None), HostWalk(case.plan, None, unpacked)
    for chunk, expected in case.packed(limit):
        wire = aligned(chunk.wire_bytes + 64)
        wire[:] = 0xEE
        pack.walk(native().GATHER, chunk, wire.ctypes.data + 32)
        assert (wire[:32] == 0xEE).all() and (wire[-32:] == 0xEE).all()
        assert np.array_equal(wire[32:-32], expected), _difference(wire[32:-32], expected)
        unpack.walk(native().SCATTER, chunk, wire.ctypes.data + 32)
    for got, expected in zip(unpacked, case.unpacked(limit), strict=True):
        assert np.array_equal(got, expected), _difference(got, expected)
    if not copy:
        return
    direct = HostWalk(case.plan, src, copied)
    for chunk in case.plan.chunks(limit):
        direct.walk(native().COPY, chunk)
    for got, expected in zip(copied, case.copied(), strict=True):
        assert np.array_equal(got, expected), _difference(got, expected)


def _difference(got: np.ndarray, expected: np.ndarray) -> str:
    where = np.flatnonzero(got != expected)
    return f"{len(where)} of {len(got)} bytes differ, first {where[:8]}: {got[where[:8]]}, not {expected[where[:8]]}"


@pytest.mark.parametrize("finite", [True, False], ids=["finite", "with infinity and NaN"])
@pytest.mark.parametrize(("pair", "wire"), formats.CASES)
def test_every_format_between_every_pair_of_caches(pair, wire, finite):
    case = formats.packed_case(*formats.PAIRS[pair](), wire, finite=finite, tokens=45)
    if case.plan.raw is not None:
        pytest.skip("nothing is converted: a plan for the copy kernels")
    assert_walked(case, limit=9000, copy=wire in formats.COPIED)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("wire", formats.FAST)
def test_every_half(wire, dtype):
    assert_walked(formats.every_half(wire, dtype), limit=1 << 40, copy=False)


@pytest.mark.parametrize("limit", [1, 700, 1 << 40])
@pytest.mark.parametrize("tokens", [1, 15, 200])
def test_chunks_of_any_size(limit, tokens):
    pair = formats.PAIRS["bf16, 8 heads of 128, blocks of 16 to 24"]
    assert_walked(formats.packed_case(*pair(), "mixed:first=1,last=4", tokens=tokens), limit=limit)


def kernels_of(case: formats.PackedCase) -> Counter:
    walk = HostWalk(case.plan, on_16(case.src), on_16(case.dst))
    return Counter(
        name for d in (native().GATHER, native().SCATTER) for part in walk.kernels(d) for name in part
    )


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("wire", "names"),
    [
        ("nvfp4", "nvfp4"),
        ("nvfp4:scale=0.3", "nvfp4"),
        ("mxfp4", "mxfp4"),
        ("mxfp4:even", "mxfp4"),
        ("fp8_e4m3", "e4m3"),
        ("fp8_e4m3:tensor", "e4m3"),
        ("mxfp8", "e4m3"),
        ("mixed", "e4m3 nvfp4"),
    ],
)
def test_common_caches_take_the_fast_kernels(wire, names, head_dim, dtype, order):
    layout = attention(dtype, heads=8, head_dim=head_dim, order=order)
    found = kernels_of(formats.packed_case(layout, layout, wire))
    assert found == Counter(f"{way}_{name}" for way in ("encode", "decode") for name in names.split())


def test_addresses_off_16_bytes_take_the_slow_kernel():
    layout = attention(heads=8, head_dim=128)
    case = formats.packed_case(layout, layout, "nvfp4")
    src = [aligned(array.nbytes + 16)[2:][: array.nbytes] for array in case.src]
    for moved, array in zip(src, case.src, strict=True):
        moved[:] = array
    pack = HostWalk(case.plan, src, None)
    assert pack.kernels(native().GATHER) == [["vectors"]]
    for chunk, expected in case.packed(1 << 40):
        wire = aligned(chunk.wire_bytes)
        pack.walk(native().GATHER, chunk, wire.ctypes.data)
        assert np.array_equal(wire, expected)


@pytest.mark.parametrize("wire", ["nvfp4", "nvfp4:four_over_six", "fp8_e4m3", "int4"])
def test_values_that_saturate_are_counted(wire):
    layout = attention()
    for value, counts in ((1.0, False), (np.inf, True), (np.nan, True)):
        case = formats.packed_case(layout, layout, wire)
        src = on_16(case.src)
        for region in src:
            region.view(np.uint16)[:] = 0x3F80
        one = np.array([value], np.float32).view(np.uint32)[0] >> 16
        block = int(case.plan.parts[0].segments.src_block[0])
        src[0].view(np.uint16)[block * src[0].nbytes // 24 // 2 + 17] = one
        pack = HostWalk(case.plan, src, None)
        for chunk in case.plan.chunks(1 << 40):
            wire_bytes = aligned(chunk.wire_bytes)
            pack.walk(native().GATHER, chunk, wire_bytes.ctypes.data)
        assert bool(pack.nonfinite[0]) == counts


def test_what_cannot_be_carried_out_is_refused():
    layout = attention()
    part = formats.packed_case(layout, layout, "nvfp4").plan.parts[0]
    rows = part.rows.copy()
    rows["src"]["head_stride"] = 1 << 32
    with pytest.raises(InvalidRequest, match="4 GiB or more"):
        prepare_packed(
            PackedPart(rows=rows, segments=part.segments, wire_start=part.wire_start, nbytes=0), None, None
        )
    with pytest.raises(InvalidRequest, match="regions as uint64"):
        prepare_packed(part, np.zeros(0, np.uint64), None)
