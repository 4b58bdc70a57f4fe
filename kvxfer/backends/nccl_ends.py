"""The two ends of an NCCL channel: the writer, whose chunks cross, and the taker, to which they come.

The writer opens the channel and tells of every chunk; the taker makes the same calls of NCCL in that order. With a
window, the writer puts and says so once its stream has passed the put, of all puts at once that have passed by then;
only then does the taker wait for the signals, since a stream that waits for one which never comes is not released by an
abort. A put has ended with that: its bytes may be in order before they can be read at the other end, so that one waits
for the signal first. What is sent has ended once the taker says that it was received: by then nothing of this channel
writes any more into memory that the other end may use again.

Where a window cannot be made, the writer opens the channel anew, without: nothing can be said of the state of a
communicator in which that failed.

Imports nccl_channel.py, nccl_library.py, nccl_messages.py and errors.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable

from kvxfer.backends.nccl_channel import Channel, Crossing, Site, State
from kvxfer.backends.nccl_library import Communicator, Event, Stream
from kvxfer.backends.nccl_messages import Accept, Came, Chunk, Coming, Open, Taken, Window
from kvxfer.errors import BackendError, DeadlineExceeded

_log = logging.getLogger(__name__)

_MAX_ARRIVALS = 4096
_SIGNALS_AT_ONCE = 1  # that one call of NCCL lets the taker's stream wait for


class Writer(Channel):
    """The end whose chunks cross."""

    rank = 0

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._numbers = itertools.count()
        self._accepted: Accept | None = None
        self._peer_has_window = False
        self._why_not = ""

    def put(self, local: int, remote: int, nbytes: int, *, after: Event | None = None) -> Crossing:
        """Begin to write `nbytes` of this GPU at `local` to `remote` at the peer, once `after` has passed. Raises the
        channel's error."""
        with self._lock:
            if self.state is State.FAILED:
                raise self.error
            crossing = Crossing(self, next(self._numbers), local, remote, nbytes)
            crossing.after = after
            self._add(crossing)
            if self.state is State.CLOSED:
                self._window, self._why_not = self._window_to_try(local)
                self._open(remote)
            self._advance()
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
        if last is None or not last.issued or last.is_put:
            raise BackendError(f"the peer has taken chunk {number}, which was not sent")
        for crossing in [crossing for crossing in self._crossings.values() if crossing.number <= number]:
            crossing.taken = True
            if crossing.passed:
                self._end(crossing)
        self._wait_anew()

    def _window_to_try(self, local: int) -> tuple[tuple[int, int] | None, str]:
        if not self._site.settings.one_sided:
            return None, "the one-sided way is switched off, or the peer is on another host"
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

    def _together(self) -> int:
        crossing = self._queue[0]
        crossing.is_put = self.one_sided and self._is_in_window(crossing)
        # The taker hears of chunks in order: of what is sent before that is so, of what is put afterwards.
        waits = self.one_sided and not crossing.is_put and any(before.is_put for before in self._issued)
        return 0 if waits else 1

    def _issue(self, crossings: list[Crossing], comm: Communicator, stream: Stream) -> None:
        for crossing in crossings:
            if crossing.after is not None:
                stream.wait_for(crossing.after)
            if crossing.is_put:
                window = self._accepted.window_address
                comm.put(crossing.local, crossing.nbytes, crossing.remote - window, stream.address)
            else:
                comm.send(crossing.local, crossing.nbytes, stream.address)

    def _have_issued(self, crossings: list[Crossing]) -> None:
        sent = _told(crossing for crossing in crossings if not crossing.is_put)
        if sent:
            self._site.say(Coming(generation=self.generation, chunks=sent))

    def _is_in_window(self, crossing: Crossing) -> bool:
        (start, nbytes), there = self._window, self._accepted.window_address
        ours = start <= crossing.local and crossing.local + crossing.nbytes <= start + nbytes
        return ours and there <= crossing.remote and crossing.remote + crossing.nbytes <= there + nbytes

    def _have_passed(self, crossings: list[Crossing]) -> None:
        put = _told(crossing for crossing in crossings if crossing.is_put)
        if put:  # only now: a stream that waits for a signal which never comes cannot be called back
            self._site.say(Came(generation=self.generation, chunks=put))
        for crossing in crossings:
            if crossing.is_put or crossing.taken:
                self._end(crossing)


