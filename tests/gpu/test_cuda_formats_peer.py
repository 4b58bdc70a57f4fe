"""Packing straight into another GPU, and converting into its blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer import cuda
from tests.gpu import formats
from tests.gpu.memory import Region, addresses, need_devices

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]
need_devices(2)


@pytest.mark.parametrize("wire", ["nvfp4", "mixed", "fp8_e4m3", "mxfp4", "mxfp4:hadamard"])
def test_packed_into_a_peer_and_unpacked_there(wire):
    cuda.enable_peer_access(0, 1)
    case = formats.packed_case(*formats.PAIRS["bf16, 8 heads of 128, blocks of 16 to 24"](), wire)
    src, dst = [Region(a, device=0) for a in case.src], [Region(a, device=1) for a in case.dst]
    ((chunk, expected),) = case.packed(1 << 40)
    with (
        Region(np.full(chunk.wire_bytes, 0xEE, np.uint8), device=1) as packed,
        cuda.Stream(device=0) as here,
        cuda.Stream(device=1) as there,
        cuda.PreparedCudaPackedPlan(case.plan, device=0, src_bases=addresses(src)) as pack,
        cuda.PreparedCudaPackedPlan(case.plan, device=1, dst_bases=addresses(dst)) as unpack,
    ):
        pack.upload(stream=here.address)
        unpack.upload(stream=there.address)
        pack.pack(chunk, packed.address, stream=here.address)
        here.synchronise()
        unpack.unpack(chunk, packed.address, stream=there.address)
        there.synchronise()
        assert np.array_equal(packed.read(), expected)
    for region, wanted in zip(dst, case.unpacked(1 << 40), strict=True):
        assert np.array_equal(region.read(), wanted)


@pytest.mark.parametrize("runs_on", [0, 1], ids=["push", "pull"])
@pytest.mark.parametrize("pair", ["bf16 to NVFP4 pages", "fp8 to bf16", "NVFP4 pages to bf16", "bf16 to fp8"])
def test_converted_into_a_peers_blocks(pair, runs_on):
    cuda.enable_peer_access(runs_on, 1 - runs_on)
    case = formats.packed_case(*formats.PAIRS[pair](), "raw")
    src, dst = [Region(a, device=0) for a in case.src], [Region(a, device=1) for a in case.dst]
    with (
        cuda.Stream(device=runs_on) as stream,
        cuda.PreparedCudaPackedPlan(
            case.plan, device=runs_on, src_bases=addresses(src), dst_bases=addresses(dst)
        ) as plan,
    ):
        plan.upload(stream=stream.address)
        for chunk in case.plan.chunks(9000):
            plan.copy(chunk, stream=stream.address)
        stream.synchronise()
    for region, wanted in zip(dst, case.copied(), strict=True):
        assert np.array_equal(region.read(), wanted)
