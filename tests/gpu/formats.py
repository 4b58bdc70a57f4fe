"""Packed plans of every format between caches of every kind, with numbers under them that are hard to convert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvxfer import formats
from kvxfer.formats import reference
from kvxfer.formats.codec import Element
from kvxfer.kernels import PreparedPackedPlan
from kvxfer.layout import CacheLayout
from kvxfer.layout.records import cpu_attention_record, tiled_v_scale_record
from kvxfer.plan import Chunk
from tests.gpu.families import host_addresses
from tests.unit.test_formats_plan import attention, latent, layout_of

WIRES = (
    "raw",
    "fp8_e4m3",
    "fp8_e4m3:per_128",
    "fp8_e4m3:tensor",
    "fp8_e4m3:tensor,scale=0.25",
    "nvfp4",
    "nvfp4:scale=0.3",
    "nvfp4:scale=1e-06",
    "nvfp4:scale=4096.0",
    "nvfp4:four_over_six",
    "mxfp4",
    "mxfp4:ceil",
    "mxfp4:even",
    "mxfp4:hadamard",
    "mxfp8",
    "mxfp8:floor",
    "mxfp8:even",
    "int4",
    "int4:32,hadamard",
    "int4:asym,128",
    "mixed",
    "mixed:four_over_six,scale=2.0",
    "nvfp4:first=5,last=9",
    "mixed:first=1,last=40",
)


def _transposed() -> CacheLayout:
    record = cpu_attention_record(block_tokens=16, kv_heads=3, head_dim=64, dtype="float32")
    return layout_of(record, block_tokens=16)


def _tiled() -> CacheLayout:
    return layout_of(tiled_v_scale_record(block_tokens=16, kv_heads=3, head_dim=64), block_tokens=16)


COPIED = ("raw", "nvfp4:four_over_six", "mixed:first=1,last=40", "mla")
"""Of these, copies without a packed form between are worth a look: others give the same."""

PAIRS: dict[str, Callable[[], tuple[CacheLayout, CacheLayout]]] = {
    "bf16 to bf16, NHD to HND, blocks of 16 to 8": lambda: (
        attention(),
        attention(order="HND", block_tokens=8, together=True),
    ),
    "bf16, 8 heads of 128, blocks of 16 to 24": lambda: (
        attention(heads=8, head_dim=128),
        attention(heads=8, head_dim=128, block_tokens=24),
    ),
    "fp16 HND to fp16 NHD": lambda: (attention("float16", order="HND"), attention("float16", heads=3)),
    "bf16 to fp32, 2 heads of 80": lambda: (
        attention(heads=2, head_dim=80),
        attention("float32", heads=2, head_dim=80),
    ),
    "fp32 to fp16": lambda: (attention("float32"), attention("float16", block_tokens=32)),
    "fp16, 1 head of 256": lambda: (attention("float16", heads=1, head_dim=256),) * 2,
    "bf16, 5 heads of 96": lambda: (attention(heads=5, head_dim=96),) * 2,
    "bf16, 1 head of 16": lambda: (attention(heads=1, head_dim=16),) * 2,
    "bf16 to fp8": lambda: (attention(), attention("fp8", order="HND")),
    "fp8 to bf16": lambda: (attention("fp8"), attention(block_tokens=8)),
    "fp8 with scales to bf16": lambda: (attention("fp8_per_token_head"), attention()),
    "bf16 to fp8 with scales": lambda: (attention(), attention("fp8_per_token_head", block_tokens=32)),
    "fp8 with scales to fp8": lambda: (attention("fp8_per_token_head"), attention("fp8")),
    "bf16 to NVFP4 pages": lambda: (attention(heads=4, head_dim=128), attention("nvfp4", heads=4, head_dim=128)),
    "NVFP4 pages to bf16": lambda: (attention("nvfp4", order="HND"), attention()),
    "NVFP4 pages to NVFP4 pages": lambda: (attention("nvfp4"), attention("nvfp4", block_tokens=32, order="HND")),
    "NVFP4 pages to fp8 with scales": lambda: (attention("nvfp4"), attention("fp8_per_token_head")),
    "bf16 to values in tiles": lambda: (attention(), _tiled()),
    "values in tiles to bf16": lambda: (_tiled(), attention()),
    "bf16 to transposed keys": lambda: (attention(), _transposed()),
    "transposed keys to bf16": lambda: (_transposed(), attention()),
}


@dataclass
class PackedCase:
    """A packed plan, host copies of its regions, and what the CPU makes of them."""

    join: formats.PackedJoin
    plan: formats.PackedPlan
    src: list[np.ndarray]
    dst: list[np.ndarray]

    def packed(self, limit: int) -> Iterator[tuple[Chunk, np.ndarray]]:
        """Each chunk with its packed bytes by the CPU kernels."""
        prepared = PreparedPackedPlan(self.plan)
        for chunk in self.plan.chunks(limit):
            wire = np.zeros(chunk.wire_bytes, np.uint8)
            prepared.pack(chunk, host_addresses(self.src), wire.ctypes.data, check=False)
            yield chunk, wire

    def unpacked(self, limit: int) -> list[np.ndarray]:
        """The destination's regions after the CPU has packed and unpacked."""
        prepared = PreparedPackedPlan(self.plan)
        dst = [region.copy() for region in self.dst]
        for chunk, wire in self.packed(limit):
            prepared.unpack(chunk, wire.ctypes.data, host_addresses(dst))
        return dst

    def copied(self) -> list[np.ndarray]:
        """The destination's regions after each vector was converted from source to destination form."""
        regions = [region.copy() for region in self.dst]
        for row in self.join.rows:
            dim, source, target = row.src.dim, row.src.codec, row.dst.codec
            encoder = row.wire if row.wire.same_bytes(target, dim) else target
            plain = row.plain if row.plain.same_bytes(target, dim) else target
            for part in self.plan.parts:
                kinds = [entry.tobytes() for entry in part.rows]
                codec = next(
                    (c for t, c in zip(row.table, (encoder, plain), strict=True) if t.tobytes() in kinds), None
                )
                if codec is None:
                    continue
                s = part.segments
                for segment in zip(s.src_block, s.dst_block, s.src_token, s.dst_token, s.tokens, strict=True):
                    segment = tuple(map(int, segment))
                    codes, scales = reference.read_vectors(row, "src", row.src, segment, self.src)
                    if not source.same_bytes(target, dim):
                        codes, scales = codec.pack(source.unpack(codes, scales), check=False)
                    reference.write_vectors(row, "dst", row.dst, segment, regions, codes, scales)
        return regions


