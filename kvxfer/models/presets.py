"""Configuration facts of known models: the keys of ``config.json`` that decide what the cache looks like.

Sources are the models' public ``config.json`` files. Keys keep their Hugging Face names, so a preset is read
as a file would be.
"""

from __future__ import annotations

from typing import Any


def _dense(
    model_type: str, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "torch_dtype": "bfloat16",
        **more,
    }


def _mla(model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_nextn_predict_layers": 1,
        "torch_dtype": "bfloat16",
        **more,
    }


def _v4_flash(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_head_dim": 128,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4],
        "torch_dtype": "bfloat16",
        **more,
    }


_GPT_OSS = {"sliding_window": 128}
_V32 = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}

PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-V4.1-Flash": {
        "model_type": "deepseek_v41",
        "num_hidden_layers": 40,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_head_dim": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [37, 38, 39],
        "torch_dtype": "bfloat16",
    },
    "deepseek-ai/DeepSeek-V4-Flash": _v4_flash(num_nextn_predict_layers=1),
    "deepseek-ai/DeepSeek-V4-Flash-0731": _v4_flash(
        dspark_block_size=5, dspark_target_layer_ids=[40, 41, 42]
    ),
    "deepseek-ai/DeepSeek-V3": _mla("deepseek_v3"),
    "deepseek-ai/DeepSeek-R1": _mla("deepseek_v3"),
    "deepseek-ai/DeepSeek-V3.1": _mla("deepseek_v3"),
    "deepseek-ai/DeepSeek-V3.2": _mla("deepseek_v32", **_V32),
    "Qwen/Qwen2.5-14B": _dense("qwen2", 48, 40, 8, 128),
    "Qwen/Qwen2.5-72B": _dense("qwen2", 80, 64, 8, 128),
    "Qwen/Qwen3-0.6B": _dense("qwen3", 28, 16, 8, 128),
    "Qwen/Qwen3-30B-A3B": _dense("qwen3_moe", 48, 32, 4, 128),
    "Qwen/Qwen3-Next-80B-A3B": _dense(
        "qwen3_next",
        48,
        16,
        2,
        256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    "meta-llama/Llama-3.1-8B": _dense("llama", 32, 32, 8, 128),
    "meta-llama/Llama-3.1-70B": _dense("llama", 80, 64, 8, 128),
    "openai/gpt-oss-20b": _dense(
        "gpt_oss", 24, 64, 8, 64, layer_types=["sliding_attention", "full_attention"] * 12, **_GPT_OSS
    ),
    "openai/gpt-oss-120b": _dense(
        "gpt_oss", 36, 64, 8, 64, layer_types=["sliding_attention", "full_attention"] * 18, **_GPT_OSS
    ),
    "google/gemma-3-1b": _dense("gemma3_text", 26, 4, 1, 256, sliding_window=512, sliding_window_pattern=6),
    "google/gemma-3-27b": _dense(
        "gemma3_text", 62, 32, 16, 128, sliding_window=1024, sliding_window_pattern=6
    ),
}

SUFFIXES = ("-Instruct", "-Instruct-2507", "-Thinking", "-Base", "-Chat", "-it", "-pt")
"""Variants of a model that share its cache: ``Qwen/Qwen2.5-14B-Instruct`` is looked up as
``Qwen/Qwen2.5-14B``.
"""
