"""The two ends of an NCCL channel: the writer, whose chunks cross, and the taker, to which they come.

The writer opens the channel and announces every chunk; the taker makes the same calls of NCCL in that order. With a
window, the writer puts and says so once its stream has passed the put; only then does the taker wait for the signal,
since a stream that waits for one which never comes is not released by an abort. Where a window cannot be made, the
writer opens the channel anew, without: nothing can be said of the state of a communicator in which that failed.

Imports nccl_channel.py, nccl_library.py, nccl_messages.py and errors.
"""

from __future__ import annotations

import itertools
import logging
import time

from kvxfer.backends.nccl_channel import Channel, Crossing, Site, State
from kvxfer.backends.nccl_library import Communicator
from kvxfer.backends.nccl_messages import Accept, Go, Open, Put, Taken, Window
from kvxfer.errors import BackendError, DeadlineExceeded

_log = logging.getLogger(__name__)


class Writer(Channel):
    """The end whose chunks cross."""

    rank = 0

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._numbers = itertools.count()
        self._accepted: Accept | None = None
        self._peer_has_window = False
        self._why_not = ""

    def put(self, local: int, remote: int, nbytes: int) -> Crossing:
        """Begin to write `nbytes` of this GPU at `local` to `remote` at the peer. Raises the channel's error."""
        with self._lock:
            if self.state is State.FAILED:
                raise self.error
            crossing = Crossing(self, next(self._numbers), local, remote, nbytes)
            self._add(crossing)
            self._site.say(Put(number=crossing.number, address=remote, nbytes=nbytes))
            if self.state is State.CLOSED:
                self._window, self._why_not = self._window_to_try(local)
                self._open(remote)
        self.advance()
        return crossing

    def hear(self, said: Accept | Window | Taken) -> None:
        """What the taker says. Raises BackendError for what it cannot mean."""
        with self._lock:
            if self.state is State.FAILED:
                return
            if isinstance(said, Taken):
                self._taken(said.number)
            elif said.generation == self.generation:
                if isinstance(said, Accept):
                    self._accepted = said
                elif not said.why_not:
                    self._peer_has_window = True
                elif self._window is not None and self.state in (State.JOINING, State.WINDOW):
                    self._without_window(f"the peer: {said.why_not}")

    def _taken(self, number: int) -> None:
        """A chunk is in place, and with it all before: chunks are taken in order, and a word may be lost."""
        last = self._crossings.get(number)
        if last is None or not last.issued:
            raise BackendError(f"the peer has taken chunk {number}, which was not sent")
        for crossing in [crossing for crossing in self._crossings.values() if crossing.number <= number]:
            crossing.taken = True
            if crossing.passed:
                self._end(crossing)

    def _window_to_try(self, local: int) -> tuple[tuple[int, int] | None, str]:
        if not self._site.settings.one_sided:
            return None, "the one-sided way is switched off"
        if self._site.libnccl.missing:
            return None, f"{self._site.libnccl} has no {self._site.libnccl.missing[0]}"
        window = self._site.window_memory(local)
        return window, "" if window else "this side's memory is not of NCCL's allocator"

    def _open(self, remote: int) -> None:
        generation, window = self.generation + 1, self._window
        self._accepted, self._peer_has_window = None, False

        def unique_id() -> bytes:
            made = self._site.libnccl.unique_id()
            window_bytes = window[1] if window else 0
            self._site.say(Open(generation=generation, unique_id=made, address=remote, window_bytes=window_bytes))
            return made

        self._remote = remote
        self._join(generation, unique_id)

    def _joined(self) -> None:
        if self._window is None:
            self._opened(one_sided=False, why_not=self._why_not)
        elif self._accepted is not None and not self._accepted.window_bytes:
            self._opened(one_sided=False, why_not="the peer has no memory for a window")
        elif self._accepted is not None and self._site.may_call():
            address, nbytes = self._window
            self._window = address, min(nbytes, self._accepted.window_bytes)
            self._make_window()
        elif self._accepted is None and time.monotonic() > self._due:
            raise DeadlineExceeded("the peer did not say whether it has a window")

    def _window_made(self) -> None:
        if self._peer_has_window:
            self._opened(one_sided=True, why_not="")

    def _without_window(self, why: str) -> None:
        """A new communicator, since nothing can be said of the state of this one."""
        _log.info("NCCL makes no window (%s): send and receive instead", why)
        self._window, self._why_not = None, why
        self._abort()
        self._open(self._remote)

    def _may_go(self, crossing: Crossing) -> bool:
        return True

    def _issue(self, crossing: Crossing, comm: Communicator, stream: int) -> None:
        crossing.is_put = self.one_sided and self._is_in_window(crossing)
        if crossing.is_put:
            comm.put(crossing.local, crossing.nbytes, crossing.remote - self._accepted.window_address, stream)
            return
        if self.one_sided:
            self._site.say(Go(generation=self.generation, number=crossing.number, signalled=False))
        comm.send(crossing.local, crossing.nbytes, stream)

    def _is_in_window(self, crossing: Crossing) -> bool:
        (start, nbytes), there = self._window, self._accepted.window_address
        ours = start <= crossing.local and crossing.local + crossing.nbytes <= start + nbytes
        return ours and there <= crossing.remote and crossing.remote + crossing.nbytes <= there + nbytes

    def _has_passed(self, crossing: Crossing) -> None:
        if crossing.is_put:  # only now: a stream that waits for a signal which never comes cannot be called back
            self._site.say(Go(generation=self.generation, number=crossing.number, signalled=True))
        if crossing.taken:
            self._end(crossing)


