"""A codec: how one vector of values is stored as codes and scales.

A vector is what one entry (token) and one head of a plane hold: `dim` values along head_dim, which every
format splits into blocks of its own. A codec describes the bytes on the wire and the bytes in a cache alike,
so that converting between cache formats and compressing for the wire are the same operation. Each subclass
states one format's rule in NumPy; `csrc/formats.h` and the kernels compute the same bytes.

Imports NumPy, errors and elements.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np

from kvxfer.errors import InvalidRequest
from kvxfer.formats import elements


class Element(enum.IntEnum):
    """What a code is. The numbers are shared with csrc/packed_plan.h."""

    BYTES = 0  # no number: copied, never converted
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    E4M3 = 4
    E2M1 = 5
    INT4 = 6  # -7 to 7 in two's complement
    UINT4 = 7  # 0 to 15, with a zero point


class Scale(enum.IntEnum):
    """What a block's scale is."""

    NONE = 0
    FLOAT32 = 1
    E4M3 = 2
    E8M0 = 3
    FLOAT16 = 4
    FLOAT16_ZERO = 5  # scale, then zero point


class Rule(enum.IntEnum):
    """How an encoder picks the scale; decoders do not care."""

    NEAREST = 0
    FOUR_OVER_SIX = 1
    FLOOR = 2
    CEIL = 3
    EVEN = 4


ELEMENT_BITS = {
    Element.BYTES: 8,
    Element.FLOAT32: 32,
    Element.FLOAT16: 16,
    Element.BFLOAT16: 16,
    Element.E4M3: 8,
    Element.E2M1: 4,
    Element.INT4: 4,
    Element.UINT4: 4,
}
SCALE_BYTES = {
    Scale.NONE: 0,
    Scale.FLOAT32: 4,
    Scale.E4M3: 1,
    Scale.E8M0: 1,
    Scale.FLOAT16: 2,
    Scale.FLOAT16_ZERO: 4,
}

CODEC = np.dtype(
    [
        ("element", "u1"),
        ("scale", "u1"),
        ("rule", "u1"),
        ("reserved", "u1"),
        ("block", "<u4"),  # values a scale; 0: the whole vector
        ("rotation", "<u4"),  # Hadamard size; 0: none
        ("global_scale", "<f4"),
    ]
)
"""A codec as the kernels read it."""

MAX_ROTATION = 128
DIM_MULTIPLE = 16
"""Lossy codecs take vectors of a multiple of this many values, ..."""
MAX_DIM = 8192
"""... and of at most this many."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Base of all codecs. `block` is the number of values a scale stands for, 0 for the whole vector.

    A vector shorter than the block is one block; a last block may be short. `global_scale` is the float32 by
    which decoded values are multiplied; it is not stored with the vectors.
    """

    element: Element
    scale: Scale = Scale.NONE
    rule: Rule = Rule.NEAREST
    block: int = 0
    rotate: bool = False
    global_scale: float = 1.0

    def __post_init__(self) -> None:
        g = float(np.float32(self.global_scale))
        if not 2.0**-100 <= g <= 2.0**100:
            raise InvalidRequest(f"a global scale must lie in 2**-100 .. 2**100, got {self.global_scale!r}")
        object.__setattr__(self, "global_scale", g)

    # --- sizes ---

    def fits(self, dim: int) -> bool:
        """Whether vectors of `dim` values can be stored."""
        return dim % DIM_MULTIPLE == 0 and dim <= MAX_DIM

    def blocks(self, dim: int) -> int:
        """Scales a vector of `dim` values has."""
        return 0 if self.scale is Scale.NONE else -(-dim // (self.block or dim))

    def code_bytes(self, dim: int) -> int:
        """Bytes of a vector's codes."""
        return dim * ELEMENT_BITS[self.element] // 8

    def scale_bytes(self, dim: int) -> int:
        """Bytes of a vector's scales."""
        return self.blocks(dim) * SCALE_BYTES[self.scale]

    def vector_bytes(self, dim: int) -> int:
        """Bytes of a vector: codes and scales."""
        return self.code_bytes(dim) + self.scale_bytes(dim)

    def rotation(self, dim: int) -> int:
        """The Hadamard size for vectors of `dim` values: the largest power of two in it, at most 128."""
        return min(MAX_ROTATION, dim & -dim) if self.rotate else 0

    # --- identity ---

    @property
    def stored(self) -> Codec:
        """What a decoder must know: equal for codecs whose bytes mean the same, whatever the rule."""
        return Codec(
            element=self.element,
            scale=self.scale,
            block=self.block,
            rotate=self.rotate,
            global_scale=self.global_scale,
        )

    def same_bytes(self, other: Codec, dim: int) -> bool:
        """Whether vectors of `dim` values may be copied from one codec to the other."""
        ours, theirs = self.stored, other.stored
        return replace(ours, block=ours.block or dim) == replace(theirs, block=theirs.block or dim)

    def table(self, dim: int) -> np.void:
        """The kernels' description, dtype CODEC."""
        entry = np.zeros((), CODEC)
        entry["element"], entry["scale"], entry["rule"] = self.element, self.scale, self.rule
        entry["block"], entry["rotation"] = self.block or dim, self.rotation(dim)
        entry["global_scale"] = self.global_scale
        return entry[()]

    def finite(self, x: np.ndarray, *, check: bool) -> np.ndarray:
        """What is encoded of `x`: see `elements.finite`, and with a rotation `elements.ROTATED_MAX`."""
        largest = elements.ROTATED_MAX if self.rotate else elements.FLOAT32_MAX
        return elements.finite(x, check=check, largest=largest)

    def rotated_bound(self, x: np.ndarray) -> np.ndarray:
        """`error_bound` of a codec with a rotation: what it is without, over each run that is rotated."""
        kept = self.finite(x, check=True)
        size = self.rotation(x.shape[-1])
        bounds = replace(self, rotate=False).error_bound(elements.hadamard(kept, size))
        runs = (*x.shape[:-1], -1, size)
        # Two rotations in float32 add noise of their own.
        noise = np.linalg.norm(kept.astype(np.float64).reshape(runs), axis=-1) * size * 2.0**-22
        bound = np.linalg.norm(bounds.reshape(runs), axis=-1) + noise
        return np.repeat(bound, size, axis=-1).reshape(x.shape) + np.abs(x.astype(np.float64) - kept)

    # --- the rule, stated by each format ---

    def pack(self, x: np.ndarray, *, check: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """float32 ``[..., dim]`` to codes uint8 ``[..., code_bytes]`` and scales uint8 ``[...,
        scale_bytes]``.

        With `check`, NaN and infinity raise NonFiniteValue; without, they saturate (`elements.finite`).
        """
        raise NotImplementedError

    def unpack(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The float32 values ``[..., dim]`` of codes and scales. A NaN on the wire stays NaN."""
        raise NotImplementedError

    def error_bound(self, x: np.ndarray) -> np.ndarray:
        """The largest ``|unpack(pack(x)) - x|`` of each finite value, before the destination rounds.

        Includes what saturates. What is unpacked is finite.
        """
        raise NotImplementedError
