"""What waits for a whole device is put off while a stream waits for a transfer.

Freeing memory, unpinning it and unmapping a peer's wait until the device has done what was enqueued. A stream that
waits at a gate (gates.py) lets none of that end before its transfer has come, and meanwhile CUDA may hold up other
calls of the process: those that the transfer itself needs. So whatever is freed late, or on a thread of its own, is
freed when no stream of this process waits. Gates open at their deadlines at the latest.

What is being freed when a stream begins to wait was begun before, and waits for what was enqueued until then.

Others free memory too: the engine, its framework. So while a stream waits, the calls of this package to CUDA let go of
Python's lock (`hold_gates`, csrc/cuda/bindings.h): whoever opens the gate needs it.

Imports native.py; gates' names for typing only. Any thread.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvxfer.cuda.native import native

if TYPE_CHECKING:
    from kvxfer.cuda.gates import Gate

_lock = threading.RLock()  # a collection of garbage may come here while the thread is here already
_within = False  # whether it is
_waits: dict[Gate, int] = {}  # gates at which streams may be waiting, and how often they were made to
_put_off: collections.deque[Callable[[], object]] = collections.deque()


@contextlib.contextmanager
def _held() -> Iterator[None]:
    global _within
    with _lock:
        _within = True
        try:
            yield
        finally:
            native().hold_gates(len(_waits))
            _within = False


def stream_waits(gate: Gate) -> None:
    """A stream is about to wait at a closed gate."""
    with _held():
        _waits[gate] = _waits.get(gate, 0) + 1


def stream_goes_on(gate: Gate) -> None:
    """One that was about to does not wait there after all."""
    with _held():
        left = _waits.pop(gate, 1) - 1
        if left:
            _waits[gate] = left
    _look()


def streams_pass(gate: Gate) -> None:
    """The gate is open, for all. Idempotent."""
    if gate not in _waits:  # as after most transfers: whoever makes a stream wait from now on says so by itself
        return
    with _held():
        _waits.pop(gate, None)
    _look()


def when_quiet(call: Callable[[], object]) -> None:
    """Call it here and now, or, where a stream waits for a transfer, later on another thread. What a late call raises
    is dropped."""
    with _lock:
        put_off = bool(_waits) or _within
        if put_off:
            _put_off.append(call)
    if not put_off:
        call()
        _look()


def _look() -> None:
    """Do what was put off, on another thread, if no stream waits any more."""
    with _lock:
        due = bool(_put_off) and not _waits and not _within
    if due:
        with contextlib.suppress(RuntimeError):  # at exit no thread starts, and the driver frees everything
            threading.Thread(target=_catch_up, name="kvxfer-free", daemon=True).start()


def _catch_up() -> None:
    while True:
        with _lock:
            if _waits or not _put_off:
                return
            call = _put_off.popleft()
        with contextlib.suppress(Exception):  # the driver may be gone, and the memory with it
            call()
