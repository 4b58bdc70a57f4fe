"""Devices, memory, streams, events and IPC handles, as thin functions and objects that free what they hold.

Every function raises CudaError where CUDA fails. A function that takes `device` works on it whatever device is
current, and leaves the current one as it was. None waits for a device unless it says so.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from kvxfer import _native
from kvxfer.cuda import quiet
from kvxfer.cuda.native import CudaError, check, native, value
from kvxfer.errors import InvalidRequest

IPC_HANDLE_BYTES = 64
ANY_DEVICE = -1


def device_count() -> int:
    """How many GPUs this process sees (CUDA_VISIBLE_DEVICES counts)."""
    return value(native().device_count(), "counting GPUs")


def driver_version() -> int:
    """The newest CUDA version that the driver runs, as 1000 * major + 10 * minor; 0 without a driver."""
    return value(native().driver_version(), "asking for the driver's version")


def current_device() -> int:
    """The device that is current in this thread."""
    return value(native().current_device(), "asking for the current device")


def sm_count(device: int) -> int:
    """Multiprocessors of a device."""
    return value(native().sm_count(device), f"asking for the multiprocessors of device {device}")


def compute_capability(device: int) -> tuple[int, int]:
    """Major and minor compute capability."""
    status, major, minor = native().compute_capability(device)
    check(status, f"asking for the compute capability of device {device}")
    return major, minor


def can_access_peer(device: int, peer: int) -> bool:
    """Whether kernels on `device` can read and write the memory of `peer`, both seen by this process."""
    return value(native().can_access_peer(device, peer), f"asking whether device {device} reaches {peer}")


def enable_peer_access(device: int, peer: int) -> None:
    """Let kernels on `device` use memory that this process allocates on `peer`. May be called again."""
    check(
        native().enable_peer_access(device, peer), f"opening the memory of device {peer} to device {device}"
    )


def stream_address(stream: Any) -> int:
    """A stream as the integer that every call here takes; 0 is the default stream.

    Takes integers, objects with ``__cuda_stream__`` (cuda.core), torch streams and CuPy streams. Call it
    once per stream and not per launch.
    """
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    if isinstance(stream, Stream):
        return stream.address
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):
        if isinstance(found := getattr(stream, name, None), int):
            return found
    raise InvalidRequest(
        "stream: expected an integer, None, or an object with __cuda_stream__, cuda_stream or ptr, got "
        f"{type(stream).__name__}"
    )


def event_address(event: Any) -> int:
    """An event as the integer that CUDA knows it by: integers, `Event`, torch events and CuPy events."""
    if isinstance(event, int):
        return event
    for name in ("address", "cuda_event", "ptr", "handle"):
        if isinstance(found := getattr(event, name, None), int):
            return found
    raise InvalidRequest(
        f"event: expected an integer or an object with cuda_event or ptr, got {type(event).__name__}"
    )


def wait_for_event(event: int) -> None:
    """Wait on the host until an event, given as CUDA's handle, has passed; releases the GIL."""
    check(native().synchronise_event(event), "waiting for an event")


# --- memory -------------------------------------------------------------------------------------------------


class _Owned:
    """Something that is freed once: by `close`, at the end of a ``with`` block, or when it is collected."""

    def __init__(self, address: int, free: Callable[..., int], *arguments: int, what: str) -> None:
        self.address = address
        self._finalizer = weakref.finalize(self, _free_late, free, arguments, what)

    def close(self) -> None:
        """Free it; a second call does nothing."""
        left = self._finalizer.detach()
        if left is not None:
            _, _, (free, arguments, what), _ = left
            self.address = 0
            check(free(*arguments), what)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free_late(free: Callable[..., int], arguments: tuple[int, ...], what: str) -> None:
    def freeing() -> None:
        # At exit CUDA may be gone already: it then has freed everything itself.
        with contextlib.suppress(CudaError):
            check(free(*arguments), what)

    quiet.when_quiet(freeing)


