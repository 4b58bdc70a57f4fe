"""From two cache layouts and two block lists, the strided copies of one transfer.

`join` compares layouts once, when two sides meet: it says what cannot be joined, or returns the *rows* (one strided
copy per layer, or per plane of a layer) that do not depend on block ids. `Join.plan` then takes the block lists of
one request and adds the *segments* (pairs of blocks). Kernels carry out every row for every segment; `csrc/plan.h`
is the same table in C.

Block lists are right-aligned: the last id is the block that holds the last token, so a list may leave out blocks at
the front (a prefix that the destination already holds, or what has slid out of a window).

Packed order: for each segment, for each row, its bytes dense in (entry, head, channel), each row on 16 bytes. Any
range of segments is one contiguous range of the packed buffer.

Imports NumPy, layout and errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvxfer.errors import InvalidBlocks, InvalidRequest, LayoutMismatch, UnknownGroup
from kvxfer.layout import CacheLayout, Group, GroupKind, Plane, Record, Slice

WIRE_ALIGNMENT = 16

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

BlockLists = Mapping[str, "Sequence[int] | np.ndarray"]


# --- joining two layouts ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JoinPart:
    """The rows between one source group and one destination group. `layers[i]` is the layer of ``rows[i]``."""

    src_group: Group
    dst_group: Group
    rows: np.ndarray
    layers: tuple[str, ...]
    merged: np.ndarray  # the same copies with neighbouring whole rows made one

    @property
    def tokenwise(self) -> bool:
        """Whether some row needs the token columns of the segments."""
        return bool((self.rows["tokens_per_entry"] > 0).any())


@dataclass(frozen=True, kw_only=True)
class Join:
    """What one source holds for one destination, ready for any block lists. Made by `join`."""

    source: int  # index in the list that was given to `join`
    src: CacheLayout
    dst: CacheLayout
    parts: tuple[JoinPart, ...]

    def plan(
        self, src_blocks: BlockLists, dst_blocks: BlockLists, *, tokens: int, layer: str | None = None
    ) -> TransferPlan:
        """The copies of one request of `tokens` tokens.

        Lists are ids per group, right-aligned (see the module); NumPy int arrays are taken without a Python loop.
        With `layer` the plan holds that layer only. Raises InvalidBlocks, UnknownGroup or InvalidRequest before
        anything is touched.
        """
        src_lists = check_blocks(self.src, src_blocks, tokens=tokens, role="source")
        dst_lists = check_blocks(self.dst, dst_blocks, tokens=tokens, role="destination")
        return self.plan_checked(src_lists, dst_lists, tokens=tokens, layer=layer)

    def plan_checked(
        self,
        src_lists: Mapping[str, np.ndarray],
        dst_lists: Mapping[str, np.ndarray],
        *,
        tokens: int,
        layer: str | None = None,
    ) -> TransferPlan:
        """`plan` for lists that `check_blocks` has returned."""
        parts = []
        for part in self.parts:
            rows = part.merged if layer is None else part.rows[[name == layer for name in part.layers]]
            if not len(rows):
                continue
            src_ids, dst_ids = src_lists[part.src_group.name], dst_lists[part.dst_group.name]
            segments = _segments(part, src_ids, dst_ids, tokens)
            if len(segments.src_block):
                parts.append(PlanPart(rows=rows, segments=segments))
        return TransferPlan(parts=tuple(parts), src_regions=len(self.src.regions), dst_regions=len(self.dst.regions))


def join(sources: Sequence[CacheLayout], dst: CacheLayout, *, first: int = 0) -> list[Join]:
    """How the sources together fill `dst`; sources with nothing to give are left out.

    Several sources are the ranks of one engine. Where more than one holds the same heads (replicated latents), the
    search starts at source `first`, so that destination ranks can spread over them.

    Raises LayoutMismatch, listing field by field what cannot be joined.
    """
    order = [(first + i) % len(sources) for i in range(len(sources))]
    rows: dict[tuple[int, str, str], list[tuple[np.void, str]]] = {}
    problems: list[str] = []
    for dst_group in dst.groups:
        for dst_slice in dst_group.slices:
            candidates = [
                (index, *found)
                for index in order
                for found in _find_layer(sources[index], dst_slice.layer, dst.record(dst_slice.record), dst_group)
            ]
            if not candidates:
                problems.append(f"layer {dst_slice.layer!r}: the destination has it, no source does")
                continue
            found = _join_slice(sources, candidates, dst, dst_group, dst_slice)
            if isinstance(found, str):
                problems.append(found)
                continue
            for index, src_group, row in found:
                rows.setdefault((index, src_group, dst_group.name), []).append((row, dst_slice.layer))
    if problems:
        raise LayoutMismatch(_listing("the layouts cannot be joined", problems))
    parts: dict[int, list[JoinPart]] = {}
    for (index, src_name, dst_name), named in rows.items():
        table = np.array([row for row, _ in named], dtype=ROW)
        parts.setdefault(index, []).append(
            JoinPart(
                src_group=sources[index].group(src_name),
                dst_group=dst.group(dst_name),
                rows=table,
                layers=tuple(layer for _, layer in named),
                merged=_merge_whole_rows(table),
            )
        )
    return [Join(source=i, src=sources[i], dst=dst, parts=tuple(parts[i])) for i in sorted(parts)]


def _listing(title: str, lines: Sequence[str], limit: int = 20) -> str:
    shown = "".join(f"\n  - {line}" for line in lines[:limit])
    more = f"\n  - and {len(lines) - limit} more" if len(lines) > limit else ""
    return f"{title}:{shown}{more}"


def _find_layer(
    layout: CacheLayout, layer: str, wanted: Record, dst_group: Group
) -> Iterator[tuple[Group, Slice, Record]]:
    """Slices of a layer whose record shares planes with `wanted` (or equals it)."""
    names = {plane.name for plane in wanted.planes}
    for group in layout.groups:
        for piece in group.slices:
            if piece.layer != layer:
                continue
            record = layout.record(piece.record)
            if record == wanted or names & {plane.name for plane in record.planes} or not names:
                yield group, piece, record


def _join_slice(
    sources: Sequence[CacheLayout],
    candidates: Sequence[tuple[int, Group, Slice, Record]],
    dst: CacheLayout,
    dst_group: Group,
    dst_slice: Slice,
) -> list[tuple[int, str, np.void]] | str:
    """Rows that fill one destination slice, or a line that says why that is not possible."""
    layer = f"layer {dst_slice.layer!r}"
    wanted = dst.record(dst_slice.record)
    for index, group, piece, record in candidates:
        if record == wanted and group.block_tokens == dst_group.block_tokens and group.kind is dst_group.kind:
            regions = _region_index(sources[index], piece), _region_index(dst, dst_slice)
            return [(index, group.name, _whole_row(piece, dst_slice, wanted.nbytes, *regions))]
    kinds = {group.kind for _, group, _, _ in candidates}
    if kinds != {dst_group.kind}:
        found = ", ".join(sorted(kind.value for kind in kinds))
        return f"{layer}: group kind: source {found}, destination {dst_group.kind.value}"
    if not wanted.planes:
        tags = ", ".join(sorted({record.tag for _, _, _, record in candidates}))
        return f"{layer}: record: source {tags}, destination {wanted.tag}, which is opaque: only an equal record fits"
    if dst_group.kind is GroupKind.RING:
        capacities = sorted({group.block_tokens for _, group, _, _ in candidates})
        return f"{layer}: ring capacity: source {capacities}, destination {dst_group.block_tokens}"
    rows: list[tuple[int, str, np.void]] = []
    for plane in wanted.planes:
        found = _join_plane(sources, candidates, dst, dst_slice, plane)
        if isinstance(found, str):
            return f"{layer}: plane {plane.name!r}: {found}"
        rows += found
    return rows


def _join_plane(
    sources: Sequence[CacheLayout],
    candidates: Sequence[tuple[int, Group, Slice, Record]],
    dst: CacheLayout,
    dst_slice: Slice,
    plane: Plane,
) -> list[tuple[int, str, np.void]] | str:
    rows = []
    missing = [(plane.head_start, plane.head_start + plane.heads)]
    seen = []
    for index, group, piece, record in candidates:
        for src_plane in record.planes:
            if src_plane.name != plane.name:
                continue
            problem = _plane_problem(src_plane, plane)
            if problem:
                return problem
            seen.append(f"{src_plane.head_start}..{src_plane.head_start + src_plane.heads}")
            left = []
            for first, last in missing:
                low, high = max(first, src_plane.head_start), min(last, src_plane.head_start + src_plane.heads)
                if low >= high:
                    left.append((first, last))
                    continue
                regions = _region_index(sources[index], piece), _region_index(dst, dst_slice)
                rows.append((index, group.name, _plane_row(piece, src_plane, dst_slice, plane, (low, high), regions)))
                left += [(a, b) for a, b in ((first, low), (high, last)) if a < b]
            missing = left
    if not seen:
        return "no source has it"
    if missing:
        lacking = ", ".join(f"{a}..{b}" for a, b in missing)
        return f"heads {lacking} are wanted, the sources hold {', '.join(seen)}"
    return rows


def _plane_problem(src: Plane, dst: Plane) -> str | None:
    for name, ours, theirs in (
        ("dtype", src.dtype, dst.dtype),
        ("tokens per entry", src.tokens_per_entry, dst.tokens_per_entry),
        ("heads of the model", src.all_heads, dst.all_heads),
        ("bytes of a head", src.channels * src.unit_bytes, dst.channels * dst.unit_bytes),
    ):
        if ours != theirs:
            return f"{name}: source {ours}, destination {theirs}"
    if _common_unit(src, dst) is None:
        return (
            f"channels: source {src.channels} x {src.unit_bytes} bytes, destination {dst.channels} x "
            f"{dst.unit_bytes}: neither divides the other"
        )
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


def _region_index(layout: CacheLayout, piece: Slice) -> int:
    return [region.name for region in layout.regions].index(piece.region)


def _whole_row(src: Slice, dst: Slice, nbytes: int, src_region: int, dst_region: int) -> np.void:
    row = np.zeros((), ROW)
    row["src_region"], row["dst_region"] = src_region, dst_region
    row["src_offset"], row["dst_offset"] = src.offset, dst.offset
    row["src_block_stride"], row["dst_block_stride"] = src.block_stride, dst.block_stride
    row["heads"] = row["channels"] = 1
    row["unit_bytes"] = nbytes
    return row[()]


def _plane_row(
    src: Slice, src_plane: Plane, dst: Slice, dst_plane: Plane, heads: tuple[int, int], regions: tuple[int, int]
) -> np.void:
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
        row[f"{side}_channel_stride"] = plane.channel_stride if _contiguous_unit(plane) == unit < (
            plane.channels * plane.unit_bytes
        ) else unit
    dense_heads = channels == 1 and all(p.head_stride == unit or count == 1 for p in (src_plane, dst_plane))
    row["unit_bytes"] = unit * count if dense_heads else unit
    row["heads"] = 1 if dense_heads else count
    row["channels"] = channels
    row["tokens_per_entry"] = src_plane.tokens_per_entry
    return row[()]


def _merge_whole_rows(rows: np.ndarray) -> np.ndarray:
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
        and all(last[f"{side}_offset"] + last["unit_bytes"] == row[f"{side}_offset"] for side in ("src", "dst"))
    )


# --- block lists --------------------------------------------------------------------------------------------


def check_blocks(layout: CacheLayout, blocks: BlockLists, *, tokens: int, role: str) -> dict[str, np.ndarray]:
    """The lists as contiguous int32 arrays, checked against the layout.

    `role` is "source" or "destination". Sources must hold every needed token; destinations may leave out a prefix
    but must not name a block twice. Raises UnknownGroup, InvalidBlocks or InvalidRequest.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)) or tokens < 0:
        raise InvalidRequest(f"tokens must be an integer of 0 or more, got {tokens!r}")
    known = {group.name for group in layout.groups}
    if not isinstance(blocks, Mapping):
        raise InvalidRequest(f"block lists must be a mapping from group name to block ids, got {type(blocks).__name__}")
    if blocks.keys() != known:
        unknown, missing = sorted(blocks.keys() - known), sorted(known - blocks.keys())
        parts = ([f"unknown {unknown}"] if unknown else []) + ([f"missing {missing}"] if missing else [])
        raise UnknownGroup(f"the layout's groups are {sorted(known)}; the {role} block lists have {', '.join(parts)}")
    return {group.name: _check_list(group, blocks[group.name], int(tokens), role) for group in layout.groups}


