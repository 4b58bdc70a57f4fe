"""The plan of a packed transfer: cache blocks to wire bytes and back, with a format in between.

`join_packed` compares layouts once, when two sides meet; `PackedJoin.plan` adds the block lists of one
request. Packing needs the source's block ids and unpacking the destination's; of the other side only the
number of blocks must be known, so each end can make the same plan, with the same chunks at the same offsets,
from what it has.

Packed order: for each segment (pair of blocks), for each row (quantity of a layer), the codes of its vectors
dense in (entry, head) on 16 bytes, then their scales dense in (entry, head) on 16 bytes. Tokens that the
format leaves raw make segments of their own, before and after. A plan that converts and compresses nothing is
a `TransferPlan` inside, in that plan's order and executed by the plain kernels.

Imports NumPy, msgspec, layout, plan, errors and the formats.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from kvxfer.errors import LayoutMismatch
from kvxfer.formats.checksums import Checksum
from kvxfer.formats.codec import Codec
from kvxfer.formats.header import ChunkHeader
from kvxfer.formats.rows import PACKED_ROW, PackedRow, Scales, packed_rows
from kvxfer.formats.wire import WireFormat, parse
from kvxfer.layout import CacheLayout, Group
from kvxfer.plan import WIRE_ALIGNMENT, Chunk, Join, Segments, TransferPlan, check_blocks, distinct, join
from kvxfer.plan.blocks import stand_in_blocks
from kvxfer.plan.segments import most_segments, segments_for

Blocks = Mapping[str, "Sequence[int] | np.ndarray | int"]
"""Block ids by group, or only their number where the ids are the other end's business."""


@dataclass(frozen=True, kw_only=True)
class PackedPart:
    """Rows x segments with one wire codec a row. Arrays must not be changed: kernels hold their addresses."""

    rows: np.ndarray  # PACKED_ROW
    segments: Segments
    wire_start: np.ndarray  # int64 [segments + 1]
    nbytes: int  # of the source cache

    def __len__(self) -> int:
        return len(self.segments.src_block)

    def packed_start(self, segment: int) -> int:
        """Byte offset of a segment in the packed order of this part."""
        return int(self.wire_start[segment])


@dataclass(frozen=True, kw_only=True)
class PackedPlan:
    """One transfer in a wire format. Immutable; keeps its arrays alive.

    `raw` is set instead of `parts` where nothing is converted. `plan_id` and `layout_tag` go into chunk
    headers.
    """

    wire: WireFormat
    parts: tuple[PackedPart, ...]
    raw: TransferPlan | None
    plan_id: int
    layout_tag: int
    packs: bool  # source block ids are known
    unpacks: bool  # destination block ids are known

    @property
    def nbytes(self) -> int:
        """Bytes of source cache that move, without alignment."""
        return self.raw.nbytes if self.raw is not None else sum(part.nbytes for part in self.parts)

    @property
    def wire_bytes(self) -> int:
        """Bytes of the packed form, alignment included, chunk headers not."""
        if self.raw is not None:
            return self.raw.wire_bytes
        return sum(part.packed_start(len(part)) for part in self.parts)

    @property
    def copies(self) -> int:
        """Rows x segments, as of `TransferPlan`."""
        return self.raw.copies if self.raw is not None else sum(len(part.rows) * len(part) for part in self.parts)

    @property
    def largest_segment_bytes(self) -> int:
        """The least staging that one chunk of this plan needs."""
        if self.raw is not None:
            return self.raw.largest_segment_bytes
        return max((int(np.diff(part.wire_start).max()) for part in self.parts), default=0)

    def chunks(self, max_bytes: int) -> Iterator[Chunk]:
        """The plan cut into ranges of segments of at most `max_bytes` packed bytes, in packed order.

        A segment is never cut: one that is larger than `max_bytes` makes a chunk of its own. Segments without bytes
        (of fewer tokens than an entry stands for) make none.
        """
        if self.raw is not None:
            yield from self.raw.chunks(max_bytes)
            return
        for number, part in enumerate(self.parts):
            first = 0
            while first < len(part):
                limit = part.packed_start(first) + max_bytes
                last = max(first + 1, int(part.wire_start.searchsorted(limit, "right")) - 1)
                size = part.packed_start(last) - part.packed_start(first)
                if size:
                    yield Chunk(part=number, first=first, count=last - first, wire_bytes=size)
                first = last

    def header(self, index: int, chunk: Chunk, checksum: Checksum | None = None) -> ChunkHeader:
        """The header of the chunk that stands at `index` in `chunks`."""
        return ChunkHeader(
            wire=self.wire,
            plan_id=self.plan_id,
            layout_tag=self.layout_tag,
            chunk=index,
            payload_bytes=chunk.wire_bytes,
            checksum=checksum,
        )


