"""Every error that kvxfer raises. One root; each message says what was expected, what was seen, what to do.

Imports nothing. Errors of the system, of ZeroMQ or of a transport are translated where they are caught, with
the original as ``__cause__``.
"""

from __future__ import annotations


class KvxferError(Exception):
    """Root of all errors of this library."""


class MissingExtra(KvxferError):
    """A feature needs a package that is not installed; the message names the extra."""


class Closed(KvxferError):
    """The connector, cache or transfer has been closed."""


# --- what the caller passed ---------------------------------------------------------------------------------


class InvalidRequest(KvxferError, ValueError):
    """An argument is wrong. Nothing was written and nothing was sent."""


class UnknownGroup(InvalidRequest):
    """A block list names a group that the layout does not have, or a group's list is missing."""


class InvalidBlocks(InvalidRequest):
    """A block id is out of range or stands twice, or a list has the wrong length for the token count."""


class UnknownWireFormat(InvalidRequest):
    """No such wire format."""


class InvalidLayout(InvalidRequest):
    """A cache layout contradicts itself or the memory that it describes."""


class BufferTooSmall(InvalidRequest):
    """A staging buffer, a receive buffer or an array cannot hold what was asked for; says the size needed."""


class NonFiniteValue(KvxferError, ValueError):
    """A lossy wire format met NaN or infinity while checking was on; the packed bytes must not be used."""


# --- the two sides do not fit -------------------------------------------------------------------------------


class Mismatch(KvxferError):
    """The two sides do not mean the same by their caches."""


class LayoutMismatch(Mismatch):
    """No plan joins the two layouts; lists field by field what differs."""


class FingerprintMismatch(Mismatch):
    """The model, its revision, or another factor that decides what KV means differs."""


class NoCommonBackend(Mismatch):
    """No backend that both ends have can move these bytes; says why each was not possible."""


class ProtocolMismatch(Mismatch):
    """The peer speaks another version of the control protocol."""


# --- authentication -----------------------------------------------------------------------------------------


class AuthenticationError(KvxferError):
    """A message or ticket is not signed with this connector's secret."""


class InvalidTicket(AuthenticationError):
    """The ticket is forged, altered, of another engine, or was used before."""


class UnknownCache(InvalidTicket):
    """The ticket names a cache that the peer has not registered."""


# --- the promise was broken ---------------------------------------------------------------------------------


class TransferError(KvxferError):
    """A transfer failed. Its destination blocks hold undefined bytes and must not be used."""


class LeaseExpired(TransferError):
    """The lease ended before the last byte had been read, whatever was copied."""


class DeadlineExceeded(TransferError, TimeoutError):
    """A wait or a transfer ran past its deadline."""


class Cancelled(TransferError):
    """The transfer was cancelled by this side or by its peer."""


class PeerGone(TransferError, ConnectionError):
    """The peer died, closed, or was not reached."""


class BackendError(TransferError):
    """The transport failed; the cause is attached."""


class InvalidChunk(TransferError):
    """A chunk's header contradicts itself, its bytes, or what was expected; says which field."""


class UnknownChunkVersion(InvalidChunk):
    """A chunk of a header version that this library does not read."""


class ChecksumMismatch(InvalidChunk):
    """A chunk's bytes are not those that its sender summed."""


# --- a bound was reached ------------------------------------------------------------------------------------


class ResourceExhausted(KvxferError):
    """A limit of this process was reached; says which, and which parameter raises it."""


class LeaseTableFull(ResourceExhausted):
    """No free lease slot, or no room for the block lists of another lease."""


class SharedMemoryFull(ResourceExhausted):
    """The system has no room for a shared-memory segment."""


def as_kvxfer_error(error: BaseException) -> KvxferError:
    """The error itself, or a BackendError that carries it: a bug, but whoever waits must learn of it."""
    if isinstance(error, KvxferError):
        return error
    wrapped = BackendError(f"unexpected {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def by_name(name: str) -> type[KvxferError]:
    """The error class that a peer named; TransferError for a name that is not ours."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, KvxferError) else TransferError


def rebuild(name: str, reason: str) -> KvxferError:
    """The error that a peer reported by class name; a class that is not ours becomes a TransferError."""
    return by_name(name)(f"the peer reports: {reason}")
