"""The plan of one request: rows x segments, its packed order, and the same as flat runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from kvxfer.plan.rows import WIRE_ALIGNMENT

_COUNTED = 256  # blocks, to learn how many runs a plan has


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
            wire_bytes, nbytes = _whole_bytes(self.rows["unit_bytes"].tobytes())
            object.__setattr__(self, "wire_bytes", wire_bytes)
            object.__setattr__(self, "wire_start", None)
            object.__setattr__(self, "nbytes", nbytes * count)
            return
        # Few shapes (token spans) stand for many segments: sizes are worked out once a shape.
        spans = self.segments.src_token.astype(np.int64) << 32 | self.segments.tokens
        shapes, index = distinct(spans)
        sizes = _row_bytes(self.rows, shapes >> 32, shapes & 0xFFFFFFFF)
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

        A segment is never cut: one that is larger than `max_bytes` makes a chunk of its own. Segments without bytes
        (of fewer tokens than an entry stands for) make none.
        """
        for number, part in enumerate(self.parts):
            first = 0
            while first < len(part):
                last = self._chunk_end(part, first, max_bytes)
                size = part.packed_start(last) - part.packed_start(first)
                if size:
                    yield Chunk(part=number, first=first, count=last - first, wire_bytes=size)
                first = last

    @staticmethod
    def _chunk_end(part: PlanPart, first: int, max_bytes: int) -> int:
        if part.wire_start is None:
            return min(len(part), first + max(1, max_bytes // part.wire_bytes))
        limit = part.packed_start(first) + max_bytes
        return max(first + 1, int(part.wire_start.searchsorted(limit, "right")) - 1)

    def runs(self, src_bases: np.ndarray, dst_bases: np.ndarray) -> np.ndarray:
        """The plan as flat runs, uint64 ``[n, 3]`` of source address, destination address, bytes.

        In order of source addresses; runs that continue each other on both sides are one, be it blocks that lie side
        by side or layers within a block. For transports that take descriptors.
        """
        pieces = [_part_runs(part, src_bases, dst_bases) for part in self.parts]
        return _merge_runs(np.concatenate(pieces)) if pieces else np.empty((0, 3), np.uint64)

    def run_count(self) -> int:
        """About how many runs there are: counted for the first blocks of every part, and taken to go on like that."""
        return sum(_run_count(part) for part in self.parts)


def _run_count(part: PlanPart) -> int:
    if not len(part):
        return 0
    segments = Segments(
        **{name: None if column is None else column[:_COUNTED] for name, column in vars(part.segments).items()}
    )
    regions = 1 + max(int(part.rows["src_region"].max()), int(part.rows["dst_region"].max()))
    apart = np.arange(regions, dtype=np.uint64) << np.uint64(48)
    counted = len(_merge_runs(_part_runs(PlanPart(rows=part.rows, segments=segments), apart, apart)))
    return -(-counted * len(part) // len(segments.src_block))


def distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values, and the index of each value among them: `np.unique`, fast where neighbours are equal."""
    starts = np.flatnonzero(values[1:] != values[:-1]) + 1
    if not len(starts):
        return values[:1], np.zeros(len(values), np.intp)
    if 2 * len(starts) > len(values):
        found, index = np.unique(values, return_inverse=True)
        return found, index
    bounds = np.concatenate(([0], starts, [len(values)]))
    found, index = np.unique(values[bounds[:-1]], return_inverse=True)
    return found, np.repeat(index, bounds[1:] - bounds[:-1])


def together(chunks: Iterable[Chunk], max_bytes: int) -> Iterator[list[Chunk]]:
    """Neighbouring chunks, of whatever parts, in lists of at most `max_bytes`: what one launch may carry out.

    A chunk that is larger is alone.
    """
    taken: list[Chunk] = []
    nbytes = 0
    for chunk in chunks:
        if taken and nbytes + chunk.wire_bytes > max_bytes:
            yield taken
            taken, nbytes = [], 0
        taken.append(chunk)
        nbytes += chunk.wire_bytes
    if taken:
        yield taken


def _align(sizes: np.ndarray) -> np.ndarray:
    return (sizes + WIRE_ALIGNMENT - 1) // WIRE_ALIGNMENT * WIRE_ALIGNMENT


@lru_cache(maxsize=256)
def _whole_bytes(units: bytes) -> tuple[int, int]:
    """Packed and plain bytes of a segment of whole rows, from their sizes; the same for every request of a join."""
    sizes = np.frombuffer(units, "<u8").astype(np.int64)
    return int(_align(sizes).sum()), int(sizes.sum())


def most_segment_bytes(rows: np.ndarray, tokens: int) -> int:
    """Packed bytes of a segment of so many tokens, at most: an entry counts of which only some tokens are there."""
    ratio = rows["tokens_per_entry"].astype(np.int64)
    entries = np.where(ratio > 0, -(-tokens // np.maximum(ratio, 1)), 1)
    return int(_align(entries * _entry_bytes(rows)).sum())


def _row_bytes(rows: np.ndarray, src_token: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Bytes of every row (columns) for every token span (lines), int64."""
    ratio = rows["tokens_per_entry"].astype(np.int64)
    first, last = src_token[:, None], (src_token + tokens)[:, None]
    entries = np.where(ratio > 0, last // np.maximum(ratio, 1) - first // np.maximum(ratio, 1), 1)
    return entries * _entry_bytes(rows)


def _entry_bytes(rows: np.ndarray) -> np.ndarray:
    """Bytes of one entry of every row, int64."""
    return rows["heads"].astype(np.int64) * rows["channels"] * rows["unit_bytes"].astype(np.int64)


def _part_runs(part: PlanPart, src_bases: np.ndarray, dst_bases: np.ndarray) -> np.ndarray:
    """Runs of one part, row by row."""
    columns = []
    segments = part.segments
    for row in part.rows:
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
    return np.concatenate(columns)


def _merge_runs(runs: np.ndarray) -> np.ndarray:
    if len(runs) < 2:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = runs[:-1, :2] + runs[:-1, 2:]
    starts = np.concatenate(([True], (ends != runs[1:, :2]).any(axis=1)))
    index = np.flatnonzero(starts)
    merged = runs[index].copy()
    merged[:, 2] = np.add.reduceat(runs[:, 2], index)
    return merged
