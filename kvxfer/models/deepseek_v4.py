"""DeepSeek-V4 and V4.1 in vLLM: every cache of the model in one slab of blocks.

All groups overlay the same memory: a block id belongs to one group at a time, and block b starts at ``b *
block_stride`` for each. Inside a block a group's layers follow each other, pages of one record together, in
the order in which the model's modules ask for them. The block stride is the largest group, rounded up to what
the kernels ask for. Source: vLLM 0.33 v1/core/kv_cache_planning, kv_cache_interface; deepseek_v4/ and
deepseek_v41/. V4 before vLLM 0.21 used one pool per page size instead; that is not described.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import InvalidRequest
from kvxfer.layout import CacheLayout, Group, GroupKind, Padding, Record, Region, Slice
from kvxfer.layout.records import compressor_state_record, latent_record
from kvxfer.models.config import Target, integer, unknown

Pages = list[tuple[str, Record]]  # layer name, record of its page


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Records of one model on one engine version and architecture."""

    main: str
    window: str
    indexer: str
    page_multiple: int
    stride_multiple: int


def layout(name: str, config: Mapping[str, Any], target: Target) -> CacheLayout:
    """The slab with the compressed group, the sliding windows and the compressor states."""
    if target.engine != "vllm":
        raise InvalidRequest(
            f"{name}: block layouts are described for engine 'vllm', not {target.engine!r}; register "
            "tensors instead"
        )
    if target.order not in ("auto", "BLHNC"):
        raise InvalidRequest(
            f"{name}: all groups lie in one slab of blocks (BLHNC), got order {target.order!r}"
        )
    if integer(config, "head_dim") != 512 or integer(config, "index_head_dim", 128) != 128:
        raise InvalidRequest(f"{name}: latents of 512 channels and indexer keys of 128 are described")
    layers = integer(config, "num_hidden_layers")
    ratios = config["compress_ratios"]
    if not isinstance(ratios, list) or len(ratios) < layers:
        raise InvalidRequest(f"{name}: compress_ratios must list a ratio for each of the {layers} layers")
    if "kv_source_layer_ids" in config:
        return _v41(name, config, target, layers, ratios)
    return _v4(name, config, target, layers, ratios)


# --- DeepSeek-V4: ratios 4 and 128 --------------------------------------------------------------------------


def _v4(name: str, config: Mapping[str, Any], target: Target, layers: int, ratios: list[int]) -> CacheLayout:
    if set(ratios[:layers]) - {0, 4, 128}:
        raise InvalidRequest(
            f"{name}: ratios 0, 4 and 128 are described, compress_ratios has {sorted(set(ratios))}"
        )
    formats = _v4_formats(name, target)
    block = target.block_tokens or 256
    pages: Pages = []
    c4_state: Pages = []
    c128_state: Pages = []
    for i, ratio in enumerate(ratios[:layers]):
        if ratio == 4:
            pages += [
                (f"layers.{i}.indexer", _page(formats.indexer, block, 4, formats.page_multiple)),
                (f"layers.{i}.main", _page(formats.main, block, 4, formats.page_multiple)),
            ]
            # Groups of four overlap, so two groups' keys and scores are kept: 2 x 2 x channels.
            c4_state += [
                (f"layers.{i}.state", _state("c4", 4, 2 * 2 * 512, formats)),
                (f"layers.{i}.indexer.state", _state("c4_indexer", 4, 2 * 2 * 128, formats)),
            ]
        elif ratio == 128:
            pages.append((f"layers.{i}.main", _page(formats.main, block, 128, formats.page_multiple)))
            c128_state.append((f"layers.{i}.state", _state("c128", 8, 2 * 512, formats)))
    window = integer(config, "sliding_window")
    swa = _windows(formats, 64, layers + _draft_layers(name, config, target))
    return _slab(
        name,
        target,
        formats,
        compressed=(block, pages),
        windows=(64, window, swa),
        states=[
            _Tail("c4_state", GroupKind.SLIDING, 4, 8, 0, c4_state),
            _Tail("c128_state", GroupKind.SLIDING, 8, 128, 128, c128_state),
        ],
    )


