"""One request's KV on its way into a rank's blocks: one fetch, or several that follow a prompt while it is computed.

At a prompt's end prefill may write instead, layer by layer.

Imports layout, metadata and kvxfer's transfers.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.errors import Cancelled, KvxferError, TransferError
from kvxfer.layout import GroupKind
from kvxfer.transfers.fetch import Fetch
from kvxfer.transfers.reserve import Reservation
from kvxfer.transfers.transfer import TransferState, TransferStats
from kvxfer.vllm.layouts import TableGroup, all_full
from kvxfer.vllm.metadata import BlockIds, Load, Piece, Reserve


@dataclass(frozen=True)
class _Fetching:
    """A fetch under way."""

    piece: Piece
    transfer: Fetch

    def is_outdone(self) -> bool:
        """Whether the last ticket need not wait for it: it may wait for a lease that a rank could not make."""
        return self.transfer.state is TransferState.POSTED


@dataclass(frozen=True)
class _Receiving:
    """A reservation under way."""

    order: Reserve
    transfer: Reservation

    def is_outdone(self) -> bool:
        """Whether the last ticket need not wait for it: prefill has not taken it up, and will not now."""
        return not self.transfer.claimed


class Intake:
    """The blocks of a load, from its order until nobody writes into them any more.

    Each piece brings the prompt's beginning up to some token, and what has arrived before is left out of its fetch. A
    piece that fails costs nothing but time: the next one brings its tokens, too. With the last one the load succeeds
    or fails. The newest piece is the one that counts: tickets that are not used are released.

    One transfer is under way at a time. A reservation comes after the pieces before it, and what it does not bring the
    last piece does.
    """

    def __init__(
        self,
        load: Load,
        groups: tuple[TableGroup, ...],
        *,
        fetch: Callable[[bytes, BlockIds, float], Fetch],
        reserve: Callable[[Reserve], Reservation],
        release: Callable[[bytes], None],
        fetched: Callable[[Piece, Fetch], None],
        reservation_ended: Callable[[Reserve, TransferStats | None], None],
    ) -> None:
        """`fetch(ticket, blocks, timeout_s)` and `reserve` may raise; `fetched` is told of each fetch that has
        succeeded, `reservation_ended` of each order to reserve, when nobody writes there: with statistics if all came.
        """
        self.load = load
        self.error: KvxferError | None = None
        self._groups = groups
        self._start_fetch, self._release, self._fetched = fetch, release, fetched
        self._start_reservation, self._reservation_ended = reserve, reservation_ended
        self._arrived = load.cached_tokens
        self._running: _Fetching | _Receiving | None = None
        self._next: Piece | None = None
        self._wait_until = math.inf  # for what prefill writes, as it could be fetched as well
        self._to_reserve: Reserve | None = None
        self._complete = False
        if load.ticket is not None:
            self.offer(Piece(request_id=load.request_id, ticket=load.ticket, tokens=load.tokens, is_last=True))

    def offer(self, piece: Piece) -> None:
        """There is a newer ticket."""
        if self.error is not None or self._complete:
            self._release(piece.ticket)
            return
        if self._next is not None:
            self._release(self._next.ticket)
        self._next = piece
        if piece.is_last:
            self._reserve_no_more()
            self._wait_until = time.monotonic() + piece.patience_s
            if self._running is not None and self._running.is_outdone():
                self._running.transfer.cancel()
        self._advance()

    def make_room(self, order: Reserve) -> None:
        """Prefill can write what is left. Once."""
        is_late = self._next is not None and self._next.is_last
        if self.error is not None or self._complete or is_late or self._fetches_last():
            self._reservation_ended(order, None)
            return
        self._to_reserve = order
        self._advance()

    def end(self, error: KvxferError) -> None:
        """Nothing more comes, or is wanted."""
        self._advance()
        if self.error is None and not self._complete:
            self.error = error
            if self._next is not None:
                self._release(self._next.ticket)
                self._next = None
            self._reserve_no_more()
            if self._running is not None:
                self._running.transfer.cancel()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.end(Cancelled("the request has ended"))

    def done(self) -> bool:
        """Whether the load has ended, well or with `error`, and its blocks are written no more. Never blocks."""
        self._advance()
        return self._running is None and (self._complete or self.error is not None)

    def wait(self, timeout_s: float) -> None:
        """Until what is under way has ended, for so long at most. The thread may move the bytes itself."""
        if self._running is not None:
            with contextlib.suppress(KvxferError):  # seen when it is taken
                self._running.transfer.wait(timeout_s)

    def _advance(self) -> None:
        if isinstance(self._running, _Receiving) and time.monotonic() > self._wait_until:
            self._running.transfer.cancel()
        if self._running is not None and self._running.transfer.done():
            running, self._running = self._running, None
            if isinstance(running, _Fetching):
                self._take(running.piece, running.transfer)
            else:
                self._take_received(running.order, running.transfer)
        while self._running is None and self._next is not None:
            piece, self._next = self._next, None
            self._start(piece)
        if self._running is None and self._to_reserve is not None:
            order, self._to_reserve = self._to_reserve, None
            self._reserve(order)

    def _fetches_last(self) -> bool:
        return isinstance(self._running, _Fetching) and self._running.piece.is_last

    def _start(self, piece: Piece) -> None:
        if not piece.is_last and piece.tokens <= self._arrived:
            self._release(piece.ticket)
            return
        try:
            fetch = self._start_fetch(piece.ticket, self._blocks(piece), self.load.timeout_s)
        except KvxferError as error:
            self._failed(piece, error)
        else:
            self._running = _Fetching(piece, fetch)

    def _take(self, piece: Piece, fetch: Fetch) -> None:
        error = fetch.exception()
        if error is not None:
            self._failed(piece, error)
            return
        self._arrived = piece.tokens
        self._complete = piece.is_last
        self._fetched(piece, fetch)

    def _reserve(self, order: Reserve) -> None:
        if order.first_token > self._arrived:  # what is lacking before it comes with the lease, which prefill must keep
            self._reservation_ended(order, None)
            return
        try:
            self._running = _Receiving(order, self._start_reservation(order))
        except KvxferError:
            self._reservation_ended(order, None)

    def _reserve_no_more(self) -> None:
        if self._to_reserve is not None:
            order, self._to_reserve = self._to_reserve, None
            self._reservation_ended(order, None)

    def _take_received(self, order: Reserve, reservation: Reservation) -> None:
        if reservation.exception() is not None:
            self._reservation_ended(order, None)
            return
        self._reservation_ended(order, reservation.stats)
        self._arrived = order.tokens
        self._complete = all_full(self._groups)
        if self._complete and self._next is not None:
            self._release(self._next.ticket)
            self._next = None

    def _failed(self, piece: Piece, error: KvxferError) -> None:
        self._release(piece.ticket)
        if piece.is_last and self.error is None:
            self.error = error

    def _blocks(self, piece: Piece) -> BlockIds:
        """Of the load's blocks those that the piece fills. Windows and states come with the last one."""
        blocks = {}
        for group in self._groups:
            listed = self.load.blocks[group.name]
            if group.kind is GroupKind.FULL:
                listed = group.between(listed, self.load.tokens, self._arrived, piece.tokens)
            elif not piece.is_last:
                listed = []
            blocks[group.name] = listed
        return blocks


def broken_off(reason: str) -> TransferError:
    """The error of a stream of which nothing more comes."""
    return TransferError(f"the stream broke off: {reason}")
