"""The scheduler's side: which prompt is fetched with which ticket, which blocks are leased, each step's orders.

Knows requests and block ids, owns no cache. Its connector signs tickets, is where peers learn of the ranks, and renews
the leases of requests that wait here.

Imports discovery, layouts, metadata, options, params, stats, versions, and kvxfer's connector.
"""

from __future__ import annotations

import enum
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvxfer.connector import Connector
from kvxfer.control import auth
from kvxfer.errors import KvxferError
from kvxfer.layout import GroupKind
from kvxfer.ticket import Ticket
from kvxfer.vllm import engine, params, versions
from kvxfer.vllm.discovery import Announcer
from kvxfer.vllm.fingerprint import fingerprint_of
from kvxfer.vllm.layouts import TableGroup, table_groups, table_layout
from kvxfer.vllm.metadata import BlockIds, Load, Orders, Publication, RankReport
from kvxfer.vllm.options import Options, connector_arguments
from kvxfer.vllm.stats import KvxferStats

_log = init_logger("vllm.kvxfer.scheduler")

_RENEWALS_A_LEASE = 3
_MAX_SPENT = 65536
_REJECTED_PROMPT = [0]  # the front end aborts a request with this prompt for one that it has rejected


class _State(enum.Enum):
    OFFERED = "offered"  # may be matched
    LOADING = "loading"  # ordered; the workers have not reported yet


@dataclass
class _Offer:
    """A ticket that came with a request."""

    ticket: Ticket
    renew_at: float
    renew_until: float
    usable: bool  # for this prompt, up to a token from which decode can go on, by a request that may leave out tokens
    state: _State = _State.OFFERED

    @property
    def key(self) -> bytes:
        """What is equal for one ticket and no other."""
        return self.ticket.encoded


@dataclass(frozen=True)
class _Promise:
    """A lease of this engine, as the scheduler sees it."""

    ticket: Ticket
    blocks: int


class SchedulerSide:
    """The scheduler's side of one engine."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        self._config = vllm_config
        self._options = options
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        engine.check_parallelism(parallel)
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
        self.stats = KvxferStats()
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
        if not self._is_consumer:
            return
        try:
            ticket = params.offered_ticket(request, self._secret)
        except KvxferError as error:
            self._refuse(request, str(error))
            return
        if ticket is None:
            return
        for_prompt = params.is_for_prompt(ticket, request)
        if not for_prompt and request.prompt_token_ids != _REJECTED_PROMPT:
            self._refuse(request, "its ticket was issued for another prompt")
            return
        now = time.monotonic()
        self._offers[request.request_id] = _Offer(
            ticket=ticket,
            renew_at=now + ticket.ttl_s / _RENEWALS_A_LEASE,
            renew_until=now + self._options.renew_for_s,
            usable=for_prompt
            and ticket.tokens <= request.num_prompt_tokens - self._left_to_decode
            and not versions.skips_prefix_cache(request),
        )

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
        offer = self._offers.get(request.request_id)
        if offer is None or offer.state is not _State.OFFERED or not offer.usable:
            return 0, False
        if offer.key in self._loading:  # of another answer to the same prompt: it may leave a cached prefix
            return None, False
        tokens = offer.ticket.tokens - computed_tokens
        return (tokens, True) if tokens > 0 and offer.key not in self._spent else (0, False)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """vLLM has given the request blocks; `external_tokens` of its tokens are to be fetched, or none."""
        offer = self._offers.get(request.request_id)
        if offer is None or offer.state is not _State.OFFERED:
            return
        if external_tokens <= 0:
            self._decline(request.request_id, offer)
            return
        offer.state = _State.LOADING
        self._loading[offer.key] = request.request_id
        self._loads.append(self._load(request.request_id, offer.ticket, blocks.get_block_ids(), external_tokens))

    def loaded_groups(self) -> tuple[int, ...]:
        """The groups whose blocks a load fills: vLLM's indices."""
        return tuple(group.index for group in self._groups)

    def _load(self, request_id: str, ticket: Ticket, tables: Any, external_tokens: int) -> Load:
        local_tokens = ticket.tokens - external_tokens
        blocks: BlockIds = {}
        blank: BlockIds = {}
        for group in self._groups:
            table = tables[group.index]
            blocks[group.name] = group.used(table, ticket.tokens, local_tokens)
            given = group.used(table, len(table) * group.block_tokens, local_tokens)
            blank[group.name] = given if self._zeroing else []
        return Load(
            request_id=request_id,
            ticket=bytes(ticket),
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
        if not (self._is_producer and params.wants_decode_elsewhere(request)):
            return False, None
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        blocks = {group.name: group.used(tables[group.index], tokens) for group in self._groups}
        if not tokens or not any(blocks.values()):
            return False, None
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
            return False, None
        promise = _Promise(ticket, sum(map(len, blocks.values())))
        self._promises[request.request_id] = promise
        self._leased_blocks += promise.blocks
        self._publications.append(
            Publication(
                request_id=request.request_id,
                ticket=bytes(ticket),
                blocks=blocks,
                tokens=tokens,
                ttl_s=self._options.lease_s,
            )
        )
        return True, params.response(
            ticket,
            engine_id=self._engine_id,
            blocks=list(blocks.values()),
            tensor_ranks=self._tensor_ranks,
            pipeline_ranks=self._pipeline_ranks,
            all_keys=self._options.response_keys == "vllm",
        )

    def _end_offer(self, request: Any) -> None:
        offer = self._offers.get(request.request_id)
        if offer is None:
            return
        if offer.state is _State.LOADING:
            self._cancelled.append(request.request_id)  # its blocks stay until the workers report it
        else:
            self._decline(request.request_id, offer)

    # --- each step ------------------------------------------------------------------------------------------

    def orders(self) -> Orders:
        """What the workers are to do, each thing once."""
        self._renew()
        self._serial += 1
        orders = Orders(
            serial=self._serial,
            engine=engine.engine_name(self._config),
            generation=self._connector.generation,
            publications=tuple(self._publications),
            loads=tuple(self._loads),
            releases=tuple(self._releases),
            cancelled=tuple(self._cancelled),
            knows_ranks=len(self._endpoints) == self._ranks,
        )
        self._publications, self._loads, self._releases, self._cancelled = [], [], [], []
        return orders

    def take_output(self, output: Any) -> None:
        """What the workers report, all ranks together."""
        report = output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._take_report(report)
        for request_id in output.finished_recving or ():
            offer = self._offers.pop(request_id, None)
            if offer is not None:
                if request_id in getattr(output, "failed_recving", ()):
                    self._failed.add(request_id)
                self._loading.pop(offer.key, None)
                self._spend(offer.key)
        for request_id in output.finished_sending or ():
            promise = self._promises.pop(request_id, None)
            if promise is not None:
                self._leased_blocks -= promise.blocks
                self._connector.retire(promise.ticket)

    def _take_report(self, report: RankReport) -> None:
        known = self._endpoints | report.endpoints
        if known != self._endpoints:
            self._endpoints = known
            if len(known) == self._ranks:
                self._connector.set_members(known)


def _left_to_decode(vllm_config: Any, groups: tuple[TableGroup, ...]) -> int:
    """How many tokens at the end of a prompt prefill must not compute.

    Decode computes the last prompt token anew, to sample from it. A sliding window or a state that has moved on to
    the token after it no longer serves that token. A drafter that looks ahead must not have seen more.
    """
    moves_on = any(group.kind is not GroupKind.FULL for group in groups)
    return max(int(moves_on), versions.prefill_lookahead(vllm_config) - 1)
