"""`mxfp4` and `mxfp8`: E2M1 or E4M3 with a power-of-two scale for 32 values: 4.25 and 8.25 bits.

Source: OCP Microscaling Formats v1.0. The scale rules are `elements.e8m0_scale`. With `hadamard` the vector
is rotated before it is packed and rotated back after, in runs of 128 (or of the largest power of two that
divides its size): an outlier's energy is spread over its run, which 32-wide blocks cannot isolate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvxfer.formats import elements
from kvxfer.formats.codec import Codec, Element, Rule, Scale

RULES = {"floor": Rule.FLOOR, "ceil": Rule.CEIL, "even": Rule.EVEN}


@dataclass(frozen=True, kw_only=True)
class Mx(Codec):
    """E2M1 or E4M3 codes in blocks with E8M0 scales.

    Rule: ``code = round(x * 2**-e)`` where the scale is ``2**e``, value ``code * 2**e``; values beyond the
    largest code saturate. A block of zeros has scale code 0 (2**-127). Scale code 255 is NaN: its whole block
    is. The largest scale is the one whose largest code is still finite, 2**125 for E2M1 and 2**119 for E4M3: so
    magnitudes beyond ``6 * 2**125`` and ``448 * 2**119``, 2.55e38 and 2.98e38, saturate there.

    Error of a value, of any finite float32: ``amax / 4`` of its block for E2M1, ``amax / 8`` for E4M3 (reached
    where a scale clips), and 2**-128 for blocks that small. With rotation the root of the sum of squares of these
    over the run; magnitudes beyond 2**118 saturate before it.
    """

    scale: Scale = Scale.E8M0
    rule: Rule = Rule.FLOOR
    block: int = 32

    def pack(self, x: np.ndarray, *, check: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """See the class; shapes in `Codec.pack`."""
        x = self.finite(x, check=check)
        dim = x.shape[-1]
        if self.rotate:
            x = elements.hadamard(x, self.rotation(dim))
        blocks = elements.blocks_of(x, self.block)
        four = self.element is Element.E2M1
        scale = elements.e8m0_scale(
            np.abs(blocks).max(axis=-1),
            rule=self.rule.name.lower(),
            largest=elements.E2M1_MAX if four else elements.E4M3_MAX,
            emax=elements.E2M1_EMAX if four else elements.E4M3_EMAX,
            mantissa_bits=1 if four else 3,
        )
        scaled = blocks * (np.float32(1) / elements.from_e8m0(scale))[..., None]
        codes = (elements.to_e2m1 if four else elements.to_e4m3)(scaled)
        codes = codes.reshape(*x.shape[:-1], -1)[..., :dim]
        return (elements.pack_nibbles(codes) if four else np.ascontiguousarray(codes)), scale

    def unpack(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """See the class."""
        if self.element is Element.E2M1:
            values = elements.from_e2m1(elements.unpack_nibbles(codes))
        else:
            values = elements.from_e4m3(codes)
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.repeat(elements.from_e8m0(scales), self.block, axis=-1)
            values = values * scale[..., : values.shape[-1]]
            return elements.hadamard(values, self.rotation(values.shape[-1])) if self.rotate else values

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """See the class."""
        if self.rotate:
            return self.rotated_bound(x)
        amax = elements.blocks_of(np.abs(x.astype(np.float64)), self.block).max(axis=-1)
        bound = np.maximum(amax / (4 if self.element is Element.E2M1 else 8), 2.0**-128) * (1 + 1e-5)
        return np.repeat(bound, self.block, axis=-1)[..., : x.shape[-1]]


def mxfp4(rule: str = "floor", *, hadamard: bool = False) -> Mx:
    """MXFP4 with one of the scale rules floor, ceil and even."""
    return Mx(element=Element.E2M1, rule=RULES[rule], rotate=hadamard)


def mxfp8(rule: str = "ceil", *, block: int = 32) -> Mx:
    """MXFP8. Blocks of 64 are what DeepSeek-V4's fp8 record has."""
    return Mx(element=Element.E4M3, rule=RULES[rule], block=block)
