"""The packed way: chunks flow through staging that the receiving side lends, with credits.

`PackedSource` gathers chunks into free staging slots and says so; `PackedSink` scatters them and gives the slots back
as credits. Several chunks are in flight, so gathering and scattering overlap. Both ends cut the same plan into the
same chunks; a chunk is named by its stage (one for the whole plan, or one a layer) and its index. A header
(formats/header.py) comes with the word of it, by which the sink checks that both ends mean the same plan.

Staging that is mapped is gathered into in place. Where the backend gives it no address here, a chunk is gathered into
the outbox of this side and written from there with one operation.

State lives on the progress thread. The CPU's kernels run on mover threads; what a GPU packs and unpacks in its own
memory the progress thread launches, and looks at like at an operation of a backend. Imports kernels, staging, moves,
control/messages.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.backends.base import Direction, Operation
from kvxfer.control.messages import Chunks, Credit, PackedOffer, Placed
from kvxfer.errors import BackendError, KvxferError, as_kvxfer_error
from kvxfer.formats import ChunkHeader
from kvxfer.kernels import PreparedPackedPlan
from kvxfer.peers.remote import Peer, RemoteCache
from kvxfer.plan import Chunk
from kvxfer.transfers.moves import InOrder
from kvxfer.transfers.staging import GPU_SLOTS, SLOTS, Loan, StagingRing
from kvxfer.transfers.transfer import Transfer
from kvxfer.transfers.workers import ChunkWorkers, workers_for

if TYPE_CHECKING:
    from kvxfer.cache import Cache
    from kvxfer.node import Node


_LAUNCHED_AT_ONCE = 2  # chunks, by one call on the progress thread: a GPU has enough to do meanwhile


def staging_for(node: Node, peer: Peer, cache: Cache, remote: RemoteCache) -> StagingRing:
    """Where chunks for a cache of this side come in: on its GPU where the other side can write there, else in host
    memory.

    It can where the backend moves memory of GPUs one-sidedly, or gives one GPU's memory an address on another, as seen
    of the peer's cache.
    """
    reaches = "cuda" in peer.link.one_sided_devices or (remote.device == "cuda" and not remote.ways["mapped"])
    on_gpu = cache.device != "cpu" and reaches and not node.checksums
    return node.ring("staging", cache.device if on_gpu else "cpu")


def borrow(
    node: Node, peer: Peer, ring: StagingRing, total: int, largest: int, granted: Callable[[Loan], None]
) -> Callable[[], None]:
    """Ask for the staging that a receiving side needs for `total` bytes in segments of up to `largest`: as many chunks
    as pay, and no more than there are bytes.

    `granted` is called on this thread, or later on the one that gives staging back. Returns what to call to leave the
    line. Raises BufferTooSmall.
    """
    posted = ring.device != "cpu" and "cuda" in peer.link.one_sided_devices
    chunk = min(node.limits.chunk_on(ring.device, posted=posted), peer.outbox_bytes(ring.device), ring.nbytes)
    slot_bytes = max(1, largest, min(chunk, total))
    slots = min(SLOTS if ring.device == "cpu" else GPU_SLOTS, -(-total // slot_bytes) + 1)

    return functools.partial(ring.forget, ring.borrow(slot_bytes, slots, granted))


def offer(node: Node, loan: Loan, wire: str) -> PackedOffer:
    """What the sending side is told of a loan."""
    return PackedOffer(
        staging=loan.ring.handles,
        offset=loan.offset,
        slot_bytes=loan.slot_bytes,
        slots=loan.slots,
        wire=wire,
        checksums=node.checksums,
        on_gpu=loan.ring.device != "cpu",
    )


def together(slots: int) -> int:
    """How many chunks of a loan are announced, or given back, at once: a message wakes threads at both ends, and must
    come so long before the other end runs out of work that nobody waits for a thread that is late."""
    return max(1, slots // 4)


class PackedSource:
    """The side that gathers. `written` is called once, on the progress thread, with an error or None."""

    def __init__(
        self,
        node: Node,
        peer: Peer,
        transfer: int,
        stages: Sequence[PreparedPackedPlan],
        cache: Cache,
        offer: PackedOffer,
        *,
        written: Callable[[KvxferError | None], None],
    ) -> None:
        """Raises BackendError for staging that cannot be reached, or is too small."""
        staging = peer.open_region(offer.staging)
        needed = max((plan.plan.largest_segment_bytes for plan in stages), default=0)
        if offer.slots < 1 or offer.slot_bytes < needed or offer.offset < 0:
            raise BackendError(f"the peer lends {offer.slots} slots of {offer.slot_bytes} bytes; {needed} are needed")
        if offer.offset + offer.slots * offer.slot_bytes > staging.nbytes:
            raise BackendError(f"the peer lends staging beyond its {staging.nbytes} bytes")
        self._outbox: StagingRing | None = None
        self._packs, self._writes = InOrder(node), InOrder(node)
        if staging.mapped_address is None:
            self._outbox = node.ring("outbox", cache.device if offer.on_gpu else "cpu")
            if offer.slot_bytes > self._outbox.nbytes:
                raise BackendError(
                    f"the peer lends slots of {offer.slot_bytes} bytes, more than the {self._outbox.nbytes} of this "
                    "side's outbox: raise staging_bytes here, or lower chunk_bytes there"
                )
        self._node, self._peer, self._transfer = node, peer, transfer
        self._stages = stages
        self._src_bases = cache.bases
        self._staging, self._offer = staging, offer
        # Whether a GPU packs by itself what this thread launches, or mover threads do.
        self._launches = offer.on_gpu and not offer.checksums and all(stage.launches for stage in stages)
        self._written: Callable[[KvxferError | None], None] | None = written
        # The one given back longest ago is used first: what the other end has just read is in its processor's caches,
        # and to take line by line from there costs several times what the copy does.
        self._free = collections.deque(range(offer.slots))
        self._lent: set[int] = set()  # slots that hold a chunk the peer has not given back
        self._queue: collections.deque[tuple[int, int, Chunk]] = collections.deque()
        self._unqueued = len(stages)
        self._under_way = 0  # chunks that have left the queue and were not announced to the peer yet
        self._ended: list[tuple[Placed, KvxferError | None]] = []  # of these, which are written or have failed
        self._lock = threading.Lock()  # of free slots, queue, and what is under way
        self._workers = ChunkWorkers(node.pool, self._take, most=workers_for(node.limits))
        self._stopped: KvxferError | None = None

    def queue_stage(self, stage: int) -> None:
        """The stage's bytes are there: gather it."""
        try:
            ready = not self._launches or self._stages[stage].is_ready("pack", self._src_bases)
        except Exception as failure:
            self.stop(as_kvxfer_error(failure))
            return
        if ready:
            self._enqueue(stage)
        else:
            self._node.pool.submit(lambda: self._get_ready(stage))

    def _get_ready(self, stage: int) -> None:
        """Have on the GPU what launches need. Mover thread."""
        try:
            self._stages[stage].get_ready("pack", self._src_bases)
        except Exception as failure:
            error = as_kvxfer_error(failure)
            self._node.progress.post(lambda: self.stop(error))
        else:
            self._node.progress.post(lambda: self._enqueue(stage))

    def _enqueue(self, stage: int) -> None:
        self._unqueued -= 1
        if self._stopped is None:  # else the peer has been told that nothing more is written
            chunks = self._stages[stage].plan.chunks(self._offer.slot_bytes)
            with self._lock:
                self._queue.extend((stage, index, chunk) for index, chunk in enumerate(chunks))
        self._advance()

    def credit(self, slots: Sequence[int]) -> None:
        """The peer gives slots back."""
        for slot in slots:
            if slot not in self._lent:
                raise BackendError(f"the peer gave back slot {slot}, which it did not hold")
            self._lent.discard(slot)
        with self._lock:
            self._free.extend(slots)
        self._advance()

    def stop(self, error: KvxferError) -> None:
        """Gather nothing more; `written` is called when what is under way has ended."""
        self._halt(error)
        self._advance()

    def _halt(self, error: KvxferError) -> None:
        if self._stopped is None:
            self._stopped = error
            with self._lock:
                self._queue.clear()

    def _advance(self) -> None:
        self._announce()
        if self._launches:
            for _ in range(_LAUNCHED_AT_ONCE):
                if (gather := self._take()) is None:
                    break
                gather()
            else:  # the others after a look at what has ended or come in
                self._node.progress.post(self._advance)
        else:
            self._workers.wake()
        with self._lock:
            finished = not self._queue and not self._under_way and (self._stopped is not None or not self._unqueued)
        if finished and self._written is not None:
            written, self._written = self._written, None
            for stage in self._stages:
                stage.let_go()
            written(self._stopped)

    def _take(self) -> Callable[[], None] | None:
        """The gathering of the next chunk into a free slot. Any thread."""
        with self._lock:
            if not self._queue or not self._free:
                return None
            self._under_way += 1
            return functools.partial(self._gather, self._free.popleft(), *self._queue.popleft())

    def _gather(self, slot: int, stage: int, index: int, chunk: Chunk) -> None:
        """A chunk into a slot. Mover thread, or the progress thread where a GPU packs by itself."""
        at = self._offer.offset + slot * self._offer.slot_bytes

        def ended(header: bytes, error: KvxferError | None, announced: int = 0) -> None:  # any thread
            with self._lock:
                self._ended.append((Placed(stage, index, slot, header, announced), error))
                most = together(self._offer.slots)
                others_follow = self._free or len(self._ended) < self._under_way
                # Towards the end the other side is told of each, so that little is left to do after the last one.
                can_wait = others_follow and len(self._ended) < most <= len(self._queue)
            if error is not None or not can_wait:
                self._node.progress.post(self._advance)

        if self._outbox is None:
            self._pack(stage, index, chunk, self._staging.mapped_address + at, ended)
        else:
            self._through_outbox(stage, index, chunk, self._staging.remote_address + at, ended)

    def _announce(self) -> None:
        """Tell the peer of the chunks that have been written."""
        with self._lock:
            ended, self._ended = self._ended, []
            self._under_way -= len(ended)
        for _, error in ended:
            if error is not None:
                self._halt(error)
        if self._stopped is None and ended:
            self._lent.update(placed.slot for placed, _ in ended)
            self._peer.session.send(Chunks(transfer=self._transfer, placed=tuple(placed for placed, _ in ended)))

    def _through_outbox(
        self,
        stage: int,
        index: int,
        chunk: Chunk,
        remote: int,
        ended: Callable[[bytes, KvxferError | None, int], None],
    ) -> None:
        """Gather into memory of this side and write that into the peer's, `remote`. `ended` is called once, with what
        the peer's link knows the operation by, if it does."""

        def pack(loan: Loan) -> None:
            if self._stopped is not None:
                written(loan, b"", self._stopped)
                return
            if self._launches and self._peer.link.posts_behind:
                self._pack_and_write(stage, index, chunk, loan.address(), remote, functools.partial(written, loan))
                return

            def packed(header: bytes, error: KvxferError | None) -> None:
                if error is not None:
                    written(loan, header, error)
                elif self._node.progress.is_current and not self._peer.link.posts_at_once:
                    self._node.pool.submit(lambda: write(loan, header))
                else:
                    write(loan, header)

            self._pack(stage, index, chunk, loan.address(), packed)

        def write(loan: Loan, header: bytes) -> None:
            try:
                run = np.array([[loan.address(), remote, chunk.wire_bytes]], np.uint64)
                operation = self._peer.link.post(Direction.WRITE, run)
                if operation.poll():
                    written(loan, header, None, operation.announced)
                else:
                    self._writes.add(operation, lambda failure: written(loan, header, failure, operation.announced))
            except Exception as failure:
                written(loan, header, as_kvxfer_error(failure))

        def written(loan: Loan, header: bytes, error: KvxferError | None, announced: int = 0) -> None:
            loan.give_back()
            ended(header, error, announced)

        def granted(loan: Loan) -> None:
            if self._launches:
                self._node.progress.post(lambda: pack(loan))
            else:
                self._node.pool.submit(lambda: pack(loan))

        loan = self._outbox.borrow_now(chunk.wire_bytes)
        if loan is not None:
            pack(loan)
        else:  # behind others, who may be waiting for peers
            self._outbox.borrow(chunk.wire_bytes, 1, granted)

    def _pack_and_write(
        self,
        stage: int,
        index: int,
        chunk: Chunk,
        address: int,
        remote: int,
        written: Callable[[bytes, KvxferError | None, int], None],
    ) -> None:
        """A chunk to `address`, and from there to the peer's `remote`, without a look at it in between: the link's
        stream waits for the kernel's."""
        prepared, header = self._stages[stage], b""
        try:
            header = prepared.plan.header(index, chunk).encode()
            packed = prepared.launch_pack(chunk, address, check=self._node.check_finite, marked=True)
        except Exception as failure:
            written(header, as_kvxfer_error(failure), 0)
            return
        run = np.array([[address, remote, chunk.wire_bytes]], np.uint64)
        both = _PackedAndWritten(packed, lambda: self._peer.link.post(Direction.WRITE, run, after=packed.event))
        self._writes.add(both, lambda error: written(header, error, both.announced))

    def _pack(
        self,
        stage: int,
        index: int,
        chunk: Chunk,
        address: int,
        then: Callable[[bytes, KvxferError | None], None],
    ) -> None:
        """A chunk to `address`. `then` is called once, here or on the progress thread, with the chunk's header or with
        what went wrong: whatever it is, the peer waits to hear."""
        prepared = self._stages[stage]
        try:
            if self._launches:
                header = prepared.plan.header(index, chunk).encode()
                packed = prepared.launch_pack(chunk, address, check=self._node.check_finite)
                self._packs.add(packed, lambda error: then(header, error))
                return
            on_gpu = self._offer.on_gpu if self._outbox is None else self._outbox.device != "cpu"
            made = prepared.pack(
                chunk,
                self._src_bases,
                address,
                threads=self._node.limits.copy_threads,
                check=self._node.check_finite,
                summed=self._offer.checksums,
                past_caches=self._outbox is None,
                wire_on_gpu=on_gpu,
            )
            header = prepared.plan.header(index, chunk, made).encode()
        except Exception as failure:
            then(b"", as_kvxfer_error(failure))
        else:
            then(header, None)


