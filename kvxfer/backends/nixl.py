"""NIXL: one-sided reads and writes of registered memory, on one host or between hosts, over what UCX finds.

Nothing is mapped. NIXL takes a descriptor for every piece and UCX pays for each, so what is scattered goes packed, and
what lies in few large runs goes direct; `NixlLink.measure` gives what that is decided by.

Agents learn of each other through the control channel: neither NIXL's listener nor its pickled descriptors are used.

Imports base.py, nixl_agent.py, process.py and errors.
"""

from __future__ import annotations

import bisect
import collections
import hashlib
import logging
import mmap
import os
import threading
import time
import weakref
from pathlib import Path

import msgspec
import numpy as np

from kvxfer.backends.base import Backend, Capabilities, Costs, Direction, Link, Registration, RemoteRegion, wait
from kvxfer.backends.nixl_agent import HOST, Agent, Connection, Request
from kvxfer.backends.process import Process
from kvxfer.errors import BackendError, DeadlineExceeded, KvxferError, PeerGone, ResourceExhausted

_log = logging.getLogger(__name__)

_SCRATCH_BYTES = 1 << 20  # registered at start, for measuring a link
_NOTE_BYTES = 64 << 10  # a piece of what is read for `Link.read`
_PROBE_BYTES = 64
_PROBE_S = 1.0  # between two looks at a silent peer
_MAX_PROBES = 12  # unanswered
_DIGEST_BYTES = 16
_BOTH_WAYS = ("tcp", "rc", "cuda_copy", "gdr_copy", "self")  # over which a connection that one side closed is closed
_PIECES, _PIECE_BYTES = 64, 4 << 10  # of a measurement
_TRIES = 5
_LEAST_RUN_S = 2e-7  # noise must not make runs look free
_MEASURE_TIMEOUT_S = 5.0
_LARGE_BYTES, _AT_ONCE_S = 1 << 20, 200e-6  # a post of so much that costs its thread less only starts something

Span = tuple[int, int, int]  # address, bytes, device


class _Memory(msgspec.Struct, frozen=True, array_like=True):
    """The handle of a region."""

    agent: str
    address: int
    nbytes: int
    device: int
    metadata: bytes  # sealed, as NIXL's are everywhere here: NIXL and UCX end the process over bytes they do not know


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    version: str  # of NIXL; first, so that it can be told whatever another release says after it
    agent: str
    process: Process
    metadata: bytes
    scratch: _Memory


