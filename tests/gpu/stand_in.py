"""A stand-in for the CUDA extension's device: what streams would do is done at once, on the calling thread.

Kernels are walked on the host, as test_cuda_mapping.py does, so tables, launches and words are the extension's own.
Device memory is shared memory, which another process with a stand-in opens. Needs the extension, and no GPU.

    with stand_in.installed(): ...      # or install() in a process that is all for it
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.backends.segments import find_segment, open_segment
from kvxfer.cuda.native import native
from kvxfer.errors import MissingExtra

SMS = 2


class Device(types.ModuleType):
    """The extension, with everything that would ask a driver replaced."""

    def __init__(self, real: types.ModuleType, *, moves: bool) -> None:
        """Without `moves` launches move nothing, which leaves the host's part to be measured."""
        super().__init__("kvxfer._cuda")
        self._real, self._sms = real, SMS if moves else 0
        self._memory: dict[int, np.ndarray] = {}
        self._opened: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self.launches = 0  # calls that launch
        self.late: list[Callable[[], Any]] | None = None  # a list: requests of blocks wait in it until `catch_up`
        self.silent: list[Callable[[], Any]] | None = None  # a list: so do the words that say that something is done
        self.status = 0  # what launches return instead of launching, and streams at which something waits

        class Part(real.Part):
            def load_kernels(self, device: int) -> int:
                return 0

        class Pairing(real.Pairing):
            def load_kernels(self, device: int) -> int:
                return 0

        device = self

        class PackedPart(real.PackedPart):
            def load_kernels(self, device: int) -> int:
                return 0

            def launch(
                self, _: int, direction: int, first: int, count: int, wire: int, nonfinite: int, stream: int, sms: int
            ) -> int:
                return device._launch_conversion(self, direction, first, count, wire, nonfinite)

        self.Part, self.Pairing, self.PackedPart = Part, Pairing, PackedPart
        for name in (
            "enable_peer_access", "pin", "unpin", "destroy_stream", "synchronise_stream",
            "wait_for_event", "destroy_event", "record_event", "synchronise_event", "load_report_kernel",
            "stream_wait_word", "copy_bytes_batch",
        ):  # fmt: skip
            setattr(self, name, lambda *_: 0)
        for name in ("create_stream", "create_event"):
            setattr(self, name, lambda *_: (0, next(self._numbers)))
        for name, value in (
            ("device_count", (0, 1)), ("current_device", (0, 0)), ("driver_version", (0, 13000)),
            ("sm_count", (0, SMS)), ("compute_capability", (0, 9, 0)), ("can_access_peer", (0, True)),
            ("query_event", (0, True)), ("pointer_traits", (0, True, False)),
        ):  # fmt: skip
            setattr(self, name, lambda *_, value=value: value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    # --- memory ---------------------------------------------------------------------------------------------

    def allocate(self, device: int, nbytes: int) -> tuple[int, int]:
        array = kvxfer.shared_empty(max(nbytes, 1))
        self._memory[array.ctypes.data] = array
        return 0, array.ctypes.data

    def release(self, device: int, address: int) -> int:
        del self._memory[address]
        return 0

    def allocate_pinned(self, device: int, nbytes: int) -> tuple[int, int]:
        memory = np.zeros(nbytes + 64, np.uint8)
        start = -(-memory.ctypes.data // 64) * 64
        self._memory[start] = memory
        return 0, start

    def release_pinned(self, address: int) -> int:
        del self._memory[address]
        return 0

    def device_address_of_pinned(self, device: int, host: int) -> tuple[int, int]:
        return 0, host

    def copy_bytes(self, device: int, dst: int, src: int, nbytes: int, stream: int) -> int:
        ctypes.memmove(dst, src, nbytes)
        return 0

    def set_bytes(self, device: int, dst: int, byte: int, nbytes: int, stream: int) -> int:
        ctypes.memset(dst, byte, nbytes)
        return 0

    def address_range(self, device: int, address: int) -> tuple[int, int, int]:
        for start, memory in [*self._memory.items(), *self._opened.items()]:
            if start <= address < start + memory.nbytes:
                return 0, start, memory.nbytes
        return 1, 0, 0

    def export_memory(self, base: int) -> tuple[int, bytes]:
        name, offset = find_segment(base, 1)
        assert offset == 0
        return 0, name.encode().ljust(64, b"\0")

    def open_memory(self, device: int, handle: bytes) -> tuple[int, int]:
        mapping, descriptor = open_segment(handle.rstrip(b"\0").decode())
        os.close(descriptor)
        self._opened[mapping.address] = mapping
        return 0, mapping.address

    def close_memory(self, device: int, address: int) -> int:
        self._opened.pop(address, None)  # one that an earlier stand-in opened goes late
        return 0

    # --- work -----------------------------------------------------------------------------------------------

    def launch_moves(self, device: int, direction: int, ranges: list, stream: int, max_sms: int) -> int:
        self.launches += 1
        if self.status:
            return self.status
        misaligned = self._real.walk_moves(direction, ranges, self._sms) if self._sms else 0
        return 716 if misaligned else 0

    def _launch_conversion(self, part: Any, *what: int) -> int:
        self.launches += 1
        if self.status:
            return self.status
        return 716 if self._sms and part.walk_on_host(*what, self._sms) else 0

    def enqueue_blocks(
        self, pairing: Any, request: int, device: int, stream: int, max_sms: int, pinned: int, tables: int,
        events: tuple, report: tuple,
    ) -> int:  # fmt: skip
        self.launches += 1
        if self.status:
            return self.status
        if self.late is not None:  # the transfer keeps the request meanwhile
            self.late.append(lambda: self._real.walk_blocks(pairing, request, self._sms, pinned, tables, report))
            return 0
        return 716 if self._real.walk_blocks(pairing, request, self._sms, pinned, tables, report) else 0

    def stream_error(self, device: int, stream: int) -> int:
        return self.status

    def catch_up(self) -> None:
        """Carry out what waits, and from now on everything at once."""
        late, self.late = self.late, None
        for work in late:
            assert work() == 0, "misaligned"

    def report(
        self, device: int, stream: int, lease: int, seen: int, gate: int, gate_value: int, done: int, done_value: int
    ) -> int:
        def say() -> None:
            if lease:
                ctypes.c_uint64.from_address(seen).value = ctypes.c_uint64.from_address(lease).value
            if gate:
                ctypes.c_uint32.from_address(gate).value = gate_value
            ctypes.c_uint32.from_address(done).value = done_value

        if self.silent is None:
            say()
        else:
            self.silent.append(say)
        return 0


class DeviceArray:
    """Bytes in the stand-in's device memory, as an engine would register them."""

    def __init__(self, values: np.ndarray) -> None:
        self.address = native().allocate(0, values.nbytes)[1]
        self.bytes = native()._memory[self.address]
        self.bytes[: values.nbytes] = values
        self.device = types.SimpleNamespace(id=0)
        self.__cuda_array_interface__ = {
            "shape": values.shape, "typestr": "|u1", "data": (self.address, False), "version": 3,
        }  # fmt: skip

    def get(self) -> np.ndarray:
        """The bytes, copied."""
        return self.bytes.copy()


def need_no_gpu() -> None:
    """Skip the module where there is no extension, or a real device."""
    try:
        gpus = native().device_count()[1]
    except MissingExtra as reason:
        pytest.skip(str(reason), allow_module_level=True)
    if gpus:
        pytest.skip("this machine has a GPU", allow_module_level=True)


def install(*, moves: bool = True) -> Device:
    """Put the stand-in into the extension's place, in this process. MissingExtra where there is no extension."""
    device = Device(native(), moves=moves)
    sys.modules["kvxfer._cuda"] = kvxfer._cuda = device
    native.cache_clear()
    return device


@contextlib.contextmanager
def installed(*, moves: bool = True) -> Iterator[Device]:
    """`install`, and the extension back afterwards."""
    real = native()
    try:
        yield install(moves=moves)
    finally:
        sys.modules["kvxfer._cuda"] = kvxfer._cuda = real
        native.cache_clear()
