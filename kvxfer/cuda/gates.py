"""Gates: words in pinned memory that streams wait for, opened by a device or by the host.

A gate is closed until its word has reached its value. Words only grow, so a gate may be taken again while streams that
waited for its earlier value are still on their way to it.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

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

    def is_open(self) -> bool:
        """Whether streams pass."""
        return native().await_word(self.address, self.value, 0)

    def hold(self, stream: Any) -> None:
        """Let a stream, as `stream_address` takes it, wait until the gate is open; the host does not wait."""
        address = stream_address(stream)
        status = native().stream_wait_word(self.device, address, self.address, self.value)
        if status == _NOT_SUPPORTED:
            status = native().stream_wait_word_on_host(self.device, address, self.address, self.value)
        check(status, "letting a stream wait for a transfer")


class Gates:
    """The gates of one device. Thread-safe."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._pages: list[PinnedMemory] = []
        self._free: list[Gate] = []
        self._lock = threading.Lock()

    def take(self) -> Gate:
        """A closed gate."""
        with self._lock:
            if not self._free:
                page = PinnedMemory(_PAGE_BYTES, device=self.device)
                page.array[:] = 0
                self._pages.append(page)
                starts = range(page.address, page.address + _PAGE_BYTES, _STRIDE)
                self._free = [Gate(start, self.device) for start in starts]
            return self._free.pop()

    def give_back(self, gate: Gate) -> None:
        """The gate is open and nobody will open it again: it may be taken for something else."""
        gate.value = (gate.value + 1) & 0xFFFFFFFF
        with self._lock:
            self._free.append(gate)
