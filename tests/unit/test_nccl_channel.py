"""The states of an NCCL channel, both ends of it, on a fake of NCCL (tests/nccl_fake.py): what it does on a GPU is
tested in tests/gpu."""

from __future__ import annotations

import collections
import gc
import itertools
import random
import threading
import time

import numpy as np
import pytest

from kvxfer.backends import nccl_channel, nccl_ends, nccl_messages
from kvxfer.backends.nccl_channel import TRANSITIONS, Crossing, Settings, Site, State
from kvxfer.backends.nccl_ends import Taker, Writer
from kvxfer.backends.nccl_messages import Accept, Came, Chunk, Coming, Failed, Open, Taken, Window
from kvxfer.errors import BackendError, DeadlineExceeded, KvxferError, PeerGone
from tests import nccl_fake
from tests.processes import until

NBYTES = 4096
LONG_S = 30.0  # nothing takes as long on any machine


class Side:
    """One end's memory and what it has said."""

    def __init__(self, kind: type, fake: dict, settings: dict) -> None:
        self.options = nccl_fake._DEFAULTS | fake
        self.gpus = nccl_fake.FakeGpus(f"gpu of {kind.__name__}", 1)
        self.libnccl = nccl_fake.FakeLibrary(nccl_fake.FakeNccl(self.options, self.gpus))
        self.memory = np.zeros(16 * NBYTES, np.uint8)
        self.said: collections.deque = collections.deque()
        self.has_window = self.options["one_sided"]
        self.may_call = True
        self.left: list = []  # to the progress thread
        defaults = {"max_ctas": 4, "one_sided": True, "open_timeout_s": LONG_S, "stall_timeout_s": LONG_S}
        self.channel = kind(
            Site(
                libnccl=self.libnccl,
                gpus=self.gpus,
                ordinal=0,
                settings=Settings(**(defaults | settings)),
                say=self.said.append,
                may_call=lambda: self.may_call,
                soon=self.left.append,
                window_memory=lambda _: (self.memory.ctypes.data, self.memory.nbytes) if self.has_window else None,
            )
        )

    def at(self, slot: int) -> int:
        return self.memory.ctypes.data + slot * NBYTES

    def bytes_at(self, slot: int) -> np.ndarray:
        return self.memory[slot * NBYTES : (slot + 1) * NBYTES]


class Two:
    """A writer and a taker; `pump` carries what they say from one to the other."""

    def __init__(self, *, here: dict | None = None, there: dict | None = None, settings: dict | None = None) -> None:
        self.here = Side(Writer, here or {}, settings or {})
        self.there = Side(Taker, there or {}, settings or {})
        self.writer, self.taker = self.here.channel, self.there.channel
        self.here.memory[:] = np.random.default_rng(1).integers(1, 256, len(self.here.memory), np.uint8)
        self.heard: list = []
        self.arrivals: list[Crossing] = []

    def put(self, slot: int) -> Crossing:
        return self.writer.put(self.here.at(slot), self.there.at(slot), NBYTES)

    def pump(self) -> bool:
        for side, other in ((self.here, self.there), (self.there, self.here)):
            while side.said:
                said = nccl_messages.decode(nccl_messages.encode(side.said.popleft()))
                self.heard.append(said)
                if isinstance(said, Failed):
                    other.channel.fail(BackendError(said.reason), tell=False)
                elif isinstance(said, (Came, Coming)):
                    self.taker.tell(said)
                    for chunk in said.chunks:
                        if self.taker.state is not State.FAILED:
                            self.arrivals.append(self.taker.arrival(chunk.address, chunk.number + 1))
                else:
                    other.channel.hear(said)
        self.writer.advance()
        self.taker.advance()
        return True

    def wait(self, condition, what: str = "it") -> None:
        until(lambda: self.pump() and condition(), LONG_S, what)

    def heard_of(self, kind: type) -> list:
        return [said for said in self.heard if isinstance(said, kind)]

    def told(self, kind: type) -> list[int]:
        """Numbers of the chunks that were told of in such messages."""
        return [chunk.number for said in self.heard_of(kind) for chunk in said.chunks]

    def everywhere(self, *crossings: Crossing) -> bool:
        """Whether these have crossed and arrived, and all before."""
        return ended(*crossings) and len(self.arrivals) > crossings[-1].number and ended(*self.arrivals)


