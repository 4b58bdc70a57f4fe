"""What two engines' schedulers tell each other of a prompt that is streamed: msgpack, in kvxfer's notices.

Decode asks, again and again while it waits; prefill answers each time with all there is to say, and unasked when there
is something new. So any of these words may be lost.

Imports errors.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxfer.errors import InvalidRequest

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
    why there will be none.
    """

    id: StreamId
    tokens: Tokens = 0
    computed: Tokens = 0
    ticket: bytes = b""
    is_last: bool = False
    ended: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ask | Leave | News)


def encode(notice: Ask | Leave | News) -> bytes:
    """The notice as bytes."""
    return _encoder.encode(notice)


def decode(payload: bytes) -> Ask | Leave | News:
    """The notice in a payload. Raises InvalidRequest."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"not a notice of this connector: {error}") from error