class DeviceMemory(_Owned):
    """An allocation on a device, of at least 256 bytes' alignment. Closing it waits for the device."""

    def __init__(self, nbytes: int, *, device: int) -> None:
        self.nbytes, self.device = nbytes, device
        what = f"allocating {nbytes} bytes on device {device}"
        address = value(native().allocate(device, max(nbytes, 1)), what)
        super().__init__(
            address, native().release, device, address, what=f"freeing memory of device {device}"
        )


class PinnedMemory(_Owned):
    """Page-locked host memory that every device reaches at the same address. `array` is it as uint8.

    `device` is the one whose context allocates it: by default the current one, which CUDA then starts to use.
    """

    def __init__(self, nbytes: int, *, device: int = ANY_DEVICE) -> None:
        self.nbytes = nbytes
        address = value(
            native().allocate_pinned(device, max(nbytes, 1)), f"allocating {nbytes} bytes of pinned memory"
        )
        super().__init__(address, native().release_pinned, address, what="freeing pinned memory")

    @cached_property
    def array(self) -> np.ndarray:
        """The bytes. Must not be used after `close`."""
        import ctypes

        pointer = ctypes.cast(self.address, ctypes.POINTER(ctypes.c_uint8))
        return np.ctypeslib.as_array(pointer, (self.nbytes,))


class PinnedRange(_Owned):
    """Host memory that exists already, page-locked: copies of it are asynchronous, and every device reaches it.

    `device_address` is where. The memory must stay mapped until it is closed.
    """

    def __init__(self, address: int, nbytes: int, *, device: int) -> None:
        self.nbytes = nbytes
        check(native().pin(device, address, nbytes), f"pinning {nbytes} bytes of host memory")
        super().__init__(address, native().unpin, device, address, what="unpinning host memory")
        self.device_address = pinned_address(address, device=device)


def pinned_address(host: int, *, device: int) -> int:
    """Where `device` reaches a byte of pinned host memory. Raises CudaError where the memory is not pinned."""
    return value(native().device_address_of_pinned(device, host), "asking for the address of pinned memory")


def copy_bytes(dst: int, src: int, nbytes: int, *, device: int, stream: int) -> None:
    """Enqueue a copy between any two of host, device and peer memory.

    Pinned host memory must stay as it is until the stream has passed the copy; with pageable host memory
    the call may wait for the copy, and releases the GIL.
    """
    check(native().copy_bytes(device, dst, src, nbytes, stream), f"copying {nbytes} bytes")


def copy_bytes_peer(
    dst: int, dst_device: int, src: int, src_device: int, nbytes: int, *, device: int, stream: int
) -> None:
    """Enqueue a copy between two devices, staged through the host where they do not reach each other.

    `device` is the one that `stream` belongs to.
    """
    status = native().copy_bytes_peer(dst, dst_device, src, src_device, nbytes, device, stream)
    check(status, f"copying {nbytes} bytes from device {src_device} to {dst_device}")


def copy_bytes_batch(
    dst: np.ndarray, src: np.ndarray, nbytes: np.ndarray, *, device: int, stream: int
) -> None:
    """Enqueue many copies that have no order among each other: three uint64 arrays of equal length.

    The arrays may be reused when the call returns. `stream` must not be the default stream.
    """
    for array in (dst, src, nbytes):
        if array.dtype != np.uint64 or not array.flags.c_contiguous or array.shape != (len(dst),):
            raise InvalidRequest("copy_bytes_batch takes three contiguous uint64 arrays of equal length")
    status = native().copy_bytes_batch(
        device, dst.ctypes.data, src.ctypes.data, nbytes.ctypes.data, len(dst), stream
    )
    check(status, f"copying {len(dst)} pieces")


def set_bytes(dst: int, byte: int, nbytes: int, *, device: int, stream: int) -> None:
    """Enqueue a fill of device memory."""
    check(native().set_bytes(device, dst, byte, nbytes, stream), f"setting {nbytes} bytes")


# --- streams and events -------------------------------------------------------------------------------------


