"""One peer over NCCL: a channel for what this side writes, one for what it takes, and questions about host memory.

Imports base.py, process.py, the other nccl modules and errors; never nccl.py, which makes links.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvxfer.backends.base import ControlLine, Direction, Link, Operation, RemoteRegion
from kvxfer.backends.nccl_channel import Channel, State
from kvxfer.backends.nccl_ends import Taker, Writer
from kvxfer.backends.nccl_library import Event
from kvxfer.backends.nccl_messages import Answer, Came, Coming, Failed, FromTaker, Open, Read, decode, encode
from kvxfer.backends.process import Process
from kvxfer.errors import BackendError, DeadlineExceeded, KvxferError, PeerGone

if TYPE_CHECKING:
    from kvxfer.backends.nccl import NcclBackend

PIECE_BYTES = 256 << 10  # of what is read over the control channel
HOST, GPU = "host", "gpu"


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """What a peer gets to know of a region."""

    kind: str
    address: int
    nbytes: int
    gpu: str  # which one
    host: bytes  # the handle of shm


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What a peer must know to join this process."""

    version: str  # of NCCL; first, so that it can be told whatever another release says after it
    path: str  # of its library
    process: Process
    host: bytes  # the greeting of shm


class NcclLink(Link):
    """One peer: a channel for what this side writes, one for what it takes, and questions about host memory."""

    one_sided = False
    posts_at_once = posts_behind = True
    why_not_one_sided = "NCCL moves bytes only where both ends take part"

    def __init__(self, backend: NcclBackend, hello: Hello, host: Link | None) -> None:
        self._backend, self._host, self._process = backend, host, hello.process
        self.one_sided_devices = backend.capabilities.devices  # where `post` writes to, with the peer's help
        self._line: ControlLine | None = None
        self._writer: Writer | None = None
        self._taker: Taker | None = None
        self._attends = False  # whether the progress thread looks at the taker
        self._questions: dict[int, _Question] = {}
        self._keys = itertools.count(1)
        self._ended: KvxferError | None = None
        self._lock = threading.Lock()

    # --- memory ---------------------------------------------------------------------------------------------

    def open(self, handle: bytes, nbytes: int) -> RemoteRegion:
        opened = decode_struct(handle, Handle)
        if opened.nbytes < nbytes or opened.kind not in (HOST, GPU):
            raise BackendError(f"the peer's {opened.kind:.10} region has {opened.nbytes} bytes, {nbytes} are needed")
        if opened.kind == HOST and self._host is not None:
            return self._host.open(opened.host, nbytes)
        if opened.kind == GPU and self._backend.same_gpu(opened):
            raise BackendError(
                f"both caches lie on one GPU ({opened.gpu}), which NCCL does not join with itself: use cuda_ipc"
            )
        return RemoteRegion(
            nbytes=opened.nbytes,
            mapped_address=None,
            remote_address=opened.address,
            why_not_mapped="NCCL maps nothing",
        )

    def post(self, direction: Direction, runs: np.ndarray, *, after: Event | None = None) -> Operation:
        if direction is Direction.READ or len(runs) != 1:
            raise BackendError("NCCL writes one run at a time, and reads none")
        local, remote, nbytes = (int(value) for value in runs[0])
        if not self._backend.holds(local, nbytes):
            raise BackendError(
                "NCCL moves memory of GPUs, and this chunk lies in host memory: leave checksums=True off between hosts"
            )
        return self._channel(Writer).put(local, remote, nbytes, after=after)

    def arrival(self, address: int, announced: int) -> Operation:
        try:
            taker = self._channel(Taker)
            return taker.arrival(address, announced) or _Expected(taker, address, announced)
        except (PeerGone, DeadlineExceeded) as error:  # of a channel that has failed
            raise BackendError(f"chunk {announced} does not come: {error}") from error

    def read(self, remote_address: int, nbytes: int, *, timeout_s: float) -> bytes:
        until, pieces = time.monotonic() + timeout_s, []
        for first in range(0, nbytes, PIECE_BYTES):
            pieces.append(self._ask(remote_address + first, min(PIECE_BYTES, nbytes - first), until))
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
        elif isinstance(said, (Came, Coming)):
            self._come(said)
        else:
            assert isinstance(said, Open | FromTaker)
            channel = self._channel(Taker if isinstance(said, Open) else Writer)
            channel.hear(said)
            if isinstance(said, Open):
                self._attend(channel)

    def _come(self, said: Came | Coming) -> None:
        taker = self._channel(Taker)
        try:
            for chunk in said.chunks:
                if not self._backend.holds(chunk.address, chunk.nbytes):
                    raise BackendError(
                        f"{chunk.nbytes} bytes at {chunk.address:#x} are not registered for peers to write to"
                    )
            taker.tell(said)
        except BackendError as error:  # the ends do not agree any more on what comes next
            taker.fail(error)
            raise
        self._attend(taker)

    def _attend(self, taker: Taker) -> None:
        """Have the progress thread look at what comes: it may not be asked for yet, or never be."""
        if not self._attends:
            self._attends = True
            self._line.until(taker.is_idle, self._idle)

    def _idle(self, _: BaseException | None) -> None:
        self._attends = False

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
                found = kind(self._backend.site(self._line, same_host=self._host is not None))
                self._backend.channels.add(found)
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
        taker = self._taker
        comes = taker is not None and (taker.has_window or taker.state is not State.FAILED or not taker.is_at_rest)
        return False if self.lost and not comes else None

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


class _Expected(Operation):
    """A chunk that the peer has announced sooner than its link told of it: each puts its words in line by itself."""

    def __init__(self, taker: Taker, address: int, announced: int) -> None:
        self._taker, self._address, self._announced = taker, address, announced
        self._due = time.monotonic() + taker.stall_timeout_s
        self._arrival: Operation | None = None

    def poll(self) -> bool:
        if self._arrival is None:
            if time.monotonic() > self._due:  # the ends do not agree any more on what comes next
                self._taker.fail(DeadlineExceeded("the peer's link does not tell of a chunk that was announced"))
            self._arrival = self._taker.arrival(self._address, self._announced)
        return self._arrival is not None and self._arrival.poll()

    def behind(self, kernel: Callable[[int], bool]) -> Operation | None:
        return None if self._arrival is None else self._arrival.behind(kernel)


class _Question:
    """Somebody waits for bytes of the peer's host memory."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.data, self.error = b"", None

    def settle(self, data: bytes, error: KvxferError | None) -> None:
        self.data, self.error = data, error
        self.answered.set()


def decode_struct(data: bytes, kind: type):
    """A handle or a greeting of the peer's. Raises BackendError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise BackendError(f"the peer sent a malformed {kind.__name__.lower()}: {error}") from error
