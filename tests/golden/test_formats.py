"""Bytes that must never change: packed vectors of every format, and the chunk header."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvxfer import formats
from kvxfer.formats import Checksum, ChecksumKind, ChunkHeader
from kvxfer.formats.checksums import mix64_reference

RAMP = (np.arange(32, dtype=np.float32) - 11) * np.float32(0.375)
"""-4.125 to 7.5 in steps of 0.375: positive and negative, with exact ties."""

VECTORS = {
    "fp8_e4m3": (
        "f7f6f5f3f2f0eeebe8e3db005b63686b6e70727375767778797a7a7b7c7d7d7e",
        "9224893c",
    ),
    "fp8_e4m3:tensor": (
        "c8c7c6c4c2c1bfbcb9b4ac002c34393c3f414244464748494a4a4b4c4d4e4e4f",
        "",
    ),
    "nvfp4": (
        "ffeedecdab0921434344556566667777",
        "333a",
    ),
    "nvfp4:four_over_six": (
        "eeddcdbcaa0921322233444455556566",
        "383f",
    ),
    "mxfp4": (
        "eeddcdbcaa0921324455656676777777",
        "7f",
    ),
    "mxfp4:ceil": (
        "ccbbabaa990810212233434454555566",
        "80",
    ),
    "mxfp4:even": (
        "ccbbabaa990810212233434454555566",
        "80",
    ),
    "mxfp4:hadamard": (
        "94090a000c0000000e00000000000000",
        "81",
    ),
    "mxfp8": (
        "f0efeeeceae9e7e4e1dcd400545c616467696a6c6e6f70717272737475767677",
        "7a",
    ),
    "int4:32": (
        "ccddeefeff0010112232434455656677",
        "493c",
    ),
    "int4:asym,32": (
        "00112233445566778899aabbccddeeff",
        "333a20c4",
    ),
    "int4:32,hadamard": (
        "040f0e000c0000000900000000000000",
        "d940",
    ),
}


@pytest.mark.parametrize("name", sorted(VECTORS))
def test_packed_vectors(name):
    codes, scales = formats.parse(name).codec("k", 32).pack(RAMP[None])
    assert (codes.tobytes().hex(), scales.tobytes().hex()) == VECTORS[name]


HEADER = (
    "4b565843"  # magic KVXC
    "0100"  # version
    "0100"  # flags: a checksum
    "0010000000000000"  # payload bytes
    "0300000000000000"  # chunk
    "efcdab8967452301"  # plan id
    "8877665544332211"  # layout tag
    "0df0adba0df0adba" + b"nvfp4:four_over_six,first=4".hex().ljust(160, "0")  # checksum
)


def test_header():
    header = ChunkHeader(
        wire=formats.parse("nvfp4:four_over_six,first=4"),
        plan_id=0x0123456789ABCDEF,
        layout_tag=0x1122334455667788,
        chunk=3,
        payload_bytes=4096,
        checksum=Checksum(ChecksumKind.XXH3, 0xBAADF00DBAADF00D),
    )
    assert header.encode().hex() == HEADER
    assert ChunkHeader.decode(bytes.fromhex(HEADER)) == header
    assert len(header.encode()) == formats.HEADER_BYTES


def test_checksum_is_xxh3_with_seed_0():
    pytest.importorskip("xxhash")
    assert formats.checksum(b"").value == 0x2D06800538D394C2  # of the xxHash specification


MIX64 = {  # worked out with Python's integers
    b"": 0,
    b"a": 0x2317DE48F27C13E9,
    b"12345678": 0x391D3E3B2BE89780,
    bytes(range(40)): 0x91C00F138B1DB82D,
}


def test_mix64():
    """Its flag in a header, and its values."""
    header = dataclasses.replace(
        ChunkHeader.decode(bytes.fromhex(HEADER)), checksum=Checksum(ChecksumKind.MIX64, 0xBAADF00DBAADF00D)
    )
    assert header.encode().hex() == HEADER.replace("01000100", "01000200", 1)
    for data, value in MIX64.items():
        assert formats.checksum(data, ChecksumKind.MIX64).value == value == mix64_reference(data)