class _Spans:
    """Where registered memory lies, by address."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        with self._lock:
            self._spans = sorted({*self._spans, span})

    def remove(self, span: Span) -> None:
        with self._lock:
            self._spans = [other for other in self._spans if other != span]

    def device(self, address: int) -> int:
        """Of the memory at an address. Raises BackendError where nothing is registered."""
        spans = self._spans
        for start, nbytes, device in reversed(spans[: bisect.bisect_right(spans, (address, 1 << 64, 0))]):
            if start <= address < start + nbytes:
                return device
        raise BackendError(f"no registered memory at {address:#x}")


class NixlBackend(Backend):
    """Memory of this host and of others."""

    name = "nixl"
    capabilities = Capabilities(mapped=False, one_sided=True, cross_host=True, devices=frozenset({"cpu", "cuda"}))

    def __init__(self) -> None:
        """Raises MissingExtra without NIXL, BackendError when UCX does not start."""
        self._agent = Agent()
        self._spans = _Spans()
        self._registered: dict[Span, tuple[int, bytes]] = {}  # how often, and what a peer has to load
        self._connections: dict[str, Connection] = {}  # by peers' agents
        self._left: collections.deque[Connection] = collections.deque()  # by links that are gone
        self._allocated: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self._scratch = self.allocate(_SCRATCH_BYTES)
        self._scratch_lock = threading.Lock()
        self.probe_note = self.allocate(_PROBE_BYTES)  # written to by probes of all links; nobody reads it
        self._notes: collections.deque[Registration] = collections.deque()  # not in use
        self._late: collections.deque[tuple[Request, Registration]] = collections.deque()  # nobody waits for these

    def register(self, address: int, nbytes: int, device: str = "cpu") -> Registration:
        span = (address, nbytes, HOST if device == "cpu" else int(device.removeprefix("cuda").lstrip(":") or 0))
        with self._lock:
            times, metadata = self._registered.get(span, (0, b""))
            if not times:
                metadata = _sealed(self._agent.register(*span))
                self._spans.add(span)
            self._registered[span] = times + 1, metadata
        memory = _Memory(agent=self._agent.name, address=address, nbytes=nbytes, device=span[2], metadata=metadata)
        return Registration(address=address, nbytes=nbytes, handle=msgspec.msgpack.encode(memory))

    def deregister(self, registration: Registration) -> None:
        memory = _decode(registration.handle, _Memory)
        span = (memory.address, memory.nbytes, memory.device)
        with self._lock:
            times, metadata = self._registered.pop(span, (0, b""))
            if times > 1:
                self._registered[span] = times - 1, metadata
            elif times:
                self._spans.remove(span)
                self._agent.deregister(*span)
                self._allocated.pop(memory.address, None)

    def allocate(self, nbytes: int) -> Registration:
        try:
            memory = _zeros(nbytes)
        except MemoryError as error:
            raise ResourceExhausted(f"no memory for {nbytes} bytes of lease table or staging") from error
        registration = self.register(memory.ctypes.data, nbytes)
        self._allocated[registration.address] = memory
        return registration

    def hello(self) -> bytes:
        scratch = _decode(self._scratch.handle, _Memory)
        return msgspec.msgpack.encode(
            _Hello(
                version=self._agent.version,
                agent=self._agent.name,
                process=Process.this(),
                metadata=_sealed(self._agent.address()),
                scratch=scratch,
            )
        )

    def connect(self, hello: bytes) -> Link:
        version = next(iter(_decode(hello, list)), None)
        if version != self._agent.version:
            raise BackendError(f"the peer has NIXL {version!r:.40}, this side {self._agent.version!r}: install one")
        return NixlLink(self, _decode(hello, _Hello))

    def close(self) -> None:
        self._agent.close()
        self._allocated.clear()

    # --- what links use -------------------------------------------------------------------------------------

    def meet(self, hello: _Hello) -> Connection:
        """Load a peer's agent, which several links may share. Raises BackendError."""
        with self._lock:
            self._forget_the_left()
            known = self._connections.get(hello.agent)
            if known is None or known.lost:
                if hello.agent != self._agent.name:
                    self._agent.forget(hello.agent)
                    self._agent.load(_unsealed(hello.metadata), hello.agent)
                known = self._connections[hello.agent] = Connection(hello.agent)
            known.links += 1
            return known

    def part(self, connection: Connection) -> None:
        """A link that used the connection is gone. Any thread, at any time; takes no lock."""
        self._left.append(connection)

    def _forget_the_left(self) -> None:
        """Drop connections that no link uses and on which nothing is under way any more."""
        while self._left:
            self._left.popleft().links -= 1
        for name, connection in list(self._connections.items()):
            if not connection.links and not connection.under_way:
                del self._connections[name]
                self._agent.forget(name)

    def learn(self, connection: Connection, memory: _Memory) -> None:
        """Load what a peer said of a region. Raises BackendError, and PeerGone when the connection was lost."""
        if memory.agent == self._agent.name:
            return
        with self._lock:
            if connection.lost:
                raise PeerGone("NIXL has lost the connection to the peer's agent")
            self._agent.load(_unsealed(memory.metadata), memory.agent)

    def post(self, direction: Direction, runs: np.ndarray, peer: Connection, remote_device: int) -> Request:
        """Start moving runs between this process's registered memory and a peer's."""
        local_device = self._spans.device(int(runs[0, 0]))
        return self._agent.post(direction, runs, peer, local_device=local_device, remote_device=remote_device)

    def read(self, link: Link, address: int, nbytes: int, timeout_s: float) -> bytes:
        """A few bytes of a peer's memory, by way of registered notes."""
        pieces = []
        for first in range(0, nbytes, _NOTE_BYTES):
            note, count = self._take_note(), min(_NOTE_BYTES, nbytes - first)
            operation = None
            try:
                operation = link.post(Direction.READ, np.array([[note.address, address + first, count]], np.uint64))
                wait(operation, timeout_s, what=f"reading {nbytes} bytes of the peer's memory")
            except DeadlineExceeded:
                self._late.append((operation, note))  # which may yet be written to
                raise
            except KvxferError:
                self._notes.append(note)
                raise
            pieces.append(self._allocated[note.address][:count].tobytes())
            self._notes.append(note)
        return b"".join(pieces)

    def _take_note(self) -> Registration:
        for _ in range(len(self._late)):
            operation, note = self._late.popleft()
            try:
                ended = operation.poll()
            except KvxferError:
                ended = True
            (self._notes if ended else self._late).append(note if ended else (operation, note))
        try:
            return self._notes.pop()
        except IndexError:
            return self.allocate(_NOTE_BYTES)

    def measure(self, link: Link, address: int) -> Costs:
        """What reading costs over a link, by reads of the peer's scratch at `address` into this one."""
        slots = np.arange(_PIECES, dtype=np.uint64) * np.uint64(2 * _PIECE_BYTES)  # apart, or NIXL would join them
        one, joined_bytes = slots[:1], _PIECES * _PIECE_BYTES
        shapes = [(one, _SCRATCH_BYTES), (one, 8), (one, joined_bytes), (slots, _PIECE_BYTES)]
        seconds = []
        with self._scratch_lock:
            for offsets, nbytes in [shapes[0], *shapes]:  # the first connects, and widens TCP's window
                sizes = np.full(len(offsets), nbytes, np.uint64)
                runs = np.stack([self._scratch.address + offsets, address + offsets[::-1], sizes], axis=1)
                seconds.append(min(self._time(link, runs) for _ in range(_TRIES)))
        _, large, fixed, joined, apart = seconds
        return Costs(
            operation_s=fixed,
            run_s=max(_LEAST_RUN_S, (apart - joined) / (_PIECES - 1)),
            bytes_per_s=_SCRATCH_BYTES / max(1e-9, large - fixed),
        )

    def _time(self, link: Link, runs: np.ndarray) -> float:
        started = time.perf_counter()
        wait(link.post(Direction.READ, runs), _MEASURE_TIMEOUT_S, what="measuring the link")
        return time.perf_counter() - started


