"""The ticket: a small signed token that lets a peer fetch leased blocks, or send into reserved ones.

It names the engine, the lease slot and its generation, and binds them to the request, the token count, the
fingerprint, and a digest of the block lists. The lists themselves are read from the lease's record and compared with
the digest, so a ticket stays under 1 KiB whatever the prompt's length.

Bytes: version (1), HMAC-SHA256 (32), msgpack array. Imports msgspec, auth and errors.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import lru_cache

import msgspec
import numpy as np

from kvxfer.control import auth
from kvxfer.control.messages import Role
from kvxfer.errors import InvalidTicket

TICKET_VERSION = 1
MAX_TICKET_BYTES = 1024
DIGEST_BYTES = 16
DICT_KEY = "kvxfer_ticket"


class _Claims(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    role: Role
    engine: str
    generation: int
    endpoint: str
    cache: str
    slot: int
    lease: int
    request_id: str
    tokens: int
    ttl_s: float
    record_bytes: int
    digest: bytes
    fingerprint: bytes


class Ticket(_Claims, frozen=True, kw_only=True):
    """Permission to fetch one lease or to fill one reservation, once.

    `generation` is the engine's (it changes when the engine restarts), `lease` the slot's. `digest` covers the lease's
    record (see lease.py), `fingerprint` the layout's. `ttl_s` is what the publisher granted when it signed; the
    publisher alone judges when it has run out. ``bytes(ticket)`` and `to_dict` travel anywhere.
    """

    encoded: bytes = b""

    def __bytes__(self) -> bytes:
        return self.encoded

    def __repr__(self) -> str:
        return (
            f"<Ticket {self.role.value} {self.request_id!r}: {self.tokens} tokens in cache {self.cache!r} of engine "
            f"{self.engine!r} at {self.endpoint}, slot {self.slot}, lease {self.lease}>"
        )

    def to_dict(self) -> dict[str, str]:
        """The ticket as JSON-friendly key and value, for an engine's transfer parameters."""
        return {DICT_KEY: base64.b64encode(self.encoded).decode()}


_decoder = msgspec.msgpack.Decoder(Ticket)


def sign(secret: bytes, **claims: object) -> Ticket:
    """A signed ticket. Raises InvalidTicket when the names in it are too long for MAX_TICKET_BYTES."""
    payload = msgspec.msgpack.encode(_Claims(**claims))
    version = TICKET_VERSION.to_bytes(1, "little")
    encoded = version + auth.mac(_key(secret), version, payload) + payload
    if len(encoded) > MAX_TICKET_BYTES:
        raise InvalidTicket(
            f"the ticket would have {len(encoded)} bytes, {MAX_TICKET_BYTES} are the limit: shorten the request id "
            f"({len(str(claims['request_id']))} characters), the engine's name or the endpoint"
        )
    return Ticket(**claims, encoded=encoded)


def parse(ticket: Ticket | bytes | Mapping[str, str], secret: bytes) -> Ticket:
    """The ticket in bytes or in a dict that `to_dict` made, its signature checked.

    Raises InvalidTicket for one that is malformed, altered, or signed with another secret.
    """
    encoded = _encoded(ticket)
    if not 1 + auth.MAC_BYTES < len(encoded) <= MAX_TICKET_BYTES:
        raise InvalidTicket(f"a ticket has {1 + auth.MAC_BYTES} to {MAX_TICKET_BYTES} bytes, got {len(encoded)}")
    version, seal, payload = encoded[:1], encoded[1 : 1 + auth.MAC_BYTES], encoded[1 + auth.MAC_BYTES :]
    if version[0] != TICKET_VERSION:
        raise InvalidTicket(f"the ticket has version {version[0]}, this side reads version {TICKET_VERSION}")
    try:
        auth.check_mac(_key(secret), seal, version, payload)
        ticket = _decoder.decode(payload)
    except (auth.AuthenticationError, msgspec.MsgspecError) as error:
        raise InvalidTicket(f"the ticket is forged or was altered, or this side has another secret: {error}") from error
    msgspec.structs.force_setattr(ticket, "encoded", encoded)
    return ticket


def _encoded(ticket: Ticket | bytes | Mapping[str, str]) -> bytes:
    if isinstance(ticket, Ticket):
        return ticket.encoded
    if isinstance(ticket, (bytes, bytearray, memoryview)):
        return bytes(ticket)
    if isinstance(ticket, Mapping) and isinstance(ticket.get(DICT_KEY), str):
        try:
            return base64.b64decode(ticket[DICT_KEY], validate=True)
        except ValueError as error:  # binascii.Error, and what is not ASCII
            raise InvalidTicket(f"the ticket under {DICT_KEY!r} is not base64: {error}") from error
    raise InvalidTicket(f"expected a Ticket, its bytes, or a mapping with {DICT_KEY!r}; got {type(ticket).__name__}")


@lru_cache(maxsize=16)
def _key(secret: bytes) -> bytes:
    return auth.derive(secret, "kvxfer ticket")


def digest(data: bytes) -> bytes:
    """The digest of records and fingerprints in tickets: SHA-256, the fastest in hardware, cut to 128 bits."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def fingerprint_digest(fingerprint: Mapping[str, str]) -> bytes:
    """Digest of a layout's fingerprint, whatever the order of its factors."""
    return digest(msgspec.msgpack.encode(sorted(fingerprint.items())))


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a lease holds: int32 little-endian block ids for each group, right-aligned as in kvxfer.plan."""

    tokens: int
    blocks: dict[str, memoryview]  # decoded without a copy

    @classmethod
    def of(cls, tokens: int, lists: Mapping[str, np.ndarray]) -> Record:
        """From checked block lists."""
        return cls(tokens=tokens, blocks={name: _bytes_of(lists[name]) for name in sorted(lists)})

    def lists(self) -> dict[str, np.ndarray]:
        """Block lists as int32 arrays, read-only."""
        return {name: np.frombuffer(data, "<i4").astype(np.int32, copy=False) for name, data in self.blocks.items()}

    def encode(self) -> bytes:
        """The bytes that stand in the lease table and that the ticket's digest covers."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Record | None:
        """The record in bytes whose `digest` is the ticket's; None when they are none."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError:
            return None


def _bytes_of(ids: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(ids, "<i4").view(np.uint8))
