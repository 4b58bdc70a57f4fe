"""One direction between two processes over NCCL: a communicator of two, a stream, and the chunks that cross.

Each direction has a communicator of its own, so that two processes that write to each other never wait for each other:
NCCL carries out the calls of one communicator in order. Both ends make the same calls in the same order, which is the
order of its chunks.

Nothing here waits. Whoever asks whether a crossing has ended takes the channel a step further. A channel that fails
aborts its communicator and stays failed; its crossings end once its stream has passed what was enqueued, since a kernel
may be at work until then. What the writing and the taking end do differently is in nccl_ends.py.

Imports base.py, nccl_library.py, nccl_messages.py and errors.
"""

from __future__ import annotations

import abc
import collections
import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvxfer.backends.base import Operation
from kvxfer.backends.nccl_library import Communicator, Event, Gpus, Library, Stream
from kvxfer.backends.nccl_messages import Failed
from kvxfer.errors import BackendError, DeadlineExceeded, KvxferError, PeerGone, as_kvxfer_error

_log = logging.getLogger(__name__)


class State(enum.Enum):
    """How a channel stands."""

    CLOSED = "closed"
    JOINING = "joining"  # NCCL makes the communicator
    WINDOW = "window"  # and the window
    OPEN = "open"
    FAILED = "failed"