def hard_numbers(rng: np.random.Generator, vectors: int, dim: int, *, finite: bool) -> np.ndarray:
    """float32 ``[vectors, dim]``: zeros, one huge value, subnormals, ties of every format, and random numbers."""
    x = rng.standard_normal((vectors, dim)) * np.exp2(rng.integers(-9, 9, (vectors, 1)))
    kind = rng.integers(0, 12, vectors)
    x[kind == 0] = 0.0
    x[kind == 1] *= np.where(rng.integers(0, 40, (int((kind == 1).sum()), dim)) == 0, 2.0**70, 1.0)
    x[kind == 2] = np.float32(2.0**-140) * rng.integers(-99, 99, (int((kind == 2).sum()), dim))
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, 8, 0.0, 1.0])
    count = int((kind == 3).sum())
    x[kind == 3] = rng.choice(ties, (count, dim)) * rng.choice([-1, 1], (count, dim)) * 2.0 ** rng.integers(-3, 4)
    x[kind == 4] = -0.0
    x[kind == 5] *= 2.0**-20
    x[kind == 6] *= 2.0**100
    if not finite:
        rare = rng.integers(0, 300, (vectors, dim))
        x[rare == 0], x[rare == 1], x[rare == 2], x[rare == 3] = np.inf, -np.inf, np.nan, -np.nan
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def packed_case(
    src: CacheLayout, dst: CacheLayout, wire: str, *, tokens: int = 90, seed: int = 0, finite: bool = True, **options
) -> PackedCase:
    """A request of `tokens` tokens at random blocks. Every byte of the source stands for some number."""
    rng = np.random.default_rng(seed)
    (join,) = formats.join_packed([src], dst, wire, **options)
    ids = [rng.permutation(side.groups[0].num_blocks)[: side.groups[0].blocks_for(tokens)] for side in (src, dst)]
    plan = join.plan(*({"full": blocks.astype(np.int32)} for blocks in ids), tokens=tokens)
    # Codes and scales of any bytes first: wild ones, infinite and NaN among them where these are wanted.
    regions = [[rng.integers(0, 256, r.nbytes, np.uint8) for r in side.regions] for side in (src, dst)]
    for row in join.rows:
        codec = row.src.codec
        if finite or codec.element in (Element.FLOAT16, Element.BFLOAT16, Element.FLOAT32):
            for block in ids[0].tolist():
                segment = (block, block, 0, 0, row.src_group.block_tokens)
                vectors = reference.vectors_of(row, segment)
                if row.src.is_number:
                    numbers = hard_numbers(rng, vectors, row.src.dim, finite=finite)
                    if finite and codec.element is Element.FLOAT16:
                        numbers = np.clip(numbers, -65504, 65504)
                    with np.errstate(over="ignore"):
                        codes, scales = codec.pack(numbers, check=False)
                    reference.write_vectors(row, "src", row.src, segment, regions[0], codes, scales)
    return PackedCase(join, plan, *regions)


