"""Every wire format, and conversion between unequal cache formats, through a backend in both directions.

The truth is the NumPy reference of the formats: what arrives equals it bit for bit.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvxfer import CacheLayout, errors
from kvxfer.formats import join_packed, reference
from kvxfer.models import layout_for

from .conftest import Pair
from .peer import read

WIRES = ("fp8_e4m3", "nvfp4", "nvfp4:four_over_six", "mxfp4", "mxfp8", "int4", "mixed", "nvfp4:first=4,last=16")
TOKENS = 77
FINITE = 0xBF  # clears the top exponent bit of every format's high byte


def paged(dtype: str, **options) -> CacheLayout:
    defaults = {"num_blocks": 24, "block_tokens": 16, "kv_heads": 2, "head_dim": 128}
    return CacheLayout.paged(layers=("layers.0", "layers.1"), dtype=dtype, fingerprint={}, **(defaults | options))


def model(name: str, kv_cache_dtype: str, **options) -> CacheLayout:
    layout = layout_for(name, "vllm", kv_cache_dtype=kv_cache_dtype, num_blocks=32, **options)
    groups = tuple(group for group in layout.groups)
    return CacheLayout(regions=layout.regions, records=layout.records, groups=groups, fingerprint={})


def blocks_of(layout: CacheLayout, seed: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(seed)
    counts = [group.blocks_to_move(TOKENS) for group in layout.groups]
    ids = rng.permutation(layout.groups[0].num_blocks)[: sum(counts)]
    parts = np.split(ids, np.cumsum(counts)[:-1])
    return {group.name: part.tolist() for group, part in zip(layout.groups, parts, strict=True)}


def expected(src: CacheLayout, dst: CacheLayout, wire: str, arrays, src_blocks, dst_blocks) -> dict[str, np.ndarray]:
    """The destination's regions as the NumPy reference leaves them."""
    joined = join_packed([src], dst, wire)[0]
    plan = joined.plan(src_blocks, dst_blocks, tokens=TOKENS)
    sources = [arrays[region.name] for region in src.regions]
    targets = [np.zeros(region.nbytes, np.uint8) for region in dst.regions]
    for chunk in plan.chunks(1 << 20) if plan.raw is None else ():
        reference.unpack(joined, plan, chunk, reference.pack(joined, plan, chunk, sources), targets)
    if plan.raw is not None:
        for source, target, nbytes in plan.raw.runs(_bases(sources), _bases(targets)).tolist():
            ctypes.memmove(target, source, nbytes)
    return {region.name: target for region, target in zip(dst.regions, targets, strict=True)}


def _bases(arrays: list[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def check(road: Pair, src: CacheLayout, dst: CacheLayout, wire: str, *, send: bool) -> None:
    name, cache, arrays = road.caches(src, dst)
    road.peer.mask(name, FINITE)
    src_blocks, dst_blocks = blocks_of(src, 1), blocks_of(dst, 2)
    if send:
        reservation = cache.reserve(dst_blocks, tokens=TOKENS)
        transfer = road.peer.send(name, bytes(reservation.ticket), src_blocks, wire=wire)
        reservation.wait(20)
        stats = road.peer.wait(transfer)
    else:
        ticket = road.peer.publish(name, src_blocks, tokens=TOKENS)
        stats = cache.fetch(ticket, into=dst_blocks, wire=wire).wait(20)
    assert stats.wire == wire and stats.way == road.way
    truth = expected(src, dst, wire, road.peer.contents(name), src_blocks, dst_blocks)
    for region, array in read(arrays).items():
        assert truth[region].any()
        assert np.array_equal(array, truth[region]), region


@pytest.fixture
def packed(road: Pair) -> Pair:
    if road.way != "packed":
        pytest.skip("what is compressed or converted goes packed")
    return road


@pytest.fixture
def converting(road: Pair) -> Pair:
    if not converts(road):
        pytest.skip("caches of unequal formats go packed, or from GPU to GPU")
    return road


def converts(road: Pair) -> bool:
    return road.way == "packed" or (road.way == "mapped" and road.memory in ("gpu", "vmm"))


@pytest.mark.parametrize("send", [False, True], ids=["fetch", "send"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_wire_format_arrives_as_its_reference_says(packed: Pair, wire: str, send: bool) -> None:
    check(packed, paged("float16"), paged("float16", order="HND"), wire, send=send)


@pytest.mark.parametrize("send", [False, True], ids=["fetch", "send"])
@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "float16"), ("float32", "bfloat16"), ("bfloat16", "float8_e4m3fn")], ids="-".join
)
@pytest.mark.parametrize("wire", ["raw", "nvfp4"])
def test_caches_of_unequal_dtypes(converting: Pair, dtypes: tuple[str, str], wire: str, send: bool) -> None:
    if wire != "raw" and converting.way != "packed":
        pytest.skip("what is compressed goes packed")
    check(converting, paged(dtypes[0]), paged(dtypes[1], block_tokens=8, num_blocks=48), wire, send=send)


CONVERSIONS = {
    "bf16 to nvfp4": ("Qwen/Qwen3-0.6B", "bf16", "nvfp4"),
    "nvfp4 to bf16": ("Qwen/Qwen3-0.6B", "nvfp4", "bf16"),
    "bf16 to fp8 per token and head": ("Qwen/Qwen3-0.6B", "bf16", "fp8_per_token_head"),
    "MLA bf16 to fp8_ds_mla": ("deepseek-ai/DeepSeek-V3.2", "bf16", "fp8_ds_mla"),
    "fp8_ds_mla to nvfp4_ds_mla": ("deepseek-ai/DeepSeek-V3.2", "fp8_ds_mla", "nvfp4_ds_mla"),
    "V4.1 bf16 to 288 bytes": ("deepseek-ai/DeepSeek-V4.1-Flash", "bf16", "nvfp4_ds_mla"),
}


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=lambda name: name.replace(" ", "-"))
def test_conversion_between_cache_formats(converting: Pair, conversion: str) -> None:
    name, src, dst = CONVERSIONS[conversion]
    check(converting, model(name, src), model(name, dst), "raw", send=False)


def test_unequal_caches_are_refused_where_only_copies_are_allowed(road: Pair) -> None:
    if converts(road):
        pytest.skip("this way converts")
    src, dst = paged("float16"), paged("bfloat16")
    name, cache, arrays = road.caches(src, dst)
    ticket = road.peer.publish(name, blocks_of(src, 1), tokens=TOKENS)
    with pytest.raises(errors.NoCommonBackend, match="packed"):
        cache.fetch(ticket, into=blocks_of(dst, 2)).wait(20)
    assert not any(array.any() for array in arrays.values())


def test_nan_is_refused_in_a_lossy_format(packed: Pair) -> None:
    layout = paged("float16")
    name, cache, _ = packed.caches(layout, layout)
    packed.peer.fill(name, 0xFF)
    ticket = packed.peer.publish(name, blocks_of(layout, 1), tokens=TOKENS)
    with pytest.raises(errors.NonFiniteValue, match="nvfp4"):
        cache.fetch(ticket, into=blocks_of(layout, 2), wire="nvfp4").wait(20)


def test_unknown_formats_are_refused_at_once(road: Pair) -> None:
    layout = paged("float16")
    name, cache, _ = road.caches(layout, layout)
    ticket = road.peer.publish(name, blocks_of(layout, 1), tokens=TOKENS)
    with pytest.raises(errors.UnknownWireFormat, match="nvfp4"):
        cache.fetch(ticket, into=blocks_of(layout, 2), wire="nvfp5")
