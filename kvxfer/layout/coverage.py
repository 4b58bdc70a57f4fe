"""Does a layout add up? Every byte of a block belongs to one plane, or to padding that has a name.

Called by the constructors in ``layout.py``, also for what a peer sent: work and memory are bounded before
anything is counted. Imports NumPy and errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.errors import InvalidLayout

if TYPE_CHECKING:
    from kvxfer.layout.cache_layout import Group, Plane, Record, Region, Slice

MAX_BLOCKS = 2**31 - 1
_MAX_ADDRESS = 2**62
_MAX_ATOMS = 4 << 20  # bounds the memory and time of a coverage check


def check_record(record: Record) -> None:
    """Planes and padding tile the record's bytes exactly; InvalidLayout names the bytes that do not fit."""
    where = f"record {record.tag!r}"
    for plane in record.planes:
        if plane.end > record.nbytes:
            raise InvalidLayout(f"{where}: plane {plane.name!r} ends at byte {plane.end} of a slice of {record.nbytes}")
    for padding in record.padding:
        if padding.offset < 0 or padding.nbytes < 0 or padding.offset + padding.nbytes > record.nbytes:
            raise InvalidLayout(f"{where}: padding {padding} does not lie in {record.nbytes} bytes")
    atom = _atom_bytes(record)
    if sum(plane.nbytes for plane in record.planes) > record.nbytes or record.nbytes // atom > _MAX_ATOMS:
        raise InvalidLayout(f"{where}: planes overlap, or are too finely interleaved to check")
    claims = np.zeros(record.nbytes // atom, np.uint8)
    for plane in record.planes:
        np.add.at(claims, plane_atoms(plane, atom), 1)
    for padding in record.padding:
        claims[padding.offset // atom : (padding.offset + padding.nbytes) // atom] += 1
    if claims.max() > 1:
        raise InvalidLayout(
            f"{where}: bytes {_ranges(claims > 1, atom)} of the slice are claimed more than once; planes "
            "and padding must not overlap"
        )
    if claims.min() == 0:
        raise InvalidLayout(
            f"{where}: nobody claims bytes {_ranges(claims == 0, atom)} of the slice; add a plane, or name "
            "them as padding"
        )


def _atom_bytes(record: Record) -> int:
    """The largest unit that divides every offset, stride and size: claims are counted by it."""
    sizes = [record.nbytes]
    for plane in record.planes:
        sizes += [plane.offset, plane.unit_bytes]
        sizes += [plane.entry_stride] if plane.entries > 1 else []
        sizes += [plane.head_stride] if plane.heads > 1 else []
        sizes += [plane.channel_stride] if plane.channels > 1 else []
    for padding in record.padding:
        sizes += [padding.offset, padding.nbytes]
    return math.gcd(*sizes)


def plane_atoms(plane: Plane, atom: int) -> np.ndarray:
    """Indices of every `atom` bytes of a plane, as one flat int64 array."""
    entry, head, channel, unit = np.ogrid[: plane.entries, : plane.heads, : plane.channels, : plane.unit_bytes // atom]
    offsets = plane.offset + entry * plane.entry_stride + head * plane.head_stride + channel * plane.channel_stride
    return (offsets // atom + unit).ravel()


def _ranges(mask: np.ndarray, scale: int, limit: int = 4) -> str:
    """The runs of a boolean mask whose elements stand for `scale` bytes, as '0..16, 48..64'."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0])))) * scale
    runs = [f"{a}..{b}" for a, b in edges.reshape(-1, 2)[:limit].tolist()]
    more = len(edges) // 2 - len(runs)
    return ", ".join(runs) + (f" and {more} more" if more else "")


def check_group(group: Group, regions: Mapping[str, Region], records: Mapping[str, Record]) -> None:
    """A group's slices lie in their regions, fit its block size, and leave no byte of a block unclaimed."""
    where = f"group {group.name!r}"
    if not 1 <= group.num_blocks <= MAX_BLOCKS:
        raise InvalidLayout(f"{where}: num_blocks must be 1 to {MAX_BLOCKS}, got {group.num_blocks}")
    if not group.slices:
        raise InvalidLayout(f"{where} has no slices")
    if group.kind.value == "state":
        if group.block_tokens != 0:
            raise InvalidLayout(f"{where}: state has no tokens; block_tokens must be 0, got {group.block_tokens}")
    elif group.block_tokens < 1:
        raise InvalidLayout(f"{where}: block_tokens must be 1 or more, got {group.block_tokens}")
    if (group.kind.value == "sliding") != (group.window > 0):
        raise InvalidLayout(f"{where}: a window belongs to a sliding group and to no other, got {group.window}")
    if group.compression_ratio < 0:
        raise InvalidLayout(f"{where}: compression_ratio must be 0 or more, got {group.compression_ratio}")
    for piece in group.slices:
        if piece.region not in regions:
            raise InvalidLayout(f"{where}: layer {piece.layer!r} lies in region {piece.region!r}, which is not there")
        if piece.record not in records:
            raise InvalidLayout(f"{where}: layer {piece.layer!r} has record {piece.record!r}, which is not there")
        if not (0 <= piece.offset < _MAX_ADDRESS and 0 < piece.block_stride < _MAX_ADDRESS):
            raise InvalidLayout(f"{where}: layer {piece.layer!r}: offset and block_stride are out of range")
        record = records[piece.record]
        if record.nbytes > piece.block_stride:
            raise InvalidLayout(
                f"{where}: layer {piece.layer!r}: a slice of {record.nbytes} bytes does not fit a block "
                f"stride of {piece.block_stride}"
            )
        end = piece.offset + (group.num_blocks - 1) * piece.block_stride + record.nbytes
        if end > regions[piece.region].nbytes:
            raise InvalidLayout(
                f"{where}: layer {piece.layer!r} ends at byte {end} of region {piece.region!r}, which has "
                f"{regions[piece.region].nbytes}"
            )
        for plane in record.planes:
            if group.kind.value in ("ring", "state") and plane.tokens_per_entry != 1:
                raise InvalidLayout(
                    f"{where}: layer {piece.layer!r}: plane {plane.name!r} of a {group.kind.value} must "
                    f"have one entry a row, got {plane.tokens_per_entry} tokens per entry"
                )
            expected = math.ceil(group.block_tokens / plane.tokens_per_entry) if group.block_tokens else 1
            if plane.entries != expected or (group.block_tokens % plane.tokens_per_entry):
                raise InvalidLayout(
                    f"{where}: layer {piece.layer!r}: plane {plane.name!r} has {plane.entries} entries of "
                    f"{plane.tokens_per_entry} tokens in a block of {group.block_tokens} tokens"
                )
    _check_block_coverage(group, records)


def _check_block_coverage(group: Group, records: Mapping[str, Record]) -> None:
    """No two slices share a byte of a block, and every byte between them is claimed or named."""
    for region, stride, slab in slabs(group):
        base = slab[0].offset
        spans = [(piece.offset - base, records[piece.record].nbytes, piece.layer) for piece in slab]
        if region == group.slices[0].region and base == group.slices[0].offset:
            spans += [(padding.offset, padding.nbytes, padding.name) for padding in group.padding]
        position = 0
        for offset, nbytes, name in sorted(spans):
            if offset < position:
                raise InvalidLayout(
                    f"group {group.name!r}: bytes {offset}..{min(position, offset + nbytes)} of a block in "
                    f"region {region!r} are claimed twice, the second time by {name!r}"
                )
            if offset > position:
                raise InvalidLayout(_unclaimed(group, region, position, offset))
            position = offset + nbytes
        if position > stride:
            raise InvalidLayout(
                f"group {group.name!r}: the slices of a block in region {region!r} end at byte {position} "
                f"of a block stride of {stride}"
            )
        if position < stride:
            raise InvalidLayout(_unclaimed(group, region, position, stride))


def _unclaimed(group: Group, region: str, first: int, last: int) -> str:
    return (
        f"group {group.name!r}: nobody claims bytes {first}..{last} of a block in region {region!r}; add a "
        "slice, or name them in the group's padding"
    )


def slabs(group: Group) -> Iterator[tuple[str, int, list[Slice]]]:
    """Slices whose blocks interleave: same region and stride, and offsets within one stride of the first."""
    by_region: dict[str, list[Slice]] = {}
    for piece in group.slices:
        by_region.setdefault(piece.region, []).append(piece)
    for region, slices in by_region.items():
        slab: list[Slice] = []
        for piece in sorted(slices, key=lambda s: s.offset):
            if slab and piece.offset < slab[0].offset + slab[0].block_stride:
                if piece.block_stride != slab[0].block_stride:
                    raise InvalidLayout(
                        f"group {group.name!r}: layers {slab[0].layer!r} and {piece.layer!r} interleave in "
                        f"region {region!r} with unequal block strides"
                    )
                slab.append(piece)
                continue
            if slab:
                yield region, slab[0].block_stride, slab
                end = slab[0].offset + group.num_blocks * slab[0].block_stride
                if piece.offset < end:
                    raise InvalidLayout(
                        f"group {group.name!r}: layer {piece.layer!r} starts at byte {piece.offset} of "
                        f"region {region!r}, inside the blocks of layer {slab[0].layer!r}, which end at "
                        f"{end}"
                    )
            slab = [piece]
        yield region, slab[0].block_stride, slab
