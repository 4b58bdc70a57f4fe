"""Device memory for tests: filled from and read back into NumPy arrays, with a wait at the end of each."""

from __future__ import annotations

import importlib
import itertools
import time
from typing import Any

import numpy as np
import pytest

from kvxfer import cuda
from kvxfer.cuda.native import check, native, value


def need_devices(count: int) -> None:
    """Skip the module, saying why, unless `count` GPUs can be used."""
    reason = cuda.why_unavailable()
    if not reason and cuda.device_count() < count:
        reason = f"needs {count} GPUs, this process sees {cuda.device_count()}"
    if reason:
        pytest.skip(reason, allow_module_level=True)


class Region(cuda.DeviceMemory):
    """One region on a device, at first a copy of `content`."""

    def __init__(self, content: np.ndarray, *, device: int = 0) -> None:
        super().__init__(content.nbytes, device=device)
        self.write(content)

    def write(self, content: np.ndarray, at: int = 0) -> None:
        assert at + content.nbytes <= self.nbytes
        with cuda.Stream(device=self.device) as stream:
            cuda.copy_bytes(
                self.address + at,
                content.ctypes.data,
                content.nbytes,
                device=self.device,
                stream=stream.address,
            )
            stream.synchronise()

    def read(self, at: int = 0, nbytes: int | None = None) -> np.ndarray:
        found = np.empty(self.nbytes if nbytes is None else nbytes, np.uint8)
        with cuda.Stream(device=self.device) as stream:
            cuda.copy_bytes(
                found.ctypes.data, self.address + at, found.nbytes, device=self.device, stream=stream.address
            )
            stream.synchronise()
        return found


def addresses(regions: list[Region]) -> np.ndarray:
    """What a prepared plan takes as bases."""
    return np.array([region.address for region in regions], np.uint64)


class VirtualMemory:
    """Allocations of a few sizes mapped one after another into one range, as PyTorch's expandable segments do."""

    def __init__(self, nbytes: int, *, device: int = 0, shareable: bool = True, pieces: int = 3) -> None:
        unit = value(native().allocation_granularity(device), "asking for the granularity")
        units = max(pieces, -(-nbytes // unit))
        cuts = sorted({0, units, *(units * i // pieces for i in range(pieces))})
        self.nbytes, self._device, self._mapped = units * unit, device, []
        self.address = value(native().reserve_range(device, self.nbytes), "reserving")
        for first, last in itertools.pairwise(cuts):
            size = (last - first) * unit
            handle = value(native().create_allocation(device, size, shareable), "creating an allocation")
            at = self.address + first * unit
            check(native().map_allocation(device, handle, at, size), "mapping")
            check(native().release_allocation(device, handle), "releasing")
            self._mapped.append((at, size))

    def holding(self, values: np.ndarray) -> Any:
        """A CuPy array at the start of the memory, which it keeps, with these bytes."""
        cupy = importlib.import_module("cupy")
        memory = cupy.cuda.UnownedMemory(self.address, values.nbytes, self, self._device)
        array = cupy.ndarray(values.shape, values.dtype, cupy.cuda.MemoryPointer(memory, 0))
        array.set(values)
        return array

    def __del__(self) -> None:
        for at, size in self._mapped:
            native().unmap(self._device, at, size)
        native().free_range(self._device, self.address, self.nbytes)


class BusyStream:
    """A stream with work of some milliseconds in front of what a test enqueues."""

    ROUND_BYTES = 1 << 30  # about a quarter of a millisecond to set
    COPY_BYTES = 8 << 20

    def __init__(self, *, device: int = 0) -> None:
        self._device = device
        self._scratch = cuda.DeviceMemory(self.ROUND_BYTES, device=device)
        self.stream = cuda.Stream(device=device)
        # Allocated now: an allocation may wait for the device, and with it for a stream that waits for a transfer.
        self._copy = cuda.PinnedMemory(self.COPY_BYTES, device=device)

    def work(self, rounds: int) -> None:
        """Enqueue as much work; at most some 900, or the call waits for room in the stream."""
        for _ in range(rounds):
            self.fill(self._scratch, 1)

    def fill(self, memory: Any, value: int) -> None:
        """Enqueue a fill of an array or of memory."""
        address = memory.address if isinstance(memory, cuda.DeviceMemory) else memory.data.ptr
        cuda.set_bytes(address, value, memory.nbytes, device=self._device, stream=self.stream.address)

    def copy(self, array: Any) -> np.ndarray:
        """Enqueue a copy into pinned host memory, which holds it once the stream is done."""
        assert array.nbytes <= self.COPY_BYTES
        self._copy.array[:] = 77
        cuda.copy_bytes(
            self._copy.address, array.data.ptr, array.nbytes, device=self._device, stream=self.stream.address
        )
        return self._copy.array[: array.nbytes]

    def is_busy(self) -> bool:
        """Whether something is left to do."""
        with cuda.Event(device=self._device) as event:
            event.record(self.stream.address)
            time.sleep(0.005)  # an idle stream takes a moment, too
            return not event.done()
