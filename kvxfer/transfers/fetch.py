"""Fetching: decode reads leased blocks from the ranks of a prefill engine into its own, as one transfer.

The order of `Fetch._attempt` is the protocol: find the engine, read the lease's record from every rank that is needed,
plan everything, then move, then read every lease word once more. Only then is the transfer done. Unless the packed
way is taken, no Python of the publisher has part in it.

Imports node, match, moves, pull, plan, remote.
"""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvxfer.backends.base import Direction
from kvxfer.control.messages import Release, Sources
from kvxfer.errors import (
    BackendError,
    InvalidTicket,
    KvxferError,
    PeerGone,
    UnknownCache,
)
from kvxfer.formats import PackedJoin, PackedPlan, join_packed
from kvxfer.kernels import PIECE_BYTES, PreparedPackedPlan, PreparedPlan
from kvxfer.node import Node, new_transfer_id
from kvxfer.peers.directory import Engine
from kvxfer.peers.remote import Peer, RemoteCache
from kvxfer.plan import TransferPlan, check_blocks
from kvxfer.ticket import Ticket
from kvxfer.transfers import moves
from kvxfer.transfers.choice import Choice
from kvxfer.transfers.match import check_fingerprints, choose_way, copies_of, why_not_mapped
from kvxfer.transfers.pull import PullLeg
from kvxfer.transfers.shelf import ShelfLeg, Shelved, look_on_shelf, unpack_mapped
from kvxfer.transfers.transfer import Transfer

if TYPE_CHECKING:
    from kvxfer.cache import Cache
    from kvxfer.cuda import Event
    from kvxfer.cuda.lanes import Ending

_log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.0005
_LAST_RETRY_S = 0.01
_RETRY_SHARE = 0.125  # of the time waited so far: looking again costs little, and adds little to a long wait
ANNOUNCEMENT_S = 1.0  # how long after its ticket a peer's newly registered cache may become known here


@dataclass(frozen=True)
class Source:
    """One rank that a fetch reads from, and what to tell it where several fill the cache together."""

    peer: Peer
    cache: RemoteCache
    join: PackedJoin
    together: Sources | None


@dataclass(frozen=True)
class Leg:
    """A source, with the plan of this fetch."""

    source: Source
    plan: PreparedPlan | PreparedPackedPlan
    choice: Choice
    shelved: Shelved | None  # where its bytes lie packed ahead
    ending: Ending | None  # of the mapped way on a GPU: the verdict that the device has read

    @property
    def way(self) -> str:
        """mapped, direct or packed."""
        return self.choice.way


