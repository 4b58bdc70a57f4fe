"""What waits for a whole device is put off while a stream waits for a transfer.

Freeing memory, unpinning it and unmapping a peer's wait until the device has done what was enqueued. A stream that
waits at a gate (gates.py) lets none of that end before its transfer has come, and meanwhile CUDA may hold up other
calls of the process: those that the transfer itself needs. So whatever is freed late, or on a thread of its own, is
freed when no stream of this process waits. Gates open at their deadlines at the latest.

Imports gates' names for typing only, and nothing else of kvxfer. Any thread.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.cuda.gates import Gate

_lock = threading.RLock()  # a collection of garbage may come here while the thread is here already
_waited_for: set[Gate] = set()  # gates at which streams may be waiting
_put_off: collections.deque[Callable[[], object]] = collections.deque()


def stream_waits(gate: Gate) -> None:
    """A stream is about to wait at a closed gate."""
    with _lock:
        _waited_for.add(gate)


def streams_pass(gate: Gate) -> None:
    """The gate is open: do what was put off if this was the last one, on another thread. Idempotent."""
    with _lock:
        _waited_for.discard(gate)
        due = bool(_put_off) and not _waited_for
    if due:
        with contextlib.suppress(RuntimeError):  # at exit no thread starts, and the driver frees everything
            threading.Thread(target=_catch_up, name="kvxfer-free", daemon=True).start()


def when_quiet(call: Callable[[], object]) -> None:
    """Call it here and now, or, where a stream waits for a transfer, later on another thread. What a late call raises
    is dropped."""
    with _lock:
        if _waited_for:
            _put_off.append(call)
            return
    call()


def _catch_up() -> None:
    while True:
        with _lock:
            if _waited_for or not _put_off:
                return
            call = _put_off.popleft()
        with contextlib.suppress(Exception):  # the driver may be gone, and the memory with it
            call()
