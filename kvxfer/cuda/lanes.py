"""Lanes: what one transfer at a time needs on a device, kept and used again.

A lane is a stream, a few words in pinned memory, and memory for tables (tables.py) and packed chunks that grows and is
never given back while the lane lives.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer.cuda import quiet
from kvxfer.cuda.conveyor import Conveyor
from kvxfer.cuda.gates import Gate, Gates
from kvxfer.cuda.native import CudaError, check, native
from kvxfer.cuda.plan import prepare
from kvxfer.cuda.runtime import DeviceMemory, PinnedMemory, Stream
from kvxfer.cuda.tables import LEAST_BYTES, TableMemory
from kvxfer.plan import ROW, PlanPart, Segments

_SPIN_US = 200  # a small transfer ends within
_DOZE_US = 2000  # between two looks for an error of the device
_DOZE_S = 1.0
_NAP_US = 5  # between two looks at a word
_LAUNCHED_AT_ONCE = 6  # lanes for transfers that no thread waits for
_PRIORITY = -1  # before the engine's kernels: a lane takes few multiprocessors and somebody waits for it

_DONE, _FLAG, _SEEN, _DIGEST = 0, 16, 32, 48  # offsets of a lane's words
_WORDS_BYTES = 64


@dataclass
class Ending:
    """What a device does after the last byte of a transfer, on the transfer's stream."""

    lease_word: int = 0  # where the device reads the lease's word, or 0
    gate: Gate | None = None  # what it opens
    seen: int | None = None  # afterwards: the value of the lease's word; None where it was not read


