"""Prefill's end of a stream, in the scheduler: prompts whose finished blocks are leased before the prompt is done.

A part is an ordinary lease: of the whole blocks at the prompt's beginning that earlier steps have filled, for a decode
engine that has blocks for them. There is one part a prompt at a time; the next one is leased when every rank of decode
has let go of it. A prompt's blocks are its own while it runs, so a part ends before they change hands: in the step in
which the prompt is preempted or has ended.

With the option `stream_layers` the workers are told which prompts a step completes, and decode that it may reserve
blocks for what is left: see layerwise.

Imports issued, layouts, metadata, notices, options, params, and kvxfer's connector.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from kvxfer.connector import Connector
from kvxfer.errors import KvxferError
from kvxfer.layout import CacheLayout, GroupKind
from kvxfer.ticket import Ticket
from kvxfer.vllm import notices, params
from kvxfer.vllm.issued import Issued, last_has_ended
from kvxfer.vllm.layouts import NULL_BLOCK, TableGroup
from kvxfer.vllm.metadata import BlockIds, Opening, Publication
from kvxfer.vllm.notices import Ask, Leave, News
from kvxfer.vllm.options import Options

_log = init_logger("vllm.kvxfer.scheduler")

_MAX_REMEMBERED = 4096
_SWITCHED_OFF = "this prefill engine does not stream (its option stream is false)"


@dataclass
class _Listener:
    """A decode engine that has asked for a stream."""

    endpoint: str
    has_blocks: bool
    is_gone: bool  # it has left
    heard_at: float


@dataclass
class _Stream:
    """A prompt here that may be streamed."""

    id: str
    request: Any
    listener: _Listener | None = None
    has_begun: bool = False
    tables: dict[str, list[int]] = field(default_factory=dict)  # of groups whose blocks stay as they are; {}: preempted
    preemptions: int = 0
    leased_tokens: int = 0  # by parts so far
    part: Ticket | None = None  # the one that is leased now
    last: Ticket | None = None
    open_from: int | None = None  # the token behind which the step at work, or a later one, sends by layers

    @property
    def is_unwanted(self) -> bool:
        """Whether decode was here and has left."""
        return self.listener is not None and self.listener.is_gone


class StreamsOut:
    """All streams of one prefill engine. Called by the scheduler's thread only."""

    def __init__(
        self,
        connector: Connector,
        layout: CacheLayout,
        groups: tuple[TableGroup, ...],
        options: Options,
        *,
        ranks: int,
        lookahead: int,
        leases_parts: bool,
        endpoints: Callable[[], tuple[str, ...]],
    ) -> None:
        """`lookahead`: how many tokens after a place a drafter must have seen before its keys there are final.
        Without `leases_parts` there is nothing to fetch of a prompt before its end. `endpoints()` are those of all
        ranks in their order, or none as long as one is not known."""
        self._connector, self._layout, self._groups, self._options = connector, layout, groups, options
        self._ranks, self._lookahead, self._endpoints = ranks, lookahead, endpoints
        self._kept = tuple(group for group in groups if leases_parts and group.kind is GroupKind.FULL)
        self._index = {group.name: group.index for group in self._kept}
        self._unit = math.lcm(*(group.block_tokens for group in self._kept)) if self._kept else 0
        self._streams: dict[str, _Stream] = {}  # by request
        self._ids: dict[str, str] = {}  # request by stream
        self._early: OrderedDict[str, _Listener] = OrderedDict()  # who asked for streams that are not here yet
        self._ended: OrderedDict[str, str] = OrderedDict()  # why, by stream
        self._parts: dict[str, Issued] = {}  # by request, also after its end
        self._revoked: list[str] = []
        self._may_be_taken_back = False  # whether vLLM may say of a past step that it has computed nothing
        self._open: dict[str, bytes] = {}  # by stream: the word that its last step has begun; read by any thread

    # --- a request's life -----------------------------------------------------------------------------------

    def new_request(self, request: Any, stream_id: str) -> None:
        """A prompt that another engine decodes, with the id that its front end has given the stream."""
        if not self._options.stream:
            self._end(stream_id, _SWITCHED_OFF)
        elif stream_id in self._ids:
            _log.warning("request %s is not streamed: %s is the id of another one", request.request_id, stream_id)
        else:
            self._ids[stream_id] = request.request_id
            self._streams[request.request_id] = _Stream(stream_id, request, self._early.pop(stream_id, None))

    def is_unwanted(self, request_id: str) -> bool:
        """Whether decode has asked for the request and left: there is nobody to lease its blocks to."""
        stream = self._streams.get(request_id)
        return stream is not None and stream.is_unwanted

    def finished(self, request_id: str, ticket: Ticket | None, reason: str) -> None:
        """The prompt is done, and all its blocks are leased with `ticket`; or it ended for a reason, without."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._open.pop(stream.id, None)
        if ticket is None:
            self._revoke(stream)
            self._forget(stream)
            self._end(stream.id, reason, stream.listener)
        else:
            stream.last = ticket
            self._tell(stream)

    def released(self, request_id: str) -> None:
        """The last lease is over."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._forget(stream)
            self._end(stream.id, "its lease is over")

    def part_ended(self, request_id: str, ranks: int) -> None:
        """So many ranks have ended the lease of a request's part."""
        is_over = last_has_ended(self._parts, request_id, ranks, self._connector)
        if is_over and request_id in self._streams:
            self._streams[request_id].part = None

    # --- what decode says -----------------------------------------------------------------------------------

    def take(self, endpoint: str, notice: Ask | Leave) -> None:
        """A word of a decode engine's scheduler."""
        is_gone = isinstance(notice, Leave)
        listener = _Listener(endpoint, not is_gone and notice.has_blocks, is_gone, time.monotonic())
        stream = self._streams.get(self._ids.get(notice.id, ""))
        if stream is None:
            if notice.id in self._ended:
                self._end(notice.id, self._ended[notice.id], listener)
            else:
                _remember(self._early, notice.id, listener)
            return
        stream.listener = listener
        if is_gone:
            self._revoke(stream)
        else:
            self._tell(stream)

    def answer_at_once(self, endpoint: str, payload: bytes) -> None:
        """On kvxfer's thread: what is known need not wait for the scheduler's, which takes words once a step.

        A step that completes the prompt may be at work; and an engine without requests has no steps.
        """
        with contextlib.suppress(KvxferError):
            notice = notices.decode(payload)
            if not isinstance(notice, Ask):
                return
            if word := self._open.get(notice.id):
                self._connector.notify(endpoint, word)
            elif reason := self._ended.get(notice.id):
                self._connector.notify(endpoint, notices.encode(News(id=notice.id, ended=reason)))

    # --- a step ---------------------------------------------------------------------------------------------

    def step(self, scheduled: Any) -> tuple[list[Publication], list[Opening], list[str]]:
        """Parts to lease in a step that vLLM has scheduled, prompts that it completes and that go to decode by layers,
        and requests whose leases end before it."""
        for stream in self._streams.values():
            if stream.request.num_preemptions != stream.preemptions:
                stream.preemptions = stream.request.num_preemptions
                self._revoke(stream)
                stream.tables, stream.open_from = {}, None
                self._open.pop(stream.id, None)
        if getattr(scheduled, "has_sync_kv_loads", False) and not self._may_be_taken_back:
            self._may_be_taken_back = True
            _log.warning("another connector loads within steps, which vLLM takes back if that fails: no more streams")
        placed = self._follow_tables(scheduled)
        # In its first step a prompt may share blocks that another one fills in the same step.
        parts = [self._next_part(stream) for request_id, stream in self._streams.items() if request_id not in placed]
        openings = [self._opening(stream) for stream in self._streams.values() if self._ends(stream, scheduled)]
        oldest = time.monotonic() - self._options.stream_timeout_s
        while self._early and next(iter(self._early.values())).heard_at < oldest:
            self._early.popitem(last=False)
        revoked, self._revoked = self._revoked, []
        return [part for part in parts if part is not None], openings, revoked

    def _follow_tables(self, scheduled: Any) -> set[str]:
        """Keep block tables as vLLM tells its workers; the requests that have got a table, or another one."""
        if not self._streams:
            return set()
        placed = {}
        for new in scheduled.scheduled_new_reqs:
            placed[new.req_id] = new.block_ids
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                placed[request_id] = blocks
            elif blocks is not None and request_id in self._streams:
                for name, table in self._streams[request_id].tables.items():
                    table.extend(blocks[self._index[name]])
        for request_id in placed.keys() & self._streams.keys():
            stream = self._streams[request_id]
            stream.tables = {group.name: list(placed[request_id][group.index]) for group in self._kept}
            if not stream.has_begun:
                stream.has_begun = True
                self._tell(stream)
        return set(placed)

    def _next_part(self, stream: _Stream) -> Publication | None:
        """A lease of the whole blocks that steps before this one have filled, where decode has blocks for more."""
        request, listener = stream.request, stream.listener
        wanted = listener is not None and listener.has_blocks and stream.last is None
        if not wanted or request.request_id in self._parts or not stream.tables:
            return None
        # Without the ranks' endpoints, whoever used a ticket would take this for an engine without a cache.
        if self._may_be_taken_back or not self._endpoints():
            return None
        computed = request.num_computed_tokens
        tokens = max(0, computed - self._lookahead) // self._unit * self._unit
        if tokens <= stream.leased_tokens or computed >= request.num_prompt_tokens:
            return None
        blocks = self._blocks(stream, tokens)
        try:
            ticket = self._connector.issue(
                self._layout,
                blocks,
                tokens=tokens,
                ttl_s=self._options.lease_s,
                request_id=params.bound_request_id(request, tokens),
            )
        except KvxferError as error:
            _log.debug("request %s: no part was leased: %s", request.request_id, error)
            return None
        self._parts[request.request_id] = Issued(ticket, self._ranks)
        stream.part, stream.leased_tokens = ticket, tokens
        self._tell(stream)
        return Publication(
            request_id=request.request_id,
            ticket=bytes(ticket),
            blocks=blocks,
            tokens=tokens,
            ttl_s=self._options.lease_s,
            is_part=True,
        )

    def _ends(self, stream: _Stream, scheduled: Any) -> bool:
        """Whether the step completes a prompt, which can go to decode by layers."""
        request = stream.request
        count = scheduled.num_scheduled_tokens.get(request.request_id, 0)
        wanted = self._options.stream_layers and not stream.is_unwanted and stream.last is None and stream.tables
        wanted = wanted and not self._may_be_taken_back
        return bool(
            wanted
            and count
            and request.num_computed_tokens < request.num_prompt_tokens
            and request.num_computed_tokens + count >= request.num_prompt_tokens
        )

    def _opening(self, stream: _Stream) -> Opening:
        request = stream.request
        tokens = request.num_prompt_tokens
        stream.open_from = stream.leased_tokens
        self._open[stream.id] = notices.encode(self._news(stream))
        self._tell(stream)
        return Opening(
            request_id=request.request_id,
            stream_id=stream.id,
            blocks=self._blocks(stream, tokens),
            tokens=tokens,
            prompt=params.prompt_digest(request, tokens),
        )

    def _blocks(self, stream: _Stream, tokens: int) -> BlockIds:
        """A part's lists. Windows and states move on while the prompt runs: the null block stands for theirs."""
        blocks = {}
        for group in self._groups:
            if group in self._kept:
                blocks[group.name] = group.used(stream.tables[group.name], tokens)
            elif group.kind is GroupKind.STATE:
                blocks[group.name] = [NULL_BLOCK]
            else:
                blocks[group.name] = [NULL_BLOCK] * -(-tokens // group.block_tokens)
        return blocks

    # --- small parts ----------------------------------------------------------------------------------------

    def _revoke(self, stream: _Stream) -> None:
        if stream.part is not None or stream.last is not None or stream.open_from is not None:
            self._revoked.append(stream.request.request_id)
            stream.part = None

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.request.request_id], self._ids[stream.id]

    def _end(self, stream_id: str, reason: str, listener: _Listener | None = None) -> None:
        """Nothing (more) comes of a stream, and whoever asks for it is told why."""
        listener = listener or self._early.pop(stream_id, None)
        _remember(self._ended, stream_id, reason)
        if listener is not None and not listener.is_gone:
            self._connector.notify(listener.endpoint, notices.encode(News(id=stream_id, ended=reason)))

    def _tell(self, stream: _Stream) -> None:
        listener = stream.listener
        if listener is None or listener.is_gone:
            return
        self._connector.notify(listener.endpoint, notices.encode(self._news(stream)))

    def _news(self, stream: _Stream) -> News:
        ticket = stream.last or stream.part
        return News(
            id=stream.id,
            tokens=stream.request.num_prompt_tokens if stream.has_begun else 0,
            computed=stream.request.num_computed_tokens,
            ticket=bytes(ticket) if ticket else b"",
            is_last=stream.last is not None,
            open_from=stream.open_from,
            ranks=self._endpoints() if stream.open_from is not None else (),
        )


def _remember(table: OrderedDict, key: str, value: object) -> None:
    """Keep the newest entries."""
    table.pop(key, None)
    table[key] = value
    while len(table) > _MAX_REMEMBERED:
        table.popitem(last=False)
