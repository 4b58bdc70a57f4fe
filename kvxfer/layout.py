"""What a paged KV cache looks like: regions of memory, groups of layers, slices of blocks, records of planes.

A block id indexes a group's block table. Inside a block every layer of the group has a *slice*; the slice's
bytes follow a *record*, and a record is a set of *planes*: one strided array ``[entry, head, channel]`` per
quantity (keys, values, scales, a latent). That one description covers NHD and HND, keys and values apart or
together, values and scales interleaved or segregated, compressed entries, and state, so that two unlike caches
are joined plane by plane (``plan.py``) and never by special cases.

Imports NumPy, msgspec and errors; knows no transport and touches no device. Layouts travel in the handshake, so
whatever is decoded from a peer is validated here, in the constructors.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from kvxfer.errors import InvalidLayout

MAX_RECORD_BYTES = 64 << 20
_MAX_ATOMS = 4 << 20  # bounds the memory and time of a coverage check
MAX_BLOCKS = 2**31 - 1
_MAX_ADDRESS = 2**62


class GroupKind(enum.Enum):
    """Which blocks of a prompt a group keeps."""

    FULL = "full"  # every block of the prompt
    SLIDING = "sliding"  # the blocks under the last `window` tokens
    RING = "ring"  # one block a request; the row of a token is its position modulo the capacity
    STATE = "state"  # one block a request, without tokens


class Plane(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One quantity of a record: a strided array ``[entries, heads, channels]`` of `unit_bytes` each.

    All offsets and strides are in bytes. ``(entry 0, head 0, channel 0)`` lies at `offset` from the start of the
    slice. One entry stands for `tokens_per_entry` tokens (more than one in compressed caches). `head_start` and
    `total_heads` say which heads of the whole model these are, so that tensor-parallel ranks can be joined;
    a plane that every rank holds alike (an MLA latent) has ``head_start=0, heads=total_heads``.
    """

    name: str
    dtype: str
    offset: int
    entries: int
    entry_stride: int
    unit_bytes: int
    heads: int = 1
    head_stride: int = 0
    channels: int = 1
    channel_stride: int = 0
    head_start: int = 0
    total_heads: int = 0  # 0: equal to `heads`
    tokens_per_entry: int = 1

    def __post_init__(self) -> None:
        sizes = (self.entries, self.unit_bytes, self.heads, self.channels, self.tokens_per_entry)
        strides = (self.offset, self.entry_stride, self.head_stride, self.channel_stride, self.head_start)
        if min(sizes) < 1 or min(strides) < 0 or max(*sizes, *strides) > MAX_RECORD_BYTES:
            raise InvalidLayout(
                f"plane {self.name!r}: counts must be 1 or more, offsets and strides 0 or more, and none above "
                f"{MAX_RECORD_BYTES}; got {self}"
            )
        if self.head_start + self.heads > self.all_heads:
            raise InvalidLayout(
                f"plane {self.name!r}: heads {self.head_start}..{self.head_start + self.heads} do not lie in the "
                f"model's {self.all_heads} heads"
            )

    @property
    def all_heads(self) -> int:
        """Heads of the whole model, over all tensor-parallel ranks."""
        return self.total_heads or self.heads

    @property
    def nbytes(self) -> int:
        """Bytes of data, without the gaps between them."""
        return self.entries * self.heads * self.channels * self.unit_bytes

    @property
    def end(self) -> int:
        """Offset of the byte after the last one."""
        return (
            self.offset
            + (self.entries - 1) * self.entry_stride
            + (self.heads - 1) * self.head_stride
            + (self.channels - 1) * self.channel_stride
            + self.unit_bytes
        )


