"""Device memory for tests: filled from and read back into NumPy arrays, with a wait at the end of each."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer import cuda


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
