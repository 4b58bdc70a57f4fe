"""The completion handle of a transfer: its states, deadline, callbacks and statistics.

A transfer ends exactly once, as done, failed or cancelled, and not before the last byte that it may still write has
been written: whoever sees `done()` may use or reuse the blocks. `TRANSITIONS` is the whole state machine.

Imports errors and progress.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer import checks
from kvxfer.errors import Cancelled, Closed, DeadlineExceeded, InvalidRequest, KvxferError, as_kvxfer_error
from kvxfer.progress import Job, ProgressThread, Timer

if TYPE_CHECKING:
    from kvxfer.cuda.gates import Gate, Gates

_log = logging.getLogger(__name__)

_DRAIN_S = 1.0  # how long wait() stays beyond a transfer's deadline while a writer has not stopped


class TransferState(enum.Enum):
    """Where a transfer stands."""

    POSTED = "posted"  # waiting for a peer, a lease, staging or a sender; nothing has been written
    MOVING = "moving"  # bytes are being written
    CANCELLING = "cancelling"  # it will fail; bytes may still be written
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # members are looked up on every path, and an enum's own is Python


TRANSITIONS: dict[TransferState, frozenset[TransferState]] = {
    TransferState.POSTED: frozenset({TransferState.MOVING, TransferState.CANCELLING}),
    TransferState.MOVING: frozenset({TransferState.DONE, TransferState.CANCELLING}),
    TransferState.CANCELLING: frozenset({TransferState.FAILED, TransferState.CANCELLED}),
    TransferState.DONE: frozenset(),
    TransferState.FAILED: frozenset(),
    TransferState.CANCELLED: frozenset(),
}
ENDED = frozenset(state for state, following in TRANSITIONS.items() if not following)


@dataclass(frozen=True, kw_only=True)
class TransferStats:
    """What a transfer did. Times in seconds; bytes are of cache, `wire_bytes` what crossed between processes."""

    backend: str = ""
    way: str = ""  # mapped, direct or packed
    choice: str = ""  # why that way, where two were weighed
    why_not_mapped: str = ""  # why the mapped way was not taken, where it was allowed
    wire: str = "raw"
    bytes: int = 0
    wire_bytes: int = 0
    copies: int = 0  # what an engine would have posted one by one
    peers: int = 0
    missing: tuple[str, ...] = ()  # layers that the source did not have, where that was allowed
    packed_ahead: bool = False  # the bytes lay packed when they were fetched
    conversation: bool = False  # whether the peer's Python took part
    seconds: float = 0.0  # from the call to the end
    posted_s: float = 0.0  # of these, before the first byte moved

    @property
    def gigabytes_per_s(self) -> float:
        """Bytes of cache over the whole time, in 1e9 bytes a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class Transfer:
    """A transfer under way. Methods may be called from any thread.

    Callbacks run on the connector's progress thread (while that closes, on the thread that ends the transfer): keep
    them short, and hand real work to a thread of your own.
    """

    def __init__(self, progress: ProgressThread, *, timeout_s: float, what: str, gates: Gates | None = None) -> None:
        """`gates` are those of the GPU where the cache lies."""
        self._progress = progress
        self._what = what
        self._timeout_s = checks.seconds("timeout_s", timeout_s)
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)  # notified at the end
        self._state = TransferState.POSTED
        self._error: KvxferError | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []
        self._endings: list[Callable[[], None]] = []
        self._writers = 0
        self._armed = False
        self._timer: Timer | None = None
        self._abandoned = False
        self._waiting_for = ""
        self._job: Job | None = None
        self._job_is_short = False
        self._drive: Callable[[float], None] | None = None
        self._counted: dict[str, Any] = {}  # fields of the statistics
        self._stats: TransferStats | None = None  # once it has ended
        self._moved_bytes = 0
        self._started = time.monotonic()
        self._stop_call: Callable[[], None] = lambda: None
        self._gates, self._holding = gates, 0  # `wait_on` calls under way
        self._gate: Gate | None = gates.take() if gates is not None else None  # open once the bytes are in place

    # --- what a user calls ----------------------------------------------------------------------------------

    @property
    def state(self) -> TransferState:
        """The present state."""
        return self._state

    @property
    def stats(self) -> TransferStats:
        """Statistics; complete once the transfer has ended."""
        return self._stats or TransferStats(**self._counted)

    @property
    def progress(self) -> float:
        """Share of the bytes that have moved, 0 to 1; grows in steps of a few MiB."""
        if self._state is TransferState.DONE:
            return 1.0
        total = self._counted.get("bytes", 0)
        return min(1.0, self._moved_bytes / total) if total else 0.0

    def done(self) -> bool:
        """Whether it has ended, in whatever way. The blocks are then no longer written to."""
        drive = self._drive
        if drive is not None:
            drive(0.0)
        if self._state not in ENDED and self.remaining_s <= 0:
            self._expire()
        return self._state in ENDED

    def wait(self, timeout_s: float | None = None) -> TransferStats:
        """Wait for the end and return the statistics, or raise what went wrong.

        Raises DeadlineExceeded when `timeout_s` passes first; the transfer then goes on until its own deadline.
        Never waits much beyond that deadline: while a peer that stands still may yet write, it raises DeadlineExceeded
        and `done()` stays False. The waiting thread may move the bytes itself.
        """
        if self._progress.is_current:
            raise InvalidRequest("wait() was called on the progress thread (in a callback), which it would block")
        if self._job is not None and (timeout_s is None or self._job_is_short):
            self._run_job(self._job)
        if timeout_s is None:
            timeout_s = max(0.0, self.remaining_s) + _DRAIN_S
        elif timeout_s != 0:
            timeout_s = checks.seconds("timeout_s", timeout_s)
        until = time.monotonic() + timeout_s
        while not self.done():
            if self._abandoned:
                raise self._why_abandoned()
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"{self._what} has not ended within {timeout_s:g} s; it is {self._state.value}")
            if self.remaining_s > 0:  # past its deadline it only drains
                left = min(left, self.remaining_s)
            drive = self._drive
            if drive is not None:
                drive(left)
                continue
            with self._lock:
                self._ended.wait_for(lambda: self._state in ENDED or self._abandoned, left)
        return self.result()

    def result(self) -> TransferStats:
        """The statistics of an ended transfer, or its error raised. InvalidRequest while it is under way."""
        if self._abandoned and not self.done():
            raise self._why_abandoned()
        if not self.done():
            raise InvalidRequest(f"{self._what} is still {self._state.value}; wait for it first")
        if self._error is not None:
            raise self._error
        return self.stats

    def exception(self) -> KvxferError | None:
        """The error of a transfer that ended badly, else None."""
        return self._error if self.done() else None

    def cancel(self) -> None:
        """Ask it to end. It has ended once `done()`, which may be a moment later: what is being written drains."""
        self.abort(Cancelled(f"{self._what} was cancelled"))

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(transfer)`` on the progress thread once it has ended, also when it has already."""
        if not callable(callback):
            raise InvalidRequest(f"a callback must be callable, got {type(callback).__name__}")
        with self._lock:
            waiting = self._state not in ENDED
            if waiting:
                self._callbacks.append(callback)
        if waiting:
            self.arm()
        else:
            self._call_back(callback)

    def __await__(self) -> Generator[Any, None, TransferStats]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake(_: Transfer) -> None:
            try:
                loop.call_soon_threadsafe(lambda: future.done() or future.set_result(None))
            except RuntimeError:  # the loop has been closed; nobody waits
                pass

        self.add_done_callback(wake)
        yield from future
        return self.result()

    def wait_on(self, stream: object) -> None:
        """Let a CUDA stream wait until the bytes are in place; the host does not wait. May be called before anything
        has moved, and for several streams.

        `stream` is an integer, or a stream of torch, CuPy or cuda.core, on the cache's GPU; it must not be captured
        into a graph. The stream goes on when the last byte is written, and also when the transfer ends badly, at its
        deadline at the latest: what is enqueued behind the wait then reads undefined bytes. So this orders bytes and
        says nothing of success. Look at `done()` and `result()` before anything computed from the blocks leaves the
        engine.

        Until then, don't free or allocate GPU memory in ways that wait for the whole device. Raises InvalidRequest for
        a cache in host memory.
        """
        if self._gates is None:
            raise InvalidRequest("wait_on needs a cache in GPU memory; for a cache in host memory use wait()")
        self.arm()
        with self._lock:
            gate = self._gate
            if gate is None:  # it has ended
                return
            self._gates.open_by(gate, self._started + self._timeout_s + _DRAIN_S)
            self._holding += 1
        try:
            gate.hold(stream)  # which CUDA may hold up until some gate opens: for that others need the lock
        finally:
            with self._lock:
                self._holding -= 1
            self._let_gate_go()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._what}: {self._state.value}>"

    # --- what the library calls -----------------------------------------------------------------------------

    @property
    def error(self) -> KvxferError | None:
        """Why it ended or is about to end badly."""
        return self._error

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call."""
        return time.monotonic() - self._started

    @property
    def remaining_s(self) -> float:
        """Seconds to the transfer's own deadline."""
        return self._started + self._timeout_s - time.monotonic()

    def arm(self) -> None:
        """Have the progress thread end the transfer at its deadline, for callers that neither wait nor poll."""
        with self._lock:
            armed, self._armed = self._armed, True
        if not armed:
            self._progress.post(self._set_timer)

    def _set_timer(self) -> None:
        with self._lock:
            if self._state not in ENDED:
                self._timer = self._progress.call_later(max(0.0, self.remaining_s), self._expire)

    def _expire(self) -> None:
        self.abort(
            DeadlineExceeded(
                f"{self._what} ran past its deadline of {self._timeout_s:g} s while {self._state.value}"
                f"{self._waiting_for}"
            )
        )

    def waits_for(self, what: str) -> None:
        """Say what a posted transfer is waiting for; stands in the message when its deadline passes."""
        self._waiting_for = f", waiting for {what}" if what else ""

    @property
    def stopping(self) -> bool:
        """Whether whoever moves bytes should stop at the next chance."""
        return self._state is TransferState.CANCELLING

    def on_stop(self, stop: Callable[[], None]) -> None:
        """What to call, once, on the thread that aborts, when bytes may still be under way elsewhere."""
        self._stop_call = stop

    def on_end(self, call: Callable[[], None]) -> None:
        """What to call, once, on the thread that ends the transfer. Only before it is under way."""
        self._endings.append(call)

    def attempt(self, call: Callable[[], None]) -> None:
        """Run a step of the transfer; what it raises ends the transfer, and an interrupt goes on to who waits."""
        try:
            call()
        except Exception as error:
            if not isinstance(error, KvxferError):
                _log.exception("unexpected error in %r", self)
            self.abort(as_kvxfer_error(error))
        except BaseException as interrupt:
            self.abort(as_kvxfer_error(interrupt))
            raise

    def runs_as(self, job: Job, *, short: bool) -> None:
        """The job that a waiting thread may run itself; one that is not short would outlast a short wait."""
        self._job_is_short = short
        self._job = job

    def driven_by(self, drive: Callable[[float], None] | None) -> None:
        """What `done` and `wait` call while bytes move by themselves, with the seconds that it may take; it looks
        whether they have arrived, and ends the transfer then. None once somebody has seen to that."""
        self._drive = drive

    def begin(self) -> bool:
        """From posted to moving: the first byte is about to be written. False when it must not."""
        with self._lock:
            if self._state is not TransferState.POSTED:
                return False
            self._move_to(TransferState.MOVING)
            self._counted["posted_s"] = time.monotonic() - self._started
            return True

    def hold(self) -> bool:
        """Somebody is about to write. False when nobody may start any more. Pair with `drop`."""
        with self._lock:
            if self._state not in (TransferState.POSTED, TransferState.MOVING):
                return False
            self._writers += 1
            return True

    def drop(self) -> None:
        """One that held writes no more."""
        with self._lock:
            self._writers -= 1
        self._end_if_drained()

    def advance(self, nbytes: int) -> None:
        """That many bytes more are in place."""
        with self._lock:
            self._moved_bytes += nbytes

    def count(self, **changes: object) -> None:
        """Put numbers into the statistics."""
        with self._lock:
            self._counted.update(changes)

    @property
    def gate(self) -> Gate | None:
        """What a device may open when the last byte is written; None without a GPU, and once the transfer has ended."""
        return self._gate

    def _run_job(self, job: Job) -> None:
        """What a waiting thread runs, which may be interrupted at any point, also in what cleans up."""
        try:
            job.run()
        except BaseException:
            self.job_was_interrupted()
            raise

    def job_was_interrupted(self) -> None:
        """Whatever this thread was at, it has left it, perhaps without having said so."""

    def _let_gate_go(self) -> None:
        with self._lock:
            if self._gate is not None and self._state in ENDED and not self._holding:  # nobody opens it any more
                self._gates.give_back(self._gate)
                self._gate = None

    def open_gate(self) -> None:
        """Every byte is in place: let streams pass that wait for it. The verdict may still be to come."""
        with self._lock:
            if self._gate is not None:
                self._gate.open()

    def succeed(self) -> bool:
        """From moving to done. False when it was aborted before."""
        with self._lock:
            if self._state is not TransferState.MOVING:
                return False
            self._move_to(TransferState.DONE)
        self._announce()
        return True

    def abort(self, error: KvxferError) -> None:
        """Fail with `error`: at once when nobody writes, else when the last writer has dropped. Idempotent."""
        with self._lock:
            if self._state not in (TransferState.POSTED, TransferState.MOVING):
                return
            self._error = error
            self._move_to(TransferState.CANCELLING)
        self._stop_call()
        self._end_if_drained()

    def abandon(self) -> None:
        """The connector closes while somebody may still write: wake whoever waits, with an error. Never `done()`."""
        with self._lock:
            self._abandoned = True
        self._announce()

    def _why_abandoned(self) -> KvxferError:
        return Closed(
            f"the connector was closed before {self._what} had drained: its peer stands still and may yet write, so "
            "the blocks must not be used before the peer's process has ended"
        )

    def _end_if_drained(self) -> None:
        with self._lock:
            if self._state is not TransferState.CANCELLING or self._writers:
                return
            cancelled = isinstance(self._error, Cancelled)
            self._move_to(TransferState.CANCELLED if cancelled else TransferState.FAILED)
        self._announce()

    def _move_to(self, state: TransferState) -> None:
        assert state in TRANSITIONS[self._state], (self._state, state)
        self._state = state
        if state in ENDED:
            self._stats = TransferStats(**self._counted, seconds=time.monotonic() - self._started)

    def _announce(self) -> None:
        self.open_gate()
        self._let_gate_go()
        with self._lock:
            timer, self._timer = self._timer, None
            callbacks, self._callbacks = self._callbacks, []
            endings, self._endings = self._endings, []
            self._ended.notify_all()
        if timer is not None:  # which would keep the transfer until its deadline
            timer.cancel()
        for ending in endings:
            ending()
        for callback in callbacks:
            self._call_back(callback)

    def _call_back(self, callback: Callable[[Transfer], None]) -> None:
        self._progress.run(lambda: callback(self))
