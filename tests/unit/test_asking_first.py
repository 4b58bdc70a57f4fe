"""Packed fetches ask for chunks before they have a plan: what comes early, and what goes wrong meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, errors
from kvxfer.control.messages import Chunks, Placed
from kvxfer.transfers.fetch import Fetch
from kvxfer.transfers.pull import PullLeg
from tests.processes import until

BLOCKS = 64
IDS, INTO = list(range(BLOCKS))[::-1], list(range(BLOCKS))


class Pair:
    def __init__(self) -> None:
        layout = CacheLayout.paged(
            layers=("a", "b"), num_blocks=BLOCKS, block_tokens=16, kv_heads=2, head_dim=64, dtype="bfloat16"
        )
        self.connectors, self.arrays, self.caches = [], [], []
        for name in ("prefill", "decode"):
            connector = kvxfer.Connector(name, backends=["shm"], secret=b"s" * 32, ways=("packed",))
            arrays = {region.name: np.zeros(region.nbytes, np.uint8) for region in layout.regions}
            self.connectors.append(connector)
            self.arrays.append(arrays)
            self.caches.append(connector.register(arrays, layout, name="kv"))
        for array in self.arrays[0].values():
            array[:] = np.random.default_rng(1).integers(0, 256, array.size, np.uint8)

    def fetch(self) -> Fetch:
        lease = self.caches[0].publish({"full": IDS}, tokens=16 * BLOCKS)
        return self.caches[1].fetch(lease.ticket, into={"full": INTO}, timeout_s=10)

    def check(self) -> None:
        for name, source in self.arrays[0].items():
            assert np.array_equal(self.arrays[1][name].reshape(BLOCKS, -1), source.reshape(BLOCKS, -1)[IDS]), name

    @property
    def lent_bytes(self) -> int:
        return self.connectors[1]._node.ring("staging").lent_bytes


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    made.fetch().wait()  # connects, and makes the staging
    made.check()
    for array in made.arrays[1].values():
        array[:] = 0
    yield made
    for connector in made.connectors:
        connector.close()


class Held:
    """Plans that are made once they may be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.go, self.legs = threading.Event(), []
        make, start = Fetch.plan_late, PullLeg.start

        def plan_late(fetch: Fetch, leg: object) -> None:
            assert self.go.wait(10)
            if error is not None:
                raise error
            make(fetch, leg)

        def remembered(leg: PullLeg) -> None:
            self.legs.append(leg)
            start(leg)

        monkeypatch.setattr(Fetch, "plan_late", plan_late)
        monkeypatch.setattr(PullLeg, "start", remembered)

    def all_told(self) -> bool:
        return bool(self.legs) and self.legs[0]._writer_ended and bool(self.legs[0]._early)


def test_what_was_packed_before_the_plan_was_made_is_unpacked(pair, monkeypatch):
    held = Held(monkeypatch)
    fetch = pair.fetch()
    until(held.all_told, what="prefill to have packed everything")
    assert pair.lent_bytes > 0 and not fetch.done() and fetch.progress == 0.0
    held.go.set()
    stats = fetch.wait()
    assert stats.way == "packed" and stats.bytes == sum(array.nbytes for array in pair.arrays[0].values())
    pair.check()
    until(lambda: pair.lent_bytes == 0, what="the staging to come back")


def test_a_fetch_that_is_cancelled_meanwhile_gives_its_staging_back(pair, monkeypatch):
    held = Held(monkeypatch)
    fetch = pair.fetch()
    until(held.all_told, what="prefill to have packed everything")
    fetch.cancel()
    with pytest.raises(errors.Cancelled):
        fetch.wait()
    held.go.set()
    until(lambda: pair.lent_bytes == 0, what="the staging to come back")
    assert not any(array.any() for array in pair.arrays[1].values())
    pair.fetch().wait()
    pair.check()


def test_a_plan_that_cannot_be_made_ends_the_fetch_alone(pair, monkeypatch):
    with monkeypatch.context() as patch:
        held = Held(patch, errors.InvalidBlocks("no such blocks"))
        fetch = pair.fetch()
        held.go.set()
        with pytest.raises(errors.InvalidBlocks, match="no such blocks"):
            fetch.wait()
        until(lambda: pair.lent_bytes == 0, what="the staging to come back")
    pair.fetch().wait()
    pair.check()


def test_more_chunks_than_there_are_slots_are_an_error(pair, monkeypatch):
    held = Held(monkeypatch)
    fetch = pair.fetch()
    until(held.all_told, what="prefill to have packed everything")
    leg = held.legs[0]
    placed = tuple(Placed(0, index, 0, b"", 0) for index in range(leg._loan.slots))
    pair.connectors[1]._node.progress.call(lambda: leg.handle(Chunks(transfer=leg._id, placed=placed)))
    with pytest.raises(errors.BackendError, match="more chunks than it was lent staging for"):
        fetch.wait()
    held.go.set()
    until(lambda: pair.lent_bytes == 0, what="the staging to come back")
