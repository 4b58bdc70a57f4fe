"""The doors to NCCL and to the GPU: nccl4py's bindings with their errors turned into ours, streams and events.

Every communicator is made non-blocking: calls return at once and `Communicator.ready` says when NCCL has done what was
asked. Calls release the GIL. A communicator takes calls of one thread at a time; its channel sees to that.

Imports errors and, at first use, nccl4py, cuda.core and kvxfer.cuda.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import weakref
from types import ModuleType
from typing import Any, Protocol

from kvxfer.errors import BackendError, MissingExtra, ResourceExhausted

_UNIQUE_ID_BYTES = 128
_ONE_SIDED = ("ncclCommWindowRegister", "ncclPutSignal", "ncclWaitSignal")
_COLL_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC: what puts need of a window
_PRIORITY = -1  # before the engine's kernels: NCCL takes few multiprocessors, and somebody waits for it


class Library:
    """The loaded libnccl, through nccl4py."""

    def __init__(self, bindings: Any = None) -> None:
        """`bindings` is nccl4py's module ``nccl.bindings.nccl``, imported unless given.

        Raises MissingExtra without nccl4py, BackendError where it finds no libnccl.
        """
        self._nccl = nccl = bindings or _bindings()
        try:
            version = int(nccl.get_version())
            self.path = str(nccl.get_library_path() or "an unknown place")
        except (ImportError, RuntimeError, nccl.NCCLError) as error:
            raise BackendError(f"nccl4py finds no libnccl: install nvidia-nccl-cu13 ({str(error).strip()})") from error
        self.version = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        self.missing = self._missing()
        """The functions of the one-sided way that this libnccl lacks."""

    def __str__(self) -> str:
        return f"NCCL {self.version} ({self.path})"

    def _missing(self) -> tuple[str, ...]:
        try:
            loaded = ctypes.CDLL(self.path)
        except OSError:
            return _ONE_SIDED
        return tuple(name for name in _ONE_SIDED if not hasattr(loaded, name))

    def unique_id(self) -> bytes:
        """What both ends of a new communicator must have. NCCL listens for the other end until it has come."""
        with self._translated("NCCL makes no unique id"):
            return bytes(self._nccl.get_unique_id())

    def communicator(self, unique_id: bytes, rank: int, *, max_ctas: int) -> Communicator:
        """Begin to join as one of two, on the calling thread's device. `max_ctas` 0 leaves the number to NCCL.

        Raises BackendError.
        """
        if len(unique_id) != _UNIQUE_ID_BYTES:
            raise BackendError(f"a unique id of NCCL has {_UNIQUE_ID_BYTES} bytes, the peer sent {len(unique_id)}")
        config = self._nccl.Config()
        config.blocking = 0
        if max_ctas:
            config.max_ctas = max_ctas
        with self._translated("NCCL makes no communicator"):
            made = self._nccl.comm_init_rank_scalable(2, rank, 1, bytearray(unique_id), config.ptr)
        return Communicator(self, made)

    def allocate(self, nbytes: int) -> WindowMemory:
        """Memory of the calling thread's device that windows may be made of. Raises ResourceExhausted."""
        try:
            return WindowMemory(self._nccl, int(self._nccl.mem_alloc(nbytes)), nbytes)
        except self._nccl.NCCLError as error:
            raise ResourceExhausted(f"NCCL has no {nbytes} bytes of GPU memory for staging: {error}") from error

    def _translated(self, what: str, comm: Any = None) -> _Translated:
        return _Translated(self, what, comm)

    def _last_error(self, comm: Any) -> str:
        said = self._nccl.get_last_error(comm) if comm else ""
        return f" ({said.strip()})" if said else ""


class _Translated:
    """Around calls of NCCL: its errors become ours. A class, since a generator costs more than some of the calls."""

    __slots__ = ("_comm", "_library", "_what")

    def __init__(self, library: Library, what: str, comm: Any) -> None:
        self._library, self._what, self._comm = library, what, comm

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, self._library._nccl.NCCLError):
            raise BackendError(f"{self._what}: {error}{self._library._last_error(self._comm)}") from error
        if isinstance(error, RuntimeError):  # a function that this libnccl lacks
            raise BackendError(f"{self._what}: {error}") from error