def _v4_formats(name: str, target: Target) -> Formats:
    known = {"auto": "v4.fp8_ds_mla.584", "fp8": "v4.fp8_ds_mla.584", "fp8_ds_mla": "v4.fp8_ds_mla.584"}
    if target.arch == "sm100":
        known["bf16"] = "v4.bf16.1024"
    if target.kv_cache_dtype not in known:
        raise InvalidRequest(f"{name} on {target.arch}: {_unknown_dtype(target, known)}")
    main = known[target.kv_cache_dtype]
    multiple = 512 if main == "v4.bf16.1024" else 576
    indexer = _indexer(name, target, "fp8")
    return Formats(main=main, window=main, indexer=indexer, page_multiple=multiple, stride_multiple=multiple)


# --- DeepSeek-V4.1: four layers own the global cache --------------------------------------------------------


def _v41(name: str, config: Mapping[str, Any], target: Target, layers: int, ratios: list[int]) -> CacheLayout:
    formats = _v41_formats(name, target)
    block = target.block_tokens or (128 if target.arch == "sm100" else 64)
    drafts = _draft_layers(name, config, target)
    proposed = target.draft_tokens or (integer(config, "dspark_block_size", 5) if drafts else 0)
    capacity = max(8, 1 << (proposed + 1).bit_length())  # next power of two >= drafts + 2
    pages: Pages = []
    rings: Pages = []
    for i in config["kv_source_layer_ids"]:
        if not isinstance(i, int) or not 0 <= i < layers or ratios[i] not in (1, 2):
            raise InvalidRequest(f"{name}: kv_source_layer_ids names {i!r}, which has no ratio of 1 or 2")
        pages += [
            (f"layers.{i}.main", _page(formats.main, block, ratios[i], formats.page_multiple)),
            (f"layers.{i}.indexer", _page(formats.indexer, block, ratios[i], formats.page_multiple)),
        ]
        if ratios[i] == 2:
            rings.append(
                (f"layers.{i}.state", compressor_state_record("r2", rows=capacity, row_floats=2 * 512))
            )
    window = integer(config, "sliding_window")
    return _slab(
        name,
        target,
        formats,
        compressed=(block, pages),
        windows=(32, window, _windows(formats, 32, layers + drafts)),
        states=[_Tail("ring", GroupKind.RING, capacity, 0, 2, rings)],
    )


def _v41_formats(name: str, target: Target) -> Formats:
    if target.version < (0, 30):
        raise InvalidRequest(
            f"{name}: vLLM has it from 0.30 on, got engine_version {target.engine_version!r}"
        )
    if target.arch != "sm100":
        known = dict.fromkeys(("auto", "fp8", "fp8_ds_mla"), "v4.fp8_ds_mla.584")
        if target.kv_cache_dtype not in known:
            raise InvalidRequest(f"{name} on {target.arch}: {_unknown_dtype(target, known)}")
        return Formats(
            main="v4.fp8_ds_mla.584",
            window="v4.fp8_ds_mla.584",
            indexer=_indexer(name, target, "fp8"),
            page_multiple=576,
            stride_multiple=576,
        )
    bytes_order = "interleaved" if target.version >= (0, 33) else "segregated"
    window = f"v41.fp8_ds_mla.528.{bytes_order}"
    known = {
        "fp8_ds_mla": (window, window, 528),
        "fp8": ("v4.fp8.512", "v4.fp8.512", 512),  # FlashInfer, one scale a tensor
        "bf16": ("v4.bf16.1024", "v4.bf16.1024", 512),
    }
    if target.version >= (0, 31):
        known["nvfp4_ds_mla"] = (f"v41.nvfp4_ds_mla.288.{bytes_order}", window, math.lcm(528, 288))
    known["auto"] = known.get("nvfp4_ds_mla", known["fp8_ds_mla"])
    if target.kv_cache_dtype not in known:
        raise InvalidRequest(f"{name} on sm100, vLLM {target.version}: {_unknown_dtype(target, known)}")
    main, window, multiple = known[target.kv_cache_dtype]
    if target.indexer_sparse_logits:
        multiple = math.lcm(multiple, 256)
    indexer = _indexer(name, target, "mxfp4" if target.version >= (0, 31) else "fp8")
    return Formats(main=main, window=window, indexer=indexer, page_multiple=512, stride_multiple=multiple)


# --- both ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tail:
    name: str
    kind: GroupKind
    block_tokens: int
    window: int
    compression_ratio: int
    pages: Pages


