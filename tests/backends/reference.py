"""What a cache holds for a prompt, read entry by entry with plain NumPy: the truth that backends are compared to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvxfer import CacheLayout, GroupKind


def contents(
    layout: CacheLayout,
    arrays: Mapping[str, np.ndarray],
    blocks: Mapping[str, Sequence[int]],
    tokens: int,
    first: int = 0,
) -> dict[tuple[str, str], np.ndarray]:
    """Bytes ``[entries, heads, bytes]`` of each (layer, plane) for the tokens from `first` on."""
    found = {}
    for group in layout.groups:
        for piece in group.slices:
            for plane in layout.record(piece.record).planes:
                rows = []
                for token in range(first, tokens, plane.tokens_per_entry):
                    if token + plane.tokens_per_entry > tokens or token < group.first_needed_token(tokens):
                        continue
                    table = blocks[group.name]
                    position, slot = divmod(token, group.block_tokens)
                    block = table[position - (group.blocks_for(tokens) - len(table))]
                    at = piece.offset + block * piece.block_stride + plane.offset
                    at += slot // plane.tokens_per_entry * plane.entry_stride
                    rows.append([_head(arrays[piece.region], at, plane, head) for head in range(plane.heads)])
                found[piece.layer, plane.name] = np.array(rows, np.uint8)
    return found


def _head(memory: np.ndarray, at: int, plane, head: int) -> np.ndarray:
    starts = [at + head * plane.head_stride + c * plane.channel_stride for c in range(plane.channels)]
    return np.concatenate([memory[start : start + plane.unit_bytes] for start in starts])


def assert_same_contents(left: dict, right: dict) -> None:
    """Both hold the same bytes for the same layers and planes."""
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].size, f"{key}: nothing to compare"
        assert np.array_equal(left[key], right[key]), key


def assert_untouched(
    layout: CacheLayout, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], blocks: Mapping
) -> None:
    """No byte outside the listed blocks' slices has changed."""
    for region in layout.regions:
        allowed = np.zeros(region.nbytes, bool)
        for group in layout.groups:
            for piece in group.slices:
                if piece.region == region.name:
                    for block in blocks[group.name]:
                        start = piece.offset + int(block) * piece.block_stride
                        allowed[start : start + layout.record(piece.record).nbytes] = True
        changed = np.flatnonzero(before[region.name] != after[region.name])
        assert allowed[changed].all(), f"region {region.name}: bytes outside the destination blocks were written"


def has_only_tokens(layout: CacheLayout) -> bool:
    """Whether every group is made of tokens, so that `contents` can read it."""
    return all(group.kind in (GroupKind.FULL, GroupKind.SLIDING) for group in layout.groups)
