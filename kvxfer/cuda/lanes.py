"""Lanes: what one transfer at a time needs on a device, kept and used again.

A lane is a stream, a few words in pinned memory, and memory for plan tables and packed chunks that grows and is never
given back while the lane lives: freeing memory waits for the device, and a stream of the engine's may in turn be
waiting for this very transfer (`Transfer.wait_on`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvxfer.cuda.gates import Gate, Gates
from kvxfer.cuda.native import check, native
from kvxfer.cuda.packed import PreparedCudaPackedPlan
from kvxfer.cuda.plan import PreparedCudaPlan, prepare
from kvxfer.cuda.runtime import DeviceMemory, PinnedMemory, Stream
from kvxfer.formats import PackedPlan
from kvxfer.plan import ROW, PlanPart, Segments, TransferPlan

_SPIN_US = 200  # a small transfer ends within
_DOZE_US = 2000  # between two looks for an error of the device
_LEAST_BYTES = 1 << 20
_IN_PLACE_COPIES = 1024  # tables of up to as many copies are read from pinned memory, without being copied first
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
        self._said = 0  # the value of the done word when everything enqueued so far is done
        self._idle = True
        self._tables: DeviceMemory | None = None
        self._pinned: PinnedMemory | None = None
        self._scratch: DeviceMemory | None = None
        self.held: PreparedCudaPackedPlan | None = None  # whose tables lie in this lane's memory
        self.holds_for: object = None
        self._outgrown: list[DeviceMemory | PinnedMemory] = []

    @property
    def queue(self) -> int:
        """The stream, for something to be enqueued on it: `finish` then waits for that."""
        self._idle = False
        return self._stream.address

    def upload(self, prepared: PreparedCudaPlan | PreparedCudaPackedPlan) -> None:
        """Enqueue a plan's tables into this lane's memory; an earlier plan's are gone.

        Small ones stay in pinned memory, where kernels read them.
        """
        self.held = self.holds_for = None
        nbytes = prepared.table_bytes
        if self._pinned is None or self._pinned.nbytes < nbytes:
            self._retire(self._pinned)
            self._pinned = PinnedMemory(max(_LEAST_BYTES, 2 * nbytes), device=self.device)
        memory = self._pinned.address
        if _copies_of(prepared.plan) > _IN_PLACE_COPIES:
            self._tables = self._grown(self._tables, nbytes)
            memory = self._tables.address
        prepared.upload(stream=self.queue, memory=memory, pinned=self._pinned.array)

    def hold(self, key: object, prepared: PreparedCudaPackedPlan) -> None:
        """Remember what was uploaded, and for whom, until the next `upload`."""
        self.held, self.holds_for = prepared, key

    def reserve(self) -> None:
        """Have memory for the tables and chunks of ordinary transfers."""
        self._pinned = self._pinned or PinnedMemory(_LEAST_BYTES, device=self.device)
        self._tables = self._grown(self._tables, _LEAST_BYTES)

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
        self._scratch = self._grown(self._scratch, nbytes)
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
        self._report(ending)
        words, spin_us = self._words.address, _SPIN_US
        while not native().await_word(words + _DONE, self._said, spin_us, _DOZE_US):
            check(native().stream_error(self.device, self._stream.address), "moving blocks")
            spin_us = 0
        self._idle = True
        if ending is not None and ending.lease_word:
            ending.seen = ctypes.c_uint64.from_address(words + _SEEN).value

    def _report(self, ending: Ending | None) -> None:
        ending = ending or Ending()
        words, gate = self._words.address, ending.gate
        self._said = (self._said + 1) & 0xFFFFFFFF
        status = native().report(
            self.device,
            self._stream.address,
            ending.lease_word,
            words + _SEEN,
            gate.address if gate else 0,
            gate.value if gate else 0,
            words + _DONE,
            self._said,
        )
        check(status, "launching the end of a transfer")

    def _grown(self, memory: DeviceMemory | None, nbytes: int) -> DeviceMemory:
        if memory is None or memory.nbytes < nbytes:
            self._retire(memory)
            return DeviceMemory(max(_LEAST_BYTES, 2 * nbytes), device=self.device)
        return memory

    def _retire(self, memory: DeviceMemory | PinnedMemory | None) -> None:
        if memory is not None:
            self._outgrown.append(memory)


class Lanes:
    """The lanes of one device: as many as there are transfers at once; and its gates. Thread-safe."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.gates = Gates(device)
        self._free: list[Lane] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane for the length of a ``with`` block, at the end of which all its work is done.

        A lane whose device has failed is not used again.
        """
        with self._lock:
            lane = self._free.pop() if self._free else None
        lane = lane or Lane(self.device)
        try:
            yield lane
        finally:
            lane.finish()
            with self._lock:
                self._free.append(lane)

    def warm(self, lanes: int) -> None:
        """Make lanes, and load the kernels that copy, so that the first transfers need not. May wait for the device."""
        check(native().load_report_kernel(self.device), f"loading a kernel onto device {self.device}")
        for part in _one_of_each_width():
            check(part.load_kernels(self.device), f"loading kernels onto device {self.device}")
        self.gates.give_back(_opened(self.gates.take()))
        for _ in range(lanes - len(self._free)):
            lane = Lane(self.device)
            lane.reserve()
            with self._lock:
                self._free.append(lane)


def _copies_of(plan: TransferPlan | PackedPlan) -> int:
    """Rows x segments."""
    plan = getattr(plan, "raw", None) or plan
    return sum(len(part.rows) * len(part) for part in plan.parts)


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
