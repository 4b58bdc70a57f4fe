"""The one door to csrc: carries out plans on the memory where they lie.

Imports plan and the native module. Every function takes addresses that the caller keeps alive, and releases the
GIL while bytes move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvxfer import _native
from kvxfer.plan import ROW, Chunk, PlanPart, TransferPlan

assert _native.ROW_BYTES == ROW.itemsize, "plan.py and csrc/plan.h disagree; rebuild the extension"

load_word = _native.load_word
store_word = _native.store_word


class PreparedPlan:
    """A plan whose tables have been handed to the kernels: a hot call passes integers only.

    Keeps the plan and its arrays alive.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self._parts = [_prepare(part) for part in plan.parts]

    def copy(self, chunk: Chunk, src_bases: np.ndarray, dst_bases: np.ndarray, *, threads: int = 1) -> None:
        """Blocks to blocks. `src_bases` and `dst_bases` are uint64 region addresses in layout order."""
        part = self._parts[chunk.part]
        _native.copy(part, chunk.first, chunk.count, src_bases.ctypes.data, dst_bases.ctypes.data, threads)

    def gather(self, chunk: Chunk, src_bases: np.ndarray, wire: int, *, threads: int = 1) -> None:
        """Blocks to the packed buffer at address `wire`, which has room for ``chunk.wire_bytes``."""
        part = self._parts[chunk.part]
        _native.gather(part, chunk.first, chunk.count, src_bases.ctypes.data, wire, threads)

    def scatter(self, chunk: Chunk, wire: int, dst_bases: np.ndarray, *, threads: int = 1) -> None:
        """The packed buffer at address `wire` to blocks."""
        part = self._parts[chunk.part]
        _native.scatter(part, chunk.first, chunk.count, wire, dst_bases.ctypes.data, threads)


def _prepare(part: PlanPart) -> _native.Part:
    segments = part.segments

    def address(column: np.ndarray | None) -> int:
        return 0 if column is None else column.ctypes.data

    return _native.Part(
        part.rows.ctypes.data,
        len(part.rows),
        address(segments.src_block),
        address(segments.dst_block),
        address(segments.src_token),
        address(segments.dst_token),
        address(segments.tokens),
        address(part.wire_start),
        part.wire_bytes,
    )


def bases(addresses: Sequence[int]) -> np.ndarray:
    """Region addresses as the kernels take them."""
    return np.array(addresses, np.uint64)
