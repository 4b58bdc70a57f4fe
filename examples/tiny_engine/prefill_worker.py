"""The prefill role: compute prompts, publish their blocks, and reuse a block only when its lease is over."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

import kvxfer

from .checkpoint import Checkpoint, CheckpointError, find_checkpoint
from .engine import Engine, Sequence
from .kv_layout import GROUP, kv_layout
from .messages import (
    Channel,
    ChannelClosed,
    Failed,
    NotStarted,
    Prefilled,
    PrefillRequest,
    WorkerOptions,
)
from .model import Llama
from .paged_cache import OutOfBlocks

NUM_BLOCKS = 256
LEASE_TTL_S = 30.0


class PrefillWorker:
    """An engine that computes prompts and hands their keys and values over.

    A published sequence keeps its blocks until its lease is over: decode has fetched them, or the lease has
    expired. Nothing waits for that but a prompt that finds too few free blocks.
    """

    def __init__(self, engine: Engine, connector: kvxfer.Connector) -> None:
        """Registers the engine's cache, which must outlive the connector."""
        self._engine = engine
        self._kv = connector.register(engine.cache.layers, kv_layout(engine.cache, engine.model.config))
        self._published: list[tuple[kvxfer.Lease, Sequence]] = []

    def prefill(self, request: PrefillRequest) -> Prefilled:
        """Compute a prompt and publish its blocks.

        Raises `OutOfBlocks` when the whole cache is too small for the prompt, and what `Engine.prefill` and
        `publish` raise otherwise; the prompt then holds no blocks.
        """
        self._make_room(self._engine.cache.blocks_for(len(request.prompt)))
        sequence = self._engine.prefill(request.prompt)
        try:
            lease = self._kv.publish(
                {GROUP: sequence.block_table},
                tokens=sequence.cached_tokens,
                request_id=request.request_id,
                ttl_s=LEASE_TTL_S,
            )
        except kvxfer.KvxferError:
            self._engine.free(sequence)
            raise
        self._published.append((lease, sequence))
        return Prefilled(
            request_id=request.request_id,
            ticket=bytes(lease.ticket),
            prompt_tokens=sequence.cached_tokens,
            first_token=sequence.next_token,
            checksum=self._engine.cache.checksum(sequence.block_table, sequence.cached_tokens),
        )

    def _make_room(self, blocks: int) -> None:
        """Free the sequences whose leases are over; wait for the oldest lease while that is not enough."""
        self._free_released()
        pool = self._engine.cache.pool
        while self._published and pool.free_blocks < blocks <= pool.num_blocks:
            oldest, _ = self._published[0]
            oldest.released.wait(LEASE_TTL_S)
            self._free_released()

    def _free_released(self) -> None:
        leased = []
        for lease, sequence in self._published:
            if lease.released.is_set():
                self._engine.free(sequence)
            else:
                leased.append((lease, sequence))
        self._published = leased


def serve(worker: PrefillWorker, channel: Channel) -> None:
    """Answer prefill requests, one after the other, until `ChannelClosed` is raised."""
    while True:
        request = channel.receive()
        try:
            reply = worker.prefill(request)
        except (OutOfBlocks, ValueError, kvxfer.KvxferError) as error:
            reply = Failed(request_id=request.request_id, reason=str(error))
        channel.send(reply)


def run(connection: Connection, secret: bytes, options: WorkerOptions) -> None:
    """The prefill process: load the model and serve until the front closes its end."""
    channel = Channel(connection)
    with suppress(ChannelClosed):
        try:
            _run(channel, secret, options)
        except (kvxfer.KvxferError, CheckpointError) as error:
            channel.send(NotStarted(reason=str(error)))


def _run(channel: Channel, secret: bytes, options: WorkerOptions) -> None:
    model = Llama(Checkpoint(find_checkpoint()))
    allocate = kvxfer.shared_empty if options.shared else np.zeros
    cache = model.new_cache(num_blocks=NUM_BLOCKS, allocate=allocate)
    listen = "tcp://127.0.0.1:0"
    with kvxfer.Connector("prefill-0", listen=listen, backends=options.backend, secret=secret) as connector:
        serve(PrefillWorker(Engine(model, cache), connector), channel)
