"""Bytes a token and state sizes of models with attention heads, against public figures and formulas."""

from __future__ import annotations

import pytest

from kvxfer.layout import GroupKind
from kvxfer.models import layout_for
from kvxfer.sizing import bytes_per_token, size


@pytest.mark.parametrize(
    ("model", "bf16", "fp8", "nvfp4"),
    [
        ("Qwen/Qwen2.5-14B", 196_608, 98_304, 55_296),
        ("Qwen/Qwen3-0.6B", 114_688, 57_344, 32_256),
        ("meta-llama/Llama-3.1-8B", 131_072, 65_536, 36_864),
        ("meta-llama/Llama-3.1-70B", 327_680, 163_840, 92_160),
        ("Qwen/Qwen2.5-72B", 327_680, 163_840, 92_160),
        ("Qwen/Qwen3-30B-A3B", 98_304, 49_152, 27_648),
    ],
)
def test_bytes_per_token(model, bf16, fp8, nvfp4):
    for dtype, expected in (("auto", bf16), ("fp16", bf16), ("fp8", fp8), ("nvfp4", nvfp4)):
        assert bytes_per_token(layout_for(model, kv_cache_dtype=dtype)) == expected
    whole = layout_for(model)
    for tp in (2, 4):
        ranks = [bytes_per_token(layout_for(model, tp=tp, rank=rank)) for rank in range(tp)]
        assert sum(ranks) == bytes_per_token(whole)


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int8_per_token_head"])
@pytest.mark.parametrize(
    ("model", "layers", "heads", "dim"), [("Qwen3-0.6B", 28, 8, 128), ("gpt-oss-20b", 12, 8, 64)]
)
def test_scales_per_token_and_head(dtype, model, layers, heads, dim):
    assert bytes_per_token(layout_for(model, kv_cache_dtype=dtype)) == layers * heads * (2 * dim + 8)


def test_qwen3_next_state():
    layout = layout_for("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert bytes_per_token(layout) == 24_576
    assert bytes_per_token(layout_for("Qwen/Qwen3-Next-80B-A3B", kv_cache_dtype="fp8")) == 12_288
    record = next(r for r in layout.records if r.tag.startswith("gdn"))
    planes = {plane.name: plane.nbytes for plane in record.planes}
    assert planes["recurrent"] == 2_097_152
    assert sum(n for name, n in planes.items() if name.startswith("conv")) == 49_152
    assert size(layout, tokens=1000).state_bytes_per_request == 36 * (2_097_152 + 49_152)
    halved = layout_for("Qwen/Qwen3-Next-80B-A3B", state_dtype="bf16")
    assert halved.group("full").block_tokens == 544, "the block size that vLLM logs for bf16 state"


def test_gemma_windows():
    layout = layout_for("google/gemma-3-27b-it")
    kinds = [group.kind for group in layout.groups]
    assert kinds.count(GroupKind.FULL) == 1 and kinds.count(GroupKind.SLIDING) == 6
    assert sum(len(group.layers) for group in layout.groups) == 62
    assert len(layout.group("full").layers) == 10 and layout.group("full").layers[0] == "layers.5"


def test_gpt_oss_alternates():
    layout = layout_for("openai/gpt-oss-20b")
    assert layout.group("sliding").layers[:2] == ("layers.0", "layers.2")
    assert layout.group("sliding").blocks_to_move(10_000) == 128 // 16 + 1
    full, sliding = (layout.group(name).slices[3].offset for name in ("full", "sliding"))
    assert full == sliding, "the n-th layers of both groups share memory"


def test_cpu_build_strides():
    """[256, 2, 128, 128] of fp32, strides (32768, 16384, 128, 1) elements, as registered by the CPU build."""
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "torch_dtype": "float32",
    }
    layout = layout_for(config, "vllm-cpu", kv_cache_dtype="fp32", num_blocks=256)  # --dtype float32
    (record,) = layout.records
    assert record.tag.startswith("vllm_cpu.")
    assert layout.group("full").slices[0].block_stride == 32_768 * 4
    keys, values = record.planes
    assert (keys.head_stride, keys.channel_stride, keys.entry_stride) == (16_384 * 4, 128 * 4, 4)
    assert (values.offset, values.entry_stride, values.unit_bytes) == (64 * 128 * 4, 64 * 4, 64 * 4)
    latent = layout_for("deepseek-ai/DeepSeek-V3", "vllm-cpu", kv_cache_dtype="fp32").records[0]
    assert latent.nbytes == 9_216 * 4