class Lane:
    """A stream of one device, with its memory. One thread at a time."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._stream = Stream(device=device, priority=_PRIORITY)
        self._words = PinnedMemory(_WORDS_BYTES, device=device)
        self._words.array[:] = 0
        self.said = 0  # the value of the done word once everything enqueued so far is done
        self._idle = True
        self.tables = TableMemory(device)
        self._scratch: DeviceMemory | None = None
        self._outgrown: list[DeviceMemory] = []

    @property
    def queue(self) -> int:
        """The stream, for something to be enqueued on it: `finish` then waits for that."""
        self._idle = False
        return self._stream.address

    def enqueue(
        self, pairing: Any, request: int, copies: int, after: Sequence[int], ending: Ending, *, max_sms: int
    ) -> None:
        """Enqueue all that a request is: the events that it comes after, its tables, its blocks, and what `ending`
        says. `pairing` is the extension's, `request` the address of the pairs of blocks. Raises CudaError."""
        on_device = self.tables.room_for(pairing.table_bytes(request), copies)
        status = native().enqueue_blocks(
            pairing, request, self.device, self.queue, max_sms, self.tables.pinned_address, on_device, tuple(after),
            self._saying(ending),
        )  # fmt: skip
        if status:
            check(status, f"launching a transfer on device {self.device}")

    def cleared_flag(self) -> int:
        """Address of a 32-bit word that kernels set, now 0."""
        ctypes.c_uint32.from_address(self._words.address + _FLAG).value = 0
        return self._words.address + _FLAG

    def flag_is_set(self) -> bool:
        """Whether a kernel has set it. After `finish`."""
        return ctypes.c_uint32.from_address(self._words.address + _FLAG).value != 0

    @property
    def digest(self) -> int:
        """Address of 8 bytes for a checksum that a kernel has made."""
        return self._words.address + _DIGEST

    def digest_word(self) -> int:
        """What lies there. After `finish`."""
        return ctypes.c_uint64.from_address(self.digest).value

    def scratch(self, nbytes: int) -> int:
        """Address of device memory for one packed chunk."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            if self._scratch is not None:
                self._outgrown.append(self._scratch)
            self._scratch = DeviceMemory(max(LEAST_BYTES, 2 * nbytes), device=self.device)
        return self._scratch.address

    def wait_for(self, event: int) -> None:
        """Let what is enqueued from now on wait for an event, given as CUDA's handle; the host does not wait."""
        check(native().wait_for_event(self.device, self.queue, event), "letting a stream wait for an event")

    def finish(self, ending: Ending | None = None) -> None:
        """Wait until everything enqueued is done; holds no lock. With `ending`, the device sees to that first.

        Spins for a moment, then sleeps.
        """
        if self._idle and ending is None:
            return
        ending = ending or Ending()
        self.report(ending)
        self.await_all(self.said)
        self.take_down(ending)

    def await_all(self, said: int) -> None:
        """Wait until what was enqueued when `said` was that is done. Raises CudaError."""
        while not self.await_said(said, _DOZE_S):
            pass

    def report(self, ending: Ending | None = None) -> None:
        """Enqueue what says that everything before is done (`said`), and what `ending` asks for."""
        status = native().report(self.device, self._stream.address, *self._saying(ending or Ending()))
        check(status, "launching the end of a transfer")

    def has_said(self, said: int) -> bool:
        """Whether what was enqueued when `said` was that is done. Any thread."""
        return native().await_word(self._words.address + _DONE, said, 0, 0)

    def check(self) -> None:
        """CudaError where the device has failed."""
        check(native().stream_error(self.device, self._stream.address), "moving blocks")

    def await_said(self, said: int, timeout_s: float, *, nap_us: int = 0) -> bool:
        """Whether what was enqueued when `said` was that is done, for which it waits up to so long: spins for a moment
        and then sleeps, or with `nap_us` sleeps so long between looks. Any thread, also one that comes when the lane is
        used for something else. Raises CudaError where it has failed."""
        word, left_us = self._words.address + _DONE, int(timeout_s * 1e6)
        if self.has_said(said):
            return True
        spin_us = 0 if nap_us else min(_SPIN_US, left_us)
        while left_us > 0:
            doze_us = min(_DOZE_US, left_us - spin_us)
            if native().await_word(word, said, spin_us, doze_us, nap_us or _NAP_US):
                return True
            left_us -= spin_us + doze_us
            spin_us = 0
            try:
                self.check()
            except CudaError:
                if not self.has_said(said):
                    raise
        return False

    def take_down(self, ending: Ending) -> None:
        """What was enqueued last is done: keep what the device has read of the lease's word."""
        self._idle = True
        if ending.lease_word:
            ending.seen = ctypes.c_uint64.from_address(self._words.address + _SEEN).value

    def synchronise(self) -> None:
        """Wait for everything, whatever it says. Raises CudaError."""
        self._stream.synchronise()

    def close(self) -> None:
        """Free what the lane has; it is idle. May wait for the device."""
        self.tables.close()
        for memory in (self._scratch, *self._outgrown, self._words):
            if memory is not None:
                memory.close()
        self._stream.close()

    def _saying(self, ending: Ending) -> tuple[int, int, int, int, int, int]:
        """What a report is told: the lease's word and where its value goes, a gate's word and value, and the word that
        says that this lane is done, with its next value."""
        words, gate = self._words.address, ending.gate
        self.said = (self.said + 1) & 0xFFFFFFFF
        opened = (gate.address, gate.value) if gate else (0, 0)
        return ending.lease_word, words + _SEEN, *opened, words + _DONE, self.said