def _check_list(group: Group, ids: Sequence[int] | np.ndarray, tokens: int, role: str) -> np.ndarray:
    where = f"group {group.name!r}, {role} blocks"
    try:
        given = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise InvalidBlocks(f"{where}: expected a flat list of integers") from error
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise InvalidBlocks(f"{where}: expected a flat list of integers, got {given.dtype} of shape {given.shape}")
    needed = group.blocks_for(tokens)
    if len(given) > needed:
        raise InvalidBlocks(f"{where}: {tokens} tokens lie in {needed} blocks, got a list of {len(given)}")
    if role == "source":
        first = 0 if group.block_tokens == 0 else group.first_needed_token(tokens) // group.block_tokens
        least = needed - first if group.kind is GroupKind.SLIDING else needed
        if len(given) < least:
            raise InvalidBlocks(
                f"{where}: {tokens} tokens need the last {least} blocks of {needed}, got a list of {len(given)}"
            )
    if given.size and not 0 <= int(given.min()) <= int(given.max()) < group.num_blocks:
        bad = given[(given < 0) | (given >= group.num_blocks)][0]
        raise InvalidBlocks(f"{where}: block ids are 0 to {group.num_blocks - 1}, got {bad}")
    checked = np.ascontiguousarray(given, np.int32)
    if role == "destination" and _has_duplicates(checked, group.num_blocks):
        values, counts = np.unique(checked, return_counts=True)
        raise InvalidBlocks(f"{where}: block {values[counts > 1][0]} stands more than once")
    return checked


