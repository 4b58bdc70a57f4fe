"""Joining two layouts quantity by quantity, across cache formats: the rows of a packed plan.

Where `kvxfer.plan.join` joins equal planes, this also joins a quantity with one that is stored in another
format. For each, the wire carries the smallest of three: what was asked for, what the destination stores,
what the source stores; a tie goes to the destination's form, then to the source's. So bytes pass untouched
where both ends agree, and are converted once, on the side where that is cheaper for the wire.

Imports NumPy, layout, errors and the formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.errors import LayoutMismatch
from kvxfer.formats.codec import CODEC, Codec
from kvxfer.formats.raw import BYTES
from kvxfer.formats.storage import Quantity, ScaleOrder, quantities
from kvxfer.formats.wire import WireFormat
from kvxfer.layout import CacheLayout, Group, GroupKind, Plane, Record, Slice

_STRIDES = ("offset", "block_stride", "entry_stride", "head_stride")
SIDE = np.dtype(
    [("region", "<u4"), ("scale_region", "<u4")]
    + [(name, "<u8") for name in _STRIDES]
    + [(f"scale_{name}", "<u8") for name in _STRIDES]
    + [("channel_stride", "<u8"), ("channels", "<u4"), ("scale_order", "<u4")]
)
PACKED_ROW = np.dtype(
    [("src", SIDE), ("dst", SIDE)]
    + [(f"{role}_codec", CODEC) for role in ("src", "wire", "dst")]
    + [(name, "<u4") for name in ("heads", "dim", "tokens_per_entry", "reserved")]
)

Scales = Mapping[str, Mapping[str, float]]
"""Layer name to plane name to global scale, for caches that keep one scale a layer outside their blocks."""


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """One quantity of one layer, from one source to the destination, for heads low .. high of the model.

    `wire` is the codec on the wire, `plain` the one for tokens that the wire format leaves raw.
    """

    layer: str
    src_group: Group
    dst_group: Group
    src: Quantity
    dst: Quantity
    wire: Codec
    plain: Codec
    table: np.ndarray  # of dtype PACKED_ROW, shape [2]: with `wire`, with `plain`

    @property
    def heads(self) -> int:
        """Heads that this row moves."""
        return int(self.table[0]["heads"])

    @property
    def tokens_per_entry(self) -> int:
        """Tokens one entry stands for."""
        return self.src.plane.tokens_per_entry


def wire_codec(asked: Codec | None, src: Quantity, dst: Quantity) -> Codec:
    """The codec that the wire carries; see the module."""
    dim = src.dim
    if asked is not None:
        if asked.same_bytes(dst.codec, dim):
            return asked  # the destination's bytes, made by the encoder that was asked for
        if asked.vector_bytes(dim) < min(src.codec.vector_bytes(dim), dst.codec.vector_bytes(dim)):
            return asked
    return dst.codec if dst.codec.vector_bytes(dim) <= src.codec.vector_bytes(dim) else src.codec


def packed_rows(
    sources: Sequence[CacheLayout],
    dst: CacheLayout,
    wire: WireFormat,
    *,
    first: int = 0,
    layers: Sequence[str] | None = None,
    allow_missing: bool = False,
    src_scales: Scales | None = None,
    dst_scales: Scales | None = None,
) -> tuple[dict[int, list[PackedRow]], tuple[str, ...]]:
    """Rows by source index, and the destination's layers that no source has.

    Arguments and errors as `kvxfer.plan.join`; formats may differ, geometry may not.
    """
    order = [(first + i) % len(sources) for i in range(len(sources))]
    rows: dict[int, list[PackedRow]] = {}
    problems: list[str] = []
    missing: dict[str, None] = {}
    for group in dst.groups:
        for piece in group.slices:
            if layers is not None and piece.layer not in layers:
                continue
            wanted = dst.record(piece.record)
            given = (dst_scales or {}).get(piece.layer)
            held = [
                (index, *found, (src_scales or {}).get(piece.layer))
                for index in order
                for found in _slices(sources[index], piece.layer)
            ]
            if not held and allow_missing:
                missing.setdefault(piece.layer)
                continue
            for quantity in quantities(wanted, given) or [_whole(wanted)]:
                found = _join(sources, held, dst, group, piece, quantity, wire)
                if isinstance(found, str):
                    problems.append(f"layer {piece.layer!r}: {quantity.name}: {found}")
                    continue
                for index, row in found:
                    rows.setdefault(index, []).append(row)
    if problems:
        shown = "".join(f"\n  - {problem}" for problem in problems[:20])
        more = f"\n  - and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise LayoutMismatch(f"the layouts cannot be joined, even with conversion:{shown}{more}")
    return rows, tuple(missing)


def _slices(layout: CacheLayout, layer: str) -> list[tuple[Group, Slice, Record]]:
    return [
        (group, piece, layout.record(piece.record))
        for group in layout.groups
        for piece in group.slices
        if piece.layer == layer
    ]


def _whole(record: Record) -> Quantity:
    """An opaque record as one vector of bytes a block, named by its tag: only an equal one fits."""
    plane = Plane(
        name=f"record {record.tag}",
        dtype="opaque",
        offset=0,
        entries=1,
        entry_stride=0,
        unit_bytes=record.nbytes,
    )
    return Quantity(plane=plane, codec=BYTES, dim=record.nbytes)


def _join(
    sources: Sequence[CacheLayout],
    held: Sequence[tuple[int, Group, Slice, Record, Mapping[str, float] | None]],
    dst: CacheLayout,
    dst_group: Group,
    dst_slice: Slice,
    wanted: Quantity,
    wire: WireFormat,
) -> list[tuple[int, PackedRow]] | str:
    """Rows that fill one quantity of a destination slice, or a line that says why not."""
    plane = wanted.plane
    missing = [(plane.head_start, plane.head_start + plane.heads)]
    rows, problem = [], "no source has it"
    for index, group, piece, record, scales in held:
        for src in quantities(record, scales) or [_whole(record)]:
            if src.name != wanted.name:
                continue
            problem = _problem(group, src, dst_group, wanted)
            if problem:
                return problem
            left = []
            for low, high in missing:
                start, stop = (
                    max(low, src.plane.head_start),
                    min(high, src.plane.head_start + src.plane.heads),
                )
                if start >= stop:
                    left.append((low, high))
                    continue
                regions = _regions(sources[index]), _regions(dst)
                row = _row(group, piece, src, dst_group, dst_slice, wanted, (start, stop), regions, wire)
                rows.append((index, row))
                left += [(a, b) for a, b in ((low, start), (stop, high)) if a < b]
            missing = left
            problem = f"the sources lack heads {', '.join(f'{a}..{b}' for a, b in missing)}"
    return problem if missing else rows


def _problem(src_group: Group, src: Quantity, dst_group: Group, dst: Quantity) -> str | None:
    for noun, ours, theirs in (
        ("group kind", src_group.kind.value, dst_group.kind.value),
        ("values a head", src.dim if src.is_number == dst.is_number else None, dst.dim),
        ("tokens per entry", src.plane.tokens_per_entry, dst.plane.tokens_per_entry),
        ("heads of the model", src.plane.all_heads, dst.plane.all_heads),
    ):
        if ours is not None and ours != theirs:
            return f"{noun}: source {ours}, destination {theirs}"
    if src.plane.dtype == "opaque" and src_group.block_tokens != dst_group.block_tokens:
        return f"tokens a block: source {src_group.block_tokens}, destination {dst_group.block_tokens}"
    if src.plane.tiled or dst.plane.tiled:
        return f"tiles of {src.plane.tokens_per_entry} tokens can only be copied as they are"
    if src.is_number and dst.is_number:
        return None
    if src.is_number != dst.is_number or src.plane.dtype != dst.plane.dtype:
        return f"source {src.stored_as}, destination {dst.stored_as}: there is no conversion between them"
    return None


def _regions(layout: CacheLayout) -> dict[str, int]:
    return {region.name: index for index, region in enumerate(layout.regions)}


def _row(
    src_group: Group,
    src_slice: Slice,
    src: Quantity,
    dst_group: Group,
    dst_slice: Slice,
    dst: Quantity,
    heads: tuple[int, int],
    regions: tuple[dict[str, int], dict[str, int]],
    wire: WireFormat,
) -> PackedRow:
    paged = dst_group.kind in (GroupKind.FULL, GroupKind.SLIDING) and src.is_number
    asked = wire.codec(src.name, src.dim) if paged else None
    codecs = wire_codec(asked, src, dst), wire_codec(None, src, dst)
    table = np.zeros(2, PACKED_ROW)
    table["src"] = _side(src_slice, src, heads[0], regions[0])
    table["dst"] = _side(dst_slice, dst, heads[0], regions[1])
    table["src_codec"], table["dst_codec"] = src.codec.table(src.dim), dst.codec.table(dst.dim)
    table["wire_codec"] = [codec.table(src.dim) for codec in codecs]
    table["heads"], table["dim"] = heads[1] - heads[0], src.dim
    table["tokens_per_entry"] = 0 if src.plane.dtype == "opaque" else src.plane.tokens_per_entry
    return PackedRow(
        layer=dst_slice.layer,
        src_group=src_group,
        dst_group=dst_group,
        src=src,
        dst=dst,
        wire=codecs[0],
        plain=codecs[1],
        table=table,
    )


def _side(piece: Slice, quantity: Quantity, head: int, regions: Mapping[str, int]) -> np.void:
    side = np.zeros((), SIDE)
    side["region"] = side["scale_region"] = regions[piece.region]
    planes = [("", quantity.plane)]
    if quantity.scales is not None:
        planes.append(("scale_", quantity.scales))
    for prefix, plane in planes:
        side[f"{prefix}offset"] = piece.offset + plane.offset + (head - plane.head_start) * plane.head_stride
        side[f"{prefix}block_stride"] = piece.block_stride
        side[f"{prefix}entry_stride"] = plane.entry_stride
        side[f"{prefix}head_stride"] = plane.head_stride
    if quantity.scale_order is ScaleOrder.TOKENS_BY_FOUR:
        side["scale_entry_stride"] //= 4  # of one token of the tile
    plane = quantity.plane
    dense = plane.channels == 1 or plane.channel_stride == plane.unit_bytes
    side["channels"] = 1 if dense else plane.channels
    side["channel_stride"] = 0 if dense else plane.channel_stride
    side["scale_order"] = quantity.scale_order
    return side[()]
