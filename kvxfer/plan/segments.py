"""Segments: which block of the source meets which block of the destination, and at which tokens."""

from __future__ import annotations

import numpy as np

from kvxfer.errors import InvalidBlocks
from kvxfer.layout import Group, GroupKind
from kvxfer.plan.transfer import Segments


def segments_for(
    src_group: Group, dst_group: Group, src: np.ndarray, dst: np.ndarray, tokens: int, *, tile: int
) -> Segments | None:
    """The pairs of blocks of a request of `tokens` tokens, or None where nothing has to move.

    `src` and `dst` are checked lists, int32. With `tile` 0 blocks are copied whole; else the token columns
    are filled, and the last span is rounded up to whole tiles of that many tokens.
    """
    if not len(dst) or (not len(src) and not src_group.needed(tokens)):
        return None
    if dst_group.kind is GroupKind.RING:
        return _ring(src_group, dst_group, src, dst, tokens, tile)
    if dst_group.kind is GroupKind.STATE:
        if not tile:
            return Segments(src_block=src, dst_block=dst)
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        return Segments(src_block=src, dst_block=dst, src_token=zero, dst_token=zero, tokens=one)
    return _blocks(src_group, dst_group, src, dst, tokens, tile)


def most_segments(src_group: Group, dst_group: Group, dst_count: int, tokens: int) -> tuple[int, int]:
    """At most how many segments `segments_for` makes for so many destination blocks, and tokens in one of them."""
    if dst_group.kind is GroupKind.STATE:
        return dst_count, 1
    span = min(src_group.block_tokens, dst_group.block_tokens, tokens)
    if dst_group.kind is GroupKind.RING:
        return 3 * dst_count, span  # either ring may begin anew in between
    if src_group.block_tokens == dst_group.block_tokens:
        return dst_count, span
    return dst_count and dst_count + dst_count * dst_group.block_tokens // src_group.block_tokens + 1, span


def _ring(
    src_group: Group, dst_group: Group, src: np.ndarray, dst: np.ndarray, tokens: int, tile: int
) -> Segments | None:
    """Position p lies in row p modulo the capacity; the last positions that both rings keep are copied."""
    if not tile:
        return Segments(src_block=src, dst_block=dst)
    kept = min(src_group.block_tokens, dst_group.block_tokens, tokens)
    if not kept:
        return None
    position = np.arange(tokens - kept, tokens)
    src_row, dst_row = position % src_group.block_tokens, position % dst_group.block_tokens
    first = np.flatnonzero((src_row == 0) | (dst_row == 0) | (position == position[0]))
    return Segments(
        src_block=np.repeat(src, len(first)),
        dst_block=np.repeat(dst, len(first)),
        src_token=src_row[first].astype(np.int32),
        dst_token=dst_row[first].astype(np.int32),
        tokens=np.diff(np.append(first, kept)).astype(np.int32),
    )


def _blocks(
    src_group: Group, dst_group: Group, src: np.ndarray, dst: np.ndarray, tokens: int, tile: int
) -> Segments | None:
    src_size, dst_size = src_group.block_tokens, dst_group.block_tokens
    src_first = max(0, src_group.blocks_for(tokens) - len(src)) * src_size
    start = max(0, dst_group.blocks_for(tokens) - len(dst)) * dst_size
    dst_first = start
    if src_first > start:
        needed = max(start, dst_group.first_needed_token(tokens))
        if src_first > needed:
            raise InvalidBlocks(
                f"group {dst_group.name!r}: the destination needs tokens from {needed} on, the source's "
                f"list starts at token {src_first}"
            )
        start = src_first
    if src_size == dst_size and not tile:
        count = min(len(src), len(dst))
        return Segments(src_block=src[len(src) - count :], dst_block=dst[len(dst) - count :])
    if start >= tokens:
        return None
    end = -(-tokens // max(tile, 1)) * max(tile, 1)
    if src_size == dst_size and start % src_size == 0:
        count = -(-(tokens - start) // src_size)
        zero, spans = np.zeros(count, np.int32), np.full(count, src_size, np.int32)
        spans[-1] = end - start - (count - 1) * src_size
        src, dst = src[(start - src_first) // src_size :], dst[(start - dst_first) // dst_size :]
        return Segments(src_block=src[:count], dst_block=dst[:count], src_token=zero, dst_token=zero, tokens=spans)
    begin = np.arange(-(-start // src_size) * src_size, tokens, src_size)
    if src_size != dst_size:
        begin = np.union1d(begin, np.arange(-(-start // dst_size) * dst_size, tokens, dst_size))
    if not len(begin) or begin[0] != start:
        begin = np.concatenate(([start], begin))
    return Segments(
        src_block=src[(begin - src_first) // src_size],
        dst_block=dst[(begin - dst_first) // dst_size],
        src_token=(begin % src_size).astype(np.int32),
        dst_token=(begin % dst_size).astype(np.int32),
        tokens=np.diff(np.append(begin, end)).astype(np.int32),
    )
