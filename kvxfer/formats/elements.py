"""The small number types of wire formats, in NumPy: code points, rounding, scales.

Every rounding here is to the nearest code point, ties to the even code, and saturates at the largest finite
value; bf16 and fp16 overflow to infinity as IEEE 754 says. Values are float32 arrays; codes are uint8 (uint16
for bf16 and fp16). `csrc/formats.h` computes the same codes by arithmetic instead of tables, and tests
compare the two.

Sources: OCP Microscaling Formats v1.0 (E2M1, E4M3, E8M0), OCP 8-bit Floating Point Specification v1.0 (E4M3).

Imports NumPy and errors.
"""

from __future__ import annotations

import numpy as np

from kvxfer.errors import NonFiniteValue

FLOAT32_MAX = np.finfo(np.float32).max
FLOAT32_TINY = np.finfo(np.float32).tiny  # the least normal number, 2**-126
FLOAT16_MAX = np.float32(65504)
ROTATED_MAX = np.float32(2.0**118)
"""What a vector's magnitudes saturate at before a rotation: nothing can overflow on the way there and back."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_EMAX = 2  # exponent of the largest E2M1 binade
E4M3_EMAX = 8

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Value of codes 0 to 7; bit 3 is the sign. No infinity, no NaN."""


def _e4m3_values() -> np.ndarray:
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal).astype(np.float32)


E4M3_VALUES = _e4m3_values()
"""Value of codes 0 to 126; 127 is NaN; bit 7 is the sign. No infinity."""


def nearest_even(magnitude: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index of the nearest of `values` (ascending from 0), ties to the even index, saturating."""
    wide = values.astype(np.float64)
    ties = (wide[:-1] + wide[1:]) / 2
    index = np.searchsorted(ties, magnitude, side="left")  # a tie goes to the lower index ...
    on_tie = ties[np.minimum(index, len(ties) - 1)] == magnitude
    return (index + (on_tie & (index % 2 == 1))).astype(np.uint8)  # ... unless that is odd


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """E2M1 codes 0 to 15, one a byte. No NaN may be among the values (`finite`)."""
    return nearest_even(np.abs(x), E2M1_VALUES) | (np.signbit(x).astype(np.uint8) << 3)


def from_e2m1(codes: np.ndarray) -> np.ndarray:
    """Values of E2M1 codes 0 to 15, one a byte."""
    return np.where(codes & 8, -E2M1_VALUES[codes & 7], E2M1_VALUES[codes & 7])


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """E4M3 codes. No NaN may be among the values (`finite`)."""
    return nearest_even(np.abs(x), E4M3_VALUES) | (np.signbit(x).astype(np.uint8) << 7)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    """Values of E4M3 codes; 0x7F and 0xFF are NaN."""
    values = np.append(E4M3_VALUES, np.float32(np.nan))[codes & 127]
    return np.where(codes & 128, -values, values)


def from_e8m0(codes: np.ndarray) -> np.ndarray:
    """``2**(code - 127)``; 0xFF is NaN."""
    powers = np.ldexp(np.float32(1), np.minimum(codes, 254).astype(np.int32) - 127)
    return np.where(codes == 255, np.float32(np.nan), powers).astype(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bits as uint16; NaN becomes 0x7FC0."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """float32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_fp16(x: np.ndarray) -> np.ndarray:
    """fp16 bits as uint16; NaN becomes 0x7E00."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = x.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7E00), bits)


def from_fp16(bits: np.ndarray) -> np.ndarray:
    """float32 values of fp16 bits."""
    with np.errstate(invalid="ignore"):
        return bits.view(np.float16).astype(np.float32)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes 0 to 15 ``[..., n]`` as bytes ``[..., n / 2]``: element 2i low, element 2i + 1 high."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """The inverse of `pack_nibbles`."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def e8m0_scale(amax: np.ndarray, *, rule: str, largest: float, emax: int, mantissa_bits: int) -> np.ndarray:
    """E8M0 codes for blocks of largest magnitude `amax` (finite, 0 or more), clamped to 0 .. 254 - `emax`.

    - floor: ``floor(log2(amax)) - emax``, the text of the OCP specification; the top of a binade saturates.
    - ceil: the least power of two not below ``amax / largest``, so that nothing saturates.
    - even: as floor, after `amax` has been rounded to the element's mantissa, half way up.

    A float32 below 2**-126 counts as 2**-127, and so does zero. `emax` is the exponent of the element's largest
    code: with larger scales than the clamp's, that code times the scale would be beyond float32.
    """
    if rule == "ceil":
        bits = (amax / np.float32(largest)).astype(np.float32).view(np.uint32).astype(np.int64)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    else:
        bits = amax.astype(np.float32).view(np.uint32).astype(np.int64)
        if rule == "even":
            bits = bits + (1 << (22 - mantissa_bits))
        exponent = (bits >> 23) - emax
    return np.clip(exponent, 0, 254 - emax).astype(np.uint8)


def reciprocal(scale: np.ndarray) -> np.ndarray:
    """``1 / scale`` in float32, and 0 for a scale below 2**-126: such blocks pack to zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(scale < FLOAT32_TINY, np.float32(0), np.float32(1) / scale).astype(np.float32)


def finite(x: np.ndarray, *, check: bool, largest: np.float32 = FLOAT32_MAX) -> np.ndarray:
    """`x` as float32 without NaN and infinity, and no larger than `largest`.

    With `check` NaN and infinity raise NonFiniteValue. Without, infinity counts as the largest finite float32
    of its sign, NaN as the positive one, and so they saturate: their block's other values lose their
    precision, nothing else is touched.
    """
    x = np.asarray(x, np.float32)
    bad = ~np.isfinite(x)
    if check and bad.any():
        raise NonFiniteValue(
            f"a lossy wire format packs finite values only, and {int(bad.sum())} of {x.size} are NaN or "
            f"infinite, the first at index {int(np.flatnonzero(bad.ravel())[0])}; send this cache with "
            "wire='raw', or switch the check off to let them saturate"
        )
    return np.where(np.isnan(x), largest, np.clip(x, -largest, largest))


def blocks_of(x: np.ndarray, block: int) -> np.ndarray:
    """``[..., dim]`` as ``[..., ceil(dim / block), block]``; a short last block repeats its last value."""
    dim = x.shape[-1]
    short = -dim % block
    if short:
        x = np.concatenate([x, np.repeat(x[..., -1:], short, axis=-1)], axis=-1)
    return x.reshape(*x.shape[:-1], -1, block)


def hadamard(x: np.ndarray, size: int) -> np.ndarray:
    """Each run of `size` (a power of two) of the last axis times the orthonormal Hadamard matrix; its own
    inverse.

    Butterflies of distance 1, 2, 4, ... in float32, then one multiplication by ``float32(1 / sqrt(size))``:
    that order is part of the format.
    """
    y = np.array(x, np.float32).reshape(-1, size)
    distance = 1
    while distance < size:
        pairs = y.reshape(-1, size // (2 * distance), 2, distance)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        y = np.stack([low + high, low - high], axis=2).reshape(-1, size)
        distance *= 2
    return (y * np.float32(1 / np.sqrt(size))).reshape(x.shape)
