"""The packed way of a fetch, both ends: decode asks for chunks into staging that it lends, prefill packs them.

This is the one part of a fetch in which the publisher's Python takes part. Progress thread only.

Imports packed, match, node and the messages.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvxfer.control.messages import Chunks, Credit, Ended, Message, Pull, Refused, Stop
from kvxfer.errors import (
    BackendError,
    Cancelled,
    InvalidRequest,
    InvalidTicket,
    KvxferError,
    PeerGone,
    as_kvxfer_error,
    rebuild,
)
from kvxfer.formats import PackedJoin, join_packed
from kvxfer.lease import Lease
from kvxfer.node import Node, new_transfer_id
from kvxfer.peers.remote import Peer, RemoteCache, remember
from kvxfer.ticket import Ticket
from kvxfer.transfers.packed import PackedSink, PackedSource, borrow, offer, staging_for
from kvxfer.transfers.staging import Loan

if TYPE_CHECKING:
    from kvxfer.cache import Cache
    from kvxfer.transfers.fetch import Fetch, Leg

_MAX_JOINS = 64  # of one peer, and of one cache


class PullLeg:
    """One packed leg: asks the publisher to pack, plans while it does, scatters what comes. Progress thread only,
    except where it says so."""

    def __init__(self, fetch: Fetch, node: Node, leg: Leg, ticket: Ticket, cache: Cache) -> None:
        self._fetch, self._node, self._leg = fetch, node, leg
        self._ticket, self._cache = ticket, cache
        self._id = new_transfer_id()
        self._peer = leg.source.peer
        self._loan: Loan | None = None
        self._sink: PackedSink | None = None
        self._early: list[Chunks] = []  # told of before the plan was made
        self._leave_line: Callable[[], None] | None = None
        self._asked = self._writer_ended = self._peer_is_gone = False
        self._planning = True
        self._planner = 0  # the thread that plans
        self._may_plan = threading.Lock()  # taken, for good, by whoever plans, or sees to it that nobody does

    def start(self) -> None:
        """Ask for chunks, once there is staging for them. Any thread."""
        self._fetch.waits_for("staging buffers")
        try:
            ring = staging_for(self._node, self._peer, self._cache, self._leg.source.cache)
            self._leave_line = borrow(self._node, self._peer, ring, *self._leg.most_bytes, self._pull)
        except KvxferError as error:
            self._fetch.abort(error)

    def _pull(self, loan: Loan) -> None:
        """Any thread: to wake the progress thread first would take as long as the question's way. That may be the
        thread of another fetch, which gives staging back: whatever goes wrong here ends this one."""
        late = True
        try:
            self._ask_with(loan)
            there = self._peer.session.open and not self._peer.session.lost
            late = not self._planning or not there or self._fetch.done() or self._fetch.stopping
        except BaseException as error:
            self._fetch.abort(as_kvxfer_error(error))
            if not isinstance(error, Exception):
                raise
        finally:
            self._asked = True  # not before: a request to stop must not overtake the question
            if late:
                self._node.progress.do(self._asked_late)

    def _ask_with(self, loan: Loan) -> None:
        gone = not self._peer.session.open  # it told its conversations, while this fetch stood in line
        if gone:
            self._fetch.abort(PeerGone(f"{self._peer.identity.name} went away"))
        if gone or self._fetch.done() or self._fetch.stopping:
            self._let_plan_go()
            loan.give_back()
            return
        self._loan = loan
        self._peer.conversations[self._id] = self
        self._fetch.waits_for(f"chunks from {self._peer.identity.name}")
        try:
            self._ask(loan)
        except KvxferError:  # the layouts of all ranks may be more than a message may have
            self._writer_ended = True
            raise

    def _ask(self, loan: Loan) -> None:
        session, together = self._peer.session, self._leg.source.together
        if together is not None and together.key not in self._peer.told_sources:
            session.send(together)
            self._peer.told_sources.add(together.key)
        session.send(
            Pull(
                transfer=self._id,
                slot=self._ticket.slot,
                lease=self._ticket.lease,
                cache=self._ticket.cache,
                into_cache=self._cache.name,
                blocks=self._fetch.block_counts(),
                sources=0 if together is None else together.key,
                allow_missing=self._fetch.allow_missing,
                offer=offer(self._node, loan, self._fetch.wire),
            )
        )

    def _asked_late(self) -> None:
        """What may have happened while the question was asked, and was told to nobody."""
        session = self._peer.session
        if self._id in self._peer.conversations and (session.lost or not session.open):
            self.peer_gone(PeerGone(f"{self._peer.identity.name} went away"))
        if self._fetch.done() or self._fetch.stopping:
            self._ask_to_stop()
            self._give_back()  # where nothing was asked
        self._begin()

    def plan(self) -> None:
        """Do what the first chunk needs: once, on any thread but this one's."""

        def plan() -> None:
            if self._fetch.done() or self._fetch.stopping:
                return
            self._fetch.plan_late(self._leg)
            if self._cache.device != "cpu" and not self._leg.plan.is_ready("unpack", self._cache.bases):
                self._leg.plan.get_ready("unpack", self._cache.bases)

        self._planner = threading.get_ident()
        try:
            if self._may_plan.acquire(blocking=False):
                self._fetch.attempt(plan)
        finally:
            self._node.progress.post(self._planned)

    def was_interrupted(self) -> None:
        """The calling thread was: if it planned, it does no more, and may not have come to say so. Any thread."""
        if self._planner == threading.get_ident():
            self._node.progress.post(self._planned)

    def _planned(self) -> None:
        """Nobody plans any more. Idempotent."""
        self._planning = False
        if self._leg.plan is None:  # whoever was to make it was interrupted, or the fetch has ended
            self._fetch.abort(BackendError("the plan of the fetch was not made"))
        self._begin()
        self._give_back()  # where the writer has ended by now, and nothing is left to be scattered
        if self._loan is None and (self._fetch.done() or self._fetch.stopping):
            self._let_plan_go()

    def _begin(self) -> None:
        """Once there is a plan, and staging is lent: scatter what has come, and what comes."""
        if self._planning or self._loan is None or self._sink is not None:
            return
        if self._fetch.done() or self._fetch.stopping:
            return
        self._fetch.count_plans()
        self._sink = PackedSink(
            self._node,
            self._peer,
            self._id,
            self._fetch,
            [self._leg.plan],
            self._cache.bases,
            self._loan,
            dropped=self._give_back,
            complete=self._completed,
        )
        if self._sink.is_complete:  # nothing comes
            self._completed()
            return
        early, self._early = self._early, []
        for message in early:
            self.handle(message)

    def _take(self, message: Chunks) -> None:
        if self._sink is not None:
            self._sink.take(message)
            return
        self._early.append(message)
        if sum(len(early.placed) for early in self._early) > self._loan.slots:
            raise BackendError(f"{self._peer.identity.name} tells of more chunks than it was lent staging for")

    def handle(self, message: Message) -> None:
        self._begin()  # where the answer is here before whoever asked goes on
        try:
            if isinstance(message, Chunks):
                self._take(message)
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
        if self._peer_is_gone:
            return
        self._peer_is_gone = True
        self._fetch.abort(reason)
        self._node.when_dead(self._peer, self._writer_is_dead, settled=lambda: self._loan is None)

    def stop(self) -> None:
        """The fetch was aborted: have the publisher stop writing into the staging."""
        if self._may_plan.acquire(blocking=False):
            self._planning = False
        if self._asked:
            self._ask_to_stop()
        elif self._leave_line is not None and self._loan is None:
            self._leave_line()
            self._let_plan_go()
        self._give_back()  # where only the plan was waited for

    def _ask_to_stop(self) -> None:
        """Say it until it is answered: the word or its answer may be lost with a connection."""
        if self._loan is not None and not self._writer_ended and self._peer.session.open:
            self._peer.session.send(Stop(transfer=self._id))
            self._node.progress.call_later(self._node.limits.peer_timeout_s, self._ask_to_stop)

    def _completed(self) -> None:
        self._writer_ended = True  # every chunk has come, and each is written once
        self._fetch.leg_moved()

    def _writer_is_dead(self) -> None:
        self._writer_ended = True
        self._give_back()

    def _give_back(self) -> None:
        """Return the staging once the publisher writes no more and no chunk is, or is about to be, scattered."""
        at_work = self._planning or (self._sink is not None and self._sink.busy)
        if self._loan is not None and self._writer_ended and not at_work:
            self._peer.conversations.pop(self._id, None)
            loan, self._loan = self._loan, None
            self._let_plan_go()
            loan.give_back()

    def _let_plan_go(self) -> None:
        """Other plans may have the memory of its tables."""
        if self._leg.plan is not None and not self._planning:
            self._leg.plan.let_go()


