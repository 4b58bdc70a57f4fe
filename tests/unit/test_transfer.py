"""The state machine of a transfer, as a table."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvxfer import errors
from kvxfer.progress import ProgressThread
from kvxfer.transfers.transfer import ENDED, TRANSITIONS, Transfer, TransferState
from tests.processes import until

S = TransferState


@pytest.fixture
def progress() -> Iterator[ProgressThread]:
    thread = ProgressThread("test")
    yield thread
    thread.close(lambda: None)


def in_state(progress: ProgressThread, state: TransferState) -> Transfer:
    transfer = Transfer(progress, timeout_s=30, what="a test")
    if state is S.POSTED:
        return transfer
    if state is S.CANCELLED:
        transfer.cancel()
        return transfer
    if state is S.FAILED:
        transfer.abort(errors.PeerGone("gone"))
        return transfer
    assert transfer.begin()
    if state is S.CANCELLING:
        assert transfer.hold()
        transfer.cancel()
    elif state is S.DONE:
        assert transfer.succeed()
    assert transfer.state is state
    return transfer


# What each call does in each state: the state after it, and what it returns (abort and drop return nothing).
CALLS = {
    "begin": {S.POSTED: (S.MOVING, True), **dict.fromkeys(set(S) - {S.POSTED}, (None, False))},
    "succeed": {S.MOVING: (S.DONE, True), **dict.fromkeys(set(S) - {S.MOVING}, (None, False))},
    "hold": {
        S.POSTED: (None, True),
        S.MOVING: (None, True),
        **dict.fromkeys(set(S) - {S.POSTED, S.MOVING}, (None, False)),
    },
    "cancel": {
        S.POSTED: (S.CANCELLED, None),
        S.MOVING: (S.CANCELLED, None),
        **dict.fromkeys(set(S) - {S.POSTED, S.MOVING}, (None, None)),
    },
}


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_does_in_a_state(progress: ProgressThread, call: str, state: TransferState) -> None:
    transfer = in_state(progress, state)
    after, returned = CALLS[call][state]
    assert getattr(transfer, call)() is returned
    assert transfer.state is (after or state)
    if after and after not in TRANSITIONS[state]:  # a passage through a state in between
        assert any(after in TRANSITIONS[between] for between in TRANSITIONS[state])


def test_ended_states_have_no_way_out() -> None:
    assert {S.DONE, S.FAILED, S.CANCELLED} == ENDED
    assert all(not TRANSITIONS[state] for state in ENDED)


def test_it_does_not_end_before_the_last_writer_has_dropped(progress: ProgressThread) -> None:
    transfer = in_state(progress, S.POSTED)
    assert transfer.begin() and transfer.hold() and transfer.hold()
    transfer.abort(errors.PeerGone("gone"))
    transfer.drop()
    assert transfer.state is S.CANCELLING and not transfer.done() and transfer.exception() is None
    transfer.drop()
    assert transfer.state is S.FAILED and isinstance(transfer.exception(), errors.PeerGone)


def test_the_first_error_stands(progress: ProgressThread) -> None:
    transfer = in_state(progress, S.POSTED)
    transfer.abort(errors.LeaseExpired("first"))
    transfer.abort(errors.PeerGone("second"))
    with pytest.raises(errors.LeaseExpired, match="first"):
        transfer.wait(1)


def test_the_deadline_ends_it_without_anyone_waiting(progress: ProgressThread) -> None:
    transfer = Transfer(progress, timeout_s=0.05, what="a test")
    ended = threading.Event()
    transfer.add_done_callback(lambda _: ended.set())
    assert ended.wait(5)
    with pytest.raises(errors.DeadlineExceeded, match=r"past its deadline of 0\.05 s while posted"):
        transfer.result()


def test_a_waiting_thread_is_woken(progress: ProgressThread) -> None:
    transfer = in_state(progress, S.MOVING)
    threading.Timer(0.05, transfer.succeed).start()
    assert transfer.wait(5).seconds > 0


def test_callbacks_run_on_the_progress_thread_also_after_the_end(progress: ProgressThread) -> None:
    names: list[str] = []
    called = threading.Event()
    transfer = in_state(progress, S.POSTED)
    transfer.add_done_callback(lambda _: names.append(threading.current_thread().name))
    transfer.cancel()
    transfer.add_done_callback(lambda _: (names.append(threading.current_thread().name), called.set()))
    assert called.wait(5)
    assert names == ["kvxfer-progress-test"] * 2


def test_waiting_in_a_callback_is_refused(progress: ProgressThread) -> None:
    seen: list[BaseException] = []
    called = threading.Event()
    other = in_state(progress, S.POSTED)

    def callback(_: Transfer) -> None:
        try:
            other.wait(1)
        except errors.InvalidRequest as error:
            seen.append(error)
        called.set()

    in_state(progress, S.DONE).add_done_callback(callback)
    assert called.wait(5) and "progress thread" in str(seen[0])


def test_results_of_what_is_under_way_are_refused(progress: ProgressThread) -> None:
    with pytest.raises(errors.InvalidRequest, match="still posted"):
        in_state(progress, S.POSTED).result()
    with pytest.raises(errors.InvalidRequest, match="GPU memory"):
        in_state(progress, S.POSTED).wait_on(None)
    with pytest.raises(errors.InvalidRequest, match="timeout_s"):
        Transfer(progress, timeout_s=0, what="a test")


class Gates:
    """The gates of a device, as far as a transfer uses them: one gate, and what happened to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def take(self) -> Gates:
        self.calls.append("take")
        return self

    def open(self) -> None:
        self.calls.append("open")

    def open_by(self, gate: Gates, deadline: float) -> None:
        assert gate is self

    def hold(self, stream: object) -> None:
        self.calls.append(f"hold {stream}")

    def give_back(self, gate: Gates) -> None:
        assert gate is self and "open" in self.calls
        self.calls.append("give back")


