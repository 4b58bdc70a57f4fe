"""The control channel drops and counts what is not a peer's, and goes on serving everyone else."""

from __future__ import annotations

import os
import threading
import time

import msgspec
import pytest
import zmq
from processes import SECRET, until
from tap import Tap

from kvxfer.control import auth, messages
from kvxfer.control.channel import _HEADER, _MAGIC
from kvxfer.errors import PeerGone

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def bad_client():
    """A plain DEALER that talks to an endpoint."""
    context = zmq.Context()
    sockets = []

    def bad_client(endpoint: str) -> zmq.Socket:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        sockets.append(socket)
        return socket

    yield bad_client
    for socket in sockets:
        socket.close()
    context.term()


def dropped(side) -> int:
    return sum(side.connector.metrics.messages_dropped_total.values())


def framed(key: bytes, payload: bytes, *, kind: int = 0, session: bytes = bytes(16), magic: bytes = _MAGIC) -> bytes:
    header = _HEADER.pack(magic, messages.PROTOCOL_VERSION, kind, 1, session)
    return header + auth.mac(key, header, payload) + payload


def hello(key: bytes, **changes: object) -> bytes:
    identity = messages.Identity(name="x", engine="x", generation=1, rank=0, endpoint="tcp://127.0.0.1:1")
    fields = {"protocol": messages.PROTOCOL_VERSION, "nonce": os.urandom(auth.NONCE_BYTES), "identity": identity}
    return framed(key, messages.encode(messages.Hello(**(fields | changes))))


