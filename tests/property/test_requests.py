"""The native short way against what defines it: lists as `check_blocks` takes them, records as msgpack has them, pairs
of blocks as `Join.plan` makes them."""

from __future__ import annotations

import functools

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.errors import KvxferError
from kvxfer.kernels import HostPairing, PreparedPlan, bases
from kvxfer.layout import CacheLayout, Group, GroupKind
from kvxfer.models import layout_for
from kvxfer.plan import check_blocks, join
from kvxfer.plan.request import BlockTable, pairing_of
from kvxfer.ticket import Record
from tests.property.test_plans_shm import MODELS, options

FORMS = ("list", "list", "int32", "int64", "tuple", "uint8", "float", "strided", "nested", "none")
RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))


def some_layout(draw) -> CacheLayout:
    model = draw(st.sampled_from(sorted(MODELS)))
    return layout_for(MODELS[model], num_blocks=draw(st.integers(40, 64)), **options(draw, model))


def some_ids(draw, group: Group, tokens: int) -> list[int]:
    """Mostly right lists, a few that are too long, too short, out of range or not unique."""
    count = max(0, min(group.blocks_for(tokens), group.num_blocks) + draw(st.sampled_from([0, 0, 0, 0, -1, 1])))
    ids = draw(st.permutations(range(group.num_blocks)))[:count]
    if ids and draw(st.integers(0, 9)) == 0:
        ids[draw(st.integers(0, len(ids) - 1))] = draw(st.sampled_from([-1, group.num_blocks, 2**31, -(2**63), ids[0]]))
    return ids


def given_as(draw, ids: list[int]) -> object:
    """The forms in which engines have lists, and some that are none."""
    form = draw(st.sampled_from(FORMS))
    fits = all(-(2**31) <= i < 2**31 for i in ids)
    if form == "int32" and fits:
        return np.array(ids, np.int32)
    if form == "int64":
        return np.array(ids, np.int64)
    if form == "tuple":
        return tuple(ids)
    if form == "uint8" and all(0 <= i < 256 for i in ids):
        return np.array(ids, np.uint8)
    if form == "float":
        return [float(i) for i in ids]
    if form == "strided":
        return np.repeat(np.array(ids, np.int64), 2)[::2]
    if form == "nested" and draw(st.booleans()):
        return [ids]
    return None if form == "none" and draw(st.booleans()) else ids


@RELAXED
@given(st.data())
def test_lists_are_taken_or_refused_as_check_blocks_does(data):
    layout = some_layout(data.draw)
    tokens = data.draw(st.sampled_from([0, 1, 127, 128, 129, 512])) if data.draw(st.booleans()) else 40
    lists = {group.name: given_as(data.draw, some_ids(data.draw, group, tokens)) for group in layout.groups}
    if data.draw(st.integers(0, 9)) == 0:
        lists["another"] = []
    table = BlockTable(layout)
    for role in ("source", "destination"):
        results = []
        for check in (functools.partial(check_blocks, layout), table.check):
            try:
                results.append(check(lists, tokens=tokens, role=role))
            except KvxferError as error:
                results.append((type(error), str(error)))
        expected, found = results
        if isinstance(expected, tuple):
            assert found == expected
        else:
            arrays = table.arrays(found)
            assert arrays.keys() == expected.keys() and table.counts(found) == {n: len(a) for n, a in expected.items()}
            assert all(np.array_equal(arrays[name], expected[name]) for name in expected)
            assert all(a.dtype == np.int32 and not (a.size and a.flags.writeable) for a in arrays.values())


def fragmented(draw, layout: CacheLayout, tokens: int, *, suffix: bool) -> dict[str, np.ndarray]:
    """Right lists: no block twice, not even under two groups; with `suffix` some of the front may be missing."""
    order, lists = draw(st.permutations(range(min(group.num_blocks for group in layout.groups)))), {}
    for group in layout.groups:
        count = min(group.blocks_for(tokens), group.tail_blocks)
        if suffix:
            count -= draw(st.integers(0, count))
        lists[group.name], order = np.array(order[:count], np.int32), order[count:]
    return lists