class Lanes:
    """The lanes of one device: as many as there are transfers at once; and its gates. Thread-safe."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.gates = Gates(device)
        self.conveyor = Conveyor(lambda: Lane(device))
        self._free: list[Lane] = []
        self._kept = 0  # lanes for mover threads
        self._made = 0  # lanes that there are
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._tables: collections.deque[TableMemory] = collections.deque()  # of packed plans that have ended
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane for the length of a ``with`` block, at the end of which all its work is done.

        A lane whose device has failed is not used again.
        """
        with self._lock:
            lane = self._free.pop() if self._free else None
            self._made += lane is None
        lane = lane or Lane(self.device)
        try:
            yield lane
        finally:
            try:
                lane.finish()
            except CudaError:
                self.lose(lane)
                raise
            self.give_back([lane])

    def take(
        self, count: int, *, spare: bool = False, otherwise: Callable[[], None] | None = None
    ) -> list[Lane] | None:
        """So many lanes; to be given back once all their work is done.

        With `spare` only free ones, and only where those that `warm` made for mover threads are left over. None where
        that cannot be, or too many are at work: then `otherwise` is called once, when one has been given back.
        """
        with self._lock:
            missing = max(0, count - len(self._free))
            if spare:
                possible = len(self._free) >= count + self._kept
            else:
                possible = not missing or self._made + missing <= max(count, self._kept + _LAUNCHED_AT_ONCE)
            if not possible:
                if otherwise is not None:
                    self._waiting.append(otherwise)
                return None
            self._made += missing
            lanes = [self._free.pop() for _ in range(count - missing)]
        return lanes + [Lane(self.device) for _ in range(missing)]

    def give_back(self, lanes: Sequence[Lane]) -> None:
        """The lanes are idle."""
        with self._lock:
            self._free += lanes
            waiting = self._waiting.popleft() if self._waiting and lanes else None
        if waiting is not None:
            waiting()

    def lose(self, lane: Lane) -> None:
        """The lane's device has failed: it is idle, and not used again."""
        with self._lock:
            self._made -= 1
            waiting = self._waiting.popleft() if self._waiting else None
        if waiting is not None:
            waiting()

    def close(self) -> None:
        """Free what is idle, here and now; or later, where a stream waits for another connector's transfer."""
        with self._lock:
            lanes, self._free = self._free, []

        def freeing() -> None:
            for lane in lanes:
                lane.close()
            self.conveyor.close()
            while self._tables:
                self._tables.pop().close()

        quiet.when_quiet(freeing)

    def take_tables(self, nbytes: int, copies: int, *, at_hand: bool = False) -> TableMemory | None:
        """Memory for the tables of a plan that several lanes carry out: some that is there and has room for them, or
        else, and not with `at_hand`, new memory, for which the device may have to be waited for."""
        for _ in range(len(self._tables)):
            with contextlib.suppress(IndexError):  # another thread has taken the last
                found = self._tables.pop()
                if found.has_room(nbytes, copies) and found.is_idle():
                    return found
                self._tables.appendleft(found)
        return None if at_hand else TableMemory(self.device)

    def give_back_tables(self, tables: TableMemory) -> None:
        """No kernel reads them any more. Any thread, also one that collects garbage: takes no lock."""
        self._tables.append(tables)

    def warm(self, lanes: int) -> None:
        """Make lanes, so many for mover threads and some for who launches without one, and load the kernels that copy:
        the first transfers need not do so then. May wait for the device."""
        self._kept = lanes
        check(native().load_report_kernel(self.device), f"loading a kernel onto device {self.device}")
        for part in _one_of_each_width():
            check(part.load_kernels(self.device), f"loading kernels onto device {self.device}")
        self.gates.give_back(_opened(self.gates.take()))
        self.conveyor.reserve()
        while len(self._tables) < lanes + _LAUNCHED_AT_ONCE:
            tables = TableMemory(self.device)
            tables.reserve()
            self._tables.append(tables)
        for _ in range(lanes + _LAUNCHED_AT_ONCE - len(self._free)):
            lane = Lane(self.device)
            lane.tables.reserve()
            with self._lock:
                self._free.append(lane)
                self._made += 1


def _opened(gate: Gate) -> Gate:
    gate.open()
    return gate


def _one_of_each_width() -> Iterable[object]:
    """Parts of one row, for which the kernels load and store 16, 8, 4, 2 and 1 bytes at a time."""
    zero, bases = np.zeros(1, np.int32), np.array([4096], np.uint64)
    for width in (16, 8, 4, 2, 1):
        rows = np.zeros(1, ROW)
        rows["heads"] = rows["channels"] = 1
        rows["unit_bytes"] = rows["src_block_stride"] = rows["dst_block_stride"] = width
        yield prepare(PlanPart(rows=rows, segments=Segments(src_block=zero, dst_block=zero)), bases, bases)
