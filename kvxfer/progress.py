"""The two kinds of threads a connector owns: one that makes progress, and workers that move bytes.

`ProgressThread` owns sockets and timers and runs everything that touches peers and sessions, so that state needs no
lock. It sleeps in poll() until a socket, a timer or another thread wakes it. `MoverPool` runs kernel calls, which
release the GIL; a thread that waits for a transfer may run its job itself.

Imports pyzmq (for its poller) and nothing of kvxfer but errors.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import heapq
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import zmq

from kvxfer.errors import Closed, ResourceExhausted

_log = logging.getLogger(__name__)

# Called with the GIL held, unlike os.eventfd_write: else the thread that is woken takes it, and whoever woke it, often
# on the way out of a transfer, waits until that thread has sent its messages.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)

_prctl = ctypes.CDLL(None).prctl
_prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
_PR_SET_TIMERSLACK = 29

_SPIN_S = 200e-6  # how long the first operation under way is looked at without a pause: it may be the only one
_FIRST_PAUSE_S = 20e-6  # between two looks at operations under way
_LAST_PAUSE_S = 5e-3
_LEAST_POLL_S = 1e-3  # poll() takes whole milliseconds
_TIMER_SLACK_NS = 1000  # by how much the kernel may prolong a pause; its default is longer than the first ones
_GLANCE_S = 2e-3  # between two looks for calls that woke no thread
_ATTENTIVE_S = 0.05  # how long after the last of them
_MAX_AWAY = 64  # threads of one pool that wait for peers while spare ones work

_mine = threading.local()  # pool: whose thread this is


Source = zmq.Socket | socket.socket


class Timer:
    """A call that is due at a monotonic time; `cancel` may be called from any thread."""

    __slots__ = ("call", "due")

    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due = due
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Drop the call; does nothing when it has run."""
        self.call = None