@dataclass(frozen=True, kw_only=True)
class PackedJoin:
    """What one source holds for one destination, in one wire format. Made by `join_packed`."""

    source: int  # index in the list that was given to `join_packed`
    src: CacheLayout
    dst: CacheLayout
    wire: WireFormat
    rows: tuple[PackedRow, ...]
    plain: Join | None  # set where nothing is converted
    missing: tuple[str, ...] = ()  # destination layers that no source has

    @cached_property
    def layout_tag(self) -> int:
        """64 bits of a digest of both layouts."""
        return _digest(msgspec.json.encode([self.src.unbound(), self.dst.unbound()]))

    def plan(self, src_blocks: Blocks, dst_blocks: Blocks, *, tokens: int, layer: str | None = None) -> PackedPlan:
        """The plan of one request of `tokens` tokens; see `kvxfer.plan.Join.plan` for block lists and errors.

        A number of blocks may stand for a list: then the plan cannot pack, or unpack.
        """
        packs, unpacks = (not any(_is_count(v) for v in lists.values()) for lists in (src_blocks, dst_blocks))
        src, dst = (
            check_blocks(layout, lists, tokens=tokens, role=role)
            if known
            else stand_in_blocks(layout, lists, tokens=tokens)
            for layout, lists, role, known in (
                (self.src, src_blocks, "source", packs),
                (self.dst, dst_blocks, "destination", unpacks),
            )
        )
        counts = [[(name, len(ids)) for name, ids in sorted(lists.items())] for lists in (src, dst)]
        identity = _digest(msgspec.json.encode([self.layout_tag, str(self.wire), tokens, layer, *counts]))
        raw, parts = None, ()
        if self.plain is not None:
            raw = self.plain.plan_checked(src, dst, tokens=tokens, layer=layer)
        else:
            parts = tuple(self._parts(src, dst, tokens, layer))
        return PackedPlan(
            wire=self.wire,
            parts=parts,
            raw=raw,
            plan_id=identity,
            layout_tag=self.layout_tag,
            packs=packs,
            unpacks=unpacks,
        )

    def most_bytes(self, dst_counts: Mapping[str, int], *, tokens: int) -> tuple[int, int]:
        """At most how many packed bytes a plan into so many blocks of each group has, and one segment of it.

        Known without a plan: a side that lends staging can ask for chunks first, and plan while they are packed.
        """
        if self.plain is not None:
            return self.plain.most_bytes(dst_counts, tokens=tokens)
        whole = largest = 0
        first, last = self.wire.first_tokens, self.wire.last_tokens
        for batch in self._batches_of(None):
            count, span = most_segments(batch.src_group, batch.dst_group, dst_counts[batch.dst_group.name], tokens)
            if not count:
                continue
            packed = _segment_bytes(batch.packed, 0, span, partial=True)[0]
            whole, largest = whole + count * packed, max(largest, packed)
            if batch.coded and (first or last):  # which go raw, and cut two segments more
                raw = _segment_bytes(batch.plain, 0, min(span, max(first, last)), partial=True)[0]
                whole, largest = whole + 2 * packed + min(count + 2, first + last) * raw, max(largest, raw)
        return whole, largest

    def _parts(
        self, src: Mapping[str, np.ndarray], dst: Mapping[str, np.ndarray], tokens: int, layer: str | None
    ) -> Iterator[PackedPart]:
        for batch in self._batches_of(layer):
            ids = src[batch.src_group.name], dst[batch.dst_group.name]
            tile = 0 if batch.whole else 1
            segments = segments_for(batch.src_group, batch.dst_group, *ids, tokens, tile=tile)
            if segments is None or not len(segments.src_block):
                continue
            first, last = (self.wire.first_tokens, self.wire.last_tokens) if batch.coded else (0, 0)
            for piece, raw in _split(_with_tokens(segments), tokens, first, last):
                yield _part(batch.plain if raw else batch.packed, piece)

    def _batches_of(self, layer: str | None) -> tuple[_Batch, ...]:
        """The rows of a layer, or all, by pair of groups: made once, whatever the blocks."""
        found = self._batches.get(layer)
        if found is None:
            groups: dict[tuple[str, str, bool], list[PackedRow]] = {}
            for row in self.rows:
                if layer is None or row.layer == layer:
                    whole = bool(row.table[0]["tokens_per_entry"] == 0)
                    groups.setdefault((row.src_group.name, row.dst_group.name, whole), []).append(row)
            found = self._batches[layer] = tuple(
                _Batch(
                    src_group=rows[0].src_group,
                    dst_group=rows[0].dst_group,
                    whole=whole,
                    coded=any(row.wire != row.plain for row in rows),
                    packed=_Rows.of(rows, plain=False),
                    plain=_Rows.of(rows, plain=True),
                )
                for (_, _, whole), rows in groups.items()
            )
        return found

    @cached_property
    def _batches(self) -> dict[str | None, tuple[_Batch, ...]]:
        return {}