class _PackedAndWritten(Operation):
    """A kernel, and a write behind it. Ends when neither is at work any more."""

    def __init__(self, packed: Operation, post: Callable[[], Operation]) -> None:
        self._packed = packed
        self._write: Operation | None = None
        self._failure: Exception | None = None
        try:
            self._write = post()
            self.announced = self._write.announced
        except Exception as failure:
            self._failure = failure

    def poll(self) -> bool:
        try:
            if self._write is not None and not self._write.poll():
                return False
        except Exception as failure:
            self._failure = failure
        self._write = None
        if not self._packed.poll():
            return False
        if self._failure is not None:
            raise self._failure
        return True


class _Unpacking(Operation):
    """A chunk that is on its way, and its unpacking: behind it on its link's stream, or once it has come."""

    def __init__(self, arrival: Operation, unpack_on: Callable[[int], bool], launch: Callable[[], Operation]) -> None:
        self._arrival, self._unpack_on, self._launch = arrival, unpack_on, launch
        self._unpacked: Operation | None = None

    def poll(self) -> bool:
        if self._unpacked is None:
            self._unpacked = self._arrival.behind(self._unpack_on)
        if self._unpacked is None and self._arrival.poll():
            self._unpacked = self._launch()
        return self._unpacked is not None and self._unpacked.poll()