class Fetch(Transfer):
    """Leased blocks on their way into this process. Made by `Cache.fetch`."""

    def __init__(
        self,
        node: Node,
        cache: Cache,
        ticket: Ticket,
        dst_lists: dict[str, np.ndarray],
        *,
        wire: str,
        timeout_s: float,
        allow_missing: bool,
        after: Event | None = None,
    ) -> None:
        """`after`: nothing is written before this event has passed."""
        super().__init__(
            node.progress, timeout_s=timeout_s, what=f"fetch of request {ticket.request_id!r}", gates=cache.gates
        )
        self._node, self._cache = node, cache
        self._ticket, self._dst_lists = ticket, dst_lists
        self._wire = wire
        self.allow_missing = allow_missing
        self._engine: Engine | None = None
        self._legs: list[Leg] = []
        self._pulls: list[PullLeg | ShelfLeg] = []
        self._moving = 0
        self._alone, self._started_before = False, 0  # when it began: whether nothing else was under way
        self._after = after
        self.on_end(self._let_go)

    def start(self) -> None:
        """Queue the first attempt. Any thread."""
        nbytes = sum(len(ids) * self._cache.block_bytes[name] for name, ids in self._dst_lists.items())
        job = self._node.pool.submit(lambda: self.attempt(self._attempt))
        self.runs_as(job, short=nbytes <= PIECE_BYTES)

    def _attempt(self) -> None:
        if self.done() or self.stopping:
            return
        engine = self._engine = self._node.directory.find(self._ticket)
        if engine is None:
            self.waits_for(f"engine {self._ticket.engine!r} at {self._ticket.endpoint}")
            self.arm()
            self._node.progress.post(
                lambda: self._node.directory.look_up(self._ticket, lambda _: self.start(), self.abort)
            )
            return
        try:
            sources = sources_of(engine, self._ticket, self._cache, self._node, self._wire, self.allow_missing)
        except UnknownCache as error:
            self._try_again(f"cache {self._ticket.cache!r} of {self._ticket.engine!r}", error, engine)
            return
        legs = []
        for source in sources:
            leg = self._prepare(source)
            if leg is None:
                self._try_again("the lease to be published")
                return
            legs.append(leg)
        if any(leg.way == "packed" for leg in legs) and not self._passed(self._after):
            return
        if not self.begin():
            return
        self._legs = legs
        self._alone, self._started_before = len(legs) == len(self._node.active) == 1, self._node.started
        self._count(legs)
        self._move()

    def _passed(self, event: Event | None) -> bool:
        """Wait on the host until an event has passed; False when the transfer ended before."""
        while event is not None and not event.done():
            if self.done():
                return False
            time.sleep(_FIRST_RETRY_S)
        return True

    def _prepare(self, source: Source) -> Leg | None:
        """Read the lease's record from one rank and plan; None when the lease has not been published yet."""
        ticket = self._ticket
        if source.peer.is_dead():
            raise PeerGone(f"the process of {source.peer.identity.name} has ended")
        if source.peer.table is None:
            raise InvalidTicket(f"{source.peer.identity.name} has no lease table")
        published = source.peer.table.published(ticket)
        if published is None:
            return None
        lists = check_blocks(source.cache.layout, published.record.lists(), tokens=ticket.tokens, role="source")

        @functools.cache
        def plain() -> TransferPlan | PackedPlan:
            make = source.join.plan if source.join.plain is None else source.join.plain.plan_checked
            return make(lists, self._dst_lists, tokens=ticket.tokens)

        choice = choose_way(self._cache, source.cache, source.join, self._node, source.peer, plain)
        if choice.way == "packed":
            counts = {name: len(ids) for name, ids in lists.items()}
            plan = self._cache.prepare_packed(source.join.plan(counts, self._dst_lists, tokens=ticket.tokens))
            shelved = look_on_shelf(self._node, self._cache, source, plan.plan, ticket, counts, published)
            return Leg(source, plan, choice, shelved, None)
        plan = self._cache.prepare(plain())
        return Leg(source, plan, choice, None, self._ending(source) if choice.way == "mapped" else None)

    def _ending(self, source: Source) -> Ending | None:
        """What the GPU does after the last byte; None for a cache in host memory."""
        if self.gate is None:
            return None
        from kvxfer.cuda.lanes import Ending

        return Ending(lease_word=source.peer.table.device_word(self._ticket))

    def _try_again(self, what: str, error: KvxferError | None = None, engine: Engine | None = None) -> None:
        """Attempt again a little later. With an engine: it is asked what it has, and `error` ends a long wait."""
        if error is not None:
            if self.elapsed_s > ANNOUNCEMENT_S:
                raise error
            self._node.directory.ask_again(engine)
        self.waits_for(what)
        self.arm()
        delay = min(max(_FIRST_RETRY_S, _RETRY_SHARE * self.elapsed_s), _LAST_RETRY_S)
        self._node.progress.post(lambda: self._node.progress.call_later(delay, self.start))

    def _count(self, legs: list[Leg]) -> None:
        plans = [leg.plan.plan for leg in legs]
        not_mapped = {why_not_mapped(self._cache, leg.source.cache, self._node) for leg in legs if leg.way != "mapped"}
        asked = any(leg.way == "packed" and leg.shelved is None for leg in legs)
        self.count(
            backend="+".join(sorted({leg.source.peer.backend for leg in legs})),
            way="+".join(sorted({leg.way for leg in legs})),
            choice="; ".join(leg.choice.why for leg in legs if leg.choice.why),
            why_not_mapped="; ".join(sorted(not_mapped - {""})),
            packed_ahead=any(leg.shelved for leg in legs),
            wire=self._wire,
            bytes=sum(plan.nbytes for plan in plans),
            wire_bytes=sum(
                p.wire_bytes if leg.way == "packed" else p.nbytes for p, leg in zip(plans, legs, strict=True)
            ),
            copies=sum(copies_of(plan) for plan in plans),
            peers=len(legs),
            missing=legs[0].source.join.missing if legs else (),
            conversation=asked,
        )

    def _move(self) -> None:
        packed = [leg for leg in self._legs if leg.way == "packed" and leg.plan.plan.wire_bytes]
        asked = [leg for leg in packed if leg.shelved is None or not leg.shelved.mapped]
        here = [leg for leg in self._legs if leg.way == "mapped" or (leg in packed and leg not in asked)]
        direct = [leg for leg in self._legs if leg.way == "direct"]
        self._moving = 1 + len(asked) + len(direct)
        if asked:
            self.waits_for("packed chunks")
            self.arm()
            self._pulls = [self._pull(leg) for leg in asked]
            self.on_stop(lambda: self._node.progress.post(self._stop_pulls))
            self._node.progress.post(lambda: [pull.start() for pull in self._pulls])
        for leg in direct:
            self._move_direct(leg)
        if self.hold():
            try:
                moved = all([self._move_here(leg) for leg in here])
            finally:
                self.drop()
            if moved:
                self.leg_moved()
        elif self.done():
            self._let_go()

    def _pull(self, leg: Leg) -> PullLeg | ShelfLeg:
        if leg.shelved is None:
            return PullLeg(self, self._node, leg, self._ticket, self._cache)
        link, bases = leg.source.peer.link, self._cache.bases
        return ShelfLeg(self._node, self, link, leg.plan, leg.shelved, bases, moved=self.leg_moved)

    def _move_here(self, leg: Leg) -> bool:
        if leg.shelved is not None:
            return unpack_mapped(self._node, self, leg.plan, leg.shelved, self._cache.bases)
        after = () if self._after is None else (self._after.address,)
        if leg.ending is not None and len(self._legs) == 1:
            leg.ending.gate = self.gate
        return moves.move_mapped(
            leg.plan,
            leg.source.cache.mapped_bases,
            self._cache.bases,
            self,
            threads=self._node.limits.copy_threads,
            after=after,
            ending=leg.ending,
        )

    def _move_direct(self, leg: Leg) -> None:
        if not self.hold():
            return
        self.arm()

        def ended(moved: bool, error: KvxferError | None) -> None:
            if error is not None:
                self.abort(error)
            self.drop()
            if moved:
                self.leg_moved()

        moves.move_direct(
            leg.plan,
            leg.source.peer.link,
            Direction.READ,
            leg.source.cache.remote_bases,
            self._cache.bases,
            self,
            then=ended,
            node=self._node,
        )

    @property
    def wire(self) -> str:
        """The wire format's canonical name."""
        return self._wire

    def block_counts(self) -> dict[str, int]:
        """Destination blocks of each group: all that the publisher must know of them to cut the same plan."""
        return {name: len(ids) for name, ids in self._dst_lists.items()}

    def leg_moved(self) -> None:
        """The bytes of the legs moved here, or of one packed leg, are in place; confirm after the last one."""
        with self._ended:
            self._moving -= 1
            last = self._moving == 0
        if last:
            self.open_gate()
        if last and self._node.progress.is_current and not self._confirms_at_once:
            self._node.pool.submit(lambda: self.attempt(self._confirm))
        elif last:
            self.attempt(self._confirm)

    @property
    def _confirms_at_once(self) -> bool:
        """Whether no lease word has to be waited for, which the progress thread must not do."""
        return all(leg.source.peer.table.is_mapped for leg in self._legs)

    def _confirm(self) -> None:
        engine = self._engine
        for leg in self._legs:
            table, ending = leg.source.peer.table, leg.ending
            if ending is not None and ending.seen is not None:  # read on the device, right after the last byte
                live = table.judge(ending.seen, self._ticket)
            else:
                live = table.word_state(self._ticket)
            if not live:
                raise BackendError(f"the lease table of {leg.source.peer.identity.name} went back in time")
        if self._alone and self._node.started == self._started_before and not self.stats.packed_ahead:
            self._legs[0].choice.took(self.elapsed_s - self.stats.posted_s)
        if self.succeed():
            release(self._node, engine, self._ticket)

    def _let_go(self) -> None:
        """The transfer has ended: what it used of its peers may be unmapped, even if the engine keeps the handle."""
        self._engine, self._legs, self._after = None, [], None

    def _stop_pulls(self) -> None:
        for pull in self._pulls:
            pull.stop()


