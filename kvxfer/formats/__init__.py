"""Wire formats: what cache bytes look like between pack and unpack, and conversion between cache formats."""

from kvxfer.formats.checksums import Checksum, ChecksumKind, checksum
from kvxfer.formats.codec import Codec, Element, Rule, Scale
from kvxfer.formats.header import HEADER_BYTES, ChunkHeader
from kvxfer.formats.plan import PackedJoin, PackedPlan, join_packed
from kvxfer.formats.wire import NAMES, WireFormat, parse

__all__ = [
    "HEADER_BYTES",
    "NAMES",
    "Checksum",
    "ChecksumKind",
    "ChunkHeader",
    "Codec",
    "Element",
    "PackedJoin",
    "PackedPlan",
    "Rule",
    "Scale",
    "WireFormat",
    "checksum",
    "join_packed",
    "parse",
]
