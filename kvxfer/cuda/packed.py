"""A packed plan prepared for one device: formats computed there, by launches that take integers only."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvxfer.cuda.native import check, native
from kvxfer.cuda.plan import PreparedCudaPlan
from kvxfer.cuda.runtime import DeviceMemory, copy_bytes
from kvxfer.errors import InvalidRequest
from kvxfer.formats.plan import PackedPart, PackedPlan
from kvxfer.formats.rows import PACKED_ROW
from kvxfer.plan import WIRE_ALIGNMENT, Chunk

_TABLE_ALIGNMENT = 16


class PreparedCudaPackedPlan:
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
        self.device = device
        self._raw: PreparedCudaPlan | None = None
        self._parts: list[Any] = []
        self._memory: DeviceMemory | None = None
        self._host: np.ndarray | None = None
        self._sides = (src_bases is not None and plan.packs, dst_bases is not None and plan.unpacks)
        if plan.raw is not None:
            self._raw = PreparedCudaPlan(plan.raw, device=device, src_bases=src_bases, dst_bases=dst_bases)
            self.table_bytes = self._raw.table_bytes
            return
        given = [bases if side else None for bases, side in zip((src_bases, dst_bases), self._sides, strict=True)]
        self._parts = [prepare_packed(part, *given) for part in plan.parts]
        ends = np.cumsum([0] + [_align(part.table_bytes) for part in self._parts])
        self._offsets = ends[:-1].tolist()
        self.table_bytes = int(ends[-1])
        """Device memory that the tables need; also what `upload` needs of pinned memory, if it is given any."""

    def upload(self, *, stream: int, memory: int = 0, pinned: np.ndarray | None = None) -> None:
        """Enqueue the copy of the tables to the device, before the first launch; see `PreparedCudaPlan.upload`."""
        if self._raw is not None:
            self._raw.upload(stream=stream, memory=memory, pinned=pinned)
            return
        if memory % _TABLE_ALIGNMENT:
            raise InvalidRequest(f"memory for tables starts on {_TABLE_ALIGNMENT} bytes, got {memory:#x}")
        if pinned is not None and (pinned.dtype != np.uint8 or pinned.size < self.table_bytes):
            raise InvalidRequest(f"the tables need {self.table_bytes} bytes (uint8) of pinned memory")
        if not memory:
            self._memory = DeviceMemory(self.table_bytes, device=self.device)
            memory = self._memory.address
        host = np.empty(self.table_bytes, np.uint8) if pinned is None else pinned
        for part, offset in zip(self._parts, self._offsets, strict=True):
            check(part.load_kernels(self.device), f"loading kernels onto device {self.device}")
            part.fill(host.ctypes.data + offset)
            part.bind(memory + offset)
        self._host = host
        if memory != host.ctypes.data:  # else kernels read the tables in pinned memory
            copy_bytes(memory, host.ctypes.data, self.table_bytes, device=self.device, stream=stream)

    def pack(self, chunk: Chunk, wire: int, *, stream: int, max_sms: int = 0, nonfinite: int = 0) -> None:
        """Source blocks to the packed bytes at address `wire`, on 16 bytes, with room for ``chunk.wire_bytes``.

        `nonfinite` is the address of a uint32 in memory that the device reaches, on 4 bytes, or 0. What a lossy
        codec had to saturate (NaN, infinity) is added to it: the caller clears it before, and where it checks,
        looks at it once the stream has passed the launch. How much one such value adds is not defined.
        """
        self._need(self._sides[0], "src_bases, or without the source's block ids, and cannot pack")
        if self._raw is not None:
            self._raw.gather(chunk, wire, stream=stream, max_sms=max_sms)
        else:
            self._launch(native().GATHER, chunk, wire, stream, max_sms, nonfinite)

    def unpack(self, chunk: Chunk, wire: int, *, stream: int, max_sms: int = 0) -> None:
        """The packed bytes at address `wire`, on 16 bytes, to destination blocks."""
        self._need(self._sides[1], "dst_bases, or without the destination's block ids, and cannot unpack")
        if self._raw is not None:
            self._raw.scatter(chunk, wire, stream=stream, max_sms=max_sms)
        else:
            self._launch(native().SCATTER, chunk, wire, stream, max_sms, 0)

    def copy(self, chunk: Chunk, *, stream: int, max_sms: int = 0, nonfinite: int = 0) -> None:
        """Source blocks to destination blocks, converted from one cache format to the other.

        Nothing takes the wire's form in between: equal to `pack` and `unpack` where the wire carries what the
        source or the destination stores, and more exact where it would carry less than both.
        """
        self._need(all(self._sides), "src_bases and dst_bases, or without the block ids of both, and cannot copy")
        if self._raw is not None:
            self._raw.copy(chunk, stream=stream, max_sms=max_sms)
        else:
            self._launch(native().COPY, chunk, 0, stream, max_sms, nonfinite)

    # The names of `PreparedCudaPlan`, so that either can be carried out by the same caller.
    gather = pack
    scatter = unpack

    def close(self) -> None:
        """Free the tables, if they were allocated here. Waits for the device."""
        for held in (self._raw, self._memory):
            if held is not None:
                held.close()

    def __enter__(self) -> PreparedCudaPackedPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _need(self, given: bool, what: str) -> None:
        if not given:
            raise InvalidRequest(f"this plan was prepared without {what}")

    def _launch(self, direction: int, chunk: Chunk, wire: int, stream: int, max_sms: int, nonfinite: int) -> None:
        if self._host is None:
            raise InvalidRequest("the plan's tables are not on the device: call upload first")
        if wire % WIRE_ALIGNMENT:
            raise InvalidRequest(f"a packed buffer starts on {WIRE_ALIGNMENT} bytes, got {wire:#x}")
        if nonfinite % 4:
            raise InvalidRequest(f"the count of values that saturate starts on 4 bytes, got {nonfinite:#x}")
        status = self._parts[chunk.part].launch(
            self.device, direction, chunk.first, chunk.count, wire, nonfinite, stream, max_sms
        )
        if status:
            check(status, f"launching a conversion on device {self.device}")


def prepare_packed(part: PackedPart, src_bases: np.ndarray | None, dst_bases: np.ndarray | None) -> Any:
    """The extension's object for one part, not bound to memory yet. Reads the bases, keeps the columns."""
    assert native().PACKED_ROW_BYTES == PACKED_ROW.itemsize, (
        "formats/rows.py and csrc/packed_plan.h disagree; rebuild the extension"
    )
    _check_bases("src_bases", src_bases, part.rows["src"])
    _check_bases("dst_bases", dst_bases, part.rows["dst"])
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
        0 if src_bases is None else src_bases.ctypes.data,
        0 if dst_bases is None else dst_bases.ctypes.data,
    )
    if made.problem:
        raise InvalidRequest(f"the GPU kernels cannot carry out this plan: {made.problem}")
    return made


def _align(nbytes: int) -> int:
    return -(-nbytes // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT


def _check_bases(name: str, bases: np.ndarray | None, sides: np.ndarray) -> None:
    if bases is None:
        return
    regions = int(max(sides["region"].max(), sides["scale_region"].max())) + 1
    if bases.dtype != np.uint64 or bases.ndim != 1 or len(bases) < regions:
        raise InvalidRequest(
            f"{name}: expected the addresses of at least {regions} regions as uint64, got {bases.dtype} of shape "
            f"{bases.shape}"
        )
