"""GPU memory between processes of one host, mapped by the peer and reached over NVLink or PCIe.

Memory of cudaMalloc is exported with CUDA IPC, memory of the virtual memory interface (PyTorch's expandable segments)
as file descriptors; see descriptors.py. Allocations are exported and mapped once, however many regions lie in them. The
processes need not see each other's GPU through CUDA_VISIBLE_DEVICES.

Host memory (lease tables, staging, host caches) goes through shared memory as in shm.py, which this backend contains.
What `allocate` gave, here or at the peer, is pinned: copies of it are asynchronous, and the GPU reads lease words.
Where two GPUs do not reach each other, transfers go packed through that memory.

Imports base.py, shm.py, descriptors.py and kvxfer.cuda.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from kvxfer import cuda
from kvxfer.backends import descriptors
from kvxfer.backends.base import Backend, Capabilities, Direction, Link, Operation, Registration, RemoteRegion
from kvxfer.backends.shm import SharedMemoryBackend
from kvxfer.cuda import quiet
from kvxfer.errors import BackendError, KvxferError

_log = logging.getLogger(__name__)

_IPC, _RANGE, _PINNED, _HOST = b"G", b"V", b"A", b"H"  # first byte of a handle
_MOST_BYTES = 1 << 48
_SILENCE_S = 10.0


class _IpcHandle(msgspec.Struct, frozen=True, array_like=True):
    token: bytes  # of the backend: the same process is reached by plain addresses
    base: bytes  # CUDA's handle of the whole allocation
    offset: int
    address: int
    nbytes: int


class _RangeHandle(msgspec.Struct, frozen=True, array_like=True):
    token: bytes
    server: str  # where descriptors are handed out, and the token that this takes
    secret: bytes
    number: int
    span: int  # bytes of all mappings of the range
    offset: int
    address: int
    nbytes: int


class _Mapping:
    """A peer's memory in this process. Let go when the last region that lies in it is."""

    def __init__(self, address: int, nbytes: int, close: Callable[..., None], *arguments: Any) -> None:
        self.address, self.nbytes = address, nbytes
        weakref.finalize(self, _close_apart, close, *arguments).atexit = False  # the driver does it then


def _close_apart(close: Callable[..., None], *arguments: Any) -> None:
    """Close a mapping on a thread of its own: that waits for the device, for which no thread of kvxfer's may wait."""

    def closing() -> None:
        with contextlib.suppress(cuda.CudaError):  # the driver may be gone, and the mapping with it
            close(*arguments)

    with contextlib.suppress(RuntimeError):  # at exit no thread starts
        threading.Thread(target=quiet.when_quiet, args=(closing,), name="kvxfer-unmap", daemon=True).start()


