"""POSIX shared-memory segments: created, mapped, and never left behind.

A segment is a file in /dev/shm, mode 0600, called ``kvxfer-<uid>-<pid>-<token>-<number>``. Its owner holds a lock on
it (flock) for as long as it lives: the kernel drops the lock when the process ends in whatever way, so anyone who
can take the lock knows that the owner is gone, across PID namespaces too. Three nets catch what a killed process
leaves: a sweeper (a shell that waits on a pipe for the owner's death), any process that starts kvxfer later, and
peers that notice the death.

Imports NumPy and errors.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import itertools
import logging
import math
import mmap
import os
import re
import secrets
import subprocess
import threading
import time
import weakref
from pathlib import Path

import numpy as np

from kvxfer import checks
from kvxfer.errors import BackendError, InvalidRequest, SharedMemoryFull

_log = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"kvxfer-\d+-\d+-[0-9a-f]{16}-\d+")
_FRESH_S = 60.0
PAGE_BYTES = mmap.PAGESIZE


class Mapping:
    """A segment's memory in this process. The memory is unmapped when the last reference goes."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def array(self) -> np.ndarray:
        """The bytes as a uint8 array that keeps the memory mapped."""
        return np.frombuffer(self._memory, np.uint8)

    def on_unmap(self, call, *args) -> weakref.finalize:
        """Call when the memory is unmapped (or at exit); calling the result does it early, once."""
        return weakref.finalize(self._memory, call, *args)


class Segment:
    """A segment that this process owns. Its name goes with `close`, or else when its memory is unmapped."""

    def __init__(self, nbytes: int) -> None:
        """Create and reserve `nbytes` (rounded up to pages) of zeroed memory.

        Raises SharedMemoryFull when /dev/shm has no room. Memory is reserved at once, since a page that is missing
        later would kill the process (SIGBUS) instead of raising.
        """
        checks.integer("a segment's size", nbytes, 1, 1 << 48)
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self.name = _owner().next_name()
        path = DIRECTORY / self.name
        # Locked before it gets its name, so that nobody can find it without an owner.
        unnamed = path.with_name(f"{self.name}.new")
        try:
            self._fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SharedMemoryFull(f"could not create a shared-memory segment in {DIRECTORY}: {error}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            os.posix_fallocate(self._fd, 0, self.nbytes)
            self.mapping = Mapping(self._fd, self.nbytes)
            os.rename(unnamed, path)
        except OSError as error:
            os.close(self._fd)
            unnamed.unlink(missing_ok=True)
            free = os.statvfs(DIRECTORY)
            raise SharedMemoryFull(
                f"{DIRECTORY} has no room for a segment of {self.nbytes} bytes ({free.f_bavail * free.f_frsize} free): "
                f"{error}. Give it more room (in a container: --shm-size), or use smaller caches or staging."
            ) from error
        self._finalizer = self.mapping.on_unmap(_remove, path, self._fd, os.getpid(), self.mapping.address)
        _owner().segments[self.mapping.address] = (self.name, self.nbytes)

    def close(self) -> None:
        """Remove the name and the lock; idempotent."""
        self._finalizer()


def _remove(path: Path, fd: int, pid: int, address: int) -> None:
    if os.getpid() == pid:  # a forked child shares the objects but does not own the segment
        path.unlink(missing_ok=True)
        os.close(fd)
        _owner().segments.pop(address, None)


class _Owner:
    """This process as an owner of segments: its name, its segments, its sweeper."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.prefix = f"kvxfer-{os.getuid()}-{self.pid}-{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self.segments: dict[int, tuple[str, int]] = {}  # address: name, bytes
        self._sweeper = _start_sweeper(self.prefix)
        remove_orphans()

    def next_name(self) -> str:
        return f"{self.prefix}-{next(self._numbers)}"

    def find(self, address: int, nbytes: int) -> tuple[str, int] | None:
        for start, (name, size) in list(self.segments.items()):
            if start <= address and address + nbytes <= start + size:
                return name, address - start
        return None

    def stop(self) -> None:
        if self.pid != os.getpid():
            return
        if self._sweeper is not None:
            self._sweeper.stdin.close()  # it removes whatever is left
            self._sweeper.wait()


_lock = threading.RLock()  # a finalizer may run inside _owner()
_current: _Owner | None = None


def _owner() -> _Owner:
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = _Owner()
            atexit.register(_current.stop)
        return _current


def _start_sweeper(prefix: str) -> subprocess.Popen | None:
    """A shell that removes this process's segments once its end of a pipe closes, however that happens."""
    script = 'trap "" HUP INT TERM; while read -r _; do :; done; rm -f -- "$1"-*'
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", script, "kvxfer-sweeper", str(DIRECTORY / prefix)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={},
        )
    except OSError as error:
        _log.warning("no sweeper for shared-memory segments: %s; a later start of kvxfer removes what is left", error)
        return None


