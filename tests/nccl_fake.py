"""A FAKE of nccl4py's surface and of a GPU, for tests of the NCCL backend's states on machines without either.

It moves host memory over sockets. It is no substitute for runs on GPUs: it knows of NCCL what its documentation says
and no more. What it is strict about, since the real one is silent there: a communicator is called by one thread at a
time, on its own device; nothing is asked of it, or put on its stream, while it is in progress; and nobody is told
that the other end has died: what waits for it waits until it is aborted, and a stream that waits for a signal even
longer.
Breaches are collected in `breaches`, and printed.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from typing import Any, ClassVar

import numpy as np

from kvxfer.backends import nccl_library
from kvxfer.backends.base import Capabilities, ControlLine, Registration
from kvxfer.backends.nccl import NcclBackend
from kvxfer.backends.nccl_channel import Site
from kvxfer.backends.nccl_library import Gpus, Library

OPTIONS = "KVXFER_FAKE_NCCL"  # options of the fake, as JSON, for processes that tests start
_FRAME = struct.Struct("<cQQ")  # kind, offset, bytes
_mine = threading.local()

breaches: list[str] = []


def breach(what: str) -> None:
    """Somebody did what NCCL forbids."""
    breaches.append(what)
    print(f"FAKE NCCL: {what}", "".join(traceback.format_stack(limit=8)), file=sys.stderr, flush=True)


class Result(enum.IntEnum):
    Success, UnhandledCudaError, SystemError, InternalError = 0, 1, 2, 3
    InvalidArgument, InvalidUsage, RemoteError, InProgress = 4, 5, 6, 7


class DataType(enum.IntEnum):
    Uint8 = 1


class NCCLError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"{Result(status).name} ({status}): of the fake")
        self.status = status


class Config:
    def __init__(self) -> None:
        self.blocking = self.max_ctas = None

    @property
    def ptr(self) -> Config:
        return self


class WaitSignalDesc:
    def __init__(self) -> None:
        self.op_cnt = self.peer = self.sig_idx = self.ctx = 0

    def __bytes__(self) -> bytes:
        return struct.pack("<4i", self.op_cnt, self.peer, self.sig_idx, self.ctx)


# --- streams ------------------------------------------------------------------------------------------------


class FakeStream:
    """Calls, one after another, on a thread."""

    by_address: ClassVar[weakref.WeakValueDictionary[int, FakeStream]] = weakref.WeakValueDictionary()
    _addresses = itertools.count(0x1000, 16)

    def __init__(self) -> None:
        self.address = next(self._addresses)
        self.by_address[self.address] = self
        self._calls = calls = queue.SimpleQueue()
        self.unlaunched: FakeComm | None = None  # in progress with something for this stream
        threading.Thread(target=_carry_out, args=(calls,), name="fake-stream", daemon=True).start()
        weakref.finalize(self, calls.put, None)

    def enqueue(self, call: Any) -> None:
        self._calls.put(call)

    def wait_for(self, event: FakeEvent) -> None:
        self.enqueue(event._passed.wait)

    def settle(self) -> None:
        """Wait until everything enqueued so far is done."""
        passed = threading.Event()
        self.enqueue(passed.set)
        assert passed.wait(30)


def _carry_out(calls: queue.SimpleQueue) -> None:
    while (call := calls.get()) is not None:
        call()


class FakeEvent:
    def __init__(self) -> None:
        self._passed = threading.Event()
        self._passed.set()

    def record(self, stream: int) -> None:
        of = FakeStream.by_address[stream]
        if of.unlaunched is not None and not of.unlaunched.aborted.is_set():
            breach("something was put on a stream while NCCL was in progress with it")
        self._passed = passed = threading.Event()
        of.enqueue(passed.set)

    def done(self) -> bool:
        return self._passed.is_set()


class FakeGpus(Gpus):
    """One fake GPU for each process, of number 0; other threads than kvxfer's own have another device current."""

    kind = "cpu"

    def __init__(self, identity: str, devices: int) -> None:
        self._identity, self._others = identity, devices > 1

    def why_unavailable(self) -> str:
        return ""

    def ordinal(self, device: str) -> int:
        return 0

    def identity(self, ordinal: int) -> str:
        return self._identity

    def is_current(self, ordinal: int) -> bool:
        return getattr(_mine, "device", 1 if self._others else 0) == ordinal

    def make_current(self, ordinal: int) -> None:
        if not threading.current_thread().name.startswith("kvxfer-"):
            breach("the device of a thread that is not kvxfer's was changed")
        _mine.device = ordinal

    def pin(self, address: int, nbytes: int, ordinal: int) -> object:
        return object()

    def stream(self, ordinal: int) -> FakeStream:
        return FakeStream()

    def event(self, ordinal: int) -> FakeEvent:
        return FakeEvent()


