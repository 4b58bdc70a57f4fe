"""From vLLM's cache configuration and registered tensors to a `CacheLayout`.

An attention layer's tensor is logically ``[block, head, token, content]`` with any strides, keys and values side by
side in the content. The CPU build keeps that shape only nominally (see `cpu_attention_record`). What is not understood
becomes an opaque record, which moves whole between equal caches and is refused by name otherwise.

Imports layout and vLLM's cache specifications.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as specs

from kvxfer.errors import InvalidLayout
from kvxfer.layout import CacheLayout, Group, GroupKind, Plane, Record, Region, Slice
from kvxfer.layout.records import cpu_attention_record
from kvxfer.layout.tensors import TensorGroup
from kvxfer.vllm import versions

NULL_BLOCK = 0
_PADDING = "not used by this group"
_FP8 = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_inc": "float8_e4m3fn",
}


@dataclass(frozen=True, kw_only=True)
class TableGroup:
    """One of vLLM's cache groups: a block table, and the layers that it serves. `index` is its place in vLLM's list."""

    index: int
    name: str
    kind: GroupKind
    block_tokens: int
    window: int
    layers: tuple[str, ...]
    spec: Any

    def used(self, table: Sequence[int], tokens: int, cached_tokens: int = 0) -> list[int]:
        """Of a request's block table, the blocks that hold its first `tokens` tokens and not only cached ones.

        Without the null blocks that stand for what has slid out of a window. Of a state the one block that is current:
        before those that a speculating model keeps in reserve.
        """
        if self.kind is GroupKind.STATE:
            reserve = min(getattr(self.spec, "num_speculative_blocks", 0), len(table) - 1)
            return [block for block in table[: len(table) - reserve][-1:] if block != NULL_BLOCK]
        blocks = list(table[cached_tokens // self.block_tokens : -(-tokens // self.block_tokens)])
        while blocks and blocks[0] == NULL_BLOCK:
            del blocks[0]
        return blocks

    def between(self, blocks: Sequence[int], tokens: int, first: int, end: int) -> list[int]:
        """Of blocks whose last one holds the last of `tokens` tokens, those that hold tokens `first` to `end` - 1."""
        size = self.block_tokens
        before = -(-tokens // size) - len(blocks)  # blocks that are not listed
        return list(blocks[max(0, first // size - before) : max(0, -(-end // size) - before)]) if first < end else []


def all_full(groups: Sequence[TableGroup]) -> bool:
    """Whether there is nothing but full attention: no windows and no states."""
    return all(group.kind is GroupKind.FULL for group in groups)


def table_groups(kv_cache_config: Any) -> tuple[TableGroup, ...]:
    """The groups that move between engines. Raises InvalidLayout for a kind that kvxfer does not know."""
    return tuple(
        _table_group(index, kv_cache_config.kv_cache_groups[index])
        for index in versions.transfer_group_ids(kv_cache_config)
    )


def table_layout(groups: Sequence[TableGroup], num_blocks: int, fingerprint: Mapping[str, str]) -> CacheLayout:
    """What a scheduler knows: block tables without a cache behind them, of one byte a block."""
    return CacheLayout(
        regions=tuple(Region(name=group.name, nbytes=num_blocks) for group in groups),
        records=(Record(tag="unknown", nbytes=1),),
        groups=tuple(
            Group(
                name=group.name,
                block_tokens=0 if group.kind is GroupKind.STATE else group.block_tokens,
                num_blocks=num_blocks,
                slices=(Slice(layer=group.name, region=group.name, offset=0, block_stride=1, record="unknown"),),
                kind=group.kind,
                window=group.window,
            )
            for group in groups
        ),
        fingerprint=dict(fingerprint),
    )


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How a model's KV heads are divided: this is rank `rank` of `ranks`."""

    rank: int
    ranks: int
    total: int

    def range_of(self, local: int) -> tuple[int, int]:
        """First head and number of all heads of a layer of which this rank holds `local`."""
        if local == 1 and self.total < self.ranks:  # ranks that follow each other hold the same head
            return self.rank // (self.ranks // self.total), self.total
        return self.rank * local, self.ranks * local


