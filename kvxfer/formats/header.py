"""The header in front of a packed chunk.

128 bytes, little endian:

| offset | bytes | field |
|---|---|---|
| 0 | 4 | magic ``KVXC`` |
| 4 | 2 | version, 1 |
| 6 | 2 | flags; bit 0: a checksum is present; all others are 0 |
| 8 | 8 | payload bytes that follow |
| 16 | 8 | chunk index within the plan |
| 24 | 8 | plan id: what both ends derive from layouts, block counts, tokens and format |
| 32 | 8 | layout tag: digest of both layouts |
| 40 | 8 | xxh3-64 of the payload, seed 0; 0 where there is none |
| 48 | 80 | wire format in its canonical form, ASCII, padded with zero bytes |

A reader refuses what it does not know: another version, an unknown flag, a format or option without a name
here. The checksum is xxh3 and nothing else, so that a sender and a reader cannot disagree on its kind; it
needs the package ``xxhash`` (extra ``checksum``) at the end that makes it and at the end that checks it.

Imports errors, extras and wire.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvxfer.errors import ChecksumMismatch, InvalidChunk, InvalidRequest, UnknownChunkVersion
from kvxfer.extras import need
from kvxfer.formats.wire import MAX_NAME_BYTES, WireFormat, parse

MAGIC = b"KVXC"
VERSION = 1
HEADER_BYTES = 128
MAX_PAYLOAD_BYTES = 1 << 40

_STRUCT = struct.Struct(f"<4sHHQQQQQ{MAX_NAME_BYTES}s")
_HAS_CHECKSUM = 1

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class ChunkHeader:
    """What a chunk says about itself. `checksum` is None where the sender made none."""

    wire: WireFormat
    plan_id: int
    layout_tag: int
    chunk: int
    payload_bytes: int
    checksum: int | None = None

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
        has_checksum = self.checksum is not None
        return _STRUCT.pack(
            MAGIC,
            VERSION,
            _HAS_CHECKSUM if has_checksum else 0,
            self.payload_bytes,
            self.chunk,
            self.plan_id,
            self.layout_tag,
            self.checksum if has_checksum else 0,
            name,
        )

    @classmethod
    def decode(cls, data: Buffer) -> ChunkHeader:
        """The header at the start of `data`, which may be longer.

        Raises InvalidChunk, UnknownChunkVersion or UnknownWireFormat, and nothing else.
        """
        if len(data) < HEADER_BYTES:
            raise InvalidChunk(f"a chunk starts with a header of {HEADER_BYTES} bytes, got {len(data)} bytes")
        magic, version, flags, nbytes, chunk, plan_id, tag, checksum, name = _STRUCT.unpack_from(data)
        if magic != MAGIC:
            raise InvalidChunk(f"a chunk starts with {MAGIC!r}, got {magic!r}: this is no packed chunk")
        if version != VERSION:
            raise UnknownChunkVersion(
                f"chunk header version {version}, this library reads {VERSION}; upgrade the older end"
            )
        if flags & ~_HAS_CHECKSUM:
            raise InvalidChunk(f"unknown flags {flags:#06x} in a chunk header of version {VERSION}")
        if nbytes > MAX_PAYLOAD_BYTES:
            raise InvalidChunk(f"a chunk holds at most {MAX_PAYLOAD_BYTES} bytes, the header says {nbytes}")
        if checksum and not flags & _HAS_CHECKSUM:
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
            checksum=checksum if flags & _HAS_CHECKSUM else None,
        )

    def check(self, payload: Buffer, *, expected: ChunkHeader | None = None) -> None:
        """That `payload` is what this header announces, and that the header is the `expected` one.

        Of `expected` everything but the checksum is compared. Raises InvalidChunk or ChecksumMismatch;
        MissingExtra where there is a checksum and no xxhash.
        """
        if expected is not None:
            for field in ("wire", "plan_id", "layout_tag", "chunk", "payload_bytes"):
                ours, theirs = getattr(expected, field), getattr(self, field)
                if ours != theirs:
                    raise InvalidChunk(f"chunk {field}: expected {ours}, the header says {theirs}")
        nbytes = memoryview(payload).nbytes
        if nbytes != self.payload_bytes:
            raise InvalidChunk(f"the header announces {self.payload_bytes} bytes, got {nbytes}")
        if self.checksum is not None:
            found = checksum(payload)
            if found != self.checksum:
                raise ChecksumMismatch(
                    f"chunk {self.chunk}: xxh3 is {found:#018x}, the header says {self.checksum:#018x}"
                )


def checksum(payload: Buffer) -> int:
    """xxh3-64 of the payload with seed 0. Raises MissingExtra without xxhash."""
    return need("xxhash", "checksum").xxh3_64_intdigest(payload)
