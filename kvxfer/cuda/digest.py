"""A digest of packed bytes, on the device and in NumPy; ``csrc/cuda/checksum.h`` defines it.

Words are the bytes as little-endian uint64, the last one filled up with zeros; arithmetic is modulo 2**64::

    mix(z):  z ^= z >> 32;  z *= FACTOR;  z ^= z >> 32;  z *= FACTOR;  z ^= z >> 32
    digest = mix(nbytes + sum(mix(word[i] + (i + 1) * STEP) for i in range(words)))

It detects damage, not malice.
"""

from __future__ import annotations

import numpy as np

from kvxfer.cuda.native import check, native
from kvxfer.errors import InvalidRequest

FACTOR = np.uint64(0xD6E8FEB86659FD93)
STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)
_ALIGNMENT = 16


def checksum(data: np.ndarray | bytes) -> int:
    """The digest of host bytes."""
    given = np.frombuffer(data, np.uint8)
    padded = np.zeros(-(-len(given) // 8) * 8, np.uint8)
    padded[: len(given)] = given
    words = padded.view("<u8").astype(np.uint64)
    with np.errstate(over="ignore"):
        places = np.arange(1, len(words) + 1, dtype=np.uint64) * STEP
        total = _mix(words + places).sum(dtype=np.uint64)
        return int(_mix(np.array([total + np.uint64(len(given))], np.uint64))[0])


def checksum_on_device(
    data: int, nbytes: int, digest: int, *, device: int, stream: int, max_sms: int = 0
) -> None:
    """Enqueue: the 8 bytes of device memory at `digest` become the digest of `nbytes` bytes at `data`.

    `data` lies on 16 bytes and `digest` on 8. Can be captured into a graph.
    """
    if data % _ALIGNMENT or digest % 8:
        raise InvalidRequest(f"data must lie on {_ALIGNMENT} bytes and its digest on 8")
    check(native().checksum(device, data, nbytes, digest, stream, max_sms), "launching a checksum")


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> _SHIFT)) * FACTOR
    z = (z ^ (z >> _SHIFT)) * FACTOR
    return z ^ (z >> _SHIFT)
