"""`fp8_e4m3`: eight bits a value, E4M3, scaled per tensor, per token and head, or per 128 values.

Sources: OCP 8-bit Floating Point v1.0; the per-128 form is the scaling of DeepSeek-V3's fp8_ds_mla record.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvxfer.formats import elements
from kvxfer.formats.codec import Codec, Element, Scale


@dataclass(frozen=True, kw_only=True)
class Fp8(Codec):
    """E4M3 codes with one float32 scale a block, or with the global scale alone.

    Rule, in float32: ``s = amax / 448`` and ``code = e4m3(x * (1 / s))``, value ``code * s``; without block
    scales ``code = e4m3(x * (1 / g))``, value ``code * g``. A block with s below 2**-126 packs to zeros.

    Error of a value: ``|x| / 16``, and half a subnormal step, ``s / 1024``, near zero. Without block scales,
    values beyond ``448 * g`` saturate there.
    """

    element: Element = Element.E4M3

    def pack(self, x: np.ndarray, *, check: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """See the class; shapes in `Codec.pack`."""
        x = elements.finite(x, check=check)
        dim = x.shape[-1]
        if self.scale is Scale.NONE:
            inverse = elements.reciprocal(np.float32(self.global_scale))
            with np.errstate(over="ignore"):
                return elements.to_e4m3(x * inverse), np.zeros((*x.shape[:-1], 0), np.uint8)
        blocks = elements.blocks_of(x, self.block or dim)
        scale = np.abs(blocks).max(axis=-1) / np.float32(elements.E4M3_MAX)
        codes = elements.to_e4m3(blocks * elements.reciprocal(scale)[..., None])
        codes = codes.reshape(*x.shape[:-1], -1)[..., :dim]
        return codes, np.ascontiguousarray(scale, np.float32).view(np.uint8)

    def unpack(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """See the class."""
        values = elements.from_e4m3(codes)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.scale is Scale.NONE:
                return values * np.float32(self.global_scale)
            scale = np.ascontiguousarray(scales).view(np.float32)
            block = self.block or codes.shape[-1]
            return values * np.repeat(scale, block, axis=-1)[..., : codes.shape[-1]]

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """See the class."""
        wide = np.abs(x.astype(np.float64))
        if self.scale is Scale.NONE:
            g = self.global_scale
            return np.maximum(np.maximum(wide / 16, g / 1024), wide - 448 * g) * (1 + 1e-5)
        block = self.block or x.shape[-1]
        amax = elements.blocks_of(wide, block).max(axis=-1)
        step = np.maximum(amax / 448 / 1024, np.where(amax < 448 * 2.0**-126, amax, 0))
        step = np.repeat(step, block, axis=-1)[..., : x.shape[-1]]
        return np.maximum(wide / 16, step) * (1 + 1e-5)


PER_TENSOR = Fp8()
PER_TOKEN_HEAD = Fp8(scale=Scale.FLOAT32)
PER_128 = Fp8(scale=Scale.FLOAT32, block=128)
