"""Checksums of packed chunks: two kinds, of which a chunk's header names one.

| kind | name | who can make it | what it is |
|---|---|---|---|
| 1 | ``xxh3`` | hosts, with the package ``xxhash`` | xxh3-64, seed 0 |
| 2 | ``mix64`` | hosts and GPUs | a sum of mixed words, see below |

mix64 reads the bytes as little-endian uint64 words, the last one filled up with zeros; arithmetic is modulo 2**64::

    mix(z):  z ^= z >> 32;  z *= FACTOR;  z ^= z >> 32;  z *= FACTOR;  z ^= z >> 32
    mix64  = mix(nbytes + sum(mix(word[i] + (i + 1) * STEP) for i in range(words)))

The sum does not depend on the order of its terms, so a GPU makes it with as many threads as it has. Both kinds detect
damage, not malice. ``csrc/mix64.h`` has mix64 for CPU and GPU.

Imports errors, extras and the native module.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from kvxfer import _native
from kvxfer.extras import need

FACTOR = np.uint64(0xD6E8FEB86659FD93)
STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)

Buffer = bytes | bytearray | memoryview


class ChecksumKind(enum.IntEnum):
    """How a chunk's checksum was made. The numbers stand in chunk headers."""

    XXH3 = 1
    MIX64 = 2


@dataclass(frozen=True)
class Checksum:
    """64 bits, and how they were made."""

    kind: ChecksumKind
    value: int

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.value:#018x}"


def checksum(payload: Buffer, kind: ChecksumKind = ChecksumKind.XXH3) -> Checksum:
    """The checksum of host bytes. MissingExtra for xxh3 without xxhash."""
    if kind is ChecksumKind.XXH3:
        return Checksum(kind, need("xxhash", "checksum").xxh3_64_intdigest(payload))
    view = np.frombuffer(payload, np.uint8)
    return Checksum(kind, _native.checksum(view.ctypes.data, view.nbytes))


def mix64_reference(payload: Buffer | np.ndarray) -> int:
    """mix64 as the module states it, in NumPy: what the kernels are tested against."""
    given = np.frombuffer(payload, np.uint8)
    padded = np.zeros(-(-len(given) // 8) * 8, np.uint8)
    padded[: len(given)] = given
    words = padded.view("<u8").astype(np.uint64)
    with np.errstate(over="ignore"):
        places = np.arange(1, len(words) + 1, dtype=np.uint64) * STEP
        total = _mix(words + places).sum(dtype=np.uint64)
        return int(_mix(np.array([total + np.uint64(len(given))], np.uint64))[0])


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> _SHIFT)) * FACTOR
    z = (z ^ (z >> _SHIFT)) * FACTOR
    return z ^ (z >> _SHIFT)
