"""A link of the NCCL backend by itself, on a fake of NCCL (tests/nccl_fake.py): whether its peer lives, and closing."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from kvxfer.backends import nccl
from kvxfer.backends.base import ControlLine, Direction
from kvxfer.backends.nccl import NcclBackend
from kvxfer.backends.nccl_ends import Writer
from kvxfer.backends.nccl_link import NcclLink
from kvxfer.backends.nccl_messages import Came, Chunk, Coming, Open, encode
from kvxfer.errors import BackendError, DeadlineExceeded, PeerGone
from tests import nccl_fake
from tests.processes import until

LONG_S = 30.0  # nothing takes as long on any machine
NBYTES = 4096


class Here:
    """A backend with a cache in memory that windows can be made of, and a link to a peer that says nothing."""

    def __init__(self, **options: float) -> None:
        self.backend = nccl_fake.FakeNcclBackend(fake={"one_sided": True, "gpu": "here"}, **options)
        self.peer = nccl_fake.FakeNcclBackend(fake={"one_sided": True, "gpu": "there"})
        self.memory = self.backend.allocate(NBYTES)
        self.backend.register(self.memory.address, NBYTES)
        self.link: NcclLink = self.backend.connect(self.peer.hello())
        self.link.converse(ControlLine(say=lambda _: None, until=lambda *_: None, is_progress=lambda: True))

    def close(self) -> None:
        self.backend.close()
        self.peer.close()


@pytest.fixture
def here():
    here = Here()
    yield here
    here.close()


def test_a_peer_may_write_as_long_as_this_side_can_take(here):
    """Whatever has become of what this side writes."""
    here.link.hear(encode(Open(generation=1, unique_id=bytes(128), address=here.memory.address, window_bytes=0)))
    assert here.link.alive() is None and not here.link.lost
    here.link._channel(Writer).fail(BackendError("over"))
    assert here.link.lost and here.link.alive() is None
    here.link.hang_up(PeerGone("over"))
    assert here.link.alive() is False


@pytest.mark.parametrize("same_host", [True, False])
def test_puts_are_for_peers_of_one_host(here, same_host):
    """Over a network a put may have passed its stream before its bytes have landed."""
    line = ControlLine(say=lambda _: None, until=lambda *_: None, is_progress=lambda: True)
    site = NcclBackend.site(here.backend, line, same_host=same_host)
    assert site.settings.one_sided is same_host
    assert Writer(site)._window_to_try(here.memory.address)[0] == (
        (here.memory.address, here.memory.nbytes) if same_host else None
    )


def told(kind: type, here: Here, *numbers: int, at: int = 0, generation: int = 1) -> bytes:
    """A peer's word of chunks."""
    chunks = tuple(Chunk(number=number, address=here.memory.address + at, nbytes=NBYTES) for number in numbers)
    return encode(kind(generation=generation, chunks=chunks))


@pytest.mark.parametrize(
    ("kind", "numbers", "how", "what"),
    [
        (Coming, (1,), {}, "told of chunk 1 where 0 was next"),
        (Coming, (0, 0), {}, "told of chunk 0 where 1 was next"),
        (Coming, (0,), {"at": 1}, "not registered"),
        (Coming, (0,), {"generation": 2}, "not open here"),
        (Came, (0,), {}, "no window"),
    ],
)
def test_nonsense_about_chunks_ends_the_channel(here, kind, numbers, how, what):
    here.link.hear(encode(Open(generation=1, unique_id=bytes(128), address=here.memory.address, window_bytes=0)))
    with pytest.raises(BackendError, match=what):
        here.link.hear(told(kind, here, *numbers, **how))
    assert here.link.lost
    here.link.hear(told(kind, here, 0))  # crossed the word of that: dropped
    with pytest.raises(BackendError, match=what):
        here.link.arrival(here.memory.address, 5)
    assert here.link.alive() is False  # it takes nothing any more


def test_nonsense_about_a_channel_that_was_never_opened_ends_it(here):
    with pytest.raises(BackendError, match="not open here"):
        here.link.hear(told(Coming, here, 0))
    assert here.link.lost


def test_a_chunk_may_be_announced_before_the_link_tells_of_it(here):
    """A link's words and those about transfers go to the progress thread by themselves."""
    early = here.link.arrival(here.memory.address, 1)
    assert not early.poll()
    here.link.hear(encode(Open(generation=1, unique_id=bytes(128), address=here.memory.address, window_bytes=0)))
    here.link.hear(told(Coming, here, 0))
    assert not early.poll() and early._arrival is not None
    elsewhere = here.link.arrival(here.memory.address + 1, 2)
    here.link.hear(told(Coming, here, 1))
    with pytest.raises(BackendError, match="not told of chunk 2 for"):
        elsewhere.poll()
    with pytest.raises(BackendError, match="not told of chunk 2 for"):
        here.link.arrival(here.memory.address, 2)  # once only
    following = here.link.arrival(here.memory.address, 3)
    here.link.hang_up(PeerGone("over"))
    for arrival in (early, following):
        with pytest.raises(PeerGone):
            arrival.poll()


def test_a_chunk_that_the_link_never_tells_of_ends_the_channel():
    here = Here(stall_timeout_s=0.2)
    early = here.link.arrival(here.memory.address, 1)
    assert not early.poll()
    with pytest.raises(DeadlineExceeded, match="does not tell of a chunk"):
        until(early.poll, LONG_S)
    assert here.link.lost
    here.close()


def test_the_progress_thread_looks_at_what_comes_once(here):
    looked = []
    line = ControlLine(say=lambda _: None, until=lambda *call: looked.append(call), is_progress=lambda: True)
    here.link.converse(line)
    here.link.hear(encode(Open(generation=1, unique_id=bytes(128), address=here.memory.address, window_bytes=0)))
    [(is_idle, idle)] = looked
    assert not is_idle()  # it opens, and nobody else looks
    for number in range(3):
        here.link.hear(told(Coming, here, number))
    assert len(looked) == 1 and not is_idle()
    here.link._taker.fail(BackendError("over"))
    assert is_idle()
    idle(None)
    here.link.hear(told(Coming, here, 3))
    assert len(looked) == 2


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_memory_that_nccl_may_still_use_is_never_freed(here, hangs, kept, monkeypatch):
    """Whether or not the link is still there when the backend is closed."""
    monkeypatch.setattr(nccl, "_CLOSE_S", 0.3 if hangs else LONG_S)
    monkeypatch.setattr(nccl, "_unsettled", [])
    go_on = threading.Event()
    here.link.post(Direction.WRITE, np.array([[here.memory.address, 1 << 20, NBYTES]], np.uint64))
    until(lambda: here.link._writer._comm is not None, LONG_S)
    if hangs:
        here.backend.libnccl._nccl.comm_abort = lambda comm: (go_on.wait(LONG_S), comm.abort())
    if not kept:
        here.link.hang_up(PeerGone("over"))
        here.link = None
        gc.collect()
        assert not here.backend._links
    windows = list(here.backend._windows)
    here.backend.close()
    assert nccl._unsettled == windows * hangs
    go_on.set()
    until(lambda: nccl_fake.open_communicators() == 0, LONG_S)
