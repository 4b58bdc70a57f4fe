"""How many bytes a load needs, from a layout's records: a token, a request, receiving and staging.

*Record bytes* are what the model's own records hold: planes, without page rounding. *Stored bytes* are what
the pool gives away: whole blocks with the engine's strides. *Moved bytes* are the slices of the blocks that
must travel. Every figure is per rank. Imports layout, coverage and errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from kvxfer.errors import InvalidRequest
from kvxfer.layout import CacheLayout, Group, GroupKind, Record
from kvxfer.layout.coverage import slabs
from kvxfer.plan import WIRE_ALIGNMENT
from kvxfer.transfers.staging import CHUNK_BYTES, SLOTS, UNIT_BYTES

CONCURRENCY = 3
"""The rule for a receive buffer: the largest prompt times two to three concurrent requests, never an average.
"""


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """One group's part of a request of a given length."""

    name: str
    kind: str
    layers: int
    block_tokens: int
    window: int
    blocks: int  # that must travel, and that the request holds
    block_stride_bytes: int  # the pool's bytes under one block, over all of the group's slabs
    slice_bytes: int  # of one block, without what no layer of the group uses
    record_bytes: int  # of the request, without page rounding
    moved_bytes: int
    stored_bytes: int
    records: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What `size` returns; each field in bytes unless its name says otherwise."""

    tokens: int
    concurrency: int
    bytes_per_token: int | float
    stored_bytes_per_token: int | float
    block_stride_bytes: int
    window_bytes_per_request: int
    state_bytes_per_request: int
    fixed_bytes_per_request: int
    growing_bytes: int
    request_bytes: int
    moved_bytes_per_request: int
    stored_bytes_per_request: int
    receive_buffer_bytes: int
    staging_bytes: int
    groups: tuple[GroupSize, ...]


def record_entry_bytes(record: Record, block_tokens: int) -> Fraction:
    """Bytes that one token adds to a slice, without page rounding; an opaque record's share of its page."""
    if not record.planes:
        return Fraction(record.nbytes, block_tokens)
    return sum((Fraction(plane.entry_bytes, plane.tokens_per_entry) for plane in record.planes), Fraction(0))


def bytes_per_token(layout: CacheLayout) -> Fraction:
    """What one more token adds to the record bytes of a long prompt: its full groups, over all layers."""
    return sum((_group_token_bytes(layout, group) for group in _growing(layout)), Fraction(0))


def stored_bytes_per_token(layout: CacheLayout) -> Fraction:
    """The same with the engine's block strides."""
    return sum((Fraction(block_stride(group), group.block_tokens) for group in _growing(layout)), Fraction(0))


def block_stride(group: Group) -> int:
    """The pool's bytes under one block: a stride for each run of memory in which slices interleave."""
    return sum(stride for _, stride, _ in slabs(group))


def group_size(layout: CacheLayout, group: Group, tokens: int) -> GroupSize:
    """What `group` holds of a prompt of `tokens` tokens, and what of it must travel."""
    blocks = group.blocks_to_move(tokens)
    stride, slice_bytes = block_stride(group), layout.block_bytes(group.name)
    return GroupSize(
        name=group.name,
        kind=group.kind.value,
        layers=len(group.layers),
        block_tokens=group.block_tokens,
        window=group.window,
        blocks=blocks,
        block_stride_bytes=stride,
        slice_bytes=slice_bytes,
        record_bytes=_record_bytes(layout, group, tokens),
        moved_bytes=blocks * slice_bytes,
        stored_bytes=blocks * stride,
        records=tuple(dict.fromkeys(piece.record for piece in group.slices)),
    )


