"""Fetching: decode reads leased blocks from the ranks of a prefill engine into its own, as one transfer.

The order of `Fetch._attempt` is the protocol: find the engine, read the lease's record from every rank that is needed,
plan everything, then move, then read every lease word once more. Only then is the transfer done. Unless the packed
way is taken, no Python of the publisher has part in it; where it is, and nothing else comes into question, chunks are
asked for first, and planned for while the other side packs them.

Imports node, route, match, moves, pull, plan, remote.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.backends.base import Direction
from kvxfer.control.messages import Release
from kvxfer.errors import (
    BackendError,
    InvalidTicket,
    KvxferError,
    PeerGone,
    UnknownCache,
    as_kvxfer_error,
)
from kvxfer.formats import PackedPlan
from kvxfer.kernels import PIECE_BYTES, PreparedPackedPlan, PreparedPlan
from kvxfer.node import Node
from kvxfer.peers.directory import Engine
from kvxfer.peers.remote import Published
from kvxfer.plan import TransferPlan, check_blocks
from kvxfer.plan.request import CheckedLists, Request
from kvxfer.progress import Job
from kvxfer.ticket import Ticket
from kvxfer.transfers import moves
from kvxfer.transfers.choice import Choice
from kvxfer.transfers.match import best_way, choose_way, why_not_mapped
from kvxfer.transfers.pull import PullLeg
from kvxfer.transfers.route import MAPPED, PACKED, Route, Source, route_of
from kvxfer.transfers.shelf import ShelfLeg, Shelved, look_on_shelf, may_be_on_shelf, unpack_mapped
from kvxfer.transfers.transfer import Transfer

if TYPE_CHECKING:
    from kvxfer.cache import Cache
    from kvxfer.cuda import Event
    from kvxfer.cuda.lanes import Ending
    from kvxfer.cuda.pairing import Flight

_log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.0005
_LAST_RETRY_S = 0.01
_RETRY_SHARE = 0.125  # of the time waited so far: looking again costs little, and adds little to a long wait
_HERE_BYTES = 256 << 10  # copied in host memory sooner than a mover thread wakes up and is waited for
_WATCH_S = 1e-3
_NAP_US = 50  # between two looks at a device that only a mover thread waits for
ANNOUNCEMENT_S = 1.0  # how long after its ticket a peer's newly registered cache may become known here


@dataclass(slots=True)
class Leg:
    """A source, with what this fetch takes from it: pairs of whole blocks, or else a plan, be it made later."""

    source: Source
    choice: Choice
    request: Request | None = None
    published: Published | None = None  # what the request was made from, or the plan will be
    plan: PreparedPlan | PreparedPackedPlan | None = None
    most_bytes: tuple[int, int] = (0, 0)  # of the packed way: bytes and those of one segment, without a plan at most
    shelved: Shelved | None = None  # where its bytes lie packed ahead
    ending: Ending | None = None  # of the mapped way on a GPU: the verdict that the device has read

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
        dst_lists: CheckedLists,
        *,
        wire: str,
        timeout_s: float,
        allow_missing: bool,
        after: Event | None = None,
    ) -> None:
        """`dst_lists` are of the cache's `BlockTable`. `after`: nothing is written before this event has passed."""
        super().__init__(
            node.progress, timeout_s=timeout_s, what=f"fetch of request {ticket.request_id!r}", gates=cache.gates
        )
        self._node, self._cache = node, cache
        self._ticket, self._dst = ticket, dst_lists
        self._wire = wire
        self.allow_missing = allow_missing
        self._engine: Engine | None = None
        self._legs: list[Leg] = []
        self._pulls: list[PullLeg | ShelfLeg] = []
        self._flights: list[Flight] = []
        self._moving = 0
        self._alone, self._started_before = False, 0  # when it began: whether nothing else was under way
        self._after = after
        self._route_key = (ticket.cache, cache.name, ticket.fingerprint, wire, allow_missing)
        self.on_end(self._let_go)

    def start(self, *, here: bool = False) -> None:
        """Make an attempt: with `here` on the calling thread, where that waits for nothing, else on a mover thread."""
        engine = self._node.directory.find(self._ticket) if here else None
        route = None if engine is None else engine.joins.get(self._route_key)
        if route is not None and route.at_hand and not self._node.progress.is_current:
            self._engine = engine
            self.attempt(lambda: self._follow(route, here=True))
        else:
            self._hand_over(self._attempt)

    def _hand_over(self, step: Callable[[], None]) -> None:
        """Have a mover thread take a step, or whoever waits for the transfer before one has come to it."""
        self._may_run(self._node.pool.submit(lambda: self.attempt(step)))

    def _may_run(self, job: Job) -> None:
        """Whoever waits for the transfer may run this, before a mover thread has come to it."""
        nbytes = sum(self._cache.block_bytes[name] * count for name, count in self.block_counts().items())
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
            route = engine.joins.get(self._route_key) or route_of(
                engine, self._route_key, self._ticket, self._cache, self._node, self._wire, self.allow_missing
            )
        except UnknownCache as error:
            self._try_again(f"cache {self._ticket.cache!r} of {self._ticket.engine!r}", error, engine)
            return
        self._follow(route)

    def _follow(self, route: Route, *, here: bool = False) -> None:
        """Read the lease from every rank, and move what it says."""
        leases = []
        for source in route.sources:
            published = self._published(source)
            if published is None:
                self._try_again("the lease to be published")
                return
            leases.append((source, published))
        legs = self._pairs(leases)
        if legs is not None:
            self._move_blocks(route, legs, here)
            return
        asks = [source.way == PACKED.way and not may_be_on_shelf(self._node, published) for source, published in leases]
        if here and not (all(asks) and (self._after is None or self._after.done())):
            self._hand_over(self._attempt)
            return
        legs = [
            self._unplanned(source, published) if asked else self._plan(source, published)
            for (source, published), asked in zip(leases, asks, strict=True)
        ]
        if any(leg.way == "packed" for leg in legs) and not self._passed(self._after):
            return
        if not self.begin():
            return
        self._legs = legs
        self._alone, self._started_before = len(legs) == len(self._node.active) == 1, self._node.started
        self._count_all()
        self._move()

    def _passed(self, event: Event | None) -> bool:
        """Wait on the host until an event has passed; False when the transfer ended before."""
        while event is not None and not event.done():
            if self.done():
                return False
            time.sleep(_FIRST_RETRY_S)
        return True

    def _published(self, source: Source) -> Published | None:
        """The lease as one rank has it; None when it has not been published yet.

        What a GPU copies is verified while it does: see `_launch`.
        """
        if source.peer.is_dead():
            raise PeerGone(f"the process of {source.peer.identity.name} has ended")
        if source.peer.table is None:
            raise InvalidTicket(f"{source.peer.identity.name} has no lease table")
        return source.peer.table.published(self._ticket, verified=not self._verifies_late(source))

    def _verifies_late(self, source: Source) -> bool:
        """Whether what this rank's lease says is first copied, by a GPU, and then verified."""
        return source.pairing is not None and self._cache.gates is not None

    def _pairs(self, leases: list[tuple[Source, Published]]) -> list[Leg] | None:
        """The legs where whole blocks are copied from every rank, the mapped way; else None."""
        legs = []
        for source, published in leases:
            request = None
            if source.pairing is not None:
                request = source.pairing.request(published.data, self._dst, tokens=self._ticket.tokens)
            if request is None:
                return None
            legs.append(Leg(source, MAPPED, request, published, ending=self._ending(source)))
        return legs or None

    def _unplanned(self, source: Source, published: Published) -> Leg:
        """The leg of one rank that is asked for chunks before there is a plan."""
        most = source.join.most_bytes(self.block_counts(), tokens=self._ticket.tokens)
        return Leg(source, PACKED, published=published, most_bytes=most)

    def _plan(self, source: Source, published: Published) -> Leg:
        """The leg of one rank in whatever way."""
        if self._verifies_late(source):
            source.peer.table.verify(published, self._ticket)
        ticket, lists = self._ticket, self._lists_of(source, published)

        @functools.cache
        def plain() -> TransferPlan | PackedPlan:
            make = source.join.plan if source.join.plain is None else source.join.plain.plan_checked
            return make(lists, self._cache.blocks.arrays(self._dst), tokens=ticket.tokens)

        way = source.way or best_way(self._cache, source.cache, source.join, self._node)  # says why there is none
        choice = choose_way(way, self._node, source.peer, plain)
        if choice.way == "packed":
            counts = {name: len(ids) for name, ids in lists.items()}
            plan = self._plan_packed(source, counts)
            shelved = look_on_shelf(self._node, self._cache, source, plan.plan, ticket, counts, published)
            most = plan.plan.wire_bytes, plan.plan.largest_segment_bytes
            return Leg(source, choice, plan=plan, most_bytes=most, shelved=shelved)
        plan = self._cache.prepare(plain())
        return Leg(source, choice, plan=plan, ending=self._ending(source) if choice.way == "mapped" else None)

    def _lists_of(self, source: Source, published: Published) -> dict[str, np.ndarray]:
        lists = published.record.lists()
        return check_blocks(source.cache.layout, lists, tokens=self._ticket.tokens, role="source")

    def _plan_packed(self, source: Source, counts: dict[str, int]) -> PreparedPackedPlan:
        dst_lists = self._cache.blocks.arrays(self._dst)
        return self._cache.prepare_packed(source.join.plan(counts, dst_lists, tokens=self._ticket.tokens))

    def plan_late(self, leg: Leg) -> None:
        """Make the plan of a leg whose chunks have been asked for. Mover thread."""
        if leg.plan is None:
            lists = self._lists_of(leg.source, leg.published)
            leg.plan = self._plan_packed(leg.source, {name: len(ids) for name, ids in lists.items()})

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
                self._node.directory.forget(engine)
                raise error
            self._node.directory.ask_again(engine)
        self.waits_for(what)
        self.arm()
        delay = min(max(_FIRST_RETRY_S, _RETRY_SHARE * self.elapsed_s), _LAST_RETRY_S)
        self._node.progress.post(lambda: self._node.progress.call_later(delay, self.start))

    # --- whole blocks ---------------------------------------------------------------------------------------

    def _move_blocks(self, route: Route, legs: list[Leg], here: bool) -> None:
        """Copy whole blocks, the mapped way. With `here` the caller's thread is held up for a moment at most: a GPU
        copies without it, and a mover thread takes what is long in host memory."""
        self._legs = legs
        nbytes = sum(leg.request.nbytes for leg in legs)
        copies = sum(leg.request.copies for leg in legs)
        self.count(bytes=nbytes, wire_bytes=nbytes, copies=copies, **route.counted)
        if self._cache.gates is not None:
            if not here:
                self._launch()
            elif not self._launch(spare=True):
                self._hand_over(self._launch)
        elif here and nbytes > _HERE_BYTES:
            self._hand_over(self._copy_blocks)
        else:
            self._copy_blocks()

    def _copy_blocks(self) -> None:
        if not self.begin():
            if self.done():
                self._let_go()
            return
        self._moving = 1
        if self.hold():
            threads = self._node.limits.copy_threads
            try:
                moved = all(
                    [moves.move_blocks(leg.source.pairing, leg.request, self, threads=threads) for leg in self._legs]
                )
            finally:
                self.drop()
            if moved:
                self.leg_moved()

    def _launch(self, *, spare: bool = False) -> bool:
        """Have the device copy, and see later that it has. False where no lane can be had at once.

        With `spare` lanes are left to the mover threads, and none has to grow, which may wait for the device. Without,
        a mover thread comes back to it when a lane has been given back.
        """
        of_device = self._legs[0].source.pairing.lanes
        again = None if spare else lambda: self._hand_over(self._launch)
        lanes = of_device.take(len(self._legs), spare=spare, otherwise=again)
        if lanes is None:
            return False
        if spare and not all(leg.source.pairing.has_room(leg.request, lane) for leg in self._legs for lane in lanes):
            of_device.give_back(lanes)
            return False
        if not self.begin() or not self.hold():
            of_device.give_back(lanes)
            if self.done():
                self._let_go()
            return True
        self._moving = 1
        if len(self._legs) == 1:
            self._legs[0].ending.gate = self.gate
        after = () if self._after is None else (self._after.address,)
        flights = []
        try:
            for leg in self._legs:
                flights.append(leg.source.pairing.launch(leg.request, lanes.pop(), after=after, ending=leg.ending))
            for leg in self._legs:  # blocks that exist, whatever they are: the record's digest can wait for the launch
                leg.source.peer.table.verify(leg.published, self._ticket)
        except Exception as error:
            self.abort(as_kvxfer_error(error))
        of_device.give_back(lanes)  # those that are left
        if not flights:
            self.drop()
            return True
        self._flights = flights
        self.driven_by(self._look_at_flights)
        self._node.pool.watch(self._watch_flights)
        return True

    def arm(self) -> None:
        """As of `Transfer`. Who neither waits nor polls depends on a mover thread."""
        super().arm()
        if self._flights:
            self._node.pool.hurry()

    def _watch_flights(self) -> None:
        """See the end of it, if nobody has. Mover thread, which has others to look after."""
        if self._flights:
            self._look_at_flights(_WATCH_S, nap_us=_NAP_US)
        if self._flights:
            self._node.pool.watch(self._watch_flights)

    def _look_at_flights(self, seconds: float, *, nap_us: int = 0) -> None:
        """Wait up to so long for what was launched. Whoever sees the last byte arrive ends the transfer."""
        until, failure = time.monotonic() + seconds, None
        for flight in self._flights:
            try:
                if not flight.has_landed(max(0.0, until - time.monotonic()), nap_us=nap_us):
                    return
            except KvxferError as error:  # of the device: nothing more is written
                failure = error
        with self._lock:
            flights, self._flights = self._flights, []
            self.driven_by(None)
        if not flights:  # another thread has seen it
            return
        if failure is not None:
            self.abort(failure)
            for flight in flights:
                flight.lose()
        else:
            self.advance(sum(leg.request.nbytes for leg in self._legs))
            for flight in flights:
                flight.end()
        moved = not self.stopping
        self.drop()
        if moved:
            self.leg_moved()

    # --- every way ------------------------------------------------------------------------------------------

    def _count_all(self) -> None:
        """What the statistics say, but for the sums of plans that are not made yet."""
        legs = self._legs
        not_mapped = {why_not_mapped(self._cache, leg.source.cache, self._node) for leg in legs if leg.way != "mapped"}
        asked = any(leg.way == "packed" and leg.shelved is None for leg in legs)
        self.count(
            backend="+".join(sorted({leg.source.peer.backend for leg in legs})),
            way="+".join(sorted({leg.way for leg in legs})),
            choice="; ".join(leg.choice.why for leg in legs if leg.choice.why),
            why_not_mapped="; ".join(sorted(not_mapped - {""})),
            packed_ahead=any(leg.shelved for leg in legs),
            wire=self._wire,
            peers=len(legs),
            missing=legs[0].source.join.missing if legs else (),
            conversation=asked,
        )
        self.count_plans()

    def count_plans(self) -> None:
        """Put the sums of all plans into the statistics, once there are all. While legs are under way: progress
        thread."""
        if any(leg.plan is None and leg.most_bytes[0] for leg in self._legs):
            return
        planned = [(leg, leg.plan.plan) for leg in self._legs if leg.plan is not None]
        self.count(
            bytes=sum(plan.nbytes for _, plan in planned),
            wire_bytes=sum(plan.wire_bytes if leg.way == "packed" else plan.nbytes for leg, plan in planned),
            copies=sum(plan.copies for _, plan in planned),
        )

    def _move(self) -> None:
        packed = [leg for leg in self._legs if leg.way == "packed" and leg.most_bytes[0]]
        asked = [leg for leg in packed if leg.shelved is None or not leg.shelved.mapped]
        here = [leg for leg in self._legs if leg.way == "mapped" or (leg in packed and leg not in asked)]
        direct = [leg for leg in self._legs if leg.way == "direct"]
        self._moving = 1 + len(asked) + len(direct)
        if asked:
            self.waits_for("packed chunks")
            self.arm()
            self._pulls = [self._pull(leg) for leg in asked]
            self.on_stop(lambda: self._node.progress.post(self._stop_pulls))
            for pull in self._pulls:
                if isinstance(pull, ShelfLeg):
                    self._node.progress.post(pull.start)
                    continue
                try:
                    pull.start()
                finally:  # what was asked is only given back when there has been a plan
                    self._may_run(self._node.pool.submit(pull.plan))
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
        return self._cache.blocks.counts(self._dst)

    def leg_moved(self) -> None:
        """The bytes of the legs moved here, or of one packed leg, are in place; confirm after the last one."""
        with self._lock:
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
        engine, legs = self._engine, self._legs
        for leg in legs:
            table, ending = leg.source.peer.table, leg.ending
            if ending is not None and ending.seen is not None:  # read on the device, right after the last byte
                live = table.judge(ending.seen, self._ticket)
            else:
                live = table.word_state(self._ticket)
            if not live:
                raise BackendError(f"the lease table of {leg.source.peer.identity.name} went back in time")
        if self._alone and legs and self._node.started == self._started_before and not self.stats.packed_ahead:
            legs[0].choice.took(self.elapsed_s - self.stats.posted_s)
        if self.succeed():
            release(self._node, engine, self._ticket)

    def _let_go(self) -> None:
        """The transfer has ended: what it used of its peers may be unmapped, even if the engine keeps the handle."""
        self._engine, self._legs, self._after = None, [], None

    def job_was_interrupted(self) -> None:
        for pull in self._pulls:
            if isinstance(pull, PullLeg):
                pull.was_interrupted()

    def _stop_pulls(self) -> None:
        for pull in self._pulls:
            pull.stop()


def release(node: Node, engine: Engine, ticket: Ticket) -> None:
    """Tell every rank of the engine, within some milliseconds, that this rank is done with the lease. Any thread."""
    message = Release(slot=ticket.slot, lease=ticket.lease, reader=node.identity.rank, readers=node.ranks)
    node.progress.post_soon(lambda: node.directory.send_all(engine, message))