def cache_layout(
    groups: Sequence[TableGroup],
    tensors: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    heads: Heads,
    cache_dtype: str,
    latent_content: Mapping[str, int] | None,
    cpu_isa: Callable[[Any], str] | None,
    fingerprint: Mapping[str, str],
) -> CacheLayout:
    """The bound layout of what vLLM has registered, over all groups.

    `cache_dtype` is vLLM's option, for tensors whose own type is bytes. `latent_content` are the elements of an MLA
    row by name. `cpu_isa` tells which kernel of the CPU attention backend serves a specification, None elsewhere.
    Raises InvalidLayout.
    """
    chosen: dict[str, torch.Tensor] = {}
    built: dict[str, TensorGroup] = {}
    for group in groups:
        own = _distinct({name: _with_heads(tensors[name]) for name in group.layers if name in tensors})
        if not own:
            raise InvalidLayout(f"cache group {group.name!r}: none of its layers has been registered on this rank")
        records = {}
        for layer, tensor in own.items():
            spec = _layer_spec(group.spec, layer)
            _check_tensor(layer, tensor, spec, num_blocks)
            records[layer] = _record(layer, tensor, spec, heads, cache_dtype, latent_content, cpu_isa)
        chosen |= own
        built[group.name] = TensorGroup(
            layers=tuple(own),
            axes="BHNC",
            kind=group.kind,
            window=group.window,
            block_tokens=None if group.kind is GroupKind.STATE else group.block_tokens,
            record=records,
            padding=_PADDING,
        )
    return CacheLayout.from_tensors(chosen, groups=built, fingerprint=fingerprint)


# --- groups -------------------------------------------------------------------------------------------------


def _table_group(index: int, group: Any) -> TableGroup:
    spec = group.kv_cache_spec
    inner = _inner_specs(spec)
    kinds = {_kind(one) for one in inner}
    if len(kinds) != 1:
        names = ", ".join(sorted({type(one).__name__ for one in inner}))
        raise InvalidLayout(f"cache group {index} mixes {names}; kvxfer moves groups of one kind")
    kind, window = kinds.pop()
    return TableGroup(
        index=index,
        name=f"{index}.{kind.value}",
        kind=kind,
        block_tokens=spec.block_size,
        window=window,
        layers=tuple(group.layer_names),
        spec=spec,
    )


def _inner_specs(spec: Any) -> list[Any]:
    layers = getattr(spec, "kv_cache_specs", None)
    return [spec] if layers is None else list(layers.values())


def _layer_spec(spec: Any, layer: str) -> Any:
    layers = getattr(spec, "kv_cache_specs", None)
    return spec if layers is None else layers[layer]


def _kind(spec: Any) -> tuple[GroupKind, int]:
    """Kind and window. vLLM's window counts the token that attends, kvxfer's only those before it."""
    if isinstance(spec, specs.SlidingWindowSpec):
        return GroupKind.SLIDING, max(1, spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0))
    if isinstance(spec, specs.FullAttentionSpec):
        return GroupKind.FULL, 0
    if isinstance(spec, specs.MambaSpec):
        return GroupKind.STATE, 0
    raise InvalidLayout(
        f"a cache of {type(spec).__name__} is not supported; kvxfer moves full attention, sliding windows, MLA and "
        "recurrent states"
    )


# --- layers -------------------------------------------------------------------------------------------------


def _with_heads(tensor: torch.Tensor) -> torch.Tensor:
    """vLLM 0.26 registers latents without an axis for their one head."""
    return tensor.unsqueeze(1) if isinstance(tensor, torch.Tensor) and tensor.ndim == 3 else tensor


