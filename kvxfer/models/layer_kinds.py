"""Which layers of a model keep every token, which a window, and which a state.

``layer_types`` in the configuration says so. Where it is left out, the model's type does: what stands here is what the
configuration classes of Transformers fill in and what vLLM makes of it. A window of unknown layers is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.errors import InvalidRequest
from kvxfer.models.config import integer

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

_EVERY = {
    "afmoe": (4, "global_attn_every_n_layers"),
    "cohere2": (4, "sliding_window_pattern"),
    "exaone4": (4, "sliding_window_pattern"),
    "exaone_moe": (4, "sliding_window_pattern"),
    "gemma2": (2, None),
    "gemma3": (6, "sliding_window_pattern"),
    "gemma3_text": (6, "sliding_window_pattern"),
    "gpt_oss": (2, None),
    "olmo3": (4, None),
    "vaultgemma": (2, None),
}
"""Types whose every n-th layer is full, the n-th first: n, and the key that may say another n."""

_FIRST_OF_EVERY = {"cwm": 4, "granite_swa": 4, "granitemoe_swa": 4}
"""The same, but the first of every n layers is full."""

_LAST_LAYERS = {"qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "qwen3"}
"""Layers from ``max_window_layers`` on have the window. vLLM serves these models where that is all layers or none."""

_ALL = {"ministral", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
"""All layers have the window."""

_NONE = {"qwen2_moe"}
"""vLLM gives no layer a window unless ``layer_types`` gives one to all."""

_OFF_UNLESS_SAID = _LAST_LAYERS | _NONE | {"qwen3_moe", "smollm3"}
"""Types that have a window only where ``use_sliding_window`` is true."""

_ALWAYS_ON = {*_EVERY, *_FIRST_OF_EVERY, *_ALL} - _OFF_UNLESS_SAID
"""Types that do not read ``use_sliding_window``. Of types that are not known here, false is believed."""

_DEFAULT_WINDOW = {*_EVERY, *_FIRST_OF_EVERY, "ministral", "mistral"}
"""Types that have a window of some default size where the configuration does not mention it."""


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """FULL, SLIDING or LINEAR for each layer. Raises InvalidRequest where the configuration does not decide it."""
    count = integer(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None and config.get("full_attention_interval") is not None:
        every = integer(config, "full_attention_interval")
        return [LINEAR if (i + 1) % every else FULL for i in range(count)]
    if kinds is None:
        return _windows(config, count)
    listed = [str(kind) for kind in kinds] if isinstance(kinds, (list, tuple)) else []
    unknown = sorted(set(listed) - {FULL, SLIDING, LINEAR})
    if len(listed) < count or unknown:
        raise InvalidRequest(
            f"layer_types must say {FULL}, {SLIDING} or {LINEAR} for each of {count} layers; got {len(listed)} entries"
            + (f" with {unknown}" if unknown else "")
        )
    return listed[:count]


def has_state(config: Mapping[str, Any]) -> bool:
    """Whether some layers keep a state."""
    if "compress_ratios" in config or config.get("kv_lora_rank") is not None:
        return False
    return LINEAR in layer_kinds(config)


def window(config: Mapping[str, Any]) -> int:
    """Tokens that a sliding layer sees, the newest among them."""
    tokens = integer(config, "sliding_window")
    return tokens + 1 if config.get("model_type") == "cohere2" else tokens  # Cohere counts those before the newest


def _windows(config: Mapping[str, Any], count: int) -> list[str]:
    """Kinds where only windows can make a difference and no list names their layers."""
    model_type = config.get("model_type")
    switch = config.get("use_sliding_window", model_type not in _OFF_UNLESS_SAID)
    if not switch and model_type not in _ALWAYS_ON:
        return [FULL] * count
    if not config.get("sliding_window"):
        if model_type in _DEFAULT_WINDOW and "sliding_window" not in config:
            raise InvalidRequest(
                f"{model_type} has sliding windows, and the configuration does not say how long: state sliding_window, "
                "null where it is switched off"
            )
        return [FULL] * count
    if model_type in _EVERY:
        every, key = _EVERY[model_type]
        return _every(_period(config, key, every), count)
    if model_type in _FIRST_OF_EVERY:
        return [SLIDING if i % _FIRST_OF_EVERY[model_type] else FULL for i in range(count)]
    if model_type in _LAST_LAYERS:
        return _last_layers(config, count)
    if model_type in _ALL:
        return [SLIDING] * count
    if model_type in _NONE:
        return [FULL] * count
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if config.get(key) is not None and model_type != "cohere2_moe":  # whose first layers have a period of their own
            return _every(_period(config, key, 1), count)
    raise InvalidRequest(
        f"sliding_window is {config['sliding_window']!r}, and which layers of a {model_type!r} have that window is not "
        "known: state layer_types in the configuration"
    )


def _every(every: int, count: int) -> list[str]:
    return [SLIDING if (i + 1) % every else FULL for i in range(count)]


def _period(config: Mapping[str, Any], key: str | None, default: int) -> int:
    """After how many layers a full one comes."""
    if key is None:
        return default
    if not isinstance(config.get(key, default), int):
        raise InvalidRequest(
            f"{key} is described as a number of layers, got {config[key]!r}: state layer_types in the configuration"
        )
    every = integer(config, key, default)
    switch = config.get("layer_switch", every)  # Cohere's own name of the same number, which engines do not read
    if switch != every:
        raise InvalidRequest(
            f"layer_switch is {switch!r} and {key} {config.get(key, f'left out, so {default}')}: state layer_types in "
            "the configuration"
        )
    return every


def _last_layers(config: Mapping[str, Any], count: int) -> list[str]:
    first = config.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise InvalidRequest(
            f"use_sliding_window needs max_window_layers, the first layer with a window, got {first!r}"
        )
    if 0 < first < count:
        raise InvalidRequest(
            f"max_window_layers is {first} of {count} layers, and vLLM serves no {config['model_type']} that has "
            "windows in some layers only: state layer_types in the configuration if your engine does"
        )
    return [FULL if first else SLIDING] * count
