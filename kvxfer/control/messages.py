"""Every message of the control channel, and how it is encoded: msgpack, by msgspec, into these types and no others.

Protocol history:
  1  (2026-11)  first version
  2  (2026-11)  slots of the lease table have 64 bytes, with words for streams and the shelf, which descriptions name
  3  (2026-11)  links of a backend may speak to each other; a chunk may be told of before its bytes are there
  4  (2026-11)  one message tells of several chunks and brings their headers, or gives several slots back
  5  (2026-11)  chunks are told of once they are written; links over NCCL tell of all puts that have passed at once
  6  (2026-11)  segments without bytes make no chunks; descriptions say how large a chunk may be that this side packs
  7  (2026-12)  whoever answers names a Unix socket for the frames of processes of its host

Imports msgspec, layout and errors.
"""

from __future__ import annotations

import enum

import msgspec

from kvxfer.errors import ProtocolMismatch
from kvxfer.layout import CacheLayout

PROTOCOL_VERSION = 7
MAX_MESSAGE_BYTES = 1 << 20  # unless `Limits.max_message_bytes` says otherwise
NO_TRANSFER = 0


class Role(enum.Enum):
    """What a slot of a lease table promises, and so what a ticket allows."""

    FETCH = "fetch"  # a lease: the holder may read the blocks
    SEND = "send"  # a reservation: the holder may write the blocks


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who is speaking. Connectors of one engine share `engine` and `generation`."""

    name: str
    engine: str
    generation: int
    rank: int
    endpoint: str
    members: dict[int, str] = {}  # rank: endpoint, where the engine has several


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of all messages."""


# --- handshake ----------------------------------------------------------------------------------------------


class Hello(Message, tag="hello"):
    """First message of a session, from the side that dials."""

    protocol: int
    nonce: bytes
    identity: Identity


class Welcome(Message, tag="welcome"):
    """The answer. Session keys are derived from both nonces."""

    protocol: int
    nonce: bytes
    session: bytes
    identity: Identity
    line: bytes = b""  # a token, part of the address of a Unix socket (control/local.py); empty: there is none


class RegionHandles(msgspec.Struct, frozen=True, kw_only=True):
    """One region's handle for each backend that can reach it."""

    nbytes: int
    handles: dict[str, bytes]


class CacheInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One registered cache: its layout, without addresses, and the handles of its regions in layout order."""

    name: str
    layout: CacheLayout
    regions: tuple[RegionHandles, ...]
    scales: dict[str, dict[str, float]] = {}  # by layer and plane: factors that are not in the cache itself


class Description(Message, tag="description"):
    """What a connector has. Sent by both sides after the handshake, and again when it changes."""

    backends: dict[str, bytes]  # name: the backend's hello
    lease_table: RegionHandles | None
    shelf: RegionHandles | None  # memory in which leases lie packed ahead
    caches: tuple[CacheInfo, ...]
    outbox_bytes: dict[str, int]  # by kind of device: room for chunks on their way to staging that is not mapped
    reply: bool  # whether the receiver should answer with its own


# --- session ------------------------------------------------------------------------------------------------


class Ping(Message, tag="ping"):
    """Says that this side lives; sent when nothing else was."""


class Bye(Message, tag="bye"):
    """This side closes in an orderly way."""


class LinkMessage(Message, tag="link"):
    """What one side's link of a backend says to the other's. Empty: this side does not use that backend with it."""

    backend: str
    payload: bytes


class Release(Message, tag="release"):
    """Reader `reader` of `readers` is done with a lease."""

    slot: int
    lease: int
    reader: int
    readers: int


class Renew(Message, tag="renew"):
    """A holder asks to keep a lease for another `ttl_s` seconds from when this arrives."""

    slot: int
    lease: int
    ttl_s: float


class Notice(Message, tag="notice"):
    """Words of the sender's user to the receiver's. kvxfer carries them and interprets none."""

    payload: bytes


class PackedOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Staging that the receiving side lends: `slots` buffers of `slot_bytes`, one after another, from `offset`.

    Each takes a chunk in wire format `wire`, `on_gpu` in a GPU's memory. A chunk's header comes with the message that
    tells of it, with a checksum when `checksums` asks for it.
    """

    staging: RegionHandles
    offset: int
    slot_bytes: int
    slots: int
    wire: str
    checksums: bool
    on_gpu: bool


