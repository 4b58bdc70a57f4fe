"""Memory made of many allocations that are mapped next to each other, such as PyTorch's expandable segments.

CUDA IPC cannot export it. Each allocation is exported as a file descriptor instead, and the importing process maps all
of them in order into a range that it reserves, so that what was contiguous stays contiguous.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import dataclass

from kvxfer.cuda.native import CudaError, check, native, value
from kvxfer.errors import BackendError


@dataclass(frozen=True)
class Piece:
    """One mapping of this process, with a handle that keeps its allocation."""

    handle: int
    base: int
    nbytes: int


class ExportedRange:
    """The mappings that a region lies in. Their allocations are kept until `close`, even if they are unmapped here."""

    def __init__(self, address: int, nbytes: int, *, device: int) -> None:
        """Raises BackendError where the range is not mapped throughout, or an allocation cannot be exported."""
        self.device = device
        self.pieces: list[Piece] = []
        self._finalizer = weakref.finalize(self, _release_all, device, self.pieces)
        end, at = address + nbytes, address
        try:
            while at < end:
                at = self._add(at)
        except BackendError:
            self.close()
            raise

    @property
    def base(self) -> int:
        """Address of the first mapping; the region starts in it."""
        return self.pieces[0].base

    @property
    def sizes(self) -> list[int]:
        """Bytes of each mapping, in order."""
        return [piece.nbytes for piece in self.pieces]

    def descriptor(self, index: int) -> int:
        """A new file descriptor of one allocation; the caller closes it."""
        try:
            handle = self.pieces[index].handle
        except IndexError:
            raise BackendError("the memory is not registered any more") from None
        made = value(native().export_allocation(self.device, handle), "exporting an allocation")
        os.set_inheritable(made, False)
        return made

    def close(self) -> None:
        """Let go of the allocations; idempotent."""
        self._finalizer()

    def _add(self, address: int) -> int:
        status, handle, base, size, shareable = native().retain_piece(self.device, address)
        check(status, f"asking for the allocation that is mapped at {address:#x}")
        self.pieces.append(Piece(handle, base, size))
        if not shareable:
            raise BackendError(
                f"the memory at {base:#x} was made by cuMemCreate without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR "
                "among its requestedHandleTypes, so no other process can map it: request that type"
            )
        if size <= 0 or not base <= address < base + size:
            raise BackendError(f"the mapping at {address:#x} has no sensible size ({size} bytes from {base:#x})")
        return base + size


class MappedRange:
    """A peer's allocations, mapped one after another into a reserved range. Unmapped by `close` or when collected."""

    def __init__(self, nbytes: int, *, device: int) -> None:
        self.nbytes, self.device = nbytes, device
        self.address = value(native().reserve_range(device, nbytes), f"reserving {nbytes} bytes of addresses")
        self._mapped: list[tuple[int, int]] = []
        self._filled = 0
        self._finalizer = weakref.finalize(self, _unmap_all, device, self.address, nbytes, self._mapped)

    @property
    def missing(self) -> int:
        """Bytes that are reserved and not mapped yet."""
        return self.nbytes - self._filled

    def append(self, descriptor: int, nbytes: int) -> None:
        """Map the next allocation; the descriptor stays the caller's. Raises BackendError."""
        if not 0 < nbytes <= self.missing:
            raise BackendError(f"the peer sent an allocation of {nbytes} bytes where {self.missing} are left")
        handle = value(native().import_allocation(self.device, descriptor), "opening a peer's allocation")
        try:
            at = self.address + self._filled
            check(native().map_allocation(self.device, handle, at, nbytes), "mapping a peer's allocation")
        finally:
            native().release_allocation(self.device, handle)  # the mapping keeps it
        self._mapped.append((at, nbytes))
        self._filled += nbytes

    def close(self) -> None:
        """Unmap everything; idempotent. No kernel may use the addresses any more."""
        self._finalizer()


def is_exportable_by_ipc(address: int, *, device: int) -> bool:
    """Whether CUDA IPC takes the allocation at `address`; True where CUDA cannot tell, since trying then decides."""
    status, legacy, _ = native().pointer_traits(device, address)
    return bool(status or legacy)


def is_from_pool(address: int, *, device: int) -> bool:
    """Whether the allocation at `address` is one of cudaMallocAsync."""
    status, _, pool = native().pointer_traits(device, address)
    return bool(not status and pool)


def _release_all(device: int, pieces: list[Piece]) -> None:
    while pieces:
        native().release_allocation(device, pieces.pop().handle)


def _unmap_all(device: int, address: int, nbytes: int, mapped: list[tuple[int, int]]) -> None:
    # At exit CUDA may be gone already: it then has unmapped everything itself.
    with contextlib.suppress(CudaError):
        while mapped:
            check(native().unmap(device, *mapped.pop()), "unmapping a peer's allocation")
        check(native().free_range(device, address, nbytes), "giving back reserved addresses")
