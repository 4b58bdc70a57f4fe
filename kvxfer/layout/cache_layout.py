"""What a paged KV cache looks like: regions of memory, groups of layers, slices of blocks, records of planes.

A block id indexes a group's block table. Inside a block every layer of the group has a *slice*; the slice's
bytes follow a *record*, and a record is a set of *planes*: one strided array ``[entry, head, channel]`` per
quantity (keys, values, scales, a latent). That one description covers NHD and HND, keys and values apart or
together, values and scales interleaved or segregated, compressed entries, and state, so that two unlike
caches are joined plane by plane (``kvxfer.plan``) and never by special cases.

Imports NumPy, msgspec, checks and errors; knows no transport and touches no device. Layouts travel in the
handshake, so whatever a user gives or a peer sends is validated here, in the constructors: types by `Typed`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvxfer.errors import InvalidLayout
from kvxfer.layout.coverage import MAX_BLOCKS, check_group, check_record
from kvxfer.layout.typed import Typed, integer

if TYPE_CHECKING:
    from kvxfer.layout.tensors import TensorGroup

MAX_RECORD_BYTES = 64 << 20


class GroupKind(enum.Enum):
    """Which blocks of a prompt a group keeps."""

    FULL = "full"  # every block of the prompt
    SLIDING = "sliding"  # the blocks under the last `window` tokens
    RING = "ring"  # one block a request; the row of a token is its position modulo the capacity
    STATE = "state"  # one block a request, without tokens


class Plane(Typed, frozen=True, kw_only=True, omit_defaults=True):
    """One quantity of a record: a strided array ``[entries, heads, channels]`` of `unit_bytes` each.

    All offsets and strides are in bytes. ``(entry 0, head 0, channel 0)`` lies at `offset` from the start of
    the slice. One entry stands for `tokens_per_entry` tokens (more than one in compressed caches).
    `head_start` and `total_heads` say which heads of the whole model these are, so that tensor-parallel ranks
    can be joined; a plane that every rank holds alike (an MLA latent) has ``head_start=0,
    heads=total_heads``.
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
    tiled: bool = False  # an unfinished last entry holds data: a tile of tokens, not a compressed entry

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.entries, self.unit_bytes, self.heads, self.channels, self.tokens_per_entry)
        strides = (self.offset, self.entry_stride, self.head_stride, self.channel_stride, self.head_start)
        if min(sizes) < 1 or min(strides) < 0 or max(*sizes, *strides) > MAX_RECORD_BYTES:
            raise InvalidLayout(
                f"plane {self.name!r}: counts must be 1 or more, offsets and strides 0 or more, and none "
                f"above {MAX_RECORD_BYTES}; got {self}"
            )
        if self.head_start + self.heads > self.all_heads:
            raise InvalidLayout(
                f"plane {self.name!r}: heads {self.head_start}..{self.head_start + self.heads} do not lie "
                f"in the model's {self.all_heads} heads"
            )

    @property
    def all_heads(self) -> int:
        """Heads of the whole model, over all tensor-parallel ranks."""
        return self.total_heads or self.heads

    @property
    def entry_bytes(self) -> int:
        """Bytes of data in one entry, over the heads that this plane holds."""
        return self.heads * self.channels * self.unit_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of data, without the gaps between them."""
        return self.entries * self.entry_bytes

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


class Padding(Typed, frozen=True, kw_only=True):
    """Bytes that hold nothing, named so that they are left out on purpose and not by mistake."""

    name: str
    offset: int
    nbytes: int


class Record(Typed, frozen=True, kw_only=True, omit_defaults=True):
    """How one layer's entries lie in the bytes of one block.

    `tag` names the byte layout; two records with one tag but other planes are a contradiction. `nbytes`
    counts the slice in one block, padding included. An *opaque* record (no planes) can be copied whole to an
    equal one and to nothing else.
    """

    tag: str
    nbytes: int
    planes: tuple[Plane, ...] = ()
    padding: tuple[Padding, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.nbytes <= MAX_RECORD_BYTES:
            raise InvalidLayout(f"record {self.tag!r}: nbytes must be 1 to {MAX_RECORD_BYTES}, got {self.nbytes}")
        names = [plane.name for plane in self.planes]
        if len(set(names)) != len(names):
            raise InvalidLayout(f"record {self.tag!r}: plane names must be unique, got {names}")
        if self.planes:
            check_record(self)


class Region(Typed, frozen=True, kw_only=True, omit_defaults=True):
    """One registered piece of memory. `address` is 0 until bound, and is never sent to a peer."""

    name: str
    nbytes: int
    device: str = "cpu"
    address: int = 0


class Slice(Typed, frozen=True, kw_only=True):
    """One layer's bytes in every block: block b starts at ``region + offset + b * block_stride``."""

    layer: str
    region: str
    offset: int
    block_stride: int
    record: str


