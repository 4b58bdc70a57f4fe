"""What two engines tell each other of a prompt that is streamed: msgpack, in kvxfer's notices.

Between the schedulers decode asks, again and again while it waits; prefill answers each time with all there is to say,
and unasked when there is something new. A rank of decode tells the same rank of prefill which blocks it may write to.
Any of these words may be lost.

Imports ticket and errors.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxfer.errors import InvalidRequest
from kvxfer.ticket import MAX_TICKET_BYTES

StreamId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """Decode waits for this stream. `has_blocks`: and has blocks to receive parts of it."""

    id: StreamId
    has_blocks: bool = False


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """Decode wants nothing of this stream any more."""

    id: StreamId


class News(msgspec.Struct, frozen=True, kw_only=True, tag="news"):
    """How the stream stands with prefill.

    Without `tokens` it waits there; else it has begun, and `tokens` of the prompt will be handed over, of which
    `computed` are computed. `ticket` is a lease of the prompt's beginning, or of all of it if `is_last`. `ended` says
    why there will be none. With `open_from` the prompt's last step has begun: what comes after that token will be
    written into blocks that decode reserves and tells the `ranks` of, layer by layer.
    """

    id: StreamId
    tokens: Tokens = 0
    computed: Tokens = 0
    ticket: bytes = b""
    is_last: bool = False
    ended: str = ""
    open_from: Tokens | None = None
    ranks: tuple[str, ...] = ()


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved"):
    """Blocks of one rank of decode for the end of a prompt, and how they are to be written: see `Cache.send`."""

    id: StreamId
    ticket: Annotated[bytes, msgspec.Meta(max_length=MAX_TICKET_BYTES)]
    wire: Annotated[str, msgspec.Meta(max_length=64)] = "raw"
    allow_missing: bool = False


Notice = Ask | Leave | News | Reserved

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notice)


def encode(notice: Notice) -> bytes:
    """The notice as bytes."""
    return _encoder.encode(notice)


def decode(payload: bytes) -> Notice:
    """The notice in a payload. Raises InvalidRequest."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"not a notice of this connector: {error}") from error
