"""Plans carried out on a GPU, by mover threads: each call returns when its last byte is written.

Waiting here holds up nobody, and the GIL is free. What is called `launch_...` is for the progress thread: it returns at
once, with an operation to look at. `CudaPlan` moves blocks to blocks, of caches of one format or of two;
`CudaPackedPlan` moves blocks to and from packed bytes in host memory, which is asynchronous where that memory is
pinned. Each mover thread has a lane of its own, so one chunk is packed while another one crosses to the host.
"""

from __future__ import annotations

import collections
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from kvxfer.cuda.conveyor import Launched
from kvxfer.cuda.digest import checksum_on_device
from kvxfer.cuda.lanes import Ending, Lane, Lanes
from kvxfer.cuda.packed import PreparedCudaPackedPlan
from kvxfer.cuda.plan import PreparedCudaPlan
from kvxfer.cuda.runtime import copy_bytes
from kvxfer.cuda.tables import TableMemory
from kvxfer.formats import Checksum, ChecksumKind, PackedPlan
from kvxfer.formats.wire import not_finite
from kvxfer.plan import WIRE_ALIGNMENT, Chunk, TransferPlan, together

_NAP_S = 20e-6
PIECE_BYTES = 1 << 30  # what one launch carries out: a few milliseconds of the link
_PIECES_AHEAD = 1  # that are enqueued while one is at work


class CudaPlan:
    """A plan for blocks in the memory of one GPU, and of peers that it reaches.

    With a `PackedPlan` blocks are converted from the source cache's format to the destination's on the way, by one
    kernel, and nothing takes the wire's form.
    """

    def __init__(self, plan: TransferPlan | PackedPlan, lanes: Lanes, *, max_sms: int) -> None:
        self.plan = plan
        self._lanes, self._max_sms = lanes, max_sms

    def carry_out(
        self,
        src_bases: np.ndarray,
        dst_bases: np.ndarray,
        *,
        go_on: Callable[[], bool],
        moved: Callable[[int], None],
        after: Sequence[int] = (),
        ending: Ending | None = None,
    ) -> bool:
        """Blocks to blocks, once the events `after` (CUDA's handles) have passed on the device.

        Between pieces it asks `go_on` and tells `moved` the bytes of each; while one is at work the next one is
        enqueued. After the last piece the device does what `ending` says. False when it was not to go on: then nothing
        of `ending` was done.
        """
        pieces = list(together(self.plan.chunks(PIECE_BYTES), PIECE_BYTES))
        with self._lanes.lane() as lane:
            prepared = self._prepare(lane, src_bases, dst_bases) if pieces else None
            for event in after:
                lane.wait_for(event)
            at_work: collections.deque[tuple[int, int]] = collections.deque()  # what the lane will say, and bytes
            for piece in pieces:
                if not go_on():
                    return False
                prepared.copy(piece, stream=lane.queue, max_sms=self._max_sms)
                if piece is pieces[-1]:
                    break
                lane.report()
                at_work.append((lane.said, sum(chunk.wire_bytes for chunk in piece)))
                if len(at_work) > _PIECES_AHEAD:
                    said, nbytes = at_work.popleft()
                    lane.await_all(said)
                    moved(nbytes)
            lane.finish(ending)
            moved(sum(nbytes for _, nbytes in at_work) + sum(chunk.wire_bytes for chunk in pieces[-1]) if pieces else 0)
        return True

    def _prepare(self, lane: Lane, src: np.ndarray, dst: np.ndarray) -> PreparedCudaPlan | PreparedCudaPackedPlan:
        kind = PreparedCudaPackedPlan if isinstance(self.plan, PackedPlan) else PreparedCudaPlan
        prepared = kind(self.plan, device=lane.device, src_bases=src, dst_bases=dst)
        lane.tables.upload(prepared, stream=lane.queue)
        return prepared


