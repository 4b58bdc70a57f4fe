"""A transfer plan prepared for one device: tables uploaded once, then launches that take integers only."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvxfer.cuda.native import check, native
from kvxfer.cuda.runtime import DeviceMemory, copy_bytes
from kvxfer.errors import InvalidRequest
from kvxfer.plan import ROW, WIRE_ALIGNMENT, Chunk, PlanPart, TransferPlan

DEFAULT_VARIANT = 2
_TABLE_ALIGNMENT = 16


class PreparedCudaPlan:
    """A plan whose tables lie on `device`, for launches there. The counterpart of `kernels.PreparedPlan`.

    `src_bases` and `dst_bases` are the uint64 region addresses in layout order, as kernels on `device` see
    them: its own memory, memory of a peer device (`enable_peer_access`, `open_memory`), or pinned host
    memory. They are fixed here, since the width of loads and stores is chosen from them. A side may be left
    out: without `src_bases` there is `scatter` only, without `dst_bases` `gather` only.

    Call `upload` before the first launch. Keeps the plan and, unless the caller gives memory, the tables
    alive; closing waits for the device. Launches may come from any thread and stream.
    """

    def __init__(
        self,
        plan: TransferPlan,
        *,
        device: int,
        src_bases: np.ndarray | None = None,
        dst_bases: np.ndarray | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        _check_bases("src_bases", src_bases, plan.src_regions)
        _check_bases("dst_bases", dst_bases, plan.dst_regions)
        self._sides = (src_bases is not None, dst_bases is not None)
        self._parts = [prepare(part, src_bases, dst_bases) for part in plan.parts]
        ends = np.cumsum([0] + [_align(part.table_bytes) for part in self._parts])
        self._offsets = ends[:-1].tolist()
        self._memory: DeviceMemory | None = None
        self._host: np.ndarray | None = None
        self.table_bytes = int(ends[-1])
        """Device memory that the tables need; also what `upload` needs of pinned memory, if it is given any."""

    def upload(self, *, stream: int, memory: int = 0, pinned: np.ndarray | None = None) -> None:
        """Enqueue the copy of the tables to the device. Not to be captured into a graph; launches are.

        Launches on another stream must wait for this one. `memory` is the address of at least `table_bytes`
        of device memory on 16 bytes, which the caller keeps until the last launch is done; without it, it is
        allocated here. `pinned` is a uint8 array in pinned host memory that the tables pass through, so that
        the call does not wait; it must stay as it is until the stream has passed the copy.
        """
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

    def copy(self, chunk: Chunk, *, stream: int, max_sms: int = 0, variant: int = DEFAULT_VARIANT) -> None:
        """Blocks to blocks, on at most `max_sms` multiprocessors (0: all). Enqueues and returns.

        Source and destination blocks must not overlap, and belong to the kernel until the stream has
        passed it.
        """
        self._need(*self._sides)
        self._launch(native().COPY, chunk, 0, stream, max_sms, variant)

    def gather(
        self, chunk: Chunk, wire: int, *, stream: int, max_sms: int = 0, variant: int = DEFAULT_VARIANT
    ) -> None:
        """Blocks to the packed buffer at address `wire`, on 16 bytes, with room for ``chunk.wire_bytes``.

        Bytes between rows, where one ends off 16 bytes, are not written.
        """
        self._need(self._sides[0], True)
        self._launch(native().GATHER, chunk, wire, stream, max_sms, variant)

    def scatter(
        self, chunk: Chunk, wire: int, *, stream: int, max_sms: int = 0, variant: int = DEFAULT_VARIANT
    ) -> None:
        """The packed buffer at address `wire`, on 16 bytes, to blocks."""
        self._need(True, self._sides[1])
        self._launch(native().SCATTER, chunk, wire, stream, max_sms, variant)

    def vector_bytes(self, direction: str) -> list[int]:
        """How wide "copy", "gather" or "scatter" loads and stores, for each part: 16 unless addresses are odd."""
        return [part.vector_bytes(getattr(native(), direction.upper())) for part in self._parts]

    def close(self) -> None:
        """Free the tables, if they were allocated here. Waits for the device."""
        if self._memory is not None:
            self._memory.close()

    def __enter__(self) -> PreparedCudaPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _need(self, src: bool, dst: bool) -> None:
        if not (src and dst):
            missing = "src_bases" if not src else "dst_bases"
            raise InvalidRequest(f"this plan was prepared without {missing}")

    def _launch(
        self, direction: int, chunk: Chunk, wire: int, stream: int, max_sms: int, variant: int
    ) -> None:
        if self._host is None:
            raise InvalidRequest("the plan's tables are not on the device: call upload first")
        if wire % WIRE_ALIGNMENT:
            raise InvalidRequest(f"a packed buffer starts on {WIRE_ALIGNMENT} bytes, got {wire:#x}")
        status = self._parts[chunk.part].launch(
            self.device, direction, chunk.first, chunk.count, wire, stream, max_sms, variant
        )
        if status:
            check(status, f"launching a kernel on device {self.device}")


def prepare(part: PlanPart, src_bases: np.ndarray | None, dst_bases: np.ndarray | None) -> Any:
    """The extension's object for one part, not bound to memory yet. Reads the bases, keeps the columns."""
    assert native().ROW_BYTES == ROW.itemsize, "plan.py and csrc/plan.h disagree; rebuild the extension"
    segments = part.segments

    def address(array: np.ndarray | None) -> int:
        return 0 if array is None else array.ctypes.data

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
    if made.problem:
        raise InvalidRequest(f"the GPU kernels cannot carry out this plan: {made.problem}")
    return made


def _align(nbytes: int) -> int:
    return -(-nbytes // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT


def _check_bases(name: str, bases: np.ndarray | None, regions: int) -> None:
    if bases is not None and (bases.dtype != np.uint64 or bases.shape != (regions,)):
        raise InvalidRequest(
            f"{name}: expected {regions} region addresses as uint64, got {bases.dtype} of shape {bases.shape}"
        )