class NixlLink(Link):
    """One peer's agent."""

    one_sided = True
    one_sided_devices = frozenset({"cpu", "cuda"})
    posts_at_once = False  # until some posts were seen to

    def __init__(self, backend: NixlBackend, hello: _Hello) -> None:
        """Raises BackendError for a hello that NIXL does not take."""
        self._backend, self._connection = backend, backend.meet(hello)
        self._finalizer = weakref.finalize(self, backend.part, self._connection)
        self._spans = _Spans()
        self._known: set[bytes] = set()  # handles that were opened
        self._process = hello.process
        self._closes_both_ways = _closes_both_ways(hello.process)
        self._probes: list[Request] = []
        self._probe_note, self._probe_lock = backend.probe_note, threading.Lock()
        self._doubted, self._next_probe = False, 0.0
        self._scratch = self.open(msgspec.msgpack.encode(hello.scratch), _SCRATCH_BYTES)

    def open(self, handle: bytes, nbytes: int) -> RemoteRegion:
        memory = _decode(handle, _Memory)
        if memory.nbytes < nbytes:
            raise BackendError(f"the peer's region has {memory.nbytes} bytes, {nbytes} are needed")
        if memory.agent != self._connection.name:
            raise BackendError("the peer sent a handle of another agent's memory")
        if handle not in self._known:
            self._backend.learn(self._connection, memory)
            self._spans.add((memory.address, memory.nbytes, memory.device))
            self._known.add(handle)
        return RemoteRegion(
            nbytes=memory.nbytes, mapped_address=None, remote_address=memory.address, why_not_mapped="NIXL maps nothing"
        )

    def post(self, direction: Direction, runs: np.ndarray) -> Request:
        if not self._finalizer.alive:
            raise PeerGone("the link to the peer is closed")
        runs = np.ascontiguousarray(runs, np.uint64)
        began = time.thread_time()  # of this thread alone: a post may move the bytes itself, as between hosts' memory
        request = self._backend.post(direction, runs, self._connection, self._spans.device(int(runs[0, 1])))
        if len(runs) == 1 and runs[0, 2] >= _LARGE_BYTES:
            self.posts_at_once = time.thread_time() - began < _AT_ONCE_S
        return request

    def read(self, remote_address: int, nbytes: int, *, timeout_s: float) -> bytes:
        return self._backend.read(self, remote_address, nbytes, timeout_s)

    def measure(self) -> Costs:
        return self._backend.measure(self, self._scratch.remote_address)

    @property
    def lost(self) -> bool:
        return self._connection.lost

    def doubt(self) -> None:
        self._doubted = True

    def alive(self) -> bool | None:
        """False once the connection is lost, and then carries nothing from the peer either or the peer has ended.

        The connection has to be lost in any case: bytes of a process that has ended may still be in it.
        """
        ended = self._process.has_ended()
        if (self._doubted or ended or self._connection.under_way) and not self.lost:
            try:
                self._look()
            except KvxferError as error:
                _log.debug("looking at a silent peer: %s", error)
        return False if self.lost and (self._closes_both_ways or ended) else None

    def _look(self) -> None:
        """Read a few bytes every second: NIXL speaks of a lost peer only to those who use it, and UCX over TCP waits
        for ever for the bytes of one that is cut off, if it was the peer that connected and nothing is sent to it.

        More of it while nothing is answered, at growing intervals: what was sent before the cut tells nothing.
        """
        with self._probe_lock:
            probes, self._probes = self._probes, []
            self._probes = [probe for probe in probes if not probe.poll()]
            if time.monotonic() >= self._next_probe and len(self._probes) < _MAX_PROBES:
                self._next_probe = time.monotonic() + _PROBE_S * 2 ** len(self._probes)
                note = self._probe_note.address
                run = np.array([[note, self._scratch.remote_address, 8]], np.uint64)
                self._probes.append(self.post(Direction.READ, run))

    def close(self) -> None:
        self._finalizer()


