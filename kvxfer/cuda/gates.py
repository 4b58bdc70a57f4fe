"""Gates: words in pinned memory that streams wait for, opened by a device or by the host.

A gate is closed until its word has reached its value. Words only grow, so a gate may be taken again while streams that
waited for its earlier value are still on their way to it.

Whoever takes a gate opens it. Should that fail, because a call of CUDA's waits for the very stream that waits for the
gate, a thread opens it at its deadline: a stream is never stopped for good.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import threading
import time
from typing import Any

from kvxfer.cuda import quiet
from kvxfer.cuda.native import check, native
from kvxfer.cuda.runtime import PinnedMemory, stream_address

_STRIDE = 64  # a cache line each
_PAGE_BYTES = 4096
_NOT_SUPPORTED = 801


class Gate:
    """One closed gate. `value` is what its word has once it is open."""

    __slots__ = ("address", "device", "value")

    def __init__(self, address: int, device: int) -> None:
        self.address, self.device, self.value = address, device, 1

    def open(self) -> None:
        """Open it from the host; the device may do the same. Idempotent."""
        ctypes.c_uint32.from_address(self.address).value = self.value
        quiet.streams_pass(self)

    def is_open(self) -> bool:
        """Whether streams pass."""
        return native().await_word(self.address, self.value, 0, 0)

    def hold(self, stream: Any) -> None:
        """Let a stream, as `stream_address` takes it, wait until the gate is open; the host does not wait."""
        address = stream_address(stream)
        quiet.stream_waits(self)
        status = native().stream_wait_word(self.device, address, self.address, self.value)
        if status == _NOT_SUPPORTED:
            status = native().stream_wait_word_on_host(self.device, address, self.address, self.value)
        if status:
            quiet.stream_goes_on(self)
        check(status, "letting a stream wait for a transfer")


class Gates:
    """The gates of one device. Thread-safe."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._pages: list[PinnedMemory] = []
        self._free: list[Gate] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._due: list[tuple[float, int, int, Gate]] = []
        self._order = itertools.count()
        self._watch: threading.Thread | None = None

    def take(self) -> Gate:
        """A closed gate."""
        with self._lock:
            if self._free:
                return self._free.pop()
        page = PinnedMemory(_PAGE_BYTES, device=self.device)  # may take long, and others open gates meanwhile
        page.array[:] = 0
        starts = range(page.address, page.address + _PAGE_BYTES, _STRIDE)
        with self._lock:
            self._pages.append(page)
            self._free += [Gate(start, self.device) for start in starts]
            return self._free.pop()

    def give_back(self, gate: Gate) -> None:
        """The gate is open and nobody will open it again: it may be taken for something else."""
        quiet.streams_pass(gate)
        with self._lock:
            gate.value = (gate.value + 1) & 0xFFFFFFFF
            self._free.append(gate)

    def open_by(self, gate: Gate, deadline: float) -> None:
        """Open the gate at a monotonic time if it has not been given back by then."""
        with self._lock:
            heapq.heappush(self._due, (deadline, next(self._order), gate.value, gate))
            if self._watch is None:
                self._watch = threading.Thread(target=self._open_overdue, name="kvxfer-gates", daemon=True)
                self._watch.start()
            elif self._due[0][3] is gate:
                self._changed.notify()

    def close(self) -> None:
        """Open what is still watched, and end the thread; idempotent."""
        with self._lock:
            self._due = [(float("-inf"), *rest) for _, *rest in self._due]
            watch, _ = self._watch, self._changed.notify()
        if watch is not None:
            watch.join(1.0)

    def _open_overdue(self) -> None:
        with self._lock:
            while self._due:
                deadline, _, value, gate = self._due[0]
                left = deadline - time.monotonic()
                if left > 0 and gate.value == value:
                    self._changed.wait(left)
                    continue
                heapq.heappop(self._due)
                if gate.value == value:
                    gate.open()
            self._watch = None
