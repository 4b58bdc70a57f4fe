"""What plans prepared for a device share: tables of all parts in one piece of memory, uploaded once."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from kvxfer.cuda.native import check
from kvxfer.cuda.runtime import DeviceMemory, copy_bytes
from kvxfer.errors import InvalidRequest
from kvxfer.plan import WIRE_ALIGNMENT

_TABLE_ALIGNMENT = 16
_Tables = TypeVar("_Tables", bound="PreparedTables")


class PreparedTables:
    """The extension's parts of a plan, and where their tables lie on `device`.

    Keeps the parts and, unless the caller gives memory, the tables alive; closing waits for the device.
    """

    def __init__(self, parts: list[Any], *, device: int) -> None:
        self.device = device
        self.parts = parts
        self._memory: DeviceMemory | None = None
        self._host: np.ndarray | None = None
        self.table_bytes = sum(part.table_bytes for part in parts)
        """Device memory that the tables need; also what `upload` needs of pinned memory, if it is given any."""

    def upload(self, *, stream: int, memory: int = 0, pinned: np.ndarray | None = None) -> None:
        """Enqueue the copy of the tables to the device. Not to be captured into a graph; launches are.

        Launches on another stream must wait for this one. `memory` is the address of at least `table_bytes`
        of device memory on 16 bytes, which the caller keeps until the last launch is done; without it, it is
        allocated here. `pinned` is a uint8 array in pinned host memory that the tables pass through, so that
        the call does not wait; it must stay as it is until the stream has passed the copy. Where `memory` is
        the address of `pinned`, kernels read the tables there and nothing is copied.
        """
        if memory % _TABLE_ALIGNMENT:
            raise InvalidRequest(f"memory for tables starts on {_TABLE_ALIGNMENT} bytes, got {memory:#x}")
        if pinned is not None and (pinned.dtype != np.uint8 or pinned.size < self.table_bytes):
            raise InvalidRequest(f"the tables need {self.table_bytes} bytes (uint8) of pinned memory")
        if not memory:
            self._memory = DeviceMemory(self.table_bytes, device=self.device)
            memory = self._memory.address
        host = np.empty(self.table_bytes, np.uint8) if pinned is None else pinned
        start = host.ctypes.data
        offset = 0
        for part in self.parts:
            check(part.load_kernels(self.device), f"loading kernels onto device {self.device}")
            part.fill(start + offset)
            part.bind(memory + offset)
            offset += part.table_bytes
        self._host = host
        if memory != start:  # else kernels read the tables in pinned memory
            copy_bytes(memory, start, self.table_bytes, device=self.device, stream=stream)

    def close(self) -> None:
        """Free the tables, if they were allocated here. Waits for the device."""
        if self._memory is not None:
            self._memory.close()

    def __enter__(self: _Tables) -> _Tables:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_launch(self, wire: int) -> None:
        """InvalidRequest unless the tables are uploaded and `wire` can be a packed buffer's address."""
        if self._host is None:
            raise InvalidRequest("the plan's tables are not on the device: call upload first")
        if wire % WIRE_ALIGNMENT:
            raise InvalidRequest(f"a packed buffer starts on {WIRE_ALIGNMENT} bytes, got {wire:#x}")


def possible(part: Any) -> Any:
    """The extension's part. InvalidRequest for one that the kernels cannot carry out."""
    if part.problem:
        raise InvalidRequest(f"the GPU kernels cannot carry out this plan: {part.problem}")
    return part