class ProgressThread:
    """One thread that polls sockets, runs posted calls, and fires timers, in that order.

    Timers come last on purpose: messages that have arrived are handled before a lease is allowed to run out.
    An exception in a call, of whatever kind, is logged and ends that call only.
    """

    def __init__(self, name: str) -> None:
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._sockets: dict[zmq.Socket | int, Callable[[], None]] = {}  # ints: file descriptors
        self._awaited: list[tuple[Callable[[], bool], Callable[[BaseException | None], None]]] = []
        self._pause_s = _FIRST_PAUSE_S
        self._seen_at = 0.0  # when the last one was seen to have ended
        self._spin_until = 0.0  # no pauses before that
        self._poller = zmq.Poller()
        need_descriptors(1)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._closing = False
        self._attentive, self._attentive_until = False, 0.0  # whether it looks for calls by itself, and how long
        self._lock = threading.Lock()
        self.turns = 0  # how often the thread woke up; at rest this hardly grows
        self._thread = threading.Thread(target=self._run, name=f"kvxfer-progress-{name}", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on this thread soon. From any thread; Closed after `close`."""
        with self._lock:
            if self._closing:
                raise Closed("the connector is closed")
            self._calls.append(function)
        self._wake()

    def post(self, function: Callable[[], None]) -> None:
        """Like `call`, but after `close` the function is dropped: for what only matters while the connector lives."""
        with self._lock:
            if self._closing:
                return
            self._calls.append(function)
        self._wake()

    def do(self, function: Callable[[], None]) -> None:
        """Call it here, if this is the thread, else `post` it."""
        if self.is_current:
            function()
        else:
            self.post(function)

    def post_soon(self, function: Callable[[], None]) -> None:
        """Like `post`, for what may wait some milliseconds: the thread is woken for the first call after a pause only,
        and looks by itself for those that follow. Waking it costs the caller more than the rest of a small transfer."""
        with self._lock:
            if self._closing:
                return
            self._calls.append(function)
            self._attentive_until = time.monotonic() + _ATTENTIVE_S
            attentive = self._attentive
        if not attentive:
            self._wake()

    def run(self, function: Callable[[], None]) -> None:
        """Like `call`, but after `close` the function runs at once on the calling thread. For callbacks of users."""
        try:
            self.call(function)
        except Closed:
            guarded(function)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Timer:
        """Run `function` on this thread after `delay_s` seconds. On this thread only."""
        timer = Timer(time.monotonic() + delay_s, function)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def until(self, poll: Callable[[], bool], then: Callable[[BaseException | None], None]) -> None:
        """Call `poll` again and again until it returns True, then ``then(None)``; ``then(error)`` when it raises.

        For operations that no file descriptor reports. The pauses grow while nothing ends, so that a long operation
        costs little and a short one is seen soon. From any thread; dropped after `close`.
        """
        if self.is_current and not self._closing:
            self._await((poll, then))
        else:
            self.post(lambda: self._await((poll, then)))

    def _await(self, entry: tuple[Callable[[], bool], Callable[[BaseException | None], None]]) -> None:
        if not self._awaited and time.monotonic() - self._seen_at > self._pause_s:
            self._pause_s = _FIRST_PAUSE_S  # it is not one of a series
            self._spin_until = time.monotonic() + _SPIN_S
        self._awaited.append(entry)

    def watch(self, source: Source, call: Callable[[], None], *, writes: bool = False) -> None:
        """Make the call whenever the source has something to read, or also when it takes writes. Again: changes that.
        On this thread only."""
        self._sockets[_key(source)] = call
        self._poller.register(source, zmq.POLLIN | (zmq.POLLOUT if writes else 0))

    def unwatch(self, source: Source) -> None:
        """Stop watching, before the source is closed. On this thread only."""
        if self._sockets.pop(_key(source), None) is not None:
            self._poller.unregister(source)

    def close(self, last: Callable[[], None], timeout_s: float = 5.0) -> None:
        """Run what was posted, then `last`, then end. Returns when the thread has ended; idempotent."""
        with self._lock:
            first = not self._closing
            self._closing = True
            if first:
                self._calls.append(last)
        self._wake()
        if not self.is_current:
            self._thread.join(timeout_s)

    def _wake(self) -> None:
        _eventfd_write(self._wake_fd, 1)  # fails when the thread has ended and closed it

    def _run(self) -> None:
        _sleep_precisely()
        try:
            while True:
                self._turn()
                if self._closing and not self._calls:
                    return
        finally:
            os.close(self._wake_fd)

    def _turn(self) -> None:
        pause_s = 0.0
        if self._awaited and not self._calls and time.monotonic() < self._spin_until:
            time.sleep(0)  # other threads get the GIL
        elif self._awaited and not self._calls:
            pause_s, self._pause_s = self._pause_s, min(_LAST_PAUSE_S, self._pause_s * 1.1)
            if pause_s < _LEAST_POLL_S:
                time.sleep(pause_s)
                pause_s = 0.0
        with self._lock:
            self._attentive = time.monotonic() < self._attentive_until
            timeout_ms = self._timeout_ms(pause_s)
        ready = dict(self._poller.poll(timeout_ms))
        self.turns += 1
        if ready.pop(self._wake_fd, None):
            os.eventfd_read(self._wake_fd)
        for _ in range(len(self._calls)):
            guarded(self._calls.popleft())
        for source in ready:
            if source in self._sockets:  # a call may have unwatched it
                guarded(self._sockets[source])
        if self._awaited:
            self._look_at_awaited()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                guarded(timer.call)

    def _look_at_awaited(self) -> None:
        awaited, self._awaited = self._awaited, []
        for poll, then in awaited:
            error = None
            try:
                if not poll():
                    self._awaited.append((poll, then))
                    continue
            except BaseException as failure:  # see guarded
                error = failure
            self._pause_s = max(_FIRST_PAUSE_S, self._pause_s / 4)  # the next one often takes as long as this one
            self._seen_at = time.monotonic()
            guarded(lambda then=then, error=error: then(error))

    def _timeout_ms(self, pause_s: float) -> float | None:
        if self._calls or self._awaited:
            return 0 if self._calls else pause_s * 1000
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        # Rounded up: poll() takes whole milliseconds, and waking early would spin.
        due = max(0, int((self._timers[0][0] - time.monotonic()) * 1000) + 1) if self._timers else None
        if not self._attentive:
            return due
        return _GLANCE_S * 1000 if due is None else min(due, _GLANCE_S * 1000)


class Job:
    """A call that runs exactly once, on whichever thread claims it first."""

    __slots__ = ("_call", "_lock")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._lock = threading.Lock()

    def run(self) -> bool:
        """Run it here unless another thread has claimed it; returns whether it ran here, raises what it raises."""
        with self._lock:
            call, self._call = self._call, None
        if call is not None:
            call()
        return call is not None


class MoverPool:
    """Threads that move bytes, a fixed number; idle ones sleep. While one waits for a peer, a spare one works."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._number = name, threads
        self._jobs: collections.deque[Job] = collections.deque()
        self._lock = threading.Lock()  # taken itself: an interrupt within a condition's own methods leaves it locked
        self._ready = threading.Condition(self._lock)
        self._closing = False
        self._threads: set[threading.Thread] = set()
        self._idle = self._away = 0
        self._attentive, self._attentive_until = False, 0.0  # whether a thread looks for calls by itself, and how long
        self._names = itertools.count()
        with self._lock:
            for _ in range(threads):
                self._start()

    def submit(self, call: Callable[[], None]) -> Job:
        """Queue a call. From any thread. After `close` the job is never run by the pool."""
        job = Job(call)
        with self._lock:
            self._jobs.append(job)
            self._stand_in()
            self._ready.notify()
        return job

    def watch(self, call: Callable[[], None]) -> None:
        """Queue a call that is in no hurry, to see the end of what most likely somebody else sees before.

        Waking a thread costs the caller more than the rest of a small transfer. So while there are such calls one idle
        thread looks for them by itself, every few milliseconds, and is woken for the first one after a pause only, or
        by `hurry`. From any thread.
        """
        with self._lock:
            self._jobs.append(Job(call))
            self._stand_in()
            self._attentive_until = time.monotonic() + _ATTENTIVE_S
            if not self._attentive:
                self._ready.notify()

    def hurry(self) -> None:
        """Somebody depends on what is watched: look now."""
        with self._lock:
            self._ready.notify()

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        return len(self._jobs)

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the queued jobs and end the threads; idempotent."""
        with self._lock:
            self._closing = True
            self._ready.notify_all()
            threads = set(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def leave(self) -> None:
        """The calling thread, one of the pool's, is about to wait for a peer. Pair with `come_back`."""
        with self._lock:
            self._away += 1
            self._stand_in()

    def come_back(self) -> None:
        """It goes on."""
        with self._lock:
            self._away -= 1

    def _stand_in(self) -> None:
        """Start a thread where there are jobs, all others wait for peers, and there are not too many of these."""
        working = len(self._threads) - self._away
        if self._jobs and not self._idle and working < self._number and self._away <= _MAX_AWAY and not self._closing:
            with contextlib.suppress(RuntimeError):  # no more threads: the jobs wait for one of those that there are
                self._start()

    def _start(self) -> None:
        name = f"kvxfer-mover-{self._name}-{next(self._names)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            raise

    def _run(self) -> None:
        _sleep_precisely()
        _mine.pool = self
        while True:
            with self._lock:
                while not self._jobs:
                    if self._closing or len(self._threads) - self._away > self._number:
                        self._threads.discard(threading.current_thread())
                        return
                    self._idle += 1
                    self._rest()
                    self._idle -= 1
                job = self._jobs.popleft()
            guarded(job.run)

    def _rest(self) -> None:
        """Wait to be woken; one thread only for a moment, where calls may come that wake none."""
        if self._attentive or time.monotonic() > self._attentive_until:
            self._ready.wait()
            return
        self._attentive = True
        self._ready.wait(_GLANCE_S)
        self._attentive = False


@contextlib.contextmanager
def waiting_for_a_peer() -> Iterator[None]:
    """Around a wait whose length a peer decides: on a mover thread, another one takes the jobs meanwhile."""
    pool: MoverPool | None = getattr(_mine, "pool", None)
    if pool is None:
        yield
        return
    pool.leave()
    try:
        yield
    finally:
        pool.come_back()


def need_descriptors(count: int) -> None:
    """Raise ResourceExhausted where this process can open fewer files than that: libzmq aborts the process instead."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        raise ResourceExhausted(
            f"too few file descriptors are left ({error.strerror}): a connector needs {count} or more now, and some "
            "for each peer later; raise the limit (ulimit -n), or close what is not needed"
        ) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _key(source: Source) -> zmq.Socket | int:
    """As the poller names what is ready."""
    return source if isinstance(source, zmq.Socket) else source.fileno()


def _sleep_precisely() -> None:
    """Have the calling thread's pauses last as long as they say."""
    _prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)


def guarded(call: Callable[[], None]) -> None:
    """Make the call; what it raises is logged and ends it alone."""
    try:
        call()
    except BaseException:  # one faulty call, or a callback's sys.exit(), must not stop the thread that serves everyone
        _log.exception("unexpected error in %r", call)
