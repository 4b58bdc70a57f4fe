"""Handing descriptors to another process: real sockets and memory files, no GPU. Afterwards nothing may be left."""

from __future__ import annotations

import array
import os
import socket
import struct
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from kvxfer.backends import descriptors
from kvxfer.backends.descriptors import BATCH, TOKEN_BYTES, DescriptorServer, receive
from kvxfer.errors import BackendError, PeerGone
from tests.processes import descriptors as open_descriptors
from tests.processes import until


class Files:
    """An export of memory files, each filled with its own number."""

    def __init__(self, count: int, broken_at: int = -1) -> None:
        self.sizes = [4096 * (1 + index % 3) for index in range(count)]
        self._broken_at = broken_at

    def descriptor(self, index: int) -> int:
        if index == self._broken_at:
            raise BackendError("this one cannot be exported")
        made = os.memfd_create(f"piece-{index}")
        os.write(made, index.to_bytes(4, "little") * (self.sizes[index] // 4))
        return made


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = open_descriptors()
    yield
    until(lambda: open_descriptors() == before, what="every descriptor closed")
    assert "kvxfer-descriptors" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def server():
    exports = {1: Files(1), 2: Files(3 * BATCH + 5), 3: Files(5, broken_at=3), 4: Files(0)}
    server = DescriptorServer(exports.get)
    server.exports = exports
    yield server
    server.close()
    server.close()


def contents(server: DescriptorServer, number: int, **options: float) -> list[tuple[int, int]]:
    """The first word and the size of each piece."""
    found = []

    def take(descriptor: int, nbytes: int) -> None:
        assert not os.get_inheritable(descriptor) and os.fstat(descriptor).st_size == nbytes
        found.append((int.from_bytes(os.pread(descriptor, 4, nbytes - 4), "little"), nbytes))

    receive(server.address, server.token, number, take, **options)
    return found


@pytest.mark.parametrize("number", [1, 2])
def test_every_piece_comes_in_order(server, number):
    assert contents(server, number) == list(enumerate(server.exports[number].sizes))


def test_several_clients_at_once(server):
    found = []
    threads = [threading.Thread(target=lambda: found.append(contents(server, 2))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(enumerate(server.exports[2].sizes))] * 6


def test_another_process_receives_them(server):
    code = (
        "import os, sys\n"
        "from kvxfer.backends.descriptors import receive\n"
        "receive(sys.argv[1], bytes.fromhex(sys.argv[2]), 2, lambda fd, n: print(os.fstat(fd).st_size == n))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, server.address, server.token.hex()], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"] * len(server.exports[2].sizes)


def test_what_is_not_there_any_more(server):
    with pytest.raises(BackendError, match="not registered any more"):
        contents(server, 99)


def test_what_cannot_be_exported(server):
    with pytest.raises(BackendError, match="cannot be exported"):
        contents(server, 3)
    assert contents(server, 1)


def test_a_wrong_token_gets_nothing(server):
    with pytest.raises((BackendError, PeerGone)):
        receive(server.address, bytes(TOKEN_BYTES), 1, lambda *_: pytest.fail("handed out"))
    assert contents(server, 1)


@pytest.mark.parametrize("request_bytes", [b"", b"x", bytes(TOKEN_BYTES + 7), bytes(4096)])
def test_malformed_requests_get_nothing(server, request_bytes):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(5.0)
        client.connect(f"\0{server.address}")
        if request_bytes:
            client.send(request_bytes)
        else:
            client.shutdown(socket.SHUT_WR)
        try:
            assert client.recv(100) == b""
        except ConnectionError:
            pass
    assert contents(server, 1)


def test_a_client_that_says_nothing_holds_up_the_others_for_the_deadline_at_most(server, monkeypatch):
    monkeypatch.setattr(descriptors, "DEADLINE_S", 0.3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(f"\0{server.address}")
        began = time.monotonic()
        assert contents(server, 1, deadline_s=5.0)
        assert time.monotonic() - began < 2.0


def test_a_client_that_takes_nothing_is_dropped(server, monkeypatch):
    monkeypatch.setattr(descriptors, "DEADLINE_S", 0.3)
    server.exports[5] = Files(200 * BATCH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lazy:
        lazy.connect(f"\0{server.address}")
        lazy.send(struct.pack(f"<{TOKEN_BYTES}sQ", server.token, 5))
        assert contents(server, 1, deadline_s=5.0)


def test_an_error_while_taking_ends_it(server):
    def take(descriptor: int, nbytes: int) -> None:
        raise BackendError("no room")

    with pytest.raises(BackendError, match="no room"):
        receive(server.address, server.token, 2, take)
    assert contents(server, 1)


def test_nobody_listens(server):
    server.close()
    with pytest.raises(PeerGone):
        contents(server, 1)


def test_a_killed_server_leaves_no_address():
    code = (
        "from kvxfer.backends.descriptors import DescriptorServer\n"
        "s = DescriptorServer({}.get); print(s.address, s.token.hex(), flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        address, token = process.stdout.readline().split()
        process.kill()
    with pytest.raises(PeerGone):
        receive(address, bytes.fromhex(token), 1, lambda *_: None)
    with open("/proc/net/unix") as sockets:
        assert address not in sockets.read()


# --- a hostile server ---------------------------------------------------------------------------------------


def packet(error: object = "", sizes: object = (), left: object = 0) -> bytes:
    return msgspec.msgpack.encode([error, list(sizes), left])


@pytest.fixture
def hostile():
    """A server that answers one client with given packets and numbers of descriptors, and waits for its end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = f"kvxfer-test-{os.getpid()}"
    listener.bind(f"\0{address}")
    listener.listen(1)
    threads = []

    def answer(*answers: tuple[bytes, int]) -> str:
        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(100)
                for data, count in answers:
                    files = [os.memfd_create("hostile") for _ in range(count)]
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
                    try:
                        client.sendmsg([data], rights)
                    except OSError:
                        return
                    finally:
                        for file in files:
                            os.close(file)
                client.settimeout(5.0)
                try:
                    client.recv(1)
                except OSError:
                    pass

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return address

    yield answer
    for thread in threads:
        thread.join()
    listener.close()


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ([(b"\xc1nonsense", 2)], "malformed"),
        ([(packet(sizes=[4096], left="many"), 1)], "malformed"),
        ([(packet(sizes=[4096, 4096]), 1)], "1 descriptors and 2 sizes"),
        ([(packet(sizes=[4096]), 3)], "3 descriptors and 1 sizes"),
        ([(packet(sizes=[4096], left=-1), 1)], "descriptors"),
        ([(packet(left=5), 0)], "announces"),
        ([(packet(sizes=[1], left=1 << 40), 1)], "announces"),
        ([(packet(error="x" * 3000), 4)], "cannot hand out"),
        ([(packet(sizes=[1] * 200), 200)], "more descriptors than fit"),
        ([(b"\x93" + bytes(8000), 1)], "more descriptors than fit"),
        ([(packet(sizes=[4096], left=1), 1)], "did not hand out"),  # and then nothing more
    ],
    ids=range(11),
)
def test_answers_of_a_hostile_server(hostile, answers, match):
    address = hostile(*answers)
    with pytest.raises(BackendError, match=match):
        receive(address, bytes(TOKEN_BYTES), 1, lambda *_: None, deadline_s=0.5)
