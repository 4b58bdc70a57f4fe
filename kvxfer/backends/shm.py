"""Host memory between processes of one host.

Mapped: memory from `shared_empty` (or `Backend.allocate`) is a segment that the peer maps. One-sided: other memory is
read and written with process_vm_readv and process_vm_writev where the kernel allows it, which is found out by trying.
Anything else goes through staging, which the connector does.

Imports base.py, segments.py and the native module.
"""

from __future__ import annotations

import errno
import os
import secrets
import weakref

import msgspec
import numpy as np

from kvxfer import _native
from kvxfer.backends.base import Backend, Capabilities, Direction, Link, Operation, Registration, RemoteRegion
from kvxfer.backends.segments import Mapping, Segment, find_segment, open_segment, owner_is_gone
from kvxfer.errors import BackendError, PeerGone

_NONCE_BYTES = 16


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    segment: str  # its first bytes are the nonce; its lock says whether the process lives
    nonce_address: int  # of a private copy of the nonce, to try process_vm_readv on
    nonce: bytes


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    segment: str  # empty: private memory
    offset: int
    address: int
    nbytes: int


class SharedMemoryBackend(Backend):
    """Shared memory of this host."""

    name = "shm"
    capabilities = Capabilities(mapped=True, one_sided=True, cross_host=False)

    def __init__(self) -> None:
        """Raises SharedMemoryFull when not even one page is left."""
        self._allocated: dict[int, Segment] = {}
        self._nonce = np.frombuffer(secrets.token_bytes(_NONCE_BYTES), np.uint8).copy()
        identity = Segment(_NONCE_BYTES)
        identity.mapping.array()[:_NONCE_BYTES] = self._nonce
        self._identity = identity.name
        self._allocated[identity.mapping.address] = identity

    def register(self, address: int, nbytes: int, device: str = "cpu") -> Registration:
        found = find_segment(address, nbytes)
        segment, offset = found if found else ("", 0)
        handle = _Handle(segment=segment, offset=offset, address=address, nbytes=nbytes)
        return Registration(address=address, nbytes=nbytes, handle=msgspec.msgpack.encode(handle))

    def deregister(self, registration: Registration) -> None:
        segment = self._allocated.pop(registration.address, None)
        if segment is not None:
            segment.close()

    def allocate(self, nbytes: int) -> Registration:
        segment = Segment(nbytes)
        address = segment.mapping.address
        self._allocated[address] = segment
        handle = _Handle(segment=segment.name, offset=0, address=address, nbytes=nbytes)
        return Registration(
            address=address, nbytes=nbytes, handle=msgspec.msgpack.encode(handle), keep_alive=segment.mapping
        )

    def hello(self) -> bytes:
        return msgspec.msgpack.encode(
            _Hello(
                pid=os.getpid(),
                segment=self._identity,
                nonce_address=self._nonce.ctypes.data,
                nonce=self._nonce.tobytes(),
            )
        )

    def connect(self, hello: bytes) -> Link:
        return _SharedMemoryLink(_decode(hello, _Hello))

    def close(self) -> None:
        for segment in self._allocated.values():
            segment.close()
        self._allocated.clear()


class _SharedMemoryLink(Link):
    def __init__(self, hello: _Hello) -> None:
        self._pid = hello.pid
        self._mappings: dict[str, Mapping] = {}
        self._closed = False
        identity, self._identity_fd = open_segment(hello.segment)
        self._finalizer = weakref.finalize(self, os.close, self._identity_fd)
        if len(hello.nonce) != _NONCE_BYTES or identity.array()[:_NONCE_BYTES].tobytes() != hello.nonce:
            self.close()
            raise BackendError(f"segment {hello.segment} does not belong to the peer: another host or container?")
        self._nonce_address, self._nonce = hello.nonce_address, hello.nonce
        self.why_not_one_sided = self._try_reading()
        self.one_sided = not self.why_not_one_sided

    def open(self, handle: bytes, nbytes: int) -> RemoteRegion:
        opened = _decode(handle, _Handle)
        if opened.nbytes < nbytes:
            raise BackendError(f"the peer's region has {opened.nbytes} bytes, {nbytes} are needed")
        if not opened.segment:
            return RemoteRegion(nbytes=opened.nbytes, mapped_address=None, remote_address=opened.address)
        mapping = self._map(opened.segment)
        if opened.offset < 0 or opened.offset + opened.nbytes > mapping.nbytes:
            raise BackendError(
                f"the peer's region ends at byte {opened.offset + opened.nbytes} of segment {opened.segment}, which "
                f"has {mapping.nbytes}"
            )
        return RemoteRegion(
            nbytes=opened.nbytes,
            mapped_address=mapping.address + opened.offset,
            remote_address=opened.address,
            mapping=mapping,
        )

    def post(self, direction: Direction, runs: np.ndarray) -> Operation:
        runs = np.ascontiguousarray(runs, np.uint64)
        code = _native.move_process_memory(self._pid, direction is Direction.WRITE, runs.ctypes.data, len(runs))
        if code == errno.ESRCH:
            raise PeerGone(f"process {self._pid} has ended")
        if code:
            raise BackendError(f"process_vm_{direction.value}v of process {self._pid} failed: {os.strerror(code)}")
        if self._try_reading():
            raise PeerGone(f"process {self._pid} is not the peer any more")
        return _MOVED

    def alive(self) -> bool | None:
        return not self._closed and not owner_is_gone(self._identity_fd)

    def close(self) -> None:
        self._closed = True
        self._finalizer()
        self._mappings.clear()

    def _map(self, name: str) -> Mapping:
        if name not in self._mappings:
            self._mappings[name], fd = open_segment(name)
            os.close(fd)  # the mapping needs none, and an engine may register many regions
        return self._mappings[name]

    def _try_reading(self) -> str:
        """Why the peer's memory cannot be read one-sidedly; empty when it can."""
        seen = np.zeros(_NONCE_BYTES, np.uint8)
        run = np.array([[seen.ctypes.data, self._nonce_address, _NONCE_BYTES]], np.uint64)
        code = _native.move_process_memory(self._pid, False, run.ctypes.data, 1)
        if code:
            return f"process_vm_readv: {os.strerror(code)}"
        return "" if seen.tobytes() == self._nonce else "process_vm_readv reaches another process (PID namespaces?)"


class _Moved(Operation):
    """process_vm_readv and process_vm_writev have ended when they return."""

    def poll(self) -> bool:
        return True


_MOVED = _Moved()


def _decode(data: bytes, kind: type):
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise BackendError(f"the peer sent a malformed {kind.__name__.lstrip('_').lower()}: {error}") from error
