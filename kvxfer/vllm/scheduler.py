"""The scheduler's side: which prompt is fetched with which ticket, which blocks are leased, each step's orders.

Knows requests and block ids, owns no cache. Its connector signs tickets, is where peers learn of the ranks, and renews
the leases of requests that wait here.

Imports stream_in, stream_out, discovery, layouts, metadata, options, params, stats, versions, and kvxfer's connector.
"""

from __future__ import annotations

import enum
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvxfer.connector import Connector
from kvxfer.control import auth
from kvxfer.errors import KvxferError
from kvxfer.layout import GroupKind
from kvxfer.ticket import Ticket
from kvxfer.vllm import engine, notices, params, versions
from kvxfer.vllm.discovery import Announcer
from kvxfer.vllm.fingerprint import fingerprint_of
from kvxfer.vllm.layouts import TableGroup, table_groups, table_layout
from kvxfer.vllm.metadata import BlockIds, Load, Orders, Publication, RankReport
from kvxfer.vllm.notices import Ask, Leave, News
from kvxfer.vllm.options import Options, connector_arguments
from kvxfer.vllm.stats import KvxferStats
from kvxfer.vllm.stream_in import StreamsIn, wanted_less
from kvxfer.vllm.stream_out import StreamsOut

_log = init_logger("vllm.kvxfer.scheduler")

_RENEWALS_A_LEASE = 3
_MAX_SPENT = 65536
_MAX_UNREAD = 65536
_REJECTED_PROMPT = [0]  # the front end aborts a request with this prompt for one that it has rejected


class _State(enum.Enum):
    OFFERED = "offered"  # may be matched
    LOADING = "loading"  # ordered; the workers have not reported yet
    ABANDONED = "abandoned"  # the same, and the request has ended


@dataclass
class _Offer:
    """A ticket that came with a request."""

    ticket: Ticket
    renew_at: float
    renew_until: float
    usable: bool  # for this prompt, up to a token from which decode can go on, by a request that may leave out tokens
    cached_tokens: int = 0  # that this engine had when the rest was last offered to vLLM
    state: _State = _State.OFFERED

    @property
    def key(self) -> bytes:
        """What is equal for one ticket and no other."""
        return self.ticket.encoded


@dataclass(frozen=True)
class _Promise:
    """A lease of this engine, as the scheduler sees it."""

    ticket: Ticket
    blocks: BlockIds

    @property
    def block_count(self) -> int:
        """Over all groups."""
        return sum(map(len, self.blocks.values()))


