"""A link of the NCCL backend by itself, on a fake of NCCL (tests/nccl_fake.py): whether its peer lives, and closing."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from kvxfer.backends import nccl
from kvxfer.backends.base import ControlLine, Direction
from kvxfer.backends.nccl_ends import Writer
from kvxfer.backends.nccl_link import NcclLink
from kvxfer.backends.nccl_messages import Put, encode
from kvxfer.errors import BackendError, PeerGone
from tests import nccl_fake
from tests.processes import until

LONG_S = 30.0  # nothing takes as long on any machine
NBYTES = 4096


class Here:
    """A backend with a cache in memory that windows can be made of, and a link to a peer that says nothing."""

    def __init__(self) -> None:
        self.backend = nccl_fake.FakeNcclBackend(fake={"one_sided": True, "gpu": "here"})
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
    here.link.hear(encode(Put(number=0, address=here.memory.address, nbytes=NBYTES)))
    assert here.link.alive() is None and not here.link.lost
    here.link._channel(Writer).fail(BackendError("over"))
    assert here.link.lost and here.link.alive() is None
    here.link.hang_up(PeerGone("over"))
    assert here.link.alive() is False


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
