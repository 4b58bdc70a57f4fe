"""NIXL: one-sided reads and writes of registered memory, on one host or between hosts, over what UCX finds.

Nothing is mapped. NIXL takes a descriptor for every piece and UCX pays for each, so what is scattered goes packed, and
what lies in few large runs goes direct; `NixlLink.measure` gives what that is decided by.

Agents learn of each other through the control channel: neither NIXL's listener nor its pickled descriptors are used.

Imports base.py, nixl_agent.py and errors.
"""

from __future__ import annotations

import bisect
import threading
import time

import msgspec
import numpy as np

from kvxfer.backends.base import Backend, Capabilities, Costs, Direction, Link, Registration, RemoteRegion, wait
from kvxfer.backends.nixl_agent import HOST, Agent, Request
from kvxfer.errors import BackendError, DeadlineExceeded, ResourceExhausted

_SCRATCH_BYTES = 1 << 20  # registered at start, for small reads and for measuring a link
_PIECES, _PIECE_BYTES = 64, 4 << 10  # of a measurement
_TRIES = 3
_MEASURE_TIMEOUT_S = 5.0

Span = tuple[int, int, int]  # address, bytes, device


class _Memory(msgspec.Struct, frozen=True, array_like=True):
    """The handle of a region."""

    agent: str
    address: int
    nbytes: int
    device: int
    metadata: bytes


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    agent: str
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
        self._loaded: dict[str, int] = {}  # peers' agents: links
        self._allocated: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self._scratch = self.allocate(_SCRATCH_BYTES)
        self._scratch_lock = threading.Lock()

    def register(self, address: int, nbytes: int, device: str = "cpu") -> Registration:
        span = (address, nbytes, HOST if device == "cpu" else int(device.removeprefix("cuda").lstrip(":") or 0))
        with self._lock:
            times, metadata = self._registered.get(span, (0, b""))
            if not times:
                metadata = self._agent.register(*span)
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
            memory = np.zeros(nbytes, np.uint8)
        except MemoryError as error:
            raise ResourceExhausted(f"no memory for {nbytes} bytes of lease table or staging") from error
        registration = self.register(memory.ctypes.data, nbytes)
        self._allocated[registration.address] = memory
        return registration

    def hello(self) -> bytes:
        scratch = _decode(self._scratch.handle, _Memory)
        return msgspec.msgpack.encode(
            _Hello(agent=self._agent.name, metadata=self._agent.address(), scratch=scratch)
        )

    def connect(self, hello: bytes) -> Link:
        return NixlLink(self, _decode(hello, _Hello))

    def close(self) -> None:
        self._agent.close()
        self._allocated.clear()

    # --- what links use -------------------------------------------------------------------------------------

    def meet(self, hello: _Hello) -> None:
        """Load a peer's agent, which several links may share. Raises BackendError."""
        with self._lock:
            if hello.agent not in self._loaded and hello.agent != self._agent.name:
                self._agent.load(hello.metadata, hello.agent)
            self._loaded[hello.agent] = self._loaded.get(hello.agent, 0) + 1

    def part(self, agent: str) -> None:
        """A link to the agent is closed; the last one forgets it."""
        with self._lock:
            self._loaded[agent] -= 1
            if not self._loaded[agent]:
                del self._loaded[agent]
                self._agent.forget(agent)

    def learn(self, memory: _Memory) -> None:
        """Load what a peer said of a region. Raises BackendError."""
        if memory.agent != self._agent.name:
            self._agent.load(memory.metadata, memory.agent)

    def post(self, direction: Direction, runs: np.ndarray, peer: str, remote_device: int) -> Request:
        """Start moving runs between this process's registered memory and a peer's."""
        local_device = self._spans.device(int(runs[0, 0]))
        return self._agent.post(direction, runs, peer, local_device=local_device, remote_device=remote_device)

    def read(self, link: Link, address: int, nbytes: int, timeout_s: float) -> bytes:
        """A few bytes of a peer's memory, through the scratch."""
        pieces = []
        for first in range(0, nbytes, _SCRATCH_BYTES):
            count = min(_SCRATCH_BYTES, nbytes - first)
            with self._scratch_lock:
                run = np.array([[self._scratch.address, address + first, count]], np.uint64)
                operation = link.post(Direction.READ, run)
                try:
                    wait(operation, timeout_s, what=f"reading {nbytes} bytes of the peer's memory")
                except DeadlineExceeded:
                    # The scratch belongs to that operation for ever: it may yet be written to.
                    self._scratch = self.allocate(_SCRATCH_BYTES)
                    raise
                pieces.append(self._allocated[self._scratch.address][:count].tobytes())
        return b"".join(pieces)

    def measure(self, link: Link, address: int) -> Costs:
        """What reading costs over a link, by reads of the peer's scratch at `address` into this one."""
        slots = np.arange(_PIECES, dtype=np.uint64) * np.uint64(2 * _PIECE_BYTES)  # apart, or NIXL would join them
        shapes = [(slots[:1], 8), (slots, _PIECE_BYTES), (slots[:1], _SCRATCH_BYTES)]
        seconds = []
        with self._scratch_lock:
            for offsets, nbytes in shapes:
                sizes = np.full(len(offsets), nbytes, np.uint64)
                runs = np.stack([self._scratch.address + offsets, address + offsets[::-1], sizes], axis=1)
                seconds.append(min(self._time(link, runs) for _ in range(_TRIES)))
        fixed, many, large = seconds
        return Costs(
            operation_s=fixed,
            run_s=max(0.0, many - fixed) / (_PIECES - 1),
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

    def __init__(self, backend: NixlBackend, hello: _Hello) -> None:
        """Raises BackendError for a hello that NIXL does not take."""
        self._backend, self._peer = backend, hello.agent
        self._spans = _Spans()
        self._closed = False
        self._known: set[bytes] = set()  # handles that were opened
        backend.meet(hello)
        self._scratch = self.open(msgspec.msgpack.encode(hello.scratch), _SCRATCH_BYTES)

    def open(self, handle: bytes, nbytes: int) -> RemoteRegion:
        memory = _decode(handle, _Memory)
        if memory.nbytes < nbytes:
            raise BackendError(f"the peer's region has {memory.nbytes} bytes, {nbytes} are needed")
        if memory.agent != self._peer:
            raise BackendError("the peer sent a handle of another agent's memory")
        if handle not in self._known:
            self._backend.learn(memory)
            self._spans.add((memory.address, memory.nbytes, memory.device))
            self._known.add(handle)
        return RemoteRegion(
            nbytes=memory.nbytes, mapped_address=None, remote_address=memory.address, why_not_mapped="NIXL maps nothing"
        )

    def post(self, direction: Direction, runs: np.ndarray) -> Request:
        runs = np.ascontiguousarray(runs, np.uint64)
        return self._backend.post(direction, runs, self._peer, self._spans.device(int(runs[0, 1])))

    def read(self, remote_address: int, nbytes: int, *, timeout_s: float) -> bytes:
        return self._backend.read(self, remote_address, nbytes, timeout_s)

    def measure(self) -> Costs:
        return self._backend.measure(self, self._scratch.remote_address)

    def alive(self) -> bool | None:
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._backend.part(self._peer)


def _decode(data: bytes, kind: type):
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise BackendError(f"the peer sent a malformed {kind.__name__.lstrip('_').lower()}: {error}") from error