class Serve:
    """A pull being served: the publisher's side of a packed leg. Progress thread only."""

    def __init__(self, node: Node, cache: Cache, lease: Lease, peer: Peer, pull: Pull) -> None:
        """Raises what the peer is refused for."""
        remote = peer.caches.get(pull.into_cache)
        if remote is None:
            raise InvalidTicket(f"{peer.identity.name} has no cache {pull.into_cache!r}")
        joined = _join_for(peer, cache, pull, remote)
        plan = cache.foresight.asked(lease, joined, pull.blocks)
        if plan is None:
            plan = cache.prepare_packed(joined.plan(lease.lists, pull.blocks, tokens=lease.ticket.tokens))
        self._peer, self._pull = peer, pull
        try:
            self._source = PackedSource(node, peer, pull.transfer, [plan], cache, pull.offer, written=self._written)
        except BaseException:
            plan.let_go()
            raise

    def start(self) -> None:
        """Begin to pack. From here on the peer is told `Ended`, and that only when nothing is written any more."""
        self._peer.conversations[self._pull.transfer] = self
        try:
            self._source.queue_stage(0)
        except Exception as failure:
            self._source.stop(as_kvxfer_error(failure))

    def handle(self, message: Message) -> None:
        try:
            if isinstance(message, Credit):
                self._source.credit(message.slots)
            elif isinstance(message, Stop):
                self._source.stop(Cancelled("the fetching side stopped"))
        except KvxferError as error:
            self._source.stop(error)

    def peer_gone(self, reason: PeerGone) -> None:
        self._source.stop(reason)

    def _written(self, error: KvxferError | None) -> None:
        name, reason = (type(error).__name__, str(error)) if error else ("", "")
        self._peer.session.send(Ended(transfer=self._pull.transfer, error=name, reason=reason))
        self._peer.conversations.pop(self._pull.transfer, None)