class Taker(Channel):
    """The end to which chunks come."""

    rank = 1

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._next = 0
        self.has_window = False
        """Whether the writer may put into memory of this side, be it that the channel has failed since."""

    def announce(self, said: Put) -> Crossing:
        """A chunk will come. The caller has checked where to. Raises BackendError."""
        with self._lock:
            if self.state is State.FAILED:
                raise self.error
            if said.number != self._next:
                raise BackendError(f"the peer announced chunk {said.number} where {self._next} was next")
            self._next += 1
            crossing = Crossing(self, said.number, said.address, 0, said.nbytes)
            self._add(crossing)
            return crossing

    def hear(self, said: Open | Go) -> None:
        """What else the writer says. Raises BackendError for what it cannot mean."""
        with self._lock:
            if isinstance(said, Open):
                self._open(said)
            elif said.generation == self.generation and self.state is not State.FAILED:
                crossing = self._crossings.get(said.number)
                if crossing is None or crossing.issued:
                    raise BackendError(f"the peer lets chunk {said.number} go, which does not wait for that")
                crossing.go = said
        self.advance()

    def _open(self, said: Open) -> None:
        if said.generation <= self.generation or self._used:
            raise BackendError("the peer opened a channel that is in use")
        if self.state is State.FAILED:
            return
        self._abort()
        self.one_sided = self.has_window = False  # nothing was put: it opens anew only where it cannot
        memory = self._site.window_memory(said.address) if said.window_bytes and self._site.settings.one_sided else None
        nbytes = min(memory[1], said.window_bytes) if memory else 0
        self._window = (memory[0], nbytes) if memory else None
        self._site.say(
            Accept(generation=said.generation, window_address=memory[0] if memory else 0, window_bytes=nbytes)
        )
        self._join(said.generation, lambda: said.unique_id)

    def _joined(self) -> None:
        if self._window is None:
            self._opened(one_sided=False, why_not="no window was asked for, or there is no memory for it")
        elif self._site.may_call():
            self._make_window()

    def _window_made(self) -> None:
        self.has_window = True
        self._site.say(Window(generation=self.generation, why_not=""))
        self._opened(one_sided=True, why_not="")

    def _without_window(self, why: str) -> None:
        """Say so, and wait for the writer to open anew."""
        self._to(State.CLOSED)
        self._abort()
        self._wait_anew()
        self._site.say(Window(generation=self.generation, why_not=why))

    def _may_go(self, crossing: Crossing) -> bool:
        return not self.one_sided or crossing.go is not None

    def _issue(self, crossing: Crossing, comm: Communicator, stream: int) -> None:
        if crossing.go is not None and crossing.go.signalled:
            comm.await_signal(stream)
        else:
            comm.receive(crossing.local, crossing.nbytes, stream)

    def _has_passed(self, crossing: Crossing) -> None:
        self._site.say(Taken(number=crossing.number))
        self._end(crossing)