class Stream(_Owned):
    """A stream that does not wait for the default stream. Of two priorities the lower one runs first."""

    def __init__(self, *, device: int, priority: int = 0) -> None:
        self.device = device
        address = value(native().create_stream(device, priority), f"creating a stream on device {device}")
        super().__init__(address, native().destroy_stream, address, what="destroying a stream")

    def synchronise(self) -> None:
        """Wait until everything enqueued so far is done; releases the GIL."""
        check(native().synchronise_stream(self.device, self.address), "waiting for a stream")

    def wait_for(self, event: Event) -> None:
        """Let what is enqueued from now on wait for `event`; the host does not wait."""
        check(
            native().wait_for_event(self.device, self.address, event.address),
            "letting a stream wait for an event",
        )


def write_after(stream: int, address: int, word: int, *, device: int) -> None:
    """Let a stream write a 64-bit word of host memory once everything enqueued on it is done and visible.

    Where the memory is not pinned, or the driver cannot, this waits for the stream on the host and writes then.
    """
    try:
        at = pinned_address(address, device=device)
        check(native().stream_write_word(device, stream, at, word), "letting a stream write a word")
    except CudaError:
        check(native().synchronise_stream(device, stream), "waiting for a stream")
        _native.store_word(address, word)


class Event(_Owned):
    """A point in a stream. `timed` ones measure; `interprocess` ones can be exported, and are never timed."""

    def __init__(
        self, *, device: int, timed: bool = False, interprocess: bool = False, handle: bytes | None = None
    ) -> None:
        self.device = device
        if handle is not None:
            what = f"opening a peer's event on device {device}"
            address = value(native().open_event(device, handle), what)
        else:
            if timed and interprocess:
                raise InvalidRequest("an event that other processes use cannot measure time")
            flags = native().TIMED * timed | native().INTERPROCESS * interprocess
            address = value(native().create_event(device, flags), f"creating an event on device {device}")
        super().__init__(address, native().destroy_event, address, what="destroying an event")

    def record(self, stream: int) -> None:
        """Mark this point of the stream, an integer of the same device."""
        check(native().record_event(self.device, self.address, stream), "recording an event")

    def done(self) -> bool:
        """Whether everything before the last `record` is done. True for an event never recorded."""
        return value(native().query_event(self.address), "asking for an event")

    def synchronise(self) -> None:
        """Wait for it; releases the GIL."""
        check(native().synchronise_event(self.address), "waiting for an event")

    def ms_since(self, begin: Event) -> float:
        """Milliseconds between two timed events that are both done."""
        return value(native().elapsed_ms(begin.address, self.address), "measuring between events")

    def handle(self) -> bytes:
        """What another process of this host opens as ``Event(device=..., handle=...)``."""
        return value(native().export_event(self.address), "exporting an event")


# --- memory of other processes ------------------------------------------------------------------------------


def address_range(address: int, *, device: int = 0) -> tuple[int, int]:
    """Base address and size of the allocation that `address` lies in: what is exported is always all of it."""
    status, base, nbytes = native().address_range(device, address)
    check(status, f"asking for the allocation at {address:#x}")
    return base, nbytes


def export_memory(base: int) -> bytes:
    """A 64-byte handle of the allocation that starts at `base`, for another process of this host.

    Works for cudaMalloc memory; memory made from the virtual memory interface (PyTorch's expandable
    segments) and cudaMallocAsync's default pools raise CudaError.
    """
    return value(native().export_memory(base), f"exporting the allocation at {base:#x}")


def open_memory(handle: bytes, *, device: int) -> int:
    """The address in this process of memory that another one exported, for kernels on `device`.

    The devices need not see each other through CUDA_VISIBLE_DEVICES. Close with `close_memory`; the
    exporter must not free the memory before.
    """
    if len(handle) != IPC_HANDLE_BYTES:
        raise InvalidRequest(f"a memory handle has {IPC_HANDLE_BYTES} bytes, got {len(handle)}")
    return value(native().open_memory(device, handle), f"opening a peer's memory on device {device}")


def close_memory(address: int, *, device: int) -> None:
    """Undo `open_memory`. No kernel may use the address any more; waits for the device."""
    check(native().close_memory(device, address), "closing a peer's memory")
