"""Packed ahead: what is published is packed at once, so that decode reads it one-sidedly and wakes nobody.

The publisher packs a lease's blocks, in the order of its own layout, into shelf memory that peers can reach, and says
in the lease's slot where. A fetch into the same layout that asks for the same wire format reads its part of that, and
confirms by the lease's word as ever; any other fetch asks for chunks (pull.py). Where the shelf has no room, nothing is
packed ahead: a shelf is a short cut, not a promise.

Shelf memory of a lease: a header of HEADER_BYTES, then the packed bytes of the whole plan in packed order.

Imports staging, moves, workers, transfer, node, peers, formats.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.backends.base import Direction, Link
from kvxfer.errors import KvxferError, as_kvxfer_error
from kvxfer.formats import PackedJoin, PackedPlan, join_packed
from kvxfer.formats.plan import PackedPart
from kvxfer.kernels import PIECE_BYTES, PreparedPackedPlan
from kvxfer.lease import Lease, LeaseState
from kvxfer.node import Node
from kvxfer.peers.remote import Published
from kvxfer.plan import Chunk, PlanPart
from kvxfer.ticket import Ticket
from kvxfer.transfers.moves import InOrder
from kvxfer.transfers.staging import SLOTS, Loan
from kvxfer.transfers.transfer import Transfer
from kvxfer.transfers.workers import ChunkWorkers

if TYPE_CHECKING:
    from kvxfer.cache import Cache
    from kvxfer.cuda import Event
    from kvxfer.transfers.fetch import Source

_log = logging.getLogger(__name__)

HEADER_BYTES = 128
_POLL_S = 0.0005
_MAGIC = b"KVXSHELF"


def own_join(cache: Cache, wire: str) -> PackedJoin:
    """How a cache is packed ahead: for its own layout. Raises UnknownWireFormat, LayoutMismatch."""
    return join_packed([cache.layout], cache.layout, wire, src_scales=cache.scales, dst_scales=cache.scales)[0]


# --- the publisher's end ------------------------------------------------------------------------------------


def pack_ahead(node: Node, cache: Cache, lease: Lease, joined: PackedJoin, after: Event | None) -> None:
    """Begin to pack a lease that has just been published, where the shelf has room. Any thread.

    `after`: the blocks hold their bytes once this event has passed.
    """
    counts = {name: len(ids) for name, ids in lease.lists.items()}
    try:
        prepared = cache.prepare_packed(joined.plan(lease.lists, counts, tokens=lease.ticket.tokens))
        loan = node.ring("shelf").borrow_now(HEADER_BYTES + prepared.plan.wire_bytes)
    except KvxferError as error:  # a shelf that is larger than /dev/shm, say: the lease is as good without
        node.packed_ahead["failed"] += 1
        _log.warning("request %r is not packed ahead: %s", lease.ticket.request_id, error)
        return
    if loan is None:
        node.packed_ahead["no room"] += 1
    else:
        _Ahead(node, cache, lease, prepared, loan, after)


class _Ahead:
    """One lease being packed: the loan goes back once the lease has ended and nobody packs into it."""

    def __init__(
        self,
        node: Node,
        cache: Cache,
        lease: Lease,
        prepared: PreparedPackedPlan,
        loan: Loan,
        after: Event | None,
    ) -> None:
        self._node, self._cache, self._lease, self._prepared = node, cache, lease, prepared
        self._after = after
        self._loan: Loan | None = loan
        self._users = 2  # the lease and the packing
        self._lock = threading.Lock()
        lease.add_done_callback(lambda _: self._drop())
        node.pool.submit(self._pack)

    def _pack(self) -> None:
        start = self._loan.address()
        try:
            while self._after is not None and not self._after.done() and self._lease.state is LeaseState.LIVE:
                time.sleep(_POLL_S)
            address = start + HEADER_BYTES
            for chunk in self._prepared.plan.chunks(PIECE_BYTES):
                if self._lease.state is not LeaseState.LIVE:
                    return
                self._prepared.pack(
                    chunk,
                    self._cache.bases,
                    address,
                    threads=self._node.limits.copy_threads,
                    check=self._node.check_finite,
                    past_caches=True,
                )
                address += chunk.wire_bytes
            ctypes.memmove(start, _header(str(self._prepared.plan.wire)), HEADER_BYTES)
            self._node.table.shelve(self._lease.ticket.slot, self._lease.ticket.lease, self._loan.offset)
            self._node.packed_ahead["packed"] += 1
        except KvxferError as error:  # NaN in a lossy format, say: whoever fetches is told
            self._node.packed_ahead["failed"] += 1
            _log.warning("request %r was not packed ahead: %s", self._lease.ticket.request_id, error)
        finally:
            self._drop()

    def _drop(self) -> None:
        with self._lock:
            self._users -= 1
            loan, self._loan = (self._loan, None) if not self._users else (None, self._loan)
        if loan is not None:
            loan.give_back()


def _header(wire: str) -> bytes:
    return (_MAGIC + wire.encode()).ljust(HEADER_BYTES, b"\0")


# --- the reader's end ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shelved:
    """Chunks of a fetch's plan that lie packed in the publisher's shelf, each with its address there."""

    chunks: tuple[tuple[Chunk, int], ...]
    mapped: bool  # the addresses are of this process


def may_be_on_shelf(node: Node, published: Published) -> bool:
    """Whether it is worth a look: something lies there for the lease, and this side does not ask for checksums."""
    return published.shelf_offset is not None and not node.checksums


def look_on_shelf(
    node: Node,
    cache: Cache,
    source: Source,
    plan: PackedPlan,
    ticket: Ticket,
    counts: dict[str, int],
    published: Published,
) -> Shelved | None:
    """Where the bytes of a fetch's plan lie packed, or None when they do not, or not so. Raises what reading raises.

    `counts` are the publisher's blocks in each group.
    """
    remote = source.cache
    if not may_be_on_shelf(node, published):
        return None
    if remote.layout != cache.unbound_layout or remote.scales != cache.scales:
        return None
    found = source.peer.table.shelved(published.shelf_offset, HEADER_BYTES)
    if found is None or found.header != _header(str(plan.wire)):
        return None
    theirs = source.join.plan(counts, counts, tokens=ticket.tokens)
    starts = _starts(plan, theirs)
    if starts is None:
        return None
    chunk_bytes = min(node.limits.chunk_on("cpu"), max(1, plan.wire_bytes))
    chunks = [
        (chunk, found.address + HEADER_BYTES + starts[chunk.part] + _parts(plan)[chunk.part].packed_start(chunk.first))
        for chunk in plan.chunks(chunk_bytes)
    ]
    if chunks and chunks[-1][1] + chunks[-1][0].wire_bytes > found.address + found.nbytes:
        return None
    return Shelved(tuple(chunks), found.mapped)


def _parts(plan: PackedPlan) -> tuple[PlanPart, ...] | tuple[PackedPart, ...]:
    return plan.raw.parts if plan.raw is not None else plan.parts


def _starts(mine: PackedPlan, theirs: PackedPlan) -> list[int] | None:
    """For every part of `mine`, what to add to its packed offsets to find them among all of `theirs`.

    A fetch of fewer blocks (the first ones are there already) wants the last segments of a part. None where the parts
    are not alike, as when one group of several needs nothing.
    """
    ours, wholes = _parts(mine), _parts(theirs)
    if len(ours) != len(wholes):
        return None
    starts, position = [], 0
    for part, whole in zip(ours, wholes, strict=True):
        first = len(whole) - len(part)
        if first < 0 or not np.array_equal(part.rows, whole.rows):
            return None
        if not np.array_equal(_sizes(part, 0), _sizes(whole, first)):
            return None
        starts.append(position + whole.packed_start(first))
        position += whole.packed_start(len(whole))
    return starts


def _sizes(part: PlanPart | PackedPart, first: int) -> np.ndarray:
    """Packed bytes of every segment from `first` on."""
    if part.wire_start is None:
        return np.full(len(part) - first, part.wire_bytes)
    return np.diff(part.wire_start[first:])


class ShelfLeg:
    """One leg that reads packed bytes out of the publisher's shelf, through staging of this side, and scatters them.

    `moved` is called once everything is in place; what goes wrong aborts the fetch. Chunks are read and scattered on
    mover threads, all of them if need be, since the publisher has nothing to do.
    """

    def __init__(
        self,
        node: Node,
        fetch: Transfer,
        link: Link,
        prepared: PreparedPackedPlan,
        shelved: Shelved,
        dst_bases: np.ndarray,
        *,
        moved: Callable[[], None],
    ) -> None:
        self._node, self._fetch, self._link = node, fetch, link
        self._prepared, self._dst_bases, self._moved = prepared, dst_bases, moved
        self._queue = collections.deque(shelved.chunks)
        self._slot_bytes = max(chunk.wire_bytes for chunk, _ in shelved.chunks)
        self._reads = InOrder(node)
        self._arrived: collections.deque[tuple[int, Chunk]] = collections.deque()  # read, to be scattered
        self._loan: Loan | None = None
        self._line: object = None
        self._free: list[int] = []  # the last one used comes first: it may still be in the worker's cache
        self._busy = 0  # chunks that have left the queue and are not in place yet
        self._lock = threading.Lock()  # of queue, slots and what has arrived
        self._workers = ChunkWorkers(node.pool, self._take, most=node.limits.mover_threads)

    def start(self) -> None:
        """Stand in line for staging. Progress thread. Raises BufferTooSmall."""
        self._line = self._node.ring("staging").borrow(
            self._slot_bytes,
            min(SLOTS, len(self._queue)),
            lambda loan: self._node.progress.post(lambda: self._granted(loan)),
        )

    def stop(self) -> None:
        """The fetch was aborted: read nothing more. Staging goes back once what is under way has ended. Progress
        thread."""
        if self._loan is None:
            self._node.ring("staging").forget(self._line)
        self._advance()

    def _granted(self, loan: Loan) -> None:
        self._loan, self._free = loan, list(range(loan.slots))
        self._advance()

    def _advance(self) -> None:
        """Progress thread."""
        if self._loan is None:
            return
        self._workers.wake()
        with self._lock:
            ended = not self._busy and (not self._queue or self._stopping)
        if ended:
            loan, self._loan = self._loan, None
            self._queue.clear()
            loan.give_back()
            if not self._fetch.stopping:
                self._moved()

    @property
    def _stopping(self) -> bool:
        return self._fetch.stopping or self._fetch.done()

    def _take(self) -> Callable[[], None] | None:
        """The reading of the next chunk into a free slot, or the scattering of one that has arrived. Any thread."""
        with self._lock:
            if self._queue and self._free and not self._stopping:
                self._busy += 1
                return functools.partial(self._read, self._free.pop(), *self._queue.popleft())
            if self._arrived:
                return functools.partial(self._scatter, *self._arrived.popleft())
        return None

    def _read(self, slot: int, chunk: Chunk, remote: int) -> None:
        """Mover thread."""
        try:
            run = np.array([[self._loan.address(slot), remote, chunk.wire_bytes]], np.uint64)
            operation = self._link.post(Direction.READ, run)
            if not operation.poll():
                self._reads.add(operation, lambda error: self._has_arrived(slot, chunk, error))
                return
        except KvxferError as error:
            self._ended(slot, error)
            return
        self._scatter(slot, chunk)

    def _has_arrived(self, slot: int, chunk: Chunk, error: KvxferError | None) -> None:
        """Progress thread."""
        if error is not None:
            self._ended(slot, error)
            return
        with self._lock:
            self._arrived.append((slot, chunk))
        self._workers.wake()

    def _scatter(self, slot: int, chunk: Chunk) -> None:
        """Mover thread."""
        error = None
        if self._fetch.hold():
            try:
                address = self._loan.address(slot)
                self._prepared.unpack(chunk, address, self._dst_bases, threads=self._node.limits.copy_threads)
                self._fetch.advance(chunk.wire_bytes)
            except Exception as failure:  # whatever it is, the fetch must end
                error = as_kvxfer_error(failure)
            finally:
                self._fetch.drop()
        self._ended(slot, error)

    def _ended(self, slot: int, error: KvxferError | None) -> None:
        """A slot's chunk is in place, or never will be. Any thread."""
        if error is not None:
            self._fetch.abort(error)
        with self._lock:
            self._free.append(slot)
            self._busy -= 1
            last = not self._busy and (not self._queue or self._stopping)
        if last:
            self._node.progress.post(self._advance)


def unpack_mapped(
    node: Node, fetch: Transfer, prepared: PreparedPackedPlan, shelved: Shelved, dst_bases: np.ndarray
) -> bool:
    """Scatter out of a shelf that has an address here. False when the fetch was told to stop before the end."""
    for chunk, address in shelved.chunks:
        if fetch.stopping or fetch.done():
            return False
        prepared.unpack(chunk, address, dst_bases, threads=node.limits.copy_threads)
        fetch.advance(chunk.wire_bytes)
    return True
