"""`nvfp4`: four bits a value and one E4M3 scale for 16 of them: 4.5 bits.

Source: the NVFP4 definition of NVIDIA's Blackwell documentation. The global scale multiplies to decode; tools
that divide by theirs store the inverse. `four_over_six` only changes how the encoder picks the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvxfer.formats import elements
from kvxfer.formats.codec import Codec, Element, Rule, Scale


@dataclass(frozen=True, kw_only=True)
class Nvfp4(Codec):
    """E2M1 codes in blocks of 16 with E4M3 scales and a global scale g.

    Rule, in float32: ``s = e4m3(amax / (6 * g))``, ``code = e2m1(x * (1 / (s * g)))`` with the rounded s,
    value ``code * (s * g)``. Where ``s * g`` is below 2**-126, all codes are zero (the sign stays). With
    four_over_six ``s`` from 6 and ``s`` from 4 are both tried, and 4 is taken where its squared error is
    less; the errors ``x - code * (s * g)`` are squared and summed in float32 by halves (i and i + 8, then 4,
    2, 1).

    Error of a value: ``amax * 17 / 96`` of its block, as long as ``amax / (6 * g)`` is a normal E4M3 number
    (2**-6 to 448): half of the widest gap of E2M1 with the scale's own rounding on top. Below, ``amax / 6 + g
    / 1024`` or ``6 * g / 1024``, the larger. In blocks beyond ``2688 * g`` values saturate there; those that do not
    keep the bound of ``amax = 2688 * g``.
    """

    element: Element = Element.E2M1
    scale: Scale = Scale.E4M3
    block: int = 16

    def pack(self, x: np.ndarray, *, check: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """See the class; shapes in `Codec.pack`."""
        x = elements.finite(x, check=check)
        blocks = elements.blocks_of(x, self.block)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            amax = np.abs(blocks).max(axis=-1)
            codes, scale = self._with_peak(blocks, amax, 6)
            if self.rule is Rule.FOUR_OVER_SIX:
                other_codes, other_scale = self._with_peak(blocks, amax, 4)
                better = self._error(blocks, other_codes, other_scale) < self._error(blocks, codes, scale)
                codes = np.where(better[..., None], other_codes, codes)
                scale = np.where(better, other_scale, scale)
        codes = codes.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
        return elements.pack_nibbles(codes), scale

    def _with_peak(self, blocks: np.ndarray, amax: np.ndarray, peak: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales that map the largest magnitude of a block to `peak`."""
        scale = elements.to_e4m3(amax / (np.float32(peak) * np.float32(self.global_scale)))
        return elements.to_e2m1(blocks * elements.reciprocal(self._step(scale))[..., None]), scale

    def _step(self, scale: np.ndarray) -> np.ndarray:
        return elements.from_e4m3(scale) * np.float32(self.global_scale)

    def _error(self, blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
        squares = np.square(blocks - elements.from_e2m1(codes) * self._step(scale)[..., None])
        half = self.block // 2
        while half:
            squares = squares[..., :half] + squares[..., half : 2 * half]
            half //= 2
        return squares[..., 0]

    def unpack(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """See the class."""
        values = elements.from_e2m1(elements.unpack_nibbles(codes))
        return values * np.repeat(self._step(scales), self.block, axis=-1)[..., : values.shape[-1]]

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """See the class."""
        g = self.global_scale
        wide = np.abs(x.astype(np.float64))
        amax = elements.blocks_of(wide, self.block).max(axis=-1)
        small = np.maximum(amax / 6 + g / 1024, 6 * g / 1024)
        bound = np.where(amax < 6 * g / 64, small, np.minimum(amax, 2688 * g) * 17 / 96)
        return np.maximum(np.repeat(bound, self.block, axis=-1)[..., : x.shape[-1]], wide - 2688 * g) * (1 + 1e-5)


PLAIN = Nvfp4()
