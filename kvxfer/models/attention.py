"""Keys and values with heads: MHA, GQA and MQA; sliding and full layers side by side; linear-attention state.

vLLM deals the layers of a hybrid model into groups of one size; the n-th layers of all groups share memory (a
*position*), and block ids come from one pool. Source: vLLM v1/core/kv_cache_utils and kv_cache_interface, and
the layout names over L (layer), B (block), H (head), N (token), C (content, here K then V).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import InvalidRequest
from kvxfer.layout import CacheLayout, Group, GroupKind, Padding, Record, Region, Slice
from kvxfer.layout.records import (
    QUANTISED_KV,
    cpu_attention_record,
    entry_bytes,
    gated_delta_record,
    kv_sections,
    paged_record,
)
from kvxfer.models.config import Target, integer, unknown
from kvxfer.models.layer_kinds import FULL, LINEAR, SLIDING, layer_kinds, window

_PLAIN = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DTYPE_NAMES = {name: short for short, name in _PLAIN.items()}
_BLOCK_TOKENS = {"vllm": 16, "vllm-cpu": 128, "sglang": 1}
_STATE_BLOCK_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class _Heads:
    """What one rank holds of a layer's keys and values."""

    dtype: str  # a dtype name, or one of QUANTISED_KV
    local: int
    start: int
    total: int
    head_dim: int


@dataclass(frozen=True)
class _Part:
    """Layers of one kind before they are dealt into groups."""

    name: str
    kind: GroupKind
    layers: list[int]
    window: int = 0


def layout(name: str, config: Mapping[str, Any], target: Target) -> CacheLayout:
    """The layout of a model whose attention layers keep keys and values."""
    if target.draft != "none":
        raise InvalidRequest(
            f"{name}: no draft layers are described, got draft {target.draft!r}; register tensors instead"
        )
    if target.indexer_dtype != "auto" or target.indexer_sparse_logits:
        raise InvalidRequest(f"{name} has no indexer; leave indexer_dtype and indexer_sparse_logits out")
    if config.get("index_head_dim"):
        raise InvalidRequest(
            f"{name} has an indexer beside its keys and values (index_head_dim in its configuration), and the cache of "
            "that is not described; register tensors instead"
        )
    heads = _heads(name, config, target)
    parts = _parts(config)
    fingerprint = {"model": name, "kv_cache": heads.dtype}
    if parts[0].kind is GroupKind.STATE or (len(parts) > 1 and parts[1].kind is GroupKind.STATE):
        return _with_state(name, config, target, heads, parts, fingerprint)
    block_tokens = target.block_tokens or _BLOCK_TOKENS[target.engine]
    if target.engine == "sglang":
        return _apart(target, heads, parts, block_tokens, fingerprint)
    return _positions(target, _order(target), heads, parts, block_tokens, fingerprint)