@RELAXED
@given(st.data())
def test_pairs_of_blocks_are_those_of_the_plan(data):
    layout = some_layout(data.draw)
    tokens = data.draw(st.integers(0, 90))
    src, dst = (fragmented(data.draw, layout, tokens, suffix=suffix) for suffix in (False, True))
    [joined] = join([layout], layout)
    plan = joined.plan(src, dst, tokens=tokens)
    table, pairing = BlockTable(layout), pairing_of(joined)
    assert pairing is not None
    record = Record.of(tokens, check_blocks(layout, src, tokens=tokens, role="source")).encode()
    request = pairing.request(record, table.check(dst, tokens=tokens, role="destination"), tokens=tokens)
    assert (request.nbytes, request.copies) == (plan.nbytes, plan.copies)
    rng = np.random.default_rng(1)
    memory = [rng.integers(0, 256, region.nbytes, np.uint8) for region in layout.regions]
    results = []
    for _ in range(2):
        results.append([np.zeros_like(array) for array in memory])
    at = [bases([array.ctypes.data for array in side]) for side in (memory, *results)]
    prepared = PreparedPlan(plan)
    for chunk in plan.chunks(1 << 40):
        prepared.copy(chunk, at[0], at[1])
    host, limit, moved = HostPairing(pairing, at[0], at[2]), data.draw(st.sampled_from([1, 5000, 1 << 40])), 0
    while step := host.copy(request, limit):
        moved += step
    assert moved == plan.nbytes
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


@RELAXED
@given(st.data())
def test_records_are_read_as_msgpack_has_them(data):
    """Whatever bytes: what is taken is what msgspec decodes, and nothing outside of them is read."""
    options = {"layers": ["l"], "num_blocks": 9, "block_tokens": 4, "kv_heads": 1, "head_dim": 8, "dtype": "float16"}
    layout = CacheLayout.paged(**options)
    group = msgspec.structs.replace(layout.groups[0], name="a")
    layout = msgspec.structs.replace(layout, groups=(group,))
    tokens = data.draw(st.integers(0, 12))
    [joined] = join([layout], layout)
    needed = group.blocks_for(tokens)
    ids = np.arange(needed, dtype=np.int32)
    record = bytearray(Record.of(tokens, {"a": ids}).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        if record:
            record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    kept = len(record) - data.draw(st.sampled_from([0, 0, 1, 4]))
    record = bytes(record[:kept]) + data.draw(st.sampled_from([b"", b"", b"\0"]))
    dst = BlockTable(layout).check({"a": ids[::-1].copy()}, tokens=tokens, role="destination")
    request = pairing_of(joined).request(record, dst, tokens=tokens)
    if request is not None:
        decoded = Record.decode(record)
        assert decoded is not None
        lists = check_blocks(layout, decoded.lists(), tokens=tokens, role="source")
        assert request.copies == len(lists["a"])
        memory = [np.random.default_rng(2).integers(0, 256, layout.regions[0].nbytes, np.uint8) for _ in range(2)]
        HostPairing(pairing_of(joined), *(bases([m.ctypes.data]) for m in memory)).copy(request, 1 << 40)
        rows = [m.reshape(9, -1) for m in memory]
        assert np.array_equal(rows[1][ids[::-1]], rows[0][lists["a"]])
    else:
        decoded = Record.decode(record)
        if decoded is not None:  # well formed, but not what the layout asks for
            try:
                check_blocks(layout, decoded.lists(), tokens=tokens, role="source")
            except (KvxferError, ValueError):
                return
            assert not 0x80 <= record[1] < 0xCC or record[1:2] in b"\xd0\xd1\xd2\xd3", "refused, though it is right"


def test_a_window_that_the_source_does_not_reach_is_left_to_the_plan():
    options = {"layers": ["l"], "num_blocks": 20, "kv_heads": 1, "head_dim": 8, "dtype": "float16", "block_tokens": 4}
    full = CacheLayout.paged(**options)
    [joined] = join([full], full)
    sliding = msgspec.structs.replace(
        full, groups=(msgspec.structs.replace(full.groups[0], kind=GroupKind.SLIDING, window=8),)
    )
    [narrow] = join([sliding], sliding)
    record = Record.of(40, {"full": np.arange(2, dtype=np.int32)}).encode()
    dst = BlockTable(sliding).check({"full": [5, 6, 7]}, tokens=40, role="destination")
    request = pairing_of(narrow).request(record, dst, tokens=40)
    assert request is not None and request.copies == 2
    record = Record.of(40, {"full": np.arange(1, dtype=np.int32)}).encode()
    assert pairing_of(narrow).request(record, dst, tokens=40) is None
    nothing = BlockTable(full).check({"full": []}, tokens=40, role="destination")
    assert pairing_of(joined).request(b"", nothing, tokens=40) is None
