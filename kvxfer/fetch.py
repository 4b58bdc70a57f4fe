"""Fetching: decode reads leased blocks from the ranks of a prefill engine into its own, as one transfer.

The order of `Fetch._attempt` is the protocol: find the engine, read the lease's record from every rank that is needed,
plan everything, then move, then read every lease word once more. Only then is the transfer done. Unless the packed
way is taken, no Python of the publisher has part in it.

Imports node, moves, packed, plan, remote.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvxfer import moves
from kvxfer.backends.base import Direction
from kvxfer.control.messages import Chunk, Ended, Message, PackedOffer, Pull, Refused, Release, Sources, Stop
from kvxfer.directory import Engine
from kvxfer.errors import (
    BackendError,
    FingerprintMismatch,
    InvalidTicket,
    KvxferError,
    NoCommonBackend,
    PeerGone,
    UnknownCache,
    rebuild,
)
from kvxfer.formats import PackedJoin, PackedPlan, join_packed
from kvxfer.kernels import PreparedPackedPlan, PreparedPlan
from kvxfer.layout import fingerprint_differences
from kvxfer.node import Node, new_transfer_id
from kvxfer.packed import PackedSink, borrow
from kvxfer.plan import TransferPlan, check_blocks
from kvxfer.remote import Peer, RemoteCache
from kvxfer.staging import Loan
from kvxfer.ticket import Ticket, fingerprint_digest
from kvxfer.transfer import Transfer

if TYPE_CHECKING:
    from kvxfer.cache import Cache

_log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.0005
_LAST_RETRY_S = 0.01
ANNOUNCEMENT_S = 1.0  # how long after its ticket a peer's newly registered cache may become known here


@dataclass(frozen=True)
class _Source:
    """One rank that a fetch reads from, and what to tell it where several fill the cache together."""

    peer: Peer
    cache: RemoteCache
    join: PackedJoin
    together: Sources | None


@dataclass(frozen=True)
class _Leg:
    """A source, with the plan of this fetch."""

    source: _Source
    plan: PreparedPlan | PreparedPackedPlan
    way: str


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
    ) -> None:
        super().__init__(node.progress, timeout_s=timeout_s, what=f"fetch of request {ticket.request_id!r}")
        self._node, self._cache = node, cache
        self._ticket, self._dst_lists = ticket, dst_lists
        self._wire = wire
        self._retry_s = _FIRST_RETRY_S
        self._engine: Engine | None = None
        self._legs: list[_Leg] = []
        self._pulls: list[_PullConversation] = []
        self._moving = 0

    def start(self) -> None:
        """Queue the first attempt. Any thread."""
        self.runs_as(self._node.pool.submit(self._run))

    def _run(self) -> None:
        try:
            self._attempt()
        except KvxferError as error:
            self.abort(error)
        except Exception as error:
            _log.exception("a fetch failed unexpectedly")
            self.abort(BackendError(f"unexpected {type(error).__name__}: {error}"))

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
            sources = sources_of(engine, self._ticket, self._cache, self._node, self._wire)
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
        if not self.begin():
            return
        self._legs = legs
        self._count(legs)
        self._move()

    def _prepare(self, source: _Source) -> _Leg | None:
        """Read the lease's record from one rank and plan; None when the lease has not been published yet."""
        ticket = self._ticket
        if source.peer.is_dead():
            raise PeerGone(f"the process of {source.peer.identity.name} has ended")
        if source.peer.table is None:
            raise InvalidTicket(f"{source.peer.identity.name} has no lease table")
        record = source.peer.table.record(ticket)
        if record is None:
            return None
        lists = check_blocks(source.cache.layout, record.lists(), tokens=ticket.tokens, role="source")
        way = best_way(source.cache, source.join, self._node)
        if way == "packed":
            counts = {name: len(ids) for name, ids in lists.items()}
            plan = PreparedPackedPlan(source.join.plan(counts, self._dst_lists, tokens=ticket.tokens))
        else:
            plan = PreparedPlan(source.join.plain.plan_checked(lists, self._dst_lists, tokens=ticket.tokens))
        return _Leg(source, plan, way)

    def _try_again(self, what: str, error: KvxferError | None = None, engine: Engine | None = None) -> None:
        """Attempt again a little later. With an engine: it is asked what it has, and `error` ends a long wait."""
        if error is not None:
            if self.elapsed_s > ANNOUNCEMENT_S:
                raise error
            self._node.directory.ask_again(engine)
        self.waits_for(what)
        self.arm()
        delay, self._retry_s = self._retry_s, min(2 * self._retry_s, _LAST_RETRY_S)
        self._node.progress.post(lambda: self._node.progress.call_later(delay, self.start))

    def _count(self, legs: list[_Leg]) -> None:
        plans = [leg.plan.plan for leg in legs]
        packed = any(leg.way == "packed" for leg in legs)
        self.count(
            backend="+".join(sorted({leg.source.peer.backend for leg in legs})),
            way="+".join(sorted({leg.way for leg in legs})),
            wire=self._wire,
            bytes=sum(plan.nbytes for plan in plans),
            wire_bytes=sum(
                p.wire_bytes if leg.way == "packed" else p.nbytes for p, leg in zip(plans, legs, strict=True)
            ),
            copies=sum(copies_of(plan) for plan in plans),
            peers=len(legs),
            conversation=packed,
        )

    def _move(self) -> None:
        packed = [leg for leg in self._legs if leg.way == "packed" and leg.plan.plan.wire_bytes]
        self._moving = 1 + len(packed)
        if packed:
            self.waits_for("packed chunks")
            self.arm()
            self._pulls = [_PullConversation(self, self._node, leg, self._ticket, self._cache) for leg in packed]
            self.on_stop(lambda: self._node.progress.post(self._stop_pulls))
            self._node.progress.post(lambda: [pull.start() for pull in self._pulls])
        if self.hold():
            try:
                moved = all([self._move_here(leg) for leg in self._legs if leg.way != "packed"])
            finally:
                self.drop()
            if moved:
                self.leg_moved()

    def _move_here(self, leg: _Leg) -> bool:
        cache, dst = leg.source.cache, self._cache.bases
        if leg.way == "mapped":
            threads = self._node.limits.copy_threads
            return moves.move_mapped(leg.plan, cache.mapped_bases, dst, self, threads=threads)
        return moves.move_direct(leg.plan, leg.source.peer.link, Direction.READ, cache.remote_bases, dst, self)

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
            try:
                self._confirm()
            except KvxferError as error:
                self.abort(error)

    def _confirm(self) -> None:
        for leg in self._legs:
            if not leg.source.peer.table.word_state(self._ticket):
                raise BackendError(f"the lease table of {leg.source.peer.identity.name} went back in time")
        if self.succeed():
            release(self._node, self._engine, self._ticket)

    def _stop_pulls(self) -> None:
        for pull in self._pulls:
            pull.stop()


