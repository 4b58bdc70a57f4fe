"""Rows: the strided copies of a plan that do not depend on block ids, as ``csrc/plan.h`` reads them."""

from __future__ import annotations

import numpy as np

from kvxfer.layout import Plane, Slice

WIRE_ALIGNMENT = 16
_MANY = 16  # entries of a block, at the least that engines use

ROW = np.dtype(
    [
        ("src_region", "<u4"),
        ("dst_region", "<u4"),
        ("src_offset", "<u8"),
        ("dst_offset", "<u8"),
        ("src_block_stride", "<u8"),
        ("dst_block_stride", "<u8"),
        ("src_entry_stride", "<u8"),
        ("dst_entry_stride", "<u8"),
        ("src_head_stride", "<u8"),
        ("dst_head_stride", "<u8"),
        ("src_channel_stride", "<u8"),
        ("dst_channel_stride", "<u8"),
        ("heads", "<u4"),
        ("channels", "<u4"),
        ("unit_bytes", "<u8"),
        ("tokens_per_entry", "<u4"),  # 0: the row is whole, one run of unit_bytes a block
        ("reserved", "<u4"),
    ]
)


def plane_problem(src: Plane, dst: Plane) -> tuple[str, str, str] | None:
    """Source, destination and why no row can copy one plane into the other; None when one can."""
    for name, ours, theirs in (
        ("dtype", src.dtype, dst.dtype),
        ("tokens per entry", src.tokens_per_entry, dst.tokens_per_entry),
        ("tiled", src.tiled, dst.tiled),
        ("heads of the model", src.all_heads, dst.all_heads),
        ("bytes of a head", src.channels * src.unit_bytes, dst.channels * dst.unit_bytes),
    ):
        if ours != theirs:
            return str(ours), str(theirs), f"{name} differ" if name.endswith("s") else f"{name} differs"
    if _common_unit(src, dst) is None:
        sides = (f"channels {plane.channels} x {plane.unit_bytes} bytes" for plane in (src, dst))
        return (*sides, "neither unit divides the other")
    return None


def _common_unit(src: Plane, dst: Plane) -> int | None:
    """The run of bytes that is contiguous on both sides, or None where one copy cannot express it."""
    src_unit, dst_unit = _contiguous_unit(src), _contiguous_unit(dst)
    unit = min(src_unit, dst_unit)
    total = src.channels * src.unit_bytes
    fits = all(u in (unit, total) for u in (src_unit, dst_unit)) and total % unit == 0
    return unit if fits else None


def _contiguous_unit(plane: Plane) -> int:
    dense = plane.channels == 1 or plane.channel_stride == plane.unit_bytes
    return plane.channels * plane.unit_bytes if dense else plane.unit_bytes


def whole_row(src: Slice, dst: Slice, nbytes: int, src_region: int, dst_region: int) -> np.void:
    """One run of `nbytes` a block."""
    row = np.zeros((), ROW)
    row["src_region"], row["dst_region"] = src_region, dst_region
    row["src_offset"], row["dst_offset"] = src.offset, dst.offset
    row["src_block_stride"], row["dst_block_stride"] = src.block_stride, dst.block_stride
    row["heads"] = row["channels"] = 1
    row["unit_bytes"] = nbytes
    return row[()]


def plane_row(
    src: Slice,
    src_plane: Plane,
    dst: Slice,
    dst_plane: Plane,
    heads: tuple[int, int],
    regions: tuple[int, int],
) -> np.void:
    """The heads ``low..high`` of the whole model, from one plane to the other."""
    low, high = heads
    unit = _common_unit(src_plane, dst_plane)
    channels = src_plane.channels * src_plane.unit_bytes // unit
    count = high - low
    row = np.zeros((), ROW)
    row["src_region"], row["dst_region"] = regions
    for side, piece, plane in (("src", src, src_plane), ("dst", dst, dst_plane)):
        row[f"{side}_offset"] = piece.offset + plane.offset + (low - plane.head_start) * plane.head_stride
        row[f"{side}_block_stride"] = piece.block_stride
        row[f"{side}_entry_stride"] = plane.entry_stride
        row[f"{side}_head_stride"] = plane.head_stride
        row[f"{side}_channel_stride"] = (
            plane.channel_stride
            if _contiguous_unit(plane) == unit < (plane.channels * plane.unit_bytes)
            else unit
        )
    row["unit_bytes"] = unit
    row["heads"] = count
    row["channels"] = channels
    row["tokens_per_entry"] = src_plane.tokens_per_entry
    return row[()]


