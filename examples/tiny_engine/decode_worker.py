"""The decode role: fetch the blocks of prompts that were computed elsewhere, and generate from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import kvxfer

from .checkpoint import Checkpoint, find_checkpoint
from .engine import Engine, Sequence
from .kv_layout import GROUP, kv_layout
from .messages import Channel, ChannelClosed, Decoded, DecodeRequest, Failed
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
    remaining: Iterator[int]
    tokens: list[int] = field(default_factory=list)


class DecodeWorker:
    """An engine that generates from prompts it has never seen.

    It works in steps, like a serving engine: while some sequences generate, the keys and values of others
    arrive.
    """

    def __init__(self, engine: Engine, connector: kvxfer.Connector) -> None:
        """Registers the engine's cache, which must outlive the connector."""
        self._engine = engine
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
                prefilled.ticket, into={GROUP: sequence.block_table}, wire="raw", timeout_s=FETCH_TIMEOUT_S
            )
        except kvxfer.KvxferError:
            self._engine.free(sequence)
            raise
        self._fetching.append(Fetching(request, sequence, transfer))

    def step(self) -> list[Decoded | Failed]:
        """Let in what has arrived, generate a token for each running request, return what has ended."""
        ended: list[Decoded | Failed] = []
        for fetching in list(self._fetching):
            # With nothing to generate there is nothing better to do than to wait.
            if fetching.transfer.done() or not self._running:
                ended += self._finish_fetch(fetching)
        for running in list(self._running):
            ended += self._generate(running)
        return ended

    def _finish_fetch(self, fetching: Fetching) -> list[Failed]:
        """Start to generate, or free the blocks.

        When `wait` returns or raises, the last byte has been written: only then may the blocks be reused.
        """
        request, sequence, transfer = fetching.request, fetching.sequence, fetching.transfer
        self._fetching.remove(fetching)
        request_id = request.prefilled.request_id
        try:
            transfer.wait()
        except kvxfer.KvxferError as error:
            self._engine.free(sequence)
            return [Failed(request_id=request_id, reason=str(error))]
        self._running.append(Running(request_id, transfer, self._engine.decode(sequence, request.max_tokens)))
        return []

    def _generate(self, running: Running) -> list[Decoded | Failed]:
        """Generate one token, or end the request."""
        try:
            running.tokens.append(next(running.remaining))
        except StopIteration:
            self._running.remove(running)
            stats = running.transfer.stats
            return [
                Decoded(
                    request_id=running.request_id,
                    tokens=running.tokens,
                    fetched_bytes=stats.bytes,
                    fetch_seconds=stats.seconds,
                    backend=stats.backend,
                    way=stats.way,
                )
            ]
        except OutOfBlocks as error:
            self._running.remove(running)
            return [Failed(request_id=running.request_id, reason=str(error))]
        return []


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


def run(connection: Connection, secret: bytes) -> None:
    """The decode process: load the model and serve until the front closes its end."""
    model = Llama(Checkpoint(find_checkpoint()))
    cache = model.new_cache(num_blocks=NUM_BLOCKS, allocate=kvxfer.shared_empty)
    with kvxfer.Connector("decode-0", backends="auto", secret=secret) as connector:
        with suppress(ChannelClosed):
            serve(DecodeWorker(Engine(model, cache), connector), Channel(connection))