@pytest.mark.parametrize("end", ["succeed", "cancel", "deadline", "bytes in place", "drained"])
def test_a_gate_opens_at_every_end_and_is_given_back_once(progress: ProgressThread, end: str) -> None:
    gates = Gates()
    transfer = Transfer(progress, timeout_s=0.05 if end == "deadline" else 30, what="a test", gates=gates)
    transfer.wait_on(7)
    assert gates.calls == ["take", "hold 7"]
    if end in ("succeed", "bytes in place", "drained"):
        assert transfer.begin() and transfer.hold()
    if end == "bytes in place":
        transfer.open_gate()
        assert gates.calls[2:] == ["open"] and not transfer.done()
    if end == "drained":
        transfer.cancel()
        assert "open" not in gates.calls  # somebody writes: who waits would read what is just being written
    if end in ("succeed", "bytes in place"):
        assert transfer.succeed()
    if end in ("succeed", "bytes in place", "drained"):
        transfer.drop()
    elif end == "cancel":
        transfer.cancel()
    else:
        until(lambda: "give back" in gates.calls)  # nobody waits and nobody polls
    transfer.wait_on(8)  # it has ended: nothing to wait for
    transfer.cancel()
    assert gates.calls[-1] == "give back" and gates.calls.count("give back") == 1 and "hold 8" not in gates.calls


def test_an_abandoned_transfer_opens_its_gate_and_keeps_it_until_it_has_drained(progress: ProgressThread) -> None:
    gates = Gates()
    transfer = Transfer(progress, timeout_s=30, what="a test", gates=gates)
    assert transfer.begin() and transfer.hold()
    transfer.cancel()
    transfer.abandon()
    assert gates.calls == ["take", "open"]
    transfer.drop()
    assert gates.calls[-1] == "give back"


def test_host_caches_have_no_streams(progress: ProgressThread) -> None:
    with pytest.raises(errors.InvalidRequest, match="GPU"):
        Transfer(progress, timeout_s=30, what="a test").wait_on(7)


def test_who_asks_drives_what_moves_by_itself(progress: ProgressThread) -> None:
    transfer = in_state(progress, S.POSTED)
    assert transfer.begin() and transfer.hold()
    arrived, asked = threading.Event(), []

    def drive(seconds: float) -> None:
        asked.append(seconds)
        if arrived.wait(seconds):
            transfer.driven_by(None)
            transfer.drop()
            transfer.succeed()

    transfer.driven_by(drive)
    assert not transfer.done() and asked == [0.0]
    with pytest.raises(errors.DeadlineExceeded, match="has not ended within"):
        transfer.wait(0.01)
    assert all(seconds <= 0.01 for seconds in asked)
    threading.Timer(0.02, arrived.set).start()
    assert transfer.wait(20).seconds > 0
    before = len(asked)
    assert transfer.done() and len(asked) == before


def test_what_moves_by_itself_is_awaited_past_the_deadline(progress: ProgressThread) -> None:
    transfer = Transfer(progress, timeout_s=0.05, what="a test")
    assert transfer.begin() and transfer.hold()
    arrived = threading.Event()

    def drive(seconds: float) -> None:
        if arrived.wait(seconds):
            transfer.driven_by(None)
            transfer.drop()

    transfer.driven_by(drive)
    threading.Timer(0.2, arrived.set).start()
    with pytest.raises(errors.DeadlineExceeded, match="ran past its deadline"):
        transfer.wait(20)
    assert arrived.is_set() and transfer.state is S.FAILED


def test_statistics_can_be_read_at_any_time(progress: ProgressThread) -> None:
    transfer = in_state(progress, S.POSTED)
    transfer.count(way="mapped", bytes=10)
    assert (transfer.stats.way, transfer.stats.bytes, transfer.stats.seconds) == ("mapped", 10, 0.0)
    assert transfer.begin()
    transfer.advance(5)
    assert transfer.progress == 0.5 and transfer.stats.posted_s > 0
    assert transfer.succeed()
    assert transfer.result() is transfer.stats and transfer.stats.seconds >= transfer.stats.posted_s