def _join_for(peer: Peer, cache: Cache, pull: Pull, remote: RemoteCache) -> PackedJoin:
    """This rank's part of the peer's cache, kept with the peer. Raises what the peer is refused for."""
    key = (cache.name, pull.into_cache, pull.sources, pull.offer.wire, pull.allow_missing)
    if key not in peer.joins:
        layouts, index, first = (cache.layout,), 0, 0
        if pull.sources:
            told = peer.sources.get(pull.sources)
            if told is None or not 0 <= told.index < len(told.layouts):
                raise InvalidRequest("the pull names sources that were not told, or make no sense")
            layouts, index, first = told.layouts, told.index, told.first
            if layouts[index] != cache.unbound_layout:
                raise InvalidRequest(f"layout {index} of the sources is not that of cache {cache.name!r}")
        scales = {"src_scales": cache.scales, "dst_scales": remote.scales}
        options = {"first": first, "allow_missing": pull.allow_missing, **scales}
        given = [[layout.unbound() for layout in (*layouts, remote.layout)], pull.offer.wire, index, options]
        digest = hashlib.blake2b(msgspec.json.encode(given)).digest()
        if digest not in cache.asked_joins:  # another peer may have the same
            joins = join_packed(layouts, remote.layout, pull.offer.wire, **options)
            found = [joined for joined in joins if joined.source == index]
            if not found:
                raise InvalidRequest(f"cache {cache.name!r} has no part in what the peer asks for")
            remember(cache.asked_joins, digest, found[0], limit=_MAX_JOINS)
        remember(peer.joins, key, cache.asked_joins[digest], limit=_MAX_JOINS)
    return peer.joins[key]
