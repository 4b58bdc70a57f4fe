"""Packed fetches ask for chunks before they have a plan: what comes early, and what goes wrong meanwhile."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, errors
from kvxfer.control.messages import Chunks, Placed
from kvxfer.layout import Group, Plane, Record, Region, Slice
from kvxfer.transfers.fetch import Fetch
from kvxfer.transfers.packed import PackedSource
from kvxfer.transfers.pull import PullLeg, Serve
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


@pytest.fixture(params=["over a line", "over ZeroMQ"])
def any_pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    if request.param == "over ZeroMQ":
        monkeypatch.setattr("kvxfer.control.local.dial", lambda *_: None)
    return request.getfixturevalue("pair")


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


def test_a_fetch_that_ends_as_its_plan_is_made_gives_its_staging_back(pair, monkeypatch):
    """The writer has ended by then, so that nothing more comes which would have the staging given back."""
    held, count = Held(monkeypatch), Fetch.count_plans

    def count_plans(fetch: Fetch) -> None:
        canceller = threading.Thread(target=fetch.cancel)
        canceller.start()
        canceller.join()
        count(fetch)

    fetch = pair.fetch()
    until(held.all_told, what="prefill to have packed everything")
    monkeypatch.setattr(Fetch, "count_plans", count_plans)
    held.go.set()
    with pytest.raises(errors.Cancelled):
        fetch.wait()
    until(lambda: pair.lent_bytes == 0, what="the staging to come back")
    assert not pair.connectors[1]._node.directory.peers or not any(
        peer.conversations for peer in pair.connectors[1]._node.directory.peers.values()
    )


def conversations(pair: Pair) -> int:
    """Of both sides."""
    nodes = [connector._node for connector in pair.connectors]
    return sum(len(peer.conversations) for node in nodes for peer in node.directory.peers.values())


def test_a_request_to_stop_never_overtakes_the_question(any_pair, monkeypatch):
    """Else the publisher, which knows of nothing to stop, would begin to pack into staging that is somebody else's."""
    inside, go, ask = threading.Event(), threading.Event(), PullLeg._ask

    def slowly(leg: PullLeg, loan: object) -> None:
        inside.set()
        assert go.wait(10)
        ask(leg, loan)

    pair = any_pair
    monkeypatch.setattr(PullLeg, "_ask", slowly)
    fetches: list[Fetch] = []
    caller = threading.Thread(target=lambda: fetches.append(pair.fetch()))
    caller.start()
    assert inside.wait(10)
    node = pair.connectors[1]._node
    for transfer in list(node.active):
        transfer.cancel()
    time.sleep(0.1)  # the progress thread could have said so by now
    go.set()
    caller.join()
    with pytest.raises(errors.Cancelled):
        fetches[0].wait()
    until(lambda: pair.lent_bytes == 0 and not conversations(pair), what="both sides to have forgotten it")
    monkeypatch.setattr(PullLeg, "_ask", ask)
    pair.fetch().wait()
    pair.check()


