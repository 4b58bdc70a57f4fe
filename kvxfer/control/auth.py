"""Keys and seals: every message and ticket carries an HMAC-SHA256 under a key derived from the shared secret.

A session's keys come from the secret and a nonce of either side, one key for each direction, and sequence numbers
only rise: a message can be neither forged, nor replayed, nor sent back to its author. Nothing is encrypted.

Imports errors only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from kvxfer.errors import AuthenticationError, InvalidRequest

MAC_BYTES = 32
NONCE_BYTES = 16
MIN_SECRET_BYTES = 16
_BLOCK_BYTES = 64  # of SHA-256


def secret_bytes(secret: bytes | str | None) -> bytes:
    """The secret as bytes; empty when there is none. Raises InvalidRequest for one that is too short."""
    if secret is None:
        return b""
    if isinstance(secret, str):
        secret = secret.encode()
    if not isinstance(secret, (bytes, bytearray)):
        raise InvalidRequest(f"secret must be bytes or str, got {type(secret).__name__}")
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidRequest(
            f"secret must have {MIN_SECRET_BYTES} bytes or more, got {len(secret)}; try secrets.token_bytes(32)"
        )
    return bytes(secret)


def derive(secret: bytes, purpose: str, *context: bytes) -> bytes:
    """A key for one purpose. Contexts must have fixed lengths."""
    return hmac.digest(secret or b"kvxfer without a secret", purpose.encode() + b"\0" + b"".join(context), "sha256")


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the parts, in order."""
    inner, outer = (half.copy() for half in _halves(key))
    inner.update(b"".join(parts))
    outer.update(inner.digest())
    return outer.digest()


@lru_cache(maxsize=256)
def _halves(key: bytes) -> tuple[Any, Any]:
    """Both hashes of an HMAC (RFC 2104), each behind its block of key, to be copied: starting anew costs more."""
    block = (hashlib.sha256(key).digest() if len(key) > _BLOCK_BYTES else key).ljust(_BLOCK_BYTES, b"\0")
    return tuple(hashlib.sha256(bytes(byte ^ pad for byte in block)) for pad in (0x36, 0x5C))


def check_mac(key: bytes, expected: bytes, *parts: bytes) -> None:
    """AuthenticationError unless `expected` is the HMAC of the parts."""
    if not hmac.compare_digest(mac(key, *parts), expected):
        raise AuthenticationError("the signature does not fit: another secret, or altered on the way")


def is_loopback(endpoint: str) -> bool:
    """Whether a ZeroMQ endpoint can be reached from this host only."""
    parts = urlsplit(endpoint)
    if parts.scheme in ("ipc", "inproc"):
        return True
    host = (parts.hostname or "").strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        return all(ipaddress.ip_address(i[4][0]).is_loopback for i in socket.getaddrinfo(host, None))
    except OSError:
        return False
