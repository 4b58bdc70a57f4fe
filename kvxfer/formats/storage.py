"""How a cache record stores numbers: its planes read as quantities, each with the codec of `codec.py`.

A quantity is a plane of values with, where there is one, the plane of its scales: ``k`` and ``k_scale``,
``index_key`` and ``index_scale``. Scale planes whose dtype carries a suffix lie in another order than scale
by scale: ``.perm4x8`` (nvfp4_ds_mla: scale s at ``8 * (s % 4) + s // 4``) and ``.t4`` (TensorRT-LLM's values,
interleaved over tiles of four tokens); ``.x4`` only says that four bytes are read as one word. Planes that
are no numbers known here are bytes, and can be copied but not converted.

Imports layout and the formats.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvxfer.formats.codec import ELEMENT_BITS, SCALE_BYTES, Codec, Element, Rule, Scale
from kvxfer.formats.fp8 import Fp8
from kvxfer.formats.mx import Mx
from kvxfer.formats.nvfp4 import Nvfp4
from kvxfer.formats.raw import BFLOAT16, BYTES, FLOAT16, FLOAT32
from kvxfer.layout import Plane, Record


class ScaleOrder(enum.IntEnum):
    """How a vector's scales lie in a cache. The numbers are shared with csrc/packed_plan.h."""

    LINEAR = 0
    BY_FOUR = 1
    TOKENS_BY_FOUR = 2


_ORDERS = {
    "": ScaleOrder.LINEAR,
    "x4": ScaleOrder.LINEAR,
    "perm4x8": ScaleOrder.BY_FOUR,
    "t4": ScaleOrder.TOKENS_BY_FOUR,
}
_PLAIN = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}
_SCALES = {"float32": Scale.FLOAT32, "float8_e4m3fn": Scale.E4M3, "float8_e8m0fnu": Scale.E8M0}
_CODECS: dict[tuple[str, Scale], Codec] = {
    ("float8_e4m3fn", Scale.NONE): Fp8(),
    ("float8_e4m3fn", Scale.FLOAT32): Fp8(scale=Scale.FLOAT32),
    ("float8_e4m3fn", Scale.E8M0): Mx(element=Element.E4M3, rule=Rule.CEIL),
    ("float4_e2m1fn_x2", Scale.E4M3): Nvfp4(),
    ("float4_e2m1fn_x2", Scale.E8M0): Mx(element=Element.E2M1),
}
_BLOCKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Values of one name in a record: vectors ``[entry, head]`` of `dim` values, or of bytes."""

    plane: Plane
    codec: Codec
    dim: int
    scales: Plane | None = None
    scale_order: ScaleOrder = ScaleOrder.LINEAR

    @property
    def name(self) -> str:
        """The plane's name."""
        return self.plane.name

    @property
    def is_number(self) -> bool:
        """Whether the values can be converted."""
        return self.codec.element is not Element.BYTES

    @property
    def stored_as(self) -> str:
        """For messages: dtypes and block."""
        if self.scales is None:
            return self.plane.dtype
        return f"{self.plane.dtype} with a {self.scales.dtype} scale for {self.codec.block or self.dim}"


def quantities(record: Record, global_scales: Mapping[str, float] | None = None) -> list[Quantity]:
    """The quantities of a record, in plane order.

    `global_scales` maps plane names to the factor that multiplies to decode (a layer's fp8 scale); without
    one it is 1.
    """
    planes = {plane.name: plane for plane in record.planes}
    pairs = {name: partner for name in planes if (partner := _scale_plane(name, planes)) is not None}
    found: list[Quantity] = []
    taken: set[str] = set()
    for name, scales in pairs.items():
        read = _numbers(planes[name], scales)
        if read is not None:
            found.append(read)
            taken |= {name, scales.name}
    for name, plane in planes.items():
        if name not in taken:
            alone = None if name in pairs else _numbers(plane, None)
            found.append(alone or _bytes(plane))
    order = {name: index for index, name in enumerate(planes)}
    found.sort(key=lambda quantity: order[quantity.name])
    return list(_with_global_scales(found, global_scales or {}))


def _scale_plane(name: str, planes: Mapping[str, Plane]) -> Plane | None:
    return planes.get(f"{name}_scale") or planes.get(f"{name.removesuffix('_key')}_scale")


def _with_global_scales(found: list[Quantity], given: Mapping[str, float]) -> Iterator[Quantity]:
    for quantity in found:
        if quantity.name in given and quantity.codec.scale in (Scale.NONE, Scale.E4M3):
            codec = replace(quantity.codec, global_scale=given[quantity.name])
            yield replace(quantity, codec=codec)
        else:
            yield quantity


def _bytes(plane: Plane) -> Quantity:
    return Quantity(plane=plane, codec=BYTES, dim=plane.channels * plane.unit_bytes)


def _numbers(plane: Plane, scales: Plane | None) -> Quantity | None:
    """The quantity, or None where these planes are no numbers known here."""
    if plane.tiled:
        return None
    if scales is None:
        codec = _PLAIN.get(plane.dtype) or _CODECS.get((plane.dtype, Scale.NONE))
        return None if codec is None else _fitting(plane, codec)
    dtype, _, suffix = scales.dtype.partition(".")
    order, scale = _ORDERS.get(suffix), _SCALES.get(dtype)
    codec = None if scale is None else _CODECS.get((plane.dtype, scale))
    if codec is None or order is None or scales.heads != plane.heads or scales.channels != 1:
        return None
    tile = 4 if order is ScaleOrder.TOKENS_BY_FOUR else 1
    if scales.entries * tile != plane.entries or scales.unit_bytes % (tile * SCALE_BYTES[scale]):
        return None
    quantity = _fitting(plane, codec)
    count = scales.unit_bytes // (tile * SCALE_BYTES[scale])
    block = quantity and _block(quantity.dim, count)
    if not block or (isinstance(codec, Nvfp4) and block != codec.block):
        return None
    return replace(quantity, codec=replace(codec, block=block), scales=scales, scale_order=order)


def _fitting(plane: Plane, codec: Codec) -> Quantity | None:
    bits = plane.channels * plane.unit_bytes * 8
    dim = bits // ELEMENT_BITS[codec.element]
    return Quantity(plane=plane, codec=codec, dim=dim) if bits % plane.channels == 0 and codec.fits(dim) else None


def _block(dim: int, count: int) -> int | None:
    """Values a scale stands for, where a vector of `dim` has room for `count` scales, one perhaps spare."""
    if count == 1:
        return dim
    for block in _BLOCKS:
        if count - 1 <= -(-dim // block) <= count:
            return block
    return None
