"""Block lists of a request, checked against a layout before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from kvxfer import _native, checks
from kvxfer.errors import InvalidBlocks, InvalidRequest, UnknownGroup
from kvxfer.layout import CacheLayout, Group, GroupKind, Record

_OUT_OF_RANGE = 1
_MAX_TOKENS = 2**62

BlockLists = Mapping[str, "Sequence[int] | np.ndarray"]
"""Block ids per group, right-aligned: the last id is the block that holds the last token."""


def check_tokens(tokens: object) -> int:
    """A prompt's number of tokens, as an int. Raises InvalidRequest."""
    return checks.integer("tokens", tokens, 0, _MAX_TOKENS)


def check_blocks(layout: CacheLayout, blocks: BlockLists, *, tokens: int, role: str) -> dict[str, np.ndarray]:
    """The lists as contiguous int32 arrays, checked against the layout.

    `role` is "source" or "destination". Sources must hold every needed token; destinations may leave out a
    prefix but must not name a block twice, nor the same bytes under two groups. Of a sliding group's list the
    last `Group.tail_blocks` ids are kept, so null ids before the window do no harm. Raises UnknownGroup,
    InvalidBlocks or InvalidRequest.
    """
    tokens = check_tokens(tokens)
    known = {group.name for group in layout.groups}
    if not isinstance(blocks, Mapping):
        raise InvalidRequest(
            f"block lists must be a mapping from group name to block ids, got {type(blocks).__name__}"
        )
    if blocks.keys() != known:
        unknown, missing = sorted(blocks.keys() - known, key=str), sorted(known - blocks.keys())
        parts = ([f"unknown {unknown}"] if unknown else []) + ([f"missing {missing}"] if missing else [])
        raise UnknownGroup(
            f"the layout's groups are {sorted(known)}; the {role} block lists have {', '.join(parts)}"
        )
    checked = {group.name: _check_list(group, blocks[group.name], tokens, role) for group in layout.groups}
    if role == "destination" and len(checked) > 1:
        _check_overlays(layout, checked)
    return checked


def stand_in_blocks(
    layout: CacheLayout, blocks: Mapping[str, Sequence[int] | np.ndarray | int], *, tokens: int
) -> dict[str, np.ndarray]:
    """Lists of zeros with the lengths of `blocks` (lists, or their numbers of ids), clipped like `check_blocks`.

    For the side of a plan whose ids are the other end's business. Raises InvalidBlocks for an impossible number.
    """
    lists = {}
    for group in layout.groups:
        given = blocks.get(group.name, 0)
        count = given if isinstance(given, (int, np.integer)) else len(given)
        if not 0 <= count <= group.blocks_for(tokens):
            raise InvalidBlocks(
                f"group {group.name!r}: {tokens} tokens lie in {group.blocks_for(tokens)} blocks, got {count}"
            )
        lists[group.name] = np.zeros(min(count, group.tail_blocks), np.int32)
    return lists


def _check_list(group: Group, ids: Sequence[int] | np.ndarray, tokens: int, role: str) -> np.ndarray:
    where = f"group {group.name!r}, {role} blocks"
    try:
        given = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise InvalidBlocks(f"{where}: expected a flat list of integers") from error
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise InvalidBlocks(
            f"{where}: expected a flat list of integers, got {given.dtype} of shape {given.shape}"
        )
    needed = group.blocks_for(tokens)
    if len(given) > needed:
        raise InvalidBlocks(f"{where}: {tokens} tokens lie in {needed} blocks, got a list of {len(given)}")
    given = given[-group.tail_blocks :]
    if role == "source" and (len(given) or group.needed(tokens)):
        first = 0 if group.block_tokens == 0 else group.first_needed_token(tokens) // group.block_tokens
        least = needed - first if group.kind is GroupKind.SLIDING else needed
        if len(given) < least:
            raise InvalidBlocks(
                f"{where}: {tokens} tokens need the last {least} blocks of {needed}, got a list of "
                f"{len(given)}"
            )
    checked = _as_int32(given, group, where)
    problem, index = _native.check_block_ids(
        checked.ctypes.data, len(checked), group.num_blocks, role == "destination"
    )
    if problem == _OUT_OF_RANGE:
        raise InvalidBlocks(f"{where}: block ids are 0 to {group.num_blocks - 1}, got {checked[index]}")
    if problem:
        raise InvalidBlocks(f"{where}: block {checked[index]} stands more than once")
    return checked