def size(layout: CacheLayout, *, tokens: int, concurrency: int = CONCURRENCY) -> Sizes:
    """Sizes for prompts of up to `tokens` tokens, `concurrency` of them at once.

    The fixed part is what a request holds however long it grows: the windows of sliding layers (no more than
    the prompt has), and rings and states at their full size, whether or not this length leaves a remainder. A
    receive buffer is the decode pool's blocks for `concurrency` such prompts; staging is `SLOTS`
    packed chunks for each of them, a chunk being no larger than the request and no smaller than its largest
    block.
    """
    for name, value, least in (("tokens", tokens, 0), ("concurrency", concurrency, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 40:
            raise InvalidRequest(f"{name} must be an integer of {least} or more, got {value!r}")
    groups = tuple(group_size(layout, group, tokens) for group in layout.groups)
    state = sum(_record_bytes(layout, g, tokens) for g in layout.groups if _is_state(layout, g))
    fixed = sum(_record_bytes(layout, g, tokens) for g in layout.groups if g.kind is not GroupKind.FULL)
    growing = sum(_record_bytes(layout, g, tokens) for g in _growing(layout))
    moved = sum(group.moved_bytes for group in groups)
    stored = sum(_held_blocks(g, tokens) * block_stride(g) for g in layout.groups)
    largest_block = max(layout.block_bytes(group.name) for group in layout.groups)
    chunk = max(largest_block, min(CHUNK_BYTES, moved))
    return Sizes(
        tokens=tokens,
        concurrency=concurrency,
        bytes_per_token=_number(bytes_per_token(layout)),
        stored_bytes_per_token=_number(stored_bytes_per_token(layout)),
        block_stride_bytes=max((block_stride(group) for group in _growing(layout) or layout.groups), default=0),
        window_bytes_per_request=fixed - state,
        state_bytes_per_request=state,
        fixed_bytes_per_request=fixed,
        growing_bytes=growing,
        request_bytes=growing + fixed,
        moved_bytes_per_request=moved,
        stored_bytes_per_request=stored,
        receive_buffer_bytes=concurrency * stored,
        staging_bytes=concurrency * SLOTS * chunk,
        groups=groups,
    )


def least_staging_bytes(layout: CacheLayout) -> int:
    """What staging must have for one chunk, which is one block of the group whose blocks are the largest.

    Raw, and rounded up as loans are: chunks of one block are no larger in any other wire format, or next to a cache of
    other blocks. One chunk moves everything, one after another; `Sizes.staging_bytes` is what a load needs.
    """
    records = {record.tag: record for record in layout.records}

    def packed_bytes(group: Group) -> int:
        held = [records[piece.record] for piece in group.slices]
        return sum(record.nbytes + WIRE_ALIGNMENT * max(1, len(record.planes)) for record in held)

    largest = max(packed_bytes(group) for group in layout.groups)
    return -(-largest // UNIT_BYTES) * UNIT_BYTES


def _growing(layout: CacheLayout) -> list[Group]:
    return [group for group in layout.groups if group.kind is GroupKind.FULL]


def _is_state(layout: CacheLayout, group: Group) -> bool:
    """Rings, states, and compressor states paged like a window, told by their only plane."""
    if group.kind is GroupKind.SLIDING:
        planes = {plane.name for record in _slice_records(layout, group) for plane in record.planes}
        return planes == {"pending"}
    return group.kind in (GroupKind.RING, GroupKind.STATE)


def _held_blocks(group: Group, tokens: int) -> int:
    return min(group.blocks_for(tokens), group.tail_blocks) if tokens else 0


def _group_token_bytes(layout: CacheLayout, group: Group) -> Fraction:
    return sum(
        (record_entry_bytes(record, group.block_tokens) for record in _slice_records(layout, group)),
        Fraction(0),
    )


def _record_bytes(layout: CacheLayout, group: Group, tokens: int) -> int:
    records = _slice_records(layout, group)
    if group.kind in (GroupKind.RING, GroupKind.STATE):
        return sum(sum(plane.nbytes for plane in record.planes) or record.nbytes for record in records)
    held = min(tokens, group.window) if group.kind is GroupKind.SLIDING else tokens
    total = 0
    for record in records:
        if not record.planes:
            total += -(-held // group.block_tokens) * record.nbytes
        for plane in record.planes:
            entries = -(-held // plane.tokens_per_entry) if plane.tiled else held // plane.tokens_per_entry
            total += entries * plane.entry_bytes
    return total


def _slice_records(layout: CacheLayout, group: Group) -> Iterable[Record]:
    records = {record.tag: record for record in layout.records}
    return [records[piece.record] for piece in group.slices]


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)