def whole_head_rows(
    src: Slice,
    src_plane: Plane,
    dst: Slice,
    dst_plane: Plane,
    heads: tuple[int, int],
    regions: tuple[int, int],
) -> list[np.void] | None:
    """One run a head and block, where both planes keep a head's part of a block in one piece in the same order.

    None where they do not. Only between blocks of equally many tokens.
    """
    nbytes = _bytes_of_dense_head(dst_plane)
    if nbytes is None or _order_in_head(src_plane) != _order_in_head(dst_plane):
        return None
    rows = []
    for head in range(*heads):
        row = whole_row(src, dst, nbytes, *regions).copy()
        for side, plane in (("src", src_plane), ("dst", dst_plane)):
            row[f"{side}_offset"] += plane.offset + (head - plane.head_start) * plane.head_stride
        rows.append(row)
    return rows


def _order_in_head(plane: Plane) -> tuple[int, ...]:
    channel_stride = plane.channel_stride if plane.channels > 1 else plane.unit_bytes
    return plane.entries, plane.entry_stride, plane.channels, channel_stride, plane.unit_bytes


def _bytes_of_dense_head(plane: Plane) -> int | None:
    """Bytes of one head in a block, if they lie together."""
    entries, entry_stride, channels, channel_stride, unit = _order_in_head(plane)
    by_entry = channel_stride == unit and entry_stride == channels * unit
    by_channel = entry_stride == unit and channel_stride == entries * unit
    return entries * channels * unit if by_entry or by_channel else None


_NOT_COMPARED = (
    "src_offset",
    "dst_offset",
    "src_channel_stride",
    "dst_channel_stride",
    "unit_bytes",
    "reserved",
)
_SAME = tuple(name for name in ROW.names if name not in _NOT_COMPARED)


def fuse(row: np.void, following: np.void) -> np.void | None:
    """One row for two planes that lie side by side on both sides (the K and V of a content row), or None."""
    fits = (
        row["channels"] == 1
        and all(row[name] == following[name] for name in _SAME)
        and all(
            row[f"{side}_offset"] + row["unit_bytes"] == following[f"{side}_offset"]
            for side in ("src", "dst")
        )
    )
    if not fits:
        return None
    fused = row.copy()
    fused["unit_bytes"] += following["unit_bytes"]
    return fused


def fold_heads(row: np.void) -> np.void:
    """The row with heads that lie side by side on both sides as one unit."""
    dense = all(row[f"{side}_head_stride"] == row["unit_bytes"] for side in ("src", "dst"))
    if row["channels"] != 1 or not (dense or row["heads"] == 1):
        return row
    folded = row.copy()
    folded["unit_bytes"] *= row["heads"]
    folded["heads"] = 1
    return folded


def run_bytes(row: np.void) -> int:
    """Bytes that lie together on both sides; entries that follow each other count as a small block's."""
    unit = int(row["unit_bytes"])
    follow = row["heads"] == row["channels"] == 1 and row["tokens_per_entry"] > 0
    dense = follow and all(row[f"{side}_entry_stride"] == unit for side in ("src", "dst"))
    return _MANY * unit if dense else unit


def merge_whole_rows(rows: np.ndarray) -> np.ndarray:
    """Neighbouring whole rows that are contiguous on both sides, as one row each."""
    merged: list[np.ndarray] = []
    for row in rows:
        last = merged[-1] if merged else None
        if last is not None and _continues(last, row):
            last["unit_bytes"] += row["unit_bytes"]
        else:
            merged.append(np.array(row, ROW))
    return np.array([row[()] for row in merged], ROW)


def _continues(last: np.ndarray, row: np.void) -> bool:
    same = ("src_region", "dst_region", "src_block_stride", "dst_block_stride", "tokens_per_entry")
    return (
        row["tokens_per_entry"] == 0
        and all(last[name] == row[name] for name in same)
        and all(
            last[f"{side}_offset"] + last["unit_bytes"] == row[f"{side}_offset"] for side in ("src", "dst")
        )
    )