class CudaPackedPlan:
    """A packed plan for blocks in the memory of one GPU; the packed bytes lie in host memory, or on that GPU."""

    def __init__(self, plan: PackedPlan, lanes: Lanes, *, max_sms: int) -> None:
        self.plan = plan
        self.launches = True  # has `launch_pack` and `launch_unpack`
        self._lanes, self._max_sms = lanes, max_sms
        self._made: dict[str, PreparedCudaPackedPlan] = {}  # to "pack" and to "unpack"
        self._prepared: dict[str, PreparedCudaPackedPlan] = {}  # of these, those whose tables are on the device,
        self._uploads: list[Launched] = []  # or on the way there: before what the conveyor launches, and no other
        self._kept: list[weakref.finalize] = []
        self._lock = threading.Lock()

    def get_ready(self, side: str, bases: np.ndarray) -> None:
        """Do what the first "pack" or "unpack" would do before it launches anything. Mover thread."""
        with self._lanes.lane() as lane:
            self._ready(lane, side, bases)

    def is_ready(self, side: str, bases: np.ndarray) -> bool:
        """Whether `launch_pack` or `launch_unpack` may be called; sees to it where nothing has to be waited for."""
        if side in self._prepared:
            return True
        if not self._lock.acquire(blocking=False):  # a mover thread is at it
            return False
        try:
            prepared = self._tables_of(side, bases)
            room = prepared.table_bytes, self.plan.copies
            tables = self._lanes.take_tables(*room, at_hand=True)
            if tables is None:
                return False
            self._keep(tables)
            tables.under_way = self._lanes.conveyor.before_all(lambda stream: tables.upload(prepared, stream=stream))
            self._uploads.append(tables.under_way)
            self._prepared[side] = prepared
        finally:
            self._lock.release()
        return True

    def launch_pack(self, chunk: Chunk, wire: int, *, check: bool = True, marked: bool = False) -> Launched:
        """`pack` into memory that this GPU reaches, without waiting for it; with `marked`, the operation has an event.
        Raises CudaError; so does the operation, and with `check` NonFiniteValue."""
        prepared, most = self._prepared["pack"], self._max_sms
        converts = self.plan.raw is None
        return self._lanes.conveyor.launch(
            lambda stream, flag: prepared.pack(chunk, wire, stream=stream, max_sms=most, nonfinite=flag),
            flagged=(lambda: not_finite(self.plan.wire, "vectors of this chunk")) if check and converts else None,
            marked=marked,
        )

    def launch_unpack(self, chunk: Chunk, wire: int) -> Launched:
        """`unpack` from memory of this GPU, without waiting for it. Raises CudaError; so does the operation."""
        prepared, most = self._prepared["unpack"], self._max_sms
        return self._lanes.conveyor.launch(
            lambda stream, _: prepared.unpack(chunk, wire, stream=stream, max_sms=most)
        )

    def unpack_on(self, chunk: Chunk, wire: int, stream: int) -> bool:
        """Enqueue `unpack` on a stream that is not of the lanes; False where the tables are still on their way."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            uploaded = all(upload.poll() for upload in self._uploads)
        finally:
            self._lock.release()
        if uploaded:
            self._prepared["unpack"].unpack(chunk, wire, stream=stream, max_sms=self._max_sms)
        return uploaded

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
        """Source blocks to the packed bytes at address `wire`, of this GPU with `wire_on_gpu`, else of the host.

        `threads` and `past_caches` are for the CPU's kernels.

        With `summed`, returns their checksum.

        With `check`, raises NonFiniteValue for NaN or infinity under a lossy codec.
        """
        with self._lanes.lane() as lane:
            prepared = self._ready(lane, "pack", src_bases)
            digest = -(-chunk.wire_bytes // WIRE_ALIGNMENT) * WIRE_ALIGNMENT  # behind the packed bytes
            scratch = lane.scratch(WIRE_ALIGNMENT if wire_on_gpu else digest + WIRE_ALIGNMENT)
            packed, digest = (wire, scratch) if wire_on_gpu else (scratch, scratch + digest)
            flag = lane.cleared_flag()
            prepared.pack(chunk, packed, stream=lane.queue, max_sms=self._max_sms, nonfinite=flag)
            if not wire_on_gpu:
                copy_bytes(wire, packed, chunk.wire_bytes, device=lane.device, stream=lane.queue)
            if summed:
                options = {"device": lane.device, "stream": lane.queue}
                checksum_on_device(packed, chunk.wire_bytes, digest, max_sms=self._max_sms, **options)
                copy_bytes(lane.digest, digest, 8, **options)
            lane.finish()
            if check and lane.flag_is_set():
                raise not_finite(self.plan.wire, "vectors of this chunk")
            return Checksum(ChecksumKind.MIX64, lane.digest_word()) if summed else None

    def unpack(
        self, chunk: Chunk, wire: int, dst_bases: np.ndarray, *, threads: int = 1, wire_on_gpu: bool = False
    ) -> None:
        """The packed bytes at address `wire`, as `pack` left them, to destination blocks."""
        with self._lanes.lane() as lane:
            prepared, packed = self._ready(lane, "unpack", dst_bases), wire
            if not wire_on_gpu:
                packed = lane.scratch(chunk.wire_bytes)
                copy_bytes(packed, wire, chunk.wire_bytes, device=lane.device, stream=lane.queue)
            prepared.unpack(chunk, packed, stream=lane.queue, max_sms=self._max_sms)

    def _ready(self, lane: Lane, side: str, bases: np.ndarray) -> PreparedCudaPackedPlan:
        """The plan with its tables on the device. The first caller sees to that, on its lane, and the others wait."""
        with self._lock:
            if side not in self._prepared:
                prepared = self._tables_of(side, bases)
                tables = self._lanes.take_tables(prepared.table_bytes, self.plan.copies)
                self._keep(tables)
                tables.upload(prepared, stream=lane.queue)
                lane.finish()
                self._prepared[side] = prepared
            while self._uploads and not self._uploads[-1].poll():
                time.sleep(_NAP_S)
            self._uploads.clear()
            return self._prepared[side]

    def _tables_of(self, side: str, bases: np.ndarray) -> PreparedCudaPackedPlan:
        """What the tables hold, made once."""
        if side not in self._made:
            given = {"src_bases" if side == "pack" else "dst_bases": bases}
            self._made[side] = PreparedCudaPackedPlan(self.plan, device=self._lanes.device, **given)
        return self._made[side]

    def _keep(self, tables: TableMemory) -> None:
        """Until `let_go`, or as long as this plan lives: each of its launches has been waited for by then."""
        self._kept.append(weakref.finalize(self, self._lanes.give_back_tables, tables))

    def let_go(self) -> None:
        """Nothing is at work and nothing more comes: other plans may have the memory of the tables. Waits for nothing:
        where a mover thread is still at `get_ready`, it goes back with the plan."""
        if self._lock.acquire(blocking=False):
            self._prepared.clear()
            self._made.clear()
            while self._kept:
                self._kept.pop()()
            self._lock.release()
