"""Plans that prefill makes before they are asked for: used when they fit, and never otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout
from kvxfer.formats import PackedJoin
from kvxfer.transfers.foresight import _MOST
from tests.processes import until

BLOCKS, BLOCK_TOKENS = 64, 16


def layout_of(block_tokens: int = BLOCK_TOKENS, blocks: int = BLOCKS) -> CacheLayout:
    return CacheLayout.paged(
        layers=("a", "b"), num_blocks=blocks, block_tokens=block_tokens, kv_heads=2, head_dim=64, dtype="bfloat16"
    )


class Side:
    def __init__(self, name: str, layout: CacheLayout, seed: int | None = None) -> None:
        self.connector = kvxfer.Connector(name, backends=["shm"], secret=b"s" * 32, ways=("packed",))
        self.arrays = {region.name: np.zeros(region.nbytes, np.uint8) for region in layout.regions}
        if seed is not None:
            for array in self.arrays.values():
                array[:] = np.random.default_rng(seed).integers(0, 128, array.size, np.uint8)
        self.cache = self.connector.register(self.arrays, layout, name="kv")

    def tokens(self, ids: list[int], block_tokens: int) -> np.ndarray:
        """The bytes of all layers, a row a token, of the tokens in some blocks: of keys first, then of values."""
        shape = BLOCKS * BLOCK_TOKENS // block_tokens, 2, block_tokens, -1
        planes = [array.reshape(shape)[ids].swapaxes(1, 2) for array in self.arrays.values()]
        return np.concatenate([plane.reshape(len(ids) * block_tokens, -1) for plane in planes], axis=1)


@pytest.fixture
def sides() -> Iterator[dict[str, Side]]:
    made: dict[str, Side] = {"prefill": Side("prefill", layout_of(), seed=1)}
    yield made
    for side in made.values():
        side.connector.close()


class Planned:
    """Which plans are made, and on which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sides: dict[str, Side]) -> None:
        self.by: list[str] = []
        make, cache = PackedJoin.plan, sides["prefill"].cache

        def plan(join: PackedJoin, src: object, dst: object, **options: object) -> object:
            if join.src == cache.layout and any(isinstance(count, int) for count in dst.values()):
                self.by.append(threading.current_thread().name.split("-")[1])
            return make(join, src, dst, **options)

        monkeypatch.setattr(PackedJoin, "plan", plan)


def fetch_twice(sides: dict[str, Side], name: str, *what: object, **options: object) -> None:
    """From then on the next is foreseen."""
    for _ in range(2):
        fetch(sides, name, *what, **options)


def fetch(sides: dict[str, Side], name: str, ids: list[int], into: list[int], tokens: int, **options: object) -> None:
    """Fetch, after prefill has had the time to think, and compare."""
    prefill, decode = sides["prefill"], sides[name]
    lease = prefill.cache.publish({"full": ids}, tokens=tokens)
    foresight = prefill.cache.foresight
    if foresight._join is not None:
        until(lambda: lease in foresight._made, what="the plan to be made")
    stats = decode.cache.fetch(lease.ticket, into={"full": into}, **options).wait(20)
    assert stats.way == "packed"
    per_block = decode.cache.layout.groups[0].block_tokens
    got, there = decode.tokens(into, per_block), prefill.tokens(ids, BLOCK_TOKENS)[-len(into) * per_block :]
    if options.get("wire", "raw") == "raw":
        assert np.array_equal(got, there)
    until(lambda: lease.released.is_set())


def test_a_lease_like_the_last_ones_is_planned_when_it_is_published(sides, monkeypatch):
    sides["decode"] = Side("decode", layout_of())
    planned = Planned(monkeypatch, sides)
    fetch_twice(sides, "decode", [5, 9, 2], [1, 2, 3], 48)
    assert planned.by == ["progress", "progress"]
    fetch(sides, "decode", [7, 3, 8], [9, 8, 7], 48)
    fetch(sides, "decode", list(range(40)), list(range(40))[::-1], 640)
    assert planned.by[2:] == ["mover", "mover"]
    assert not sides["prefill"].cache.foresight._made


@pytest.mark.parametrize("wire", ["raw", "nvfp4"])
def test_who_asks_for_less_than_was_foreseen_gets_that(sides, monkeypatch, wire):
    """Decode has the beginning of the prompt in its prefix cache."""
    sides["decode"] = Side("decode", layout_of())
    fetch_twice(sides, "decode", [5, 9, 2, 4], [1, 2, 3, 4], 64, wire=wire)
    planned = Planned(monkeypatch, sides)
    fetch(sides, "decode", [6, 10, 11, 12], [7, 8], 64, wire=wire)
    assert planned.by == ["mover", "progress"]
    fetch_twice(sides, "decode", [6, 10, 11, 12], [7, 8, 20, 21], 64, wire=wire)
    assert planned.by[2:] == ["progress", "progress"]  # nothing is foreseen any more, until two have asked for all
    fetch(sides, "decode", [6, 10, 11, 12], [7, 8, 20, 21], 64, wire=wire)
    assert planned.by[4:] == ["mover"]


