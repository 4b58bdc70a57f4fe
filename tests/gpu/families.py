"""Plans of every family with memory under them: layouts, block lists, and what the CPU kernels make of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvxfer.kernels import PreparedPlan
from kvxfer.layout import CacheLayout
from kvxfer.plan import ROW, PlanPart, Segments, TransferPlan, join


@dataclass
class Case:
    """A plan, host copies of its regions before it is carried out, and the destination after it."""

    plan: TransferPlan
    src: list[np.ndarray]
    dst: list[np.ndarray]
    expected: list[np.ndarray]

    @classmethod
    def of(cls, plan: TransferPlan, src_bytes: list[int], dst_bytes: list[int], seed: int = 0) -> Case:
        rng = np.random.default_rng(seed)
        src = [np.frombuffer(rng.bytes(n), np.uint8).copy() for n in src_bytes]
        dst = [np.frombuffer(rng.bytes(n), np.uint8).copy() for n in dst_bytes]  # poison: no byte is known
        expected = [array.copy() for array in dst]
        prepared = PreparedPlan(plan)
        for chunk in plan.chunks(1 << 40):
            prepared.copy(chunk, host_addresses(src), host_addresses(expected))
        return cls(plan, src, dst, expected)

    def packed(self, limit: int) -> list[np.ndarray]:
        """What the CPU gathers, chunk by chunk, with 0xEE where no row lies."""
        prepared, found = PreparedPlan(self.plan), []
        for chunk in self.plan.chunks(limit):
            wire = np.full(chunk.wire_bytes, 0xEE, np.uint8)
            prepared.gather(chunk, host_addresses(self.src), wire.ctypes.data)
            found.append(wire)
        return found


def host_addresses(arrays: list[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], np.uint64)


def between(src: CacheLayout, dst: CacheLayout, tokens: int, seed: int = 0) -> Case:
    """A request of `tokens` tokens at random blocks."""
    rng = np.random.default_rng(seed)
    (joined,) = join([src], dst)
    lists = []
    for layout in (src, dst):
        (group,) = layout.groups
        lists.append(
            {group.name: rng.permutation(group.num_blocks)[: group.blocks_for(tokens)].astype(np.int32)}
        )
    plan = joined.plan(*lists, tokens=tokens)
    return Case.of(plan, [r.nbytes for r in src.regions], [r.nbytes for r in dst.regions], seed)


def paged(**changes: object) -> CacheLayout:
    options = {
        "layers": ["a", "b", "c"],
        "num_blocks": 40,
        "block_tokens": 16,
        "kv_heads": 4,
        "head_dim": 64,
        "dtype": "float16",
    }
    return CacheLayout.paged(**(options | changes))


def whole(sizes: list[int], *, blocks: int = 37) -> Case:
    """Whole rows of these sizes, each in a region of its own, at random blocks."""
    rng = np.random.default_rng(len(sizes))
    pool = 2 * blocks
    rows = np.zeros(len(sizes), ROW)
    rows["src_region"] = rows["dst_region"] = np.arange(len(sizes))
    rows["src_block_stride"] = rows["dst_block_stride"] = sizes
    rows["heads"] = rows["channels"] = 1
    rows["unit_bytes"] = sizes
    src, dst = (rng.permutation(pool)[:blocks].astype(np.int32) for _ in range(2))
    part = PlanPart(rows=rows, segments=Segments(src_block=src, dst_block=dst))
    plan = TransferPlan(parts=(part,), src_regions=len(sizes), dst_regions=len(sizes))
    return Case.of(plan, [n * pool for n in sizes], [n * pool for n in sizes])


WHOLE_SIZES = (
    [1],
    [6],
    [16],
    [512],
    [4096],
    [4112],
    [65536],
    [100_016],
    [4096, 512],
    [528, 16384, 6],
    [8192] * 101,
)

TOKEN_FAMILIES = {
    "blocks of 16 to 64": lambda: between(paged(), paged(block_tokens=64), 500),
    "blocks of 64 to 16": lambda: between(paged(block_tokens=64), paged(), 500),
    "blocks of 16 to 24": lambda: between(paged(), paged(block_tokens=24), 501),
    "NHD to HND": lambda: between(paged(), paged(order="HND"), 500),
    "HND to NHD, blocks of 16 to 32": lambda: between(paged(order="HND"), paged(block_tokens=32), 333),
    "heads of 3 x 2 bytes": lambda: between(
        paged(kv_heads=3, head_dim=3), paged(kv_heads=3, head_dim=3, order="HND"), 500
    ),
    "half of the heads": lambda: between(
        paged(kv_heads=4), paged(kv_heads=2, head_start=2, total_heads=4), 500
    ),
    "one token": lambda: between(paged(), paged(block_tokens=64, order="HND"), 1),
}