def _zeros(nbytes: int) -> np.ndarray:
    """Zeroed memory that begins at a page, so that what is copied to and from it can be moved by whole cache lines."""
    memory = np.zeros(nbytes + mmap.PAGESIZE, np.uint8)
    return memory[-memory.ctypes.data % mmap.PAGESIZE :][:nbytes]


def _closes_both_ways(peer: Process) -> bool:
    """Whether a peer whose connection was lost can write nothing more into memory of this process.

    True of TCP and of reliable connections, which this side has closed by then. Not of datagram transports, and not of
    shared memory, which a process that merely stands still may go on writing to.
    """
    names = [name.strip() for name in os.environ.get("UCX_TLS", "all").split(",")]
    if all(name.startswith(_BOTH_WAYS) for name in names):
        return True
    devices = Path("/sys/class/infiniband")
    return peer.machine != Process.this().machine and not (devices.is_dir() and any(devices.iterdir()))


def _sealed(metadata: bytes) -> bytes:
    return hashlib.blake2b(metadata, digest_size=_DIGEST_BYTES).digest() + metadata


def _unsealed(data: bytes) -> bytes:
    """NIXL's metadata as its agent wrote them. Raises BackendError for any others."""
    metadata = data[_DIGEST_BYTES:]
    if _sealed(metadata) != data:
        raise BackendError("the peer's NIXL metadata is damaged")
    return metadata


def _decode(data: bytes, kind: type):
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise BackendError(f"the peer sent a malformed {kind.__name__.lstrip('_').lower()}: {error}") from error