def test_who_has_another_wire_format_or_layout_gets_its_own_plan(sides, monkeypatch):
    sides["decode"] = Side("decode", layout_of())
    sides["other"] = Side("other", layout_of(block_tokens=32, blocks=BLOCKS // 2))
    fetch_twice(sides, "decode", [5, 9, 2, 4], [1, 2, 3, 4], 64)
    planned = Planned(monkeypatch, sides)
    fetch(sides, "other", [6, 10, 11, 12], [7, 8], 64)
    assert planned.by == ["mover", "progress"]
    for _ in range(3):  # by turns: nothing is foreseen
        fetch(sides, "decode", [6, 10, 11, 12], [7, 8, 9, 10], 64)
        fetch(sides, "decode", [6, 10, 11, 12], [7, 8, 9, 10], 64, wire="nvfp4")
    assert planned.by[2:] == ["progress"] * 6
    fetch(sides, "decode", [16, 10, 11, 12], [7, 8, 9, 10], 64, wire="nvfp4")
    fetch(sides, "decode", [17, 10, 11, 12], [7, 8, 9, 10], 64, wire="nvfp4")
    assert planned.by[8:] == ["progress", "mover"]


def test_peers_with_the_same_layout_are_one_to_it(sides, monkeypatch):
    for name in ("one", "two"):
        sides[name] = Side(name, layout_of())
        fetch(sides, name, [5, 9], [1, 2], 32)
    planned = Planned(monkeypatch, sides)
    fetch(sides, "two", [6, 10], [3, 4], 32)
    fetch(sides, "one", [7, 11], [5, 6], 32)
    assert planned.by == ["mover", "mover"]
    assert len(sides["prefill"].cache.asked_joins) == 1


def test_where_nobody_asks_any_more_nothing_is_planned(sides, monkeypatch):
    sides["decode"] = Side("decode", layout_of())
    fetch_twice(sides, "decode", [5, 9, 2], [1, 2, 3], 48)
    planned, foresight = Planned(monkeypatch, sides), sides["prefill"].cache.foresight
    leases = []
    for number in range(2 * _MOST):
        leases.append(sides["prefill"].cache.publish({"full": [number, 20, 30]}, tokens=48))
        if foresight._join is not None:
            until(lambda: leases[-1] in foresight._made, what="the plan to be made")
    assert foresight._join is None and len(foresight._made) == _MOST
    assert len(planned.by) == 2 * _MOST
    leases.append(sides["prefill"].cache.publish({"full": [40, 20, 30]}, tokens=48))
    stats = sides["decode"].cache.fetch(leases[-1].ticket, into={"full": [1, 2, 3]}).wait(20)
    assert stats.way == "packed" and planned.by == ["mover"] * (2 * _MOST) + ["progress"]
    for lease in leases:
        lease.release()


def test_a_lease_that_has_ended_is_not_planned_and_its_plan_is_let_go(sides):
    sides["decode"] = Side("decode", layout_of())
    fetch_twice(sides, "decode", [5, 9, 2], [1, 2, 3], 48)
    prefill = sides["prefill"]
    lease, foresight = prefill.cache.publish({"full": [1, 2, 3]}, tokens=48), prefill.cache.foresight
    until(lambda: foresight._made)
    lease.release()
    foresight._make(prefill.cache, lease, foresight._join)
    assert not foresight._made and foresight._unused == 1


def test_leases_with_one_number_in_two_slots_are_told_apart(sides):
    """Whoever issues tickets numbers leases, and an engine may have had several issuers."""
    sides["decode"] = Side("decode", layout_of())
    fetch_twice(sides, "decode", [5, 9, 2], [1, 2, 3], 48)
    prefill = sides["prefill"]
    foresight = prefill.cache.foresight
    first = prefill.cache.publish({"full": [10, 11, 12]}, tokens=48)
    until(lambda: first in foresight._made)
    second = prefill.cache.publish({"full": [20, 21, 22]}, tokens=48)
    until(lambda: second in foresight._made)
    join, counts, plan = foresight._made[second]
    assert foresight._made[first][2] is not plan
    del foresight._made[second]
    assert foresight.asked(second, join, counts) is None and first in foresight._made
    for lease in (first, second):
        lease.release()
