"""Leases, and the table of generation words that a peer reads one-sidedly.

The table is registered memory: a header; for each slot a word, a record position, and where the lease lies packed
ahead if it does (transfers/shelf.py); and an arena of records (block lists). A peer reads blocks first and the slot's
word after; while the word equals the ticket's lease number, every byte that was read was leased. The publisher
changes the word before it gives the blocks back. No Python of the publisher is on that path. Imports ticket.py,
kernels (for the ordered word access) and errors.
"""

from __future__ import annotations

import enum
import itertools
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvxfer import checks, kernels
from kvxfer.errors import InvalidRequest, InvalidTicket, LeaseTableFull
from kvxfer.ticket import Ticket

if TYPE_CHECKING:
    from kvxfer.node import Node

ENDED = 1 << 63  # set in a word once its lease has ended
HEADER_BYTES = 64
SLOT = np.dtype([(name, "<u8") for name in ("word", "offset", "nbytes", "ready", "shelf")] + [("reserved", "V24")])
SLOT_BYTES = SLOT.itemsize
SLOT_WORDS = struct.Struct("<5Q")  # the same five, without NumPy
_ALIGNMENT = 64


def table_bytes(slots: int, record_bytes: int) -> int:
    """Size of a lease table for `slots` leases whose records take `record_bytes` together."""
    return HEADER_BYTES + slots * SLOT_BYTES + record_bytes


class LeaseState(enum.Enum):
    """How a lease stands."""

    LIVE = "live"
    RELEASED = "released"  # every reader is done, or the publisher took it back
    EXPIRED = "expired"