@dataclass(frozen=True)
class _Rows:
    """Rows that share their segments, and how many there are of each kind: few, and their sizes are what counts."""

    table: np.ndarray  # PACKED_ROW
    kinds: tuple[tuple[tuple[int, int, int, Codec, Codec], int], ...]  # tokens an entry, heads, dim, wire, source

    @classmethod
    def of(cls, rows: Sequence[PackedRow], *, plain: bool) -> _Rows:
        """The rows' tables and kinds in the wire format, or in the plain one."""
        table = np.array([row.table[1 if plain else 0] for row in rows], PACKED_ROW)
        kinds = Counter(
            (
                row.tokens_per_entry if entry["tokens_per_entry"] else 0,
                row.heads,
                row.src.dim,
                row.plain if plain else row.wire,
                row.src.codec,
            )
            for entry, row in zip(table, rows, strict=True)
        )
        return cls(table, tuple(kinds.items()))


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """All rows of one pair of groups."""

    src_group: Group
    dst_group: Group
    whole: bool  # blocks move whole, without tokens
    coded: bool  # the wire format changes something, so that tokens which it leaves raw matter
    packed: _Rows
    plain: _Rows  # for tokens that the wire format leaves raw


def join_packed(
    sources: Sequence[CacheLayout],
    dst: CacheLayout,
    wire: str | WireFormat,
    *,
    first: int = 0,
    layers: Sequence[str] | None = None,
    allow_missing: bool = False,
    src_scales: Scales | None = None,
    dst_scales: Scales | None = None,
) -> list[PackedJoin]:
    """How the sources together fill `dst` in a wire format, converting between cache formats where they
    differ.

    Arguments as `kvxfer.plan.join`. Both ends must call it with the same layouts, format and scales. Raises
    LayoutMismatch, listing field by field what cannot be joined, and UnknownWireFormat.
    """
    wire = parse(wire)
    if wire.lossless and src_scales == dst_scales:
        try:
            plain = join(sources, dst, first=first, layers=layers, allow_missing=allow_missing)
        except LayoutMismatch:
            pass  # perhaps it can be converted
        else:
            return [
                PackedJoin(source=j.source, src=j.src, dst=j.dst, wire=wire, rows=(), plain=j, missing=j.missing)
                for j in plain
            ]
    rows, missing = packed_rows(
        sources,
        dst,
        wire,
        first=first,
        layers=layers,
        allow_missing=allow_missing,
        src_scales=src_scales,
        dst_scales=dst_scales,
    )
    return [
        PackedJoin(source=i, src=sources[i], dst=dst, wire=wire, rows=tuple(rows[i]), plain=None, missing=missing)
        for i in sorted(rows)
    ]


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _is_count(blocks: object) -> bool:
    return isinstance(blocks, (int, np.integer)) and not isinstance(blocks, bool)