def release(node: Node, engine: Engine, ticket: Ticket) -> None:
    """Tell every rank of the engine that this rank is done with the lease. Any thread."""
    message = Release(slot=ticket.slot, lease=ticket.lease, reader=node.identity.rank, readers=node.ranks)
    node.progress.post(lambda: node.directory.send_all(engine, message))


def best_way(remote: RemoteCache, joined: PackedJoin, node: Node) -> str:
    """The best way that this side allows; what is converted or compressed always goes packed.

    Raises NoCommonBackend.
    """
    if joined.plain is not None:
        return remote.best_way(node.ways)
    if "packed" in node.ways:
        return remote.best_way(("packed",))
    raise NoCommonBackend(
        f"wire format {str(joined.wire)!r} between these caches has to be packed and unpacked, and this connector "
        f"allows only {', '.join(node.ways)}: add 'packed' to its ways"
    )


def copies_of(plan: TransferPlan | PackedPlan) -> int:
    """Rows x segments."""
    if isinstance(plan, PackedPlan):
        return plan.raw.copies if plan.raw is not None else sum(len(part.rows) * len(part) for part in plan.parts)
    return plan.copies


def sources_of(engine: Engine, ticket: Ticket, cache: Cache, node: Node, wire: str) -> list[_Source]:
    """The ranks that together fill this rank's cache, joined. Kept with the engine.

    Raises InvalidTicket, FingerprintMismatch, LayoutMismatch.
    """
    key = (ticket.cache, cache.name, ticket.fingerprint, wire)
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
    joins = join_packed(layouts, cache.layout, wire, first=first)
    together = Sources(
        key=new_transfer_id(), cache=ticket.cache, into_cache=cache.name, layouts=layouts, index=0, first=first
    )
    found = engine.joins[key] = [
        _Source(holders[j.source], caches[j.source], j, _for_index(together, j.source) if len(caches) > 1 else None)
        for j in joins
    ]
    return found


def _for_index(together: Sources, index: int) -> Sources:
    return msgspec.structs.replace(together, index=index)


