"""Plans that are made before they are asked for: for a lease just published, the one that the last pulls needed.

A pool's decode workers have one layout and one wire format, so the next question for packed blocks differs from the
last one in the lease alone. Once two questions in a row were alike, each lease of the cache that follows is planned
when it is published, on a mover thread, with its tables on the GPU; the question then finds the plan made. A guess that
nobody asks for costs a fraction of a millisecond of that thread, and the memory of its tables until the lease ends or
newer ones come; after a few in a row none is made until two questions are alike again.

Any thread. Imports errors and lease, and nothing of the conversation (pull.py).
"""

from __future__ import annotations

import collections
import threading
import weakref
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
        self._last: PackedJoin | None = None  # of the last question, if it was for whole prompts
        self._join: PackedJoin | None = None  # of the next one, as it seems
        self._unused = 0  # plans in a row that nobody has asked for
        self._made: collections.OrderedDict[Lease, _Made] = collections.OrderedDict()
        self._asked: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._lock = threading.Lock()

    def asked(self, lease: Lease, join: PackedJoin, counts: Mapping[str, int]) -> Any | None:
        """A peer asks for a lease's blocks: the prepared plan, if it was made, which is the caller's from now on."""
        whole = counts == _all_blocks(join, lease.ticket.tokens)
        with self._lock:
            self._asked.add(lease)
            self._join = join if whole and self._last is join else None
            self._last = join if whole else None
            for_join, for_counts, plan = self._made.get(lease, (None, {}, None))
            if for_join is not join or for_counts != counts:
                return None
            del self._made[lease]
            self._unused = 0
        return plan

    def published(self, cache: Cache, lease: Lease) -> None:
        """A lease has been published: have its plan made, if it may be asked for like the last ones."""
        join = self._join
        if join is not None:
            self._node.pool.submit(lambda: self._make(cache, lease, join))

    def forget(self, most: int = 0) -> None:
        """Let go of plans whose leases have ended, and of the oldest beyond so many."""
        with self._lock:
            ended = [lease for lease in self._made if lease.state is not LeaseState.LIVE]
            plans = [self._made.pop(lease)[2] for lease in ended]
            while len(self._made) > most:
                plans.append(self._made.popitem(last=False)[1][2])
            self._unused += len(plans)
            if self._unused >= _MOST:
                self._join = self._last = None
                self._unused = 0
        for plan in plans:
            plan.let_go()

    def _make(self, cache: Cache, lease: Lease, join: PackedJoin) -> None:
        self.forget(_MOST - 1)
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
            wanted = lease not in self._asked
            if wanted:
                self._made[lease] = join, counts, plan
        if not wanted:  # the question came sooner
            plan.let_go()
            return
        lease.add_done_callback(lambda _: self.forget(_MOST))


def _all_blocks(join: PackedJoin, tokens: int) -> dict[str, int]:
    """The blocks of each group of a peer that has nothing of the prompt yet."""
    return {group.name: min(group.blocks_for(tokens), group.tail_blocks) for group in join.dst.groups}