class Lease:
    """The publisher's promise to keep blocks as they are. Made by `Cache.publish`.

    `released` is set once the blocks may be reused, whether the readers are done, the publisher took the lease back,
    or it ran out; `state` says which. The blocks belong to the lease until then.
    """

    def __init__(
        self,
        ticket: Ticket,
        lists: Mapping[str, np.ndarray],
        deadline: float,
        node: Node,
    ) -> None:
        self.ticket = ticket
        self.lists = dict(lists)  # int32 block ids per group
        self.released = threading.Event()
        self.state = LeaseState.LIVE
        self.deadline = deadline  # monotonic
        self.readers_done: set[int] = set()
        self._node = node
        self._callbacks: list[Callable[[Lease], None]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Lease of request {self.ticket.request_id!r}: {self.state.value}>"

    def release(self) -> None:
        """Take the lease back now; fetches that have not been confirmed fail. Idempotent, from any thread."""
        self._node.end_lease(self, LeaseState.RELEASED)

    def renew(self, ttl_s: float) -> None:
        """Let it run for `ttl_s` seconds from now, be that more or less than it had left; `Limits.max_ttl_s` at most.

        Does nothing to a lease that has ended. From any thread. Raises InvalidRequest.
        """
        self.deadline = time.monotonic() + min(checks.seconds("ttl_s", ttl_s), self._node.limits.max_ttl_s)
        self._node.watch_deadline(self.deadline)

    def add_done_callback(self, callback: Callable[[Lease], None]) -> None:
        """Call ``callback(lease)`` on the connector's progress thread once the blocks may be reused, also when it has
        ended already. While the connector closes, it is called on the thread that closes it."""
        if not callable(callback):
            raise InvalidRequest(f"a callback must be callable, got {type(callback).__name__}")
        with self._lock:
            if self.state is LeaseState.LIVE:
                self._callbacks.append(callback)
                return
        self._node.progress.run(lambda: callback(self))

    def finish(self, state: LeaseState) -> bool:
        """Mark as ended; the table's word must have been changed before. False when it had ended."""
        with self._lock:
            if self.state is not LeaseState.LIVE:
                return False
            self.state = state
            callbacks, self._callbacks = self._callbacks, []
        self.released.set()
        for callback in callbacks:
            self._node.progress.run(lambda callback=callback: callback(self))
        return True


class SlotNumbers:
    """Free slots and lease numbers. The process that issues tickets has one, with memory or without. Thread-safe."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._taken: dict[int, int] = {}  # slot: lease
        self._deadlines: dict[int, float] = {}  # of slots that issued tickets hold
        self._leases = itertools.count(1)
        self._lock = threading.Lock()

    def take(self, holds_s: float | None = None) -> tuple[int, int]:
        """A free slot and a new lease number, for `holds_s` seconds at most where given. Raises LeaseTableFull."""
        with self._lock:
            if not self._free:
                self._reclaim()
            if not self._free:
                raise LeaseTableFull(
                    f"all {self._slots} lease slots are in use: release leases, retire issued tickets, shorten ttl_s, "
                    "or raise lease_slots"
                )
            slot, lease = self._free.pop(), next(self._leases)
            self._taken[slot] = lease
            if holds_s is not None:
                self._deadlines[slot] = time.monotonic() + holds_s
            return slot, lease

    def give_back(self, slot: int, lease: int) -> None:
        """The slot may be used again. Does nothing when another process numbered the lease, or it was given back."""
        with self._lock:
            if self._taken.get(slot) == lease:
                del self._taken[slot]
                self._deadlines.pop(slot, None)
                self._free.append(slot)

    def _reclaim(self) -> None:
        now = time.monotonic()
        for slot in [slot for slot, deadline in self._deadlines.items() if deadline < now]:
            del self._deadlines[slot], self._taken[slot]
            self._free.append(slot)

    @property
    def in_use(self) -> int:
        """Slots that are taken now."""
        return len(self._taken)


class LeaseTable:
    """This process's lease table, written here and read by peers. Thread-safe."""

    def __init__(self, memory: np.ndarray, slots: int) -> None:
        """`memory` is the zeroed, registered table: uint8, of `table_bytes` bytes."""
        self.slots = slots
        self._memory = memory
        self._address = memory.ctypes.data
        self._table = memory[HEADER_BYTES : HEADER_BYTES + slots * SLOT_BYTES].view(SLOT)
        self._arena = _Arena(HEADER_BYTES + slots * SLOT_BYTES, len(memory))
        self._records: dict[int, tuple[int, int, int]] = {}  # slot: lease, offset, bytes
        self._written_later: dict[int, int] = {}  # slot: the last lease whose ready word a stream writes
        self._lock = threading.Lock()

    def publish(
        self, slot: int, lease: int, record: bytes, write_ready: Callable[[int, int], None] | None = None
    ) -> None:
        """Write the record, then the word. Raises InvalidRequest for a slot in use, LeaseTableFull.

        Readers begin once the slot's ready word holds the lease's number. ``write_ready(address, lease)`` has a stream
        write it, when the blocks' bytes are there; without it they are there now.
        """
        if not 0 <= slot < self.slots:
            raise InvalidRequest(f"slot {slot} is not in a lease table of {self.slots}; lease_slots must agree")
        with self._lock:
            if int(self._table[slot]["word"]) & ~ENDED >= lease:
                raise InvalidTicket(
                    f"lease {lease} was published here before: a ticket is good for one lease, and where another "
                    "process issues this engine's tickets, every rank publishes under them (ticket=)"
                )
            if slot in self._records:
                raise InvalidRequest(
                    f"lease slot {slot} is in use by another lease of this process: where another process issues this "
                    "engine's tickets, publish under them (ticket=)"
                )
            if not self.settled(slot):
                raise InvalidRequest(
                    f"the stream of the last lease in slot {slot} is still at work: keep the slot until it is done"
                )
            offset = self._arena.take(len(record))
            self._records[slot] = (lease, offset, len(record))
            self._memory[offset : offset + len(record)] = np.frombuffer(record, np.uint8)
            self._table[slot]["offset"] = offset
            self._table[slot]["nbytes"] = len(record)
            self._table[slot]["shelf"] = 0
            ready = self._address_of(slot, "ready")
            if write_ready is None:
                kernels.store_word(ready, lease)
            else:
                try:
                    write_ready(ready, lease)
                except BaseException:
                    del self._records[slot]
                    self._arena.give_back(offset, len(record))
                    raise
                self._written_later[slot] = lease
            kernels.store_word(self._address_of(slot, "word"), lease)

    def shelve(self, slot: int, lease: int, offset: int) -> None:
        """Say where in the shelf a live lease lies packed. Does nothing once it has ended."""
        with self._lock:
            if self._records.get(slot, (None,))[0] == lease:
                kernels.store_word(self._address_of(slot, "shelf"), offset + 1)

    def end(self, slot: int, lease: int) -> None:
        """Change the word: no read that ends after this is confirmed. Idempotent."""
        with self._lock:
            if self._records.get(slot, (None,))[0] != lease:
                return
            _, offset, nbytes = self._records.pop(slot)
            kernels.store_word(self._address_of(slot, "word"), lease | ENDED)
            self._table[slot]["shelf"] = 0
            self._arena.give_back(offset, nbytes)

    def settled(self, slot: int) -> bool:
        """Whether no stream is going to write the slot's ready word any more: the slot may be used again."""
        return int(self._table[slot]["ready"]) >= self._written_later.get(slot, 0)

    def is_awaited(self, slot: int, lease: int) -> bool:
        """Whether the lease may yet be published: the slot has held only earlier ones."""
        return 0 <= slot < self.slots and int(self._table[slot]["word"]) & ~ENDED < lease

    def _address_of(self, slot: int, field: str) -> int:
        return self._address + HEADER_BYTES + slot * SLOT_BYTES + SLOT.fields[field][1]


class _Arena:
    """First-fit allocation of byte ranges."""

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end - start)]
        self._size = end - start

    def take(self, nbytes: int) -> int:
        size = -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        raise LeaseTableFull(
            f"no room for a lease record of {nbytes} bytes in {self._size}: release leases, or raise lease_record_bytes"
        )

    def give_back(self, offset: int, nbytes: int) -> None:
        size = -(-max(1, nbytes) // _ALIGNMENT) * _ALIGNMENT
        self._free.append((offset, size))
        self._free.sort()
        merged = [self._free[0]]
        for start, length in self._free[1:]:
            last, last_length = merged[-1]
            if last + last_length == start:
                merged[-1] = (last, last_length + length)
            else:
                merged.append((start, length))
        self._free = merged
