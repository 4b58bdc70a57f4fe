"""One request's KV on its way into a rank's blocks: one fetch, or several that follow a prompt while it is computed.

Imports layout, metadata and kvxfer's transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.errors import Cancelled, KvxferError, TransferError
from kvxfer.layout import GroupKind
from kvxfer.transfers.fetch import Fetch
from kvxfer.transfers.transfer import TransferState
from kvxfer.vllm.layouts import TableGroup
from kvxfer.vllm.metadata import BlockIds, Load, Piece


@dataclass(frozen=True)
class _Running:
    """A fetch under way."""

    piece: Piece
    fetch: Fetch


class Intake:
    """The blocks of a load, from its order until nobody writes into them any more.

    Each piece brings the prompt's beginning up to some token, and what has arrived before is left out of its fetch. A
    piece that fails costs nothing but time: the next one brings its tokens, too. With the last one the load succeeds
    or fails. The newest piece is the one that counts: tickets that are not used are released.
    """

    def __init__(
        self,
        load: Load,
        groups: tuple[TableGroup, ...],
        *,
        fetch: Callable[[bytes, BlockIds, float], Fetch],
        release: Callable[[bytes], None],
        fetched: Callable[[Piece, Fetch], None],
    ) -> None:
        """`fetch(ticket, blocks, timeout_s)` may raise; `fetched` is told of each fetch that has succeeded."""
        self.load = load
        self.error: KvxferError | None = None
        self._groups = groups
        self._start_fetch, self._release, self._fetched = fetch, release, fetched
        self._arrived = load.cached_tokens
        self._running: _Running | None = None
        self._next: Piece | None = None
        self._complete = False
        if load.ticket is not None:
            self.offer(Piece(request_id=load.request_id, ticket=load.ticket, tokens=load.tokens, is_last=True))

    def offer(self, piece: Piece) -> None:
        """There is a newer ticket."""
        if self.error is not None:
            self._release(piece.ticket)
            return
        if self._next is not None:
            self._release(self._next.ticket)
        self._next = piece
        running = self._running
        if running is not None and piece.is_last and running.fetch.state is TransferState.POSTED:
            running.fetch.cancel()  # it may wait for a lease that one of prefill's ranks could not make
        self._advance()

    def end(self, error: KvxferError) -> None:
        """Nothing more comes, or is wanted."""
        self._advance()
        if self.error is None and not self._complete:
            self.error = error
            if self._next is not None:
                self._release(self._next.ticket)
                self._next = None
            if self._running is not None:
                self._running.fetch.cancel()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.end(Cancelled("the request has ended"))

    def done(self) -> bool:
        """Whether the load has ended, well or with `error`, and its blocks are written no more. Never blocks."""
        self._advance()
        return self._running is None and (self._complete or self.error is not None)

    def _advance(self) -> None:
        if self._running is not None and self._running.fetch.done():
            running, self._running = self._running, None
            self._take(running.piece, running.fetch)
        while self._running is None and self._next is not None:
            piece, self._next = self._next, None
            self._start(piece)

    def _start(self, piece: Piece) -> None:
        if not piece.is_last and piece.tokens <= self._arrived:
            self._release(piece.ticket)
            return
        try:
            fetch = self._start_fetch(piece.ticket, self._blocks(piece), self.load.timeout_s)
        except KvxferError as error:
            self._failed(piece, error)
        else:
            self._running = _Running(piece, fetch)

    def _take(self, piece: Piece, fetch: Fetch) -> None:
        error = fetch.exception()
        if error is not None:
            self._failed(piece, error)
            return
        self._arrived = piece.tokens
        self._complete = piece.is_last
        self._fetched(piece, fetch)

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
                size = group.block_tokens
                first = -(-self.load.tokens // size) - len(listed)
                listed = listed[max(0, self._arrived // size - first) : max(0, -(-piece.tokens // size) - first)]
            elif not piece.is_last:
                listed = []
            blocks[group.name] = listed
        return blocks


def broken_off(reason: str) -> TransferError:
    """The error of a stream of which nothing more comes."""
    return TransferError(f"the stream broke off: {reason}")
