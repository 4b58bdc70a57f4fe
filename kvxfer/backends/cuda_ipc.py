"""GPU memory between processes of one host: exported with CUDA IPC and mapped by the peer, over NVLink or PCIe.

Host memory (lease tables, staging, host caches) goes through shared memory as in shm.py, which this backend contains.
Allocations are exported once, however many regions lie in them. The processes need not see each other's GPU through
CUDA_VISIBLE_DEVICES.

Imports base.py, shm.py and kvxfer.cuda.
"""

from __future__ import annotations

import os
import weakref

import msgspec
import numpy as np

from kvxfer import cuda
from kvxfer.backends.base import Backend, Capabilities, Direction, Link, Operation, Registration, RemoteRegion
from kvxfer.backends.shm import SharedMemoryBackend
from kvxfer.errors import BackendError


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    token: bytes  # of the backend: the same process is reached by plain addresses
    base: bytes  # CUDA's handle of the whole allocation
    offset: int
    address: int
    nbytes: int


class _Mapping:
    """A peer's allocation in this process. Closed when the last region that lies in it is let go."""

    def __init__(self, handle: bytes, device: int) -> None:
        self.address = cuda.open_memory(handle, device=device)
        _, self.nbytes = cuda.address_range(self.address, device=device)
        weakref.finalize(self, _close_mapping, self.address, device)


def _close_mapping(address: int, device: int) -> None:
    try:
        cuda.close_memory(address, device=device)
    except cuda.CudaError:  # the driver may be gone at exit, and the mapping with it
        pass


class CudaIpcBackend(Backend):
    """GPU memory of this host."""

    name = "cuda_ipc"
    capabilities = Capabilities(mapped=True, one_sided=True, cross_host=False, devices=frozenset({"cpu", "cuda"}))

    def __init__(self) -> None:
        """Raises MissingExtra without the CUDA extension, BackendError without a driver or a GPU."""
        if why := cuda.why_unavailable():
            raise BackendError(why)
        self._host = SharedMemoryBackend()
        self._token = os.urandom(16)
        self._exports: dict[int, bytes] = {}  # base address: handle
        self._mappings: weakref.WeakValueDictionary[bytes, _Mapping] = weakref.WeakValueDictionary()
        self.device: int | None = None

    def register(self, address: int, nbytes: int, device: str = "cpu") -> Registration:
        if device == "cpu":
            return self._host.register(address, nbytes)
        ordinal = int(device.removeprefix("cuda:") or 0) if device != "cuda" else cuda.current_device()
        if self.device is None:
            self.device = ordinal
        elif self.device != ordinal:
            raise BackendError(
                f"this connector's caches lie on GPU {self.device}, another on {ordinal}: use a connector for each GPU"
            )
        base, size = cuda.address_range(address, device=ordinal)
        if address + nbytes > base + size:
            raise BackendError(f"[{address:#x}, +{nbytes}) is not inside one allocation of {size} bytes")
        if base not in self._exports:
            try:
                self._exports[base] = cuda.export_memory(base)
            except cuda.CudaError as error:
                raise BackendError(
                    f"the allocation at {base:#x} cannot be exported: {error}. Memory of cudaMallocAsync or of "
                    "PyTorch's expandable segments is not supported; allocate the cache with cudaMalloc (PyTorch: "
                    "without expandable_segments)"
                ) from error
        handle = _Handle(
            pid=os.getpid(),
            token=self._token,
            base=self._exports[base],
            offset=address - base,
            address=address,
            nbytes=nbytes,
        )
        return Registration(address=address, nbytes=nbytes, handle=b"G" + msgspec.msgpack.encode(handle))

    def deregister(self, registration: Registration) -> None:
        self._host.deregister(registration)

    def allocate(self, nbytes: int) -> Registration:
        return self._host.allocate(nbytes)

    def hello(self) -> bytes:
        return self._host.hello()

    def connect(self, hello: bytes) -> Link:
        return _CudaIpcLink(self, self._host.connect(hello))

    def close(self) -> None:
        self._host.close()

    def open(self, handle: bytes, nbytes: int) -> RemoteRegion:
        """Map a peer's GPU memory, each allocation once. Raises BackendError."""
        try:
            opened = msgspec.msgpack.decode(handle, type=_Handle)
        except msgspec.MsgspecError as error:
            raise BackendError(f"the peer sent a malformed handle: {error}") from error
        if opened.nbytes < nbytes or opened.offset < 0:
            raise BackendError(f"the peer's region has {opened.nbytes} bytes, {nbytes} are needed")
        if opened.token == self._token:
            return RemoteRegion(nbytes=opened.nbytes, mapped_address=opened.address, remote_address=opened.address)
        mapping = self._mappings.get(opened.base)
        if mapping is None:
            device = cuda.current_device() if self.device is None else self.device
            try:
                mapping = self._mappings[opened.base] = _Mapping(opened.base, device)
            except cuda.CudaError as error:  # no peer access between the GPUs, say: the packed way remains
                return RemoteRegion(
                    nbytes=opened.nbytes,
                    mapped_address=None,
                    remote_address=opened.address,
                    why_not_mapped=f"the peer's GPU memory cannot be mapped: {error}",
                )
        if opened.offset + opened.nbytes > mapping.nbytes:
            raise BackendError(
                f"the peer's region ends at byte {opened.offset + opened.nbytes} of an allocation of {mapping.nbytes}"
            )
        return RemoteRegion(
            nbytes=opened.nbytes,
            mapped_address=mapping.address + opened.offset,
            remote_address=opened.address,
            mapping=mapping,
        )


class _CudaIpcLink(Link):
    """The shared-memory link of the peer, which also opens GPU memory."""

    def __init__(self, backend: CudaIpcBackend, host: Link) -> None:
        self._backend, self._host = backend, host
        self.one_sided, self.why_not_one_sided = host.one_sided, host.why_not_one_sided

    def open(self, handle: bytes, nbytes: int) -> RemoteRegion:
        if handle[:1] == b"G":
            return self._backend.open(handle[1:], nbytes)
        return self._host.open(handle, nbytes)

    def post(self, direction: Direction, runs: np.ndarray) -> Operation:
        return self._host.post(direction, runs)

    def alive(self) -> bool | None:
        return self._host.alive()

    def close(self) -> None:
        self._host.close()
