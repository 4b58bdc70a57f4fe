"""A bounded ring of staging buffers, lent to transfers slot by slot, with back-pressure.

A transfer asks for slots and waits in line until it gets them; it never holds some while it waits for more, so
transfers cannot block each other. A slot that a peer may still be writing into stays lent until the peer has said that
it stopped, or is known to be dead.

Imports base.py (for the registered memory) and errors. Thread-safe.
"""

from __future__ import annotations

import bisect
import collections
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.backends.base import Registration
from kvxfer.errors import BufferTooSmall

if TYPE_CHECKING:
    from kvxfer.control.messages import RegionHandles

CHUNK_BYTES = 4 << 20  # measured between two processes: smaller ones pay for messages, larger ones leave the caches
GPU_CHUNK_BYTES = 32 << 20  # a GPU moves one in the time that the words about it take
POSTED_CHUNK_BYTES = 128 << 20  # where a backend has to be asked to move it, which takes calls at both ends as well
SLOTS, GPU_SLOTS = 8, 16  # chunks in flight that a transfer asks for: enough for the time that words about them take
STAGING_BYTES, GPU_STAGING_BYTES = 2 * SLOTS * CHUNK_BYTES, GPU_SLOTS * GPU_CHUNK_BYTES
UNIT_BYTES = 256 << 10  # granularity of loans


@dataclass(frozen=True, kw_only=True)
class Loan:
    """`slots` neighbouring buffers of `slot_bytes`, from byte `offset` of the ring's memory."""

    ring: StagingRing
    offset: int
    slot_bytes: int
    slots: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole loan."""
        return self.slot_bytes * self.slots

    def address(self, slot: int = 0) -> int:
        """Where a buffer begins in this process."""
        return self.ring.memory.address + self.offset + slot * self.slot_bytes

    def give_back(self) -> None:
        """The buffers may be lent again."""
        self.ring.give_back(self)


class StagingRing:
    """Staging memory in one registered piece."""

    def __init__(
        self,
        memory: Registration,
        handles: RegionHandles | None = None,
        *,
        device: str = "cpu",
        unit_bytes: int = UNIT_BYTES,
    ) -> None:
        """`handles` is what peers open it by, `device` where it lies.

        `unit_bytes` is the granularity of loans; the memory's size is a multiple of it.
        """
        self.memory, self.handles, self.device = memory, handles, device
        self.nbytes = memory.nbytes
        self._unit = unit_bytes
        self._free = [(0, memory.nbytes // unit_bytes)]  # runs of units: first and end, in order, never touching
        self._waiting: collections.deque[tuple[int, int, Callable[[Loan], None], object]] = collections.deque()
        self._lends = False  # whether some thread is granting
        self._lock = threading.Lock()

    def borrow(self, slot_bytes: int, slots: int, granted: Callable[[Loan], None]) -> object:
        """Lend `slots` buffers of at least `slot_bytes`, or fewer (at least one) where the ring is small.

        Calls `granted` at once, or later on the thread that gives buffers back. Returns a key for `forget`.
        Raises BufferTooSmall when even one buffer does not fit the whole ring.
        """
        size = self._rounded(slot_bytes)
        if size > self.nbytes:
            raise BufferTooSmall(
                f"one chunk needs a staging buffer of {size} bytes, the ring has {self.nbytes} in all: raise "
                f"staging_bytes to {size} or more"
            )
        key = object()
        with self._lock:
            self._waiting.append((size, max(1, min(slots, self.nbytes // size)), granted, key))
        self._lend()
        return key

    def borrow_now(self, nbytes: int) -> Loan | None:
        """One buffer of at least `nbytes` if there is room at this moment and nobody stands in line."""
        with self._lock:
            return None if self._waiting else self._find(self._rounded(nbytes), 1)

    def forget(self, key: object) -> None:
        """Leave the line; does nothing once granted."""
        with self._lock:
            self._waiting = collections.deque(entry for entry in self._waiting if entry[3] is not key)
        self._lend()

    def give_back(self, loan: Loan) -> None:
        """The buffers may be lent again."""
        first = loan.offset // self._unit
        end = first + loan.nbytes // self._unit
        with self._lock:
            at = bisect.bisect(self._free, (first, end))
            if at < len(self._free) and self._free[at][0] == end:
                end = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == first:
                at -= 1
                first = self._free.pop(at)[0]
            self._free.insert(at, (first, end))
        self._lend()

    @property
    def lent_bytes(self) -> int:
        """Bytes that are lent now."""
        with self._lock:
            return self.nbytes - self._unit * sum(end - first for first, end in self._free)

    @property
    def waiting(self) -> int:
        """Transfers in line."""
        with self._lock:
            return len(self._waiting)

    def _rounded(self, nbytes: int) -> int:
        """To whole units, of which a buffer has one at least."""
        return max(1, -(-nbytes // self._unit)) * self._unit

    def _lend(self) -> None:
        """Grant what can be granted. One thread at a time, and not from within: who is granted staging may give it back
        at once, and a long line of such would be as many calls within each other. What goes wrong for one is raised
        when all others were looked at."""
        mine, failure = False, None
        while True:
            try:
                if not mine:
                    with self._lock:
                        if self._lends:
                            return  # who lends looks again before it stops
                        self._lends = mine = True
                grant = self._next_grant()
                if grant is None:
                    break
                grant()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _next_grant(self) -> Callable[[], None] | None:
        with self._lock:
            loan = None
            if self._waiting:
                size, slots, granted, _ = self._waiting[0]
                loan = self._find(size, slots)
            if loan is None:
                self._lends = False
                return None
            self._waiting.popleft()
        return functools.partial(granted, loan)

    def _find(self, slot_bytes: int, slots: int) -> Loan | None:
        """The first run of free units that holds the most slots, down to one."""
        units = slot_bytes // self._unit
        most = min(slots, max((end - first for first, end in self._free), default=0) // units)
        if not most:
            return None
        at, (first, end) = next((at, run) for at, run in enumerate(self._free) if run[1] - run[0] >= most * units)
        taken = first + most * units
        self._free[at : at + 1] = [(taken, end)] if taken < end else []
        return Loan(ring=self, offset=first * self._unit, slot_bytes=slot_bytes, slots=most)
