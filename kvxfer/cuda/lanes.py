"""Lanes: what one transfer at a time needs on a device, kept and used again.

A lane is a stream, an event, and memory for plan tables and packed chunks that grows and is never given back while the
lane lives: allocating device memory waits for the device, which a transfer must not do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from kvxfer.cuda.native import check, native
from kvxfer.cuda.packed import PreparedCudaPackedPlan
from kvxfer.cuda.plan import PreparedCudaPlan
from kvxfer.cuda.runtime import DeviceMemory, Event, PinnedMemory, Stream

_POLL_S = 20e-6
_LEAST_BYTES = 1 << 20


class Lane:
    """A stream of one device, with its memory. One thread at a time."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.stream = Stream(device=device)
        self._event = Event(device=device)
        self._tables: DeviceMemory | None = None
        self._pinned: PinnedMemory | None = None
        self._scratch: DeviceMemory | None = None
        self._flag: PinnedMemory | None = None

    def upload(self, prepared: PreparedCudaPlan | PreparedCudaPackedPlan) -> None:
        """Enqueue a plan's tables into this lane's memory; an earlier plan's are gone."""
        nbytes = prepared.table_bytes
        self._tables = self._grown(self._tables, nbytes)
        if self._pinned is None or self._pinned.nbytes < nbytes:
            self._pinned = PinnedMemory(max(_LEAST_BYTES, 2 * nbytes))
        prepared.upload(stream=self.stream.address, memory=self._tables.address, pinned=self._pinned.array)

    def cleared_flag(self) -> PinnedMemory:
        """A word that kernels set and the host reads after `finish`, now 0."""
        if self._flag is None:
            self._flag = PinnedMemory(16)
        self._flag.array[:] = 0
        return self._flag

    def scratch(self, nbytes: int) -> int:
        """Address of device memory for one packed chunk."""
        self._scratch = self._grown(self._scratch, nbytes)
        return self._scratch.address

    def wait_for(self, event: int) -> None:
        """Let what is enqueued from now on wait for an event, given as CUDA's handle; the host does not wait."""
        check(native().wait_for_event(self.device, self.stream.address, event), "letting a stream wait for an event")

    def finish(self) -> None:
        """Wait until everything enqueued is done. Sleeps rather than spins, and holds no lock."""
        self._event.record(self.stream.address)
        while not self._event.done():
            time.sleep(_POLL_S)

    def _grown(self, memory: DeviceMemory | None, nbytes: int) -> DeviceMemory:
        if memory is None or memory.nbytes < nbytes:
            return DeviceMemory(max(_LEAST_BYTES, 2 * nbytes), device=self.device)
        return memory


class Lanes:
    """The lanes of one device: as many as there are transfers at once. Thread-safe."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._free: list[Lane] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane for the length of a ``with`` block, at the end of which all its work is done."""
        with self._lock:
            lane = self._free.pop() if self._free else None
        lane = lane or Lane(self.device)
        try:
            yield lane
        finally:
            lane.finish()
            with self._lock:
                self._free.append(lane)