@pytest.fixture(autouse=True)
def strict():
    nccl_fake.breaches.clear()
    for comm in list(nccl_fake.FakeComm.open_ones):  # of an earlier test
        comm.abort()
    yield
    assert nccl_fake.breaches == []


def ended(*crossings: Crossing) -> bool:
    return all([crossing.poll() for crossing in crossings])


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_the_table_of_transitions(before, after):
    channel = Side(Writer, {}, {}).channel
    channel.state = before
    if after in TRANSITIONS[before]:
        channel._to(after)
        assert channel.state is after
    else:
        with pytest.raises(AssertionError):
            channel._to(after)


@pytest.mark.parametrize("one_sided", [False, True])
def test_chunks_cross_in_order(one_sided):
    two = Two(here={"one_sided": one_sided}, there={"one_sided": one_sided})
    crossings = [two.put(slot) for slot in range(12)]
    two.wait(lambda: two.everywhere(*crossings))
    assert np.array_equal(two.there.memory[: 12 * NBYTES], two.here.memory[: 12 * NBYTES])
    assert not two.there.memory[12 * NBYTES :].any()
    assert two.writer.one_sided == two.taker.one_sided == one_sided
    assert two.told(Came if one_sided else Coming) == list(range(12))
    assert not two.heard_of(Coming if one_sided else Came)
    taken = [said.number for said in two.heard_of(Taken)]
    assert taken == [] if one_sided else (taken == sorted(taken) and taken[-1] == 11)
    again = two.put(13)  # an idle channel goes on
    two.wait(lambda: two.everywhere(again))
    assert two.writer.generation == two.taker.generation == 1
    assert two.writer.is_at_rest and two.taker.is_at_rest and two.writer.is_idle()


def test_one_message_tells_of_all_puts_that_have_passed():
    two = Two(here={"one_sided": True}, there={"one_sided": True})
    first = two.put(0)
    two.wait(lambda: two.everywhere(first))
    held = threading.Event()
    nccl_fake.FakeStream.by_address[two.writer._stream.address].enqueue(held.wait)
    crossings = [two.put(slot) for slot in range(1, 6)]
    assert not two.here.said and all(crossing.issued for crossing in crossings)
    held.set()
    two.writer._stream.settle()
    assert ended(*crossings)  # before the other end has heard of them
    [came] = two.here.said
    assert [chunk.number for chunk in came.chunks] == [1, 2, 3, 4, 5]
    two.wait(lambda: len(two.arrivals) == 6 and ended(*two.arrivals))
    assert np.array_equal(two.there.memory[: 6 * NBYTES], two.here.memory[: 6 * NBYTES])
    assert not two.there.said and not two.heard_of(Taken)


