"""The worker's side: registers the cache, publishes what the scheduler leaves to decode, fetches what it has ordered.

Runs on vLLM's main thread; the bytes move on kvxfer's. Every order is answered exactly once, by every rank: a
publication when its lease has ended, a load when its fetches have.

Imports intake, layerwise, layouts, metadata, notices, options, stats, versions, and kvxfer's connector.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger

from kvxfer.cache import Cache
from kvxfer.connector import Connector
from kvxfer.control import auth
from kvxfer.errors import Cancelled, KvxferError
from kvxfer.lease import Lease, LeaseState
from kvxfer.transfers.fetch import Fetch
from kvxfer.transfers.reserve import Reservation
from kvxfer.transfers.transfer import TransferStats
from kvxfer.vllm import engine, notices, versions
from kvxfer.vllm.engine import Place
from kvxfer.vllm.fingerprint import fingerprint_of
from kvxfer.vllm.intake import Intake, broken_off
from kvxfer.vllm.layerwise import Layerwise
from kvxfer.vllm.layouts import TableGroup, all_full, cache_layout, table_groups
from kvxfer.vllm.metadata import BlockIds, Load, Orders, Piece, Publication, RankReport, Reserve
from kvxfer.vllm.notices import Reserved
from kvxfer.vllm.options import Options, connector_arguments
from kvxfer.vllm.stats import KvxferStats

_log = init_logger("vllm.kvxfer.worker")

_LINGER_S = 1e-3  # as long as vLLM itself sleeps after a step in which it has computed nothing


@dataclass(frozen=True)
class Results:
    """What one step has to report. A failed load stands in `received` as well."""

    sent: set[str]
    received: set[str]
    failed: set[str]


class WorkerSide:
    """One rank's side."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._place = Place.of(vllm_config)
        self._drafts = vllm_config.speculative_config is not None  # which may still run when a step's tokens are known
        self._groups = table_groups(kv_cache_config)
        self._tensors: dict[str, list[torch.Tensor]] = {}  # by group, for blanking
        self._connector: Connector | None = None
        self._cache: Cache | None = None
        self._serial = -1
        self._joined: tuple[str, int] | None = None
        self._scheduler_knows_ranks = False
        self._leases: dict[str, Lease] = {}
        self._parts: dict[str, Lease] = {}  # of requests that are streamed
        self._ended_parts: dict[str, int] = {}
        self._ended_reservations: dict[str, int] = {}
        self._layerwise: Layerwise | None = None
        self._sends_all = options.stream_layers and all_full(self._groups)  # nothing is left to a fetch
        self._intakes: dict[str, Intake] = {}
        self._is_idle = False
        self._sent: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._ways_seen: set[tuple[str, str, str]] = set()
        self.stats = KvxferStats()

    # --- life -----------------------------------------------------------------------------------------------

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make vLLM's cache known to peers. Raises what kvxfer finds wrong, which ends the engine's start."""
        place = self._place
        if self._options.stream_layers:
            engine.check_layerwise(self._config)
        layout = cache_layout(
            self._groups,
            tensors,
            num_blocks=self._kv_cache_config.num_blocks,
            heads=place.heads,
            cache_dtype=str(self._config.cache_config.cache_dtype),
            latent_content=engine.latent_content(self._config),
            cpu_isa=engine.cpu_isa(self._config),
            fingerprint=fingerprint_of(
                self._config, self._options.model_id, with_speculation=not self._options.allow_missing_layers
            ),
        )
        engine.check_buffer_device(self._config, layout)
        self._tensors = {
            group.name: [tensors[layer] for layer in group.layers if layer in tensors] for group in self._groups
        }
        arguments = connector_arguments(self._options, engine.port_offset(self._config.parallel_config, place.rank))
        self._connector = Connector(
            engine.connector_name(self._config, f"rank {place.rank}"),
            rank=place.rank,
            ranks=place.ranks,
            **arguments,
        )
        self._cache = self._connector.register(None, layout, scales=engine.scales(self._config, layout))
        if self._options.stream_layers:
            self._layerwise = Layerwise(
                self._cache,
                secret=auth.secret_bytes(arguments["secret"]),
                timeout_s=self._options.stream_timeout_s,
                mark=self._event,
                has_all_layers=self._config.parallel_config.pipeline_parallel_size == 1,
            )
            self._connector.on_notice(self._layerwise.take)
        _log.info(
            "rank %d of %d listens on %s; %s; backends %s; ways %s",
            place.rank,
            place.ranks,
            self._connector.endpoint,
            ", ".join(f"{len(g.layers)} {g.kind.value} layers in {g.num_blocks} blocks" for g in layout.groups),
            ", ".join(self._connector.backends),
            ", ".join(self._options.ways),
        )
        for backend, reason in self._connector.why_not.items():
            _log.debug("backend %s is not used: %s", backend, reason)

    def close(self) -> None:
        """End transfers, leases, threads. Idempotent."""
        if self._connector is not None:
            self._connector.close()

    # --- a step ---------------------------------------------------------------------------------------------

    def carry_out(self, orders: Orders) -> None:
        """Start what the scheduler has ordered. Never blocks; once for each step, however often it is called."""
        if orders.serial <= self._serial or self._connector is None:
            return
        self.revoke(orders)
        self._serial = orders.serial
        self._scheduler_knows_ranks, self._is_idle = orders.knows_ranks, orders.is_idle
        if self._joined != (orders.engine, orders.generation):
            self._connector.join_engine(orders.engine, orders.generation)
            self._joined = (orders.engine, orders.generation)
        for publication in orders.publications:
            self._publish(publication)
        self._end_leases(orders.revoked)  # decode may leave while prefill computes the last tokens
        for ticket in orders.releases:
            self._release(ticket)
        for request_id in orders.cancelled:
            if request_id in self._intakes:
                self._intakes[request_id].cancel()
        for load in orders.loads:
            self._begin(load)
        for piece in orders.pieces:
            if piece.request_id in self._intakes:
                self._intakes[piece.request_id].offer(piece)
            else:
                self._release(piece.ticket)
        for reserve in orders.reserves:
            if reserve.request_id in self._intakes:
                self._intakes[reserve.request_id].make_room(reserve)
            else:
                self._reservation_ended(reserve)
        for request_id, reason in orders.broken:
            if request_id in self._intakes:
                self._intakes[request_id].end(broken_off(reason))
        if self._layerwise is not None:
            self._layerwise.begin_step(orders.openings)

    def computed(self, layer: str) -> None:
        """The step has computed a layer, or launched it."""
        if self._layerwise is not None:
            self._layerwise.computed(layer)

    def end_step(self) -> None:
        """The step has computed everything, or launched it."""
        if self._layerwise is not None:
            self._layerwise.end_step()

    def revoke(self, orders: Orders) -> None:
        """End the leases of blocks that change hands in this step. Before any of them is written; once a step."""
        if orders.serial > self._serial:
            self._end_leases(orders.revoked)

    def results(self) -> Results:
        """What has ended since the last call; each request stands in one answer only."""
        self._linger()
        sent, self._sent = self._sent, set()
        received: set[str] = set()
        failed: set[str] = set()
        for request_id, lease in list(self._leases.items()):
            if self._sends_all and self._layerwise.has_sent(request_id):
                lease.release()
            if lease.released.is_set():
                if request_id in self._parts:  # its blocks are given back now
                    self._parts[request_id].release()
                self._forget_sent(request_id)
                del self._leases[request_id]
                sent.add(request_id)
                self._lease_ended(request_id, lease)
        for request_id, intake in list(self._intakes.items()):
            if not intake.done():
                continue
            del self._intakes[request_id]
            received.add(request_id)
            if intake.error is not None:
                failed.add(request_id)
                self._load_failed(intake.load, intake.error)
        return Results(sent, received, failed)

    def _linger(self) -> None:
        """Wait a moment for what is loaded, where vLLM computes nothing meanwhile: it would sleep before it asks again,
        and a load that ended just after it was looked at would be known two steps later."""
        until = time.monotonic() + _LINGER_S
        for intake in self._intakes.values() if self._is_idle else ():
            if (left_s := until - time.monotonic()) > 0:
                intake.wait(left_s)

    def failed_blocks(self) -> set[int]:
        """Blocks of loads that have failed, for versions of vLLM that are not told of requests."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return set() if versions.REPORTS_FAILED_REQUESTS else blocks

    def report(self) -> RankReport | None:
        """Where this rank listens, until the scheduler knows; and which parts' leases and reservations have ended."""
        for request_id, lease in list(self._parts.items()):
            if lease.released.is_set():
                del self._parts[request_id]
                self._ended_parts[request_id] = 1
        parts, self._ended_parts = self._ended_parts, {}
        reservations, self._ended_reservations = self._ended_reservations, {}
        tells_endpoint = not self._scheduler_knows_ranks and self._connector is not None
        if not parts and not reservations and not tells_endpoint:
            return None
        endpoints = {self._place.rank: self._connector.endpoint} if tells_endpoint else {}
        return RankReport(endpoints=endpoints, ended_parts=parts, ended_reservations=reservations)

    # --- parts ----------------------------------------------------------------------------------------------

    def _publish(self, publication: Publication) -> None:
        request_id = publication.request_id
        try:
            lease = self._cache.publish(
                publication.blocks,
                tokens=publication.tokens,
                ttl_s=publication.ttl_s,
                ticket=publication.ticket,
                stream=self._stream() if publication.is_part or self._drafts else None,
            )
            (self._parts if publication.is_part else self._leases)[request_id] = lease
            if self._layerwise is not None and not publication.is_part:
                self._layerwise.close(request_id)
        except KvxferError as error:
            if publication.is_part:
                self._ended_parts[request_id] = 1
                _log.debug("request %s: no part was leased: %s", request_id, error)
                return
            self._forget_sent(request_id)
            self._sent.add(request_id)
            self.stats.count("not_published")
            _log.error("request %s cannot be offered to decode: %s", request_id, error)

    def _end_leases(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for lease in (self._parts.get(request_id), self._leases.get(request_id)):
                if lease is not None:
                    lease.release()
            self._forget_sent(request_id)

    def _forget_sent(self, request_id: str) -> None:
        """The request's blocks change hands."""
        if self._layerwise is not None:
            self._layerwise.forget(request_id)

    def _event(self) -> object:
        """A point behind all that is launched now. None for a cache on the CPU."""
        stream = self._stream()
        return None if stream is None else stream.record_event()

    def _stream(self) -> object:
        """The stream on which earlier steps were launched: they may still be at work. None for a cache on the CPU."""
        device = next(iter(self._tensors.values()))[0].device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def _begin(self, load: Load) -> None:
        self._blank(load.blank)
        self._intakes[load.request_id] = Intake(
            load,
            self._groups,
            fetch=self._fetch,
            reserve=self._reserve,
            release=self._release,
            fetched=self._fetched,
            reservation_ended=self._reservation_ended,
        )

    def _fetch(self, ticket: bytes, blocks: BlockIds, timeout_s: float) -> Fetch:
        return self._cache.fetch(
            ticket,
            into=blocks,
            wire=self._options.wire,
            timeout_s=timeout_s,
            allow_missing=self._options.allow_missing_layers,
        )

    def _reserve(self, order: Reserve) -> Reservation:
        reservation = self._cache.reserve(order.blocks, tokens=order.tokens, ttl_s=order.ttl_s, ticket=order.ticket)
        word = Reserved(
            id=order.stream_id,
            ticket=order.ticket,
            wire=self._options.wire,
            allow_missing=self._options.allow_missing_layers,
        )
        try:
            self._connector.notify(order.ranks[self._place.rank], notices.encode(word))
        except KvxferError:  # for what prefill calls its endpoint, say: nobody will come
            reservation.cancel()
            raise
        return reservation

    def _reservation_ended(self, order: Reserve, stats: TransferStats | None = None) -> None:
        """Nobody writes under it any more; with `stats` everything has come."""
        self._ended_reservations[order.request_id] = 1
        if stats is not None:
            self.stats.count("layerwise")
            _log.debug(
                "tokens %d to %d of request %s came layer by layer: %d bytes (%d on the wire), way %s, backend %s, "
                "wire %s",
                order.first_token,
                order.tokens,
                order.request_id,
                stats.bytes,
                stats.wire_bytes,
                stats.way,
                stats.backend,
                stats.wire,
            )

    def _blank(self, blocks: BlockIds) -> None:
        for name, ids in blocks.items():
            for tensor in self._tensors[name] if ids else ():
                tensor[torch.tensor(ids, device=tensor.device)] = 0
                if tensor.is_cuda:
                    torch.cuda.current_stream(tensor.device).synchronize()

    def _release(self, ticket: bytes) -> None:
        try:
            self._connector.release(ticket)
        except KvxferError as error:
            _log.debug("a ticket was not released: %s", error)

    def _load_failed(self, load: Load, error: KvxferError) -> None:
        self._failed_blocks.update(block for ids in load.blocks.values() for block in ids)
        if isinstance(error, Cancelled):
            _log.debug("KV of request %s is not wanted any more: %s", load.request_id, error)
            return
        self.stats.count("failed")
        _log.warning("KV of request %s was not fetched: %s: %s", load.request_id, type(error).__name__, error)

    def _fetched(self, piece: Piece, fetch: Fetch) -> None:
        stats = fetch.stats
        self.stats.fetched(stats)
        if not piece.is_last:
            self.stats.count("parts")
        seen = (stats.backend, stats.way, stats.wire)
        if seen not in self._ways_seen:
            self._ways_seen.add(seen)
            _log.info("KV comes the %s way, backend %s, wire format %s", stats.way, stats.backend, stats.wire)
        _log.debug(
            "fetched request %s up to token %d: %d bytes (%d on the wire) in %d copies from %d ranks, %.2f ms of which "
            "%.2f before the first byte, %.2f GB/s, way %s, backend %s, wire %s",
            piece.request_id,
            piece.tokens,
            stats.bytes,
            stats.wire_bytes,
            stats.copies,
            stats.peers,
            stats.seconds * 1e3,
            stats.posted_s * 1e3,
            stats.gigabytes_per_s,
            stats.way,
            stats.backend,
            stats.wire,
        )

    def _lease_ended(self, request_id: str, lease: Lease) -> None:
        if lease.state is LeaseState.EXPIRED:
            self.stats.count("expired")
            _log.warning("the lease of request %s ran out before decode had fetched it", request_id)
        else:
            self.stats.count("released")
            _log.debug("the lease of request %s was released", request_id)

    @property
    def groups(self) -> tuple[TableGroup, ...]:
        """The groups that move."""
        return self._groups
