"""Does an array look like the region that it is registered for? Its dtype and its shape against the layout's.

Only what the layout says is compared: of opaque records and dtype names that are not in DTYPE_BYTES nothing is known,
and bytes (one byte an element, no float) may hold anything. Imports layout and errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from kvxfer.errors import InvalidLayout
from kvxfer.layout.cache_layout import DTYPE_BYTES, CacheLayout, Group, Record, Slice

_BYTES = ("uint8", "int8", "byte")


def check_arrays(layout: CacheLayout, arrays: Iterable[tuple[str, str, int, tuple[int, ...]]]) -> None:
    """InvalidLayout unless each C-contiguous array fits its region. `arrays`: region, dtype's name, itemsize, shape.

    The dtype is one of the region's planes', or of the size of one where either is an integer: bits. The shape's axes
    are axes of the layout (blocks, keys and values, tokens, heads, ...), of which neighbours may be one. An array of
    one axis is plain storage. Sizes are the caller's to compare.
    """
    records = {record.tag: record for record in layout.records}
    pieces: dict[str, list[tuple[Group, Slice, Record]]] = {region.name: [] for region in layout.regions}
    for group in layout.groups:
        for piece in group.slices:
            pieces[piece.region].append((group, piece, records[piece.record]))
    for region, dtype, itemsize, shape in arrays:
        if dtype in _BYTES or not pieces[region]:
            continue
        _check_dtype(region, dtype, itemsize, [record for _, _, record in pieces[region]])
        if len(shape) > 1:
            _check_shape(region, itemsize, shape, pieces[region])


def _check_dtype(region: str, dtype: str, itemsize: int, records: list[Record]) -> None:
    expected = {plane.dtype for record in records for plane in record.planes}
    if not all(record.planes for record in records) or not expected <= DTYPE_BYTES.keys() or dtype in expected:
        return
    if itemsize in {DTYPE_BYTES[name] for name in expected if _is_bits(dtype) or _is_bits(name)}:
        return
    names = ", ".join(f"{name} ({DTYPE_BYTES[name]} bytes an element)" for name in sorted(expected))
    raise InvalidLayout(
        f"region {region!r}: the layout's planes hold {names}, the array {dtype} ({itemsize} bytes an element); "
        "register an array of that dtype, or a view of its bytes (uint8)"
    )


def _is_bits(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "void"))


def _check_shape(
    region: str, itemsize: int, shape: tuple[int, ...], pieces: list[tuple[Group, Slice, Record]]
) -> None:
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    known = {itemsize, *_distances(pieces)}
    blocks = {piece.block_stride for _, piece, _ in pieces}
    innermost = 0 if all(record.planes for _, _, record in pieces) else min(blocks)
    for axis, (length, stride) in enumerate(zip(shape, reversed(strides), strict=True)):
        if length == 1 or stride < innermost or stride in known or any(stride % block == 0 for block in blocks):
            continue
        counts = ", ".join(
            sorted({f"{group.num_blocks} blocks of {piece.block_stride} bytes" for group, piece, _ in pieces})
        )
        raise InvalidLayout(
            f"region {region!r}: axis {axis} of the array's shape {shape} has a stride of {stride} bytes, and nothing "
            f"in the layout has; it says {counts}, with strides of {sorted(known - {0})[-8:]} bytes inside"
        )


def _distances(pieces: list[tuple[Group, Slice, Record]]) -> Iterator[int]:
    """Every distance in bytes at which the layout repeats something."""
    yield from _differences(piece.offset for _, piece, _ in pieces)
    for record in {record.tag: record for _, _, record in pieces}.values():
        yield record.nbytes
        yield from _differences(plane.offset for plane in record.planes)
        for plane in record.planes:
            yield from (plane.entry_stride, plane.head_stride, plane.channel_stride, plane.unit_bytes)
        for padding in record.padding:
            yield from (padding.offset, padding.nbytes)
    for group in {group.name: group for group, _, _ in pieces}.values():
        for padding in group.padding:
            yield from (padding.offset, padding.nbytes)


def _differences(offsets: Iterable[int]) -> Iterator[int]:
    """From the first to each, and from each to the next."""
    ordered = sorted(set(offsets))
    for first, second in itertools.pairwise(ordered):
        yield from (second - ordered[0], second - first)
