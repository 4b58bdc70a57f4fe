"""Sending: prefill writes its blocks into blocks that decode has reserved, at once or layer by layer.

The sender claims the reservation, writes after it was granted, and says when it has ended. Until then, or until its
process is known to be dead, the reserved blocks belong to it: a cancelled or expired reservation drains first.

Imports node, match, moves, packed, plan, remote. The other end is reserve.py.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.backends.base import Direction
from kvxfer.control.messages import (
    Claim,
    Credit,
    Ended,
    Grant,
    Message,
    Received,
    Refused,
    Stop,
)
from kvxfer.errors import (
    BackendError,
    Cancelled,
    InvalidRequest,
    KvxferError,
    PeerGone,
    UnknownCache,
    as_kvxfer_error,
    rebuild,
)
from kvxfer.formats import PackedPlan, join_packed
from kvxfer.kernels import PreparedPackedPlan, PreparedPlan
from kvxfer.node import Node, new_transfer_id
from kvxfer.peers.directory import Engine
from kvxfer.peers.remote import Peer, RemoteCache
from kvxfer.plan import TransferPlan, check_blocks
from kvxfer.ticket import Ticket
from kvxfer.transfers import moves
from kvxfer.transfers.fetch import ANNOUNCEMENT_S
from kvxfer.transfers.match import best_way, check_fingerprints, choose_way, packed_stages, why_not_mapped
from kvxfer.transfers.packed import PackedSource
from kvxfer.transfers.transfer import Transfer

if TYPE_CHECKING:
    from kvxfer.cache import Cache
    from kvxfer.cuda import Event

_log = logging.getLogger(__name__)

_RETRY_S = 0.002


class Send(Transfer):
    """Blocks on their way into a peer's reservation. Made by `Cache.send`.

    With ``layerwise=True`` nothing moves before `layer_ready` has been called for a layer; each layer moves when it is
    ready, while later ones are still being computed.
    """

    def __init__(
        self,
        node: Node,
        cache: Cache,
        ticket: Ticket,
        src_lists: dict[str, np.ndarray],
        *,
        layerwise: bool,
        wire: str,
        timeout_s: float,
        allow_missing: bool,
        after: Event | None = None,
    ) -> None:
        """`after`: the blocks are read once this event has passed; with `layerwise` each layer has its own."""
        super().__init__(
            node.progress, timeout_s=timeout_s, what=f"send of request {ticket.request_id!r}", gates=cache.gates
        )
        self._node, self._cache = node, cache
        self._ticket, self._src_lists = ticket, src_lists
        self._layerwise, self._wire, self._allow_missing = layerwise, wire, allow_missing
        self._layers = cache.layout.layers
        self._ready: set[int] = set() if layerwise else {0}
        self._reported: dict[str, object] = {}
        self._events: dict[int, tuple[int, object]] = {}  # by stage: CUDA's handle and the object
        if after is not None:
            self._events[0] = after.address, after
        self._stages: list[PreparedPlan] | list[PreparedPackedPlan] = []
        self._stages_left = 0
        self._id = new_transfer_id()
        self._peer: Peer | None = None
        self._remote: RemoteCache | None = None
        self._source: PackedSource | None = None
        self._granted = self._said_end = False
        self.on_stop(lambda: self._node.progress.post(self._stop))
        self.on_end(self._announce_failure)

    def layer_ready(self, layer: str, event: object = None) -> None:
        """The layer's bytes are in the cache and may move. From any thread; each layer once.

        `event` is what a GPU cache must wait for; a cache in host memory takes None. Raises InvalidRequest.
        """
        if not self._layerwise:
            raise InvalidRequest("layer_ready belongs to a layerwise send; pass layerwise=True to send()")
        if layer not in self._layers:
            raise InvalidRequest(f"unknown layer {layer!r}; the cache has {', '.join(self._layers[:8])} ...")
        if event is not None and self._cache.device == "cpu":
            raise InvalidRequest(
                "a cache in host memory has no events to wait for; call layer_ready once the layer is written"
            )
        stage = self._layers.index(layer)
        if self._reported.setdefault(layer, reported := object()) is not reported:
            raise InvalidRequest(f"layer {layer!r} was reported ready before")
        if event is not None:
            from kvxfer.cuda import event_address

            self._events[stage] = event_address(event), event  # the object is kept until the copy is done
        self._node.progress.post(lambda: self._mark_ready(stage))

    def start(self) -> None:
        """Queue the first attempt. Any thread."""
        self.arm()
        self.runs_as(self._node.pool.submit(lambda: self.attempt(self._attempt)), short=True)

    # --- finding the reservation (mover thread) -------------------------------------------------------------

    def _attempt(self) -> None:
        if self.done() or self.stopping:
            return
        ticket = self._ticket
        engine = self._node.directory.find(ticket)
        if engine is None:
            self.waits_for(f"engine {ticket.engine!r} at {ticket.endpoint}")
            self._node.progress.post(lambda: self._node.directory.look_up(ticket, lambda _: self.start(), self.abort))
            return
        try:
            peer, remote = self._receiver(engine)
        except UnknownCache:
            if self.elapsed_s > ANNOUNCEMENT_S:
                self._node.directory.forget(engine)
                raise
            self._node.directory.ask_again(engine)
            self._try_again(f"cache {ticket.cache!r} of {ticket.engine!r}")
            return
        published = peer.table.published(ticket)
        if published is None:
            self._try_again("the reservation to be published")
            return
        dst_lists = check_blocks(remote.layout, published.record.lists(), tokens=ticket.tokens, role="destination")
        joined = join_packed(
            [self._cache.layout],
            remote.layout,
            self._wire,
            allow_missing=self._allow_missing,
            src_scales=self._cache.scales,
            dst_scales=remote.scales,
        )[0]
        layers, tokens = self._layers if self._layerwise else (None,), ticket.tokens

        @functools.cache
        def plain(layer: str | None) -> TransferPlan | PackedPlan:
            make = joined.plan if joined.plain is None else joined.plain.plan_checked
            return make(self._src_lists, dst_lists, tokens=tokens, layer=layer)

        best = best_way(self._cache, remote, joined, self._node)
        choice = choose_way(best, self._node, peer, lambda: plain(layers[0]))
        way = choice.way
        if way == "packed":
            counts = {name: len(ids) for name, ids in dst_lists.items()}
            self._stages = packed_stages(self._cache, joined, self._src_lists, counts, ticket.tokens, layers)
        else:
            self._stages = [self._cache.prepare(plain(layer)) for layer in layers]
        self._stages_left = len(self._stages)
        self._peer, self._remote = peer, remote
        plans = [stage.plan for stage in self._stages]
        self.count(
            backend=peer.backend,
            way=way,
            choice=choice.why,
            why_not_mapped="" if way == "mapped" else why_not_mapped(self._cache, remote, self._node),
            wire=self._wire,
            bytes=sum(plan.nbytes for plan in plans),
            wire_bytes=sum(plan.wire_bytes if way == "packed" else plan.nbytes for plan in plans),
            copies=sum(plan.copies for plan in plans),
            peers=1,
            missing=joined.missing,
            conversation=True,
        )
        self._node.progress.post(lambda: self._claim(way))

    def _try_again(self, what: str) -> None:
        self.waits_for(what)
        self._node.progress.post(lambda: self._node.progress.call_later(_RETRY_S, self.start))

    def _receiver(self, engine: Engine) -> tuple[Peer, RemoteCache]:
        """The rank of the other engine that this rank sends to: ranks are paired one to one."""
        ranks = sorted(engine.peers)
        if len(ranks) != self._node.ranks:
            raise InvalidRequest(
                f"send pairs ranks one to one: this engine has {self._node.ranks}, {self._ticket.engine!r} has "
                f"{len(ranks)}; use publish and fetch between unequal engines"
            )
        peer = engine.peers[ranks[self._node.identity.rank]]
        if peer.is_dead():
            raise PeerGone(f"the process of {peer.identity.name} has ended")
        remote = peer.caches.get(self._ticket.cache)
        if remote is None or peer.table is None:
            raise UnknownCache(f"{peer.identity.name} has no cache {self._ticket.cache!r}")
        check_fingerprints(self._cache, remote, self._ticket)
        return peer, remote

    # --- the conversation (progress thread) -----------------------------------------------------------------

    def _claim(self, way: str) -> None:
        if self.done() or self.stopping:
            return
        if not self._peer.session.open:  # it ended a moment ago, and told its conversations then
            self.abort(PeerGone(f"{self._peer.identity.name} went away"))
            return
        self._peer.conversations[self._id] = self
        self.waits_for(f"{self._peer.identity.name} to grant the reservation")
        self._peer.session.send(
            Claim(
                transfer=self._id,
                slot=self._ticket.slot,
                lease=self._ticket.lease,
                cache=self._ticket.cache,
                from_cache=self._cache.name,
                layerwise=self._layerwise,
                way=way,
                wire=self._wire,
                blocks={name: len(ids) for name, ids in self._src_lists.items()},
                nbytes=self.stats.bytes,
                allow_missing=self._allow_missing,
            )
        )

    def handle(self, message: Message) -> None:
        """A message of this transfer."""
        try:
            if isinstance(message, Grant):
                self._write(message)
            elif isinstance(message, Credit) and self._source is not None:
                self._source.credit(message.slots)
            elif isinstance(message, Stop):
                self.abort(Cancelled(f"{self._peer.identity.name} cancelled its reservation, or it ran out"))
            elif isinstance(message, Refused):
                self._said_end = True
                self.abort(rebuild(message.error, message.reason))
            elif isinstance(message, Received):
                self.succeed()
        except KvxferError as error:
            self.abort(error)

    def peer_gone(self, reason: PeerGone) -> None:
        """The session has ended. If it was only lost, the receiver still hears when this side has stopped."""
        self.abort(reason)

    def _write(self, grant: Grant) -> None:
        if self._granted or not self.begin():
            return
        self._granted = True
        self.waits_for(f"{self._peer.identity.name} to have received everything")
        if self.stats.way == "packed":
            if grant.offer is None:
                raise BackendError(f"{self._peer.identity.name} lends no staging for a packed transfer")
            self._source = PackedSource(
                self._node,
                self._peer,
                self._id,
                self._stages,
                self._cache,
                grant.offer,
                written=self._packed_written,
            )
            if not self.hold():
                self._source = None
                return
        ready, self._ready = self._ready, set()
        for stage in sorted(ready):
            self._mark_ready(stage)

    def _mark_ready(self, stage: int) -> None:
        if not self._granted:
            self._ready.add(stage)
        elif stage in self._ready:
            self.abort(InvalidRequest(f"layer {self._layers[stage]!r} was reported ready twice"))
        elif self._source is not None:
            self._ready.add(stage)
            self._queue_packed(stage)
        else:
            self._ready.add(stage)
            self._node.pool.submit(lambda: self._move(stage))

    def _queue_packed(self, stage: int) -> None:
        event, _ = self._events.get(stage, (0, None))
        if not event:
            self._source.queue_stage(stage)
            return

        def wait() -> None:
            from kvxfer.cuda import wait_for_event

            wait_for_event(event)
            self._node.progress.post(lambda: self._source.queue_stage(stage))

        self._node.pool.submit(lambda: self.attempt(wait))

    def _move(self, stage: int) -> None:
        if not self.hold():
            return
        plan, src, remote = self._stages[stage], self._cache.bases, self._remote
        if self.stats.way == "direct":
            moves.move_direct(
                plan,
                self._peer.link,
                Direction.WRITE,
                src,
                remote.remote_bases,
                self,
                then=self._stage_ended,
                node=self._node,
            )
            return
        moved, failure = False, None
        try:
            threads, after = self._node.limits.copy_threads, [self._events[stage][0]] if stage in self._events else []
            moved = moves.move_mapped(plan, src, remote.mapped_bases, self, threads=threads, after=after)
        except Exception as error:
            failure = as_kvxfer_error(error)
        self._stage_ended(moved, failure)

    def _stage_ended(self, moved: bool, error: KvxferError | None) -> None:
        if error is not None:
            self.abort(error)
        elif moved:
            self._node.progress.post(self._stage_moved)
        self.drop()

    def _stage_moved(self) -> None:
        self._stages_left -= 1
        if not self._stages_left and not self.stopping and not self.done():
            self._say_end(None)

    def _packed_written(self, error: KvxferError | None) -> None:
        if error is None and not self.stopping:
            self._say_end(None)
        self.drop()

    def _stop(self) -> None:
        if self._source is not None:
            self._source.stop(Cancelled("stopped"))

    def _announce_failure(self) -> None:
        """The transfer has ended, and so drained: if it ended badly, the receiver must know that nobody writes."""
        self._remote = None  # what it used of the peer may be unmapped, even if the engine keeps the handle
        if self._peer is not None:
            error = self.error
            self._node.progress.post(lambda: self._say_end(error) if error else None)
            self._node.progress.post(lambda: self._peer.conversations.pop(self._id, None))

    def _say_end(self, error: KvxferError | None) -> None:
        if not self._said_end and self._id in self._peer.conversations:
            self._said_end = True
            name, reason = (type(error).__name__, str(error)) if error else ("", "")
            self._peer.session.send(Ended(transfer=self._id, error=name, reason=reason))
