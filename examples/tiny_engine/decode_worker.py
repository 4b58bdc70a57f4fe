"""The decode role: fetch the blocks of prompts that were computed elsewhere, and generate from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

import kvxfer

from .checkpoint import Checkpoint, CheckpointError, find_checkpoint
from .engine import Engine, Sequence
from .kv_layout import GROUP, kv_layout
from .messages import (
    Channel,
    ChannelClosed,
    Decoded,
    DecodeRequest,
    Failed,
    Generated,
    NotStarted,
    WorkerOptions,
)
from .model import Llama
from .paged_cache import OutOfBlocks

NUM_BLOCKS = 256
FETCH_TIMEOUT_S = 10.0


@dataclass
class Fetching:
    """A request whose keys and values are on their way into the blocks of `sequence`."""

    request: DecodeRequest
    sequence: Sequence
    transfer: kvxfer.Transfer


@dataclass
class Running:
    """A request that generates."""

    request_id: str
    transfer: kvxfer.Transfer
    verified: bool
    remaining: Iterator[int]
    tokens: list[int] = field(default_factory=list)


class DecodeWorker:
    """An engine that generates from prompts it has never seen.

    It works in steps, like a serving engine: while some sequences generate, the keys and values of others
    arrive.
    """

    def __init__(self, engine: Engine, connector: kvxfer.Connector, wire: str = "raw") -> None:
        """Registers the engine's cache, which must outlive the connector. `wire` is how bytes travel."""
        self._engine = engine
        self._wire = wire
        self._kv = connector.register(engine.cache.layers, kv_layout(engine.cache, engine.model.config))
        self._fetching: list[Fetching] = []
        self._running: list[Running] = []

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._fetching or self._running)

    def submit(self, request: DecodeRequest) -> None:
        """Allocate blocks for a prompt and start to fetch its keys and values into them; returns at once.

        Raises `OutOfBlocks`, or what `fetch` refuses; nothing is held then.
        """
        prefilled = request.prefilled
        sequence = self._engine.adopt(prefilled.prompt_tokens, prefilled.first_token)
        try:
            transfer = self._kv.fetch(
                prefilled.ticket, into={GROUP: sequence.block_table}, wire=self._wire, timeout_s=FETCH_TIMEOUT_S
            )
        except kvxfer.KvxferError:
            self._engine.free(sequence)
            raise
        self._fetching.append(Fetching(request, sequence, transfer))

    def step(self) -> list[Generated | Decoded | Failed]:
        """Let in what has arrived, generate a token for each running request; return tokens and what has ended."""
        news: list[Generated | Decoded | Failed] = []
        for fetching in list(self._fetching):
            # With nothing to generate there is nothing better to do than to wait.
            if fetching.transfer.done() or not self._running:
                news += self._finish_fetch(fetching)
        for running in list(self._running):
            news += self._generate(running)
        return news

    def _finish_fetch(self, fetching: Fetching) -> list[Failed]:
        """Start to generate, or free the blocks.

        Blocks may be reused only when the transfer is done: until then a byte may still arrive.
        """
        request, sequence, transfer = fetching.request, fetching.sequence, fetching.transfer
        request_id = request.prefilled.request_id
        try:
            transfer.wait()
        except kvxfer.KvxferError as error:
            if not transfer.done():
                return []  # it has failed, but a peer that stands still may yet write
            self._fetching.remove(fetching)
            self._engine.free(sequence)
            return [Failed(request_id=request_id, reason=str(error))]
        self._fetching.remove(fetching)
        arrived = self._engine.cache.checksum(sequence.block_table, sequence.cached_tokens)
        verified = arrived == request.prefilled.checksum
        tokens = self._engine.decode(sequence, request.max_tokens)
        self._running.append(Running(request_id, transfer, verified, tokens))
        return []

    def _generate(self, running: Running) -> list[Generated | Decoded | Failed]:
        """Generate one token, or end the request."""
        try:
            token = next(running.remaining)
        except StopIteration:
            self._running.remove(running)
            stats = running.transfer.stats
            return [
                Decoded(
                    request_id=running.request_id,
                    tokens=running.tokens,
                    fetched_bytes=stats.bytes,
                    wire_bytes=stats.wire_bytes,
                    fetch_seconds=stats.seconds,
                    backend=stats.backend,
                    way=stats.way,
                    wire=stats.wire,
                    verified=running.verified,
                )
            ]
        except OutOfBlocks as error:
            self._running.remove(running)
            return [Failed(request_id=running.request_id, reason=str(error))]
        running.tokens.append(token)
        return [Generated(request_id=running.request_id, token=token)]


def serve(worker: DecodeWorker, channel: Channel) -> None:
    """Take decode requests in between steps until `ChannelClosed` is raised."""
    while True:
        while channel.has_message() or not worker.busy:
            request = channel.receive()
            try:
                worker.submit(request)
            except (OutOfBlocks, kvxfer.KvxferError) as error:
                channel.send(Failed(request_id=request.prefilled.request_id, reason=str(error)))
        for message in worker.step():
            channel.send(message)


def run(connection: Connection, secret: bytes, options: WorkerOptions) -> None:
    """The decode process: load the model and serve until the front closes its end."""
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
    with kvxfer.Connector("decode-0", backends=options.backend, ways=options.ways, secret=secret) as connector:
        serve(DecodeWorker(Engine(model, cache), connector, options.wire), channel)