class PackedSink:
    """The side that scatters. `complete` is called once, on the progress thread, when every chunk is in place.

    `transfer` is held while a chunk is being scattered, and aborted when one cannot be. `dropped` is called after each.
    """

    def __init__(
        self,
        node: Node,
        peer: Peer,
        transfer_id: int,
        transfer: Transfer,
        stages: Sequence[PreparedPackedPlan],
        dst_bases: np.ndarray,
        loan: Loan,
        *,
        dropped: Callable[[], None],
        complete: Callable[[], None],
    ) -> None:
        self._node, self._peer, self._id, self._transfer = node, peer, transfer_id, transfer
        self._stages = stages
        self._dst_bases = dst_bases
        self._loan = loan
        self._dropped, self._complete = dropped, complete
        self._expected = {
            (stage, index): chunk
            for stage, plan in enumerate(stages)
            for index, chunk in enumerate(plan.plan.chunks(loan.slot_bytes))
        }
        self._left = len(self._expected)
        self._filled: set[int] = set()  # slots that the peer may not write into
        self._arrivals = InOrder(node)  # of chunks that are on their way
        self._unpacks = InOrder(node)  # by a GPU, of chunks that this thread has launched
        self._ready: collections.deque[Callable[[], None]] = collections.deque()  # to be scattered
        self._completed = False
        self._scattering = 0  # these, and those that are being
        self._ended: list[tuple[int, KvxferError | None]] = []  # slots whose chunks are in place, or have failed
        self._lock = threading.Lock()  # of the three
        self._workers = ChunkWorkers(node.pool, self._take, most=workers_for(node.limits))

    @property
    def busy(self) -> bool:
        """Whether a chunk is being scattered out of the staging."""
        return self._scattering > 0

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is in place, or there is none."""
        return not self._left

    def let_go(self) -> None:
        """No chunk comes any more, and none is being scattered."""
        for stage in self._stages:
            stage.let_go()

    def take(self, message: Chunks) -> None:
        """Chunks lie in slots: scatter them. Raises BackendError for one that cannot be."""
        for placed in message.placed:
            self._take_in(placed)

    def _take_in(self, placed: Placed) -> None:
        if not 0 <= placed.slot < self._loan.slots or placed.slot in self._filled:
            raise BackendError(f"the peer filled staging slot {placed.slot}, which is not its to fill")
        chunk = self._expected.pop((placed.stage, placed.index), None)
        if chunk is None:
            raise BackendError(f"the peer sent chunk {placed.index} of stage {placed.stage}, which is not awaited")
        address = self._loan.address(placed.slot)
        arrival = self._peer.link.arrival(address, placed.announced) if placed.announced else None
        if not self._transfer.hold():
            return
        self._filled.add(placed.slot)
        with self._lock:
            self._scattering += 1

        def arrived(error: KvxferError | None) -> None:
            if error is not None:
                self._scattered(placed.slot, error)
                return
            if not self._launch(placed, chunk):
                with self._lock:
                    self._ready.append(functools.partial(self._scatter, placed, chunk))
                self._workers.wake()

        if arrival is None:
            arrived(None)
        elif not self._launch(placed, chunk, arrival):
            self._arrivals.add(arrival, arrived)

    def _take(self) -> Callable[[], None] | None:
        return self._ready.popleft() if self._ready else None

    def _launch(self, placed: Placed, chunk: Chunk, arrival: Operation | None = None) -> bool:
        """Have a GPU unpack the chunk by itself, once it has come; False where a mover thread has to see to it."""
        stage = self._stages[placed.stage]
        try:
            on_gpu = stage.launches and self._loan.ring.device != "cpu"
            if not on_gpu or not stage.is_ready("unpack", self._dst_bases):
                return False
            self._check(placed, chunk)
            address = self._loan.address(placed.slot)
            launch = functools.partial(stage.launch_unpack, chunk, address)
            if arrival is None:
                unpacked = launch()
            else:
                unpacked = _Unpacking(arrival, functools.partial(stage.unpack_on, chunk, address), launch)
                unpacked.poll()  # enqueues at once what can be: later only the oldest is looked at
        except Exception as failure:  # whatever it is, the transfer must end
            self._scattered(placed.slot, as_kvxfer_error(failure))
        else:
            self._unpacks.add(unpacked, lambda error: self._unpacked(placed, chunk, error))
        return True

    def _scatter(self, placed: Placed, chunk: Chunk) -> None:
        """Mover thread."""
        error, on_gpu = None, self._loan.ring.device != "cpu"
        try:
            self._check(placed, chunk)
            address, threads = self._loan.address(placed.slot), self._node.limits.copy_threads
            prepared = self._stages[placed.stage]
            prepared.unpack(chunk, address, self._dst_bases, threads=threads, wire_on_gpu=on_gpu)
        except Exception as failure:  # whatever it is, the transfer must end
            error = as_kvxfer_error(failure)
        self._unpacked(placed, chunk, error)

    def _check(self, placed: Placed, chunk: Chunk) -> None:
        """Whether a slot's header is the one that this end expects."""
        expected = self._stages[placed.stage].plan.header(placed.index, chunk)
        on_gpu = self._loan.ring.device != "cpu"
        packed = None if on_gpu else _view(self._loan.address(placed.slot), chunk.wire_bytes)
        ChunkHeader.decode(placed.header).check(packed, expected=expected)

    def _unpacked(self, placed: Placed, chunk: Chunk, error: KvxferError | None) -> None:
        if error is None:
            self._transfer.advance(chunk.wire_bytes)
        self._scattered(placed.slot, error)

    def _scattered(self, slot: int, error: KvxferError | None) -> None:
        """A slot's chunk is in place, or never will be. Any thread."""
        if error is not None:
            self._transfer.abort(error)
        with self._lock:
            self._scattering -= 1
            self._ended.append((slot, error))
            self._left -= error is None
            due = not self._left or error is not None or len(self._ended) >= together(self._loan.slots)
        self._transfer.drop()
        if due or self._transfer.stopping or self._transfer.done():
            self._node.progress.post(self._give_credit)

    def _give_credit(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        self._filled.difference_update(slot for slot, _ in ended)
        slots = tuple(slot for slot, error in ended if error is None)
        if slots and self._expected:
            self._peer.session.send(Credit(transfer=self._id, slots=slots))
        if not self._left and not self._completed:
            self._completed = True
            self._complete()
        self._dropped()


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
