"""Lines between processes of one host: found, lost, refused, attacked; transfers and everyone else go on."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

import pytest
import zmq
from processes import until
from tap import Tap

from kvxfer.control import local
from kvxfer.control.local import LineListener

pytestmark = pytest.mark.timeout(60)

PACKED = {"ways": ("packed",), "shared": False}  # which needs the publisher's channel


def sessions(side) -> list:
    return list(side.connector._node.directory.peers)


def address(side) -> str:
    """Where a side's lines are dialled."""
    channel = side.connector._node.channel
    return local.address_of(side.endpoint(), channel._token)


def dropped(side) -> int:
    return sum(side.connector.metrics.messages_dropped_total.values())


def test_two_processes_of_a_host_speak_over_a_line(start, here):
    prefill, decode = start("prefill", fill=1, **PACKED), here("decode", **PACKED)
    for block in range(5):
        assert decode.fetch_now(prefill.publish([block]), [block]) == "packed"
    (session,) = sessions(decode)
    assert session.line is not None and session.line.unheard is None and session.open
    assert decode.digest([0, 1, 2, 3, 4]) == prefill.digest([0, 1, 2, 3, 4])


def test_so_do_those_whose_endpoint_is_a_unix_socket_itself(here, tmp_path):
    prefill, decode = here("prefill", fill=1, listen=f"ipc://{tmp_path}/prefill", **PACKED), here("decode", **PACKED)
    assert decode.fetch_now(prefill.publish([1]), [1]) == "packed"
    assert [session.line is None for session in (*sessions(decode), *sessions(prefill))] == [False, False]


def test_through_something_that_passes_messages_on_there_is_none(here):
    tap = Tap()
    try:
        prefill = here("prefill", fill=1, advertise=tap.endpoint, **PACKED)
        tap.connect(prefill.connector._node.channel._router.getsockopt_string(zmq.LAST_ENDPOINT))
        decode = here("decode", **PACKED)
        assert decode.fetch_now(prefill.publish([1]), [1]) == "packed"
        assert [session.line for session in (*sessions(decode), *sessions(prefill))] == [None, None]
        assert len(tap.dialled) >= 3
    finally:
        prefill.close()
        tap.close()


def test_who_is_killed_is_missed_at_once(start, here):
    prefill, decode = start("prefill", **PACKED), here("decode", limits={"peer_timeout_s": 50.0}, **PACKED)
    assert decode.fetch_now(prefill.publish([1])) == "packed"
    began = time.monotonic()
    prefill.kill()
    until(lambda: not sessions(decode))
    assert time.monotonic() - began < 5


def test_a_listener_that_takes_nobody_in_is_reached_the_long_way(here, monkeypatch):
    """It accepts and closes, as one does that has too many strangers."""

    def refuse(listener: LineListener) -> None:
        there, _ = listener._socket.accept()
        there.close()

    monkeypatch.setattr(LineListener, "_accept", refuse)
    prefill, decode = here("prefill", fill=1, **PACKED), here("decode", **PACKED)
    for block in (1, 2):
        assert decode.fetch_now(prefill.publish([block]), [block]) == "packed"
    assert [session.line for session in (*sessions(decode), *sessions(prefill))] == [None, None]
    assert decode.digest([1, 2]) == prefill.digest([1, 2]) and dropped(prefill) == 0


