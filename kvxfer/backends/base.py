"""What a backend is: it registers memory, lets a peer reach it, moves bytes, and says when that is done.

A `Backend` is one process's side. `Backend.connect` gives a `Link` to one peer, and a link opens the peer's exported
regions as `RemoteRegion`. A mapped remote region has an address in this process and kernels use it like any other
memory; an unmapped one is reached with `Link.post`.

Imports NumPy and errors, nothing else of kvxfer. Backends of other packages come in through the entry-point group
``kvxfer.backends`` and must pass ``tests/backends``.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvxfer.errors import BackendError, DeadlineExceeded, KvxferError

_PAUSE_S = 5e-6


class Direction(enum.Enum):
    """Which way bytes go, seen from this process."""

    READ = "read"  # remote to local
    WRITE = "write"  # local to remote


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do, before any peer is known."""

    mapped: bool  # can give a peer's memory an address here
    one_sided: bool  # can read and write a peer's memory without its help
    cross_host: bool
    devices: frozenset[str] = field(default_factory=lambda: frozenset({"cpu"}))


@dataclass(frozen=True, kw_only=True)
class Registration:
    """Memory that this process has made reachable. `handle` is what a peer needs to open it."""

    address: int
    nbytes: int
    handle: bytes
    keep_alive: Any = None


@dataclass(frozen=True, kw_only=True)
class RemoteRegion:
    """A peer's registered memory as seen through a link.

    `mapped_address` is its address in this process, or None; `why_not_mapped` may then say why. `remote_address` is its
    address in the peer's own address space, which is what runs handed to `Link.post` count in. `mapping` keeps the
    memory mapped: whoever uses the address holds on to the region. `device_address` is where this side's GPU reaches
    host memory, or None where it does not.
    """

    nbytes: int
    mapped_address: int | None
    remote_address: int
    mapping: Any = None
    why_not_mapped: str = ""
    device_address: int | None = None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one-sided operations over a link cost: the way of a transfer is chosen by it."""

    operation_s: float  # one operation of one small run, posted and waited for
    run_s: float  # every further run
    bytes_per_s: float  # of large runs


class Operation(abc.ABC):
    """Bytes under way. Buffers on either side stay untouched until `poll` has returned True or raised."""

    announced: int = 0
    """Once it has ended: what the peer's link knows it by, for `Link.arrival`; 0 where that does not know of it."""

    @abc.abstractmethod
    def poll(self) -> bool:
        """Whether the last byte has moved; raises BackendError or PeerGone when the operation failed."""

    def behind(self, kernel: Callable[[int], bool]) -> Operation | None:
        """Have `kernel` enqueue, on the stream that it is given, what reads the bytes once they have moved.

        What is returned ends when that has, and fails where the bytes have not come. None where it cannot be done, or
        not yet, or the kernel's answer was that it has enqueued nothing. Raises what `kernel` raises.
        """
        return None


def wait(operation: Operation, timeout_s: float, *, what: str) -> None:
    """Wait on the calling thread until an operation has ended. Raises what it raises, and DeadlineExceeded.

    After DeadlineExceeded the operation may still be under way: the caller keeps the buffers.
    """
    until = time.monotonic() + timeout_s
    while not operation.poll():
        if time.monotonic() > until:
            raise DeadlineExceeded(f"{what} took longer than {timeout_s:g} s")
        time.sleep(_PAUSE_S)


@dataclass(frozen=True, kw_only=True)
class ControlLine:
    """How a link talks to the peer's link of the same backend: over the control channel, authenticated and in order."""

    say: Callable[[bytes], None]  # any thread; lost once the session has ended
    until: Callable[[Callable[[], bool], Callable[[BaseException | None], None]], None]
    """``until(poll, then)``: call `poll` on the progress thread until it is true or raises, then `then`. Any thread."""
    is_progress: Callable[[], bool]  # whether the calling thread is the progress thread


