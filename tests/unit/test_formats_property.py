"""Packed plans of random shapes, against the reference."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer import formats, kernels
from kvxfer.formats import elements, reference
from kvxfer.layout import CacheLayout

NAMES = ("fp8_e4m3", "fp8_e4m3:per_128", "nvfp4", "mxfp4:even", "mxfp8", "int4:32", "int4:asym,32", "mixed")


@st.composite
def caches(draw, heads: int, head_dim: int):
    return CacheLayout.paged(
        layers=["0", "1"],
        num_blocks=40,
        block_tokens=draw(st.sampled_from([1, 4, 16, 24])),
        kv_heads=heads,
        head_dim=head_dim,
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        order=draw(st.sampled_from(["NHD", "HND"])),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kernels_equal_the_reference(data):
    heads, head_dim = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([16, 32, 48, 80, 128]))
    src, dst = data.draw(caches(heads, head_dim)), data.draw(caches(heads, head_dim))
    ends = data.draw(st.sampled_from(["", ",first=3", ",last=7", ",first=2,last=5"]))
    name = data.draw(st.sampled_from(NAMES)) + ends
    name = name if ":" in name else name.replace(",", ":", 1)
    tokens = data.draw(st.integers(1, 40))
    (join,) = formats.join_packed([src], dst, name)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    counts = [layout.groups[0].blocks_for(tokens) for layout in (src, dst)]
    present = data.draw(st.integers(0, counts[1]))
    src_ids, dst_ids = rng.permutation(40)[: counts[0]], rng.permutation(40)[: counts[1] - present]
    source = []
    for region in src.regions:
        size = src.records[0].planes[0].unit_bytes // head_dim
        x = (rng.standard_normal(region.nbytes // size) * np.exp2(rng.integers(-9, 9))).astype(np.float32)
        bits = {"bfloat16": elements.to_bf16, "float16": elements.to_fp16, "float32": np.ascontiguousarray}
        source.append(bits[src.records[0].planes[0].dtype](x).view(np.uint8))
    ours = [np.full(region.nbytes, 0xA5, np.uint8) for region in dst.regions]
    theirs = [array.copy() for array in ours]
    plan = join.plan({"full": src_ids}, {"full": dst_ids}, tokens=tokens)
    prepared = kernels.PreparedPackedPlan(plan)
    src_bases, dst_bases = (kernels.bases([a.ctypes.data for a in arrays]) for arrays in (source, ours))
    chunks = list(plan.chunks(data.draw(st.sampled_from([1, 5000, 1 << 30]))))
    assert sum(chunk.wire_bytes for chunk in chunks) == plan.wire_bytes
    most = join.most_bytes({"full": len(dst_ids)}, tokens=tokens)
    assert plan.wire_bytes <= most[0] and plan.largest_segment_bytes <= most[1]
    for chunk in chunks:
        wire = np.full(chunk.wire_bytes, 0xA5, np.uint8)
        prepared.pack(chunk, src_bases, wire.ctypes.data, threads=data.draw(st.integers(1, 3)))
        assert (wire == reference.pack(join, plan, chunk, source)).all()
        prepared.unpack(chunk, wire.ctypes.data, dst_bases)
        reference.unpack(join, plan, chunk, wire, theirs)
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