def _unknown_dtype(target: Target, known: Mapping[str, Any]) -> str:
    return unknown("kv_cache_dtype", target.kv_cache_dtype, list(known))


def _indexer(name: str, target: Target, default: str) -> str:
    wanted = default if target.indexer_dtype == "auto" else target.indexer_dtype
    if wanted == "mxfp4" and target.arch != "sm100":
        raise InvalidRequest(
            f"{name}: indexer_dtype mxfp4 exists on sm100, got arch {target.arch!r}; pass fp8"
        )
    return {"fp8": "indexer.fp8.132", "mxfp4": "indexer.mxfp4.68"}[wanted]


def _page(record: str, block_tokens: int, ratio: int, multiple: int) -> Record:
    if block_tokens % ratio:
        raise InvalidRequest(f"block_tokens must be a multiple of the ratio {ratio}, got {block_tokens}")
    return latent_record(
        record, entries=block_tokens // ratio, tokens_per_entry=ratio, page_multiple=multiple
    )


def _state(name: str, rows: int, row_floats: int, formats: Formats) -> Record:
    return compressor_state_record(
        name, rows=rows, row_floats=row_floats, page_multiple=formats.page_multiple
    )


def _windows(formats: Formats, block_tokens: int, layers: int) -> Pages:
    page = latent_record(formats.window, entries=block_tokens, page_multiple=formats.page_multiple)
    return [(f"layers.{i}.swa", page) for i in range(layers)]


def _draft_layers(name: str, config: Mapping[str, Any], target: Target) -> int:
    """Draft layers keep a sliding window and nothing else."""
    known = {"none": 0}
    if config.get("dspark_target_layer_ids"):
        known["dspark"] = len(config["dspark_target_layer_ids"])
    if config.get("num_nextn_predict_layers"):
        known["mtp"] = integer(config, "num_nextn_predict_layers")
    if target.draft not in known:
        raise InvalidRequest(f"{name}: {unknown('draft', target.draft, list(known))}")
    return known[target.draft]


def _slab(
    name: str,
    target: Target,
    formats: Formats,
    *,
    compressed: tuple[int, Pages],
    windows: tuple[int, int, Pages],
    states: Sequence[_Tail],
) -> CacheLayout:
    """One region; windows are dealt round-robin, as many to a group as fit the compressed block."""
    block_tokens, pages = compressed
    window_block, window, swa = windows
    used = sum(record.nbytes for _, record in pages)
    per_group = max(1, used // swa[0][1].nbytes)
    dealt = -(-len(swa) // per_group)
    tails = [
        _Tail("mla", GroupKind.FULL, block_tokens, 0, 0, pages),
        *(_Tail(f"swa.{g}", GroupKind.SLIDING, window_block, window, 0, swa[g::dealt]) for g in range(dealt)),
        *(tail for tail in states if tail.pages),
    ]
    largest = max(sum(record.nbytes for _, record in tail.pages) for tail in tails)
    stride = -(-largest // formats.stride_multiple) * formats.stride_multiple
    records = {record.tag: record for tail in tails for _, record in tail.pages}
    return CacheLayout(
        regions=(Region(name="slab", nbytes=stride * target.num_blocks),),
        records=tuple(records.values()),
        groups=tuple(_group(tail, stride, target.num_blocks) for tail in tails),
        # Without the byte order, which a plan converts, and the draft, whose layers speak for themselves.
        fingerprint={
            "model": name,
            "kv_cache": " + ".join(
                record.removesuffix(".segregated").removesuffix(".interleaved")
                for record in dict.fromkeys((formats.main, formats.window, formats.indexer))
            ),
        },
    )


def _group(tail: _Tail, stride: int, num_blocks: int) -> Group:
    slices = []
    offset = 0
    for tag in dict.fromkeys(record.tag for _, record in tail.pages):
        for layer, record in tail.pages:
            if record.tag == tag:
                slices.append(
                    Slice(layer=layer, region="slab", offset=offset, block_stride=stride, record=tag)
                )
                offset += record.nbytes
    padding = (Padding(name="unused", offset=offset, nbytes=stride - offset),) if offset < stride else ()
    return Group(
        name=tail.name,
        block_tokens=tail.block_tokens,
        num_blocks=num_blocks,
        slices=tuple(slices),
        kind=tail.kind,
        window=tail.window,
        padding=padding,
        compression_ratio=tail.compression_ratio,
    )