TRANSITIONS = {
    State.CLOSED: {State.JOINING, State.FAILED},
    State.JOINING: {State.JOINING, State.WINDOW, State.OPEN, State.FAILED},
    State.WINDOW: {State.CLOSED, State.JOINING, State.OPEN, State.FAILED},
    State.OPEN: {State.JOINING, State.FAILED},  # where the other end has no window after all
    State.FAILED: set(),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a backend was made with. Seconds."""

    max_ctas: int  # thread blocks of one call; 0 leaves the number to NCCL
    one_sided: bool  # whether windows are tried
    open_timeout_s: float  # for a communicator, and again for a window
    stall_timeout_s: float  # without a chunk that ends


@dataclass(frozen=True, kw_only=True)
class Site:
    """What both channels of a link have in common."""

    libnccl: Library
    gpus: Gpus
    ordinal: int
    settings: Settings
    say: Callable[[Any], None]  # to the peer's link, in order
    may_call: Callable[[], bool]  # whether the calling thread is on the right device, or was put there
    soon: Callable[[Callable[[], None]], None]  # have the progress thread call, where another one may not
    window_memory: Callable[[int], tuple[int, int] | None]  # address and bytes of window memory around an address


class Crossing(Operation):
    """One chunk on its way, at either end."""

    def __init__(self, channel: Channel, number: int, local: int, remote: int, nbytes: int) -> None:
        self.number, self.local, self.remote, self.nbytes = number, local, remote, nbytes
        self.announced = number + 1
        self._channel = channel
        self.after: Event | None = None  # before which NCCL must not read what it writes
        self.event: Event | None = None  # behind what NCCL was asked for, and perhaps for others as well
        self.issued = self.passed = self.taken = self.ended = False
        self.is_put = False  # not sent

    def poll(self) -> bool:
        return self._channel.has_ended(self)

    def behind(self, kernel: Callable[[int], bool]) -> Operation | None:
        return self._channel.put_behind(self, kernel)


class _Behind(Operation):
    """What was enqueued behind a crossing."""

    def __init__(self, channel: Channel, crossing: Crossing, event: Event) -> None:
        self._channel, self._crossing = channel, crossing
        self._event: Event | None = event

    def poll(self) -> bool:
        if self._event is not None:
            if not self._event.done():
                return False
            self._channel.give_back(self._event)
            self._event = None
        # It may have passed because the communicator was aborted: then the channel has failed before.
        return self._channel.has_ended(self._crossing)


class Channel(abc.ABC):
    """One end of a direction. Thread-safe."""

    rank: int

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.RLock()
        self.state = State.CLOSED
        self.generation = 0  # of the communicator: a channel may need a second one, without a window
        self.error: KvxferError | None = None
        self.one_sided = False
        self._comm: Communicator | None = None
        self._aborting = 0  # communicators that NCCL is taking apart
        self._window: tuple[int, int] | None = None  # address and bytes of this side's part, where one is tried
        self._stream: Stream | None = None
        self._free_events: list[Event] = []
        self._due = 0.0
        self._queue: collections.deque[Crossing] = collections.deque()  # not asked of NCCL yet
        self._issued: collections.deque[Crossing] = collections.deque()  # not passed by the stream yet
        self._crossings: dict[int, Crossing] = {}  # not ended
        self._left = False  # to the progress thread, which has been told
        self._behind: Event | None = None  # of a failed channel: behind all that its stream has to pass

    # --- what a link asks -----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Take the channel as far as it gets without waiting."""
        with self._lock:
            self._advance()

    def _advance(self) -> None:
        if self.state in (State.CLOSED, State.FAILED):
            return
        try:
            self._step()
        except Exception as error:
            self.fail(as_kvxfer_error(error))

    def has_ended(self, crossing: Crossing) -> bool:
        """Whether a crossing has; raises the channel's error once it has ended by that."""
        if crossing.ended:
            return True
        with self._lock:
            self._advance()
            if crossing.ended:
                return True
            if self.state is not State.FAILED or (crossing.issued and not crossing.passed and not self.is_at_rest):
                return False
            raise self.error

    def put_behind(self, crossing: Crossing, kernel: Callable[[int], bool]) -> Operation | None:
        """Enqueue what reads a crossing's bytes behind it; see `Operation.behind`.

        On the channel's own stream: should that never pass the crossing, it holds up nobody else's kernels.
        """
        with self._lock:
            if self.state is not State.OPEN or crossing.ended or not self._site.may_call():
                return None
            if not self._launched() or crossing.event is None:
                return None
            if not kernel(self._stream.address):
                return None
            event = self._marked()
        return _Behind(self, crossing, event)

    def give_back(self, event: Event) -> None:
        """The event has passed, and nobody looks at it any more."""
        with self._lock:
            self._free_events.append(event)

    def is_idle(self) -> bool:
        """Whether there is nothing to advance for; advances."""
        with self._lock:
            self._advance()
            at_work = self.state in (State.JOINING, State.WINDOW) or (self.state is State.OPEN and self._crossings)
            return not at_work

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing that NCCL was asked for is at work any more."""
        with self._lock:
            if self.state is State.FAILED:
                return self._stream is None or (self._behind is not None and self._behind.done())
            return not self._issued

    @property
    def has_let_go(self) -> bool:
        """Whether NCCL has nothing to do with memory of this side any more."""
        with self._lock:
            return self.is_at_rest and self._comm is None and not self._aborting

    def fail(self, error: KvxferError, *, tell: bool = True) -> None:
        """Give the channel up, for good; idempotent. `tell` the peer, whose end then does the same."""
        with self._lock:
            if self.state is State.FAILED:
                return
            used = self.generation > 0
            self._to(State.FAILED)
            self.error = error
            self._queue.clear()
            if used and not isinstance(error, PeerGone):
                _log.warning("an NCCL channel has failed: %s", error)
            if tell:
                self._site.say(Failed(writing=self.rank == 0, reason=str(error)))
            if self._issued and self._issued[-1].event is None:
                self._abort(then=self._mark_end)  # NCCL may still put something on the stream
            else:
                self._mark_end()  # whatever else the abort waits for, kernels end by it at once
                self._abort()

    # --- the communicator -----------------------------------------------------------------------------------

    def _join(self, generation: int, unique_id: Callable[[], bytes]) -> None:
        """Begin to make the communicator, on a thread of its own: NCCL's first call may load half a system."""
        self.generation = generation
        self._to(State.JOINING)
        self._due = time.monotonic() + self._site.settings.open_timeout_s

        def joining() -> None:
            site, made = self._site, None
            try:
                site.gpus.make_current(site.ordinal)
                made = site.libnccl.communicator(unique_id(), self.rank, max_ctas=site.settings.max_ctas)
            except Exception as error:
                with self._lock:
                    if self.generation == generation:
                        self.fail(as_kvxfer_error(error))
                return
            with self._lock:
                wanted = self.generation == generation and self.state is State.JOINING
                if wanted:
                    self._comm = made
            if not wanted:
                _try_to_abort(made)

        _aside(joining)

    def _abort(self, then: Callable[[], None] = lambda: None) -> None:
        comm, self._comm = self._comm, None
        if comm is None:
            then()
            return
        self._aborting += 1

        def aborting() -> None:
            self._site.gpus.make_current(self._site.ordinal)
            if _try_to_abort(comm):
                with self._lock:
                    self._aborting -= 1
            then()

        _aside(aborting)

    def _mark_end(self) -> None:
        """Nothing more comes onto the stream: what kernels still do is over when it has passed this."""
        with self._lock:
            if self._stream is None:
                return
            try:
                behind = self._site.gpus.event(self._site.ordinal)
                behind.record(self._stream.address)
            except BackendError as error:  # of the device: whether its kernels have ended will not be known
                _log.warning("the end of an NCCL channel's stream cannot be marked: %s", error)
                return
            self._behind = behind

    def _to(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    # --- steps ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self.state is State.JOINING:
            if self._comm is not None and self._comm.ready():
                self._joined()
            elif time.monotonic() > self._due:
                raise DeadlineExceeded(
                    f"NCCL has made no communicator within {self._site.settings.open_timeout_s:g} s: can the two "
                    "reach each other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)?"
                )
        if self.state is State.WINDOW:
            self._look_at_window()
        if self.state is not State.OPEN:
            return
        self._move()
        if self._crossings and time.monotonic() > self._due:
            raise DeadlineExceeded(
                f"NCCL has moved nothing for {self._site.settings.stall_timeout_s:g} s, with {len(self._crossings)} "
                "chunks under way"
            )

    def _move(self) -> None:
        passed = self._ask_for_queued()
        while passed:
            self._wait_anew()
            self._have_passed(passed)
            passed = self._ask_for_queued() if self._queue else []  # some may have waited for that

    def _ask_for_queued(self) -> list[Crossing]:
        """Ask NCCL for as much as may be asked for; returns what the stream has passed since the last look."""
        issued: list[Crossing] = []
        while self._launched() and self._queue and (together := self._together()):
            if not issued and not self._site.may_call():
                self._leave_it()
                break
            if self._stream is None:
                self._stream = self._site.gpus.stream(self._site.ordinal)
            crossings = [self._queue.popleft() for _ in range(together)]
            for crossing in crossings:
                crossing.issued = True
            self._issued += crossings
            self._issue(crossings, self._comm, self._stream)
            issued += crossings
        if issued:
            self._have_issued(issued)
        return self._take_passed() if self._issued else []

    def _leave_it(self) -> None:
        """To the progress thread, which may call: it would look by itself, but perhaps only after a pause."""
        if not self._left:
            self._left = True
            self._site.soon(self._take_over)

    def _take_over(self) -> None:
        with self._lock:
            self._left = False
            self._advance()

    def _launched(self) -> bool:
        """Whether NCCL has enqueued what it was last asked for: it may have to connect first, and then nothing else
        may be asked of it or put on its stream."""
        if not self._issued or self._issued[-1].event is not None:
            return True
        if not self._comm.ready():
            return False
        event = self._marked()
        for crossing in reversed(self._issued):
            if crossing.event is not None:
                break
            crossing.event = event
        return True

    def _marked(self) -> Event:
        """An event behind all that is on the stream."""
        event = self._free_events.pop() if self._free_events else self._site.gpus.event(self._site.ordinal)
        event.record(self._stream.address)
        return event

    def _take_passed(self) -> list[Crossing]:
        """What the stream has passed, and was not known to have."""
        passed: list[Crossing] = []
        done: Event | None = None
        while self._issued and (event := self._issued[0].event) is not None:
            if event is not done:
                if not event.done():
                    break
                done = event
                self._free_events.append(event)
            crossing = self._issued.popleft()
            crossing.passed = True
            passed.append(crossing)
        return passed

    def _add(self, crossing: Crossing) -> None:
        if not self._crossings:
            self._wait_anew()
        self._crossings[crossing.number] = crossing
        self._queue.append(crossing)

    def _end(self, crossing: Crossing) -> None:
        crossing.ended = True
        self._crossings.pop(crossing.number, None)

    def _wait_anew(self) -> None:
        if self.state is State.OPEN:
            self._due = time.monotonic() + self._site.settings.stall_timeout_s

    def _make_window(self) -> None:
        """Begin to make a window of `_window` and of the other end's part."""
        self._to(State.WINDOW)
        self._due = time.monotonic() + self._site.settings.open_timeout_s
        try:
            self._comm.register_window(*self._window)
        except BackendError as error:
            self._without_window(str(error))

    def _look_at_window(self) -> None:
        try:
            if self._comm.ready():
                if not self._comm.has_window:
                    raise BackendError("NCCL has made no window of this memory")
                self._window_made()
            if self.state is State.WINDOW and time.monotonic() > self._due:
                raise BackendError(f"no window within {self._site.settings.open_timeout_s:g} s")
        except BackendError as error:
            self._without_window(str(error))

    def _opened(self, *, one_sided: bool, why_not: str) -> None:
        self._to(State.OPEN)
        self.one_sided = one_sided
        self._wait_anew()
        how = "put and signal" if one_sided else f"send and receive: {why_not}"
        _log.info("an NCCL channel is open (generation %d, rank %d), by %s", self.generation, self.rank, how)

    @abc.abstractmethod
    def _joined(self) -> None:
        """The communicator is there."""

    @abc.abstractmethod
    def _window_made(self) -> None:
        """This end has the window; called until the channel is open."""

    @abc.abstractmethod
    def _without_window(self, why: str) -> None:
        """There will be none, and nothing can be said of the state of the communicator."""

    @abc.abstractmethod
    def _together(self) -> int:
        """How many of the queued chunks the next call of NCCL is for; 0 while there may be none."""

    @abc.abstractmethod
    def _issue(self, crossings: list[Crossing], comm: Communicator, stream: Stream) -> None:
        """Ask for them."""

    @abc.abstractmethod
    def _have_issued(self, crossings: list[Crossing]) -> None:
        """All were asked for that can be now."""

    @abc.abstractmethod
    def _have_passed(self, crossings: list[Crossing]) -> None:
        """The stream has passed these since the last look."""


def _aside(call: Callable[[], None]) -> None:
    """Run a call of NCCL's that may take long on a thread of its own."""
    threading.Thread(target=call, name="kvxfer-nccl", daemon=True).start()


def _try_to_abort(comm: Communicator) -> bool:
    try:
        comm.abort()
    except BackendError as error:
        _log.warning("aborting an NCCL communicator: %s", error)
        return False
    return True
