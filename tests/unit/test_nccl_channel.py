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

from kvxfer.backends import nccl_channel, nccl_messages
from kvxfer.backends.nccl_channel import TRANSITIONS, Crossing, Settings, Site, State
from kvxfer.backends.nccl_ends import Taker, Writer
from kvxfer.backends.nccl_messages import Accept, Failed, Go, Open, Put, Taken, Window
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
        defaults = {"max_ctas": 4, "one_sided": True, "open_timeout_s": LONG_S, "stall_timeout_s": LONG_S}
        self.channel = kind(
            Site(
                libnccl=self.libnccl,
                gpus=self.gpus,
                ordinal=0,
                settings=Settings(**(defaults | settings)),
                say=self.said.append,
                may_call=lambda: True,
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
                elif isinstance(said, Put):
                    self.arrivals.append(self.taker.announce(said))
                else:
                    other.channel.hear(said)
        self.writer.advance()
        self.taker.advance()
        return True

    def wait(self, condition, what: str = "it") -> None:
        until(lambda: self.pump() and condition(), LONG_S, what)

    def heard_of(self, kind: type) -> list:
        return [said for said in self.heard if isinstance(said, kind)]


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
    two.wait(lambda: ended(*crossings))
    assert np.array_equal(two.there.memory[: 12 * NBYTES], two.here.memory[: 12 * NBYTES])
    assert not two.there.memory[12 * NBYTES :].any()
    assert [said.number for said in two.heard_of(Taken)] == list(range(12))
    assert two.writer.one_sided == two.taker.one_sided == one_sided
    assert [said.signalled for said in two.heard_of(Go)] == [True] * 12 * one_sided
    again = two.put(13)  # an idle channel goes on
    two.wait(lambda: ended(again))
    assert two.writer.generation == two.taker.generation == 1
    assert two.writer.is_at_rest and two.taker.is_at_rest and not two.writer._crossings


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
    two.writer.hear = lambda said: None if isinstance(said, Taken) and said.number in (0, 1) else hear(said)
    two.wait(lambda: ended(*crossings))
    assert [said.number for said in two.heard_of(Taken)] == [0, 1, 2, 3]


def test_chunks_outside_of_the_window_are_sent():
    two = Two(here={"one_sided": True}, there={"one_sided": True})
    first = two.put(0)
    two.wait(lambda: ended(first))
    other = np.arange(NBYTES, dtype=np.uint16).view(np.uint8)[:NBYTES].copy()
    crossings = [two.put(1), two.writer.put(other.ctypes.data, two.there.at(2), NBYTES), two.put(3)]
    two.wait(lambda: ended(*crossings))
    assert [said.signalled for said in sorted(two.heard_of(Go), key=lambda said: said.number)] == [
        True,
        True,
        False,
        True,
    ]
    assert np.array_equal(two.there.bytes_at(2), other)
    assert np.array_equal(two.there.bytes_at(3), two.here.bytes_at(3))


def test_a_signal_is_waited_for_only_when_the_bytes_have_been_put():
    """A stream that waits for a signal which never comes is not released by an abort."""
    two = Two(here={"one_sided": True}, there={"one_sided": True})
    first = two.put(0)
    two.wait(lambda: ended(first))
    comm = two.taker._comm._comm
    crossing = two.writer.put(two.here.at(1), two.there.at(1), NBYTES)
    assert comm.waited_signals == 1
    while two.here.said:  # the announcement, and the word that it has been put
        said = two.here.said.popleft()
        two.taker.announce(said) if isinstance(said, Put) else None
    two.taker.advance()
    until(lambda: two.writer.advance() or crossing.passed, LONG_S)
    assert comm.waited_signals == 1
    two.wait(lambda: ended(crossing))
    assert comm.waited_signals == 2


# --- what does not come ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["here", "there"])
def test_a_communicator_that_is_not_made_ends_both_ends(who):
    two = Two(**{who: {"hang_init": True}}, settings={"open_timeout_s": 0.3})
    crossing = two.put(0)
    with pytest.raises(KvxferError, match=r"no communicator within 0\.3 s"):
        two.wait(lambda: ended(crossing))
    two.wait(lambda: two.taker.state is two.writer.state is State.FAILED)
    with pytest.raises(KvxferError):
        two.wait(lambda: ended(*two.arrivals))
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
        two.wait(lambda: ended(two.arrivals[-1]))


def test_a_writer_whose_taker_stands_still_gives_up():
    two = Two(settings={"stall_timeout_s": 0.5})
    first = two.put(0)
    two.wait(lambda: ended(first))
    crossing = two.put(1)  # nothing is carried to the taker any more
    with pytest.raises(DeadlineExceeded, match=r"moved nothing for 0\.5 s, with 1 chunks"):
        until(lambda: ended(crossing), LONG_S)
    assert crossing.issued and two.writer.is_at_rest  # the abort has ended what was on the stream


def test_a_taker_whose_writer_does_not_open_gives_up():
    two = Two(settings={"stall_timeout_s": 0.3})
    arrival = two.taker.announce(Put(number=0, address=two.there.at(0), nbytes=NBYTES))
    with pytest.raises(DeadlineExceeded):
        until(lambda: ended(arrival), LONG_S)
    assert [type(said) for said in two.there.said] == [Failed] and not two.there.said[0].writing


def test_waiting_costs_no_deadline_while_chunks_end():
    two = Two(settings={"stall_timeout_s": 2.0}, here={"seconds_per_chunk": 0.3})
    crossings = [two.put(slot) for slot in range(10)]  # three seconds in all
    two.wait(lambda: ended(*crossings))
    assert two.writer.state is State.OPEN


# --- abort ----------------------------------------------------------------------------------------------------


def test_an_abort_in_mid_chunk_ends_when_the_streams_have_passed():
    two = Two(here={"seconds_per_chunk": 0.5})
    crossings = [two.put(slot) for slot in range(3)]
    two.wait(lambda: crossings[0].event is not None and two.arrivals[0].event is not None, "a chunk under way")
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

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        crossings += [two.put(slot) for slot in range(12)]
        fails, after = dice.choice([two.writer, two.taker]), dice.randrange(12)
        two.wait(lambda two=two, after=after: len(two.heard_of(Taken)) >= after, "chunks")
        fails.fail(BackendError("somebody pulled the plug"))
        two.wait(lambda two=two: two.writer.has_let_go and two.taker.has_let_go, "the end")
        over.set()
        for thread in threads:
            thread.join()
        assert unexpected == []
        for slot, crossing in enumerate(crossings):
            try:
                assert ended(crossing)
            except BackendError:
                continue
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


def test_what_a_writer_cannot_mean_is_refused():
    two = Two()
    with pytest.raises(BackendError, match="chunk 3 where 0 was next"):
        two.taker.announce(Put(number=3, address=two.there.at(0), nbytes=NBYTES))
    crossing = two.put(0)
    two.wait(lambda: ended(crossing))
    for generation in (1, 2):
        with pytest.raises(BackendError, match="in use"):
            two.taker.hear(Open(generation=generation, unique_id=bytes(128), address=0, window_bytes=0))
    with pytest.raises(BackendError, match="lets chunk 9 go"):
        two.taker.hear(Go(generation=1, number=9, signalled=True))
    two.taker.hear(Go(generation=0, number=9, signalled=True))  # of another communicator: dropped


def test_a_unique_id_of_another_length_is_refused():
    two = Two()
    two.taker.hear(Open(generation=1, unique_id=b"short", address=0, window_bytes=0))
    two.wait(lambda: two.taker.state is State.FAILED)
    assert "128 bytes" in str(two.taker.error)


@pytest.mark.parametrize("payload", [b"\xc1", b"\x90", b"\x91\xa4nope", bytes(50)])
def test_malformed_words_are_refused(payload):
    with pytest.raises(BackendError, match="malformed"):
        nccl_messages.decode(payload)