def test_without_a_descriptor_for_it_a_listener_takes_no_more_in(here, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(24, "too many open files")

    prefill, decode = here("prefill", fill=1, **PACKED), here("decode", **PACKED)
    assert decode.fetch_now(prefill.publish([1]), [1]) == "packed"
    monkeypatch.setattr(socket.socket, "accept", fail)
    for block, name in ((2, "newcomer"), (3, "another")):
        newcomer = here(name, **PACKED)
        assert newcomer.fetch_now(prefill.publish([block]), [block]) == "packed"
        assert [session.line for session in sessions(newcomer)] == [None]
    assert decode.fetch_now(prefill.publish([4]), [4]) == "packed"
    assert [session.line is None for session in sessions(decode)] == [False]


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        os.urandom(4096),
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 200) + os.urandom(200),
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 1000) + b"half of it",
    ],
    ids=["nothing", "noise", "a short frame", "a frame of noise", "a huge length", "half a frame"],
)
def test_strangers_on_a_line_are_shown_out_and_nobody_notices(here, noise):
    prefill, decode = here("prefill", fill=1, **PACKED), here("decode", **PACKED)
    assert decode.fetch_now(prefill.publish([1]), [1]) == "packed"
    strangers = []
    for _ in range(20):
        there = socket.socket(socket.AF_UNIX)
        there.connect(address(prefill))
        there.sendall(noise)
        strangers.append(there)
    assert decode.fetch_now(prefill.publish([2]), [2]) == "packed"
    for there in strangers:
        there.close()
    until(lambda: not prefill.connector._node.channel._lines._unknown)
    newcomer = here("newcomer", **PACKED)
    assert newcomer.fetch_now(prefill.publish([3]), [3]) == "packed"
    assert newcomer.digest([3]) == prefill.digest([3])
    assert all(session.line is not None for session in (*sessions(decode), *sessions(newcomer)))


def test_frames_that_were_recorded_on_a_line_are_refused(here, monkeypatch):
    recorded: list[bytes] = []
    send = local.Line.send
    monkeypatch.setattr(local.Line, "send", lambda line, frame: (recorded.append(frame), send(line, frame))[1])
    prefill, decode = here("prefill", fill=1, **PACKED), here("decode", **PACKED)
    assert decode.fetch_now(prefill.publish([1]), [1]) == "packed"
    frames, before = list(recorded), dropped(prefill)
    for frame in frames:
        there = socket.socket(socket.AF_UNIX)
        there.settimeout(10)
        there.connect(address(prefill))
        there.sendall(struct.pack("<I", len(frame)) + frame)
        assert there.recv(1) == b""  # shown out
        there.close()
    assert dropped(prefill) == before + len(frames)
    assert decode.fetch_now(prefill.publish([2]), [2]) == "packed"
    assert len(sessions(prefill)) == 1


def test_a_line_that_breaks_loses_the_session_and_the_next_fetch_dials_anew(here):
    prefill, decode = here("prefill", fill=1, **PACKED), here("decode", **PACKED)
    assert decode.fetch_now(prefill.publish([1]), [1]) == "packed"
    (session,) = sessions(decode)
    session.line._socket.shutdown(socket.SHUT_RDWR)
    until(lambda: session.lost and not sessions(prefill))
    assert decode.fetch_now(prefill.publish([2]), [2]) == "packed"
    (again,) = sessions(decode)
    assert again is not session and again.line is not None


def test_fetches_of_many_threads_ask_over_one_line(start, here):
    prefill, decode = start("prefill", fill=1, **PACKED), here("decode", **PACKED)
    assert decode.fetch_now(prefill.publish([0]), [0]) == "packed"
    tickets = {block: prefill.publish([block]) for block in range(1, 64)}
    outcomes: list[str] = []

    def fetch(who: int) -> None:
        outcomes.extend(decode.fetch_now(tickets[block], [block]) for block in range(1 + who, 64, 4))

    threads = [threading.Thread(target=fetch, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == ["packed"] * 63 and decode.digest() == prefill.digest()
    assert dropped(decode) == 0


def test_who_closes_while_others_ask_ends_them_all(start, here):
    prefill, decode = start("prefill", fill=1, **PACKED), here("decode", **PACKED)
    assert decode.fetch_now(prefill.publish([0]), [0]) == "packed"
    tickets = [prefill.publish([block]) for block in range(1, 33)]
    outcomes: list[str] = []

    def fetch(block: int) -> None:
        try:
            outcomes.append(decode.fetch_now(tickets[block - 1], [block], timeout_s=10))
        except Exception as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=fetch, args=(block,)) for block in range(1, 33)]
    for thread in threads[:16]:
        thread.start()
    decode.close()
    for thread in threads[16:]:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(outcomes) == 32 and set(outcomes) <= {"packed", "Cancelled", "Closed"}


def test_a_burst_is_read_to_its_end(here):
    """Though one socket is left to the others after some messages."""
    prefill, context = here("prefill"), zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(prefill.endpoint())
    for _ in range(500):
        stranger.send(b"noise")
    until(lambda: dropped(prefill) == 500)
    stranger.close()
    context.term()
