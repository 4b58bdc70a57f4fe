"""A packed plan prepared for one device: formats computed there, by launches that take integers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvxfer.cuda.native import check, native
from kvxfer.cuda.plan import address, check_bases, prepare
from kvxfer.cuda.prepared import PreparedTables, possible
from kvxfer.errors import InvalidRequest
from kvxfer.formats.plan import PackedPart, PackedPlan
from kvxfer.formats.rows import PACKED_ROW
from kvxfer.plan import Chunk


class PreparedCudaPackedPlan(PreparedTables):
    """A packed plan whose tables lie on `device`. The counterpart of `kernels.PreparedPackedPlan`.

    Arguments, `upload`, threads and streams as of `PreparedCudaPlan`, and so are `pack`, `unpack` and `copy`:
    each enqueues, allocates nothing, waits for nothing and can be captured into a graph. Source and destination
    bases may be memory of a peer device, and so may the packed buffer: packing straight into a peer is one
    kernel.

    A plan that converts nothing is carried out by the copy kernels.
    """

    def __init__(
        self,
        plan: PackedPlan,
        *,
        device: int,
        src_bases: np.ndarray | None = None,
        dst_bases: np.ndarray | None = None,
    ) -> None:
        self.plan = plan
        self._sides = (src_bases is not None and plan.packs, dst_bases is not None and plan.unpacks)
        if plan.raw is not None:
            check_bases("src_bases", src_bases, plan.raw.src_regions)
            check_bases("dst_bases", dst_bases, plan.raw.dst_regions)
            parts = [prepare(part, src_bases, dst_bases) for part in plan.raw.parts]
        else:
            given = [bases if side else None for bases, side in zip((src_bases, dst_bases), self._sides, strict=True)]
            parts = [prepare_packed(part, *given) for part in plan.parts]
        super().__init__(parts, device=device)

    def pack(self, chunk: Chunk, wire: int, *, stream: int, max_sms: int = 0, nonfinite: int = 0) -> None:
        """Source blocks to the packed bytes at address `wire`, on 16 bytes, with room for ``chunk.wire_bytes``.

        `nonfinite` is the address of a uint32 in memory that the device reaches, on 4 bytes, or 0. What a lossy
        codec had to saturate (NaN, infinity) is added to it: the caller clears it before, and where it checks,
        looks at it once the stream has passed the launch. How much one such value adds is not defined.
        """
        self._need(self._sides[0], "src_bases, or without the source's block ids, and cannot pack")
        self._launch(native().GATHER, chunk, wire, stream, max_sms, nonfinite)

    def unpack(self, chunk: Chunk, wire: int, *, stream: int, max_sms: int = 0) -> None:
        """The packed bytes at address `wire`, on 16 bytes, to destination blocks."""
        self._need(self._sides[1], "dst_bases, or without the destination's block ids, and cannot unpack")
        self._launch(native().SCATTER, chunk, wire, stream, max_sms, 0)

    def copy(
        self, chunks: Chunk | Sequence[Chunk], *, stream: int, max_sms: int = 0, nonfinite: int = 0
    ) -> None:
        """Source blocks to destination blocks, converted from one cache format to the other.

        Nothing takes the wire's form in between: equal to `pack` and `unpack` where the wire carries what the
        source or the destination stores, and more exact where it would carry less than both.
        """
        self._need(all(self._sides), "src_bases and dst_bases, or without the block ids of both, and cannot copy")
        for chunk in [chunks] if isinstance(chunks, Chunk) else chunks:
            self._launch(native().COPY, chunk, 0, stream, max_sms, nonfinite)

    # The names of `PreparedCudaPlan`, so that either can be carried out by the same caller.
    gather = pack
    scatter = unpack

    def _need(self, given: bool, what: str) -> None:
        if not given:
            raise InvalidRequest(f"this plan was prepared without {what}")

    def _launch(self, direction: int, chunk: Chunk, wire: int, stream: int, max_sms: int, nonfinite: int) -> None:
        self.check_launch(wire)
        if nonfinite % 4:
            raise InvalidRequest(f"the count of values that saturate starts on 4 bytes, got {nonfinite:#x}")
        part = self.parts[chunk.part]
        if self.plan.raw is not None:
            ranges = [(part, chunk.first, chunk.count, wire)]
            status = native().launch_moves(self.device, direction, ranges, stream, max_sms)
        else:
            status = part.launch(self.device, direction, chunk.first, chunk.count, wire, nonfinite, stream, max_sms)
        if status:
            check(status, f"launching a conversion on device {self.device}")


def prepare_packed(part: PackedPart, src_bases: np.ndarray | None, dst_bases: np.ndarray | None) -> Any:
    """The extension's object for one part, not bound to memory yet. Reads the bases, keeps the columns' addresses."""
    assert native().PACKED_ROW_BYTES == PACKED_ROW.itemsize, (
        "formats/rows.py and csrc/packed_plan.h disagree; rebuild the extension"
    )
    _check_region_count("src_bases", src_bases, part.rows["src"])
    _check_region_count("dst_bases", dst_bases, part.rows["dst"])
    segments = part.segments
    made = native().PackedPart(
        part.rows.ctypes.data,
        len(part.rows),
        segments.src_block.ctypes.data,
        segments.dst_block.ctypes.data,
        segments.src_token.ctypes.data,
        segments.dst_token.ctypes.data,
        segments.tokens.ctypes.data,
        part.wire_start.ctypes.data,
        len(part),
        address(src_bases),
        address(dst_bases),
    )
    return possible(made)


def _check_region_count(name: str, bases: np.ndarray | None, sides: np.ndarray) -> None:
    if bases is None:
        return
    regions = int(max(sides["region"].max(), sides["scale_region"].max())) + 1
    if bases.dtype != np.uint64 or bases.ndim != 1 or len(bases) < regions:
        raise InvalidRequest(
            f"{name}: expected the addresses of at least {regions} regions as uint64, got {bases.dtype} of shape "
            f"{bases.shape}"
        )