class Padding(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that hold nothing, named so that they are left out on purpose and not by mistake."""

    name: str
    offset: int
    nbytes: int


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one layer's entries lie in the bytes of one block.

    `tag` names the byte layout; two records with one tag but other planes are a contradiction. `nbytes` counts the
    slice in one block, padding included. An *opaque* record (no planes) can be copied whole to an equal one
    and to nothing else.
    """

    tag: str
    nbytes: int
    planes: tuple[Plane, ...] = ()
    padding: tuple[Padding, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.nbytes <= MAX_RECORD_BYTES:
            raise InvalidLayout(f"record {self.tag!r}: nbytes must be 1 to {MAX_RECORD_BYTES}, got {self.nbytes}")
        names = [plane.name for plane in self.planes]
        if len(set(names)) != len(names):
            raise InvalidLayout(f"record {self.tag!r}: plane names must be unique, got {names}")
        if self.planes:
            self._check_coverage()

    def _check_coverage(self) -> None:
        for plane in self.planes:
            if plane.end > self.nbytes:
                raise InvalidLayout(
                    f"record {self.tag!r}: plane {plane.name!r} ends at byte {plane.end} of a slice of {self.nbytes}"
                )
        for padding in self.padding:
            if padding.offset < 0 or padding.nbytes < 0 or padding.offset + padding.nbytes > self.nbytes:
                raise InvalidLayout(f"record {self.tag!r}: padding {padding} does not lie in {self.nbytes} bytes")
        atom = self._atom_bytes()
        if sum(plane.nbytes for plane in self.planes) > self.nbytes or self.nbytes // atom > _MAX_ATOMS:
            raise InvalidLayout(f"record {self.tag!r}: planes overlap, or are too finely interleaved to check")
        claims = np.zeros(self.nbytes // atom, np.uint8)
        for plane in self.planes:
            np.add.at(claims, _plane_atoms(plane, atom), 1)
        for padding in self.padding:
            claims[padding.offset // atom : (padding.offset + padding.nbytes) // atom] += 1
        if claims.max() > 1:
            raise InvalidLayout(
                f"record {self.tag!r}: bytes {_ranges(claims > 1, atom)} of the slice are claimed more than once; "
                "planes and padding must not overlap"
            )
        if claims.min() == 0:
            raise InvalidLayout(
                f"record {self.tag!r}: nobody claims bytes {_ranges(claims == 0, atom)} of the slice; add a plane, "
                "or name them as padding"
            )

    def _atom_bytes(self) -> int:
        """The largest unit that divides every offset, stride and size, so that claims need not be counted by byte."""
        sizes = [self.nbytes]
        for plane in self.planes:
            sizes += [plane.offset, plane.unit_bytes]
            sizes += [plane.entry_stride] if plane.entries > 1 else []
            sizes += [plane.head_stride] if plane.heads > 1 else []
            sizes += [plane.channel_stride] if plane.channels > 1 else []
        for padding in self.padding:
            sizes += [padding.offset, padding.nbytes]
        return math.gcd(*sizes)


class Region(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One registered piece of memory. `address` is 0 until bound, and is never sent to a peer."""

    name: str
    nbytes: int
    device: str = "cpu"
    address: int = 0


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's bytes in every block: block b starts at ``region + offset + b * block_stride``."""

    layer: str
    region: str
    offset: int
    block_stride: int
    record: str


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layers that share one block table.

    `block_tokens` tokens lie in a block (for a ring its capacity; 0 for state). `window` is the sliding window in
    tokens. `padding` names bytes of a block (offsets from the group's first slice) that no slice claims.
    """

    name: str
    block_tokens: int
    num_blocks: int
    slices: tuple[Slice, ...]
    kind: GroupKind = GroupKind.FULL
    window: int = 0
    padding: tuple[Padding, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """Layer names in slice order; a layer with two slices stands once."""
        return tuple(dict.fromkeys(piece.layer for piece in self.slices))

    def blocks_for(self, tokens: int) -> int:
        """How many blocks the tables of a prompt of `tokens` tokens have."""
        if self.kind in (GroupKind.RING, GroupKind.STATE):
            return 1
        return -(-tokens // self.block_tokens)

    def first_needed_token(self, tokens: int) -> int:
        """The first token whose entry a decoder needs for the token after `tokens`."""
        return max(0, tokens - self.window) if self.kind is GroupKind.SLIDING else 0


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a peer must know of a paged cache.

    `fingerprint` holds the factors that must agree for KV to mean the same (model, revision, kv dtype,
    speculator, ...); the library compares them and interprets none.
    """

    regions: tuple[Region, ...]
    records: tuple[Record, ...]
    groups: tuple[Group, ...]
    fingerprint: dict[str, str] = {}

    def __post_init__(self) -> None:
        for noun, items in (
            ("region", [r.name for r in self.regions]),
            ("record", [r.tag for r in self.records]),
            ("group", [g.name for g in self.groups]),
        ):
            if not items:
                raise InvalidLayout(f"a layout needs at least one {noun}")
            if len(set(items)) != len(items):
                raise InvalidLayout(f"{noun} names must be unique, got {items}")
        regions = {region.name: region for region in self.regions}
        records = {record.tag: record for record in self.records}
        for group in self.groups:
            _check_group(group, regions, records)

    def group(self, name: str) -> Group:
        """The group called `name`; KeyError when there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    def record(self, tag: str) -> Record:
        """The record tagged `tag`; KeyError when there is none."""
        for record in self.records:
            if record.tag == tag:
                return record
        raise KeyError(tag)

    def block_bytes(self, group_name: str) -> int:
        """Bytes of all slices of one block of a group, padding between slices not counted."""
        sizes = {record.tag: record.nbytes for record in self.records}
        return sum(sizes[piece.record] for piece in self.group(group_name).slices)

    def bind(self, addresses: Mapping[str, int]) -> CacheLayout:
        """The same layout with each region's address; KeyError when one is missing."""
        regions = tuple(msgspec.structs.replace(r, address=addresses[r.name]) for r in self.regions)
        return msgspec.structs.replace(self, regions=regions)

    def unbound(self) -> CacheLayout:
        """The same layout without addresses: what a peer is told."""
        return self.bind({region.name: 0 for region in self.regions})

    @classmethod
    def paged(
        cls,
        *,
        layers: Sequence[str],
        num_blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        order: str = "NHD",
        group: str = "full",
        head_start: int = 0,
        total_heads: int = 0,
        fingerprint: Mapping[str, str] | None = None,
    ) -> CacheLayout:
        """The plainest cache: one region a layer, shaped ``[num_blocks, 2, block_tokens, kv_heads, head_dim]``.

        With ``order="HND"`` the middle axes are ``[kv_heads, block_tokens]``. `dtype` is a NumPy-style or torch-style
        name (``float16``, ``bfloat16``, ...). Regions are called like their layers.
        """
        record = attention_record(
            block_tokens=block_tokens,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            order=order,
            head_start=head_start,
            total_heads=total_heads,
        )
        slices = tuple(
            Slice(layer=layer, region=layer, offset=0, block_stride=record.nbytes, record=record.tag)
            for layer in layers
        )
        return cls(
            regions=tuple(Region(name=layer, nbytes=num_blocks * record.nbytes) for layer in layers),
            records=(record,),
            groups=(Group(name=group, block_tokens=block_tokens, num_blocks=num_blocks, slices=slices),),
            fingerprint=dict(fingerprint or {}),
        )


DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "float4_e2m1fn_x2": 1,  # two values a byte, the even one in the low nibble
}


def attention_record(
    *,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    order: str = "NHD",
    head_start: int = 0,
    total_heads: int = 0,
) -> Record:
    """Keys of a block, then its values, each ``[token, head, dim]`` (NHD) or ``[head, token, dim]`` (HND)."""
    if dtype not in DTYPE_BYTES:
        raise InvalidLayout(f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    if order not in ("NHD", "HND"):
        raise InvalidLayout(f"order must be 'NHD' or 'HND', got {order!r}")
    row = head_dim * DTYPE_BYTES[dtype]
    entry_stride, head_stride = (kv_heads * row, row) if order == "NHD" else (row, block_tokens * row)
    half = block_tokens * kv_heads * row
    planes = tuple(
        Plane(
            name=name,
            dtype=dtype,
            offset=offset,
            entries=block_tokens,
            entry_stride=entry_stride,
            heads=kv_heads,
            head_stride=head_stride,
            unit_bytes=row,
            head_start=head_start,
            total_heads=total_heads,
        )
        for name, offset in (("k", 0), ("v", half))
    )
    tag = f"kv.{dtype}.{order.lower()}.{block_tokens}x{kv_heads}x{head_dim}"
    return Record(tag=tag, nbytes=2 * half, planes=planes)


def _plane_atoms(plane: Plane, atom: int) -> np.ndarray:
    """Indices of every `atom` bytes of a plane, as one flat int64 array."""
    entry, head, channel, unit = np.ogrid[
        : plane.entries, : plane.heads, : plane.channels, : plane.unit_bytes // atom
    ]
    offsets = plane.offset + entry * plane.entry_stride + head * plane.head_stride + channel * plane.channel_stride
    return (offsets // atom + unit).ravel()


def _ranges(mask: np.ndarray, scale: int, limit: int = 4) -> str:
    """The runs of a boolean mask whose elements stand for `scale` bytes, as '0..16, 48..64'."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0])))) * scale
    runs = [f"{a}..{b}" for a, b in edges.reshape(-1, 2)[:limit].tolist()]
    more = len(edges) // 2 - len(runs)
    return ", ".join(runs) + (f" and {more} more" if more else "")


def _check_group(group: Group, regions: Mapping[str, Region], records: Mapping[str, Record]) -> None:
    where = f"group {group.name!r}"
    if not 1 <= group.num_blocks <= MAX_BLOCKS:
        raise InvalidLayout(f"{where}: num_blocks must be 1 to {MAX_BLOCKS}, got {group.num_blocks}")
    if not group.slices:
        raise InvalidLayout(f"{where} has no slices")
    if group.kind is GroupKind.STATE:
        if group.block_tokens != 0:
            raise InvalidLayout(f"{where}: state has no tokens; block_tokens must be 0, got {group.block_tokens}")
    elif group.block_tokens < 1:
        raise InvalidLayout(f"{where}: block_tokens must be 1 or more, got {group.block_tokens}")
    if (group.kind is GroupKind.SLIDING) != (group.window > 0):
        raise InvalidLayout(f"{where}: a window belongs to a sliding group and to no other, got {group.window}")
    for piece in group.slices:
        if piece.region not in regions:
            raise InvalidLayout(f"{where}: layer {piece.layer!r} lies in region {piece.region!r}, which is not there")
        if piece.record not in records:
            raise InvalidLayout(f"{where}: layer {piece.layer!r} has record {piece.record!r}, which is not there")
        if not (0 <= piece.offset < _MAX_ADDRESS and 0 < piece.block_stride < _MAX_ADDRESS):
            raise InvalidLayout(f"{where}: layer {piece.layer!r}: offset and block_stride are out of range")
        record = records[piece.record]
        if record.nbytes > piece.block_stride:
            raise InvalidLayout(
                f"{where}: layer {piece.layer!r}: a slice of {record.nbytes} bytes does not fit a block stride of "
                f"{piece.block_stride}"
            )
        end = piece.offset + (group.num_blocks - 1) * piece.block_stride + record.nbytes
        if end > regions[piece.region].nbytes:
            raise InvalidLayout(
                f"{where}: layer {piece.layer!r} ends at byte {end} of region {piece.region!r}, which has "
                f"{regions[piece.region].nbytes}"
            )
        for plane in record.planes:
            expected = math.ceil(group.block_tokens / plane.tokens_per_entry) if group.block_tokens else 1
            if plane.entries != expected or (group.block_tokens % plane.tokens_per_entry):
                raise InvalidLayout(
                    f"{where}: layer {piece.layer!r}: plane {plane.name!r} has {plane.entries} entries of "
                    f"{plane.tokens_per_entry} tokens in a block of {group.block_tokens} tokens"
                )
    _check_block_coverage(group, records)


def _check_block_coverage(group: Group, records: Mapping[str, Record]) -> None:
    """No two slices share a byte of a block, and every byte between them is claimed or named."""
    for region, stride, slab in _slabs(group):
        base = slab[0].offset
        spans = [(piece.offset - base, records[piece.record].nbytes, piece.layer) for piece in slab]
        if region == group.slices[0].region and base == group.slices[0].offset:
            spans += [(padding.offset, padding.nbytes, padding.name) for padding in group.padding]
        position = 0
        for offset, nbytes, name in sorted(spans):
            if offset < position:
                raise InvalidLayout(
                    f"group {group.name!r}: bytes {offset}..{min(position, offset + nbytes)} of a block in region "
                    f"{region!r} are claimed twice, the second time by {name!r}"
                )
            if offset > position:
                raise InvalidLayout(_unclaimed(group, region, position, offset))
            position = offset + nbytes
        if position > stride:
            raise InvalidLayout(
                f"group {group.name!r}: the slices of a block in region {region!r} end at byte {position} of a block "
                f"stride of {stride}"
            )
        if position < stride:
            raise InvalidLayout(_unclaimed(group, region, position, stride))


def _unclaimed(group: Group, region: str, first: int, last: int) -> str:
    return (
        f"group {group.name!r}: nobody claims bytes {first}..{last} of a block in region {region!r}; add a slice, or "
        "name them in the group's padding"
    )


def _slabs(group: Group) -> Iterator[tuple[str, int, list[Slice]]]:
    """Slices whose blocks interleave: same region and stride, and offsets within one stride of the first."""
    by_region: dict[str, list[Slice]] = {}
    for piece in group.slices:
        by_region.setdefault(piece.region, []).append(piece)
    for region, slices in by_region.items():
        slab: list[Slice] = []
        for piece in sorted(slices, key=lambda s: s.offset):
            if slab and piece.offset < slab[0].offset + slab[0].block_stride:
                if piece.block_stride != slab[0].block_stride:
                    raise InvalidLayout(
                        f"group {group.name!r}: layers {slab[0].layer!r} and {piece.layer!r} interleave in region "
                        f"{region!r} with unequal block strides"
                    )
                slab.append(piece)
                continue
            if slab:
                yield region, slab[0].block_stride, slab
                end = slab[0].offset + group.num_blocks * slab[0].block_stride
                if piece.offset < end:
                    raise InvalidLayout(
                        f"group {group.name!r}: layer {piece.layer!r} starts at byte {piece.offset} of region "
                        f"{region!r}, inside the blocks of layer {slab[0].layer!r}, which end at {end}"
                    )
            slab = [piece]
        yield region, slab[0].block_stride, slab


def fingerprint_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The factors that differ, one line each; a factor that one side does not state differs."""
    keys: Iterable[str] = sorted(ours.keys() | theirs.keys())
    return [
        f"{key}: ours {ours.get(key, 'not stated')!r}, theirs {theirs.get(key, 'not stated')!r}"
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]