def _has_duplicates(ids: np.ndarray, num_blocks: int) -> bool:
    if len(ids) * 64 < num_blocks:
        return len(np.unique(ids)) < len(ids)
    seen = np.zeros(num_blocks, np.bool_)
    seen[ids] = True
    return int(np.count_nonzero(seen)) < len(ids)


# --- the plan of one request --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Pairs of blocks, one column an int32 array. The token columns are None where every row is whole."""

    src_block: np.ndarray
    dst_block: np.ndarray
    src_token: np.ndarray | None = None
    dst_token: np.ndarray | None = None
    tokens: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A range of a part's segments, and where it lies in the packed order of that part."""

    part: int
    first: int
    count: int
    wire_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanPart:
    """Rows x segments. Arrays are contiguous and must not be changed: kernels hold their addresses."""

    rows: np.ndarray
    segments: Segments
    wire_bytes: int = field(init=False)  # of one segment, where all are alike; else 0
    wire_start: np.ndarray | None = field(init=False)  # int64 [segments + 1], where they are not
    nbytes: int = field(init=False)  # bytes moved, without alignment

    def __post_init__(self) -> None:
        count = len(self.segments.src_block)
        if self.segments.tokens is None:
            sizes = self.rows["unit_bytes"].astype(np.int64)
            object.__setattr__(self, "wire_bytes", int(_align(sizes).sum()))
            object.__setattr__(self, "wire_start", None)
            object.__setattr__(self, "nbytes", int(sizes.sum()) * count)
            return
        # Few shapes (token spans) stand for many segments: sizes are worked out once a shape.
        spans = np.stack([self.segments.src_token, self.segments.tokens], axis=1)
        shapes, index = np.unique(spans, axis=0, return_inverse=True)
        sizes = np.array([[_row_bytes(row, *shape) for row in self.rows] for shape in shapes.tolist()], np.int64)
        index = index.reshape(-1)
        starts = np.zeros(count + 1, np.int64)
        np.cumsum(_align(sizes).sum(axis=1)[index], out=starts[1:])
        object.__setattr__(self, "wire_bytes", 0)
        object.__setattr__(self, "wire_start", starts)
        object.__setattr__(self, "nbytes", int(sizes.sum(axis=1)[index].sum()))

    def __len__(self) -> int:
        return len(self.segments.src_block)

    def packed_start(self, segment: int) -> int:
        """Byte offset of a segment in the packed order; ``packed_start(len(self))`` is the whole size."""
        return segment * self.wire_bytes if self.wire_start is None else int(self.wire_start[segment])

    @property
    def largest_segment_bytes(self) -> int:
        """The least staging that one chunk of this part needs."""
        return self.wire_bytes if self.wire_start is None else int(np.diff(self.wire_start).max())


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """The strided copies of one transfer. Immutable; keeps its arrays alive."""

    parts: tuple[PlanPart, ...]
    src_regions: int
    dst_regions: int

    @property
    def nbytes(self) -> int:
        """Bytes of cache that move, without alignment."""
        return sum(part.nbytes for part in self.parts)

    @property
    def wire_bytes(self) -> int:
        """Bytes of the packed form, alignment included."""
        return sum(part.packed_start(len(part)) for part in self.parts)

    @property
    def copies(self) -> int:
        """Rows x segments: what an engine would hand to a transport one by one."""
        return sum(len(part.rows) * len(part) for part in self.parts)

    @property
    def largest_segment_bytes(self) -> int:
        """The least staging that one chunk of this plan needs."""
        return max((part.largest_segment_bytes for part in self.parts), default=0)

    def chunks(self, max_bytes: int) -> Iterator[Chunk]:
        """The plan cut into ranges of segments of at most `max_bytes` packed bytes, in packed order.

        A segment is never cut: one that is larger than `max_bytes` makes a chunk of its own.
        """
        for number, part in enumerate(self.parts):
            first = 0
            while first < len(part):
                last = self._chunk_end(part, first, max_bytes)
                size = part.packed_start(last) - part.packed_start(first)
                yield Chunk(part=number, first=first, count=last - first, wire_bytes=size)
                first = last

    @staticmethod
    def _chunk_end(part: PlanPart, first: int, max_bytes: int) -> int:
        if part.wire_start is None:
            return min(len(part), first + max(1, max_bytes // part.wire_bytes))
        limit = part.packed_start(first) + max_bytes
        return max(first + 1, int(np.searchsorted(part.wire_start, limit, side="right")) - 1)

    def runs(self, src_bases: np.ndarray, dst_bases: np.ndarray) -> np.ndarray:
        """The plan as flat runs, uint64 ``[n, 3]`` of source address, destination address, bytes.

        Runs that continue each other on both sides are one. For transports that take descriptors.
        """
        pieces = [_part_runs(part, src_bases, dst_bases) for part in self.parts]
        return _merge_runs(np.concatenate(pieces)) if pieces else np.empty((0, 3), np.uint64)


def _align(sizes: np.ndarray) -> np.ndarray:
    return (sizes + WIRE_ALIGNMENT - 1) // WIRE_ALIGNMENT * WIRE_ALIGNMENT


def _row_bytes(row: np.void, src_token: int, tokens: int) -> int:
    ratio = int(row["tokens_per_entry"])
    entries = (src_token + tokens) // ratio - src_token // ratio if ratio else 1
    return entries * int(row["heads"]) * int(row["channels"]) * int(row["unit_bytes"])


def _segments(part: JoinPart, src: np.ndarray, dst: np.ndarray, tokens: int) -> Segments:
    src_group, dst_group = part.src_group, part.dst_group
    if dst_group.kind in (GroupKind.RING, GroupKind.STATE):
        count = min(len(src), len(dst))
        if not part.tokenwise:
            return Segments(src_block=src[:count], dst_block=dst[:count])
        zeros = np.zeros(count, np.int32)
        span = np.full(count, dst_group.block_tokens or 1, np.int32)
        return Segments(src_block=src[:count], dst_block=dst[:count], src_token=zeros, dst_token=zeros, tokens=span)
    src_size, dst_size = src_group.block_tokens, dst_group.block_tokens
    src_first = max(0, src_group.blocks_for(tokens) - len(src)) * src_size
    dst_first = max(0, dst_group.blocks_for(tokens) - len(dst)) * dst_size
    start = dst_first if len(dst) else tokens
    if src_first > start:
        needed = max(start, dst_group.first_needed_token(tokens))
        if src_first > needed:
            raise InvalidBlocks(
                f"group {dst_group.name!r}: the destination needs tokens from {needed} on, the source's list starts "
                f"at token {src_first}"
            )
        start = src_first
    if src_size == dst_size and not part.tokenwise:
        count = min(len(src), len(dst))
        return Segments(src_block=src[len(src) - count :], dst_block=dst[len(dst) - count :])
    edges = np.unique(
        np.concatenate(
            [
                np.arange(-(-start // src_size) * src_size, tokens, src_size),
                np.arange(-(-start // dst_size) * dst_size, tokens, dst_size),
                np.array([start, tokens]),
            ]
        )
    )
    edges = edges[(edges >= start) & (edges <= tokens)]
    begin, length = edges[:-1], np.diff(edges)
    return Segments(
        src_block=src[(begin - src_first) // src_size],
        dst_block=dst[(begin - dst_first) // dst_size],
        src_token=(begin % src_size).astype(np.int32),
        dst_token=(begin % dst_size).astype(np.int32),
        tokens=length.astype(np.int32),
    )


def _part_runs(part: PlanPart, src_bases: np.ndarray, dst_bases: np.ndarray) -> np.ndarray:
    """Runs of one part, segment by segment, row by row."""
    columns = []
    segments = part.segments
    order = []
    for number, row in enumerate(part.rows):
        ratio = int(row["tokens_per_entry"])
        if ratio:
            src_entry, dst_entry = segments.src_token // ratio, segments.dst_token // ratio
            entries = (segments.src_token + segments.tokens) // ratio - src_entry
        else:
            src_entry = dst_entry = np.zeros(len(part), np.int32)
            entries = np.ones(len(part), np.int32)
        which = np.repeat(np.arange(len(part)), entries)
        entry = np.arange(len(which)) - np.repeat(np.cumsum(entries) - entries, entries)
        head, channel = np.divmod(np.arange(int(row["heads"]) * int(row["channels"])), int(row["channels"]))
        sides = []
        for side, bases, block, first in (
            ("src", src_bases, segments.src_block, src_entry),
            ("dst", dst_bases, segments.dst_block, dst_entry),
        ):
            at_entry = (
                block[which].astype(np.uint64) * row[f"{side}_block_stride"]
                + (first[which] + entry).astype(np.uint64) * row[f"{side}_entry_stride"]
                + row[f"{side}_offset"]
                + bases[int(row[f"{side}_region"])]
            )
            inner = (
                head.astype(np.uint64) * row[f"{side}_head_stride"]
                + channel.astype(np.uint64) * row[f"{side}_channel_stride"]
            )
            sides.append((at_entry[:, None] + inner).ravel())
        columns.append(np.stack([*sides, np.full(len(sides[0]), row["unit_bytes"], np.uint64)], axis=1))
        order.append(np.repeat(which, len(head)) * len(part.rows) + number)
    runs = np.concatenate(columns)
    return runs[np.argsort(np.concatenate(order), kind="stable")]


def _merge_runs(runs: np.ndarray) -> np.ndarray:
    if len(runs) < 2:
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:]
    starts = np.concatenate(([True], (ends != runs[1:, :2]).any(axis=1)))
    index = np.flatnonzero(starts)
    merged = runs[index].copy()
    merged[:, 2] = np.add.reduceat(runs[:, 2], index)
    return merged