def test_cancels_and_questions_from_many_threads_leave_nothing(any_pair):
    """Whatever comes first."""
    pair = any_pair
    before, ends, unexpected = sys.getswitchinterval(), time.monotonic() + 4, []
    sys.setswitchinterval(1e-5)

    def fetch_and_cancel(seed: int) -> None:
        dice = random.Random(seed)
        while time.monotonic() < ends:
            fetch = pair.fetch()
            if dice.random() < 0.7:
                time.sleep(dice.random() * 1e-3)
                fetch.cancel()
            try:
                fetch.wait(20)
            except errors.Cancelled:
                pass
            except Exception as error:
                unexpected.append(error)

    threads = [threading.Thread(target=fetch_and_cancel, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert not unexpected
    until(lambda: pair.lent_bytes == 0 and not conversations(pair), what="both sides to have forgotten all")
    pair.fetch().wait()
    pair.check()


def test_an_interrupt_while_whoever_waits_makes_the_plan_gives_the_staging_back(pair, monkeypatch):
    caller, tried = threading.current_thread(), []

    def interrupted(fetch: Fetch, leg: object) -> None:
        tried.append(threading.current_thread())
        raise KeyboardInterrupt

    pool = pair.connectors[1]._node.pool
    with monkeypatch.context() as patch:
        patch.setattr(Fetch, "plan_late", interrupted)
        patch.setattr(pool._ready, "notify", lambda: None)  # only whoever waits comes to it
        fetch = pair.fetch()
        with pytest.raises(KeyboardInterrupt):
            fetch.wait()
    assert tried == [caller] and fetch.done()
    until(lambda: pair.lent_bytes == 0 and not conversations(pair), what="both sides to have forgotten it")
    pair.fetch().wait()
    pair.check()


def test_a_publisher_that_fails_while_it_packs_says_so_when_it_writes_no_more(pair, monkeypatch):
    """Not before: what the other side lends would be somebody else's by then."""
    inside, go, pack = threading.Event(), threading.Event(), PackedSource._pack

    def slowly(source: PackedSource, *what: object) -> None:
        inside.set()
        assert go.wait(10)
        pack(source, *what)

    def fail(source: PackedSource, stage: int) -> None:
        queue_stage(source, stage)
        assert inside.wait(10)
        raise RuntimeError("cannot start a thread")

    queue_stage = PackedSource.queue_stage
    monkeypatch.setattr(PackedSource, "_pack", slowly)
    monkeypatch.setattr(PackedSource, "queue_stage", fail)
    fetch = pair.fetch()
    assert inside.wait(10)
    time.sleep(0.2)
    assert pair.lent_bytes > 0 and not fetch.done()
    go.set()
    with pytest.raises(errors.KvxferError, match="cannot start a thread"):
        fetch.wait()
    until(lambda: pair.lent_bytes == 0 and not conversations(pair), what="both sides to have forgotten it")


def test_a_long_line_for_staging_ends_when_the_publisher_goes(pair, monkeypatch):
    """Each that is granted staging gives it back at once, to the next."""
    monkeypatch.setattr(Serve, "start", lambda serve: None)
    fetches = [pair.fetch() for _ in range(1200)]
    until(lambda: pair.connectors[1]._node.ring("staging").waiting > 1000, what="a line")
    pair.connectors[0].close()
    for fetch in fetches:
        with pytest.raises(errors.KvxferError):
            fetch.wait()
    until(lambda: pair.lent_bytes == 0, what="the staging to come back")


UNIT = 4096


def stage(layers: list[str], block_tokens: int) -> CacheLayout:
    """Layers named a... have an entry a token, those named c... one for 128 tokens."""
    regions, records, slices = [], {}, []
    for layer in layers:
        ratio = 128 if layer.startswith("c") else 1
        tag, entries = f"{layer[0]}.{block_tokens}", block_tokens // ratio
        plane = Plane(
            name="kv", dtype="uint8", offset=0, entries=entries, entry_stride=UNIT, unit_bytes=UNIT,
            tokens_per_entry=ratio,
        )  # fmt: skip
        records[tag] = Record(tag=tag, nbytes=entries * UNIT, planes=(plane,))
        regions.append(Region(name=layer, nbytes=4 * entries * UNIT))
        slices.append(Slice(layer=layer, region=layer, offset=0, block_stride=entries * UNIT, record=tag))
    group = Group(name="full", block_tokens=block_tokens, num_blocks=4, slices=tuple(slices))
    return CacheLayout(regions=tuple(regions), records=tuple(records.values()), groups=(group,))


def test_a_rank_without_a_byte_for_the_request_ends_nothing(monkeypatch):
    """127 tokens have no entry in a layer with one for 128: that rank's plan is empty, and the other's has to be waited
    for."""
    tokens, layers = 127, [f"a{number}" for number in range(8)]
    layouts = stage(layers, 128), stage(["c"], 128), stage([*layers, "c"], 256)
    engine = {"engine": "prefill", "generation": 7, "ranks": 2}
    options = {"secret": b"s" * 32, "backends": ["shm"], "ways": ("packed",)}
    connectors = [kvxfer.Connector(f"prefill-{rank}", rank=rank, **engine, **options) for rank in (0, 1)]
    connectors.append(kvxfer.Connector("decode", **options))
    arrays = [
        {region.name: np.full(region.nbytes, value, np.uint8) for region in layout.regions}
        for value, layout in zip((1, 2, 0), layouts, strict=True)
    ]
    first, second, into = (
        connector.register(memory, layout, name="kv")
        for connector, memory, layout in zip(connectors, arrays, layouts, strict=True)
    )
    for connector in connectors[:2]:
        connector.set_members({rank: of.endpoint for rank, of in enumerate(connectors[:2])})
    go, make = threading.Event(), Fetch.plan_late

    def plan_late(fetch: Fetch, leg: object) -> None:
        if leg.source.cache.layout.layers != ("c",):
            assert go.wait(10)
        make(fetch, leg)

    monkeypatch.setattr(Fetch, "plan_late", plan_late)
    lease = first.publish({"full": [1]}, tokens=tokens)
    second.publish({"full": [1]}, tokens=tokens, ticket=lease.ticket)
    fetch = into.fetch(lease.ticket, into={"full": [2]}, timeout_s=10)
    time.sleep(0.3)
    assert not fetch.done() and fetch.progress == 0.0 and not any(array.any() for array in arrays[2].values())
    go.set()
    assert fetch.wait().bytes == len(layers) * tokens * UNIT
    for layer in layers:
        block = arrays[2][layer].reshape(4, -1)[2]
        assert (block[: tokens * UNIT] == 1).all() and not block[tokens * UNIT :].any()
    assert not arrays[2]["c"].any()
    for connector in reversed(connectors):
        connector.close()


def test_a_packed_send_of_nothing_is_done(pair):
    receiver, sender = pair.caches[1], pair.caches[0]
    reservation = receiver.reserve({"full": []}, tokens=0, ttl_s=10)
    stats = sender.send(reservation.ticket, {"full": []}, timeout_s=10).wait()
    assert stats.way == "packed" and stats.bytes == 0
    reservation.wait()
    until(lambda: pair.lent_bytes == 0, what="the staging to come back")