def _told(crossings: Iterable[Crossing]) -> tuple[Chunk, ...]:
    return tuple(Chunk(crossing.number, crossing.remote, crossing.nbytes) for crossing in crossings)


class Taker(Channel):
    """The end to which chunks come."""

    rank = 1

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._next = 0  # number of the chunk that is told of next
        self._arrivals: dict[int, Crossing] = {}  # by what the peer announces them as; not asked for yet
        self.has_window = False
        """Whether the writer may put into memory of this side, be it that the channel has failed since."""

    @property
    def stall_timeout_s(self) -> float:
        """How long without anything that comes."""
        return self._site.settings.stall_timeout_s

    def tell(self, said: Came | Coming) -> None:
        """Chunks come. The caller has checked where to. Raises BackendError for what the writer cannot mean."""
        with self._lock:
            if self.state is State.FAILED:
                return
            if said.generation != self.generation or self.state is State.CLOSED:
                raise BackendError(f"the peer moves chunks over communicator {said.generation}, which is not open here")
            is_put = isinstance(said, Came)
            if is_put and not self.one_sided:
                raise BackendError("the peer has put chunks, and there is no window")
            for chunk in said.chunks:
                if chunk.number != self._next:
                    raise BackendError(f"the peer told of chunk {chunk.number} where {self._next} was next")
                self._next += 1
                crossing = Crossing(self, chunk.number, chunk.address, 0, chunk.nbytes)
                crossing.is_put = is_put
                self._add(crossing)
                self._arrivals[crossing.announced] = crossing
            while len(self._arrivals) > _MAX_ARRIVALS:  # of transfers that were stopped
                del self._arrivals[next(iter(self._arrivals))]
            self._advance()

    def arrival(self, address: int, announced: int) -> Crossing | None:
        """What was told of the chunk that the peer announces, once; None where it was not told of yet.

        Raises the channel's error where nothing will be told any more, and BackendError for what makes no sense.
        """
        with self._lock:
            crossing = self._arrivals.pop(announced, None)
            if crossing is not None and crossing.local == address:
                return crossing
            if crossing is not None or not self._next < announced <= self._next + _MAX_ARRIVALS:
                raise BackendError(f"the peer's link has not told of chunk {announced} for {address:#x}")
            if self.state is State.FAILED:
                raise self.error
            return None

    def hear(self, said: Open) -> None:
        """What else the writer says. Raises BackendError for what it cannot mean."""
        with self._lock:
            self._open(said)
            self._advance()

    def _open(self, said: Open) -> None:
        if said.generation <= self.generation or self._next:
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
        self._site.say(Window(generation=self.generation, why_not=why))

    def _together(self) -> int:
        if not self._queue[0].is_put:
            return 1
        first = itertools.islice(self._queue, _SIGNALS_AT_ONCE)
        return sum(1 for _ in itertools.takewhile(lambda crossing: crossing.is_put, first))

    def _issue(self, crossings: list[Crossing], comm: Communicator, stream: Stream) -> None:
        if crossings[0].is_put:
            comm.await_signals(len(crossings), stream.address)
        else:
            [crossing] = crossings
            comm.receive(crossing.local, crossing.nbytes, stream.address)

    def _have_issued(self, crossings: list[Crossing]) -> None:
        pass

    def _have_passed(self, crossings: list[Crossing]) -> None:
        received = [crossing for crossing in crossings if not crossing.is_put]
        if received:  # includes all before
            self._site.say(Taken(number=received[-1].number))
        for crossing in crossings:
            self._end(crossing)