REFUSALS = {
    "the writer's NCCL has no puts": ({}, {"one_sided": True}),
    "the taker's memory is no window's": ({"one_sided": True}, {}),
    "the writer makes no window": ({"one_sided": True, "fail_window": True}, {"one_sided": True}),
    "the taker makes no window": ({"one_sided": True}, {"one_sided": True, "fail_window": True}),
    "the window is null": ({"one_sided": True, "null_window": True}, {"one_sided": True, "null_window": True}),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_without_a_window_chunks_are_sent_and_received(why, caplog):
    caplog.set_level("INFO", nccl_channel.__name__)
    here, there = REFUSALS[why]
    two = Two(here=here, there=there)
    crossings = [two.put(slot) for slot in range(4)]
    two.wait(lambda: ended(*crossings))
    assert np.array_equal(two.there.memory[: 4 * NBYTES], two.here.memory[: 4 * NBYTES])
    assert not two.writer.one_sided and not two.taker.one_sided
    assert two.writer.generation == two.taker.generation == (2 if "makes" in why or "null" in why else 1)
    assert "by send and receive" in caplog.text
    two.writer.fail(PeerGone("over")), two.taker.fail(PeerGone("over"))
    until(lambda: nccl_fake.open_communicators() == 0, LONG_S)


def test_a_window_that_hangs_is_given_up():
    two = Two(here={"one_sided": True}, there={"one_sided": True}, settings={"open_timeout_s": 1.0})
    two.there.libnccl._nccl.comm_window_register = lambda *_: nccl_fake.FakeWindow()  # it never tells the other end
    crossing = two.put(3)
    two.wait(lambda: ended(crossing))
    assert two.writer.generation == 2 and not two.writer.one_sided
    assert np.array_equal(two.there.bytes_at(3), two.here.bytes_at(3))


def test_a_window_is_given_up_once_however_often_the_peer_says_so():
    two = Two(here={"one_sided": True, "hang_init": True}, there={"one_sided": True})
    two.put(0)
    for generation, then in ((1, 2), (1, 2), (2, 2)):
        two.writer.hear(Window(generation=generation, why_not="no"))
        assert two.writer.generation == then
    two.writer.fail(PeerGone("over"))
    until(lambda: nccl_fake.open_communicators() == 0, LONG_S)


def test_what_is_taken_includes_all_before():
    """A word that was lost must not keep its chunk's buffer lent while others cross."""
    two = Two()
    crossings = [two.put(slot) for slot in range(4)]
    hear = two.writer.hear
    two.writer.hear = lambda said: None if isinstance(said, Taken) and said.number < 3 else hear(said)
    two.wait(lambda: ended(*crossings))
    assert two.heard_of(Taken)[-1].number == 3


@pytest.mark.parametrize("at_once", [1, 4])
def test_signals_may_be_waited_for_together(at_once, monkeypatch):
    monkeypatch.setattr(nccl_ends, "_SIGNALS_AT_ONCE", at_once)
    two, waits = Two(here={"one_sided": True}, there={"one_sided": True}), []
    first = two.put(0)
    two.wait(lambda: two.everywhere(first))
    crossings = [two.put(slot) for slot in range(1, 12)]
    two.writer._stream.settle()
    assert ended(*crossings)
    ask = two.taker._comm.await_signals
    two.taker._comm.await_signals = lambda count, stream: waits.append(count) or ask(count, stream)
    two.wait(lambda: two.everywhere(*crossings))
    assert sum(waits) == 11 and max(waits) == at_once
    assert np.array_equal(two.there.memory[: 12 * NBYTES], two.here.memory[: 12 * NBYTES])
    assert two.taker.is_at_rest and len(two.taker._free_events) == len({*map(id, two.taker._free_events)})


@pytest.mark.parametrize("at_once", [1, 4])
def test_chunks_outside_of_the_window_are_sent(at_once, monkeypatch):
    monkeypatch.setattr(nccl_ends, "_SIGNALS_AT_ONCE", at_once)
    two = Two(here={"one_sided": True}, there={"one_sided": True})
    first = two.put(0)
    two.wait(lambda: two.everywhere(first))
    other = np.arange(NBYTES, dtype=np.uint16).view(np.uint8)[:NBYTES].copy()
    crossings = [
        two.put(1),
        two.put(2),
        two.writer.put(other.ctypes.data, two.there.at(3), NBYTES),
        two.writer.put(other.ctypes.data, two.there.at(4), NBYTES),
        two.put(5),
        two.put(6),
    ]
    two.wait(lambda: two.everywhere(*crossings))
    assert (two.told(Came), two.told(Coming)) == ([0, 1, 2, 5, 6], [3, 4])
    assert [crossing.number for crossing in two.arrivals] == list(range(7))
    for slot in range(7):
        assert np.array_equal(two.there.bytes_at(slot), other if slot in (3, 4) else two.here.bytes_at(slot))
    assert two.heard_of(Taken)[-1].number == 4


def test_what_is_sent_is_not_told_of_before_what_was_put_ahead_of_it():
    two = Two(here={"one_sided": True}, there={"one_sided": True})
    first = two.put(0)
    two.wait(lambda: two.everywhere(first))
    held, other = threading.Event(), np.ones(NBYTES, np.uint8)
    nccl_fake.FakeStream.by_address[two.writer._stream.address].enqueue(held.wait)
    put, sent, behind = two.put(1), two.writer.put(other.ctypes.data, two.there.at(2), NBYTES), two.put(3)
    for _ in range(20):
        two.pump()
    assert (put.issued, sent.issued, behind.issued) == (True, False, False)
    held.set()
    two.wait(lambda: two.everywhere(put, sent, behind))


def test_what_a_thread_may_not_ask_for_is_left_to_the_progress_thread_once():
    two = Two()
    first = two.put(0)
    two.wait(lambda: two.everywhere(first))
    two.here.may_call = False
    crossings = [two.put(1), two.put(2)]
    assert not ended(*crossings) and not crossings[0].issued
    [look] = two.here.left
    two.here.may_call = True  # which it sets the device for
    look()
    assert crossings[0].issued
    two.wait(lambda: two.everywhere(*crossings))
    two.here.may_call = False
    assert not ended(two.put(3)) and len(two.here.left) == 2


def test_a_signal_is_waited_for_only_when_the_bytes_have_been_put():
    """A stream that waits for a signal which never comes is not released by an abort."""
    two = Two(here={"one_sided": True}, there={"one_sided": True})
    first = two.put(0)
    two.wait(lambda: two.everywhere(first))
    comm = two.taker._comm._comm
    assert comm.waited_signals == 1
    held = threading.Event()
    nccl_fake.FakeStream.by_address[two.writer._stream.address].enqueue(held.wait)
    crossing = two.put(1)
    for _ in range(20):
        two.pump()
    assert comm.waited_signals == 1 and not crossing.passed
    held.set()
    until(lambda: two.writer.advance() or crossing.passed, LONG_S)
    assert comm.waited_signals == 1
    two.wait(lambda: two.everywhere(crossing))
    assert comm.waited_signals == 2


@pytest.mark.parametrize("one_sided", [False, True])
def test_nothing_crosses_before_what_it_comes_after(one_sided):
    two = Two(here={"one_sided": one_sided}, there={"one_sided": one_sided})
    packing, held = nccl_fake.FakeStream(), threading.Event()
    packing.enqueue(held.wait)
    packed = nccl_fake.FakeEvent()
    crossings = []
    for slot in range(2):  # the first opens the channel
        two.here.bytes_at(slot)[:] = 0
        packing.enqueue(lambda slot=slot: two.here.bytes_at(slot).fill(7))
        packed.record(packing.address)
        crossings.append(two.writer.put(two.here.at(slot), two.there.at(slot), NBYTES, after=packed))
        if slot == 0:
            two.wait(lambda: crossings[0].issued, "the first being asked for")
            for _ in range(20):
                two.pump()
            assert not crossings[0].passed and not two.there.memory.any()
            held.set()
            two.wait(lambda: two.everywhere(crossings[0]))
    two.wait(lambda: two.everywhere(*crossings))
    assert (two.there.memory[: 2 * NBYTES] == 7).all()


class Reader:
    """Reads chunks behind their arrival, on the stream that it is given."""

    def __init__(self, two: Two) -> None:
        self.two, self.seen, self.may = two, [], True

    def behind(self, slot: int):
        def kernel(stream: int) -> bool:
            if self.may:
                read = lambda: self.seen.append(self.two.there.bytes_at(slot).copy())  # noqa: E731
                nccl_fake.FakeStream.by_address[stream].enqueue(read)
            return self.may

        return self.two.arrivals[slot].behind(kernel)


@pytest.mark.parametrize("one_sided", [False, True])
def test_what_is_enqueued_behind_a_chunk_reads_it(one_sided):
    two = Two(here={"one_sided": one_sided}, there={"one_sided": one_sided})
    reader = Reader(two)
    first = two.put(0)
    two.wait(lambda: two.everywhere(first))
    assert reader.behind(0) is None  # it is there: nothing has to wait for it
    held = threading.Event()
    nccl_fake.FakeStream.by_address[two.taker._stream.address].enqueue(held.wait)
    crossings = [two.put(slot) for slot in range(1, 5)]
    two.wait(lambda: len(two.arrivals) == 5, "all told of")
    reader.may = False
    assert reader.behind(1) is None  # whoever was asked did not want to
    reader.may = True
    two.there.may_call = False
    assert reader.behind(1) is None  # a thread whose device is another
    two.there.may_call = True
    read = [reader.behind(slot) for slot in range(1, 5)]
    assert all(read) and not any(operation.poll() for operation in read) and not reader.seen
    held.set()
    two.wait(lambda: ended(*read) and two.everywhere(*crossings))
    assert all(np.array_equal(seen, two.here.bytes_at(slot)) for slot, seen in enumerate(reader.seen, 1))
    events = len(two.taker._free_events)
    again = two.put(5)
    two.wait(lambda: two.everywhere(again))
    assert len(two.taker._free_events) <= events  # they are used again


# --- what does not come ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_sided", [False, True])
def test_what_was_read_behind_a_chunk_that_has_not_come_is_not_taken_for_it(one_sided):
    """A stream passes what waits on it also when the communicator is aborted."""
    two = Two(here={"one_sided": one_sided}, there={"one_sided": one_sided})
    reader = Reader(two)
    first = two.put(0)
    two.wait(lambda: two.everywhere(first))
    held = threading.Event()
    nccl_fake.FakeStream.by_address[two.taker._stream.address].enqueue(held.wait)
    two.put(1)
    two.wait(lambda: len(two.arrivals) == 2, "it being told of")
    read = reader.behind(1)
    two.taker.fail(BackendError("somebody pulled the plug"))
    assert reader.behind(1) is None
    assert not read.poll()  # a kernel may be at work
    held.set()
    with pytest.raises(BackendError, match="the plug"):
        two.wait(read.poll)
    assert len(reader.seen) == 1


@pytest.mark.parametrize("who", ["here", "there"])
def test_a_communicator_that_is_not_made_ends_both_ends(who):
    two = Two(**{who: {"hang_init": True}}, settings={"open_timeout_s": 0.3})
    crossing = two.put(0)
    with pytest.raises(KvxferError, match=r"no communicator within 0\.3 s"):
        two.wait(lambda: ended(crossing))
    two.wait(lambda: two.taker.state is two.writer.state is State.FAILED)
    with pytest.raises(KvxferError):
        two.taker.arrival(two.there.at(0), 1)
    with pytest.raises(KvxferError):
        two.put(1)
    until(lambda: nccl_fake.open_communicators() == 0, LONG_S)


@pytest.mark.parametrize("who", ["here", "there"])
def test_a_communicator_that_cannot_be_made_ends_both_ends(who):
    two = Two(**{who: {"fail_init": True}})
    crossing = two.put(0)
    with pytest.raises(BackendError, match=r"NCCL makes no communicator.*SystemError"):
        two.wait(lambda: ended(crossing))
    two.wait(lambda: two.taker.state is two.writer.state is State.FAILED)
    until(lambda: nccl_fake.open_communicators() == 0, LONG_S)


def test_a_communicator_that_fails_later_ends_both_ends():
    two = Two()
    first = two.put(0)
    two.wait(lambda: ended(first))
    two.writer._comm._comm.error = "the cable was pulled"
    two.writer._comm._comm.state = nccl_fake.Result.RemoteError
    crossing = two.put(1)
    with pytest.raises(BackendError, match=r"RemoteError.*the cable was pulled"):
        two.wait(lambda: ended(crossing))
    two.wait(lambda: two.taker.state is State.FAILED)
    with pytest.raises(BackendError, match="the cable was pulled"):
        two.taker.arrival(two.there.at(1), 2)


def test_a_writer_whose_taker_stands_still_gives_up():
    two = Two(settings={"stall_timeout_s": 0.5})
    first = two.put(0)
    two.wait(lambda: ended(first))
    crossing = two.put(1)  # nothing is carried to the taker any more
    with pytest.raises(DeadlineExceeded, match=r"moved nothing for 0\.5 s, with 1 chunks"):
        until(lambda: ended(crossing), LONG_S)
    assert crossing.issued and two.writer.is_at_rest  # the abort has ended what was on the stream


def test_a_taker_whose_writer_stands_still_gives_up():
    two = Two(here={"most_chunks": 1}, settings={"stall_timeout_s": 0.5})
    first = two.put(0)
    two.wait(lambda: ended(first))
    two.put(1)
    two.wait(lambda: len(two.arrivals) == 2, "the word of it")
    with pytest.raises(DeadlineExceeded, match=r"moved nothing for 0\.5 s, with 1 chunks"):
        until(lambda: ended(two.arrivals[1]), LONG_S)
    assert type(two.there.said[-1]) is Failed and not two.there.said[-1].writing


def test_puts_do_not_wait_for_a_taker_that_stands_still():
    two = Two(here={"one_sided": True}, there={"one_sided": True}, settings={"stall_timeout_s": 0.5})
    first = two.put(0)
    two.wait(lambda: two.everywhere(first))
    crossings = [two.put(slot) for slot in (1, 2)]
    until(lambda: ended(*crossings), LONG_S)
    time.sleep(0.6)
    two.wait(lambda: len(two.arrivals) == 3 and ended(*two.arrivals))
    assert two.writer.state is two.taker.state is State.OPEN


def test_waiting_costs_no_deadline_while_chunks_end():
    two = Two(settings={"stall_timeout_s": 2.0}, here={"seconds_per_chunk": 0.3})
    crossings = [two.put(slot) for slot in range(10)]  # three seconds in all
    two.wait(lambda: ended(*crossings))
    assert two.writer.state is State.OPEN


# --- abort ----------------------------------------------------------------------------------------------------


def test_an_abort_in_mid_chunk_ends_when_the_streams_have_passed():
    two = Two(here={"seconds_per_chunk": 0.5})
    crossings = [two.put(slot) for slot in range(3)]
    two.wait(lambda: crossings[0].event and two.arrivals and two.arrivals[0].event, "a chunk under way")
    held = threading.Event()
    nccl_fake.FakeStream.by_address[two.writer._stream.address].enqueue(held.wait)  # a kernel that takes its time
    two.writer.fail(BackendError("somebody pulled the plug"))
    assert two.writer.state is State.FAILED
    assert not ended(crossings[0])  # it may still be read by a kernel
    for queued in crossings[1:]:
        if not queued.issued:
            with pytest.raises(BackendError, match="the plug"):
                ended(queued)
    held.set()
    with pytest.raises(BackendError, match="the plug"):
        two.wait(lambda: ended(crossings[0]))
    two.wait(lambda: two.taker.state is State.FAILED and two.taker.is_at_rest)
    before = two.there.memory.copy()
    time.sleep(0.7)
    assert np.array_equal(two.there.memory, before)  # nobody writes any more
    until(lambda: nccl_fake.open_communicators() == 0, LONG_S)
    assert len(two.heard_of(Failed)) == 1


def test_an_abort_that_hangs_holds_up_nobody():
    """NCCL's kernels end at once; what else an abort waits for is not waited for here."""
    two, hangs = Two(), threading.Event()
    first = two.put(0)
    two.wait(lambda: ended(first))
    for side in (two.here, two.there):
        side.libnccl._nccl.comm_abort = lambda comm: (comm.abort(), hangs.wait(LONG_S))
    nccl_fake.FakeStream.by_address[two.writer._stream.address].enqueue(lambda: time.sleep(0.2))
    crossing = two.put(1)
    two.writer.fail(BackendError("over"))
    with pytest.raises(BackendError, match="over"):
        two.wait(lambda: ended(crossing))
    two.wait(lambda: two.writer.is_at_rest and two.taker.state is State.FAILED and two.taker.is_at_rest)
    hangs.set()


def test_an_end_that_cannot_be_marked_is_not_taken_for_one():
    two = Two(here={"seconds_per_chunk": 0.2})
    crossing = two.put(0)
    two.wait(lambda: crossing.event is not None, "a chunk under way")

    def lost(ordinal: int) -> None:
        raise BackendError("the device is lost")

    two.here.gpus.event = lost
    two.writer.fail(BackendError("over"))
    until(lambda: nccl_fake.open_communicators() == 1, LONG_S)
    time.sleep(0.5)
    assert not ended(crossing) and not two.writer.is_at_rest and not two.writer.has_let_go
    two.taker.fail(PeerGone("over"))


def test_memory_is_nccls_until_its_abort_is_over():
    two, hangs = Two(here={"one_sided": True}, there={"one_sided": True}), threading.Event()
    first = two.put(0)
    two.wait(lambda: ended(first))
    assert not two.writer.has_let_go
    two.here.libnccl._nccl.comm_abort = lambda comm: (hangs.wait(LONG_S), comm.abort())
    two.writer.fail(PeerGone("over"))
    until(lambda: two.writer.is_at_rest, LONG_S)
    assert not two.writer.has_let_go
    hangs.set()
    until(lambda: two.writer.has_let_go, LONG_S)
    two.taker.fail(PeerGone("over"))


@pytest.mark.parametrize("one_sided", [False, True])
def test_many_threads_look_while_chunks_cross_and_an_end_fails(one_sided):
    """A fake communicator complains of two threads at once."""
    dice = random.Random(5)
    for _ in range(5):
        two = Two(here={"one_sided": one_sided, "seconds_per_chunk": 0.002}, there={"one_sided": one_sided})
        crossings, over, unexpected = [], threading.Event(), []

        def look(two=two, crossings=crossings, over=over, unexpected=unexpected) -> None:
            while not over.is_set():
                for crossing in [*crossings, *two.arrivals]:
                    try:
                        crossing.poll()
                    except BackendError:
                        pass
                    except Exception as error:
                        unexpected.append(error)
                time.sleep(1e-4)  # else they may keep the lock from everyone else, for half a minute on a busy machine

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        crossings += [two.put(slot) for slot in range(12)]
        fails, after = dice.choice([two.writer, two.taker]), dice.randrange(12)
        two.wait(lambda two=two, after=after: sum(arrival.ended for arrival in two.arrivals) >= after, "chunks")
        fails.fail(BackendError("somebody pulled the plug"))
        two.wait(lambda two=two: two.writer.has_let_go and two.taker.has_let_go, "the end")
        over.set()
        for thread in threads:
            thread.join()
        assert unexpected == []
        for crossing in two.arrivals if one_sided else [*crossings, *two.arrivals]:  # a put ends before it can be read
            try:
                assert ended(crossing)
            except BackendError:
                continue
            slot = crossing.number
            assert np.array_equal(two.there.bytes_at(slot), two.here.bytes_at(slot))
    until(lambda: nccl_fake.open_communicators() == 0, LONG_S)


def test_a_channel_that_fails_while_its_communicator_is_made_leaves_none():
    for side in (Writer, Taker):
        two = Two()
        two.put(0)
        if side is Taker:
            two.wait(lambda two=two: two.taker.state is not State.CLOSED)
        two.writer.fail(PeerGone("gone")), two.taker.fail(PeerGone("gone"))
    until(lambda: nccl_fake.open_communicators() == 0, LONG_S)


def test_many_channels_come_and_go():
    def threads() -> int:
        return sum(thread.name.startswith(("fake-", "kvxfer-")) for thread in threading.enumerate())

    before = threads()
    for _ in range(40):
        two = Two()
        crossing = two.put(0)
        two.wait(lambda crossing=crossing: ended(crossing))
        two.writer.fail(PeerGone("gone")), two.taker.fail(PeerGone("gone"))
        two.wait(lambda two=two: two.writer.is_at_rest and two.taker.is_at_rest)
        del two, crossing
    gc.collect()
    until(lambda: nccl_fake.open_communicators() == 0 and threads() <= before, LONG_S)


# --- nonsense -------------------------------------------------------------------------------------------------


def test_what_a_taker_cannot_mean_is_refused():
    two = Two()
    crossing = two.put(0)
    with pytest.raises(BackendError, match="taken chunk 5"):
        two.writer.hear(Taken(number=5))
    with pytest.raises(BackendError, match="taken chunk 0"):
        two.writer.hear(Taken(number=0))  # nothing has been sent yet
    for stale in (Accept(generation=7, window_address=0, window_bytes=1), Window(generation=0, why_not="x")):
        two.writer.hear(stale)  # of another communicator: dropped
    two.wait(lambda: ended(crossing))
    with pytest.raises(BackendError, match="taken chunk 0"):
        two.writer.hear(Taken(number=0))


def test_that_a_put_was_taken_is_refused():
    two = Two(here={"one_sided": True, "most_chunks": 1}, there={"one_sided": True})
    first = two.put(0)
    two.wait(lambda: two.everywhere(first))
    assert not ended(two.put(1))
    with pytest.raises(BackendError, match="taken chunk 1, which was not sent"):
        two.writer.hear(Taken(number=1))


@pytest.mark.parametrize("kind", [Came, Coming])
@pytest.mark.parametrize("one_sided", [False, True])
def test_what_a_writer_cannot_mean_is_refused(kind, one_sided):
    two = Two(here={"one_sided": one_sided}, there={"one_sided": one_sided})

    def tell(generation: int, *numbers: int) -> None:
        chunks = tuple(Chunk(number=number, address=two.there.at(0), nbytes=NBYTES) for number in numbers)
        two.taker.tell(kind(generation=generation, chunks=chunks))

    for generation in (0, 1):
        with pytest.raises(BackendError, match="not open here"):
            tell(generation, 0)
    crossing = two.put(0)
    two.wait(lambda: two.everywhere(crossing))
    for generation in (1, 2):
        with pytest.raises(BackendError, match="in use"):
            two.taker.hear(Open(generation=generation, unique_id=bytes(128), address=0, window_bytes=0))
    for generation in (0, 2, -1):
        with pytest.raises(BackendError, match="not open here"):
            tell(generation, 1)
    if kind is Came and not one_sided:
        with pytest.raises(BackendError, match="no window"):
            tell(1, 1)
        return
    for numbers in ((0,), (2,), (-1,)):
        with pytest.raises(BackendError, match=rf"told of chunk {numbers[0]} where 1 was next"):
            tell(1, *numbers)
    tell(1)
    two.taker.fail(PeerGone("over"))
    tell(1, 1)  # crossed the word that it has failed: dropped
    assert not two.taker._queue


@pytest.mark.parametrize("numbers", [(1, 1), (1, 3), (1, 0)])
def test_numbers_are_told_once_and_in_order_within_a_message(numbers):
    two = Two()
    crossing = two.put(0)
    two.wait(lambda: ended(crossing))
    chunks = tuple(Chunk(number=number, address=two.there.at(1), nbytes=NBYTES) for number in numbers)
    with pytest.raises(BackendError, match="where 2 was next"):
        two.taker.tell(Coming(generation=1, chunks=chunks))


def test_arrivals_are_asked_for_once_and_may_be_asked_for_early():
    two = Two()
    assert two.taker.arrival(two.there.at(0), 1) is None  # the word of it may be on its way
    crossing = two.put(0)
    two.wait(lambda: ended(crossing))
    for announced in (0, -1, 1, 1 << 40):
        with pytest.raises(BackendError, match=f"not told of chunk {announced} "):
            two.taker.arrival(two.there.at(0), announced)
    assert two.taker.arrival(two.there.at(0), 2) is None
    two.taker.tell(Coming(generation=1, chunks=(Chunk(number=1, address=two.there.at(1), nbytes=NBYTES),)))
    with pytest.raises(BackendError, match="not told of chunk 2 "):
        two.taker.arrival(two.there.at(0), 2)  # which goes elsewhere
    assert two.taker.arrival(two.there.at(1), 3) is None
    two.taker.fail(PeerGone("over"))
    with pytest.raises(PeerGone):
        two.taker.arrival(two.there.at(0), 3)


def test_a_unique_id_of_another_length_is_refused():
    two = Two()
    two.taker.hear(Open(generation=1, unique_id=b"short", address=0, window_bytes=0))
    two.wait(lambda: two.taker.state is State.FAILED)
    assert "128 bytes" in str(two.taker.error)


@pytest.mark.parametrize("payload", [b"\xc1", b"\x90", b"\x91\xa4nope", bytes(50)])
def test_malformed_words_are_refused(payload):
    with pytest.raises(BackendError, match="malformed"):
        nccl_messages.decode(payload)
