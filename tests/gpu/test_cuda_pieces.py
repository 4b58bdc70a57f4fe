"""A plan of several launches over the stand-in for the device: how far ahead it enqueues, and where it stops.

Needs the extension, and no GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer import CacheLayout
from kvxfer.cuda import mover
from kvxfer.cuda.lanes import Ending, Lanes
from kvxfer.plan import join
from tests.gpu import stand_in
from tests.processes import until

stand_in.need_no_gpu()

BLOCKS = 5
LAYOUT = CacheLayout.paged(layers=("a",), num_blocks=BLOCKS, block_tokens=16, kv_heads=2, head_dim=16, dtype="float16")


class Carried:
    """Five blocks, a launch for each, carried out by a thread; the device says that one is done when it is told to."""

    def __init__(self, device: stand_in.Device) -> None:
        self.device, self.may_go_on, self.moved = device, True, []
        device.silent = []
        ids = {"full": list(range(BLOCKS))}
        plan = join([LAYOUT], LAYOUT)[0].plan(ids, ids, tokens=16 * BLOCKS)
        self.piece_bytes = plan.wire_bytes // BLOCKS
        bases = [np.array([stand_in.DeviceArray(np.ones(region.nbytes, np.uint8)).address], np.uint64)
                 for _ in range(2) for region in LAYOUT.regions]  # fmt: skip
        self.ending, self.result = Ending(), None
        carried = mover.CudaPlan(plan, Lanes(0), max_sms=2)

        def run() -> None:
            self.result = carried.carry_out(
                *bases, go_on=lambda: self.may_go_on, moved=self.moved.append, ending=self.ending
            )

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def launched(self, launches: int) -> None:
        until(lambda: self.device.launches == launches and len(self.device.silent) > 0, what=f"{launches} launches")

    def say(self) -> None:
        self.device.silent.pop(0)()


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Carried]:
    with stand_in.installed() as device:
        monkeypatch.setattr(mover, "PIECE_BYTES", 1)  # a block is never cut
        yield Carried(device)


def test_one_piece_is_enqueued_while_another_is_at_work(carried):
    for launches in (2, 3, 4):
        carried.launched(launches)
        assert len(carried.moved) == launches - 2
        carried.say()
    carried.launched(5)
    carried.say()  # the fourth's, which the thread does not wait for apart
    assert carried.thread.is_alive()
    until(lambda: len(carried.device.silent) > 0, what="the word of the end")
    carried.say()
    carried.thread.join(10)
    assert carried.result is True and sum(carried.moved) == BLOCKS * carried.piece_bytes


def test_what_was_enqueued_is_waited_for_where_it_is_not_to_go_on(carried):
    carried.launched(2)
    carried.may_go_on = False
    carried.say()
    until(lambda: len(carried.device.silent) == 2, what="the word behind everything")
    assert carried.thread.is_alive()
    while carried.device.silent:
        carried.say()
    carried.thread.join(10)
    assert carried.result is False and carried.device.launches == 2 and sum(carried.moved) == carried.piece_bytes
