"""The one door to csrc: carries out plans on the memory where they lie.

Formats are computed by the best instruction set that the CPU has; the environment variable KVXFER_CPU_ISA
(portable, avx2 or avx512) forces one. All give the same bytes.

Imports plan, formats and the native module. Every function takes addresses that the caller keeps alive, and
releases the GIL while bytes move.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer import _native
from kvxfer.errors import InvalidRequest
from kvxfer.formats.checksums import Checksum, checksum
from kvxfer.formats.plan import PackedPart, PackedPlan
from kvxfer.formats.rows import PACKED_ROW
from kvxfer.formats.wire import not_finite
from kvxfer.plan import ROW, Chunk, PlanPart, TransferPlan
from kvxfer.plan.request import Pairing, Request

if TYPE_CHECKING:
    from kvxfer.cuda.lanes import Lanes
    from kvxfer.cuda.mover import CudaPackedPlan, CudaPlan
    from kvxfer.cuda.pairing import CudaPairing

assert _native.ROW_BYTES == ROW.itemsize, "plan/rows.py and csrc/plan.h disagree; rebuild the extension"
assert _native.PACKED_ROW_BYTES == PACKED_ROW.itemsize, (
    "formats/rows.py and csrc/packed_plan.h disagree; rebuild the extension"
)

load_word = _native.load_word
store_word = _native.store_word
load_slot = _native.load_slot


PIECE_BYTES = 8 << 20  # moved by one call between two looks at a transfer


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

    def gather(
        self, chunk: Chunk, src_bases: np.ndarray, wire: int, *, threads: int = 1, past_caches: bool = False
    ) -> None:
        """Blocks to the packed buffer at address `wire`, which has room for ``chunk.wire_bytes``.

        `past_caches` is for what another processor reads next: to take over lines that are still in its caches costs
        several times what the copy does.
        """
        part = self._parts[chunk.part]
        _native.gather(part, chunk.first, chunk.count, src_bases.ctypes.data, wire, threads, past_caches)

    def scatter(self, chunk: Chunk, wire: int, dst_bases: np.ndarray, *, threads: int = 1) -> None:
        """The packed buffer at address `wire` to blocks."""
        part = self._parts[chunk.part]
        _native.scatter(part, chunk.first, chunk.count, wire, dst_bases.ctypes.data, threads)


class HostPairing:
    """Whole blocks of a peer's cache into one of this process, both in host memory; made once for all requests."""

    def __init__(self, pairing: Pairing, src_bases: np.ndarray, dst_bases: np.ndarray) -> None:
        """The bases are uint64 region addresses in layout order; the caller keeps the memory mapped."""
        self.request = pairing.request
        self._bases = src_bases, dst_bases
        self._addresses = src_bases.ctypes.data, dst_bases.ctypes.data

    def copy(self, request: Request, max_bytes: int, *, threads: int = 1) -> int:
        """Copy about `max_bytes` more of a request; returns how many bytes that were, 0 at its end.

        Releases the GIL, except for what is copied sooner than it would come back.
        """
        return request.copy(*self._addresses, max_bytes, threads)


class PreparedPackedPlan:
    """A packed plan whose tables have been handed to the kernels. Keeps the plan alive."""

    def __init__(self, plan: PackedPlan) -> None:
        self.plan = plan
        self.launches = False  # calls return when the last byte is written
        self._raw = None if plan.raw is None else PreparedPlan(plan.raw)
        self._parts = [_prepare_packed(part) for part in plan.parts]

    def pack(
        self,
        chunk: Chunk,
        src_bases: np.ndarray,
        wire: int,
        *,
        threads: int = 1,
        check: bool = True,
        summed: bool = False,
        past_caches: bool = False,
        wire_on_gpu: bool = False,
    ) -> Checksum | None:
        """Source blocks to the packed bytes at address `wire`, which has room for ``chunk.wire_bytes``.

        With `summed`, returns their checksum; raises MissingExtra without xxhash. `past_caches`: see
        `PreparedPlan.gather`. `wire_on_gpu` is for blocks on a GPU only (`cuda.mover.CudaPackedPlan`).

        With `check`, NaN or infinity under a lossy codec raises NonFiniteValue when the chunk is packed;
        without, they saturate (`formats.elements.finite`).
        """
        assert not wire_on_gpu, "the CPU's kernels do not reach a GPU's memory"
        if not self.plan.packs:
            raise InvalidRequest("this plan was made without the source's block ids and cannot pack")
        if self._raw is not None:
            self._raw.gather(chunk, src_bases, wire, threads=threads, past_caches=past_caches and not summed)
            return self._sum(chunk, wire) if summed else None
        part = self._parts[chunk.part]
        bad = _native.pack(part, chunk.first, chunk.count, src_bases.ctypes.data, wire, threads)
        if bad and check:
            raise not_finite(self.plan.wire, f"{bad} groups of vectors of this chunk")
        return self._sum(chunk, wire) if summed else None

    @staticmethod
    def _sum(chunk: Chunk, wire: int) -> Checksum:
        return checksum(memoryview((ctypes.c_uint8 * chunk.wire_bytes).from_address(wire)).cast("B"))

    def unpack(
        self, chunk: Chunk, wire: int, dst_bases: np.ndarray, *, threads: int = 1, wire_on_gpu: bool = False
    ) -> None:
        """The packed bytes at address `wire` to destination blocks."""
        assert not wire_on_gpu, "the CPU's kernels do not reach a GPU's memory"
        if not self.plan.unpacks:
            raise InvalidRequest("this plan was made without the destination's block ids and cannot unpack")
        if self._raw is not None:
            self._raw.scatter(chunk, wire, dst_bases, threads=threads)
            return
        part = self._parts[chunk.part]
        _native.unpack(part, chunk.first, chunk.count, wire, dst_bases.ctypes.data, threads)

    def let_go(self) -> None:
        """As of `cuda.mover.CudaPackedPlan`: here there is nothing to give back."""

    # The names of `PreparedPlan`, so that either can be carried out by the same caller.
    gather = pack
    scatter = unpack


