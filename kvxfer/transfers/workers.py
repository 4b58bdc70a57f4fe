"""How many chunks of one packed transfer are worked on at once, and on whose threads.

Imports progress.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxfer.progress import MoverPool

if TYPE_CHECKING:
    from kvxfer.node import Limits


def workers_for(limits: Limits) -> int:
    """Mover threads that one end of a packed transfer keeps busy: at most half of the processors.

    The other end may be on this host, and more threads than processors cost more than they move: each then waits for
    the others' time slices, and so do the messages.
    """
    return max(1, min(limits.mover_threads, len(os.sched_getaffinity(0)) // 2))


class ChunkWorkers:
    """Calls on mover threads, at most `most` at once. Whoever has carried one out takes the next without being told.

    After each call a worker makes way for other transfers that wait for a mover.
    """

    def __init__(self, pool: MoverPool, take: Callable[[], Callable[[], None] | None], *, most: int) -> None:
        """`take`, a method, returns the next call, or None; one thread at a time calls it, and it must be quick.

        Its object is not held: that holds the workers, and with it goes what a peer had opened here.
        """
        self._pool, self._most = pool, most
        self._method = weakref.WeakMethod(take)
        self._working = 0
        self._lock = threading.Lock()

    def wake(self) -> None:
        """There may be something to take. Any thread."""
        with self._lock:
            if self._working >= self._most:
                return
            call = self._take()
            if call is None:
                return
            self._working += 1
        self._pool.submit(lambda: self._work(call))
        if self._most > 1:
            self.wake()

    def _take(self) -> Callable[[], None] | None:
        take = self._method()
        return None if take is None else take()

    def _work(self, call: Callable[[], None] | None) -> None:
        while call is not None:
            call()
            with self._lock:
                call = self._take()
                if call is None:
                    self._working -= 1
            if call is not None and self._pool.waiting:
                self._pool.submit(lambda call=call: self._work(call))
                return
