"""NCCL: chunks from GPU to GPU, of one host or of two, by communicators of two processes each.

Nothing is mapped and nothing is read one-sidedly, so every transfer goes packed: the packing side gathers a chunk into
its outbox and writes it; the other side takes part, since NCCL moves bytes only where both ends call it. What the links
of a pair have to tell each other goes over the control channel. Where both sides have NCCL 2.29 or newer, chunks are
put into a window and signalled instead, which takes no multiprocessors; see nccl_channel.py.

Host memory (lease tables) goes through shared memory as in shm.py, which this backend contains; between hosts words and
records of lease tables are asked for over the control channel.

Imports base.py, shm.py, process.py, the nccl modules and errors.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import logging
import os
import threading
import time
import weakref
from typing import Any

import msgspec
import numpy as np

from kvxfer import _native
from kvxfer.backends.base import (
    Backend,
    Capabilities,
    ControlLine,
    Direction,
    Link,
    Operation,
    Registration,
    RemoteRegion,
)
from kvxfer.backends.nccl_channel import Channel, Crossing, Settings, Site, State, Taker, Writer
from kvxfer.backends.nccl_library import Gpus, Library, WindowMemory
from kvxfer.backends.nccl_messages import Accept, Answer, Failed, Go, Open, Put, Read, Taken, Window, decode, encode
from kvxfer.backends.process import Process
from kvxfer.backends.shm import SharedMemoryBackend
from kvxfer.errors import BackendError, DeadlineExceeded, InvalidRequest, KvxferError, PeerGone

_log = logging.getLogger(__name__)

MAX_CTAS = 16  # like `Limits.max_sms`: the engine's kernels and collectives keep the rest
_PIECE_BYTES = 256 << 10  # of what is read over the control channel
_MAX_ARRIVALS = 4096
_CLOSE_S = 5.0
_HOST, _GPU = "host", "gpu"
_unsettled: list[WindowMemory] = []  # of connectors that were closed while NCCL was at work: never freed


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    address: int
    nbytes: int
    gpu: str  # which one
    host: bytes  # the handle of shm


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    version: str  # of NCCL; first, so that it can be told whatever another release says after it
    path: str  # of its library
    process: Process
    host: bytes  # the greeting of shm


class NcclBackend(Backend):
    """GPU memory of this host and of others."""

    name = "nccl"
    capabilities = Capabilities(mapped=False, one_sided=False, cross_host=True, devices=frozenset({"cuda"}))

    def __init__(
        self,
        *,
        max_ctas: int = MAX_CTAS,
        one_sided: bool = True,
        open_timeout_s: float = 30.0,
        stall_timeout_s: float = 20.0,
    ) -> None:
        """`max_ctas` bounds the thread blocks, and so the multiprocessors, that one call of NCCL takes (0: its own
        choice). `one_sided` has puts into windows tried where NCCL has them. A communicator that is not made within
        `open_timeout_s`, or moves nothing for `stall_timeout_s`, is aborted; the next ticket makes another.

        Raises MissingExtra without nccl4py, BackendError without NCCL, a driver or a GPU, InvalidRequest.
        """
        if isinstance(max_ctas, bool) or not isinstance(max_ctas, int) or not 0 <= max_ctas <= 32:
            raise InvalidRequest(f"max_ctas must be an integer from 0 to 32, got {max_ctas!r}")
        for name, value in (("open_timeout_s", open_timeout_s), ("stall_timeout_s", stall_timeout_s)):
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise InvalidRequest(f"{name} must be a number of seconds above 0, got {value!r}")
        self.library, self.gpus = self._doors()
        if why := self.gpus.why_unavailable():
            raise BackendError(f"NCCL moves memory of GPUs: {why}")
        self.settings = Settings(
            max_ctas=max_ctas, one_sided=one_sided, open_timeout_s=open_timeout_s, stall_timeout_s=stall_timeout_s
        )
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            _log.warning(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue of the GPU: NCCL's kernels for "
                "transfers and those of the engine then wait for each other, and may do so for good"
            )
        self._host = SharedMemoryBackend()
        self.ordinal: int | None = None  # of the GPU that the caches lie on
        self._identity = ""
        self._gpu_spans = _Spans()
        self._host_spans = _Spans()
        self._windows: list[WindowMemory] = []
        self._allocated: dict[int, int] = {}  # of host memory, by address: bytes
        self._pinned: dict[int, Any] = {}
        self._links: weakref.WeakSet[NcclLink] = weakref.WeakSet()
        self._lock = threading.Lock()

    def _doors(self) -> tuple[Library, Gpus]:
        return Library(), Gpus()

    # --- this process's memory ------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int, device: str = "cpu") -> Registration:
        if device.split(":")[0] not in self.capabilities.devices:
            return self._on_host(self._host.register(address, nbytes))
        ordinal = self.gpus.ordinal(device)
        with self._lock:
            if self.ordinal is None:
                self.ordinal, self._identity = ordinal, self.gpus.identity(ordinal)
                for start, size in self._allocated.items():
                    self._pin(start, size)
            elif self.ordinal != ordinal:
                raise BackendError(
                    f"this connector's caches lie on GPU {self.ordinal}, another on {ordinal}: use a connector for "
                    "each GPU"
                )
            self._gpu_spans.add(address, nbytes)
        return _registration(_Handle(kind=_GPU, address=address, nbytes=nbytes, gpu=self._identity, host=b""))

    def deregister(self, registration: Registration) -> None:
        handle = _decode(registration.handle, _Handle)
        if handle.kind == _GPU:
            self._gpu_spans.remove(handle.address, handle.nbytes)
            return
        self._host_spans.remove(handle.address, handle.nbytes)
        with self._lock:
            self._allocated.pop(handle.address, None)
            self._pinned.pop(handle.address, None)
        self._host.deregister(registration)

    def allocate(self, nbytes: int) -> Registration:
        memory = self._host.allocate(nbytes)
        with self._lock:
            self._allocated[memory.address] = memory.nbytes
            if self.ordinal is not None:
                self._pin(memory.address, memory.nbytes)
        return self._on_host(memory)

    def _pin(self, address: int, nbytes: int) -> None:
        try:
            self._pinned[address] = self.gpus.pin(address, nbytes, self.ordinal)
        except BackendError as error:
            _log.warning("the lease table stays pageable, so publishing waits for streams on the host: %s", error)

    def _on_host(self, host: Registration) -> Registration:
        self._host_spans.add(host.address, host.nbytes)
        handle = _Handle(kind=_HOST, address=host.address, nbytes=host.nbytes, gpu="", host=host.handle)
        return _registration(handle, keep_alive=host.keep_alive)

    def allocate_on_gpu(self, nbytes: int, ordinal: int) -> WindowMemory | None:
        """Memory that windows may be made of, where puts are possible; None where ordinary memory does as well."""
        if not self.settings.one_sided or self.library.missing:
            return None
        made: list[WindowMemory | BaseException] = []

        def allocate() -> None:
            try:
                self.gpus.make_current(ordinal)
                made.append(self.library.allocate(nbytes))
            except BaseException as error:
                made.append(error)

        thread = threading.Thread(target=allocate, name="kvxfer-nccl", daemon=True)  # its device stays its own
        thread.start()
        thread.join()
        if isinstance(made[0], BaseException):
            raise made[0]
        with self._lock:
            self._windows.append(made[0])
        return made[0]

    def window_memory(self, address: int) -> tuple[int, int] | None:
        """Address and bytes of the memory from `allocate_on_gpu` around an address, if there is some."""
        with self._lock:
            for memory in self._windows:
                if memory.address <= address < memory.address + memory.nbytes:
                    return memory.address, memory.nbytes
        return None

    # --- peers ----------------------------------------------------------------------------------------------

    def hello(self) -> bytes:
        return msgspec.msgpack.encode(
            _Hello(
                version=self.library.version,
                path=self.library.path,
                process=Process.this(),
                host=self._host.hello(),
            )
        )

    def connect(self, hello: bytes) -> Link:
        version, path, *_ = [*_decode(hello, list), None, None]
        if version != self.library.version:
            raise BackendError(
                f"the peer has NCCL {version!s:.40} ({path!s:.200}), this side {self.library}: NCCL joins equal "
                "releases only, so install one on both sides (what LD_PRELOAD or the environment brings counts)"
            )
        link = NcclLink(self, _decode(hello, _Hello), self._join_host(hello))
        self._links.add(link)
        return link

    def _join_host(self, hello: bytes) -> Link | None:
        """The shared-memory link of a peer on this host; None for one on another."""
        try:
            return self._host.connect(_decode(hello, _Hello).host)
        except BackendError as error:
            _log.debug("not on this host: %s", error)
            return None

    def close(self) -> None:
        links = list(self._links)
        for link in links:
            link.hang_up(PeerGone("this side closed"))
        until = time.monotonic() + _CLOSE_S
        while not all(link.is_at_rest for link in links) and time.monotonic() < until:
            time.sleep(0.001)
        if not all(link.is_at_rest for link in links):
            _unsettled.extend(self._windows)
        for link in links:
            link.close()
        self._windows.clear()
        self._pinned.clear()  # before the memory is unmapped
        self._host.close()

    # --- what links use -------------------------------------------------------------------------------------

    def site(self, line: ControlLine) -> Site:
        """What the channels of a link need. Raises BackendError before a cache is registered."""
        ordinal = self.ordinal
        if ordinal is None:
            raise BackendError("the peer wants to move memory of a GPU, and this side has registered none")

        def may_call() -> bool:
            if self.gpus.is_current(ordinal):
                return True
            if line.is_progress():  # kvxfer's own thread; any other keeps its device, and leaves the call to this one
                self.gpus.make_current(ordinal)
                return True
            return False

        return Site(
            library=self.library,
            gpus=self.gpus,
            ordinal=ordinal,
            settings=self.settings,
            say=lambda said: line.say(encode(said)),
            may_call=may_call,
            window_memory=self.window_memory,
        )

    def same_gpu(self, handle: _Handle) -> bool:
        """Whether a peer's memory lies on the GPU of this side, which NCCL does not join with itself."""
        return bool(self._identity) and handle.gpu == self._identity

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether all of these bytes are GPU memory that is registered here."""
        return self._gpu_spans.hold(address, nbytes)

    def read_host(self, address: int, nbytes: int) -> bytes:
        """Registered host memory, for a peer. Raises BackendError."""
        if not 0 < nbytes <= _PIECE_BYTES or not self._host_spans.hold(address, nbytes):
            raise BackendError(f"the peer wants to read {nbytes} bytes at {address:#x}, which it may not")
        if nbytes == 8 and address % 8 == 0:
            return _native.load_word(address).to_bytes(8, "little")
        return ctypes.string_at(address, nbytes)


class NcclLink(Link):
    """One peer: a channel for what this side writes, one for what it takes, and questions about host memory."""

    one_sided = False
    why_not_one_sided = "NCCL moves bytes only where both ends take part"

    def __init__(self, backend: NcclBackend, hello: _Hello, host: Link | None) -> None:
        self._backend, self._host, self._process = backend, host, hello.process
        self.one_sided_devices = backend.capabilities.devices  # where `post` writes to, with the peer's help
        self._line: ControlLine | None = None
        self._writer: Writer | None = None
        self._taker: Taker | None = None
        self._arrivals: dict[int, Crossing] = {}  # by number; not asked for yet
        self._questions: dict[int, _Question] = {}
        self._keys = itertools.count(1)
        self._ended: KvxferError | None = None
        self._lock = threading.Lock()

    # --- memory ---------------------------------------------------------------------------------------------

    def open(self, handle: bytes, nbytes: int) -> RemoteRegion:
        opened = _decode(handle, _Handle)
        if opened.nbytes < nbytes or opened.kind not in (_HOST, _GPU):
            raise BackendError(f"the peer's {opened.kind:.10} region has {opened.nbytes} bytes, {nbytes} are needed")
        if opened.kind == _HOST and self._host is not None:
            return self._host.open(opened.host, nbytes)
        if opened.kind == _GPU and self._backend.same_gpu(opened):
            raise BackendError(
                f"both caches lie on one GPU ({opened.gpu}), which NCCL does not join with itself: use cuda_ipc"
            )
        return RemoteRegion(
            nbytes=opened.nbytes,
            mapped_address=None,
            remote_address=opened.address,
            why_not_mapped="NCCL maps nothing",
        )

    def post(self, direction: Direction, runs: np.ndarray) -> Operation:
        if direction is Direction.READ or len(runs) != 1:
            raise BackendError("NCCL writes one run at a time, and reads none")
        local, remote, nbytes = (int(value) for value in runs[0])
        if not self._backend.holds(local, nbytes):
            raise BackendError(
                "NCCL moves memory of GPUs, and this chunk lies in host memory: leave checksums=True off between hosts"
            )
        return self._channel(Writer).put(local, remote, nbytes)

    def arrival(self, address: int, announced: int) -> Operation:
        with self._lock:
            arrival = self._arrivals.pop(announced, None)
        if arrival is None or arrival.local != address:
            raise BackendError(f"the peer's link has not announced chunk {announced} for {address:#x}")
        return arrival

    def read(self, remote_address: int, nbytes: int, *, timeout_s: float) -> bytes:
        until, pieces = time.monotonic() + timeout_s, []
        for first in range(0, nbytes, _PIECE_BYTES):
            pieces.append(self._ask(remote_address + first, min(_PIECE_BYTES, nbytes - first), until))
        return b"".join(pieces)

    def _ask(self, address: int, nbytes: int, until: float) -> bytes:
        question = _Question()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            key = next(self._keys)
            self._questions[key] = question
        self._line.say(encode(Read(key=key, address=address, nbytes=nbytes)))
        if not question.answered.wait(max(0.0, until - time.monotonic())):
            self._questions.pop(key, None)
            raise DeadlineExceeded(f"the peer has not answered what lies in {nbytes} bytes of its memory")
        if question.error is not None:
            raise question.error
        if len(question.data) != nbytes:
            raise BackendError(f"the peer answered {len(question.data)} bytes where {nbytes} were asked for")
        return question.data

    # --- the conversation -----------------------------------------------------------------------------------

    def converse(self, line: ControlLine) -> None:
        self._line = line

    def hear(self, payload: bytes) -> None:
        if not payload:
            self.hang_up(BackendError("the peer reaches this process by another backend: give both the same order"))
            return
        said = decode(payload)
        if isinstance(said, Read):
            self._answer(said)
        elif isinstance(said, Answer):
            question = self._questions.pop(said.key, None)
            if question is not None:
                question.settle(said.data, BackendError(f"the peer: {said.why_not}") if said.why_not else None)
        elif isinstance(said, Failed):
            channel = self._channel(Taker if said.writing else Writer)
            channel.fail(BackendError(f"the peer gave the NCCL channel up: {said.reason}"), tell=False)
        elif isinstance(said, Put):
            self._announced(said)
        else:
            assert isinstance(said, (Open, Go, Accept, Window, Taken))
            self._channel(Taker if isinstance(said, (Open, Go)) else Writer).hear(said)

    def _announced(self, said: Put) -> None:
        taker = self._channel(Taker)
        try:
            if not self._backend.holds(said.address, said.nbytes):
                raise BackendError(f"{said.nbytes} bytes at {said.address:#x} are not registered for peers to write to")
            arrival = taker.announce(said)
        except BackendError as error:  # the ends do not agree any more on what comes next
            taker.fail(error)
            raise
        with self._lock:
            self._arrivals[arrival.announced] = arrival
            while len(self._arrivals) > _MAX_ARRIVALS:  # of transfers that were stopped
                del self._arrivals[next(iter(self._arrivals))]
        self._line.until(arrival.poll, lambda _: None)

    def _answer(self, said: Read) -> None:
        try:
            answer = Answer(key=said.key, data=self._backend.read_host(said.address, said.nbytes), why_not="")
        except BackendError as error:
            answer = Answer(key=said.key, data=b"", why_not=str(error))
        self._line.say(encode(answer))

    def _channel(self, kind: type[Channel]) -> Channel:
        with self._lock:
            if self._ended is not None:
                raise self._ended
            if self._line is None:
                raise BackendError("the session with the peer is not open yet")
            found = self._writer if kind is Writer else self._taker
            if found is None:
                found = kind(self._backend.site(self._line))
                if kind is Writer:
                    self._writer = found
                else:
                    self._taker = found
        return found

    @property
    def _channels(self) -> list[Channel]:
        return [channel for channel in (self._writer, self._taker) if channel is not None]

    # --- whether the peer lives -----------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        return self._ended is not None or any(channel.state is State.FAILED for channel in self._channels)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing that NCCL was asked for over this link is at work."""
        return all(channel.is_at_rest for channel in self._channels)

    def alive(self) -> bool | None:
        if self._host is not None:
            return self._host.alive()
        if self._process.has_ended():
            return False
        # What this side receives comes only while it takes part; what is put into a window comes whenever it does.
        has_window = self._taker is not None and self._taker.has_window
        return False if self.lost and self.is_at_rest and not has_window else None

    def hang_up(self, reason: KvxferError) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            questions, self._questions = list(self._questions.values()), {}
        for question in questions:
            question.settle(b"", reason)
        for channel in self._channels:
            channel.fail(reason, tell=False)

    def close(self) -> None:
        self.hang_up(PeerGone("the link to the peer is closed"))
        if self._host is not None:
            self._host.close()


class _Question:
    """Somebody waits for bytes of the peer's host memory."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.data, self.error = b"", None

    def settle(self, data: bytes, error: KvxferError | None) -> None:
        self.data, self.error = data, error
        self.answered.set()


class _Spans:
    """Registered memory. A piece may be registered several times. Thread-safe."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._spans = sorted([*self._spans, (address, nbytes)])

    def remove(self, address: int, nbytes: int) -> None:
        with self._lock:
            spans = list(self._spans)
            if (address, nbytes) in spans:
                spans.remove((address, nbytes))
            self._spans = spans

    def hold(self, address: int, nbytes: int) -> bool:
        """Whether one of them holds all of these bytes."""
        spans = self._spans
        before = spans[: bisect.bisect_right(spans, (address, 1 << 64))]
        return nbytes > 0 and any(address + nbytes <= start + size for start, size in reversed(before))


def _registration(handle: _Handle, keep_alive: object = None) -> Registration:
    return Registration(
        address=handle.address, nbytes=handle.nbytes, handle=msgspec.msgpack.encode(handle), keep_alive=keep_alive
    )


def _decode(data: bytes, kind: type):
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise BackendError(f"the peer sent a malformed {kind.__name__.lstrip('_').lower()}: {error}") from error