def _prepare_packed(part: PackedPart) -> _native.PackedPart:
    segments = part.segments
    return _native.PackedPart(
        part.rows.ctypes.data,
        len(part.rows),
        segments.src_block.ctypes.data,
        segments.dst_block.ctypes.data,
        segments.src_token.ctypes.data,
        segments.dst_token.ctypes.data,
        segments.tokens.ctypes.data,
        part.wire_start.ctypes.data,
        0,
    )


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


class Kernels:
    """Prepares plans for the device where a cache lies. Loads the CUDA half at its first use."""

    def __init__(self, *, max_sms: int) -> None:
        """`max_sms` bounds the multiprocessors of a GPU that one launch takes."""
        self._max_sms = max_sms
        self._lanes: dict[str, Lanes] = {}

    def prepare(self, plan: TransferPlan | PackedPlan, device: str) -> PreparedPlan | CudaPlan:
        """A plan from blocks to blocks; the destination, or the source where blocks are sent, lies on `device`.

        A `PackedPlan` converts on the way, which only GPUs do.
        """
        if device == "cpu":
            return PreparedPlan(plan)
        from kvxfer.cuda.mover import CudaPlan

        return CudaPlan(plan, self.lanes(device), max_sms=self._max_sms)

    def prepare_pairing(
        self, pairing: Pairing, device: str, src_bases: np.ndarray, dst_bases: np.ndarray
    ) -> HostPairing | CudaPairing:
        """A pairing of blocks for mapped copies; the destination lies on `device`, and the source is of its kind."""
        if device == "cpu":
            return HostPairing(pairing, src_bases, dst_bases)
        from kvxfer.cuda.pairing import CudaPairing

        return CudaPairing(pairing, self.lanes(device), src_bases, dst_bases, max_sms=self._max_sms)

    def prepare_packed(self, plan: PackedPlan, device: str) -> PreparedPackedPlan | CudaPackedPlan:
        """A packed plan, one end of which lies on `device`."""
        if device == "cpu":
            return PreparedPackedPlan(plan)
        from kvxfer.cuda.mover import CudaPackedPlan

        return CudaPackedPlan(plan, self.lanes(device), max_sms=self._max_sms)

    def warm(self, device: str, lanes: int) -> None:
        """Have what the first transfers of a GPU need: nothing of it may be made while a stream waits for one."""
        if device != "cpu":
            self.lanes(device).warm(lanes)

    def close(self) -> None:
        """No stream waits for a transfer any more; idempotent. May wait for a GPU."""
        for lanes in self._lanes.values():
            lanes.gates.close()
            lanes.close()

    def lanes(self, device: str) -> Lanes:
        """The lanes of a GPU."""
        from kvxfer.cuda.lanes import Lanes

        if device not in self._lanes:
            self._lanes.setdefault(device, Lanes(int(device.removeprefix("cuda:"))))
        return self._lanes[device]


def bases(addresses: Sequence[int]) -> np.ndarray:
    """Region addresses as the kernels take them."""
    return np.array(addresses, np.uint64)


def cpu_isa() -> str:
    """The instruction set that formats are computed with."""
    return _native.cpu_isa()


def choose_cpu_isa(name: str) -> None:
    """Compute formats with `name`: portable, avx2, avx512. Raises InvalidRequest where the CPU lacks it."""
    if not _native.choose_cpu_isa(name):
        raise InvalidRequest(
            f"KVXFER_CPU_ISA: expected portable, avx2 or avx512 as far as this CPU has them, got {name!r}"
        )


if os.environ.get("KVXFER_CPU_ISA"):
    choose_cpu_isa(os.environ["KVXFER_CPU_ISA"])