LATENTS = (
    ("mla.bf16", "mla.fp8"),
    ("mla.bf16", "v32.fp8_ds_mla.656"),
    ("mla.bf16", "v32.nvfp4_ds_mla.352"),
    ("mla.fp16", "v32.nvfp4_ds_mla.352"),
    ("indexer.fp8.132", "indexer.fp8_mx.132"),
    ("indexer.fp8.132", "indexer.mxfp4.68"),
    ("v4.bf16.1024", "v41.fp8_ds_mla.528.segregated"),
    ("v4.bf16.1024", "v41.nvfp4_ds_mla.288.interleaved"),
    ("v41.nvfp4_ds_mla.288.segregated", "v41.nvfp4_ds_mla.288.interleaved"),
    ("mla.bf16", "mla.bf16"),
    ("v4.fp8_ds_mla.584", "v4.fp8_ds_mla.584"),
)

for _a, _b in LATENTS:
    PAIRS[f"{_a} to {_b}"] = lambda a=_a, b=_b: (latent(a), latent(b, block_tokens=32))
    if _a != _b:
        PAIRS[f"{_b} to {_a}"] = lambda a=_b, b=_a: (latent(a), latent(b, block_tokens=8))
PAIRS["compressed entries"] = lambda: (
    latent("v4.bf16.1024", ratio=2),
    latent("v41.nvfp4_ds_mla.288.interleaved", block_tokens=32, ratio=2),
)


def wires_of(src: CacheLayout) -> tuple[str, ...]:
    """Formats that make a difference for a cache."""
    if any(plane.name == "latent" for record in src.records for plane in record.planes):
        return ("raw", "mla", "mla:rope=fp8", "nvfp4", "fp8_e4m3", "mxfp4:hadamard", "int4:asym")
    if any(plane.name == "k" for record in src.records for plane in record.planes):
        return WIRES
    return ("raw", "nvfp4")


CASES = [(name, wire) for name, pair in PAIRS.items() for wire in wires_of(pair()[0])]

FAST = ("nvfp4", "nvfp4:scale=0.3", "mxfp4", "mxfp4:ceil", "mxfp4:even", "fp8_e4m3", "mxfp8", "fp8_e4m3:tensor")


def every_half(wire: str, dtype: str) -> PackedCase:
    """All 65,536 halves: in random company in one layer, alone among zeros in the other."""
    layout = attention(dtype, heads=8, head_dim=128)
    case = packed_case(layout, layout, wire, tokens=layout.groups[0].num_blocks * 16)
    halves = np.random.default_rng(1).permutation(1 << 16).astype(np.uint16)
    together, alone = (region.view(np.uint16) for region in case.src)
    together[: 1 << 16] = halves
    alone[:] = 0
    for place in range(8):  # of a vector: blocks of 16 each have one of their own
        column = alone[16 * place + place :: 128]
        column[:] = np.roll(halves, place * len(column))[: len(column)]
    return case