class Sources(Message, tag="sources"):
    """Tells one of several ranks how they fill the sender's cache together, so that both cut the same plan.

    `layouts` are the ranks' caches, the receiver's is ``layouts[index]``; `first` as in `kvxfer.plan.join`. Pulls name
    it by `key`.
    """

    key: int
    cache: str
    into_cache: str
    layouts: tuple[CacheLayout, ...]
    index: int
    first: int


class Pull(Message, tag="pull"):
    """Asks the publisher to pack leased blocks into the sender's staging. `blocks` counts destination blocks.

    `sources` is the key of a `Sources` message, or 0 where the receiver alone fills the cache.
    """

    transfer: int
    slot: int
    lease: int
    cache: str
    into_cache: str
    blocks: dict[str, int]
    sources: int
    allow_missing: bool
    offer: PackedOffer


class Claim(Message, tag="claim"):
    """Asks for the right to write into a reservation. `way` says how the bytes come, `blocks` counts source blocks."""

    transfer: int
    slot: int
    lease: int
    cache: str
    from_cache: str
    layerwise: bool
    way: str
    wire: str
    blocks: dict[str, int]
    nbytes: int  # of cache that will be written, for the receiver's statistics
    allow_missing: bool


class Grant(Message, tag="grant"):
    """The right to write; with an offer where the bytes come packed."""

    transfer: int
    offer: PackedOffer | None


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Chunk `index` of stage `stage` lies in staging slot `slot`; its header.

    With `announced` it may still be on its way: the receiving side's link knows under that number when it is there.
    """

    stage: int
    index: int
    slot: int
    header: bytes
    announced: int


class Chunks(Message, tag="chunks"):
    """Chunks that have been put into staging."""

    transfer: int
    placed: tuple[Placed, ...]


class Credit(Message, tag="credit"):
    """Staging slots are free again."""

    transfer: int
    slots: tuple[int, ...]


class Stop(Message, tag="stop"):
    """Asks the writing side to end; it answers with Ended once its last byte has been written."""

    transfer: int


class Ended(Message, tag="ended"):
    """The writing side writes nothing more for this transfer. `error` (an error class) is empty when all is written."""

    transfer: int
    error: str = ""
    reason: str = ""


class Received(Message, tag="received"):
    """The receiving side has everything of a reservation."""

    transfer: int


class Refused(Message, tag="refused"):
    """A request was refused; nothing was done. `error` is the name of an error class.

    Of transfer NO_TRANSFER: a message could not be read, so its sender must not wait for what it asked for.
    """

    transfer: int
    error: str
    reason: str


_ALL = (
    Hello
    | Welcome
    | Description
    | Ping
    | Bye
    | LinkMessage
    | Release
    | Renew
    | Notice
    | Sources
    | Pull
    | Claim
    | Grant
    | Chunks
    | Credit
    | Stop
    | Ended
    | Received
    | Refused
)
_MARGIN_BYTES = 256  # the rest of a message around an identity
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_ALL)


def encode(message: Message) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def nbytes_of(said: Identity | Description) -> int:
    """How large the message that says this can become: a shelf, which comes later, is like the lease table."""
    if isinstance(said, Description) and said.shelf is None:
        said = msgspec.structs.replace(said, shelf=said.lease_table)
    return len(_encoder.encode(said)) + _MARGIN_BYTES


def decode(data: bytes) -> Message:
    """The message in `data`. Raises msgspec.MsgspecError, or InvalidLayout for a layout that is none."""
    return _decoder.decode(data)


def check_protocol(theirs: int) -> None:
    """ProtocolMismatch unless the versions agree."""
    if theirs != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the peer speaks version {theirs} of the control protocol, this side {PROTOCOL_VERSION}: install the same "
            "release of kvxfer on both sides"
        )
