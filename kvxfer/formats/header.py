"""The header in front of a packed chunk.

128 bytes, little endian:

| offset | bytes | field |
|---|---|---|
| 0 | 4 | magic ``KVXC`` |
| 4 | 2 | version, 1 |
| 6 | 2 | flags; bits 0 and 1: the kind of the checksum, 0 where there is none (checksums.py); all others are 0 |
| 8 | 8 | payload bytes that follow |
| 16 | 8 | chunk index within the plan |
| 24 | 8 | plan id: what both ends derive from layouts, block counts, tokens and format |
| 32 | 8 | layout tag: digest of both layouts |
| 40 | 8 | checksum of the payload; 0 where there is none |
| 48 | 80 | wire format in its canonical form, ASCII, padded with zero bytes |

A reader refuses what it does not know: another version, an unknown flag or kind of checksum, a format or option
without a name here. Whoever makes a chunk picks the kind of checksum. A new kind takes a new number and leaves the
version as it is: readers that do not know it refuse the flag.

Imports errors, checksums and wire.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvxfer.errors import ChecksumMismatch, InvalidChunk, InvalidRequest, UnknownChunkVersion
from kvxfer.formats.checksums import Buffer, Checksum, ChecksumKind, checksum
from kvxfer.formats.wire import MAX_NAME_BYTES, WireFormat, parse

MAGIC = b"KVXC"
VERSION = 1
HEADER_BYTES = 128
MAX_PAYLOAD_BYTES = 1 << 40

_STRUCT = struct.Struct(f"<4sHHQQQQQ{MAX_NAME_BYTES}s")
_KIND = 3
_KINDS = {kind.value: kind for kind in ChecksumKind}


@dataclass(frozen=True, kw_only=True)
class ChunkHeader:
    """What a chunk says about itself. `checksum` is None where the sender made none."""

    wire: WireFormat
    plan_id: int
    layout_tag: int
    chunk: int
    payload_bytes: int
    checksum: Checksum | None = None

    def __post_init__(self) -> None:
        for field in ("plan_id", "layout_tag", "chunk", "payload_bytes"):
            if not 0 <= getattr(self, field) < 2**64:
                raise InvalidRequest(f"a chunk's {field} must fit 64 bits, got {getattr(self, field)}")
        if self.payload_bytes > MAX_PAYLOAD_BYTES:
            raise InvalidRequest(f"a chunk holds at most {MAX_PAYLOAD_BYTES} bytes, got {self.payload_bytes}")

    def encode(self) -> bytes:
        """The 128 bytes."""
        name = str(self.wire).encode()
        if len(name) > MAX_NAME_BYTES:
            raise InvalidRequest(f"a wire format's name has {MAX_NAME_BYTES} bytes at most, got {len(name)}")
        return _STRUCT.pack(
            MAGIC,
            VERSION,
            0 if self.checksum is None else self.checksum.kind,
            self.payload_bytes,
            self.chunk,
            self.plan_id,
            self.layout_tag,
            0 if self.checksum is None else self.checksum.value,
            name,
        )

    @classmethod
    def decode(cls, data: Buffer) -> ChunkHeader:
        """The header at the start of `data`, which may be longer.

        Raises InvalidChunk, UnknownChunkVersion or UnknownWireFormat, and nothing else.
        """
        if len(data) < HEADER_BYTES:
            raise InvalidChunk(f"a chunk starts with a header of {HEADER_BYTES} bytes, got {len(data)} bytes")
        magic, version, flags, nbytes, chunk, plan_id, tag, value, name = _STRUCT.unpack_from(data)
        if magic != MAGIC:
            raise InvalidChunk(f"a chunk starts with {MAGIC!r}, got {magic!r}: this is no packed chunk")
        if version != VERSION:
            raise UnknownChunkVersion(
                f"chunk header version {version}, this library reads {VERSION}; upgrade the older end"
            )
        kind = _KINDS.get(flags & _KIND)
        if flags & ~_KIND or (kind is None and flags):
            raise InvalidChunk(f"unknown flags {flags:#06x} in a chunk header of version {VERSION}")
        if nbytes > MAX_PAYLOAD_BYTES:
            raise InvalidChunk(f"a chunk holds at most {MAX_PAYLOAD_BYTES} bytes, the header says {nbytes}")
        if value and kind is None:
            raise InvalidChunk("the header holds a checksum, but its flag says that there is none")
        text = name.rstrip(b"\0")
        try:
            wire = parse(text.decode("ascii"))
        except UnicodeDecodeError as error:
            raise InvalidChunk(f"the name of the wire format is not ASCII: {text!r}") from error
        if str(wire).encode() != text:
            raise InvalidChunk(f"the wire format is named {text!r}, the canonical name is {str(wire)!r}")
        return cls(
            wire=wire,
            plan_id=plan_id,
            layout_tag=tag,
            chunk=chunk,
            payload_bytes=nbytes,
            checksum=None if kind is None else Checksum(kind, value),
        )

    def check(self, payload: Buffer | None, *, expected: ChunkHeader | None = None) -> None:
        """That `payload` is what this header announces, and that the header is the `expected` one.

        Of `expected` everything but the checksum is compared. None for a payload that the host cannot read: then
        nothing else is. Raises InvalidChunk or ChecksumMismatch;
        MissingExtra where the checksum is xxh3 and xxhash is not installed.
        """
        if expected is not None:
            for field in ("wire", "plan_id", "layout_tag", "chunk", "payload_bytes"):
                ours, theirs = getattr(expected, field), getattr(self, field)
                if ours != theirs:
                    raise InvalidChunk(f"chunk {field}: expected {ours}, the header says {theirs}")
        if payload is None:
            return
        nbytes = memoryview(payload).nbytes
        if nbytes != self.payload_bytes:
            raise InvalidChunk(f"the header announces {self.payload_bytes} bytes, got {nbytes}")
        if self.checksum is not None:
            found = checksum(payload, self.checksum.kind)
            if found != self.checksum:
                raise ChecksumMismatch(f"chunk {self.chunk}: {found}, the header says {self.checksum}")
