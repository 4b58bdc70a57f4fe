"""`int4`: integers of four bits with float16 scales, symmetric or with a zero point, in groups of 32, 64 or
128.

Groups run along head_dim within one token, so that any number of tokens can be sent; the per-channel grouping
of keys in KIVI (arXiv 2402.02750) would need 32 tokens at a time. `hadamard` rotates first, as in `mx`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvxfer.formats import elements
from kvxfer.formats.codec import Codec, Element, Scale


@dataclass(frozen=True, kw_only=True)
class Int4(Codec):
    """Four-bit integers with a float16 scale, and a float16 zero point where `element` is UINT4.

    Rule, in float32; integers round to nearest even; float16 scales and zero points saturate at 65504:

    - symmetric: ``s = fp16(amax / 7)``, ``q = clamp(round(x * (1 / s)), -7, 7)``, value ``q * s``;
    - asymmetric: ``z = fp16(min)``, ``s = fp16((max - min) / 15)``, ``q = clamp(round((x - z) * (1 / s)), 0,
      15)``, value ``q * s + z``. Where s is zero, q is zero.

    Error of a value, where ``r = max - min`` of its group (float32's own rounding apart, a part in 10**5):

    - symmetric, for ``amax <= 7 * 65504``: ``amax / 14``, and ``amax / 2048 + 2**-22`` for the rounding of s.
      Larger groups have s = 65504: the value clamped to ``7 * 65504`` has an error of 32752, the clamping comes
      on top. A group with ``amax <= 7 * 2**-25`` becomes zeros.
    - asymmetric, for ``|min| <= 65504`` and ``r <= 15 * 65504``: ``r / 30``, and ``(|min| + r) / 2048 + 2**-21``
      for the rounding of z and s. In other groups z, s or both are clamped, and a value becomes the nearest of
      z, z + s, .. z + 15 s, whatever its distance. A group with ``r <= 15 * 2**-25`` becomes z.

    With rotation the root of the sum of squares of these over the run, of the rotated values; magnitudes beyond
    2**118 saturate before it.
    """

    element: Element = Element.INT4
    scale: Scale = Scale.FLOAT16
    block: int = 64

    def pack(self, x: np.ndarray, *, check: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """See the class; shapes in `Codec.pack`."""
        x = self.finite(x, check=check)
        dim = x.shape[-1]
        with np.errstate(over="ignore", invalid="ignore"):
            if self.rotate:
                x = elements.hadamard(x, self.rotation(dim))
            blocks = elements.blocks_of(x, min(self.block, dim))
            if self.element is Element.INT4:
                scale = _half(np.abs(blocks).max(axis=-1) / np.float32(7))
                q = np.rint(blocks * elements.reciprocal(scale)[..., None])
                codes = np.clip(q, -7, 7).astype(np.int8).view(np.uint8) & 15
                stored = scale.astype(np.float16)
            else:
                low, high = blocks.min(axis=-1), blocks.max(axis=-1)
                zero, scale = _half(low), _half((high - low) / np.float32(15))
                q = np.rint((blocks - zero[..., None]) * elements.reciprocal(scale)[..., None])
                codes = np.clip(q, 0, 15).astype(np.uint8)
                stored = np.stack([scale, zero], axis=-1).astype(np.float16).reshape(*x.shape[:-1], -1)
        codes = codes.reshape(*x.shape[:-1], -1)[..., :dim]
        return elements.pack_nibbles(codes), np.ascontiguousarray(stored).view(np.uint8)

    def unpack(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """See the class."""
        nibbles = elements.unpack_nibbles(codes)
        dim = nibbles.shape[-1]
        stored = elements.from_fp16(np.ascontiguousarray(scales).view(np.uint16))
        with np.errstate(over="ignore", invalid="ignore"):
            if self.element is Element.INT4:
                q = ((nibbles.astype(np.int32) ^ 8) - 8).astype(np.float32)
                values = q * np.repeat(stored, self.block, axis=-1)[..., :dim]
            else:
                pairs = stored.reshape(*codes.shape[:-1], -1, 2)
                scale, zero = (np.repeat(pairs[..., i], self.block, axis=-1)[..., :dim] for i in (0, 1))
                values = nibbles.astype(np.float32) * scale + zero
            return elements.hadamard(values, self.rotation(dim)) if self.rotate else values

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """See the class."""
        if self.rotate:
            return self.rotated_bound(x)
        dim = x.shape[-1]
        blocks = elements.blocks_of(x.astype(np.float64), min(self.block, dim))
        low, high = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
        most = float(elements.FLOAT16_MAX)
        if self.element is Element.INT4:
            amax = np.minimum(np.maximum(-low, high), 7 * most)
            bound = amax / 14 + amax * 2.0**-11 + 2.0**-22 + np.abs(blocks - np.clip(blocks, -amax, amax))
        else:
            reach = high - low
            inside = reach / 30 + (np.abs(low) + reach) * 2.0**-11 + 2.0**-21
            zero, step = np.clip(low, -most, most), np.minimum(reach / 15, most)
            clamped = np.abs(blocks - np.clip(blocks, zero, zero + 15 * step))
            rounding = step / 2 + (np.abs(zero) + 15 * step) * 2.0**-11
            outside = clamped + rounding
            bound = np.where((np.abs(low) <= most) & (reach <= 15 * most), inside, outside)
        return bound.reshape(*x.shape[:-1], -1)[..., :dim] * (1 + 1e-5)


def _half(x: np.ndarray) -> np.ndarray:
    """float16 values as float32, saturating at 65504."""
    rounded = np.clip(x, -elements.FLOAT16_MAX, elements.FLOAT16_MAX).astype(np.float16).astype(np.float32)
    return rounded + np.float32(0)  # one zero: the sign of a minimum of 0 and -0 is nobody's to say


def int4(*, asymmetric: bool = False, group: int = 64, hadamard: bool = False) -> Int4:
    """INT4 in groups of `group` values."""
    if asymmetric:
        return Int4(element=Element.UINT4, scale=Scale.FLOAT16_ZERO, block=group, rotate=hadamard)
    return Int4(block=group, rotate=hadamard)
