"""The copy kernels on one GPU: every plan family, byte for byte what the CPU kernels make of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer import cuda
from kvxfer.errors import InvalidRequest
from kvxfer.formats.checksums import mix64_reference
from kvxfer.plan import ROW, PlanPart, Segments, TransferPlan
from tests.gpu import families
from tests.gpu.memory import Region, addresses, need_devices
from tests.property import test_plans

pytestmark = pytest.mark.gpu
need_devices(1)

DEVICE = 0


@pytest.fixture
def stream():
    with cuda.Stream(device=DEVICE) as made:
        yield made


def carried_out(
    case: families.Case, stream: cuda.Stream, *, limit: int = 1 << 40, max_sms: int = 0
):
    """The destination after `copy`, and after `gather` and `scatter`, and what lay packed between."""
    options = {"stream": stream.address, "max_sms": max_sms}
    src = [Region(array) for array in case.src]
    copied, scattered = ([Region(array) for array in case.dst] for _ in range(2))
    packed = []
    with cuda.PreparedCudaPlan(
        case.plan, device=DEVICE, src_bases=addresses(src), dst_bases=addresses(copied)
    ) as plan:
        plan.upload(stream=stream.address)
        plan.copy(list(case.plan.chunks(limit)), **options)
        stream.synchronise()
    with (
        cuda.PreparedCudaPlan(case.plan, device=DEVICE, src_bases=addresses(src)) as gather,
        cuda.PreparedCudaPlan(case.plan, device=DEVICE, dst_bases=addresses(scattered)) as scatter,
    ):
        gather.upload(stream=stream.address)
        scatter.upload(stream=stream.address)
        for chunk in case.plan.chunks(limit):
            with Region(np.full(chunk.wire_bytes + 64, 0xEE, np.uint8)) as wire:
                gather.gather(chunk, wire.address + 32, **options)
                scatter.scatter(chunk, wire.address + 32, **options)
                stream.synchronise()
                packed.append(wire.read())
    results = [[region.read() for region in side] for side in (copied, scattered)]
    for region in (*src, *copied, *scattered):
        region.close()
    return *results, packed


def assert_carried_out(case: families.Case, stream: cuda.Stream, **options) -> None:
    copied, scattered, packed = carried_out(case, stream, **options)
    for got in (copied, scattered):
        for region, expected in zip(got, case.expected, strict=True):
            assert np.array_equal(region, expected)
    for wire, expected in zip(packed, case.packed(options.get("limit", 1 << 40)), strict=True):
        assert (wire[:32] == 0xEE).all() and (wire[-32:] == 0xEE).all()
        assert np.array_equal(wire[32:-32], expected)


@pytest.mark.parametrize("sizes", families.WHOLE_SIZES, ids=lambda s: "+".join(map(str, s[:3])))
def test_whole_rows(sizes, stream):
    assert_carried_out(families.whole(sizes), stream)


@pytest.mark.parametrize("family", families.TOKEN_FAMILIES)
def test_token_rows(family, stream):
    assert_carried_out(families.TOKEN_FAMILIES[family](), stream)


@pytest.mark.parametrize("limit", [1, 10_000, 100_000])
@pytest.mark.parametrize("family", ["blocks of 16 to 24", "NHD to HND"])
def test_chunks_of_any_size(family, limit, stream):
    assert_carried_out(families.TOKEN_FAMILIES[family](), stream, limit=limit)


@pytest.mark.parametrize("max_sms", [1, 2, 7, 1000])
def test_any_limit_on_multiprocessors(max_sms, stream):
    assert_carried_out(families.whole([4112], blocks=600), stream, max_sms=max_sms)


# --- the property tests' plans, on pinned memory ------------------------------------------------------------


class Arena:
    """Pinned memory that host and device share, handed out in turn and reused from the start when it is full."""

    def __init__(self, nbytes: int) -> None:
        self.memory = cuda.PinnedMemory(nbytes)
        self.used = 0

    def take(self, nbytes: int) -> np.ndarray:
        if self.used + nbytes > self.memory.nbytes:
            self.used = 0
        start, self.used = self.used, -(-(self.used + nbytes) // 16) * 16
        return self.memory.array[start : start + nbytes]

    def copy_of(self, array: np.ndarray) -> np.ndarray:
        taken = self.take(array.nbytes)
        taken[:] = array
        return taken


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
def test_every_plan_lands_where_the_reference_says(family, monkeypatch, stream):
    arena = Arena(64 << 20)
    make = test_plans.Side.make

    def make_pinned(layout, blocks, seed):
        side = make(layout, blocks, seed)
        side.memory = {name: arena.copy_of(array) for name, array in side.memory.items()}
        return side

    def by_copy(plan, src, dst, limit):
        with cuda.PreparedCudaPlan(plan, device=DEVICE, src_bases=src, dst_bases=dst) as prepared:
            prepared.upload(stream=stream.address)
            prepared.copy(list(plan.chunks(limit)), stream=stream.address)
            stream.synchronise()

    def by_packing(plan, src, dst, limit):
        with (
            cuda.PreparedCudaPlan(plan, device=DEVICE, src_bases=src) as gather,
            cuda.PreparedCudaPlan(plan, device=DEVICE, dst_bases=dst) as scatter,
        ):
            gather.upload(stream=stream.address)
            scatter.upload(stream=stream.address)
            for chunk in plan.chunks(limit):
                wire = arena.take(chunk.wire_bytes + 32)
                wire[:] = 0xEE
                gather.gather(chunk, wire.ctypes.data + 16, stream=stream.address)
                scatter.scatter(chunk, wire.ctypes.data + 16, stream=stream.address)
                stream.synchronise()
                assert (wire[:16] == 0xEE).all() and (wire[-16:] == 0xEE).all()

    monkeypatch.setattr(test_plans.Side, "make", make_pinned)
    monkeypatch.setattr(test_plans, "by_copy", by_copy)
    monkeypatch.setattr(test_plans, "by_packing", by_packing)
    family()


# --- sizes that need a big GPU ------------------------------------------------------------------------------


@pytest.mark.slow
def test_offsets_past_4_gib(stream):
    block = 1 << 20
    count = 5 << 10  # 5 GiB a region
    ids = np.array([0, 2047, 2048, 2049, 4095, 4096, 4097, count - 1], np.int32)
    rows = np.zeros(1, ROW)
    rows["src_block_stride"] = rows["dst_block_stride"] = block
    rows["heads"] = rows["channels"] = 1
    rows["unit_bytes"] = 4096
    part = PlanPart(rows=rows, segments=Segments(src_block=ids, dst_block=ids[::-1].copy()))
    plan = TransferPlan(parts=(part,), src_regions=1, dst_regions=1)
    pieces = np.random.default_rng(0).integers(0, 256, (len(ids), 4096), np.uint8)
    with (
        cuda.DeviceMemory(count * block, device=DEVICE) as src,
        cuda.DeviceMemory(count * block, device=DEVICE) as dst,
    ):
        cuda.set_bytes(dst.address, 0xEE, dst.nbytes, device=DEVICE, stream=stream.address)
        stream.synchronise()
        for number, piece in zip(ids.tolist(), pieces, strict=True):
            at = src.address + number * block
            cuda.copy_bytes(at, piece.ctypes.data, 4096, device=DEVICE, stream=stream.address)
        with cuda.PreparedCudaPlan(
            plan, device=DEVICE, src_bases=addresses([src]), dst_bases=addresses([dst])
        ) as ready:
            ready.upload(stream=stream.address)
            for chunk in plan.chunks(1 << 40):
                ready.copy(chunk, stream=stream.address)
            stream.synchronise()
        found = np.empty(8192, np.uint8)
        for number, piece in zip(ids[::-1].tolist(), pieces, strict=True):
            nbytes = min(8192, dst.nbytes - number * block)
            cuda.copy_bytes(
                found.ctypes.data, dst.address + number * block, nbytes, device=DEVICE, stream=stream.address
            )
            stream.synchronise()
            assert np.array_equal(found[:4096], piece)
            assert (found[4096:nbytes] == 0xEE).all()


@pytest.mark.slow
def test_more_items_than_31_bits_count(stream):
    """Bytes two apart become dense: 2^24 items a segment, 130 segments."""
    channels, blocks = 1 << 24, 130
    rows = np.zeros(1, ROW)
    rows["src_block_stride"], rows["dst_block_stride"] = 2 * channels, channels
    rows["src_channel_stride"], rows["dst_channel_stride"] = 2, 1
    rows["heads"], rows["channels"], rows["unit_bytes"], rows["tokens_per_entry"] = 1, channels, 1, 1
    ids = np.arange(blocks, dtype=np.int32)
    zero, one = np.zeros(blocks, np.int32), np.ones(blocks, np.int32)
    segments = Segments(src_block=ids, dst_block=ids[::-1].copy(), src_token=zero, dst_token=zero, tokens=one)
    plan = TransferPlan(parts=(PlanPart(rows=rows, segments=segments),), src_regions=1, dst_regions=1)
    assert plan.copies * channels > 1 << 31
    with (
        cuda.DeviceMemory(2 * channels * blocks, device=DEVICE) as src,
        cuda.DeviceMemory(channels * blocks, device=DEVICE) as dst,
        cuda.PreparedCudaPlan(
            plan, device=DEVICE, src_bases=addresses([src]), dst_bases=addresses([dst])
        ) as ready,
    ):
        for block in range(blocks):
            at = src.address + 2 * channels * block
            cuda.set_bytes(at, block + 1, 2 * channels, device=DEVICE, stream=stream.address)
        cuda.set_bytes(dst.address, 0, dst.nbytes, device=DEVICE, stream=stream.address)
        ready.upload(stream=stream.address)
        for chunk in plan.chunks(1 << 40):
            ready.copy(chunk, stream=stream.address)
        found = np.empty(dst.nbytes, np.uint8)
        cuda.copy_bytes(found.ctypes.data, dst.address, dst.nbytes, device=DEVICE, stream=stream.address)
        stream.synchronise()
        for block in range(blocks):
            assert (found[channels * block : channels * (block + 1)] == blocks - block).all()


# --- graphs, streams, errors --------------------------------------------------------------------------------


def test_launches_can_be_captured(stream):
    torch = pytest.importorskip("torch", reason="captures with torch")
    case = families.TOKEN_FAMILIES["blocks of 16 to 24"]()
    src, dst = [Region(array) for array in case.src], [Region(array) for array in case.dst]
    digest = Region(np.zeros(8, np.uint8))
    with cuda.PreparedCudaPlan(
        case.plan, device=DEVICE, src_bases=addresses(src), dst_bases=addresses(dst)
    ) as plan:
        plan.upload(stream=stream.address)
        stream.synchronise()
        graph = torch.cuda.CUDAGraph()
        (chunk,) = case.plan.chunks(1 << 40)
        with torch.cuda.graph(graph):
            plan.copy(chunk, stream=cuda.stream_address(torch.cuda.current_stream()))
            cuda.checksum_on_device(
                src[0].address,
                src[0].nbytes,
                digest.address,
                device=DEVICE,
                stream=cuda.stream_address(torch.cuda.current_stream()),
            )
        for region, before in zip(dst, case.dst, strict=True):
            assert np.array_equal(region.read(), before), "capturing must not run the kernel"
        for _ in range(2):
            for region, before in zip(dst, case.dst, strict=True):
                region.write(before)
            graph.replay()
            torch.cuda.synchronize()
            for region, expected in zip(dst, case.expected, strict=True):
                assert np.array_equal(region.read(), expected)
        assert digest.read().view(np.uint64)[0] == mix64_reference(case.src[0])


def test_events_order_streams(stream):
    with (
        cuda.Stream(device=DEVICE) as other,
        cuda.Event(device=DEVICE) as event,
        cuda.DeviceMemory(1 << 28, device=DEVICE) as memory,
    ):
        assert event.done()
        for byte in (1, 2):
            cuda.set_bytes(memory.address, byte, memory.nbytes, device=DEVICE, stream=stream.address)
        event.record(stream.address)
        other.wait_for(event)
        found = np.empty(memory.nbytes, np.uint8)
        cuda.copy_bytes(found.ctypes.data, memory.address, memory.nbytes, device=DEVICE, stream=other.address)
        other.synchronise()
        assert event.done() and (found == 2).all()


def test_timed_events_measure(stream):
    begin, end = (cuda.Event(device=DEVICE, timed=True) for _ in range(2))
    begin.record(stream.address)
    end.record(stream.address)
    end.synchronise()
    assert 0 <= end.ms_since(begin) < 1000


def test_a_failed_call_says_which_and_poisons_nothing(stream):
    with pytest.raises(cuda.CudaError, match="cudaErrorMemoryAllocation") as caught:
        cuda.DeviceMemory(1 << 60, device=DEVICE)
    assert caught.value.name == "cudaErrorMemoryAllocation" and caught.value.status
    with pytest.raises(cuda.CudaError, match="cudaErrorInvalidDevice"):
        cuda.DeviceMemory(16, device=63)
    assert_carried_out(families.whole([512]), stream)


def test_wrong_calls_are_refused(stream):
    case = families.whole([512])
    (chunk,) = case.plan.chunks(1 << 40)
    bases = np.array([256], np.uint64)
    plan = cuda.PreparedCudaPlan(case.plan, device=DEVICE, src_bases=bases)
    with pytest.raises(InvalidRequest, match="upload"):
        plan.gather(chunk, 256, stream=0)
    plan.upload(stream=stream.address)
    with pytest.raises(InvalidRequest, match="16 bytes"):
        plan.gather(chunk, 264, stream=0)
    with pytest.raises(InvalidRequest, match="dst_bases"):
        plan.copy(chunk, stream=0)
    with pytest.raises(InvalidRequest, match="1 region addresses as uint64"):
        cuda.PreparedCudaPlan(case.plan, device=DEVICE, src_bases=np.zeros(2, np.uint64))
    plan.close()


# --- checksum -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 15, 16, 17, 4096, 32768, 1_000_003, (64 << 20) + 8])
@pytest.mark.parametrize("max_sms", [0, 3])
def test_checksum(nbytes, max_sms, stream):
    content = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    with Region(content) as data, Region(np.full(8, 0xEE, np.uint8)) as digest:
        cuda.checksum_on_device(
            data.address, nbytes, digest.address, device=DEVICE, stream=stream.address, max_sms=max_sms
        )
        stream.synchronise()
        assert digest.read().view(np.uint64)[0] == mix64_reference(content)