def _distinct(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without layers that share an earlier layer's cache."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    found = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if place not in seen:
            seen.add(place)
            found[name] = tensor
    return found


def _check_tensor(layer: str, tensor: torch.Tensor, spec: Any, num_blocks: int) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
        shape = getattr(tensor, "shape", type(tensor).__name__)
        raise InvalidLayout(f"layer {layer!r}: expected a tensor [block, head, token, content], got {tuple(shape)}")
    tokens = spec.block_size if _is_state(spec) else tensor.shape[2] * _tokens_per_entry(spec)
    if tensor.shape[0] != num_blocks or tokens != spec.block_size:
        raise InvalidLayout(
            f"layer {layer!r}: {tensor.shape[0]} blocks of {tensor.shape[2]} tokens are registered where the block "
            f"table counts {num_blocks} of {spec.block_size}: the attention backend divides blocks, which kvxfer does "
            "not support; set --block-size to the backend's own"
        )


def _is_state(spec: Any) -> bool:
    return isinstance(spec, specs.MambaSpec)


def _tokens_per_entry(spec: Any) -> int:
    return int(getattr(spec, "tokens_per_state", 1))


def _record(
    layer: str,
    tensor: torch.Tensor,
    spec: Any,
    heads: Heads,
    cache_dtype: str,
    latent_content: Mapping[str, int] | None,
    cpu_isa: Callable[[Any], str] | None,
) -> Record:
    if _is_state(spec):
        return _state(tensor, spec, heads)
    _, count, tokens, width = tensor.shape
    dtype = _dtype_name(tensor, cache_dtype)
    is_latent = isinstance(spec, specs.MLAAttentionSpec) or getattr(spec, "head_size_v", None) == 0
    first, total = (0, count) if is_latent else heads.range_of(count)
    plain = _is_plain(spec) and _tokens_per_entry(spec) == 1
    if cpu_isa is not None and not is_latent:
        isa = cpu_isa(spec)
        if plain and isa == "vec" and width == 2 * spec.head_size:
            return cpu_attention_record(
                block_tokens=tokens,
                kv_heads=count,
                head_dim=spec.head_size,
                dtype=dtype,
                head_start=first,
                total_heads=total,
            )
        return _opaque(f"vllm_cpu.{isa}", tensor, dtype, spec, first, total)
    content = _content(spec, width, latent_content if is_latent else None)
    if not plain or content is None or tensor.stride(3) != 1:
        return _opaque("vllm", tensor, dtype, spec, first, total)
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    planes = []
    offset = 0
    for name, elements in content.items():
        planes.append(
            Plane(
                name=name,
                dtype=dtype,
                offset=offset,
                entries=tokens,
                entry_stride=strides[2],
                heads=count,
                head_stride=strides[1] if count > 1 else 0,
                unit_bytes=elements * size,
                head_start=first,
                total_heads=total,
            )
        )
        offset += elements * size
    nbytes = max(plane.end for plane in planes)
    if nbytes != count * tokens * width * size:
        raise InvalidLayout(
            f"layer {layer!r}: the heads of a block do not lie together (strides {tuple(tensor.stride())}); set "
            "VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC"
        )
    order = "nhd" if strides[2] >= strides[1] else "hnd"
    shape = f"{tokens}x{count}x{'+'.join(map(str, content.values()))}.{order}"
    return Record(tag=f"vllm.{dtype}.{'+'.join(content)}/{shape}", nbytes=nbytes, planes=tuple(planes))


def _is_plain(spec: Any) -> bool:
    """Whether the elements of a row are the numbers themselves, with no scales among them."""
    mode = getattr(spec, "kv_quant_mode", None)
    plain_mode = mode is None or mode.name in ("NONE", "FP8_PER_TENSOR")
    special_rows = getattr(spec, "state_content_bytes", None) is not None
    return plain_mode and not special_rows and getattr(spec, "num_head_slots", None) is None


def _content(spec: Any, width: int, latent: Mapping[str, int] | None) -> dict[str, int] | None:
    """Elements of a row by plane name, or None where they do not add up."""
    if latent is not None:
        return dict(latent) if sum(latent.values()) == width else None
    values = spec.head_size if getattr(spec, "head_size_v", None) is None else spec.head_size_v
    return {"k": spec.head_size, "v": values} if spec.head_size + values == width and values else None


def _dtype_name(tensor: torch.Tensor, cache_dtype: str) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return _FP8.get(cache_dtype, name) if tensor.element_size() == 1 else name


def _opaque(family: str, tensor: torch.Tensor, dtype: str, spec: Any, first: int, total: int) -> Record:
    """Bytes that only this release of vLLM explains: they fit an equal record of the same heads and no other."""
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE").lower()
    shape = "x".join(map(str, tensor.shape[1:])) + ".s" + "_".join(map(str, tensor.stride()[1:]))
    tag = f"{family}.{versions.installed()}.{dtype}.{mode}/{shape}.h{first}of{total}"
    return Record(tag=tag, nbytes=tensor[0].numel() * tensor.element_size())


def _state(tensor: torch.Tensor, spec: Any, heads: Heads) -> Record:
    """A recurrent state of one request, whole: it fits the same rank's of an engine with equally many ranks."""
    parts = "+".join(
        f"{str(dtype).removeprefix('torch.')}.{'x'.join(map(str, shape))}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    rank = "" if getattr(spec, "tp_replicated", False) else f".r{heads.rank}of{heads.ranks}"
    kind = getattr(spec.mamba_type, "name", spec.mamba_type)
    return Record(tag=f"vllm.state.{kind}/{parts}{rank}".lower(), nbytes=spec.state_content_size_bytes)
