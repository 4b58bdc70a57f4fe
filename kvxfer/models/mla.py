"""Multi-head latent attention: DeepSeek-V3 and, with an indexer, V3.2. One head, alike on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.errors import InvalidRequest
from kvxfer.layout import CacheLayout, Group, Region, Slice
from kvxfer.layout.records import latent_record
from kvxfer.models.config import Target, integer, unknown

_MODEL_TYPES = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "pangu_ultra_moe",
)
"""Types whose latents vLLM keeps, in all layers alike. Others with a kv_lora_rank have keys and values, or more."""

_BLOCK_TOKENS = {"vllm": 64, "vllm-cpu": 16, "sglang": 64}
_PLAIN = {"bf16": "mla.bf16", "fp16": "mla.fp16", "fp32": "mla.fp32", "fp8": "mla.fp8"}
_SPARSE = {"fp8_ds_mla": "v32.fp8_ds_mla.656", "nvfp4_ds_mla": "v32.nvfp4_ds_mla.352"}


def layout(name: str, config: Mapping[str, Any], target: Target) -> CacheLayout:
    """One region of latents and, for V3.2, one of indexer keys; a layer's blocks lie together in each."""
    model_type = config.get("model_type")
    if model_type is not None and model_type not in _MODEL_TYPES:
        raise InvalidRequest(
            f"{name} has latents (kv_lora_rank in its configuration), and model_type {model_type!r} is none of those "
            f"whose cache is described as such, {', '.join(_MODEL_TYPES)}; register tensors instead"
        )
    if integer(config, "kv_lora_rank") != 512 or integer(config, "qk_rope_head_dim", 64) != 64:
        raise InvalidRequest(
            f"{name}: latents of 512 channels and 64 of RoPE are described, the configuration has "
            f"{config.get('kv_lora_rank')} and {config.get('qk_rope_head_dim')}; register tensors instead"
        )
    if target.order not in ("auto", "NHD", "HND", "LBNHC", "LBHNC"):  # the same with one head
        raise InvalidRequest(
            f"{name}: latents are described layer by layer (LBNHC), got order {target.order!r}"
        )
    sparse = "index_head_dim" in config
    records = [_latent(name, target, sparse)]
    if sparse:
        records.append("indexer.mxfp4.68" if target.indexer_dtype == "mxfp4" else "indexer.fp8.132")
    elif target.indexer_dtype != "auto":
        raise InvalidRequest(f"{name} has no indexer; leave indexer_dtype out")
    layers = integer(config, "num_hidden_layers") + _draft_layers(name, config, target)
    block_tokens = target.block_tokens or _BLOCK_TOKENS[target.engine]
    pages = [latent_record(record, entries=block_tokens) for record in records]
    slices = tuple(
        Slice(
            layer=f"layers.{i}{suffix}",
            region=region,
            offset=i * target.num_blocks * page.nbytes,
            block_stride=page.nbytes,
            record=page.tag,
        )
        for page, region, suffix in zip(pages, ("kv", "index"), ("", ".indexer"), strict=False)
        for i in range(layers)
    )
    return CacheLayout(
        regions=tuple(
            Region(name=region, nbytes=layers * target.num_blocks * page.nbytes)
            for page, region in zip(pages, ("kv", "index"), strict=False)
        ),
        records=tuple(pages),
        groups=(Group(name="full", block_tokens=block_tokens, num_blocks=target.num_blocks, slices=slices),),
        fingerprint={"model": name, "kv_cache": " + ".join(records)},
    )


def _latent(name: str, target: Target, sparse: bool) -> str:
    known = {**_PLAIN, **(_SPARSE if sparse and target.engine == "vllm" else {})}
    wanted = target.kv_cache_dtype
    if wanted == "auto":
        wanted = "fp8_ds_mla" if "fp8_ds_mla" in known else "bf16"
    if wanted == "fp8" and "fp8_ds_mla" in known:
        wanted = "fp8_ds_mla"  # sparse attention has no per-tensor latent
    if wanted not in known:
        raise InvalidRequest(f"{name} on {target.engine}: {unknown('kv_cache_dtype', wanted, list(known))}")
    if wanted == "nvfp4_ds_mla" and target.arch != "sm100":
        raise InvalidRequest(f"{name}: nvfp4_ds_mla exists on sm100 only, got arch {target.arch!r}")
    return known[wanted]


def _draft_layers(name: str, config: Mapping[str, Any], target: Target) -> int:
    if target.draft == "none":
        return 0
    count = config.get("num_nextn_predict_layers") or 0
    if target.draft != "mtp" or not count:
        raise InvalidRequest(
            f"{name} has no draft {target.draft!r}; known are none" + (", mtp" if count else "")
        )
    return integer(config, "num_nextn_predict_layers")