def find_segment(address: int, nbytes: int) -> tuple[str, int] | None:
    """The name of the own segment that holds ``[address, address + nbytes)`` and the offset in it, or None."""
    return _owner().find(address, nbytes) if _current is not None else None


def open_segment(name: str) -> tuple[Mapping, int]:
    """Map a peer's segment. Returns the mapping and an open file descriptor, for `owner_is_gone`.

    The name comes from a peer: it must look like a segment's name, and the file must be a regular one of this user
    that nobody else can touch. Raises BackendError.
    """
    if not _NAME.fullmatch(name):
        raise BackendError(f"{name!r} is not the name of a kvxfer segment")
    try:
        fd = os.open(DIRECTORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise BackendError(f"segment {name} cannot be opened: {error}") from error
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or status.st_mode & 0o177 or not status.st_size:
        os.close(fd)
        raise BackendError(f"segment {name} is not a private file of this user (mode {status.st_mode:o})")
    return Mapping(fd, status.st_size), fd


def owner_is_gone(fd: int) -> bool:
    """Whether the process that owns an opened segment has ended."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def remove_orphans() -> list[str]:
    """Remove this user's segments whose owners are gone; returns their names."""
    removed = []
    for path in DIRECTORY.glob(f"kvxfer-{os.getuid()}-*"):
        if not _NAME.fullmatch(path.name.removesuffix(".new")):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # removed or renamed since it was listed, or not ours to open
            continue
        try:
            # One that is just being made has no lock for a moment.
            fresh = path.name.endswith(".new") and time.time() - os.fstat(fd).st_mtime < _FRESH_S
            if not fresh and owner_is_gone(fd):
                path.unlink(missing_ok=True)
                removed.append(path.name)
        finally:
            os.close(fd)
    return removed


def shared_empty(shape: int | tuple[int, ...], dtype: object = "uint8", *, like: str = "numpy"):
    """An array in shared memory, which peers on this host read and write in place.

    Zeroed, C-contiguous. `dtype` is anything NumPy takes; with ``like="torch"`` it may also be the name of a torch
    dtype such as ``"bfloat16"``, and the result is a torch tensor made through DLPack. The segment's name goes when
    the array is collected or the process ends; a mapping that a peer holds stays valid until the peer lets go.

    Raises SharedMemoryFull, InvalidRequest.
    """
    if like not in ("numpy", "torch"):
        raise InvalidRequest(f"like must be 'numpy' or 'torch', got {like!r}")
    try:
        shape = tuple(checks.integer("a dimension", n, 0, 1 << 48) for n in np.atleast_1d(np.asarray(shape, object)))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"shape must be an integer or several, got {shape!r:.80}") from error
    if like == "torch":
        return _shared_torch(shape, dtype)
    try:
        dtype = np.dtype(dtype)
    except TypeError as error:
        raise InvalidRequest(f"NumPy has no dtype {dtype!r}; for torch's own dtypes pass like='torch'") from error
    if dtype.hasobject or not dtype.itemsize:
        raise InvalidRequest(f"dtype {dtype} cannot lie in shared memory: it holds no plain bytes")
    return _shared_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def _shared_bytes(nbytes: int) -> np.ndarray:
    return Segment(max(1, nbytes)).mapping.array()[:nbytes]


def _shared_torch(shape: tuple[int, ...], dtype: object):
    from kvxfer.extras import need

    torch = need("torch", "torch")
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype):
        raise InvalidRequest(f"torch has no dtype {dtype!r}")
    count = math.prod(shape)
    return torch.from_dlpack(_shared_bytes(count * torch_dtype.itemsize)).view(torch_dtype).reshape(shape)
