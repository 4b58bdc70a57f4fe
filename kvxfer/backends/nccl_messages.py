"""What the two links of an NCCL pair say to each other, over the control channel.

A channel has one direction. Its *writer* opens it, announces every chunk, and is told when one has been taken; its
*taker* answers. Both ends number the channel's communicators, its *generations*: what is said of an earlier one is
dropped.

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


class Put(_Said, tag="put"):
    """Writer: chunk `number` of the channel will come, into [address, address + nbytes) of the taker's memory."""

    number: int
    address: int
    nbytes: int


class Go(_Said, tag="go"):
    """Writer, where there is a window: chunk `number` is sent now, or (`signalled`) has been put."""

    generation: int
    number: int
    signalled: bool


class Taken(_Said, tag="taken"):
    """Taker: chunk `number` is in place, and with it all before."""

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


FromWriter = Open | Put | Go
FromTaker = Accept | Window | Taken
_ANY = FromWriter | FromTaker | Failed | Read | Answer
_decoder = msgspec.msgpack.Decoder(_ANY)


def encode(said: _Said) -> bytes:
    """As bytes."""
    return msgspec.msgpack.encode(said)


def decode(payload: bytes) -> _Said:
    """What the peer's link says. Raises BackendError."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise BackendError(f"the peer's NCCL link said something malformed: {error}") from error
