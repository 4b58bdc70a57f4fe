"""Reservations: blocks that decode lends to a sender, and gets back only when nobody writes into them any more.

A cancelled or expired reservation stays in the state CANCELLING until its sender has said that it stopped, or its
process is known to be dead. Progress thread, but for what `Reservation` inherits from `Transfer`.

Imports packed, match, node and the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.control.messages import Chunks, Claim, Ended, Grant, Message, PackedOffer, Received, Refused, Stop
from kvxfer.errors import InvalidRequest, InvalidTicket, KvxferError, PeerGone, rebuild
from kvxfer.formats import join_packed
from kvxfer.kernels import PreparedPackedPlan
from kvxfer.node import Node
from kvxfer.peers.remote import Peer, RemoteCache
from kvxfer.ticket import Ticket
from kvxfer.transfers.match import check_fingerprints, packed_stages
from kvxfer.transfers.packed import PackedSink, borrow, offer, staging_for
from kvxfer.transfers.staging import Loan
from kvxfer.transfers.transfer import Transfer, TransferState

if TYPE_CHECKING:
    from kvxfer.cache import Cache


class Reservation(Transfer):
    """Blocks that a sender may fill. Made by `Cache.reserve`.

    It is a transfer: `done()` means that the blocks are the engine's again, filled if `result()` does not raise. A
    reservation that was cancelled, or ran out of time, ends only when its sender has said that it writes no more, or
    its process is known to be dead.
    """

    def __init__(self, node: Node, cache: Cache, ticket: Ticket, dst_lists: dict[str, np.ndarray]) -> None:
        super().__init__(
            node.progress,
            timeout_s=ticket.ttl_s,
            what=f"reservation of request {ticket.request_id!r}",
            gates=cache.gates,
        )
        self.ticket = ticket
        self.cache = cache
        self.claimed = False
        self._node, self._lists = node, dst_lists
        self.waits_for("a sender")

    def claim(self, peer: Peer, message: Claim) -> None:
        """A sender asks for the right to write. Progress thread. Raises what it is refused for."""
        if self.claimed or self.state is not TransferState.POSTED:
            raise InvalidTicket(f"the reservation of request {self.ticket.request_id!r} was claimed before")
        remote = peer.caches.get(message.from_cache)
        if remote is None:
            raise InvalidTicket(f"{peer.identity.name} has no cache {message.from_cache!r}")
        check_fingerprints(self.cache, remote, self.ticket)
        if message.way not in ("mapped", "direct", "packed"):
            raise InvalidRequest(f"unknown way {message.way!r}")
        self.claimed = True
        receive = Receive(self, self._node, self.cache, peer, message)
        peer.conversations[message.transfer] = receive
        try:
            receive.grant(remote, self._lists)
        except BaseException:
            self.claimed = False
            del peer.conversations[message.transfer]
            raise


class Receive:
    """A granted reservation: the sender's conversation on the receiving side. Progress thread only."""

    def __init__(self, reservation: Reservation, node: Node, cache: Cache, peer: Peer, claim: Claim) -> None:
        self._reservation, self._node, self._cache, self._peer = reservation, node, cache, peer
        self._claim = claim
        self._id = claim.transfer
        self._sink: PackedSink | None = None
        self._loan: Loan | None = None
        self._leave_line: Callable[[], None] | None = None
        self._writing = False  # the sender may be writing: it counts as a writer of the reservation
        self._written = self._complete = False
        reservation.on_stop(lambda: node.progress.post(self._stop))

    def grant(self, remote: RemoteCache, dst_lists: dict[str, np.ndarray]) -> None:
        """Give the right to write, with staging where the bytes come packed. Raises what it is refused for."""
        claim, ticket = self._claim, self._reservation.ticket
        self._reservation.waits_for(f"the bytes from {self._peer.identity.name}")
        if claim.way != "packed":
            self._complete = True
            self._count(claim.way, max(0, claim.nbytes), max(0, claim.nbytes))
            self._begin(None)
            return
        joined = join_packed(
            [remote.layout],
            self._cache.layout,
            claim.wire,
            allow_missing=claim.allow_missing,
            src_scales=remote.scales,
            dst_scales=self._cache.scales,
        )[0]
        layers = remote.layout.layers if claim.layerwise else (None,)
        stages = packed_stages(self._cache, joined, claim.blocks, dst_lists, ticket.tokens, layers)
        self._complete = not any(stage.plan.wire_bytes for stage in stages)
        total = sum(stage.plan.wire_bytes for stage in stages)
        largest = max((stage.plan.largest_segment_bytes for stage in stages), default=0)
        self._count("packed", sum(stage.plan.nbytes for stage in stages), total)
        ring = staging_for(self._node, self._peer, self._cache, remote)

        def lent(loan: Loan) -> None:  # any thread
            self._node.progress.do(lambda: self._lend(stages, loan))

        self._leave_line = borrow(self._node, self._peer, ring, total, largest, lent)

    def _count(self, way: str, nbytes: int, wire_bytes: int) -> None:
        self._reservation.count(
            backend=self._peer.backend,
            way=way,
            wire=self._claim.wire,
            bytes=nbytes,
            wire_bytes=wire_bytes,
            peers=1,
            conversation=True,
        )

    def _lend(self, stages: list[PreparedPackedPlan], loan: Loan) -> None:
        if self._reservation.done() or self._reservation.stopping:
            loan.give_back()
            return
        self._loan = loan
        self._sink = PackedSink(
            self._node,
            self._peer,
            self._id,
            self._reservation,
            stages,
            self._cache.bases,
            loan,
            dropped=self._scattered,
            complete=self._completed,
        )
        self._begin(offer(self._node, loan, self._claim.wire))

    def _begin(self, offer: PackedOffer | None) -> None:
        if self._reservation.begin() and self._reservation.hold():
            self._writing = True
            self._peer.session.send(Grant(transfer=self._id, offer=offer))

    def handle(self, message: Message) -> None:
        """A message of the sender."""
        try:
            if isinstance(message, Chunks) and self._sink is not None:
                self._sink.take(message)
            elif isinstance(message, Ended):
                self._ended(message)
        except KvxferError as error:
            self._reservation.abort(error)

    def peer_gone(self, reason: PeerGone) -> None:
        """The session has ended: the blocks stay reserved until the sender is known to write no more."""
        if self._written:
            return
        self._reservation.abort(reason)
        self._node.when_dead(self._peer, self._sender_stopped, settled=lambda: not self._writing)

    def _ended(self, message: Ended) -> None:
        if message.error:
            self._reservation.abort(rebuild(message.error, message.reason))
        elif not self._reservation.stopping:
            self._written = True
            self._finish()
            return
        self._sender_stopped()

    def _completed(self) -> None:
        self._complete = True
        self._finish()

    def _finish(self) -> None:
        if self._written and self._complete and self._reservation.succeed():
            self._peer.session.send(Received(transfer=self._id))
            self._sender_stopped()
        elif self._written and self._reservation.stopping:
            self._sender_stopped()

    def _stop(self) -> None:
        """The reservation was aborted."""
        if self._writing and not self._written:
            self._ask_to_stop()
            return
        if self._leave_line is not None and self._loan is None:
            self._leave_line()
        error = self._reservation.error
        self._peer.session.send(Refused(transfer=self._id, error=type(error).__name__, reason=str(error)))
        self._sender_stopped()

    def _ask_to_stop(self) -> None:
        """Say it until it is answered: the word or its answer may be lost with a connection."""
        if self._writing and not self._written and self._peer.session.open:
            self._peer.session.send(Stop(transfer=self._id))
            self._node.progress.call_later(self._node.limits.peer_timeout_s, self._ask_to_stop)

    def _sender_stopped(self) -> None:
        """The sender writes no more: drop its hold, and return the staging once nothing is being scattered."""
        self._peer.conversations.pop(self._id, None)
        if self._writing:
            self._writing = False
            self._reservation.drop()
        self._give_back()

    def _scattered(self) -> None:
        if not self._writing:
            self._give_back()

    def _give_back(self) -> None:
        if self._loan is not None and not self._sink.busy:
            loan, self._loan = self._loan, None
            self._sink.let_go()
            loan.give_back()