class WindowMemory:
    """Memory of NCCL's own allocator, freed when nobody holds it."""

    def __init__(self, nccl: Any, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        weakref.finalize(self, _free, nccl, address).atexit = False  # the driver does it then


def _free(nccl: Any, address: int) -> None:
    try:
        nccl.mem_free(address)
    except (nccl.NCCLError, RuntimeError):  # the driver may be gone, and the memory with it
        pass


class Communicator:
    """Two ranks: 0 writes, 1 takes. One thread at a time."""

    def __init__(self, library: Library, comm: Any) -> None:
        self._library, self._nccl, self._comm = library, library._nccl, comm
        self._uint8 = int(self._nccl.DataType.Uint8)
        self._success, self._in_progress = int(self._nccl.Result.Success), int(self._nccl.Result.InProgress)
        self._signals: dict[int, bytearray] = {}  # what is waited for, by how many
        self._window: Any = None

    def ready(self) -> bool:
        """Whether NCCL has done what it was last asked for. Raises BackendError when the communicator has failed."""
        with self._library._translated("NCCL's communicator has failed", self._comm):
            state = int(self._nccl.comm_get_async_error(self._comm))
            if state not in (self._success, self._in_progress):
                raise self._nccl.NCCLError(state)
        return state == self._success

    def send(self, address: int, nbytes: int, stream: int) -> None:
        """Enqueue a send to the other rank."""
        with self._library._translated("NCCL cannot send", self._comm):
            self._nccl.send(address, nbytes, self._uint8, 1, self._comm, stream)

    def receive(self, address: int, nbytes: int, stream: int) -> None:
        """Enqueue a receive from the other rank."""
        with self._library._translated("NCCL cannot receive", self._comm):
            self._nccl.recv(address, nbytes, self._uint8, 0, self._comm, stream)

    def register_window(self, address: int, nbytes: int) -> None:
        """Begin to make one window of the memory of both ranks, as many bytes at each."""
        with self._library._translated("NCCL makes no window", self._comm):
            self._window = self._nccl.comm_window_register(self._comm, address, nbytes, _COLL_SYMMETRIC)

    @property
    def has_window(self) -> bool:
        """Whether there is a window, once `ready`."""
        return bool(self._window)

    def put(self, address: int, nbytes: int, offset: int, stream: int) -> None:
        """Enqueue a write of window memory to `offset` of the other rank's, and a signal behind it."""
        with self._library._translated("NCCL cannot put", self._comm):
            self._nccl.put_signal(address, nbytes, self._uint8, 1, self._window, offset, 0, 0, 0, self._comm, stream)

    def await_signals(self, count: int, stream: int) -> None:
        """Let a stream wait for so many more signals of the other rank."""
        signals = self._signals.get(count)
        if signals is None:
            wanted = self._nccl.WaitSignalDesc()
            wanted.op_cnt, wanted.peer, wanted.sig_idx, wanted.ctx = count, 0, 0, 0
            signals = self._signals[count] = bytearray(bytes(wanted))
        with self._library._translated("NCCL cannot wait for a signal", self._comm):
            self._nccl.wait_signal(1, signals, self._comm, stream)

    def abort(self) -> None:
        """End it and what it has enqueued, without the other rank. May take a while; idempotent."""
        comm, self._comm = self._comm, None
        if comm:
            with self._library._translated("NCCL cannot abort"):
                self._nccl.comm_abort(comm)


class Stream(Protocol):
    """A stream of a device."""

    address: int

    def wait_for(self, event: Event) -> None:
        """Let what is enqueued from now on wait for an event."""


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: int) -> None:
        """Mark this point of the stream."""

    def done(self) -> bool:
        """Whether everything before it has passed."""


class Gpus:
    """The GPUs of this process, as far as the backend needs them."""

    kind = "cuda"

    def why_unavailable(self) -> str:
        """Why no GPU can be used from here, or an empty string."""
        from kvxfer import cuda

        return cuda.why_unavailable()

    def ordinal(self, device: str) -> int:
        """The number of a device that a layout names."""
        from kvxfer import cuda

        return int(device.removeprefix("cuda:")) if ":" in device else cuda.current_device()

    def identity(self, ordinal: int) -> str:
        """The same in every process that sees this GPU, under whatever number."""
        return str(_cuda_core().Device(ordinal).uuid)

    def is_current(self, ordinal: int) -> bool:
        """Whether it is the calling thread's device: only then do NCCL's calls leave no trace on another."""
        from kvxfer import cuda

        return cuda.current_device() == ordinal

    def make_current(self, ordinal: int) -> None:
        """Make it the calling thread's device, which must be one of kvxfer's threads."""
        _cuda_core().Device(ordinal).set_current()

    def pin(self, address: int, nbytes: int, ordinal: int) -> Any:
        """Page-lock host memory for as long as the result is held: streams then write words of lease tables."""
        from kvxfer import cuda

        return cuda.PinnedRange(address, nbytes, device=ordinal)

    def stream(self, ordinal: int) -> Stream:
        """A new stream."""
        from kvxfer import cuda

        return cuda.Stream(device=ordinal, priority=_PRIORITY)

    def event(self, ordinal: int) -> Event:
        """A new event."""
        from kvxfer import cuda

        return cuda.Event(device=ordinal)


def _cuda_core() -> ModuleType:
    return importlib.import_module("cuda.core")


def _bindings() -> ModuleType:
    try:
        return importlib.import_module("nccl.bindings.nccl")
    except ImportError as error:
        raise MissingExtra(
            "this needs NVIDIA's nccl4py and libnccl: pip install 'kvxfer[nccl]' (the PyPI package pynccl, of 2020, is "
            f"neither, and of no use here) [{error}]"
        ) from error