CHANNEL_KEY = auth.derive(SECRET, "kvxfer channel")
GARBAGE = {
    "nothing": [b""],
    "a byte": [b"\0"],
    "noise": [os.urandom(500)],
    "several frames": [b"a", b"b", b"c"],
    "another magic": [framed(CHANNEL_KEY, b"\x80", magic=b"HTTP")],
    "a handshake of another secret": [hello(auth.derive(b"some other secret", "kvxfer channel"))],
    "an unsigned handshake": [hello(CHANNEL_KEY)[:60] + bytes(20)],
    "a handshake that is no hello": [framed(CHANNEL_KEY, messages.encode(messages.Ping()))],
    "a handshake that is no message": [framed(CHANNEL_KEY, msgspec.msgpack.encode({"type": "pickle"}))],
    "a short nonce": [hello(CHANNEL_KEY, nonce=b"1")],
    "no open session": [framed(CHANNEL_KEY, messages.encode(messages.Ping()), kind=1, session=os.urandom(16))],
    "over the limit": [bytes((1 << 20) + 1000)],
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_dropped_and_counted(start, here, bad_client, what):
    prefill, decode = here("prefill", fill=1), start("decode")
    bad_client(prefill.endpoint()).send_multipart(GARBAGE[what])
    until(lambda: dropped(prefill) == 1, 3, "the garbage being counted")
    assert decode.fetch_now(prefill.publish([1])) == "mapped"
    assert dropped(prefill) == 1


def test_a_monstrous_frame_costs_its_sender_the_connection_and_nobody_else(start, here, bad_client):
    prefill, decode = here("prefill", fill=1), start("decode")
    assert decode.fetch_now(prefill.publish([0])) == "mapped"
    bad_client(prefill.endpoint()).send(bytes(64 << 20))
    for block in range(20):
        assert decode.fetch_now(prefill.publish([block])) == "mapped"


@pytest.mark.parametrize("flood", ["noise", "handshakes"])
def test_a_flood_of_one_bad_client_does_not_stop_the_fetches_of_others(start, here, bad_client, flood):
    packed = {"ways": ("packed",), "shared": False}  # which needs the publisher's channel
    prefill, decode = here("prefill", fill=1, **packed), start("decode", **packed)
    assert decode.fetch_now(prefill.publish([0])) == "packed"
    socket, ends = bad_client(prefill.endpoint()), threading.Event()
    data = os.urandom(200) if flood == "noise" else hello(CHANNEL_KEY)

    def pour() -> None:
        while not ends.is_set():
            try:
                socket.send(data, zmq.DONTWAIT)
            except zmq.Again:
                time.sleep(0.0005)

    thread = threading.Thread(target=pour)
    thread.start()
    try:
        for block in range(12):
            assert decode.fetch_now(prefill.publish([block]), [block], timeout_s=5) == "packed"
        newcomer = start("newcomer", **packed)
        assert newcomer.fetch_now(prefill.publish([1]), timeout_s=5) == "packed"
    finally:
        ends.set()
        thread.join()
    assert decode.digest(list(range(12))) == prefill.digest(list(range(12)))
    assert dropped(prefill) > 100 or flood == "handshakes"


def test_recorded_frames_are_refused_when_they_come_again(start, here, bad_client):
    tap = Tap()
    try:
        prefill = here("prefill", fill=1, advertise=tap.endpoint)
        tap.connect(prefill.connector._node.channel._router.getsockopt_string(zmq.LAST_ENDPOINT))
        decode = start("decode")
        first, second = prefill.publish([1]), prefill.publish([2])
        assert decode.fetch_now(first, [1]) == "mapped"
        assert prefill.released(first, 2)
        assert dropped(prefill) == 0
        again = list(tap.dialled)
        socket = bad_client(tap._back.getsockopt_string(zmq.LAST_ENDPOINT))
        for data in again[1:]:  # all but the handshake, which opens a session that the replayer cannot use
            socket.send(data)
        until(lambda: dropped(prefill) == len(again) - 1)
        socket.send(again[0])
        assert socket.poll(3000)  # it is answered
        for data in tap.answered:  # what prefill said, said to itself
            socket.send(data)
        until(lambda: dropped(prefill) == len(again) - 1 + len(tap.answered))
        assert prefill.lease_state(second) == "live"
        assert decode.fetch_now(second, [2]) == "mapped"
        assert decode.digest([1, 2]) == prefill.digest([1, 2])
        assert prefill.connector.metrics.peers == 1
    finally:
        prefill.close()
        tap.close()


def test_an_altered_frame_on_the_way_is_dropped(start, here, bad_client):
    tap = Tap()
    try:
        prefill = here("prefill", fill=1, advertise=tap.endpoint)
        tap.connect(prefill.connector._node.channel._router.getsockopt_string(zmq.LAST_ENDPOINT))
        decode = start("decode")
        assert decode.fetch_now(prefill.publish([1]), [1]) == "mapped"
        socket = bad_client(tap._back.getsockopt_string(zmq.LAST_ENDPOINT))
        last = tap.dialled[-1]
        for at in range(0, len(last), 3):
            socket.send(last[:at] + bytes([last[at] ^ 1]) + last[at + 1 :])
        until(lambda: dropped(prefill) == len(range(0, len(last), 3)))
        assert decode.fetch_now(prefill.publish([2]), [2]) == "mapped"
    finally:
        prefill.close()
        tap.close()


def test_a_peer_of_another_secret_gets_no_answer(start, here):
    prefill, stranger = (
        start("prefill", secret=b"the secret of others"),
        here("stranger", limits={"dial_timeout_s": 0.5}),
    )
    from kvxfer import ticket as tickets

    ticket = tickets.parse(prefill.publish([1]), b"the secret of others")
    claims = {name: getattr(ticket, name) for name in ticket.__struct_fields__ if name != "encoded"}
    forged = bytes(tickets.sign(SECRET, **claims))
    assert stranger.fetch_now(forged) == "PeerGone"
    assert sum(prefill.metrics()["messages_dropped_total"].values()) == 1
    assert prefill.metrics()["peers"] == 0


class Tapped:
    """Two connectors that have met, and a tap between them: decode's end of the session, and prefill's."""

    def __init__(self, here) -> None:
        self.tap = Tap()
        self.prefill, self.decode = here("prefill", fill=1, advertise=self.tap.endpoint), here("decode")
        self.tap.connect(self.prefill.connector._node.channel._router.getsockopt_string(zmq.LAST_ENDPOINT))
        assert self.fetched(0)
        self.nodes = [side.connector._node for side in (self.prefill, self.decode)]
        self.theirs, self.ours = [next(iter(node.directory.peers)) for node in self.nodes]

    def __enter__(self) -> Tapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.tap.close()

    def fetched(self, block: int) -> bool:
        return self.decode.fetch_now(self.prefill.publish([block]), [block]) in ("mapped", "packed", "direct")

    def say_something(self) -> None:
        self.nodes[1].on_progress(lambda: self.ours.send(messages.Ping()))


def test_a_goodbye_that_was_lost_is_said_again(here):
    """Who has lost the session waits to hear that nothing is written any more; nobody else can tell it."""
    with Tapped(here) as both:
        both.tap.mangle = lambda data: []
        both.nodes[0].on_progress(lambda: both.theirs.close("a test"))
        time.sleep(0.1)
        both.tap.mangle = lambda data: [data]
        assert both.ours.open and not both.ours.said_bye
        both.say_something()
        until(lambda: both.ours.said_bye and not both.ours.open)
        assert both.fetched(1)


def test_a_session_that_ended_without_goodbye_gets_none(here):
    """Something may still be written."""
    with Tapped(here) as both:
        both.nodes[0].on_progress(lambda: both.nodes[0].channel.drop(both.theirs, PeerGone("a test")))
        both.say_something()
        time.sleep(0.3)
        assert both.ours.open and not both.ours.said_bye


def test_messages_of_several_threads_leave_in_the_order_of_the_calls(here):
    """Also without a line, where only the progress thread can send."""
    with Tapped(here) as both:
        node, before = both.nodes[1], len(both.tap.dialled)
        inside, go = threading.Event(), threading.Event()

        def hold() -> None:
            inside.set()
            assert go.wait(10)
            both.ours.send(messages.Notice(payload=b"2"))

        seen: list[bytes] = []
        both.prefill.connector.on_notice(lambda endpoint, payload: seen.append(payload))
        node.progress.call(hold)
        assert inside.wait(10)
        both.ours.send(messages.Notice(payload=b"1"))  # posted, behind what the progress thread is about to send
        go.set()
        until(lambda: len(seen) == 2)
        assert seen == [b"1", b"2"] and len(both.tap.dialled) >= before + 2
