"""Chunks packed and unpacked one after another, without a thread that waits for each.

Whoever launches goes on, and looks later at what it was given: an operation like those of backends. Two streams take
turns, so that the next kernel starts while the last blocks of the one before it end; what was launched first ends
first, or nearly so. Nothing here waits for a device.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxfer.backends.base import Operation
from kvxfer.cuda.runtime import Event, PinnedMemory
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from kvxfer.cuda.lanes import Lane

_STREAMS = 2
_PAGE_BYTES = 4096
_WORD_BYTES = 4
_LOOK_S = 2e-3  # between two looks for an error of the device


class Launched(Operation):
    """One kernel on its way. One thread looks at a time."""

    def __init__(
        self, lane: Lane, said: int, judge: Callable[[], KvxferError | None], event: Event | None = None
    ) -> None:
        self.event = event  # behind the kernel, until `poll` has said that it has ended
        self._lane, self._said = lane, said
        self._judge: Callable[[], KvxferError | None] | None = judge
        self._look_at = time.monotonic() + _LOOK_S

    def poll(self) -> bool:
        """Whether the kernel has ended. Raises CudaError, or what it was found to have done wrong."""
        if self._judge is None:
            return True
        if not self._lane.has_said(self._said):
            if time.monotonic() > self._look_at:
                self._look_at = time.monotonic() + _LOOK_S
                self._lane.check()
            return False
        judge, self._judge = self._judge, None
        error = judge()
        if error is not None:
            raise error
        return True


class Conveyor:
    """Two lanes of one device. Thread-safe."""

    def __init__(self, new_lane: Callable[[], Lane]) -> None:
        self._new_lane = new_lane
        self._lanes: list[Lane] = []
        self._turn = 0
        self._event: Event | None = None
        self._events: list[Event] = []  # that nobody waits for
        self._pages: list[PinnedMemory] = []
        self._flags: list[int] = []  # addresses of words that no kernel sets
        self._lock = threading.Lock()

    def reserve(self) -> None:
        """Have what the first launches need."""
        with self._lock:
            self._streams()
            self._flags.append(self._flag())

    def launch(
        self,
        kernel: Callable[[int, int], None],
        *,
        flagged: Callable[[], KvxferError] | None = None,
        marked: bool = False,
    ) -> Launched:
        """Call `kernel` with a stream and the address of a word, now 0, that it may set; enqueue the word of its end,
        and with `marked` an event, for other streams to wait for.

        Where `flagged` is given and the kernel has set the word, its error ends the operation; else the address is 0.
        Raises what `kernel` raises, and CudaError.
        """
        with self._lock:
            lanes = self._streams()
            lane = lanes[self._turn % len(lanes)]
            self._turn += 1
            flag = self._flag() if flagged else 0
            try:
                kernel(lane.queue, flag)
                event = self._mark(lane) if marked else None
                lane.report()
            except Exception:
                if flag:
                    self._flags.append(flag)  # whoever sees it set without cause has an error to tell anyway
                raise
            said = lane.said

        def judge() -> KvxferError | None:
            if event is not None:
                self._events.append(event)
            if not flag:
                return None
            is_set = ctypes.c_uint32.from_address(flag).value != 0
            self._flags.append(flag)
            return flagged() if is_set else None

        return Launched(lane, said, judge, event)

    def before_all(self, enqueue: Callable[[int], None]) -> Launched:
        """Call `enqueue` with a stream: kernels that are launched later come after what it enqueues there."""
        with self._lock:
            first, *others = self._streams()
            enqueue(first.queue)
            first.report()
            self._event = self._event or Event(device=first.device)
            self._event.record(first.queue)
            for lane in others:
                lane.wait_for(self._event.address)
            return Launched(first, first.said, lambda: None)

    def close(self) -> None:
        """Free it all, if everything launched has ended; may wait for the device."""
        with self._lock:
            if all(lane.has_said(lane.said) for lane in self._lanes):
                for owned in (*self._lanes, *self._pages, *self._events, *([self._event] if self._event else [])):
                    owned.close()
                self._lanes, self._pages, self._flags, self._event, self._events = [], [], [], None, []

    def _streams(self) -> list[Lane]:
        if not self._lanes:
            self._lanes = [self._new_lane() for _ in range(_STREAMS)]
        return self._lanes

    def _mark(self, lane: Lane) -> Event:
        event = self._events.pop() if self._events else Event(device=lane.device)
        event.record(lane.queue)
        return event

    def _flag(self) -> int:
        if not self._flags:
            page = PinnedMemory(_PAGE_BYTES, device=self._lanes[0].device)
            self._pages.append(page)
            self._flags += range(page.address, page.address + _PAGE_BYTES, _WORD_BYTES)
        flag = self._flags.pop()
        ctypes.c_uint32.from_address(flag).value = 0
        return flag