class Link(abc.ABC):
    """One peer, through one backend."""

    one_sided: bool  # whether `post` works with this peer: found out by trying when the link was made
    why_not_one_sided: str = ""
    one_sided_devices: frozenset[str] = frozenset({"cpu"})  # where memory may lie that `post` moves
    posts_at_once = False  # whether `post` takes some microseconds and no more, so that any thread may call it
    posts_behind = False  # whether it takes `after`

    @abc.abstractmethod
    def open(self, handle: bytes, nbytes: int) -> RemoteRegion:
        """Open memory that the peer has registered. The handle is hostile until checked.

        Raises BackendError when it is not valid, cannot be reached, or is smaller than `nbytes`.
        """

    @abc.abstractmethod
    def post(self, direction: Direction, runs: np.ndarray, *, after: Any = None) -> Operation:
        """Start moving runs: uint64 ``[n, 3]`` of local address, remote address, bytes.

        Addresses are trusted: the plan has been checked against the regions. May move the bytes before it returns;
        releases the GIL while it does. Where `posts_behind`, no byte is read before the event `after` has passed, for
        which nobody waits on the host. Raises PeerGone or BackendError.
        """

    def read(self, remote_address: int, nbytes: int, *, timeout_s: float) -> bytes:
        """A few bytes out of the peer's registered memory, waited for: words and records of lease tables.

        Raises PeerGone, BackendError, DeadlineExceeded. This one reads into memory that is not registered; a backend
        that cannot do that overrides it.
        """
        target = np.empty(nbytes, np.uint8)
        run = np.array([[target.ctypes.data, remote_address, nbytes]], np.uint64)
        wait(self.post(Direction.READ, run), timeout_s, what=f"reading {nbytes} bytes of the peer's memory")
        return target.tobytes()

    def measure(self) -> Costs | None:
        """Try what one-sided operations cost. Mover thread. None where the choice does not depend on it.

        Raises PeerGone, BackendError, DeadlineExceeded.
        """
        return None

    @property
    def lost(self) -> bool:
        """Whether nothing moves over this link any more, though the peer may live: a new link has to be made."""
        return False

    def arrival(self, address: int, announced: int) -> Operation:
        """What to wait for before bytes are read that the peer's link has announced under a number for `address`.

        For backends whose two ends take part: the peer is told of bytes that still are on their way. Each is asked for
        once. Raises BackendError for what was not announced.
        """
        raise BackendError("this backend's links announce nothing")

    def converse(self, line: ControlLine) -> None:  # noqa: B027
        """The session is open: what a backend uses whose two ends have to talk. Progress thread."""

    def hear(self, payload: bytes) -> None:
        """What the peer's link has said; hostile until checked. Empty: the peer uses another backend with this process.

        Progress thread; must not block. Raises BackendError for what makes no sense.
        """
        raise BackendError("the peer's link speaks, and this backend's does not listen")

    def hang_up(self, reason: KvxferError) -> None:  # noqa: B027
        """The session has ended: nothing more is said or heard. Operations that need the peer's help end."""

    def doubt(self) -> None:  # noqa: B027
        """The peer has gone silent: from now on `lost` and `alive` are found out by trying."""

    @abc.abstractmethod
    def alive(self) -> bool | None:
        """Whether the peer may still write into this process's memory. Called again and again; must not block.

        True: its process exists. False: it writes nothing more, for certain. None: this backend cannot tell.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the peer; idempotent. Mappings end when their last user lets go."""


class Backend(abc.ABC):
    """One process's side of a transport."""

    name: str
    capabilities: Capabilities

    @abc.abstractmethod
    def register(self, address: int, nbytes: int, device: str = "cpu") -> Registration:
        """Make ``[address, address + nbytes)`` reachable. The caller keeps the memory alive until `deregister`.

        `device` is "cpu" or "cuda:N", one of the capabilities' devices. Raises BackendError.
        """

    @abc.abstractmethod
    def deregister(self, registration: Registration) -> None:
        """Withdraw a registration; idempotent."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Registration:
        """New zeroed memory, registered in the best way that this backend has. Freed by `deregister`.

        Used for lease tables and staging. Raises SharedMemoryFull or ResourceExhausted.
        """

    def allocate_on_gpu(self, nbytes: int, ordinal: int) -> Any | None:
        """Memory of a GPU for staging, where this backend needs a kind of its own: something with an `address` that is
        freed when nobody holds it. None where ordinary memory will do. Raises ResourceExhausted."""
        return None

    @abc.abstractmethod
    def hello(self) -> bytes:
        """What a peer must know to `connect` to this process; sent in the handshake."""

    @abc.abstractmethod
    def connect(self, hello: bytes) -> Link:
        """A link to the process that sent `hello`. Raises BackendError with the reason when there is none."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything that `allocate` gave and every registration; idempotent."""