def _as_int32(given: np.ndarray, group: Group, where: str) -> np.ndarray:
    """Contiguous int32; ids that do not fit are out of range."""
    if given.dtype == np.int32 or not given.size:
        return np.ascontiguousarray(given, np.int32)
    if not -(2**31) <= int(given.min()) <= int(given.max()) < 2**31:
        bad = given[(given < 0) | (given >= group.num_blocks)][0]
        raise InvalidBlocks(f"{where}: block ids are 0 to {group.num_blocks - 1}, got {bad}")
    return np.ascontiguousarray(given, np.int32)


# --- groups that overlay the same memory --------------------------------------------------------------------


def _check_overlays(layout: CacheLayout, lists: Mapping[str, np.ndarray]) -> None:
    """No byte may be written under two groups."""
    if all(distances == (0,) for _, _, distances in overlaid(layout)):
        # As caches in one slab of blocks are: then ids that all differ share nothing, and one look is enough.
        every = np.concatenate(list(lists.values()))
        limit = max(group.num_blocks for group in layout.groups)
        if _native.check_block_ids(every.ctypes.data, len(every), limit, True)[0] == 0:
            return
    ordered = {name: np.sort(ids) for name, ids in lists.items()}
    for first, second, distances in overlaid(layout):
        ids, others = ordered[first], ordered[second]
        for distance in distances:
            shared = _common(ids, others + distance)
            if shared is not None:
                raise InvalidBlocks(
                    f"destination block {shared} of group {first!r} and block {shared - distance} of group "
                    f"{second!r} are the same memory; a block belongs to one group at a time"
                )


def overlaid(layout: CacheLayout) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Pairs of groups that share bytes, and at which distances ``i - j`` of block ids i and j they do."""
    return _overlays(layout.groups, layout.records)


def _common(first: np.ndarray, second: np.ndarray) -> int | None:
    """A value that two sorted arrays share."""
    few, many = (first, second) if len(first) < len(second) else (second, first)
    if not len(few):
        return None
    found = many[np.minimum(np.searchsorted(many, few), len(many) - 1)] == few
    return int(few[found][0]) if found.any() else None


@lru_cache(maxsize=16)
def _overlays(
    groups: tuple[Group, ...], records: tuple[Record, ...]
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    sizes = {record.tag: record.nbytes for record in records}
    found = []
    for index, first in enumerate(groups):
        for second in groups[index + 1 :]:
            distances = {
                d for a in _spans(first, sizes) for b in _spans(second, sizes) for d in _distances(a, b)
            }
            limit = max(first.num_blocks, second.num_blocks)
            distances = {d for d in distances if -limit < d < limit}
            if distances:
                found.append((first.name, second.name, tuple(sorted(distances))))
    return tuple(found)


_Span = tuple[str, int, int, int]  # region, block stride, first byte and end in block 0


def _spans(group: Group, sizes: Mapping[str, int]) -> list[_Span]:
    """The bytes of block 0, slices that continue each other as one span."""
    spans: list[_Span] = []
    for piece in sorted(group.slices, key=lambda piece: (piece.region, piece.offset)):
        end = piece.offset + sizes[piece.record]
        last = spans[-1] if spans else None
        if last and last[:2] == (piece.region, piece.block_stride) and last[3] == piece.offset:
            spans[-1] = (*last[:3], end)
        else:
            spans.append((piece.region, piece.block_stride, piece.offset, end))
    return spans


def _distances(a: _Span, b: _Span) -> range:
    """Distances ``i - j`` at which block i of `a` meets block j of `b`; none for unequal strides.

    Groups of unequal strides on the same bytes have no common block ids to compare; engines do not build
    them.
    """
    (region, stride, first, end), (other_region, other_stride, other_first, other_end) = a, b
    if region != other_region or stride != other_stride:
        return range(0)
    # first + i * stride < other_end + j * stride and the reverse
    low = (other_first - end) // stride + 1
    high = -((first - other_end) // stride) - 1
    return range(low, high + 1)
