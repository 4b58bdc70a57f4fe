"""Plans carried out on a GPU with the calls of `kernels.PreparedPlan`: each returns when its last byte is written.

A mover thread makes the calls, so waiting here holds up nobody; the wait sleeps and the GIL is free.
"""

from __future__ import annotations

import numpy as np

from kvxfer.cuda.lanes import Lane, Lanes
from kvxfer.cuda.packed import PreparedCudaPackedPlan
from kvxfer.cuda.plan import PreparedCudaPlan
from kvxfer.cuda.runtime import copy_bytes
from kvxfer.errors import NonFiniteValue
from kvxfer.formats import PackedPlan
from kvxfer.plan import Chunk, TransferPlan

PIECE_BYTES = 1 << 30  # what one launch carries out: a few milliseconds of the link


class CudaPlan:
    """A plan for blocks in the memory of one GPU, and of peers that it reaches."""

    piece_bytes = PIECE_BYTES

    def __init__(self, plan: TransferPlan, lanes: Lanes, *, max_sms: int) -> None:
        self.plan = plan
        self._lanes, self._max_sms = lanes, max_sms

    def copy(
        self, chunk: Chunk, src_bases: np.ndarray, dst_bases: np.ndarray, *, threads: int = 1, after: int = 0
    ) -> None:
        """Blocks to blocks. `threads` is for host memory only; `after` is a CUDA event to wait for first, or 0."""
        with self._lanes.lane() as lane:
            prepared = self._prepare(lane, src_bases, dst_bases)
            if after:
                lane.wait_for(after)
            prepared.copy(chunk, stream=lane.stream.address, max_sms=self._max_sms)

    def gather(self, chunk: Chunk, src_bases: np.ndarray, wire: int, *, threads: int = 1) -> None:
        """Blocks to the packed buffer in host memory at address `wire`."""
        with self._lanes.lane() as lane:
            prepared, scratch = self._prepare(lane, src_bases, None), lane.scratch(chunk.wire_bytes)
            prepared.gather(chunk, scratch, stream=lane.stream.address, max_sms=self._max_sms)
            copy_bytes(wire, scratch, chunk.wire_bytes, device=lane.device, stream=lane.stream.address)

    def scatter(self, chunk: Chunk, wire: int, dst_bases: np.ndarray, *, threads: int = 1) -> None:
        """The packed buffer in host memory at address `wire` to blocks."""
        with self._lanes.lane() as lane:
            prepared, scratch = self._prepare(lane, None, dst_bases), lane.scratch(chunk.wire_bytes)
            copy_bytes(scratch, wire, chunk.wire_bytes, device=lane.device, stream=lane.stream.address)
            prepared.scatter(chunk, scratch, stream=lane.stream.address, max_sms=self._max_sms)

    def _prepare(self, lane: Lane, src: np.ndarray | None, dst: np.ndarray | None) -> PreparedCudaPlan:
        prepared = PreparedCudaPlan(self.plan, device=lane.device, src_bases=src, dst_bases=dst)
        lane.upload(prepared)
        return prepared


class CudaPackedPlan:
    """A packed plan for blocks in the memory of one GPU; the packed bytes lie in host memory."""

    def __init__(self, plan: PackedPlan, lanes: Lanes, *, max_sms: int) -> None:
        self.plan = plan
        self._lanes, self._max_sms = lanes, max_sms

    def pack(self, chunk: Chunk, src_bases: np.ndarray, wire: int, *, threads: int = 1, check: bool = True) -> None:
        """Source blocks to the packed bytes at address `wire`.

        With `check`, raises NonFiniteValue for NaN or infinity under a lossy codec.
        """
        with self._lanes.lane() as lane:
            prepared, scratch = self._prepare(lane, src_bases, None), lane.scratch(chunk.wire_bytes)
            flag = lane.cleared_flag()
            prepared.pack(chunk, scratch, stream=lane.stream.address, max_sms=self._max_sms, nonfinite=flag.address)
            copy_bytes(wire, scratch, chunk.wire_bytes, device=lane.device, stream=lane.stream.address)
            lane.finish()
            if check and flag.array[:4].any():
                raise NonFiniteValue(
                    f"wire format {self.plan.wire} packs finite values only, and this chunk holds NaN or infinity; "
                    "send this cache with wire='raw', or switch the check off to let them saturate"
                )

    def unpack(self, chunk: Chunk, wire: int, dst_bases: np.ndarray, *, threads: int = 1) -> None:
        """The packed bytes at address `wire` to destination blocks."""
        with self._lanes.lane() as lane:
            prepared, scratch = self._prepare(lane, None, dst_bases), lane.scratch(chunk.wire_bytes)
            copy_bytes(scratch, wire, chunk.wire_bytes, device=lane.device, stream=lane.stream.address)
            prepared.unpack(chunk, scratch, stream=lane.stream.address, max_sms=self._max_sms)

    def _prepare(self, lane: Lane, src: np.ndarray | None, dst: np.ndarray | None) -> PreparedCudaPackedPlan:
        prepared = PreparedCudaPackedPlan(self.plan, device=lane.device, src_bases=src, dst_bases=dst)
        lane.upload(prepared)
        return prepared
