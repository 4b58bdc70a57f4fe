"""What the front and the workers say to each other: a few messages over a pipe.

Keys and values never travel here: what goes from the prefill worker through the front to the decode worker is
a ticket, small whatever the prompt's length.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the workers keep and move keys and values."""

    wire: str = "raw"
    shared: bool = True
    """Whether the caches lie in shared memory, which a peer of this host reads in place."""
    ways: tuple[str, ...] = ("mapped", "direct", "packed")
    """What the decode worker may use, best first."""
    backend: str = "auto"
    """What moves the bytes."""


class PrefillRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to prefill worker: compute this prompt."""

    request_id: str
    prompt: list[int]


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill worker to front: the prompt's keys and values are published under `ticket`.

    `checksum` is that of the keys and values, so that a demonstration can show that the same ones arrived.
    """

    request_id: str
    ticket: bytes
    prompt_tokens: int
    first_token: int
    checksum: int


class DecodeRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Front to decode worker: fetch what `prefilled` publishes and generate up to `max_tokens` tokens."""

    prefilled: Prefilled
    max_tokens: int


class Generated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode worker to front: the next token of a request."""

    request_id: str
    token: int


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode worker to front: the generated tokens, and how the prompt's keys and values came."""

    request_id: str
    tokens: list[int]
    fetched_bytes: int
    wire_bytes: int
    fetch_seconds: float
    backend: str
    way: str
    wire: str
    verified: bool


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Either worker to front: the request ended without an answer. The worker holds no blocks for it."""

    request_id: str
    reason: str


class NotStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Either worker to front: it could not start, and ends."""

    reason: str


Message = PrefillRequest | Prefilled | DecodeRequest | Generated | Decoded | Failed | NotStarted


class ChannelClosed(Exception):
    """The process at the other end has closed the channel or has ended."""


class Channel:
    """One end of a pipe that carries messages. `multiprocessing.connection.wait` accepts it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)

    def send(self, message: Message) -> None:
        """Send one message; blocks while the pipe is full. Raises `ChannelClosed`."""
        try:
            self._connection.send_bytes(self._encoder.encode(message))
        except ConnectionError as error:
            raise ChannelClosed("expected a reader at the other end, saw none") from error

    def receive(self) -> Message:
        """Wait for one message. Raises `ChannelClosed`."""
        try:
            return self._decoder.decode(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise ChannelClosed("expected a message, saw the other end closed") from error

    def has_message(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        return self._connection.poll()

    def fileno(self) -> int:
        """The file descriptor to wait on."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
