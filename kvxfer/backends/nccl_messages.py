"""What the two links of an NCCL pair say to each other, over the control channel.

A channel has one direction. Its *writer* opens it, and tells of every chunk once, in order: of those that it has put
when they have crossed, of those that it sends when the other end has to receive them. Its *taker* answers, and says
when it has received what was sent. Both ends number the channel's communicators, its *generations*. No chunk is told
of before the channel is open, so each belongs to the last one.

Imports msgspec and errors.
"""

from __future__ import annotations

import msgspec

from kvxfer.errors import BackendError


class _Said(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Open(_Said, tag="open"):
    """Writer: join this communicator as rank 1. Its first chunk goes to `address`.

    `window_bytes` of the writer's memory may become its part of a window; 0 where the one-sided way is not to be tried.
    """

    generation: int
    unique_id: bytes
    address: int
    window_bytes: int


class Accept(_Said, tag="accept"):
    """Taker: joins. `window_bytes` of its memory from `window_address` on become its part of the window, 0 for none."""

    generation: int
    window_address: int
    window_bytes: int


class Window(_Said, tag="window"):
    """Taker: the window is there, or why it is not: a new generation must do without."""

    generation: int
    why_not: str


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Chunk `number` of the channel, for [address, address + nbytes) of the taker's memory."""

    number: int
    address: int
    nbytes: int


class Came(_Said, tag="came"):
    """Writer, where there is a window: its stream has passed the puts of these chunks, so their signals will come."""

    generation: int
    chunks: tuple[Chunk, ...]


class Coming(_Said, tag="coming"):
    """Writer: these chunks are sent and must be received, for want of a window or of memory that lies in it."""

    generation: int
    chunks: tuple[Chunk, ...]


class Taken(_Said, tag="taken"):
    """Taker: chunk `number`, which was sent, is in place, and with it all before."""

    number: int


class Failed(_Said, tag="failed"):
    """Either: the channel has failed for good. `writing` tells which of the two channels of a pair."""

    writing: bool
    reason: str


class Read(_Said, tag="read"):
    """Asks for bytes of host memory that the other side has registered: words and records of its lease table."""

    key: int
    address: int
    nbytes: int


class Answer(_Said, tag="answer"):
    """The bytes, or why there are none."""

    key: int
    data: bytes
    why_not: str


FromWriter = Open | Came | Coming
FromTaker = Accept | Window | Taken
_ANY = FromWriter | FromTaker | Failed | Read | Answer
_decoder, _encoder = msgspec.msgpack.Decoder(_ANY), msgspec.msgpack.Encoder()


def encode(said: _Said) -> bytes:
    """As bytes."""
    return _encoder.encode(said)


def decode(payload: bytes) -> _Said:
    """What the peer's link says. Raises BackendError."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise BackendError(f"the peer's NCCL link said something malformed: {error}") from error
