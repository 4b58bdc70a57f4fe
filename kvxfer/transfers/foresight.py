"""Plans that are made before they are asked for: for a lease just published, the one that the last pull needed.

A pool's decode workers have one layout and one wire format, so the next question for packed blocks differs from the
last one in the lease alone. Once blocks of a cache have been asked for, each lease of it that follows is planned when
it is published, on a mover thread, with its tables on the GPU; the question then finds the plan made. A guess that
nobody asks for costs a fraction of a millisecond of that thread and the memory of its tables, which the next ones take
back; after a few in a row none is made until blocks are asked for again.

Any thread. Imports match's joins by type only, lease, and nothing of the conversation (pull.py).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvxfer.errors import KvxferError
from kvxfer.lease import Lease, LeaseState

if TYPE_CHECKING:
    from kvxfer.cache import Cache
    from kvxfer.formats import PackedJoin
    from kvxfer.node import Node

_MOST = 4  # plans that are kept

_Made = tuple["PackedJoin", dict[str, int], Any]  # for a peer with so many blocks in each group: the prepared plan


class Foresight:
    """The plans of one cache's newest leases."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._join: PackedJoin | None = None  # of the last question, if the next may be like it
        self._made: collections.OrderedDict[int, _Made] = collections.OrderedDict()  # by lease number
        self._lock = threading.Lock()

    def asked(self, lease: Lease, join: PackedJoin, counts: Mapping[str, int]) -> Any | None:
        """A peer asks for a lease's blocks: the prepared plan, if it was made, which is the caller's from now on."""
        with self._lock:
            self._join = join if counts == _all_blocks(join, lease.ticket.tokens) else None
            for_join, for_counts, plan = self._made.pop(lease.ticket.lease, (None, {}, None))
        if for_join is join and for_counts == counts:
            return plan
        if plan is not None:
            plan.let_go()
        return None

    def published(self, cache: Cache, lease: Lease) -> None:
        """A lease has been published: have its plan made, if it may be asked for like the last one."""
        join = self._join
        if join is not None:
            self._node.pool.submit(lambda: self._make(cache, lease, join))

    def _make(self, cache: Cache, lease: Lease, join: PackedJoin) -> None:
        if lease.state is not LeaseState.LIVE:
            return
        counts = _all_blocks(join, lease.ticket.tokens)
        try:
            plan = cache.prepare_packed(join.plan(lease.lists, counts, tokens=lease.ticket.tokens))
            if cache.device != "cpu" and not plan.is_ready("pack", cache.bases):
                plan.get_ready("pack", cache.bases)
        except KvxferError:  # whoever asks is told what is wrong
            return
        with self._lock:
            self._made[lease.ticket.lease] = join, counts, plan
            forgotten = []
            while len(self._made) > _MOST:
                forgotten.append(self._made.popitem(last=False)[1][2])
                self._join = None  # nobody has asked for a while
        for plan in forgotten:
            plan.let_go()


def _all_blocks(join: PackedJoin, tokens: int) -> dict[str, int]:
    """The blocks of each group of a peer that has nothing of the prompt yet."""
    return {group.name: min(group.blocks_for(tokens), group.tail_blocks) for group in join.dst.groups}