class Group(Typed, frozen=True, kw_only=True, omit_defaults=True):
    """Layers that share one block table.

    `block_tokens` tokens lie in a block (for a ring its capacity; 0 for state). `window` is the sliding
    window in tokens. `padding` names bytes of a block (offsets from the group's first slice) that no slice
    claims. `compression_ratio` marks the state of a compressor: it carries something only while an entry of
    that many tokens is unfinished, so a prompt whose length it divides needs none of it (0: always needed).
    """

    name: str
    block_tokens: int
    num_blocks: int
    slices: tuple[Slice, ...]
    kind: GroupKind = GroupKind.FULL
    window: int = 0
    padding: tuple[Padding, ...] = ()
    compression_ratio: int = 0

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

    def needed(self, tokens: int) -> bool:
        """Whether a decoder that goes on after `tokens` tokens needs anything of this group."""
        return tokens > 0 and not (self.compression_ratio and tokens % self.compression_ratio == 0)

    def blocks_to_move(self, tokens: int) -> int:
        """How many blocks, counted from the last, a prompt of `tokens` tokens has to bring along.

        All of a full group, ``ceil(window / block_tokens) + 1`` of a sliding one (a window need not start
        where a block does), one of a ring or state, none where `needed` is false.
        """
        if not self.needed(tokens):
            return 0
        return min(self.blocks_for(tokens), self.tail_blocks)

    @property
    def tail_blocks(self) -> int:
        """The most blocks that any prompt has to bring along; MAX_BLOCKS where that grows with the prompt."""
        return -(-self.window // self.block_tokens) + 1 if self.kind is GroupKind.SLIDING else MAX_BLOCKS


class CacheLayout(Typed, frozen=True, kw_only=True, omit_defaults=True):
    """All that a peer must know of a paged cache.

    `fingerprint` holds the factors that must agree for KV to mean the same (model, revision, kv dtype,
    speculator, ...); the library compares them and interprets none.
    """

    regions: tuple[Region, ...]
    records: tuple[Record, ...]
    groups: tuple[Group, ...]
    fingerprint: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
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
            check_group(group, regions, records)

    def group(self, name: str) -> Group:
        """The group called `name`; KeyError when there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    @property
    def layers(self) -> tuple[str, ...]:
        """Layer names of all groups, in slice order."""
        return tuple(dict.fromkeys(layer for group in self.groups for layer in group.layers))

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
        """The plainest cache: one region ``[num_blocks, 2, block_tokens, kv_heads, head_dim]`` a layer.

        With ``order="HND"`` the middle axes are ``[kv_heads, block_tokens]``. `dtype` is a NumPy-style or
        torch-style name (``float16``, ``bfloat16``, ...). Regions are called like their layers.

        Raises InvalidLayout.
        """
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise InvalidLayout(f"layers must be a sequence of names, got {layers!r:.80}")
        layers, num_blocks = tuple(layers), integer("num_blocks", num_blocks, least=1)
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
            fingerprint={} if fingerprint is None else fingerprint,
        )

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Any],
        *,
        groups: TensorGroup | Mapping[str, TensorGroup] | None = None,
        fingerprint: Mapping[str, str] | None = None,
    ) -> CacheLayout:
        """The bound layout of what an engine registers, a mapping from layer name to array.

        Without `groups` every array is ``[num_blocks, 2, block_tokens, kv_heads, head_dim]`` of one group
        ``full``; ``kvxfer.layout.tensors.TensorGroup`` says anything else, of one group or by group name.
        """
        from kvxfer.layout.tensors import layout_from_tensors

        return layout_from_tensors(tensors, groups=groups, fingerprint=fingerprint)


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
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise InvalidLayout(f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    if order not in ("NHD", "HND"):
        raise InvalidLayout(f"order must be 'NHD' or 'HND', got {order!r}")
    block_tokens, kv_heads = integer("block_tokens", block_tokens, least=1), integer("kv_heads", kv_heads, least=1)
    row = integer("head_dim", head_dim, least=1) * DTYPE_BYTES[dtype]
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


def fingerprint_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The factors that differ, one line each; a factor that one side does not state differs."""
    keys: Iterable[str] = sorted(ours.keys() | theirs.keys())
    return [
        f"{key}: ours {ours.get(key, 'not stated')!r}, theirs {theirs.get(key, 'not stated')!r}"
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]
