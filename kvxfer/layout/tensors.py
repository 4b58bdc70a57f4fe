"""From what an engine registers to a layout: shapes, strides and addresses, no model name.

Arrays are taken as they come: NumPy, torch, CuPy, anything with a shape, strides and an address; none of
those packages is imported. Several layers may lie in one storage, interleaved or one after the other, and
several groups may overlay the same bytes. Imports NumPy, layout, coverage and errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvxfer import checks
from kvxfer.errors import InvalidLayout, InvalidRequest
from kvxfer.layout.cache_layout import CacheLayout, Group, GroupKind, Padding, Plane, Record, Region, Slice
from kvxfer.layout.coverage import plane_atoms, slabs
from kvxfer.layout.typed import integer


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """How the arrays of one group are to be read.

    `axes` names each dimension of an array: ``B`` block, ``N`` token, ``H`` head, ``2`` keys and values,
    ``C`` content (elements of one token and head). Strides come from the arrays, so ``B2NHC`` covers every
    order of bytes in which the tokens of a block lie together (no B inside of N). `content` splits C into named
    planes by element counts; without it C is ``k`` and ``v`` in halves where there are heads and no axis 2, else
    one ``latent``. With `record` (for all layers, or per layer) the bytes of a block follow that record and only
    ``B`` is read from the axes. `padding` names the bytes of a block that nothing claims; left out, such bytes
    are an error.
    """

    layers: Sequence[str] | None = None  # None: every tensor
    axes: str = "B2NHC"
    kind: GroupKind = GroupKind.FULL
    window: int = 0
    block_tokens: int | None = None  # None: from the axes or the record
    content: Mapping[str, int] | None = None
    record: Record | Mapping[str, Record] | None = None
    head_start: int = 0
    total_heads: int = 0
    compression_ratio: int = 0
    padding: str = ""

    def __post_init__(self) -> None:
        try:
            checks.text("axes", self.axes)
            if self.content is not None:
                checks.instance("content", self.content, Mapping)
        except InvalidRequest as error:
            raise InvalidLayout(str(error)) from error
        if self.content is not None:
            counts = {name: integer(f"content[{name!r:.80}]", elements) for name, elements in self.content.items()}
            object.__setattr__(self, "content", counts)


def layout_from_tensors(
    tensors: Mapping[str, Any],
    *,
    groups: TensorGroup | Mapping[str, TensorGroup] | None = None,
    fingerprint: Mapping[str, str] | None = None,
) -> CacheLayout:
    """The bound layout of `tensors`, a mapping from layer name to array.

    `groups` names the groups; one `TensorGroup` (or none) stands for a single group ``full`` of all layers. A
    region is a storage from its first array on, called like that array's layer. The caller keeps the arrays
    alive.

    Raises InvalidLayout when axes do not fit a shape, when bytes of a block are claimed by nobody (and no
    padding was named) or twice, or when a group's arrays disagree on their blocks.
    """
    if not tensors:
        raise InvalidLayout("from_tensors needs at least one tensor")
    if groups is None or isinstance(groups, TensorGroup):
        groups = {"full": groups or TensorGroup()}
    if not isinstance(groups, Mapping) or not all(isinstance(spec, TensorGroup) for spec in groups.values()):
        raise InvalidLayout(f"groups must be a TensorGroup, or a mapping from names to them; got {groups!r:.80}")
    arrays = {name: _array(name, tensor) for name, tensor in tensors.items()}
    regions = _regions(arrays)
    records: dict[str, Record] = {}
    built = []
    used: set[str] = set()
    for name, spec in groups.items():
        layers = list(arrays) if spec.layers is None else list(spec.layers)
        absent = [layer for layer in layers if layer not in arrays]
        if absent or not layers:
            raise InvalidLayout(f"group {name!r}: no tensor is called {absent}; there are {list(arrays)[:8]}")
        used.update(layers)
        built.append(_group(name, spec, {layer: arrays[layer] for layer in layers}, regions, records))
    if arrays.keys() - used:
        unused = sorted(arrays.keys() - used, key=str)
        raise InvalidLayout(f"tensors {unused} are in no group; add them, or do not pass them")
    return CacheLayout(
        regions=tuple(regions),
        records=tuple(records.values()),
        groups=tuple(built),
        fingerprint={} if fingerprint is None else fingerprint,
    )


# --- arrays and the storage under them ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Array:
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: str
    itemsize: int
    device: str
    storage: tuple[int, int]  # first byte and end of the allocation, as far as the array tells

    @property
    def end(self) -> int:
        span = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.address + span + self.itemsize


def _array(name: str, tensor: Any) -> _Array:
    try:
        found = _torch(tensor) if hasattr(tensor, "data_ptr") else _by_interface(tensor)
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidLayout(
            f"tensor {name!r}: expected an array with shape, strides and an address, got {type(tensor).__name__}"
        ) from error
    if 0 in found.shape or min(found.strides, default=0) < 0:
        raise InvalidLayout(f"tensor {name!r}: empty or reversed, with shape {found.shape}, strides {found.strides}")
    return found


def _torch(tensor: Any) -> _Array:
    storage = tensor.untyped_storage()
    size = tensor.element_size()
    return _Array(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * size for stride in tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=size,
        device=str(tensor.device),
        storage=(storage.data_ptr(), storage.data_ptr() + storage.nbytes()),
    )


def _by_interface(tensor: Any) -> _Array:
    on_gpu = hasattr(tensor, "__cuda_array_interface__")
    interface = tensor.__cuda_array_interface__ if on_gpu else tensor.__array_interface__
    address = interface["data"][0]
    array = _Array(
        address=address,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.strides),
        dtype=str(tensor.dtype),
        itemsize=tensor.dtype.itemsize,
        device=f"cuda:{tensor.device.id}" if on_gpu else "cpu",
        storage=(address, address),
    )
    owner = tensor
    while isinstance(getattr(owner, "base", None), type(tensor)):
        owner = owner.base
    first = (owner.__cuda_array_interface__ if on_gpu else owner.__array_interface__)["data"][0]
    if first <= address and array.end <= first + owner.nbytes:
        return _Array(**{**vars(array), "storage": (first, first + owner.nbytes)})
    return _Array(**{**vars(array), "storage": (address, array.end)})


def _regions(arrays: Mapping[str, _Array]) -> list[Region]:
    """Storages, those that overlap as one; each starts at its first array."""
    regions: list[Region] = []
    end = 0
    for name, array in sorted(arrays.items(), key=lambda item: (item[1].device, item[1].address)):
        last = regions[-1] if regions else None
        if last and last.device == array.device and array.address < end:
            end = max(end, array.storage[1])
            regions[-1] = Region(name=last.name, nbytes=end - last.address, device=last.device, address=last.address)
        else:
            end = array.storage[1]
            regions.append(Region(name=name, nbytes=end - array.address, device=array.device, address=array.address))
    return regions


# --- one group ----------------------------------------------------------------------------------------------


@dataclass
class _Piece:
    """A part of a layer whose bytes lie together in a block."""

    layer: str
    address: int
    block_stride: int
    record: Record


class _Axes(NamedTuple):
    counts: dict[str, int]
    strides: dict[str, int]


def _group(
    name: str,
    spec: TensorGroup,
    arrays: Mapping[str, _Array],
    regions: Sequence[Region],
    records: dict[str, Record],
) -> Group:
    read = {layer: _read_axes(layer, spec, array) for layer, array in arrays.items()}
    blocks = {axes.counts["B"] for axes in read.values()}
    if len(blocks) != 1:
        raise InvalidLayout(f"group {name!r}: its arrays have {sorted(blocks)} blocks; they must agree")
    pieces = [
        piece
        for layer, array in arrays.items()
        for piece in (
            _given(layer, spec, array, read[layer]) if spec.record else _from_axes(layer, spec, array, read[layer])
        )
    ]
    block_tokens = _block_tokens(name, spec, read, pieces)
    slices = []
    for piece in pieces:
        region = next(
            r
            for r in regions
            if r.address <= piece.address < r.address + r.nbytes and r.device == arrays[piece.layer].device
        )
        slices.append((piece, region))
    group = _assemble(name, spec, block_tokens, blocks.pop(), slices)
    if spec.padding:
        group = _name_gaps(spec.padding, group, {piece.record.tag: piece.record for piece in pieces}, records)
    used = {piece.record for piece in group.slices}
    for piece in pieces:
        if piece.record.tag in used:
            _keep(records, piece.record)
    return group


def _assemble(
    name: str,
    spec: TensorGroup,
    block_tokens: int,
    num_blocks: int,
    slices: Sequence[tuple[_Piece, Region]],
) -> Group:
    return Group(
        name=name,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        slices=tuple(
            Slice(
                layer=piece.layer,
                region=region.name,
                offset=piece.address - region.address,
                block_stride=piece.block_stride,
                record=piece.record.tag,
            )
            for piece, region in slices
        ),
        kind=spec.kind,
        window=spec.window,
        compression_ratio=spec.compression_ratio,
    )


def _read_axes(layer: str, spec: TensorGroup, array: _Array) -> _Axes:
    axes = spec.axes.replace("D", "C")
    if spec.record:
        if "B" not in axes or axes.index("B") >= len(array.shape):
            raise InvalidLayout(f"tensor {layer!r}: axes {spec.axes!r} must name the block axis of {array.shape}")
        axis = axes.index("B")
        return _Axes({"B": array.shape[axis]}, {"B": array.strides[axis]})
    if len(axes) != len(array.shape) or len(set(axes)) != len(axes) or set(axes) - set("B2NHC") or "B" not in axes:
        raise InvalidLayout(
            f"tensor {layer!r}: axes {spec.axes!r} must name each dimension of shape {array.shape} once, by "
            "B (block), N (token), H (head), 2 (keys and values) and C (content)"
        )
    counts = dict(zip(axes, array.shape, strict=True))
    strides = dict(zip(axes, array.strides, strict=True))
    if counts.get("2", 2) != 2:
        raise InvalidLayout(f"tensor {layer!r}: axis 2 of {spec.axes!r} has {counts['2']} entries, not keys and values")
    if "N" in axes and counts["N"] > 1 and counts["B"] > 1 and strides["N"] > strides["B"]:
        raise InvalidLayout(
            f"tensor {layer!r}: axes {spec.axes!r} of shape {array.shape} have the next block nearer than the next "
            "token; a block's tokens must lie together"
        )
    if "C" in axes and counts["C"] > 1 and strides["C"] != array.itemsize:
        raise InvalidLayout(f"tensor {layer!r}: content must be contiguous, its stride is {strides['C']} bytes")
    return _Axes(counts, strides)


def _given(layer: str, spec: TensorGroup, array: _Array, axes: _Axes) -> list[_Piece]:
    record = spec.record[layer] if isinstance(spec.record, Mapping) else spec.record
    return [_Piece(layer=layer, address=array.address, block_stride=axes.strides["B"], record=record)]


def _from_axes(layer: str, spec: TensorGroup, array: _Array, axes: _Axes) -> list[_Piece]:
    """The layer in slices: keys, values and heads apart where other bytes lie between them."""
    counts, strides = axes
    size = array.itemsize
    content = counts.get("C", 1) * size
    tokens = counts.get("N", 1)
    heads = counts.get("H", 1)
    head_bytes = max((tokens - 1) * strides.get("N", 0) + content, content)
    inner = [(tokens, strides.get("N", 0))]
    heads_apart = heads > 1 and strides["H"] > max(head_bytes, tokens * strides.get("N", 0))
    if not heads_apart:
        inner.append((heads, strides.get("H", 0)))
    half_bytes = sum((n - 1) * stride for n, stride in inner) + content
    rows_end = max([n * stride for n, stride in inner if n > 1] + [half_bytes])
    inside_rows = tokens > 1 and strides.get("2", 0) < strides["N"]
    halves_apart = "2" in counts and (strides["2"] > rows_end or (heads_apart and not inside_rows))
    pieces = []
    for half in range(2) if halves_apart else (None,):
        for head in range(heads) if heads_apart else (None,):
            offset = (half or 0) * strides.get("2", 0) + (head or 0) * strides.get("H", 0)
            planes = list(_planes(spec, array, axes, half, head))
            nbytes = max(plane.end for plane in planes)
            record = Record(
                tag=_tag(spec, array, counts, strides, half, head),
                nbytes=nbytes,
                planes=tuple(planes),
                padding=_gaps(planes, nbytes, spec.padding) if spec.padding else (),
            )
            pieces.append(_Piece(layer=layer, address=array.address + offset, block_stride=strides["B"], record=record))
    return pieces


def _planes(spec: TensorGroup, array: _Array, axes: _Axes, half: int | None, head: int | None) -> Iterator[Plane]:
    counts, strides = axes
    size, elements = array.itemsize, axes.counts.get("C", 1)
    if spec.content is not None:
        fields = dict(spec.content)
        if sum(fields.values()) != elements:
            raise InvalidLayout(f"content {fields} must add up to the {elements} elements of axis C")
    elif "2" in counts:
        fields = {"": elements}
    elif "H" in counts and elements % 2 == 0:
        fields = {"k": elements // 2, "v": elements // 2}
    else:
        fields = {"latent": elements}
    sides = ("k", "v") if "2" in counts else ("",)
    position = 0
    for name, count in fields.items():
        for number, side in enumerate(sides):
            if half is not None and half != number:
                continue
            heads = 1 if head is not None else counts.get("H", 1)
            yield Plane(
                name="_".join(word for word in (side, name) if word),
                dtype=array.dtype,
                offset=position + (strides["2"] * number if side and half is None else 0),
                entries=counts.get("N", 1),
                entry_stride=strides.get("N", 0),
                heads=heads,
                head_stride=strides.get("H", 0) if heads > 1 else 0,
                unit_bytes=count * size,
                head_start=spec.head_start + (head or 0),
                total_heads=spec.total_heads or counts.get("H", 1),
            )
        position += count * size


def _tag(
    spec: TensorGroup,
    array: _Array,
    counts: Mapping[str, int],
    strides: Mapping[str, int],
    half: int | None,
    head: int | None,
) -> str:
    order = sorted((axis for axis in counts if axis != "B"), key=lambda axis: -strides[axis])
    shape = "x".join(f"{axis}{counts[axis]}" for axis in order)
    part = ("" if half is None else f".{'kv'[half]}") + ("" if head is None else f".h{spec.head_start + head}")
    content = "" if spec.content is None else "." + "+".join(spec.content)
    return f"{array.dtype}.{shape}{content}{part}"


def _block_tokens(name: str, spec: TensorGroup, read: Mapping[str, _Axes], pieces: Sequence[_Piece]) -> int:
    if spec.kind is GroupKind.STATE:
        return 0
    if spec.block_tokens is not None:
        return spec.block_tokens
    planes = [piece.record.planes[0] for piece in pieces if piece.record.planes]
    found = {plane.entries * plane.tokens_per_entry for plane in planes}
    found |= {axes.counts["N"] for axes in read.values() if "N" in axes.counts}
    if len(found) != 1:
        raise InvalidLayout(f"group {name!r}: the arrays say blocks of {sorted(found)} tokens; pass block_tokens")
    return found.pop()


# --- bytes that nothing claims ------------------------------------------------------------------------------


def _gaps(planes: Sequence[Plane], nbytes: int, name: str) -> tuple[Padding, ...]:
    """The bytes between planes, as padding called `name`."""
    claimed = np.zeros(nbytes + 2, np.int8)
    for plane in planes:
        claimed[plane_atoms(plane, 1) + 1] = 1
    claimed[0] = claimed[-1] = 1
    edges = np.flatnonzero(np.diff(claimed))
    return tuple(Padding(name=name, offset=int(a), nbytes=int(b - a)) for a, b in edges.reshape(-1, 2))


def _name_gaps(name: str, group: Group, mine: Mapping[str, Record], records: dict[str, Record]) -> Group:
    """Gaps in the first slab become the group's padding, those in other slabs their records'."""
    padding: list[Padding] = []
    slices = list(group.slices)
    for region, stride, slab in slabs(group):
        base = slab[0].offset
        first_slab = region == group.slices[0].region and base == group.slices[0].offset
        position = 0
        for number, piece in enumerate(slab):
            offset = piece.offset - base
            if offset > position and first_slab:
                padding.append(Padding(name=name, offset=position, nbytes=offset - position))
            following = slab[number + 1].offset - base if number + 1 < len(slab) else stride
            record = mine[piece.record]
            position = offset + record.nbytes
            if position < following and not first_slab:
                padded = _widen(record, following - offset, name)
                _keep(records, padded)
                slices[group.slices.index(piece)] = Slice(
                    layer=piece.layer,
                    region=piece.region,
                    offset=piece.offset,
                    block_stride=piece.block_stride,
                    record=padded.tag,
                )
                position = following
        if position < stride and first_slab:
            padding.append(Padding(name=name, offset=position, nbytes=stride - position))
    return Group(
        name=group.name,
        block_tokens=group.block_tokens,
        num_blocks=group.num_blocks,
        slices=tuple(slices),
        kind=group.kind,
        window=group.window,
        padding=tuple(padding),
        compression_ratio=group.compression_ratio,
    )


def _widen(record: Record, nbytes: int, name: str) -> Record:
    tail = Padding(name=name, offset=record.nbytes, nbytes=nbytes - record.nbytes)
    padding = (*record.padding, tail) if record.planes else ()
    return Record(tag=f"{record.tag}+{tail.nbytes}", nbytes=nbytes, planes=record.planes, padding=padding)


def _keep(records: dict[str, Record], record: Record) -> None:
    known = records.setdefault(record.tag, record)
    if known != record:
        raise InvalidLayout(f"record tag {record.tag!r} stands for two byte layouts; pass records with other tags")