def _heads(name: str, config: Mapping[str, Any], target: Target) -> _Heads:
    total = _kv_heads(config)
    head_dim = _head_dim(name, config)
    if total % target.tp and target.tp % total:
        raise InvalidRequest(
            f"{name}: {total} KV heads cannot be divided over tp {target.tp}, nor replicated evenly"
        )
    wanted = target.kv_cache_dtype
    if wanted == "auto":
        stated = _model_dtype(config, target)
        wanted = _DTYPE_NAMES.get(stated, stated)
    known = [*_PLAIN, *(("fp8",) if target.engine != "vllm" else QUANTISED_KV)]
    if wanted not in known:
        raise InvalidRequest(f"{name} on {target.engine}: {unknown('kv_cache_dtype', wanted, known)}")
    return _Heads(
        dtype=_PLAIN.get(wanted, wanted),
        local=max(1, total // target.tp),
        start=target.rank * total // target.tp,
        total=total,
        head_dim=head_dim,
    )


def _model_dtype(config: Mapping[str, Any], target: Target) -> str:
    """What the engine computes in when nobody says otherwise: what the checkpoint has, but float32 nowhere on vLLM."""
    stated = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    return "bfloat16" if stated == "float32" and target.engine != "sglang" else stated


def _kv_heads(config: Mapping[str, Any]) -> int:
    """KV heads of a layer over all ranks: the key that the model has for them, in vLLM's order."""
    one_of_all = config.get("model_type") in ("falcon", "gpt_bigcode", "RefinedWeb", "RefinedWebModel")
    if one_of_all and not config.get("new_decoder_architecture") and config.get("multi_query", True):
        return 1
    for key in ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num"):
        if config.get(key) is not None:
            return integer(config, key)
    return integer(config, "num_attention_heads")


def _head_dim(name: str, config: Mapping[str, Any]) -> int:
    """Channels of a head, alike for keys and values."""
    for key in ("head_dim", "hidden_size_per_head", "kv_channels"):
        if config.get(key):
            head_dim = integer(config, key)
            break
    else:
        head_dim = integer(config, "hidden_size") // integer(config, "num_attention_heads")
    if head_dim < 1:
        raise InvalidRequest(f"{name}: hidden_size is smaller than num_attention_heads; state head_dim")
    value_dim = config.get("v_head_dim") or head_dim
    if value_dim != head_dim:
        raise InvalidRequest(
            f"{name}: v_head_dim is {value_dim} and head_dim {head_dim}, and pages of keys and values of unequal "
            "width are not described; register tensors instead"
        )
    return head_dim


def _parts(config: Mapping[str, Any]) -> list[_Part]:
    """Full layers first, then sliding ones or those with state."""
    kinds = layer_kinds(config)
    parts = []
    for name, kind, wanted in (
        ("full", GroupKind.FULL, FULL),
        ("sliding", GroupKind.SLIDING, SLIDING),
        ("state", GroupKind.STATE, LINEAR),
    ):
        layers = [i for i, given in enumerate(kinds) if given == wanted]
        if layers:
            parts.append(_Part(name, kind, layers, window(config) if kind is GroupKind.SLIDING else 0))
    return parts


def _order(target: Target) -> str:
    if target.engine == "vllm-cpu":
        if target.order not in ("auto", "LBHNC"):
            raise InvalidRequest(f"vLLM's CPU build has LBHNC only, got order {target.order!r}")
        return "LBHNC"
    if target.order != "auto":
        return target.order
    return "LBNHC" if target.version >= (0, 32) else "NHD"


def _deal(parts: list[_Part]) -> list[_Part]:
    """Groups of one size: the layers of the rarest kind (of the most frequent, when that is close)."""
    counts = [len(part.layers) for part in parts]
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    dealt = []
    for part in parts:
        groups = -(-len(part.layers) // size)
        for g in range(groups):
            suffix = f".{g}" if groups > 1 else ""
            dealt.append(_Part(part.name + suffix, part.kind, part.layers[g::groups], part.window))
    return dealt


# --- vLLM ---------------------------------------------------------------------------------------------------


def _record(target: Target, heads: _Heads, block_tokens: int, order: str, head: int | None = None) -> Record:
    """The page of a layer, or of one of its heads where heads lie outside the page."""
    if target.engine == "vllm-cpu":
        return _cpu_record(target, heads, block_tokens)
    inner = "HND" if order.index("H") < order.index("N") else "NHD"
    together = len(order) == 5
    tag = f"kv.{heads.dtype}.{heads.head_dim}{'.kv' if together else ''}"
    return paged_record(
        tag if head is None else f"{tag}.h{head}",
        kv_sections(heads.dtype, heads.head_dim, together=together),
        entries=block_tokens,
        heads=heads.local if head is None else 1,
        order=inner,
        head_start=heads.start + (head or 0),
        total_heads=heads.total,
    )


def _cpu_record(target: Target, heads: _Heads, block_tokens: int) -> Record:
    dtype = "float8_e4m3fn" if heads.dtype == "fp8" else heads.dtype
    record = cpu_attention_record(
        block_tokens=block_tokens,
        kv_heads=heads.local,
        head_dim=heads.head_dim,
        dtype=dtype,
        head_start=heads.start,
        total_heads=heads.total,
    )
    if target.arch == "amx" and dtype == "bfloat16":
        return Record(tag=f"{record.tag}.amx.r{target.rank}of{target.tp}", nbytes=record.nbytes)
    return record


def _positions(
    target: Target,
    order: str,
    heads: _Heads,
    parts: list[_Part],
    block_tokens: int,
    fingerprint: dict[str, str],
) -> CacheLayout:
    """One region; the n-th layers of all groups share a position in it."""
    dealt = _deal(parts)
    count = max(len(part.layers) for part in dealt)
    blocks = target.num_blocks
    heads_outside = order in ("LHBNC", "BHLNC")
    if heads_outside and heads.dtype == "nvfp4":
        raise InvalidRequest(
            f"order {order}: an NVFP4 page keeps its scales behind all heads; pass LBHNC or BLHNC"
        )
    records = (
        [_record(target, heads, block_tokens, order, h) for h in range(heads.local)]
        if heads_outside
        else [_record(target, heads, block_tokens, order)]
    )
    page = records[0].nbytes
    row = count * len(records) * page
    groups = []
    for part in dealt:
        places = []  # (offset, layer, record), in the order of addresses
        for position, layer in enumerate(part.layers):
            for h, record in enumerate(records):
                index = h * count + position if order == "BHLNC" else position * len(records) + h
                offset = index * page * (1 if order.startswith("B") else blocks)
                places.append((offset, layer, record.tag))
        places.sort()
        stride = row if order.startswith("B") else page
        slices = tuple(
            Slice(layer=f"layers.{layer}", region="kv", offset=offset, block_stride=stride, record=tag)
            for offset, layer, tag in places
        )
        groups.append(
            Group(
                name=part.name,
                block_tokens=block_tokens,
                num_blocks=blocks,
                slices=slices,
                kind=part.kind,
                window=part.window,
                padding=_gaps([offset for offset, *_ in places], page, row) if order.startswith("B") else (),
            )
        )
    return CacheLayout(
        regions=(Region(name="kv", nbytes=row * blocks),),
        records=tuple(records),
        groups=tuple(groups),
        fingerprint=fingerprint,
    )


def _gaps(offsets: list[int], page: int, row: int) -> tuple[Padding, ...]:
    """The positions of a block that a shorter group leaves out."""
    held = set(offsets)
    return tuple(
        Padding(name="unused", offset=offset - offsets[0], nbytes=page)
        for offset in range(offsets[0], row, page)
        if offset not in held
    )


def _with_state(
    name: str,
    config: Mapping[str, Any],
    target: Target,
    heads: _Heads,
    parts: list[_Part],
    fingerprint: dict[str, str],
) -> CacheLayout:
    """Attention blocks are made as large as a request's state, so that both take pages from one pool."""
    if target.engine == "sglang" or (heads.dtype not in _PLAIN.values() and heads.dtype != "fp8"):
        raise InvalidRequest(
            f"{name}: linear-attention state is described for vLLM with plain or fp8 keys and values"
        )
    if target.order not in ("auto", "NHD", "HND", "LBNHC", "LBHNC"):
        raise InvalidRequest(
            f"{name}: linear-attention state is described for layer-first orders, got {target.order}"
        )
    state = _state_record(config, target, 0)
    per_token = heads.local * entry_bytes(kv_sections(heads.dtype, heads.head_dim, together=True))
    needed = -(-state.nbytes // per_token)
    block_tokens = target.block_tokens or -(-needed // _STATE_BLOCK_MULTIPLE) * _STATE_BLOCK_MULTIPLE
    if block_tokens < needed:
        raise InvalidRequest(
            f"{name}: a block of {block_tokens} tokens is smaller than a request's state; pass block_tokens "
            f"{needed} or more"
        )
    record = _record(target, heads, block_tokens, _order(target))
    padded = _state_record(config, target, record.nbytes)
    dealt = _deal(parts)
    groups = []
    for part in dealt:
        is_state = part.kind is GroupKind.STATE
        slices = tuple(
            Slice(
                layer=f"layers.{layer}",
                region="kv",
                offset=position * target.num_blocks * record.nbytes,
                block_stride=record.nbytes,
                record=padded.tag if is_state else record.tag,
            )
            for position, layer in enumerate(part.layers)
        )
        groups.append(
            Group(
                name=part.name,
                block_tokens=0 if is_state else block_tokens,
                num_blocks=target.num_blocks,
                slices=slices,
                kind=part.kind,
                window=part.window,
            )
        )
    positions = max(len(part.layers) for part in dealt)
    return CacheLayout(
        regions=(Region(name="kv", nbytes=positions * target.num_blocks * record.nbytes),),
        records=(record, padded),
        groups=tuple(groups),
        fingerprint={**fingerprint, "state": padded.tag.split("/")[0]},
    )


def _state_record(config: Mapping[str, Any], target: Target, page_bytes: int) -> Record:
    stated = _model_dtype(config, target)
    state = target.state_dtype or config.get("mamba_ssm_dtype") or "float32"
    return gated_delta_record(
        key_heads=integer(config, "linear_num_key_heads"),
        value_heads=integer(config, "linear_num_value_heads"),
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=integer(config, "linear_value_head_dim"),
        conv_rows=integer(config, "linear_conv_kernel_dim") - 1 + (target.draft_tokens or 0),
        dtype=stated if stated in _DTYPE_NAMES else "bfloat16",
        state_dtype=_PLAIN.get(state, state),
        tp=target.tp,
        rank=target.rank,
        page_bytes=page_bytes,
    )


# --- SGLang -------------------------------------------------------------------------------------------------


def _apart(
    target: Target, heads: _Heads, parts: list[_Part], block_tokens: int, fingerprint: dict[str, str]
) -> CacheLayout:
    """K and V of a layer in buffers of their own, ``[page * token, head, dim]``; a pool a kind of layer."""
    if target.order not in ("auto", "NHD"):
        raise InvalidRequest(f"SGLang keeps keys and values as NHD, got order {target.order!r}")
    k, v = kv_sections(heads.dtype, heads.head_dim, together=False)
    records = {
        half: paged_record(
            f"kv.{heads.dtype}.{heads.head_dim}.{half}",
            (section,),
            entries=block_tokens,
            heads=heads.local,
            head_start=heads.start,
            total_heads=heads.total,
        )
        for half, section in (("k", k), ("v", v))
    }
    regions, groups = [], []
    for part in parts:
        slices = []
        for layer in part.layers:
            for half, record in records.items():
                region = f"layers.{layer}.{half}"
                regions.append(Region(name=region, nbytes=target.num_blocks * record.nbytes))
                slices.append(
                    Slice(
                        layer=f"layers.{layer}",
                        region=region,
                        offset=0,
                        block_stride=record.nbytes,
                        record=record.tag,
                    )
                )
        groups.append(
            Group(
                name=part.name,
                block_tokens=block_tokens,
                num_blocks=target.num_blocks,
                slices=tuple(slices),
                kind=part.kind,
                window=part.window,
            )
        )
    return CacheLayout(
        regions=tuple(regions), records=tuple(records.values()), groups=tuple(groups), fingerprint=fingerprint
    )
