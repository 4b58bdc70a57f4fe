"""What decides a layout: the model's configuration, and the engine that serves it."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import InvalidRequest
from kvxfer.models.presets import PRESETS, SUFFIXES

ENGINES = ("vllm", "vllm-cpu", "sglang")
KV_CACHE_DTYPES = (
    "auto",
    "bf16",
    "fp16",
    "fp32",
    "fp8",
    "fp8_per_token_head",
    "int8_per_token_head",
    "nvfp4",
    "fp8_ds_mla",
    "nvfp4_ds_mla",
)
STATE_DTYPES = ("bf16", "fp16", "fp32")
INDEXER_DTYPES = ("auto", "fp8", "mxfp4")
ARCHS = ("sm90", "sm100", "sm120", "avx512", "amx")
DRAFTS = ("none", "dspark", "mtp")
ORDERS = ("auto", "NHD", "HND", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
LATEST = {"vllm": "0.33", "vllm-cpu": "0.32", "sglang": "0.5"}

_MAX_CONFIG_BYTES = 16 << 20
_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8_e4m3": "fp8",
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The engine's side of a layout: who allocates the cache, how, on what, and which rank of how many."""

    engine: str = "vllm"
    engine_version: str | None = None  # None: the newest one described
    kv_cache_dtype: str = "auto"
    indexer_dtype: str = "auto"
    block_tokens: int | None = None  # None: the engine's own choice
    tp: int = 1
    rank: int = 0
    arch: str | None = None  # None: sm100; avx512 on the CPU
    draft: str = "none"
    num_blocks: int = 1
    order: str = "auto"
    indexer_sparse_logits: bool = False
    state_dtype: str | None = (
        None  # recurrent state of linear attention; None: the configuration's, else fp32
    )
    draft_tokens: int | None = None  # tokens a draft proposes; None: the configuration's

    def __post_init__(self) -> None:
        dtype = self.kv_cache_dtype or "auto"
        object.__setattr__(self, "kv_cache_dtype", _ALIASES.get(dtype, dtype))
        object.__setattr__(self, "indexer_dtype", self.indexer_dtype or "auto")
        object.__setattr__(self, "state_dtype", _ALIASES.get(self.state_dtype, self.state_dtype) or None)
        object.__setattr__(self, "draft", self.draft or "none")
        object.__setattr__(self, "order", self.order or "auto")
        for option, value, known in (
            ("engine", self.engine, ENGINES),
            ("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            ("indexer_dtype", self.indexer_dtype, INDEXER_DTYPES),
            ("draft", self.draft, DRAFTS),
            ("order", self.order, ORDERS),
            ("arch", self.arch, (None, *ARCHS)),
            ("state_dtype", self.state_dtype, (None, *STATE_DTYPES)),
        ):
            if value not in known:
                raise InvalidRequest(unknown(option, value, [name for name in known if name]))
        if self.tp < 1 or not 0 <= self.rank < self.tp:
            raise InvalidRequest(f"rank must be 0 to tp - 1; got tp {self.tp}, rank {self.rank}")
        if self.num_blocks < 1 or (self.block_tokens is not None and self.block_tokens < 1):
            raise InvalidRequest(
                f"block_tokens and num_blocks must be 1 or more, got {self.block_tokens} and "
                f"{self.num_blocks}"
            )
        if self.arch is None:
            object.__setattr__(self, "arch", "avx512" if self.engine == "vllm-cpu" else "sm100")
        self.version  # noqa: B018  raises on a version that cannot be read

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor of the engine's version."""
        text = self.engine_version or LATEST[self.engine]
        version, latest = _major_minor(text), _major_minor(LATEST[self.engine])
        if version > latest:
            raise InvalidRequest(
                f"engine_version {text!r} is newer than what is described of {self.engine}, which goes up to "
                f"{LATEST[self.engine]}: pass that one, if its layouts are still the same"
            )
        return version


def _major_minor(text: str) -> tuple[int, int]:
    try:
        major, minor = text.removeprefix("v").split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        raise InvalidRequest(f"engine_version must look like '0.33.0', got {text!r}") from None


def unknown(option: str, value: object, known: list[str]) -> str:
    """A message that says what is known, and what may have been meant."""
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {option} {value!r}; known are {', '.join(known)}{hint}"


def load_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """The language model's configuration from a dict, a ``config.json`` (or its folder), or a preset.

    A string is looked up among the presets first, a `pathlib.Path` is not. A multimodal configuration's
    ``text_config`` is taken. Nothing is downloaded. Raises InvalidRequest.
    """
    if isinstance(source, Mapping):
        config = dict(source)
    else:
        known = _preset_name(source)
        config = dict(PRESETS[known]) if known else _read(_path(source))
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {
            **{key: config[key] for key in ("model_type", "torch_dtype", "dtype") if key in config},
            **inner,
        }
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= 100_000:
        raise InvalidRequest(
            f"the configuration's num_hidden_layers must be a positive integer, got {layers!r}"
        )
    return config


def model_name(source: Mapping[str, Any] | str | os.PathLike[str]) -> str:
    """What a layout's fingerprint calls the model: the preset, the configuration's own name, or its type."""
    if isinstance(source, Mapping):
        return str(source.get("_name_or_path") or source.get("model_type") or "unnamed")
    name = _preset_name(source)
    if name:
        return name
    config = _read(_path(source))
    return str(config.get("_name_or_path") or config.get("model_type") or Path(source).name)


def _preset_name(name: str | os.PathLike[str]) -> str | None:
    if not isinstance(name, str):
        return None
    wanted = {name.lower()} | {
        name[: -len(suffix)].lower() for suffix in SUFFIXES if name.lower().endswith(suffix.lower())
    }
    for known in PRESETS:
        if known.lower() in wanted or known.split("/")[1].lower() in wanted:
            return known
    return None


def _path(source: str | os.PathLike[str]) -> Path:
    """Where to read a configuration; InvalidRequest for a string that is neither a preset nor like a path."""
    path = Path(source)
    if isinstance(source, str) and not (path.is_absolute() or path.suffix == ".json" or path.exists()):
        raise InvalidRequest(
            f"{unknown('model', source, list(PRESETS))}. Otherwise pass the path of its config.json"
        )
    return path


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidRequest(f"no configuration at {str(file)!r}: expected a config.json or the folder of one")
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise InvalidRequest(f"{file} is larger than {_MAX_CONFIG_BYTES} bytes: not a model's config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"{file}: expected a JSON object, got {type(config).__name__}")
    return config


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of the configuration; InvalidRequest names the key when it is not there."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 30:
        raise InvalidRequest(f"the configuration's {key!r} must be a positive integer, got {value!r}")
    return value