class _Export:
    """A range of mappings that regions lie in, and how many of them are registered."""

    def __init__(self, number: int, exported: cuda.ExportedRange) -> None:
        self.number, self.exported = number, exported
        self.users: set[object] = set()


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
        self._ipc_handles: dict[int, bytes] = {}  # base address: handle
        self._exports: dict[tuple[cuda.Piece, ...], _Export] = {}
        self._by_number: dict[int, cuda.ExportedRange] = {}
        self._numbers = itertools.count(1)
        self._server: descriptors.DescriptorServer | None = None
        self._mappings: weakref.WeakValueDictionary[object, _Mapping] = weakref.WeakValueDictionary()
        self._allocated: dict[int, int] = {}  # address: bytes
        self._pinned: dict[int, cuda.PinnedRange] = {}
        self._silent: dict[str, float] = {}  # servers that did not answer, and when
        self._logged: set[str] = set()
        self._lock = threading.Lock()
        self.device: int | None = None

    # --- this process's memory ------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int, device: str = "cpu") -> Registration:
        if device == "cpu":
            return _tagged(_HOST, self._host.register(address, nbytes))
        ordinal = int(device.removeprefix("cuda:") or 0) if device != "cuda" else cuda.current_device()
        with self._lock:
            if self.device is None:
                self.device = ordinal
                for start, size in self._allocated.items():
                    self._pin(start, size)
            elif self.device != ordinal:
                raise BackendError(
                    f"this connector's caches lie on GPU {self.device}, another on {ordinal}: use a connector for each "
                    "GPU"
                )
            if cuda.is_from_pool(address, device=ordinal):
                raise BackendError(
                    f"the memory at {address:#x} is cudaMallocAsync's, whose pool other processes cannot map: allocate "
                    "the cache with cudaMalloc (PyTorch: backend:native in PYTORCH_CUDA_ALLOC_CONF)"
                )
            if cuda.is_exportable_by_ipc(address, device=ordinal):
                return self._register_ipc(address, nbytes, ordinal)
            return self._register_range(address, nbytes, ordinal)

    def _register_ipc(self, address: int, nbytes: int, device: int) -> Registration:
        base, size = cuda.address_range(address, device=device)
        if address + nbytes > base + size:
            raise BackendError(f"[{address:#x}, +{nbytes}) is not inside one allocation of {size} bytes")
        if base not in self._ipc_handles:
            try:
                self._ipc_handles[base] = cuda.export_memory(base)
            except cuda.CudaError as error:
                raise BackendError(f"the allocation at {base:#x} cannot be exported: {error}") from error
        handle = _IpcHandle(
            token=self._token, base=self._ipc_handles[base], offset=address - base, address=address, nbytes=nbytes
        )
        return Registration(address=address, nbytes=nbytes, handle=_IPC + msgspec.msgpack.encode(handle))

    def _register_range(self, address: int, nbytes: int, device: int) -> Registration:
        try:
            exported = cuda.ExportedRange(address, nbytes, device=device)
        except cuda.CudaError as error:
            raise BackendError(f"the memory at {address:#x} cannot be exported: {error}") from error
        if self._server is None:
            self._server = descriptors.DescriptorServer(self._by_number.get)
        key, span = tuple(exported.pieces), sum(exported.sizes)
        export = self._exports.get(key)
        if export is None:
            export = self._exports[key] = _Export(next(self._numbers), exported)
            self._by_number[export.number] = exported
        else:
            exported.close()
        use = object()
        export.users.add(use)
        handle = _RangeHandle(
            token=self._token,
            server=self._server.address,
            secret=self._server.token,
            number=export.number,
            span=span,
            offset=address - key[0].base,
            address=address,
            nbytes=nbytes,
        )
        packed = _RANGE + msgspec.msgpack.encode(handle)
        return Registration(address=address, nbytes=nbytes, handle=packed, keep_alive=use)

    def deregister(self, registration: Registration) -> None:
        with self._lock:
            for key, export in list(self._exports.items()):
                export.users.discard(registration.keep_alive)
                if not export.users:
                    self._forget(key)
            if registration.handle[:1] == _PINNED:
                self._allocated.pop(registration.address, None)
                self._unpin(registration.address)
        self._host.deregister(registration)

    def _forget(self, key: tuple[cuda.Piece, ...]) -> None:
        export = self._exports.pop(key)
        del self._by_number[export.number]
        export.exported.close()

    def allocate(self, nbytes: int) -> Registration:
        memory = self._host.allocate(nbytes)
        with self._lock:
            self._allocated[memory.address] = memory.nbytes
            if self.device is not None:
                self._pin(memory.address, memory.nbytes)
        return _tagged(_PINNED, memory)

    def _pin(self, address: int, nbytes: int) -> None:
        try:
            self._pinned[address] = cuda.PinnedRange(address, nbytes, device=self.device)
        except cuda.CudaError as error:
            _log.warning("staging and lease table stay pageable, which makes copies of them slower: %s", error)

    def _unpin(self, address: int) -> None:
        pinned = self._pinned.pop(address, None)
        if pinned is not None:
            with contextlib.suppress(cuda.CudaError):
                pinned.close()

    # --- peers ----------------------------------------------------------------------------------------------

    def hello(self) -> bytes:
        return self._host.hello()

    def connect(self, hello: bytes) -> Link:
        return _CudaIpcLink(self, self._host.connect(hello))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        with self._lock:
            for key in list(self._exports):
                self._forget(key)
            for address in list(self._pinned):
                self._unpin(address)
            self._allocated.clear()
        self._host.close()

    def open_gpu(self, handle: bytes, nbytes: int) -> RemoteRegion:
        """Map a peer's GPU memory, each allocation once. Raises BackendError."""
        kind = _IpcHandle if handle[:1] == _IPC else _RangeHandle
        try:
            opened = msgspec.msgpack.decode(handle[1:], type=kind)
        except msgspec.MsgspecError as error:
            raise BackendError(f"the peer sent a malformed handle: {error}") from error
        if opened.nbytes < nbytes or opened.offset < 0:
            raise BackendError(f"the peer's region has {opened.nbytes} bytes, {nbytes} are needed")
        if opened.token == self._token:
            return RemoteRegion(nbytes=opened.nbytes, mapped_address=opened.address, remote_address=opened.address)
        try:
            mapping = self._mapped_ipc(opened) if kind is _IpcHandle else self._mapped_range(opened)
        except KvxferError as error:  # no peer access between the GPUs, say: the packed way remains
            why = f"the peer's GPU memory cannot be mapped: {error}"
            if why not in self._logged:
                self._logged.add(why)
                _log.warning("%s; transfers with this peer go packed through pinned host memory", why)
            return RemoteRegion(
                nbytes=opened.nbytes, mapped_address=None, remote_address=opened.address, why_not_mapped=why
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

    def _mapped_ipc(self, handle: _IpcHandle) -> _Mapping:
        mapping = self._mappings.get(handle.base)
        if mapping is None:
            device = self._target()
            address = cuda.open_memory(handle.base, device=device)
            _, nbytes = cuda.address_range(address, device=device)
            mapping = _Mapping(address, nbytes, _close_ipc, address, device)
            self._mappings[handle.base] = mapping
        return mapping

    def _mapped_range(self, handle: _RangeHandle) -> _Mapping:
        key = handle.server, handle.number
        mapping = self._mappings.get(key)
        if mapping is None:
            if time.monotonic() - self._silent.get(handle.server, float("-inf")) < _SILENCE_S:
                raise BackendError("the peer did not hand out its GPU memory a moment ago")
            mapped = self._received(handle)
            mapping = self._mappings[key] = _Mapping(mapped.address, mapped.nbytes, mapped.close)
        return mapping

    def _received(self, handle: _RangeHandle) -> cuda.MappedRange:
        try:
            return receive_range(handle.server, handle.secret, handle.number, handle.span, self._target())
        except KvxferError:  # a description has many regions: not each of them is to wait as long
            self._silent[handle.server] = time.monotonic()
            raise

    def _target(self) -> int:
        """The device that is to reach the peer's memory."""
        return cuda.current_device() if self.device is None else self.device

    def pin_mapped(self, region: RemoteRegion) -> RemoteRegion:
        """The peer's lease table or staging, pinned as long as it is mapped here; as it was where that fails."""
        if self.device is None or region.mapped_address is None:
            return region
        start = region.mapping.address
        try:
            known = getattr(region.mapping, "device_address", None)
            if known is None:
                pinned = cuda.PinnedRange(start, region.mapping.nbytes, device=self.device)
                memory = region.mapping.array()  # stays mapped until it is unpinned
                weakref.finalize(region.mapping, _close_apart, _unpin_memory, pinned, memory).atexit = False
                known = region.mapping.device_address = pinned.device_address
        except cuda.CudaError as error:
            _log.warning("a peer's host memory stays pageable, which makes copies of it slower: %s", error)
            return region
        return RemoteRegion(
            nbytes=region.nbytes,
            mapped_address=region.mapped_address,
            remote_address=region.remote_address,
            mapping=region.mapping,
            device_address=known + region.mapped_address - start,
        )


def receive_range(server: str, secret: bytes, number: int, span: int, device: int) -> cuda.MappedRange:
    """Map what a peer hands out under a number, in order, for `device`. Everything in it is hostile until checked.

    Raises PeerGone, BackendError.
    """
    if not re.fullmatch(r"kvxfer-\d+-\d+-[0-9a-f]{16}", server):
        raise BackendError(f"{server[:80]!r} is no address at which kvxfer hands out memory")
    if not 0 < span <= _MOST_BYTES:
        raise BackendError(f"the peer names a range of {span} bytes")
    if len(secret) != descriptors.TOKEN_BYTES or not 0 <= number < 1 << 64:
        raise BackendError("the peer's handle holds no token and number")
    mapped = cuda.MappedRange(span, device=device)
    try:
        descriptors.receive(server, secret, number, mapped.append)
        if mapped.missing:
            raise BackendError(f"{mapped.missing} of {span} bytes are missing in what the peer handed out")
    except BaseException:
        mapped.close()
        raise
    return mapped


def _close_ipc(address: int, device: int) -> None:
    cuda.close_memory(address, device=device)


def _unpin_memory(pinned: cuda.PinnedRange, memory: np.ndarray) -> None:
    pinned.close()
    del memory


def _tagged(kind: bytes, host: Registration) -> Registration:
    return Registration(
        address=host.address, nbytes=host.nbytes, handle=kind + host.handle, keep_alive=host.keep_alive
    )


class _CudaIpcLink(Link):
    """The shared-memory link of the peer, which also opens GPU memory."""

    def __init__(self, backend: CudaIpcBackend, host: Link) -> None:
        self._backend, self._host = backend, host
        self.one_sided, self.why_not_one_sided = host.one_sided, host.why_not_one_sided

    def open(self, handle: bytes, nbytes: int) -> RemoteRegion:
        kind = handle[:1]
        if kind in (_IPC, _RANGE):
            return self._backend.open_gpu(handle, nbytes)
        if kind not in (_HOST, _PINNED):
            raise BackendError("the peer sent a handle of a kind that this release does not know")
        region = self._host.open(handle[1:], nbytes)
        return self._backend.pin_mapped(region) if kind == _PINNED else region

    def post(self, direction: Direction, runs: np.ndarray) -> Operation:
        return self._host.post(direction, runs)

    def alive(self) -> bool | None:
        return self._host.alive()

    def close(self) -> None:
        self._host.close()