def _with_tokens(segments: Segments) -> Segments:
    """Contiguous columns, with token columns also where blocks are whole: then one token each."""
    count = len(segments.src_block)
    columns = {
        "src_token": (segments.src_token, 0),
        "dst_token": (segments.dst_token, 0),
        "tokens": (segments.tokens, 1),
    }
    return Segments(
        src_block=np.ascontiguousarray(segments.src_block, np.int32),
        dst_block=np.ascontiguousarray(segments.dst_block, np.int32),
        **{
            name: np.full(count, default, np.int32) if column is None else np.ascontiguousarray(column, np.int32)
            for name, (column, default) in columns.items()
        },
    )


def _split(segments: Segments, tokens: int, first: int, last: int) -> Iterator[tuple[Segments, bool]]:
    """The segments as (piece, raw): the first and last tokens of the prompt raw, what lies between not."""
    if not first and not last:
        yield segments, False
        return
    length = segments.tokens.astype(np.int64)
    end = tokens - (length.sum() - np.cumsum(length))
    begin = end - length
    low, high = min(first, tokens), max(tokens - last, min(first, tokens))
    for start, stop, raw in ((0, low, True), (low, high, False), (high, tokens, True)):
        inside = (begin < stop) & (end > start)
        if start >= stop or not inside.any():
            continue
        cut = np.maximum(begin[inside], start) - begin[inside]
        count = np.minimum(end[inside], stop) - np.maximum(begin[inside], start)
        yield (
            Segments(
                src_block=segments.src_block[inside],
                dst_block=segments.dst_block[inside],
                src_token=(segments.src_token[inside] + cut).astype(np.int32),
                dst_token=(segments.dst_token[inside] + cut).astype(np.int32),
                tokens=count.astype(np.int32),
            ),
            raw,
        )


def _part(rows: _Rows, segments: Segments) -> PackedPart:
    # Few shapes (token spans) stand for many segments: sizes are worked out once for each.
    spans = segments.src_token.astype(np.int64) << 32 | segments.tokens
    shapes, index = distinct(spans)
    sizes = np.array([_segment_bytes(rows, span >> 32, span & 0xFFFFFFFF) for span in shapes.tolist()], np.int64)
    starts = np.zeros(len(index) + 1, np.int64)
    np.cumsum(sizes[index, 0], out=starts[1:])
    nbytes = int(sizes[:, 1] @ np.bincount(index, minlength=len(shapes)))
    return PackedPart(rows=rows.table, segments=segments, wire_start=starts, nbytes=nbytes)


def _segment_bytes(rows: _Rows, first: int, tokens: int, *, partial: bool = False) -> tuple[int, int]:
    """Packed bytes, and bytes of the source cache, of a segment of so many tokens from its block's `first` on.

    With `partial` an entry counts of which only some tokens may be there: at most so many, wherever it begins.
    """
    wire = cache = 0
    for (ratio, heads, dim, codec, src_codec), count in rows.kinds:
        end = first + tokens + (ratio - 1 if partial else 0)
        vectors = (end // ratio - first // ratio if ratio else 1) * heads
        wire += count * (_align(vectors * codec.code_bytes(dim)) + _align(vectors * codec.scale_bytes(dim)))
        cache += count * vectors * src_codec.vector_bytes(dim)
    return wire, cache


def _align(sizes: int) -> int:
    return (sizes + WIRE_ALIGNMENT - 1) // WIRE_ALIGNMENT * WIRE_ALIGNMENT
