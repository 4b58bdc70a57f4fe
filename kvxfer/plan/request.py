"""The short way from block lists to a copy, for layouts between which whole blocks are copied.

What depends on the layouts alone is worked out once, when they meet; one native call a request then checks the lists
and pairs the blocks. It says yes or no: what is wrong with lists, and what is given in a form that it does not take,
is found out by `check_blocks` and `Join.plan`, which define both.

Imports the native module, blocks and joining.
"""

from __future__ import annotations

import numpy as np

from kvxfer import _native
from kvxfer.layout import CacheLayout, GroupKind
from kvxfer.plan.blocks import BlockLists, check_blocks, overlaid
from kvxfer.plan.joining import Join

Request = _native.Request
CheckedLists = _native.BlockLists

_KINDS = (GroupKind.FULL, GroupKind.SLIDING, GroupKind.RING, GroupKind.STATE)  # cpu/requests.h has the same order
_NO_OVERLAYS, _SAME_IDS, _OTHER_OVERLAYS = range(3)


class BlockTable:
    """A layout's groups, against which the lists of one request after another are checked."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._names = [group.name for group in layout.groups]
        groups = [
            (
                group.name,
                _KINDS.index(group.kind),
                group.block_tokens,
                group.num_blocks,
                group.window,
                group.tail_blocks,
                group.compression_ratio,
            )
            for group in layout.groups
        ]
        self.native = _native.Groups(groups, _overlays_of(layout))

    def check(self, blocks: BlockLists, *, tokens: int, role: str) -> CheckedLists:
        """The lists, copied. Arguments and errors as of `check_blocks`."""
        found = self.native.check(blocks, tokens, role == "destination") if type(tokens) is int else None
        if found is None:
            found = self.native.hold(list(check_blocks(self.layout, blocks, tokens=tokens, role=role).values()))
        return found

    def arrays(self, lists: CheckedLists) -> dict[str, np.ndarray]:
        """Checked lists as `check_blocks` returns them: int32 arrays, read-only."""
        return {name: lists.array(number) for number, name in enumerate(self._names)}

    def counts(self, lists: CheckedLists) -> dict[str, int]:
        """How many blocks each group has."""
        return {name: lists.count(number) for number, name in enumerate(self._names)}


class Pairing:
    """What one source holds for one destination, where all of it is whole blocks. Made by `pairing_of`."""

    def __init__(self, joined: Join) -> None:
        src, dst = BlockTable(joined.src), BlockTable(joined.dst)
        src_groups, dst_groups = ([group.name for group in layout.groups] for layout in (joined.src, joined.dst))
        self.rows = [part.merged for part in joined.parts]
        self.regions = len(joined.src.regions), len(joined.dst.regions)
        parts = [
            (
                src_groups.index(part.src_group.name),
                dst_groups.index(part.dst_group.name),
                rows.ctypes.data,
                len(rows),
            )
            for part, rows in zip(joined.parts, self.rows, strict=True)
        ]
        self._native = _native.Pairing(src.native, dst.native, parts)

    def request(self, record: bytes, dst: CheckedLists, *, tokens: int) -> Request | None:
        """The pairs of blocks of one request, from a lease's record and lists of the destination's `BlockTable`.

        None where the record does not fit the source's layout, or lacks blocks that the destination needs.
        """
        return self._native.request(record, dst, tokens)


def pairing_of(joined: Join | None) -> Pairing | None:
    """The pairing of a join; None where tokens have to be looked at, or bytes are converted."""
    whole = joined is not None and all(
        part.tile == 0 and not part.merged["tokens_per_entry"].any() for part in joined.parts
    )
    return Pairing(joined) if whole else None


def _overlays_of(layout: CacheLayout) -> int:
    distances = [distance for _, _, distance in overlaid(layout)]
    if not distances:
        return _NO_OVERLAYS
    return _SAME_IDS if all(distance == (0,) for distance in distances) else _OTHER_OVERLAYS
