"""Chunk headers: what a reader accepts, and what it refuses by name."""

from __future__ import annotations

import random
import sys

import pytest

from kvxfer import formats
from kvxfer.errors import (
    ChecksumMismatch,
    InvalidChunk,
    InvalidRequest,
    KvxferError,
    MissingExtra,
    UnknownChunkVersion,
    UnknownWireFormat,
)
from kvxfer.formats import HEADER_BYTES, Checksum, ChecksumKind, ChunkHeader
from kvxfer.formats.checksums import mix64_reference


def header(**changes) -> ChunkHeader:
    fields = dict(wire=formats.parse("mxfp4:ceil"), plan_id=1, layout_tag=2, chunk=3, payload_bytes=5)
    return ChunkHeader(**(fields | changes))


def xxh3(value: int) -> Checksum:
    return Checksum(ChecksumKind.XXH3, value)


def changed(offset: int, data: bytes) -> bytes:
    encoded = bytearray(header().encode())
    encoded[offset : offset + len(data)] = data
    return bytes(encoded)


def test_round_trip_with_bytes_after_it():
    assert ChunkHeader.decode(header().encode() + b"hello") == header()
    for kind in ChecksumKind:
        zero = header(checksum=Checksum(kind, 0))
        assert ChunkHeader.decode(memoryview(zero.encode())) == zero


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", InvalidChunk, "128 bytes, got 0"),
        (header().encode()[:-1], InvalidChunk, "got 127"),
        (changed(0, b"KVXD"), InvalidChunk, "KVXC"),
        (changed(4, b"\2"), UnknownChunkVersion, "version 2, this library reads 1"),
        (changed(6, b"\3"), InvalidChunk, "unknown flags 0x0003"),
        (changed(6, b"\4"), InvalidChunk, "unknown flags 0x0004"),
        (changed(8, b"\xff" * 8), InvalidChunk, "at most"),
        (changed(40, b"\1"), InvalidChunk, "flag says that there is none"),
        (changed(48, b"mxfp5"), UnknownWireFormat, "'mxfp5:ceil'; known are raw"),
        (changed(48, b"mxfp4:flat"), UnknownWireFormat, "no option 'flat'"),
        (changed(48, b"mxfp4:\xff"), InvalidChunk, "not ASCII"),
        (changed(58, b",ceil"), UnknownWireFormat, "one of"),
        (changed(48, b"mxfp4:floor"), InvalidChunk, "canonical name is 'mxfp4'"),
        (changed(127, b"x"), UnknownWireFormat, "no wire format|no option"),
    ],
)
def test_a_reader_refuses_what_it_does_not_know(data, error, message):
    with pytest.raises(error, match=message):
        ChunkHeader.decode(data)


def test_payload_and_expectation():
    payload = b"12345"
    header().check(payload, expected=header(checksum=xxh3(9)))
    with pytest.raises(InvalidChunk, match="announces 5 bytes, got 4"):
        header().check(payload[:4])
    for field, value in (("chunk", 4), ("plan_id", 9), ("layout_tag", 9), ("wire", formats.parse("raw"))):
        with pytest.raises(InvalidChunk, match=f"chunk {field}: expected"):
            header(**{field: value}).check(payload, expected=header())


@pytest.mark.parametrize("kind", ChecksumKind)
def test_checksum(kind):
    if kind is ChecksumKind.XXH3:
        pytest.importorskip("xxhash")
    payload = b"12345"
    good = header(checksum=formats.checksum(payload, kind))
    assert ChunkHeader.decode(good.encode()).checksum.kind is kind
    good.check(payload)
    with pytest.raises(ChecksumMismatch, match="chunk 3"):
        good.check(b"12346")


@pytest.mark.parametrize("nbytes", [*range(42), 4096, 100_003])
def test_mix64_is_what_the_reference_says(nbytes):
    data = random.Random(nbytes).randbytes(nbytes + 1)
    for payload in (data[:nbytes], memoryview(data)[1:]):  # also where words are not aligned
        assert formats.checksum(payload, ChecksumKind.MIX64).value == mix64_reference(payload)


@pytest.mark.parametrize("kind", ChecksumKind)
def test_checksums_tell_damage(kind):
    if kind is ChecksumKind.XXH3:
        pytest.importorskip("xxhash")
    data = bytes(range(250)) * 4
    swapped = data[8:9] + data[1:8] + data[:1] + data[9:]
    damaged = (data, swapped, data[:-1], data + b"\0")
    assert len({formats.checksum(payload, kind).value for payload in damaged}) == len(damaged)


def test_a_checksum_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(MissingExtra, match=r"kvxfer\[checksum\]"):
        formats.checksum(b"")


def test_fields_must_fit():
    with pytest.raises(InvalidRequest, match="64 bits"):
        header(plan_id=-1)
    with pytest.raises(InvalidRequest, match="at most"):
        header(payload_bytes=1 << 50)
    with pytest.raises(InvalidRequest, match="80 bytes"):
        header(wire=formats.WireFormat(name="n" * 81)).encode()


def test_random_mutations_raise_our_errors_and_nothing_else():
    source = random.Random(5)
    names = ["raw", "nvfp4:four_over_six,scale=0.25", "int4:asym,32,hadamard,first=4", "mla:rope=fp8"]
    originals = [header(wire=formats.parse(name), checksum=xxh3(7)).encode() for name in names]
    accepted = 0
    for _ in range(20_000):
        data = bytearray(source.choice(originals))
        for _ in range(source.randint(1, 6)):
            kind = source.random()
            at = source.randrange(len(data))
            if kind < 0.6:
                data[at] = source.randrange(256)
            elif kind < 0.8:
                data[min(48 + source.randrange(40), len(data) - 1)] = source.choice(b"0123456789,:=_.acdeflnorsx\0")
            else:
                data = data[: max(1, at)] + source.randbytes(source.randrange(3))
        try:
            decoded = ChunkHeader.decode(bytes(data))
            decoded.check(b"", expected=None)
        except KvxferError:
            continue
        accepted += 1
        assert decoded.encode() == bytes(data[:HEADER_BYTES])
    assert accepted < 20_000