# --- communicators ------------------------------------------------------------------------------------------


class FakeComm:
    """One end of a socket. Rank 0 sends and puts; rank 1 receives, and has a thread that takes puts."""

    open_ones: ClassVar[set[FakeComm]] = set()

    def __init__(self, fake: FakeNccl, rank: int, listener: socket.socket | None, name: str) -> None:
        self._fake, self.rank = fake, rank
        self.state = Result.InProgress
        self.error = ""
        self.aborted = threading.Event()
        self._changed = threading.Condition()
        self._sock: socket.socket | None = None
        self._tokens = self.signals = self.waited_signals = self._chunks = 0
        self._inbox: list[bytes] = []
        self.window: tuple[int, int] | None = None
        self._peer_has_window = self._first_call_made = self._peer_called = False
        self._busy = threading.Lock()
        self._listener = listener
        self.open_ones.add(self)
        threading.Thread(target=self._connect, args=(name,), name="fake-comm", daemon=True).start()

    def _connect(self, name: str) -> None:
        try:
            if self._fake.options["hang_init"]:
                return
            if self.rank == 0:
                self._listener.settimeout(60)
                self._sock, _ = self._listener.accept()
                self._listener.close()
            else:
                self._sock = socket.socket(socket.AF_UNIX)
                self._sock.connect("\0" + name)
        except OSError:
            return  # as NCCL does: it goes on waiting
        if self.aborted.is_set():
            self._sock.close()
            return
        threading.Thread(target=self._listen, name="fake-comm", daemon=True).start()
        self._settle()

    def _settle(self, state: Result = Result.Success) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()

    def _listen(self) -> None:
        try:
            while True:
                kind, offset, nbytes = _FRAME.unpack(self._exactly(_FRAME.size))
                data = self._exactly(nbytes) if kind in b"SP" else b""
                with self._changed:
                    if kind == b"S":
                        self._inbox.append(data)
                    elif kind == b"P":
                        ctypes.memmove(self.window[0] + offset, data, nbytes)
                        self.signals += 1
                    elif kind == b"R":
                        self._tokens += 1
                    elif kind == b"C":
                        self._peer_called = True
                    elif kind == b"W":
                        self._peer_has_window = True
                    self._changed.notify_all()
        except (OSError, EOFError, struct.error):
            pass  # the other end is gone, and nobody is told

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            more = self._sock.recv(min(1 << 20, nbytes - len(data)))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def say(self, kind: bytes, offset: int = 0, data: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            self._sock.sendall(_FRAME.pack(kind, offset, len(data)) + data)

    def wait_for(self, condition: Any, *, until_aborted: bool = True) -> bool:
        """False when it was aborted before."""
        with self._changed:
            while not condition():
                if until_aborted and self.aborted.is_set():
                    return False
                self._changed.wait(0.05)
        return True

    @contextlib.contextmanager
    def called(self, *, in_progress: bool = False) -> Any:
        """Around every call of the library."""
        if not self._busy.acquire(blocking=False):
            breach("two threads called one communicator at once")
            self._busy.acquire()
        try:
            if self.state is Result.InProgress and not in_progress:
                breach("a communicator was called while it was in progress")
            if not in_progress and not self._fake.gpus.is_current(0):
                breach("a communicator was called on another device than its own")
            yield
        finally:
            self._busy.release()

    def run(self, stream: int, call: Any) -> None:
        """Enqueue on a stream; the first call on a communicator has to connect before."""
        of = FakeStream.by_address[stream]
        if self._first_call_made:
            of.enqueue(call)
            return
        self._first_call_made = True
        self.state, of.unlaunched = Result.InProgress, self
        self.say(b"C")

        def connecting() -> None:
            if self.wait_for(lambda: self._peer_called):
                of.unlaunched = None
                of.enqueue(call)
                self._settle()

        threading.Thread(target=connecting, name="fake-comm", daemon=True).start()

    # what streams carry out

    def do_send(self, address: int, nbytes: int) -> None:
        if self.wait_for(lambda: self._tokens > 0):
            self._tokens -= 1
            if self._may_leave():
                self.say(b"S", 0, ctypes.string_at(address, nbytes))

    def _may_leave(self) -> bool:
        """Takes a chunk's time, and stands still after the last; False once aborted."""
        self._chunks += 1
        time.sleep(self._fake.options["seconds_per_chunk"])
        most = self._fake.options["most_chunks"]
        return self.wait_for(lambda: most is None or self._chunks <= most) and not self.aborted.is_set()

    def do_receive(self, address: int, nbytes: int) -> None:
        self.say(b"R")
        if self.wait_for(lambda: self._inbox):
            data = self._inbox.pop(0)
            if len(data) != nbytes:
                breach(f"{len(data)} bytes were sent where {nbytes} were to be received")
            ctypes.memmove(address, data, min(nbytes, len(data)))

    def do_put(self, address: int, nbytes: int, offset: int) -> None:
        if self._may_leave():
            self.say(b"P", offset, ctypes.string_at(address, nbytes))

    def do_wait_signal(self, count: int) -> None:
        self.waited_signals += count
        wanted = self.waited_signals
        self.wait_for(lambda: self.signals >= wanted, until_aborted=False)

    def make_window(self, window: FakeWindow) -> None:
        self.state = Result.InProgress
        self.say(b"W")

        def making() -> None:
            if self.wait_for(lambda: self._peer_has_window):
                window.there = not self._fake.options["null_window"]
                self._settle()

        threading.Thread(target=making, name="fake-comm", daemon=True).start()

    def abort(self) -> None:
        self.open_ones.discard(self)
        with self._changed:
            self.aborted.set()
            self._changed.notify_all()
        for sock in (self._sock, self._listener):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()


class FakeWindow:
    def __init__(self) -> None:
        self.there = False

    def __bool__(self) -> bool:
        return self.there


class FakeNccl:
    """Stands in for the module ``nccl.bindings.nccl``."""

    Result, DataType, NCCLError, Config, WaitSignalDesc = Result, DataType, NCCLError, Config, WaitSignalDesc

    def __init__(self, options: dict[str, Any], gpus: FakeGpus) -> None:
        self.options, self.gpus = options, gpus
        self._listeners: dict[str, socket.socket] = {}
        self.allocated: dict[int, np.ndarray] = {}

    def get_version(self) -> int:
        major, minor, patch = (int(part) for part in self.options["version"].split("."))
        return major * 10000 + minor * 100 + patch

    def get_library_path(self) -> str:
        return self.options["path"]

    def get_unique_id(self) -> bytes:
        name = f"fake-nccl-{os.getpid()}-{os.urandom(8).hex()}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + name)
        listener.listen(1)
        self._listeners[name] = listener
        return name.encode().ljust(128, b"\0")

    def comm_init_rank_scalable(self, nranks: int, rank: int, n_ids: int, ids: bytes, config: Config) -> FakeComm:
        assert (nranks, n_ids, config.blocking) == (2, 1, 0), "kvxfer makes non-blocking communicators of two"
        if not self.gpus.is_current(0):
            breach("a communicator was made on another device than the caches'")
        name = bytes(ids).rstrip(b"\0").decode()
        if self.options["fail_init"]:
            raise NCCLError(Result.SystemError)
        return FakeComm(self, rank, self._listeners.pop(name, None) if rank == 0 else None, name)

    def comm_get_async_error(self, comm: FakeComm) -> Result:
        with comm.called(in_progress=True):
            return comm.state

    def get_last_error(self, comm: FakeComm) -> str:
        return comm.error

    def comm_abort(self, comm: FakeComm) -> None:
        comm.abort()

    def send(self, address: int, count: int, kind: int, peer: int, comm: FakeComm, stream: int) -> None:
        assert (kind, peer, comm.rank) == (1, 1, 0)
        with comm.called():
            comm.run(stream, lambda: comm.do_send(address, count))

    def recv(self, address: int, count: int, kind: int, peer: int, comm: FakeComm, stream: int) -> None:
        assert (kind, peer, comm.rank) == (1, 0, 1)
        with comm.called():
            comm.run(stream, lambda: comm.do_receive(address, count))

    def comm_window_register(self, comm: FakeComm, address: int, nbytes: int, flags: int) -> FakeWindow:
        assert flags == 1, "puts need symmetric windows"
        with comm.called():
            if self.options["fail_window"]:
                raise NCCLError(Result.InvalidArgument)
            comm.window = address, nbytes
            window = FakeWindow()
            comm.make_window(window)
            return window

    def put_signal(
        self,
        address: int,
        count: int,
        kind: int,
        peer: int,
        window: FakeWindow,
        offset: int,
        signal: int,
        context: int,
        flags: int,
        comm: FakeComm,
        stream: int,
    ) -> None:
        assert (kind, peer, comm.rank, signal, context, flags) == (1, 1, 0, 0, 0, 0) and window
        start, nbytes = comm.window
        if not start <= address <= address + count <= start + nbytes or offset + count > nbytes:
            raise NCCLError(Result.InvalidArgument)
        with comm.called():
            FakeStream.by_address[stream].enqueue(lambda: comm.do_put(address, count, offset))

    def wait_signal(self, count: int, wanted: bytes, comm: FakeComm, stream: int) -> None:
        signals, *others = struct.unpack("<4i", bytes(wanted))
        assert count == 1 and signals > 0 and others == [0, 0, 0]
        with comm.called():
            FakeStream.by_address[stream].enqueue(lambda: comm.do_wait_signal(signals))

    def mem_alloc(self, nbytes: int) -> int:
        memory = np.zeros(nbytes, np.uint8)
        self.allocated[memory.ctypes.data] = memory
        return memory.ctypes.data

    def mem_free(self, address: int) -> None:
        del self.allocated[address]


class FakeLibrary(Library):
    def _missing(self) -> tuple[str, ...]:
        return () if self._nccl.options["one_sided"] else ("ncclPutSignal",)


# --- the backend --------------------------------------------------------------------------------------------

_DEFAULTS = {
    "version": "2.28.9",
    "path": "/fake/libnccl.so.2",
    "one_sided": False,
    "hang_init": False,
    "fail_init": False,
    "fail_window": False,
    "null_window": False,
    "seconds_per_chunk": 0.0,
    "most_chunks": None,  # that leave over one communicator: then it stands still
    "devices": 1,
    "gpu": "",
}
_numbers = itertools.count()


class FakeNcclBackend(NcclBackend):
    """The real backend on the fake, with host memory in the GPU's place, and with every peer on another host."""

    name = "fake_nccl"
    capabilities = Capabilities(mapped=False, one_sided=False, cross_host=True, devices=frozenset({"cpu"}))

    def __init__(self, *, fake: dict[str, Any] | None = None, **options: Any) -> None:
        given = json.loads(os.environ.get(OPTIONS, "{}")) | (fake or {})
        self._fake = _DEFAULTS | {name: value for name, value in given.items() if name in _DEFAULTS}
        super().__init__(**{name: value for name, value in given.items() if name not in _DEFAULTS} | options)

    def _doors(self) -> tuple[Library, Gpus]:
        identity = self._fake["gpu"] or f"fake GPU {os.getpid()}.{next(_numbers)}"
        gpus = FakeGpus(identity, self._fake["devices"])
        return FakeLibrary(FakeNccl(self._fake, gpus)), gpus

    def allocate(self, nbytes: int) -> Registration:
        made = super().allocate(nbytes)
        self._gpu_spans.add(made.address, nbytes)
        if not self.libnccl.missing:
            memory = nccl_library.WindowMemory.__new__(nccl_library.WindowMemory)  # shared memory is freed otherwise
            memory.address, memory.nbytes = made.address, nbytes
            self._windows.append(memory)
        return made

    def _join_host(self, hello: bytes) -> None:
        return None

    def site(self, line: ControlLine, *, same_host: bool) -> Site:
        """Puts are tried all the same: here all bytes of one have landed when it has passed its stream."""
        return super().site(line, same_host=True)


def open_communicators() -> int:
    """Of this process, not aborted."""
    return len(FakeComm.open_ones)
