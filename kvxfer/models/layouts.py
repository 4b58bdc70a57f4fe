"""``layout_for``: which family a configuration belongs to, and the layout its module makes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvxfer.errors import InvalidRequest
from kvxfer.layout import CacheLayout
from kvxfer.models import attention, deepseek_v4, mla, undescribed
from kvxfer.models.config import Target, load_config, model_name
from kvxfer.models.layer_kinds import has_state


def layout_for(
    config: Mapping[str, Any] | str | os.PathLike[str],
    engine: str = "vllm",
    *,
    engine_version: str | None = None,
    kv_cache_dtype: str = "auto",
    indexer_dtype: str = "auto",
    block_tokens: int | None = None,
    tp: int = 1,
    rank: int = 0,
    arch: str | None = None,
    draft: str = "none",
    num_blocks: int = 1,
    order: str = "auto",
    indexer_sparse_logits: bool = False,
    state_dtype: str | None = None,
    draft_tokens: int | None = None,
) -> CacheLayout:
    """The cache that `engine` keeps for a model, on one tensor-parallel rank.

    `config` is a dict, the path of a ``config.json``, or a preset's name; nothing is downloaded. Dtypes are
    the records' names; ``auto`` is what the model's own checkpoint asks for, and the record that a name
    resolved to stands in the layout's record tags and under ``kv_cache`` in its fingerprint. `order` is NHD,
    HND or one of vLLM's five-letter layouts. Layers are called ``layers.<i>``, with a suffix where one layer
    has several caches (``.swa``, ``.main``, ``.indexer``, ``.state``). The layout is unbound; `num_blocks`
    sizes its regions.

    Raises InvalidRequest for an unknown model or option, and for a combination that no engine has.
    """
    facts = load_config(config)
    target = Target(
        engine=engine,
        engine_version=engine_version,
        kv_cache_dtype=kv_cache_dtype,
        indexer_dtype=indexer_dtype,
        block_tokens=block_tokens,
        tp=tp,
        rank=rank,
        arch=arch,
        draft=draft,
        num_blocks=num_blocks,
        order=order,
        indexer_sparse_logits=indexer_sparse_logits,
        state_dtype=state_dtype,
        draft_tokens=draft_tokens,
    )
    name = model_name(config)
    if "compress_ratios" not in facts:
        undescribed.refuse(name, facts)
    if state_dtype and not has_state(facts):
        raise InvalidRequest(f"{name} has no linear attention; leave state_dtype out")
    if "compress_ratios" in facts:
        return deepseek_v4.layout(name, facts, target)
    if facts.get("kv_lora_rank") is not None:
        return mla.layout(name, facts, target)
    return attention.layout(name, facts, target)
