"""The slow truth: packed plans carried out vector by vector in NumPy, from the rules that the codecs state.

For tests of every kernel. Memory is given as one uint8 array a region. Imports NumPy, plan and the formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvxfer.formats.codec import Codec
from kvxfer.formats.plan import PackedJoin, PackedPlan
from kvxfer.formats.rows import PackedRow
from kvxfer.formats.storage import Quantity, ScaleOrder
from kvxfer.plan import Chunk

Regions = Sequence[np.ndarray]


def pack(join: PackedJoin, plan: PackedPlan, chunk: Chunk, src: Regions, *, check: bool = True) -> np.ndarray:
    """The chunk's packed bytes, from the source's regions."""
    out = np.zeros(chunk.wire_bytes, np.uint8)
    for row, codec, segment, position in _pieces(join, plan, chunk):
        vectors = vectors_of(row, segment)
        codes, scales = read_vectors(row, "src", row.src, segment, src)
        if not codec.same_bytes(row.src.codec, row.src.dim):
            codes, scales = codec.pack(row.src.codec.unpack(codes, scales), check=check)
        code_bytes = vectors * codec.code_bytes(row.src.dim)
        start = position + -(-code_bytes // 16) * 16
        out[position : position + code_bytes] = codes.ravel()
        out[start : start + scales.size] = scales.ravel()
    return out


def unpack(join: PackedJoin, plan: PackedPlan, chunk: Chunk, wire: np.ndarray, dst: Regions) -> None:
    """The chunk's packed bytes into the destination's regions."""
    for row, codec, segment, position in _pieces(join, plan, chunk):
        vectors, dim = vectors_of(row, segment), row.src.dim
        code_bytes, scale_bytes = vectors * codec.code_bytes(dim), vectors * codec.scale_bytes(dim)
        start = position + -(-code_bytes // 16) * 16
        codes = wire[position : position + code_bytes].reshape(vectors, -1)
        scales = wire[start : start + scale_bytes].reshape(vectors, -1)
        if not codec.same_bytes(row.dst.codec, dim):
            codes, scales = row.dst.codec.pack(codec.unpack(codes, scales), check=False)
        write_vectors(row, "dst", row.dst, segment, dst, codes, scales)


Segment = tuple[int, int, int, int, int]
"""Source block, destination block, source token, destination token, tokens."""


def _pieces(join: PackedJoin, plan: PackedPlan, chunk: Chunk) -> Iterator[tuple[PackedRow, Codec, Segment, int]]:
    part = plan.parts[chunk.part]
    columns = part.segments
    for number in range(chunk.first, chunk.first + chunk.count):
        segment = tuple(
            int(column[number])
            for column in (
                columns.src_block,
                columns.dst_block,
                columns.src_token,
                columns.dst_token,
                columns.tokens,
            )
        )
        position = part.packed_start(number) - part.packed_start(chunk.first)
        for entry in part.rows:
            row, codec = _row_of(join, entry)
            yield row, codec, segment, position
            vectors, dim = vectors_of(row, segment), row.src.dim
            for size in (vectors * codec.code_bytes(dim), vectors * codec.scale_bytes(dim)):
                position += -(-size // 16) * 16


def _row_of(join: PackedJoin, entry: np.void) -> tuple[PackedRow, Codec]:
    for row in join.rows:
        for table, codec in zip(row.table, (row.wire, row.plain), strict=True):
            if table.tobytes() == entry.tobytes():
                return row, codec
    raise KeyError("the plan is not of this join")


def _entries(row: PackedRow, segment: Segment) -> tuple[int, int, int]:
    """First source entry, first destination entry, number of entries."""
    ratio = int(row.table[0]["tokens_per_entry"])
    if not ratio:
        return 0, 0, 1
    _, _, src_token, dst_token, tokens = segment
    return src_token // ratio, dst_token // ratio, (src_token + tokens) // ratio - src_token // ratio


def vectors_of(row: PackedRow, segment: Segment) -> int:
    """How many vectors the row moves in a segment."""
    return _entries(row, segment)[2] * row.heads


def _addresses(
    row: PackedRow, side: str, quantity: Quantity, segment: Segment
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each vector: region, byte offsets of its codes, byte offsets of its scales."""
    table = row.table[0][side]
    block = segment[0 if side == "src" else 1]
    first = _entries(row, segment)[0 if side == "src" else 1]
    code_bytes, scale_bytes = (
        quantity.codec.code_bytes(quantity.dim),
        quantity.codec.scale_bytes(quantity.dim),
    )
    count = quantity.codec.blocks(quantity.dim)
    size = scale_bytes // count if count else 1
    run = code_bytes // int(table["channels"])
    byte, scale = np.arange(code_bytes), np.arange(scale_bytes)
    scale, within = scale // size, scale % size
    for entry in range(first, first + _entries(row, segment)[2]):
        for head in range(row.heads):
            start = [
                int(table[f"{p}offset"])
                + block * int(table[f"{p}block_stride"])
                + entry * int(table[f"{p}entry_stride"])
                + head * int(table[f"{p}head_stride"])
                for p in ("", "scale_")
            ]
            codes = start[0] + byte // run * int(table["channel_stride"]) + byte % run
            if quantity.scale_order is ScaleOrder.BY_FOUR:
                place = count // 4 * (scale % 4) + scale // 4
            elif quantity.scale_order is ScaleOrder.TOKENS_BY_FOUR:
                start[1] -= entry % 4 * int(table["scale_entry_stride"])
                place = 4 * scale + entry % 4
            else:
                place = scale
            yield int(table["region"]), codes, start[1] + place * size + within


def read_vectors(
    row: PackedRow, side: str, quantity: Quantity, segment: Segment, regions: Regions
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales ``[vectors, bytes]`` of one side ("src" or "dst") of a row, from its regions."""
    vectors = list(_addresses(row, side, quantity, segment))
    if not vectors:
        widths = quantity.codec.code_bytes(quantity.dim), quantity.codec.scale_bytes(quantity.dim)
        return np.zeros((0, widths[0]), np.uint8), np.zeros((0, widths[1]), np.uint8)
    return (
        np.stack([regions[region][codes] for region, codes, _ in vectors]),
        np.stack([regions[region][scales] for region, _, scales in vectors]),
    )


def write_vectors(
    row: PackedRow,
    side: str,
    quantity: Quantity,
    segment: Segment,
    regions: Regions,
    codes: np.ndarray,
    scales: np.ndarray,
) -> None:
    """The inverse of `read_vectors`."""
    for index, (region, code_at, scale_at) in enumerate(_addresses(row, side, quantity, segment)):
        regions[region][code_at] = codes[index]
        regions[region][scale_at] = scales[index]
