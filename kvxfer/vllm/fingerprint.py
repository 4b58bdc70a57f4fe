"""What has to be equal in both pools for KV to mean the same, as the factors of a layout's fingerprint.

Not in it, since plans bridge them: block size, layout, number format of the cache, tensor-parallel degree. The same in
the scheduler's process and in the workers', for the ticket carries its digest. Imports nothing of kvxfer.
"""

from __future__ import annotations

from typing import Any

_MODEL_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "vocab_size",
)
_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Speculative methods that keep no KV of their own: they need not agree."""


def fingerprint_of(vllm_config: Any, model_id: str | None, *, with_speculation: bool = True) -> dict[str, str]:
    """Factors by name. `model_id` stands for the model's path where the pools' paths differ.

    Without the speculator's factors a pool meets another that does not speculate.
    """
    model = vllm_config.model_config
    factors = {"model": model_id or str(model.model), "revision": str(model.revision or "")}
    config = model.hf_text_config
    factors |= {
        f"model.{name}": str(value) for name in _MODEL_FIELDS if (value := getattr(config, name, None)) is not None
    }
    return factors | (_speculation(vllm_config.speculative_config) if with_speculation else {})


def _speculation(config: Any) -> dict[str, str]:
    if config is None or config.method in _WITHOUT_KV:
        return {}
    draft = config.draft_model_config
    layers = getattr(getattr(draft, "hf_config", None), "eagle_aux_hidden_state_layer_ids", None)
    return {
        "speculative.method": str(config.method),
        "speculative.model": str(getattr(draft, "model", "")),
        "speculative.revision": str(getattr(draft, "revision", None) or ""),
        "speculative.parallel_drafting": str(bool(getattr(config, "parallel_drafting", False))),
        "speculative.target_layers": ",".join(map(str, layers or ())),
    }
