"""`raw`: bytes as they are. Bit-exact, the default, and the only format for what is not a number.

`Plain` also describes an uncompressed cache (bf16, fp16, fp32) to the other formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvxfer.formats import elements
from kvxfer.formats.codec import Codec, Element


@dataclass(frozen=True, kw_only=True)
class Plain(Codec):
    """Numbers without scales: float32, float16 or bfloat16. Their only error is the type's rounding."""

    def fits(self, dim: int) -> bool:
        """Any number of values."""
        return True

    def pack(self, x: np.ndarray, *, check: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Round to nearest even; overflow is infinity; NaN stays NaN, as the one canonical quiet NaN."""
        x = np.asarray(x, np.float32)
        if self.element is Element.BFLOAT16:
            stored = elements.to_bf16(x)
        elif self.element is Element.FLOAT16:
            stored = elements.to_fp16(x)
        else:
            stored = np.where(np.isnan(x), np.float32(np.nan), x)
        return np.ascontiguousarray(stored).view(np.uint8), np.zeros((*x.shape[:-1], 0), np.uint8)

    def unpack(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The values as float32."""
        codes = np.ascontiguousarray(codes)
        if self.element is Element.BFLOAT16:
            return elements.from_bf16(codes.view(np.uint16))
        if self.element is Element.FLOAT16:
            return elements.from_fp16(codes.view(np.uint16))
        return codes.view(np.float32)

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """Half a unit in the last place; a half of the least subnormal near zero."""
        bits, least = {
            Element.FLOAT32: (24, 0.0),
            Element.FLOAT16: (11, 2.0**-25),
            Element.BFLOAT16: (8, 2.0**-134),
        }[self.element]
        return np.maximum(np.abs(x.astype(np.float64)) * 2.0**-bits, least)


@dataclass(frozen=True, kw_only=True)
class Bytes(Codec):
    """Bytes that mean nothing here: scales without their values, states, opaque records."""

    element: Element = Element.BYTES

    def fits(self, dim: int) -> bool:
        """Any number of bytes."""
        return True


FLOAT32 = Plain(element=Element.FLOAT32)
FLOAT16 = Plain(element=Element.FLOAT16)
BFLOAT16 = Plain(element=Element.BFLOAT16)
BYTES = Bytes()
