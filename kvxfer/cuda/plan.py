"""A transfer plan prepared for one device: tables uploaded once, then launches that take integers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvxfer.cuda.native import check, native
from kvxfer.cuda.prepared import PreparedTables, possible
from kvxfer.errors import InvalidRequest
from kvxfer.plan import ROW, Chunk, PlanPart, TransferPlan


class PreparedCudaPlan(PreparedTables):
    """A plan whose tables lie on `device`, for launches there. The counterpart of `kernels.PreparedPlan`.

    `src_bases` and `dst_bases` are the uint64 region addresses in layout order, as kernels on `device` see
    them: its own memory, memory of a peer device (`enable_peer_access`, `open_memory`), or pinned host
    memory. They are fixed here, since the width of loads and stores is chosen from them. A side may be left
    out: without `src_bases` there is `scatter` only, without `dst_bases` `gather` only.

    Call `upload` before the first launch. Keeps the plan alive. Launches may come from any thread and stream;
    each enqueues, allocates nothing, waits for nothing and can be captured into a graph.
    """

    def __init__(
        self,
        plan: TransferPlan,
        *,
        device: int,
        src_bases: np.ndarray | None = None,
        dst_bases: np.ndarray | None = None,
    ) -> None:
        check_bases("src_bases", src_bases, plan.src_regions)
        check_bases("dst_bases", dst_bases, plan.dst_regions)
        super().__init__([prepare(part, src_bases, dst_bases) for part in plan.parts], device=device)
        self.plan = plan
        self._sides = (src_bases is not None, dst_bases is not None)

    def copy(self, chunks: Chunk | Sequence[Chunk], *, stream: int, max_sms: int = 0) -> None:
        """Blocks to blocks, on at most `max_sms` multiprocessors (0: all). Enqueues and returns.

        Several chunks are one launch where they can be, so give all that are to move. Source and destination
        blocks must not overlap, and belong to the kernel until the stream has passed it.
        """
        self._need(*self._sides)
        self._launch(native().COPY, [chunks] if isinstance(chunks, Chunk) else chunks, 0, stream, max_sms)

    def gather(self, chunk: Chunk, wire: int, *, stream: int, max_sms: int = 0) -> None:
        """Blocks to the packed buffer at address `wire`, on 16 bytes, with room for ``chunk.wire_bytes``.

        Bytes between rows, where one ends off 16 bytes, are not written.
        """
        self._need(self._sides[0], True)
        self._launch(native().GATHER, [chunk], wire, stream, max_sms)

    def scatter(self, chunk: Chunk, wire: int, *, stream: int, max_sms: int = 0) -> None:
        """The packed buffer at address `wire`, on 16 bytes, to blocks."""
        self._need(True, self._sides[1])
        self._launch(native().SCATTER, [chunk], wire, stream, max_sms)

    def vector_bytes(self, direction: str) -> list[int]:
        """How wide "copy", "gather" or "scatter" loads and stores, for each part: 16 unless addresses are odd."""
        return [part.vector_bytes(getattr(native(), direction.upper())) for part in self.parts]

    def _need(self, src: bool, dst: bool) -> None:
        if not (src and dst):
            missing = "src_bases" if not src else "dst_bases"
            raise InvalidRequest(f"this plan was prepared without {missing}")

    def _launch(self, direction: int, chunks: Sequence[Chunk], wire: int, stream: int, max_sms: int) -> None:
        self.check_launch(wire)
        ranges = [(self.parts[chunk.part], chunk.first, chunk.count, wire) for chunk in chunks]
        status = native().launch_moves(self.device, direction, ranges, stream, max_sms)
        if status:
            check(status, f"launching a kernel on device {self.device}")


def prepare(part: PlanPart, src_bases: np.ndarray | None, dst_bases: np.ndarray | None) -> Any:
    """The extension's object for one part, not bound to memory yet. Reads the bases, keeps the columns' addresses."""
    assert native().ROW_BYTES == ROW.itemsize, "plan/rows.py and csrc/plan.h disagree; rebuild the extension"
    segments = part.segments
    made = native().Part(
        part.rows.ctypes.data,
        len(part.rows),
        address(segments.src_block),
        address(segments.dst_block),
        address(segments.src_token),
        address(segments.dst_token),
        address(segments.tokens),
        address(part.wire_start),
        part.wire_bytes,
        len(part),
        address(src_bases),
        address(dst_bases),
    )
    return possible(made)


def address(array: np.ndarray | None) -> int:
    """Of an array's first byte; 0 for None."""
    return 0 if array is None else array.ctypes.data


def check_bases(name: str, bases: np.ndarray | None, regions: int) -> None:
    """InvalidRequest unless `bases` is None or `regions` addresses."""
    if bases is not None and (bases.dtype != np.uint64 or bases.shape != (regions,)):
        raise InvalidRequest(
            f"{name}: expected {regions} region addresses as uint64, got {bases.dtype} of shape {bases.shape}"
        )
