"""Block strides, offsets and bytes a token of DeepSeek caches in vLLM, against figures from vLLM's own
planner.

The expected numbers are those of a run of vLLM 0.33's planner and of public reports; the library never types
them in.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvxfer.layout import GroupKind
from kvxfer.models import layout_for
from kvxfer.sizing import block_stride, bytes_per_token, group_size, size

V41, V4 = "deepseek-ai/DeepSeek-V4.1-Flash", "deepseek-ai/DeepSeek-V4-Flash"


def used_per_token(layout):
    group = layout.group("mla")
    return Fraction(layout.block_bytes("mla"), group.block_tokens)


@pytest.mark.parametrize(
    ("options", "stride", "used", "windows"),
    [
        ({}, 117_216, 896, 7),
        ({"indexer_sparse_logits": True}, 126_720, 896, 7),
        ({"draft": "dspark"}, 117_216, 896, 8),
        ({"draft": "dspark", "indexer_sparse_logits": True}, 126_720, 896, 8),
        ({"block_tokens": 256}, 228_096, 890, 4),
        ({"indexer_dtype": "fp8", "draft": "dspark"}, 136_224, 1056, 6),
        ({"kv_cache_dtype": "fp8_ds_mla"}, 191_664, 1496, 4),
        ({"kv_cache_dtype": "fp8"}, 186_368, 1456, 4),
        ({"arch": "sm90", "block_tokens": 128}, 230_400, 1800, 4),
        ({"arch": "sm90"}, 116_928, 1827, 7),
    ],
)
def test_v41_blocks(options, stride, used, windows):
    layout = layout_for(V41, **options)
    assert {block_stride(group) for group in layout.groups} == {stride}
    assert used_per_token(layout) == used
    assert sum(group.kind is GroupKind.SLIDING for group in layout.groups) == windows
    assert layout.block_bytes("ring") == 3 * 32_768


def test_v41_offsets_inside_a_block():
    places = {piece.layer: piece.offset for piece in layout_for(V41).group("mla").slices}
    assert places == {
        "layers.2.main": 0,
        "layers.8.main": 18_432,
        "layers.14.main": 36_864,
        "layers.2.indexer": 55_296,
        "layers.8.indexer": 59_904,
        "layers.14.indexer": 64_512,
        "layers.20.main": 69_120,
        "layers.20.indexer": 105_984,
    }
    for sparse, dead in ((False, 2_528), (True, 12_032)):
        (padding,) = layout_for(V41, indexer_sparse_logits=sparse).group("mla").padding
        assert (padding.offset, padding.nbytes) == (114_688, dead)


def test_v41_windows_are_dealt_round_robin():
    plain, dspark = layout_for(V41), layout_for(V41, draft="dspark")
    assert plain.group("swa.0").layers == tuple(f"layers.{i}.swa" for i in range(0, 40, 7))
    assert dspark.group("swa.0").layers == tuple(f"layers.{i}.swa" for i in range(0, 43, 8))
    assert {plain.block_bytes(f"swa.{g}") for g in range(7)} == {84_480, 101_376}


def test_v41_byte_orders_have_their_own_tags():
    new, old = layout_for(V41), layout_for(V41, engine_version="0.32.0")
    planes = {version: layout.records[0].planes for version, layout in (("new", new), ("old", old))}
    assert [(p.offset, p.entry_stride, p.unit_bytes) for p in planes["new"]] == [
        (0, 288, 256),
        (256, 288, 32),
    ]
    assert [(p.offset, p.entry_stride, p.unit_bytes) for p in planes["old"]] == [
        (0, 256, 256),
        (256 * 64, 32, 32),
    ]
    assert new.records[0].tag != old.records[0].tag and new.records[0].nbytes == old.records[0].nbytes
    assert new.fingerprint == old.fingerprint


@pytest.mark.parametrize(
    ("indexer", "used", "stride", "mains", "c128"),
    [("fp8", 3915, 1_002_240, 181_440, 967_680), ("mxfp4", Fraction("3584.25"), 917_568, 96_768, 883_008)],
)
def test_v4_flash_blocks(indexer, used, stride, mains, c128):
    layout = layout_for(V4, indexer_dtype=indexer)
    assert used_per_token(layout) == used
    assert layout.group("mla").slices[0].block_stride == stride
    offsets = {piece.layer: piece.offset for piece in layout.group("mla").slices}
    assert offsets["layers.2.indexer"] == 0
    assert offsets["layers.4.indexer"] == mains // 21
    assert offsets["layers.2.main"] == mains and offsets["layers.4.main"] == mains + 37_440
    assert offsets["layers.3.main"] == c128 and offsets["layers.5.main"] == c128 + 1_728
    shape = {g.name: (len(g.slices), g.block_tokens, g.window) for g in layout.groups}
    assert shape == {
        "mla": (62, 256, 0),
        "swa.0": (22, 64, 128),
        "swa.1": (21, 64, 128),
        "c4_state": (42, 4, 8),
        "c128_state": (20, 8, 128),
    }
    states = {record.tag: record.nbytes for record in layout.records if record.tag.startswith("state")}
    assert sorted(states.values()) == [8_640, 32_832, 32_832]


@pytest.mark.parametrize(
    ("model", "draft", "layers"), [(V4, "mtp", [22, 22]), (f"{V4}-0731", "dspark", [23, 23])]
)
def test_v4_drafts(model, draft, layers):
    layout = layout_for(model, draft=draft)
    assert [len(layout.group(f"swa.{g}").slices) for g in range(2)] == layers
    assert block_stride(layout.group("mla")) == 1_002_240


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (V41, {}, 890),
        (V41, {"indexer_dtype": "fp8"}, 1050),
        (V41, {"kv_cache_dtype": "fp8_ds_mla"}, 1490),
        (V41, {"kv_cache_dtype": "fp8_ds_mla", "engine_version": "0.30", "arch": "sm100"}, 1650),
        (V41, {"arch": "sm90"}, 1790),
        (V41, {"arch": "sm120"}, 1790),
        (V41, {"kv_cache_dtype": "fp8"}, 1450),
        (V41, {"kv_cache_dtype": "bf16", "indexer_dtype": "fp8"}, 2890),
        (V4, {}, Fraction("3850.25")),
        (V4, {"indexer_dtype": "mxfp4"}, Fraction("3514.25")),
        ("deepseek-ai/DeepSeek-V3", {}, 70_272),
        ("deepseek-ai/DeepSeek-V3", {"kv_cache_dtype": "fp8"}, 35_136),
        ("deepseek-ai/DeepSeek-V3.2", {}, 48_068),
        ("deepseek-ai/DeepSeek-V3.2", {"kv_cache_dtype": "nvfp4_ds_mla"}, 29_524),
        ("deepseek-ai/DeepSeek-V3.2", {"indexer_dtype": "mxfp4"}, 61 * (656 + 68)),
    ],
)
def test_bytes_per_token(model, options, expected):
    assert bytes_per_token(layout_for(model, **options)) == expected


def test_million_tokens_of_v41():
    layout = layout_for(V41)
    assert size(layout, tokens=1_000_000).growing_bytes == 890_000_000
    assert size(layout, tokens=1_048_576).growing_bytes == 933_232_640
    sizes = size(layout, tokens=1_000_000, concurrency=3)
    assert (sizes.window_bytes_per_request, sizes.state_bytes_per_request) == (2_703_360, 98_304)
    assert size(layout_for(V41, draft="dspark"), tokens=1_000_000).window_bytes_per_request == 2_906_112
    assert size(layout_for(V4), tokens=1_000_000).window_bytes_per_request == 3_214_336
    assert sizes.receive_buffer_bytes == 3 * sizes.stored_bytes_per_request >= 3 * sizes.request_bytes


def test_what_moves():
    """The worked sizes of a prompt of 2**20 tokens, whole rows as vLLM's own connector moves them."""
    tokens = 1 << 20
    v41, v4 = layout_for(V41), layout_for(V4)
    rows = {group.name: group_size(v41, group, tokens).stored_bytes for group in v41.groups}
    assert rows["mla"] == 960_233_472
    assert sum(rows[f"swa.{g}"] for g in range(7)) == 4_102_560 == 7 * 5 * 117_216
    assert rows["ring"] == 0, "an even length leaves no pair unfinished"
    assert group_size(v41, v41.group("ring"), tokens + 1).moved_bytes == 98_304
    blocks = {group.name: group.blocks_to_move(tokens + 1) for group in v4.groups}
    assert {**blocks, "mla": 0} == {"mla": 0, "swa.0": 3, "swa.1": 3, "c4_state": 3, "c128_state": 17}
    assert v4.group("c128_state").blocks_to_move(tokens) == 0
    stride = block_stride(v4.group("mla"))
    assert v4.group("mla").blocks_to_move(tokens) * stride == 4_105_175_040
    assert sum(count for name, count in blocks.items() if name != "mla") * stride == 26_058_240


def test_a_short_prompt_moves_more_windows_than_latents():
    layout = layout_for(V41)
    blocks = {group.name: group.blocks_to_move(1024) for group in layout.groups}
    assert blocks["mla"] == 8 and sum(n for name, n in blocks.items() if name.startswith("swa")) == 35


@pytest.mark.parametrize(("drafts", "capacity"), [(None, 8), (5, 8), (6, 8), (7, 16), (14, 16), (15, 32)])
def test_ring_capacity_follows_the_draft(drafts, capacity):
    layout = layout_for(V41, draft="dspark" if drafts else "none", draft_tokens=drafts)
    assert layout.group("ring").block_tokens == capacity