def check_fingerprints(cache: Cache, remote: RemoteCache, ticket: Ticket) -> None:
    """FingerprintMismatch unless both layouts and the ticket mean the same by KV."""
    differences = fingerprint_differences(cache.layout.fingerprint, remote.layout.fingerprint)
    if differences:
        lines = "".join(f"\n  - {line}" for line in differences)
        raise FingerprintMismatch(f"the caches do not mean the same by KV:{lines}")
    if fingerprint_digest(remote.layout.fingerprint) != ticket.fingerprint:
        raise FingerprintMismatch(f"the ticket of request {ticket.request_id!r} was signed for another fingerprint")


class _PullConversation:
    """One packed leg: asks the publisher to pack, scatters what comes. Progress thread only."""

    def __init__(self, fetch: Fetch, node: Node, leg: _Leg, ticket: Ticket, cache: Cache) -> None:
        self._fetch, self._node, self._leg = fetch, node, leg
        self._ticket, self._cache = ticket, cache
        self._id = new_transfer_id()
        self._peer = leg.source.peer
        self._loan: Loan | None = None
        self._sink: PackedSink | None = None
        self._line: object = None
        self._asked = self._writer_ended = self._complete = False

    def start(self) -> None:
        node = self._node
        self._fetch.waits_for("staging buffers")
        try:
            self._line = borrow(
                node.staging,
                [self._leg.plan],
                node.limits.chunk_bytes,
                lambda loan: node.progress.post(lambda: self._pull(loan)),
            )
        except KvxferError as error:
            self._fetch.abort(error)

    def _pull(self, loan: Loan) -> None:
        if self._fetch.done() or self._fetch.stopping:
            self._node.staging.give_back(loan)
            return
        if not self._peer.session.open:  # it ended while this fetch stood in line, and told its conversations then
            self._node.staging.give_back(loan)
            self._fetch.abort(PeerGone(f"{self._peer.identity.name} went away"))
            return
        self._loan = loan
        node = self._node
        self._sink = PackedSink(
            progress=node.progress,
            pool=node.pool,
            peer=self._peer,
            transfer=self._id,
            stages=[self._leg.plan],
            dst_bases=self._cache.bases,
            staging_address=node.staging.memory.address,
            loan=loan,
            threads=node.limits.copy_threads,
            hold=self._fetch.hold,
            drop=self._dropped,
            complete=self._completed,
            fail=self._failed,
            advance=self._fetch.advance,
        )
        self._peer.conversations[self._id] = self
        self._asked = True
        self._fetch.waits_for(f"chunks from {self._peer.identity.name}")
        together = self._leg.source.together
        if together is not None and together.key not in self._peer.told_sources:
            self._peer.told_sources.add(together.key)
            self._peer.session.send(together)
        self._peer.session.send(
            Pull(
                transfer=self._id,
                slot=self._ticket.slot,
                lease=self._ticket.lease,
                cache=self._ticket.cache,
                into_cache=self._cache.name,
                blocks=self._fetch.block_counts(),
                sources=0 if together is None else together.key,
                offer=PackedOffer(
                    staging=node.staging_handles,
                    offset=loan.offset,
                    slot_bytes=loan.slot_bytes,
                    slots=loan.slots,
                    wire=self._fetch.wire,
                    checksums=node.checksums,
                ),
            )
        )

    def handle(self, message: Message) -> None:
        try:
            if isinstance(message, Chunk):
                self._sink.take(message)
            elif isinstance(message, Ended):
                self._writer_ended = True
                if message.error:
                    self._fetch.abort(rebuild(message.error, message.reason))
                self._give_back()
            elif isinstance(message, Refused):
                self._writer_ended = True
                self._fetch.abort(rebuild(message.error, message.reason))
                self._give_back()
        except KvxferError as error:
            self._fetch.abort(error)

    def peer_gone(self, reason: PeerGone) -> None:
        self._fetch.abort(reason)
        self._node.when_dead(self._peer, self._writer_is_dead)

    def stop(self) -> None:
        """The fetch was aborted: have the publisher stop writing into the staging."""
        if self._asked and not self._writer_ended:
            self._peer.session.send(Stop(transfer=self._id))
        elif self._line is not None and not self._asked:
            self._node.staging.forget(self._line)

    def _completed(self) -> None:
        self._complete = True
        self._fetch.leg_moved()

    def _failed(self, error: KvxferError) -> None:
        self._fetch.abort(error)

    def _dropped(self) -> None:
        self._fetch.drop()
        self._give_back()

    def _writer_is_dead(self) -> None:
        self._writer_ended = True
        self._give_back()

    def _give_back(self) -> None:
        """Return the staging once the publisher writes no more and no chunk is being scattered."""
        if self._loan is not None and self._writer_ended and not self._sink.busy:
            self._peer.conversations.pop(self._id, None)
            loan, self._loan = self._loan, None
            self._node.staging.give_back(loan)