def release(node: Node, engine: Engine, ticket: Ticket) -> None:
    """Tell every rank of the engine that this rank is done with the lease. Any thread."""
    message = Release(slot=ticket.slot, lease=ticket.lease, reader=node.identity.rank, readers=node.ranks)
    node.progress.post(lambda: node.directory.send_all(engine, message))


def sources_of(
    engine: Engine, ticket: Ticket, cache: Cache, node: Node, wire: str, allow_missing: bool
) -> list[Source]:
    """The ranks that together fill this rank's cache, joined. Kept with the engine.

    Raises InvalidTicket, FingerprintMismatch, LayoutMismatch.
    """
    key = (ticket.cache, cache.name, ticket.fingerprint, wire, allow_missing)
    known = engine.joins.get(key)
    if known is not None:
        return known
    holders = [peer for peer in engine.peers.values() if ticket.cache in peer.caches]
    if not holders:
        raise UnknownCache(f"no rank of engine {ticket.engine!r} has a cache {ticket.cache!r}")
    caches = [peer.caches[ticket.cache] for peer in holders]
    for remote in caches:
        check_fingerprints(cache, remote, ticket)
    first = node.identity.rank % len(caches)
    layouts = tuple(remote.layout for remote in caches)
    joins = join_packed(
        layouts,
        cache.layout,
        wire,
        first=first,
        allow_missing=allow_missing,
        src_scales=caches[0].scales,
        dst_scales=cache.scales,
    )
    together = Sources(
        key=new_transfer_id(), cache=ticket.cache, into_cache=cache.name, layouts=layouts, index=0, first=first
    )
    found = engine.joins[key] = [
        Source(holders[j.source], caches[j.source], j, _for_index(together, j.source) if len(caches) > 1 else None)
        for j in joins
    ]
    return found


def _for_index(together: Sources, index: int) -> Sources:
    return msgspec.structs.replace(together, index=index)