class SchedulerSide:
    """The scheduler's side of one engine."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        self._config = vllm_config
        self._options = options
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        engine.check_supported(vllm_config)
        self._is_producer, self._is_consumer = transfer.is_kv_producer, transfer.is_kv_consumer
        self._engine_id = str(transfer.engine_id)
        self._tensor_ranks, self._pipeline_ranks = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self._ranks = engine.rank_count(parallel)
        self._groups = table_groups(kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._zeroing = versions.needs_zeroing(kv_cache_config)
        fingerprint = fingerprint_of(vllm_config, options.model_id, with_speculation=not options.allow_missing_layers)
        self._layout = table_layout(self._groups, self._num_blocks, fingerprint)
        self._left_to_decode = _left_to_decode(vllm_config, self._groups)
        arguments = connector_arguments(options, engine.port_offset(parallel, None))
        self._secret = auth.secret_bytes(arguments["secret"])
        self._connector = Connector(
            engine.connector_name(vllm_config, "scheduler"),
            engine=engine.engine_name(vllm_config),
            ranks=self._ranks,
            **arguments,
        )
        self._endpoints: dict[int, str] = {}
        self._serial = 0
        self._offers: dict[str, _Offer] = {}
        self._loading: dict[bytes, str] = {}  # request by ticket
        self._spent: OrderedDict[bytes, None] = OrderedDict()  # tickets that need no release by other requests
        self._failed: set[str] = set()  # requests whose load has failed and that vLLM has not come back to
        self._promises: dict[str, _Promise] = {}
        self._leased_blocks = 0
        self._publications: list[Publication] = []
        self._loads: list[Load] = []
        self._releases: list[bytes] = []
        self._cancelled: list[str] = []
        self._broken: list[tuple[str, str]] = []  # loads that cannot be carried out, and why
        self.stats = KvxferStats()
        self._unread: deque[tuple[str, bytes | KvxferError]] = deque(maxlen=_MAX_UNREAD)  # kvxfer's thread appends
        unread = self._unread.append
        self._streams_out = StreamsOut(
            self._connector,
            self._layout,
            self._groups,
            options,
            ranks=self._ranks,
            lookahead=versions.prefill_lookahead(vllm_config),
            leases_parts=not versions.writes_before_revoking(vllm_config, kv_cache_config),
            endpoints=self._rank_endpoints,
        )
        self._streams_in = StreamsIn(
            self._connector,
            self._secret,
            options,
            self._layout,
            self._groups,
            ranks=self._ranks,
            endpoints=self._rank_endpoints,
            usable=self._can_go_on_from,
            handed_over=self._take_ticket,
            given_up=self._stream_given_up,
            unreachable=lambda endpoint, error: unread((endpoint, error)),
        )
        self._connector.on_notice(self._hear)
        self._announcer: Announcer | None = None
        if options.discovery_address is not None:
            self._announcer = Announcer(
                options.discovery_address,
                http_address=options.http_address,
                zmq_address=self._connector.endpoint.removeprefix("tcp://"),
                is_prefill=self._is_producer,
            )
        _log.info("peers reach this engine at %s", self._connector.endpoint)

    def close(self) -> None:
        """End the connector. Idempotent."""
        if self._announcer is not None:
            self._announcer.close()
        self._connector.close()

    # --- decode: requests that come with a ticket -----------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """Look at what came with a request."""
        if self._is_producer and params.wants_decode_elsewhere(request):
            self._leave_tail(request)
            self._stream_out(request)
        if not self._is_consumer:
            return
        try:
            ticket = params.offered_ticket(request, self._secret)
            stream = None if params.wants_decode_elsewhere(request) else params.stream_of(request)
        except KvxferError as error:
            self._refuse(request, str(error))
            return
        if ticket is not None:
            self._take_ticket(request, ticket)
        elif stream is not None and self._options.stream:
            self._streams_in.expect(request, stream)
        elif stream is not None:
            self._refuse(request, "it is to be streamed, and this decode engine does not (its option stream is false)")

    def _take_ticket(self, request: Any, ticket: Ticket) -> None:
        """A ticket has come for a request that has no blocks yet."""
        for_prompt = params.is_for_prompt(ticket, request)
        if not for_prompt and request.prompt_token_ids != _REJECTED_PROMPT:
            self._refuse(request, "its ticket was issued for another prompt")
            return
        now = time.monotonic()
        self._offers[request.request_id] = _Offer(
            ticket=ticket,
            renew_at=now + ticket.ttl_s / _RENEWALS_A_LEASE,
            renew_until=now + self._options.renew_for_s,
            usable=for_prompt and self._can_go_on_from(request, ticket.tokens),
        )

    def _can_go_on_from(self, request: Any, tokens: int) -> bool:
        """Whether the request can leave out its prompt's first `tokens` tokens and compute the others."""
        enough_left = tokens <= request.num_prompt_tokens - self._left_to_decode
        return enough_left and not versions.skips_prefix_cache(request)

    def _stream_given_up(self, request: Any, reason: str) -> None:
        self.stats.count("given_up")
        _log.warning("the stream of request %s broke off: %s", request.request_id, reason)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones can be fetched, and whether that happens between steps.

        A request whose load has failed is put off once. It has just given its blocks back; vLLM would stop at it for
        want of blocks that the loads behind it hold, and never come to those.
        """
        if self._must_wait(request):
            return None, False
        if request.request_id in self._failed:
            self._failed.discard(request.request_id)
            return None, False
        if self._streams_in.awaits(request.request_id):
            tokens = self._streams_in.matched(request, computed_tokens)
            return tokens, bool(tokens)
        offer = self._offers.get(request.request_id)
        if offer is None or offer.state is not _State.OFFERED or not offer.usable:
            return 0, False
        if offer.key in self._loading:  # of another answer to the same prompt: it may leave a cached prefix
            return None, False
        offer.cached_tokens = computed_tokens
        tokens = offer.ticket.tokens - computed_tokens
        return (tokens, True) if tokens > 0 and offer.key not in self._spent else (0, False)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """vLLM has given the request blocks; `external_tokens` of its tokens are to be fetched, or none.

        What is fetched is all that was offered. Where vLLM wants less, the load fails.
        """
        request_id = request.request_id
        if self._streams_in.awaits(request_id):
            if external_tokens > 0:
                tokens, cached_tokens = self._streams_in.extent(request_id)
                load = self._load(request_id, None, tokens, cached_tokens, blocks.get_block_ids())
                self._loads.append(load)
                self._streams_in.begin(load, external_tokens)
            else:
                self._streams_in.drop(request_id)
            return
        offer = self._offers.get(request_id)
        if offer is None or offer.state is not _State.OFFERED:
            return
        if external_tokens <= 0:
            self._decline(request_id, offer)
            return
        offer.state = _State.LOADING
        self._loading[offer.key] = request_id
        ticket, tokens = offer.ticket, offer.ticket.tokens
        if external_tokens != tokens - offer.cached_tokens:
            self._broken.append((request_id, wanted_less(external_tokens, tokens - offer.cached_tokens)))
            self._releases.append(bytes(ticket))
            ticket = None
        self._loads.append(self._load(request_id, ticket, tokens, offer.cached_tokens, blocks.get_block_ids()))

    def loaded_groups(self) -> tuple[int, ...]:
        """The groups whose blocks a load fills: vLLM's indices."""
        return tuple(group.index for group in self._groups)

    def _load(self, request_id: str, ticket: Ticket | None, tokens: int, cached_tokens: int, tables: Any) -> Load:
        blocks: BlockIds = {}
        blank: BlockIds = {}
        for group in self._groups:
            table = tables[group.index]
            blocks[group.name] = group.used(table, tokens, cached_tokens)
            given = group.used(table, len(table) * group.block_tokens, cached_tokens)
            blank[group.name] = given if self._zeroing else []
        return Load(
            request_id=request_id,
            ticket=None if ticket is None else bytes(ticket),
            tokens=tokens,
            cached_tokens=cached_tokens,
            blocks=blocks,
            blank=blank,
            timeout_s=self._options.fetch_timeout_s,
        )

    def _decline(self, request_id: str, offer: _Offer) -> None:
        """Nothing will be fetched with the ticket by this request."""
        del self._offers[request_id]
        if offer.key not in self._loading and offer.key not in self._spent:
            self._releases.append(bytes(offer.ticket))
            self._spend(offer.key)

    def _refuse(self, request: Any, reason: str) -> None:
        self.stats.count("refused")
        _log.warning("request %s is computed here: %s", request.request_id, reason)

    def _spend(self, key: bytes) -> None:
        self._spent[key] = None
        while len(self._spent) > _MAX_SPENT:
            self._spent.popitem(last=False)

    def _renew(self) -> None:
        now = time.monotonic()
        for offer in self._offers.values():
            if offer.renew_at <= now < offer.renew_until:
                offer.renew_at = now + offer.ticket.ttl_s / _RENEWALS_A_LEASE
                self._connector.renew(offer.ticket, offer.ticket.ttl_s)

    # --- prefill: requests that another engine decodes ------------------------------------------------------

    def _stream_out(self, request: Any) -> None:
        try:
            stream = params.stream_of(request)
        except KvxferError as error:
            _log.warning("request %s is not streamed: %s", request.request_id, error)
            return
        if stream is not None:
            self._streams_out.new_request(request, stream.id)

    def _leave_tail(self, request: Any) -> None:
        """Take from the prompt the last tokens that decode computes itself."""
        count = self._left_to_decode
        given = request.kv_transfer_params
        if not count or given.get("_p_side_truncated") or request.num_prompt_tokens <= count:
            return
        if versions.skips_prefix_cache(request):
            return
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-count:]
        elif request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-count]
        else:
            return
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1
        given["_p_side_truncated"] = True  # so that no other connector of a MultiConnector does the same

    def _must_wait(self, request: Any) -> bool:
        """Whether a new prompt has to wait until decode has taken what was prefilled before."""
        return (
            self._is_producer
            and bool(self._promises)
            and self._leased_blocks >= self._options.max_leased_share * self._num_blocks
            and params.wants_decode_elsewhere(request)
        )

    def has_pending_frees(self) -> bool:
        """Whether to wait for leases to end where there are too few blocks; an engine that also decodes must not."""
        return bool(self._promises) and not self._is_consumer

    def finished(self, request: Any, tables: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Whether blocks stay until the workers report the request as sent, and what to answer."""
        self._end_offer(request)
        self._failed.discard(request.request_id)
        promise, reason = self._promise(request, tables)
        self._streams_out.finished(request.request_id, promise and promise.ticket, reason)
        if promise is None:
            return False, None
        return True, params.response(
            promise.ticket,
            engine_id=self._engine_id,
            blocks=list(promise.blocks.values()),
            tensor_ranks=self._tensor_ranks,
            pipeline_ranks=self._pipeline_ranks,
            all_keys=self._options.response_keys == "vllm",
        )

    def _promise(self, request: Any, tables: tuple[list[int], ...]) -> tuple[_Promise | None, str]:
        """A lease of the blocks of a request that has ended; or none, and why."""
        if not (self._is_producer and params.wants_decode_elsewhere(request)):
            return None, "it is not for another engine"
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return None, f"prefill ended with {request.status.name.removeprefix('FINISHED_').lower()}"
        if self._streams_out.is_unwanted(request.request_id):
            return None, "decode has left"
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        blocks = {group.name: group.used(tables[group.index], tokens) for group in self._groups}
        if not tokens or not any(blocks.values()):
            return None, "prefill has computed nothing"
        try:
            ticket = self._connector.issue(
                self._layout,
                blocks,
                tokens=tokens,
                ttl_s=self._options.lease_s,
                request_id=params.bound_request_id(request, tokens),
            )
        except KvxferError as error:
            self.stats.count("not_published")
            _log.error("request %s cannot be offered to decode: %s", request.request_id, error)
            return None, str(error)
        promise = self._promises[request.request_id] = _Promise(ticket, blocks)
        self._leased_blocks += promise.block_count
        self._publications.append(
            Publication(
                request_id=request.request_id,
                ticket=bytes(ticket),
                blocks=blocks,
                tokens=tokens,
                ttl_s=self._options.lease_s,
            )
        )
        return promise, ""

    def _end_offer(self, request: Any) -> None:
        if self._streams_in.drop(request.request_id):
            self._cancelled.append(request.request_id)
        offer = self._offers.get(request.request_id)
        if offer is None:
            return
        if offer.state is _State.LOADING:
            offer.state = _State.ABANDONED  # its blocks stay until the workers report it
            self._cancelled.append(request.request_id)
        else:
            self._decline(request.request_id, offer)

    # --- each step ------------------------------------------------------------------------------------------

    def orders(self, scheduled: Any) -> Orders:
        """What the workers are to do in a step that vLLM has scheduled, each thing once."""
        self._renew()
        self._read_notices()
        parts, openings, revoked = self._streams_out.step(scheduled)
        pieces, reserves, broken = self._streams_in.step()
        self._serial += 1
        orders = Orders(
            serial=self._serial,
            engine=engine.engine_name(self._config),
            generation=self._connector.generation,
            publications=(*self._publications, *parts),
            loads=tuple(self._loads),
            releases=tuple(self._releases),
            cancelled=tuple(self._cancelled),
            pieces=tuple(pieces),
            openings=tuple(openings),
            reserves=tuple(reserves),
            broken=(*self._broken, *broken),
            revoked=tuple(revoked),
            knows_ranks=len(self._endpoints) == self._ranks,
            is_idle=scheduled.total_num_scheduled_tokens == 0,
        )
        self._publications, self._loads, self._releases, self._cancelled, self._broken = [], [], [], [], []
        return orders

    def take_output(self, output: Any) -> None:
        """What the workers report, all ranks together."""
        report = output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._take_report(report)
        for request_id in output.finished_recving or ():
            offer = self._offers.pop(request_id, None)
            streamed = self._streams_in.loaded(request_id)
            is_awaited = streamed or (offer is not None and offer.state is _State.LOADING)
            if is_awaited and request_id in getattr(output, "failed_recving", ()):
                self._failed.add(request_id)
            if offer is not None:
                self._loading.pop(offer.key, None)
                self._spend(offer.key)
        for request_id in output.finished_sending or ():
            promise = self._promises.pop(request_id, None)
            if promise is not None:
                self._leased_blocks -= promise.block_count
                self._connector.retire(promise.ticket)
                self._streams_out.released(request_id)

    def _hear(self, endpoint: str, payload: bytes) -> None:
        """On kvxfer's thread."""
        self._unread.append((endpoint, payload))
        self._streams_out.answer_at_once(endpoint, payload)

    def _read_notices(self) -> None:
        while self._unread:
            endpoint, word = self._unread.popleft()
            if isinstance(word, KvxferError):
                self._streams_in.unreachable(endpoint, word)
                continue
            try:
                notice = notices.decode(word)
            except KvxferError as error:
                _log.warning("a notice from %s was dropped: %s", endpoint, error)
                continue
            if isinstance(notice, News):
                self._streams_in.take(notice)
            elif isinstance(notice, Ask | Leave):
                self._streams_out.take(endpoint, notice)

    def _take_report(self, report: RankReport) -> None:
        for request_id, ranks in report.ended_parts.items():
            self._streams_out.part_ended(request_id, ranks)
        for request_id, ranks in report.ended_reservations.items():
            self._streams_in.reservation_ended(request_id, ranks)
        known = self._endpoints | report.endpoints
        if known != self._endpoints:
            self._endpoints = known
            if len(known) == self._ranks:
                self._connector.set_members(known)

    def _rank_endpoints(self) -> tuple[str, ...]:
        """All ranks' endpoints; none until the last one is known."""
        known = len(self._endpoints) == self._ranks
        return tuple(self._endpoints[rank] for rank in sorted(self._endpoints)) if known else ()


def _left_to_decode(vllm_config: Any, groups: tuple[TableGroup, ...]) -> int:
    """How many tokens at the end of a prompt prefill must not compute.

    Decode computes the last prompt token anew, to sample from it. A sliding window or a state that has moved on to
    the token after it no longer serves that token. A drafter that looks ahead must not have seen more.
    """
    moves_on = any(group.kind is not GroupKind.FULL for group in groups)
    return max(int(moves_on), versions.prefill_lookahead(vllm_config) - 1)
