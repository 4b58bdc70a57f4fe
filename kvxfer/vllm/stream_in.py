"""Decode's end of a stream, in the scheduler: prompts that arrive in parts, while another engine computes them.

A request waits in vLLM's queue until its prompt has begun elsewhere. Then it gets blocks for the whole prompt, and the
workers fetch each part that prefill leases, and at last what is left. If prefill can write the end layer by layer,
they reserve blocks for it. Whatever goes wrong before the end, by a word of prefill or by its silence, ends the load,
which vLLM takes up by its policy.

Imports issued, layouts, metadata, notices, options, params, and kvxfer's connector.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from kvxfer import ticket as tickets
from kvxfer.connector import Connector
from kvxfer.control.messages import Role
from kvxfer.errors import KvxferError
from kvxfer.layout import CacheLayout, GroupKind
from kvxfer.ticket import Ticket
from kvxfer.vllm import notices, params
from kvxfer.vllm.issued import Issued, last_has_ended
from kvxfer.vllm.layouts import TableGroup
from kvxfer.vllm.metadata import Load, Piece, Reserve
from kvxfer.vllm.notices import Ask, Leave, News
from kvxfer.vllm.options import Options, limits_of
from kvxfer.vllm.params import StreamKey

_log = init_logger("vllm.kvxfer.scheduler")

_ASKS_A_TIMEOUT = 4
_ASK_S = 2.0  # between two questions at most: one may be lost with a connection
_PATIENCES_A_LEASE = 3


@dataclass
class _Stream:
    """A stream that requests here wait for: one, or several that are answers to one prompt."""

    key: StreamKey
    heard_at: float
    ask_at: float
    requests: list[Any] = field(default_factory=list)  # the first one loads
    tokens: int = 0  # of the prompt that will be handed over; 0: it has not begun
    computed_tokens: int = 0  # by prefill, as far as is known
    cached_tokens: int = 0  # that this engine had when the rest was last offered to vLLM
    told_tokens: int = 0  # up to which the workers have a ticket
    load: Load | None = None  # of the first request, which has blocks, and of which the workers know
    open_from: int | None = None  # the token behind which prefill can write, by layers
    prefill_ranks: tuple[str, ...] = ()
    has_reserved: bool = False
    is_complete: bool = False  # the workers have the last ticket, or know that there is none

    @property
    def loads(self) -> bool:
        """Whether the first request has blocks."""
        return self.load is not None


class StreamsIn:
    """All streams that one decode engine waits for. Called by the scheduler's thread only."""

    def __init__(
        self,
        connector: Connector,
        secret: bytes,
        options: Options,
        layout: CacheLayout,
        groups: tuple[TableGroup, ...],
        *,
        ranks: int,
        endpoints: Callable[[], tuple[str, ...]],
        usable: Callable[[Any, int], bool],
        handed_over: Callable[[Any, Ticket], None],
        given_up: Callable[[Any, str], None],
        unreachable: Callable[[str, KvxferError], None],
    ) -> None:
        """`endpoints()` are those of all ranks, or none as long as one is not known. `usable(request, tokens)`: whether
        the request can go on from so many tokens. `handed_over(request, ticket)`: the prompt was done before the
        request had blocks. `given_up(request, reason)`: there will be nothing. `unreachable(endpoint, error)` is called
        on kvxfer's thread, to be brought back to `StreamsIn.unreachable`."""
        self._connector, self._secret, self._options = connector, secret, options
        self._layout, self._groups, self._ranks, self._endpoints = layout, groups, ranks, endpoints
        self._usable, self._handed_over, self._given_up = usable, handed_over, given_up
        self._unreachable = unreachable
        self._streams: dict[str, _Stream] = {}  # by id
        self._ids: dict[str, str] = {}  # stream by request
        self._pieces: list[Piece] = []
        self._reserves: list[Reserve] = []
        self._reservations: dict[str, Issued] = {}  # by request
        self._broken: list[tuple[str, str]] = []

    # --- a request's life -----------------------------------------------------------------------------------

    def expect(self, request: Any, key: StreamKey) -> None:
        """A request whose prompt another engine prefills at the same time."""
        now = time.monotonic()
        stream = self._streams.get(key.id)
        if stream is None:
            stream = self._streams[key.id] = _Stream(key, heard_at=now, ask_at=now)
        stream.requests.append(request)
        self._ids[request.request_id] = key.id

    def matched(self, request: Any, computed_tokens: int) -> int | None:
        """How many tokens beyond the computed ones will come; None: it is not known yet."""
        stream = self._stream_of(request.request_id)
        if stream is None:
            return 0
        if stream.loads or stream.requests[0] is not request or not stream.tokens:
            return None
        stream.cached_tokens = computed_tokens
        return max(0, stream.tokens - computed_tokens)

    def awaits(self, request_id: str) -> bool:
        """Whether the request waits for a stream and has no blocks yet."""
        stream = self._stream_of(request_id)
        return stream is not None and not (stream.loads and stream.requests[0].request_id == request_id)

    def extent(self, request_id: str) -> tuple[int, int]:
        """The prompt's tokens that both engines will have in the end, and those of them that are here."""
        stream = self._stream_of(request_id)
        return stream.tokens, stream.cached_tokens

    def begin(self, load: Load, external_tokens: int) -> None:
        """The request has blocks: parts may come.

        The load fails unless vLLM wants all tokens that were offered: `external_tokens`.
        """
        stream = self._stream_of(load.request_id)
        stream.load = load
        stream.heard_at = time.monotonic()
        offered = stream.tokens - stream.cached_tokens
        if external_tokens == offered:
            self._ask(stream)
        else:
            self._give_up(stream, wanted_less(external_tokens, offered))

    def drop(self, request_id: str) -> bool:
        """The request is over, or needs nothing. Returns whether the workers load for it."""
        stream = self._stream_of(request_id)
        if stream is None:
            return False
        loads = stream.loads and stream.requests[0].request_id == request_id
        if loads:
            self._leave(stream)
        else:
            del self._ids[request_id]
            stream.requests = [request for request in stream.requests if request.request_id != request_id]
            if not stream.requests:
                self._leave(stream)
        return loads

    def loaded(self, request_id: str) -> bool:
        """The workers are done with the request, well or not. Returns whether it was one of a stream."""
        stream = self._stream_of(request_id)
        if stream is not None and stream.loads:
            self._forget(stream)
            return True
        return False

    def reservation_ended(self, request_id: str, ranks: int) -> None:
        """So many ranks have nothing reserved any more."""
        last_has_ended(self._reservations, request_id, ranks, self._connector)

    # --- what prefill says ----------------------------------------------------------------------------------

    def take(self, news: News) -> None:
        """A word of a prefill engine's scheduler."""
        stream = self._streams.get(news.id)
        if stream is None or stream.is_complete:
            return
        if news.ended:
            self._give_up(stream, news.ended, leave=False)
            return
        ticket = None
        if news.ticket:
            try:
                ticket = tickets.parse(news.ticket, self._secret)
            except KvxferError as error:
                self._give_up(stream, str(error))
                return
            if not params.is_for_prompt(ticket, stream.requests[0]):
                self._give_up(stream, "its ticket was issued for another prompt")
                return
        if ticket is not None and news.is_last:
            self._take_last(stream, ticket)
            return
        if not stream.loads or news.computed > stream.computed_tokens:
            stream.heard_at = time.monotonic()
        stream.computed_tokens = max(stream.computed_tokens, news.computed)
        if news.tokens and not stream.tokens:
            if not self._usable(stream.requests[0], news.tokens):
                self._give_up(stream, f"prefill computes {news.tokens} tokens, from which this engine cannot go on")
                return
            stream.tokens = news.tokens
        stream.open_from, stream.prefill_ranks = news.open_from, news.ranks
        if ticket is not None and stream.loads and stream.told_tokens < ticket.tokens < stream.tokens:
            self._pass_on(stream, ticket, is_last=False)

    def unreachable(self, endpoint: str, error: KvxferError) -> None:
        """Nobody answers at a prefill engine's endpoint."""
        for stream in list(self._streams.values()):
            if stream.key.prefill == endpoint and not stream.is_complete:
                self._give_up(stream, str(error), leave=False)

    def _take_last(self, stream: _Stream, ticket: Ticket) -> None:
        if not stream.loads:
            self._forget(stream)
            for request in stream.requests:
                self._handed_over(request, ticket)
        elif ticket.tokens != stream.tokens:
            self._give_up(stream, f"prefill computed {ticket.tokens} tokens where it had announced {stream.tokens}")
        else:
            stream.is_complete = True
            self._pass_on(stream, ticket, is_last=True)

    def _pass_on(self, stream: _Stream, ticket: Ticket, *, is_last: bool) -> None:
        stream.heard_at = time.monotonic()
        stream.told_tokens = ticket.tokens
        request_id = stream.requests[0].request_id
        self._pieces.append(
            Piece(
                request_id=request_id,
                ticket=bytes(ticket),
                tokens=ticket.tokens,
                is_last=is_last,
                patience_s=ticket.ttl_s / _PATIENCES_A_LEASE,
            )
        )

    def _reserve(self, stream: _Stream) -> None:
        """Have the workers reserve blocks for the prompt's end, where prefill can write it and nothing was reserved."""
        load = stream.load
        if load is None or stream.open_from is None or stream.has_reserved or len(stream.prefill_ranks) != self._ranks:
            return
        if not self._endpoints():  # whoever used the ticket would take this for an engine without a cache
            return
        first = max(stream.open_from, load.cached_tokens)
        blocks = {
            group.name: group.between(load.blocks[group.name], load.tokens, first, load.tokens)
            if group.kind is GroupKind.FULL
            else []
            for group in self._groups
        }
        if not any(blocks.values()):
            return
        stream.has_reserved = True
        ttl_s = min(self._options.stream_timeout_s, limits_of(self._options).max_ttl_s)
        request = stream.requests[0]
        try:
            ticket = self._connector.issue(
                self._layout,
                blocks,
                tokens=load.tokens,
                ttl_s=ttl_s,
                request_id=params.bound_request_id(request, load.tokens),
                role=Role.SEND,
            )
        except KvxferError as error:
            _log.debug("request %s: no blocks were reserved: %s", load.request_id, error)
            return
        self._reservations[load.request_id] = Issued(ticket, self._ranks)
        self._reserves.append(
            Reserve(
                request_id=load.request_id,
                stream_id=stream.key.id,
                ticket=bytes(ticket),
                blocks=blocks,
                first_token=first,
                tokens=load.tokens,
                ttl_s=ttl_s,
                ranks=stream.prefill_ranks,
            )
        )

    # --- a step ---------------------------------------------------------------------------------------------

    def step(self) -> tuple[list[Piece], list[Reserve], list[tuple[str, str]]]:
        """What the workers may fetch and are to reserve now, and requests for which nothing (more) will come, with the
        reason."""
        now, timeout_s = time.monotonic(), self._options.stream_timeout_s
        for stream in list(self._streams.values()):
            if stream.is_complete:
                continue
            if now - stream.heard_at > timeout_s:
                what = "nothing new" if stream.tokens else "nothing"
                self._give_up(stream, f"prefill has said {what} of the stream for {timeout_s:g} s")
                continue
            self._reserve(stream)
            if now >= stream.ask_at:
                self._ask(stream)
        pieces, self._pieces = self._pieces, []
        reserves, self._reserves = self._reserves, []
        broken, self._broken = self._broken, []
        return pieces, reserves, broken

    # --- small parts ----------------------------------------------------------------------------------------

    def _stream_of(self, request_id: str) -> _Stream | None:
        return self._streams.get(self._ids.get(request_id, ""))

    def _ask(self, stream: _Stream) -> None:
        stream.ask_at = time.monotonic() + min(_ASK_S, self._options.stream_timeout_s / _ASKS_A_TIMEOUT)
        self._notify(stream, Ask(id=stream.key.id, has_blocks=stream.loads))

    def _leave(self, stream: _Stream) -> None:
        self._forget(stream)
        self._notify(stream, Leave(id=stream.key.id))

    def _give_up(self, stream: _Stream, reason: str, *, leave: bool = True) -> None:
        """Nothing (more) will come. What the workers load for is kept until they report it."""
        if leave:
            self._notify(stream, Leave(id=stream.key.id))
        if stream.loads:
            stream.is_complete = True
            self._broken.append((stream.requests[0].request_id, reason))
        else:
            self._forget(stream)
        self._given_up(stream.requests[0], reason)

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.key.id]
        for request in stream.requests:
            self._ids.pop(request.request_id, None)

    def _notify(self, stream: _Stream, notice: Ask | Leave) -> None:
        endpoint = stream.key.prefill
        unreachable = self._unreachable
        self._connector.notify(endpoint, notices.encode(notice), failed=lambda error: unreachable(endpoint, error))


def wanted_less(wanted: int, offered: int) -> str:
    """Why a load fails of which vLLM wants only a part."""
    return f"vLLM asks for {wanted} of the {offered} tokens that were offered"
