"""Models whose cache is not described: told by a key of their configuration, or by their type.

Sizes that come out of a configuration whose keys were overlooked are wrong without a word, so what is known to mean
something else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.errors import InvalidRequest

_STATE_SPACE = "state-space layers"
_UNLIKE_HEADS = "layers that differ in their heads"

KEYS = {
    "attention_chunk_size": "chunked local attention",
    "attention_other_setting": _UNLIKE_HEADS,
    "attn_config": "its heads in a dictionary of its own",
    "attn_layer_indices": _STATE_SPACE,
    "attn_layer_period": _STATE_SPACE,
    "attn_type_list": "linear attention of its own kind",
    "block_configs": _UNLIKE_HEADS,
    "block_types": "recurrent layers",
    "cross_attention_layers": "cross-attention layers",
    "full_attn_idxs": "convolution layers",
    "global_head_dim": _UNLIKE_HEADS,
    "hybrid_layer_ids": _STATE_SPACE,
    "hybrid_layer_pattern": _UNLIKE_HEADS,
    "hybrid_override_pattern": _STATE_SPACE,
    "is_encoder_decoder": "an encoder and cross-attention",
    "layer_group_size": "linear attention of its own kind",
    "layers_block_type": _STATE_SPACE,
    "linear_attn_config": "linear attention of its own kind",
    "mamba_d_state": _STATE_SPACE,
    "num_global_key_value_heads": _UNLIKE_HEADS,
    "num_key_value_heads_per_layer": _UNLIKE_HEADS,
    "num_kv_shared_layers": "layers that share a cache",
    "sparse_attention_config": "an index beside its keys and values",
    "ssm_cfg": _STATE_SPACE,
    "state_size": _STATE_SPACE,
    "swa_head_dim": _UNLIKE_HEADS,
    "swa_num_key_value_heads": _UNLIKE_HEADS,
    "use_bidirectional_attention": "attention to later tokens",
    "use_cla": "layers that share a cache",
}
"""Keys of a ``config.json`` that mean a cache beside, or other than, what is described: what they mean."""

MODEL_TYPES = {
    "bailing_hybrid": "linear attention of its own kind",
    "embedding_gemma2": _UNLIKE_HEADS,
    "embedding_gemma2_text": _UNLIKE_HEADS,
    "gemma3n": "layers that share a cache",
    "gemma3n_text": "layers that share a cache",
    "gemma4": _UNLIKE_HEADS,
    "gemma4_text": _UNLIKE_HEADS,
    "gemma4_unified": _UNLIKE_HEADS,
    "gemma4_unified_text": _UNLIKE_HEADS,
    "kimi_linear": "linear attention of its own kind",
    "longcat_flash": "two attentions in a layer",
    "mimo_v2": _UNLIKE_HEADS,
    "mimo_v2_flash": _UNLIKE_HEADS,
    "step3p5": _UNLIKE_HEADS,
}
"""Models that have such a cache even where the configuration leaves the key to its default."""


def refuse(name: str, config: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a configuration whose cache is not described; the message names the key."""
    model_type = config.get("model_type")
    found = [(key, KEYS[key]) for key in KEYS if config.get(key)]
    if not found and model_type in MODEL_TYPES:
        found = [(f"model_type {model_type!r}", MODEL_TYPES[model_type])]
    for key, meaning in found:
        raise InvalidRequest(
            f"{name} has {meaning} ({key} in its configuration), and the cache of that is not described; "
            "register tensors instead"
        )
