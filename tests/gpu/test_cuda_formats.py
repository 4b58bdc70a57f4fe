"""The conversion kernels on one GPU: every format between every pair of caches, bit for bit what the CPU makes."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer import cuda
from kvxfer.errors import InvalidRequest
from tests.gpu import formats
from tests.gpu.memory import Region, addresses, need_devices
from tests.unit.test_formats_plan import attention

pytestmark = pytest.mark.gpu
need_devices(1)

DEVICE = 0


@pytest.fixture(scope="module")
def stream():
    with cuda.Stream(device=DEVICE) as made:
        yield made


class Arena:
    """Device memory for one case after the other: an allocation a region would cost more than the test."""

    def __init__(self, nbytes: int) -> None:
        self.memory = Region(np.zeros(nbytes, np.uint8))
        self.used = 0

    def take(self, content: np.ndarray) -> tuple[int, int]:
        """Offset and length of a copy of `content`, on 256 bytes."""
        at = self.used
        self.used += -(-content.nbytes // 256) * 256
        assert self.used <= self.memory.nbytes
        self.memory.write(content, at)
        return at, content.nbytes

    def put(self, arrays: list[np.ndarray]) -> tuple[list[tuple[int, int]], np.ndarray]:
        places = [self.take(array) for array in arrays]
        return places, np.array([self.memory.address + at for at, _ in places], np.uint64)

    def read(self, places: list[tuple[int, int]]) -> list[np.ndarray]:
        return [self.memory.read(*place) for place in places]


@pytest.fixture(scope="module")
def arena():
    made = Arena(64 << 20)
    yield made
    made.memory.close()


def assert_equal(got: np.ndarray, expected: np.ndarray) -> None:
    where = np.flatnonzero(got != expected)
    assert not len(where), f"{len(where)} of {len(got)} differ: {where[:8]}, {got[where[:8]]} {expected[where[:8]]}"


def assert_carried_out(case, arena, stream, *, limit: int, max_sms: int = 0, copy: bool = True) -> int:
    """Packs, unpacks and copies. Returns what was counted as not finite."""
    arena.used = 0
    options = {"stream": stream.address, "max_sms": max_sms}
    _, src = arena.put(case.src)
    unpacked, to_unpack = arena.put(case.dst)
    copied, to_copy = arena.put(case.dst)
    counter, _ = arena.put([np.zeros(4, np.uint8)])
    nonfinite = arena.memory.address + counter[0][0]
    chunks = list(case.packed(limit))
    wires, at = arena.put([np.full(chunk.wire_bytes + 64, 0xEE, np.uint8) for chunk, _ in chunks])
    with (
        cuda.PreparedCudaPackedPlan(case.plan, device=DEVICE, src_bases=src) as pack,
        cuda.PreparedCudaPackedPlan(case.plan, device=DEVICE, dst_bases=to_unpack) as unpack,
        cuda.PreparedCudaPackedPlan(case.plan, device=DEVICE, src_bases=src, dst_bases=to_copy) as direct,
    ):
        for plan in (pack, unpack, direct):
            plan.upload(stream=stream.address)
        for (chunk, _), wire in zip(chunks, at.tolist(), strict=True):
            pack.pack(chunk, wire + 32, nonfinite=nonfinite, **options)
            unpack.unpack(chunk, wire + 32, **options)
            if copy:
                direct.copy(chunk, **options)
        stream.synchronise()
    for (_, expected), wire in zip(chunks, arena.read(wires), strict=True):
        assert (wire[:32] == 0xEE).all() and (wire[-32:] == 0xEE).all()
        assert_equal(wire[32:-32], expected)
    for got, expected in zip(arena.read(unpacked), case.unpacked(limit), strict=True):
        assert_equal(got, expected)
    if copy:
        for got, expected in zip(arena.read(copied), case.copied(), strict=True):
            assert_equal(got, expected)
    return int(arena.read(counter)[0].view(np.uint32)[0])


@pytest.mark.parametrize("finite", [True, False], ids=["finite", "with infinity and NaN"])
@pytest.mark.parametrize(("pair", "wire"), formats.CASES)
def test_every_format_between_every_pair_of_caches(pair, wire, finite, arena, stream):
    case = formats.packed_case(*formats.PAIRS[pair](), wire, finite=finite, tokens=45)
    copy = case.plan.raw is None and wire in formats.COPIED
    if case.plan.raw is not None:
        pytest.skip("nothing is converted: a plan for the copy kernels")
    assert_carried_out(case, arena, stream, limit=9000, copy=copy)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("wire", formats.FAST)
def test_every_half(wire, dtype, arena, stream):
    assert_carried_out(formats.every_half(wire, dtype), arena, stream, limit=1 << 40, copy=False)


@pytest.mark.parametrize("max_sms", [1, 7, 1000])
@pytest.mark.parametrize("limit", [1, 700, 1 << 40])
def test_chunks_and_multiprocessors_of_any_number(limit, max_sms, arena, stream):
    pair = formats.PAIRS["bf16, 8 heads of 128, blocks of 16 to 24"]
    case = formats.packed_case(*pair(), "mixed:first=1,last=4", tokens=200)
    assert_carried_out(case, arena, stream, limit=limit, max_sms=max_sms)


@pytest.mark.parametrize("wire", ["nvfp4", "nvfp4:four_over_six", "fp8_e4m3", "int4"])
def test_values_that_saturate_are_counted(wire, arena, stream):
    layout = attention()
    for value, counts in ((1.0, False), (np.inf, True), (np.nan, True)):
        case = formats.packed_case(layout, layout, wire)
        for region in case.src:
            region.view(np.uint16)[:] = 0x3F80
        one = np.array([value], np.float32).view(np.uint32)[0] >> 16
        block = int(case.plan.parts[0].segments.src_block[0])
        case.src[0].view(np.uint16)[block * case.src[0].nbytes // 24 // 2 + 17] = one
        assert bool(assert_carried_out(case, arena, stream, limit=1 << 40, copy=False)) == counts


@pytest.mark.parametrize("wire", ["nvfp4", "mixed", "int4:asym", "raw"])
def test_launches_can_be_captured(wire, stream):
    torch = pytest.importorskip("torch", reason="captures with torch")
    case = formats.packed_case(attention(), attention(block_tokens=8, order="HND"), wire)
    src, dst = [Region(array) for array in case.src], [Region(array) for array in case.dst]
    (first, *more) = case.plan.chunks(1 << 40)
    assert not more
    with (
        Region(np.zeros(first.wire_bytes, np.uint8)) as packed,
        Region(np.zeros(4, np.uint8)) as nonfinite,
        cuda.PreparedCudaPackedPlan(
            case.plan, device=DEVICE, src_bases=addresses(src), dst_bases=addresses(dst)
        ) as plan,
    ):
        plan.upload(stream=stream.address)
        stream.synchronise()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            on = cuda.stream_address(torch.cuda.current_stream())
            plan.pack(first, packed.address, stream=on, nonfinite=nonfinite.address)
            plan.unpack(first, packed.address, stream=on)
        for _ in range(2):
            for region, before in zip(dst, case.dst, strict=True):
                region.write(before)
            graph.replay()
            torch.cuda.synchronize()
            for region, expected in zip(dst, case.unpacked(1 << 40), strict=True):
                assert_equal(region.read(), expected)


def test_wrong_calls_are_refused(stream):
    case = formats.packed_case(attention(), attention(), "nvfp4")
    (chunk,) = case.plan.chunks(1 << 40)
    with cuda.PreparedCudaPackedPlan(case.plan, device=DEVICE, src_bases=np.full(2, 256, np.uint64)) as plan:
        with pytest.raises(InvalidRequest, match="upload"):
            plan.pack(chunk, 256, stream=0)
        plan.upload(stream=stream.address)
        with pytest.raises(InvalidRequest, match="16 bytes"):
            plan.pack(chunk, 264, stream=0)
        with pytest.raises(InvalidRequest, match="4 bytes"):
            plan.pack(chunk, 256, stream=0, nonfinite=2)
        with pytest.raises(InvalidRequest, match="dst_bases"):
            plan.unpack(chunk, 256, stream=0)
        with pytest.raises(InvalidRequest, match="src_bases and dst_bases"):
            plan.copy(chunk, stream=0)
        stream.synchronise()
