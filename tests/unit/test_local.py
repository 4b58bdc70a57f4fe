"""Lines: frames over Unix sockets, whoever is slow, hostile or gone."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvxfer.control import local
from kvxfer.progress import ProgressThread
from tests.processes import until

MOST = 1 << 20  # bytes of a frame


class Ends:
    """A listener, and what it has been told."""

    def __init__(self) -> None:
        self.progress = ProgressThread("test")
        self.address = local.address_of("tcp://127.0.0.1:1", os.urandom(8))
        self.frames: list[bytes] = []
        self.taken: list[local.Line] = []
        self.ended: list[local.Line] = []
        self.answers: Callable[[local.Line, bytes], None] = lambda line, frame: None
        self.listener = self.on(
            lambda: local.LineListener(self.progress, self.address, MOST, self._received, self.ended.append)
        )

    def _received(self, line: local.Line, frame: bytes) -> None:
        self.listener.known(line)
        self.taken.append(line)
        self.frames.append(frame)
        self.answers(line, frame)

    def on(self, call: Callable[[], object]) -> object:
        """What the call gives, on the progress thread."""
        outcome, done = [], threading.Event()
        self.progress.call(lambda: (outcome.append(call()), done.set()))
        assert done.wait(10)
        return outcome[0]

    def dial(self, received: Callable = lambda line, frame: None) -> local.Line | None:
        return self.on(lambda: local.dial(self.progress, self.address, MOST, received, self.ended.append))

    def hello(self) -> local.Line:
        """A line on which something was said at once. On the progress thread."""
        line = local.dial(self.progress, self.address, MOST, lambda line, frame: None, self.ended.append)
        assert line.send(b"hello")
        return line

    def raw(self) -> socket.socket:
        """Whoever knows the address."""
        there = socket.socket(socket.AF_UNIX)
        there.settimeout(10)
        there.connect(self.address)
        return there

    def close(self) -> None:
        self.progress.close(lambda: (self.listener.close(), [line.close() for line in self.taken]))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_frames_come_whole_and_in_order_both_ways(ends):
    ends.answers = lambda line, frame: line.send(frame[::-1])
    back: list[bytes] = []
    line = ends.dial(lambda line, frame: back.append(frame))
    said = [os.urandom(size) for size in (0, 1, 3, 4, 5, 4096, 1 << 18, MOST, 7)]
    for frame in said:
        assert line.send(frame)
    until(lambda: len(back) == len(said))
    assert ends.frames == said and back == [frame[::-1] for frame in said]
    assert line.unheard is None


def test_frames_of_many_threads_are_not_mixed_up(ends):
    line = ends.dial()

    def speak(who: int) -> None:
        for number in range(50):
            assert line.send(bytes([who, number]) + bytes([who]) * (1000 * (number % 5)))

    threads = [threading.Thread(target=speak, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(ends.frames) == 200)
    for who in range(4):
        assert [frame[1] for frame in ends.frames if frame[0] == who] == list(range(50))
    assert all(set(frame[2:]) <= {frame[0]} for frame in ends.frames)


def test_one_who_reads_nothing_is_sent_a_bounded_number_of_frames(ends):
    there = ends.raw()
    there.sendall(struct.pack("<I", 2) + b"hi")
    until(lambda: ends.taken)
    (line,) = ends.taken
    frame, sent = bytes(60_000), 0
    while line.send(frame):
        sent += 1
        assert sent < 5000
    assert sent >= local._MAX_WAITING
    got = 0
    while got < sent * (len(frame) + 4):  # all of it comes, once it is read
        got += len(there.recv(1 << 20))
    until(lambda: line.send(b"again"))
    there.close()


def test_where_nobody_listens_there_is_no_line(ends):
    ends.on(ends.listener.close)
    assert ends.dial() is None


def test_an_address_is_of_a_port_or_a_path_and_of_a_token():
    assert local.address_of("tcp://127.0.0.1:1", b"") is None
    given = [("tcp://h:1", b"a"), ("tcp://h:2", b"a"), ("tcp://h:1", b"b"), ("ipc:///p", b"a"), ("ipc:///q:1", b"a")]
    assert len({local.address_of(*each) for each in given}) == len(given)
    assert local.address_of("tcp://[::1]:77", b"a") == local.address_of("tcp://0.0.0.0:77", b"a")


@pytest.mark.parametrize("noise", [struct.pack("<I", MOST + 1), b"\xff" * 4, struct.pack("<I", 10) + b"half"])
def test_a_length_too_large_or_half_a_frame_ends_that_line_alone(ends, noise):
    there, line = ends.raw(), ends.dial()
    there.sendall(noise)
    if noise[:1] == b"\x0a":
        there.shutdown(socket.SHUT_WR)
    assert there.recv(1) == b""
    assert line.send(b"still here")
    until(lambda: ends.frames == [b"still here"])
    there.close()


def test_lines_that_nobody_claims_are_bounded(ends):
    mine = ends.dial()
    mine.send(b"claimed")
    until(lambda: ends.frames)
    strangers = [ends.raw() for _ in range(local._MAX_UNKNOWN // 2)]
    until(lambda: len(ends.listener._unknown) == len(strangers))
    for _ in range(local._MAX_UNKNOWN):
        strangers.append(ends.raw())
        if len(strangers) % 32 == 0:
            time.sleep(0.01)
    until(lambda: len(ends.listener._unknown) == local._MAX_UNKNOWN)
    assert strangers[0].recv(1) == b""  # the oldest is let go
    assert mine.send(b"still here")
    until(lambda: len(ends.frames) == 2)
    for there in strangers:
        there.close()
    until(lambda: not ends.listener._unknown)


def test_what_was_sent_before_the_end_still_comes(ends):
    line = ends.dial()
    for number in range(100):
        line.send(bytes([number]) * 1000)
    ends.on(line.close)
    assert line.closed and not line.send(b"late")
    until(lambda: len(ends.frames) == 100)
    until(lambda: len(ends.ended) == 1)


def test_frames_that_nobody_has_taken_are_kept_for_another_way(ends):
    there = socket.socket(socket.AF_UNIX)
    address = local.address_of("tcp://127.0.0.1:2", os.urandom(8))
    there.bind(address)
    there.listen(1)
    line = ends.on(lambda: local.dial(ends.progress, address, MOST, lambda *_: None, ends.ended.append))
    said = [bytes([number]) for number in range(local._MAX_UNHEARD)]
    for frame in said:
        line.send(frame)
    there.close()
    until(lambda: ends.ended)
    assert ends.ended == [line] and line.unheard == said


def test_too_many_are_not_kept(ends):
    line = ends.dial()
    for number in range(local._MAX_UNHEARD + 1):
        line.send(bytes([number]))
    assert line.unheard is None


def test_what_a_frame_leads_to_costs_no_other_frame(ends):
    """Even where a user's callback raises."""

    def fail(line: local.Line, frame: bytes) -> None:
        if frame == b"5":
            raise RuntimeError("a callback of the engine's")

    ends.answers = fail
    there = ends.raw()
    there.sendall(b"".join(struct.pack("<I", 1) + b"%d" % number for number in range(10)))
    until(lambda: len(ends.frames) == 10)
    there.close()


def test_a_listener_that_could_not_take_in_listens_anew(ends, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(local, "_AGAIN_S", 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", fail)
        line = ends.on(ends.hello)
        until(lambda: ends.ended == [line] and not ends.listener.takes_in)
        assert line.unheard == [b"hello"] and ends.dial() is None
    until(lambda: ends.listener.takes_in)
    ends.dial().send(b"again")
    until(lambda: ends.frames == [b"again"])


def test_a_forked_child_keeps_no_listener_alive(ends):
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    ends.on(ends.listener.close)
    try:
        assert ends.dial() is None
        with pytest.raises(ConnectionRefusedError):
            ends.raw()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_who_claims_nothing_in_time_is_shown_out(ends, monkeypatch):
    monkeypatch.setattr(local, "_CLAIMED_BY_S", 0.2)
    there, mine = ends.raw(), ends.dial()
    mine.send(b"claimed")
    there.sendall(b"\x05")
    assert there.recv(1) == b""
    time.sleep(0.3)
    assert mine.send(b"still here")
    until(lambda: len(ends.frames) == 2)
    there.close()
