"""Every wrong argument is a typed error that says what was expected and seen, and writes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from processes import until

import kvxfer
from kvxfer import CacheLayout, Connector, Limits, errors
from kvxfer import ticket as tickets
from kvxfer.layout import Record
from kvxfer.layout.tensors import TensorGroup
from kvxfer.transfers import shelf

pytestmark = pytest.mark.timeout(60)

FETCH_ARGUMENTS = {
    "unknown group": ({"into": {"ring": [3, 4]}}, errors.UnknownGroup, r"groups are \['full'\].*unknown \['ring'\]"),
    "missing group": ({"into": {}}, errors.UnknownGroup, r"missing \['full'\]"),
    "no mapping": ({"into": [3, 4]}, errors.InvalidRequest, "mapping from group name"),
    "block beyond the end": ({"into": {"full": [3, 64]}}, errors.InvalidBlocks, "0 to 63, got 64"),
    "negative block": ({"into": {"full": [-1, 4]}}, errors.InvalidBlocks, "0 to 63, got -1"),
    "block twice": ({"into": {"full": [4, 4]}}, errors.InvalidBlocks, "block 4 stands more than once"),
    "too many blocks": (
        {"into": {"full": [3, 4, 5]}},
        errors.InvalidBlocks,
        "32 tokens lie in 2 blocks, got a list of 3",
    ),
    "block that is no integer": ({"into": {"full": [3.5, 4]}}, errors.InvalidBlocks, "integers, got float64"),
    "nested list": ({"into": {"full": [[3, 4]]}}, errors.InvalidBlocks, "flat list"),
    "huge block": ({"into": {"full": [3, 1 << 70]}}, errors.InvalidBlocks, "integers"),
    "unknown wire format": ({"wire": "zip"}, errors.UnknownWireFormat, "'zip'; known are raw"),
    "no time": ({"timeout_s": 0}, errors.InvalidRequest, "timeout_s must be a number of seconds over 0"),
}


@pytest.mark.parametrize("what", FETCH_ARGUMENTS)
def test_fetch_refuses_at_once_and_writes_nothing(here, what):
    changes, kind, message = FETCH_ARGUMENTS[what]
    prefill, decode = here("prefill", fill=1), here("decode")
    ticket = prefill.publish([1, 2])
    with pytest.raises(kind, match=message) as caught:
        decode.cache.fetch(ticket, **({"into": {"full": [3, 4]}} | changes))
    assert isinstance(caught.value, kvxfer.KvxferError)
    assert not any(decode.blocks(list(range(64))))
    assert decode.connector.metrics.transfers == 0
    assert decode.fetch_now(ticket, [3, 4]) == "mapped"  # the ticket is still good


PUBLISH_ARGUMENTS = {
    "unknown group": ({"blocks": {"ring": [1]}}, errors.UnknownGroup, "groups are"),
    "block beyond the end": ({"blocks": {"full": [1, 64]}}, errors.InvalidBlocks, "0 to 63, got 64"),
    "too few blocks": ({"tokens": 33}, errors.InvalidBlocks, "33 tokens need the last 3 blocks of 3, got a list of 2"),
    "too many blocks": ({"tokens": 16}, errors.InvalidBlocks, "16 tokens lie in 1 blocks, got a list of 2"),
    "groups of mixed types": ({"blocks": {1: [1], "x": [2]}}, errors.UnknownGroup, r"unknown \[1, 'x'\], missing"),
    "negative tokens": ({"tokens": -1}, errors.InvalidRequest, "tokens must be an integer from 0 to .*, got -1"),
    "tokens that are no integer": ({"tokens": 1.5}, errors.InvalidRequest, "tokens must be an integer"),
    "no time to live": ({"ttl_s": 0}, errors.InvalidRequest, "of seconds over 0 and at most 3600"),
    "too much time to live": ({"ttl_s": 1e9}, errors.InvalidRequest, "max_ttl_s"),
    "time beyond every float": ({"ttl_s": 10**400}, errors.InvalidRequest, "of seconds over 0 and at most 3600"),
    "time that is no number": ({"ttl_s": float("nan")}, errors.InvalidRequest, "ttl_s"),
    "long request id": ({"request_id": "r" * 257}, errors.InvalidRequest, "0 to 256 bytes"),
    "request id that is no str": ({"request_id": 7}, errors.InvalidRequest, "must be a str"),
}


@pytest.mark.parametrize("what", PUBLISH_ARGUMENTS)
def test_publish_refuses_and_keeps_no_lease(here, what):
    changes, kind, message = PUBLISH_ARGUMENTS[what]
    prefill = here("prefill")
    arguments = {"blocks": {"full": [1, 2]}, "tokens": 32} | changes
    with pytest.raises(kind, match=message):
        prefill.cache.publish(arguments.pop("blocks"), **arguments)
    assert prefill.connector.metrics.leases == prefill.connector.metrics.lease_slots_in_use == 0


PUBLISH = {
    "publish": lambda side: side.cache.publish({"full": [1, 2]}, tokens=32, pack_ahead="raw"),
    "reserve": lambda side: side.cache.reserve({"full": [1, 2]}, tokens=32),
    "issue": lambda side: side.connector.issue(side.layout, {"full": [1, 2]}, tokens=32),
}
STEPS = {
    "sign": (tickets, ("publish", "reserve", "issue")),
    "Lease": ("kvxfer.cache", ("publish",)),
    "Reservation": ("kvxfer.cache", ("reserve",)),
    "publish": ("node", ("publish", "reserve")),
    "pack_ahead": (shelf, ("publish",)),
}


@pytest.mark.parametrize(("step", "call"), [(step, call) for step, (_, calls) in STEPS.items() for call in calls])
@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt, errors.BackendError])
def test_whatever_fails_on_the_way_to_a_lease_keeps_no_slot(here, monkeypatch, step, call, error):
    side = here("side")

    def fail(*_: object, **__: object) -> None:
        raise error("for the test")

    where = STEPS[step][0]
    with monkeypatch.context() as broken:
        if where == "node":
            broken.setattr(side.connector._node.table, "publish", fail)
        elif isinstance(where, str):
            broken.setattr(f"{where}.{step}", fail)
        else:
            broken.setattr(where, step, fail)
        with pytest.raises(error, match="for the test"):
            PUBLISH[call](side)
    metrics = side.connector.metrics
    assert metrics.lease_slots_in_use == metrics.leases == metrics.reservations == metrics.transfers == 0
    PUBLISH[call](side)


def test_reserve_refuses_blocks_that_stand_twice(here):
    receiver = here("receiver")
    with pytest.raises(errors.InvalidBlocks, match="more than once"):
        receiver.cache.reserve({"full": [4, 4]}, tokens=32)
    assert receiver.connector.metrics.reservations == receiver.connector.metrics.lease_slots_in_use == 0


def test_send_refuses_a_list_that_does_not_cover_the_tokens(here):
    receiver, sender = here("receiver"), here("sender", fill=1)
    ticket, _ = receiver.reserve([1, 2])
    with pytest.raises(errors.InvalidBlocks, match="need the last 2 blocks"):
        sender.cache.send(ticket, {"full": [1]})
    assert not any(receiver.blocks([1, 2]))


def test_unequal_fingerprints_are_told_factor_by_factor(start, here):
    prefill = start("prefill", fill=1, layout={"fingerprint": {"model": "tiny", "revision": "b"}})
    decode = here("decode", layout={"fingerprint": {"model": "tiny", "revision": "a"}})
    with pytest.raises(errors.FingerprintMismatch, match=r"revision: ours 'a', theirs 'b'"):
        decode.cache.fetch(prefill.publish([1]), into={"full": [1]}).wait(5)
    assert not any(decode.blocks([1]))


def test_unequal_layouts_are_told_field_by_field(start, here):
    prefill, decode = start("prefill", fill=1, layout={"head_dim": 32}), here("decode")
    with pytest.raises(errors.LayoutMismatch, match=r"l0.*source"):
        decode.cache.fetch(prefill.publish([1]), into={"full": [1]}).wait(5)
    assert not any(decode.blocks([1]))


def test_a_send_between_unequal_fingerprints_writes_nothing(start, here):
    receiver = start("receiver", layout={"fingerprint": {"model": "other"}})
    sender = here("sender", fill=1)
    with pytest.raises(errors.FingerprintMismatch, match="model"):
        sender.cache.send(receiver.reserve([1])[0], {"full": [1]}).wait(5)
    assert not any(receiver.blocks([1]))


def test_a_cache_that_the_peer_does_not_have_is_named(start, here):
    prefill, decode = start("prefill"), here("decode")
    with Connector("scheduler", secret=b"a secret of the tests", engine="e") as other:
        ticket = other.issue(decode.layout, {"full": [1]}, tokens=16)
        with pytest.raises(errors.InvalidTicket, match="'kv'"):
            decode.cache.fetch(ticket, into={"full": [1]}).wait(5)
    assert prefill.metrics()["leases"] == 0


def test_a_way_that_cannot_be_is_explained(start, here):
    prefill, decode = start("prefill", shared=False), here("decode", ways=("mapped",))
    with pytest.raises(errors.NoCommonBackend, match="shared_empty"):
        decode.cache.fetch(prefill.publish([1]), into={"full": [1]}).wait(5)


def test_everything_on_a_closed_connector_says_closed(here):
    prefill, decode = here("prefill"), here("decode")
    ticket, reservation = prefill.publish([1]), decode.reserve([1])[0]
    layout, cache, connector = decode.layout, decode.cache, decode.connector
    decode.close()
    decode.close()
    for call in (
        lambda: cache.fetch(ticket, into={"full": [1]}),
        lambda: cache.publish({"full": [1]}, tokens=16),
        lambda: cache.reserve({"full": [1]}, tokens=16),
        lambda: cache.send(reservation, {"full": [1]}),
        lambda: connector.register(decode.arrays, layout, name="again"),
        lambda: connector.issue(layout, {"full": [1]}, tokens=16),
        lambda: connector.release(ticket),
        lambda: connector.renew(ticket, 1),
        lambda: connector.set_members({}),
    ):
        with pytest.raises(errors.Closed, match="'decode' is closed"):
            call()
    assert connector.metrics.transfers == 0


@pytest.mark.parametrize(
    ("arrays", "kind", "message"),
    [
        ({"l0": 8, "l1": 8}, errors.BufferTooSmall, r"the layout needs \d+ bytes, got 8"),
        ({"l0": 8}, errors.InvalidLayout, "l1"),
        ({"l0": 8, "l1": 8, "l2": 8}, errors.InvalidLayout, "l2"),
    ],
)
def test_arrays_that_do_not_fit_the_layout_are_refused(here, arrays, kind, message):
    side = here("side")
    given = {name: np.zeros(nbytes, np.uint8) for name, nbytes in arrays.items()}
    with pytest.raises(kind, match=message):
        side.connector.register(given, side.layout, name="other")


@pytest.mark.parametrize(
    ("dtype", "change", "kind", "message"),
    [
        ("float16", {}, None, ""),
        ("uint16", {}, None, ""),
        ("float32", {}, errors.InvalidLayout, r"region 'l0': .* hold float16 \(2 .*, the array float32 \(4 "),
        ("float16", {"num_blocks": 128}, errors.InvalidLayout, r"region 'l0': .* says \d+ bytes, the array of shape"),
        ("float16", {"num_blocks": 32}, errors.BufferTooSmall, r"region 'l0': the layout needs \d+ bytes, got"),
        ("float16", {"swap": True}, errors.InvalidLayout, r"region 'l0': axis \d of the array's shape \(64, 2, "),
    ],
)
def test_arrays_that_do_not_look_like_the_layout_are_refused(here, dtype, change, kind, message):
    side = here("side")
    plane, blocks = side.layout.records[0].planes[0], change.get("num_blocks", 64)
    inner = (plane.entries, plane.heads, plane.unit_bytes // 2)
    shape = (blocks, 2, *((inner[1], inner[0], inner[2]) if "swap" in change else inner))
    given = {name: np.zeros(shape, dtype) for name in side.arrays}
    if kind is None:
        side.connector.register(given, side.layout, name="other")
        return
    with pytest.raises(kind, match=message):
        side.connector.register(given, side.layout, name="other")


def test_storage_may_be_larger_than_the_cache_and_its_rest_is_left_alone(here):
    prefill, decode = here("prefill", fill=1), here("decode")
    nbytes = decode.layout.regions[0].nbytes
    storage = {name: np.full(nbytes // 2 + 1000, 7, np.uint16) for name in decode.arrays}
    cache = decode.connector.register(storage, decode.layout, name="larger")
    ticket = prefill.publish(list(range(64)))
    cache.fetch(ticket, into={"full": list(range(64))}).wait(20)
    for name, array in storage.items():
        assert (array[: nbytes // 2].view(np.uint8) == prefill.arrays[name]).all()
        assert (array[nbytes // 2 :] == 7).all()


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"l0": {"key": 4.0}}, r"scales of layer 'l0' name planes \['key'\]; its records have \['k', 'v'\]"),
        ({"l0": {"k": 4.0, 7: 1.0}}, r"name planes \[7\]"),
        ({"l7": {"k": 4.0}}, "layer 'l7', which the layout does not have"),
        ({"l0": {"k": 0.0}}, "the scale of 'l0' 'k' must be a number over 0"),
        ({"l0": {"k": "4"}}, "the scale of 'l0' 'k' must be a number over 0"),
        ({"l0": [4.0]}, "scales of layer 'l0' must be a Mapping"),
        ([4.0], "scales must be a Mapping"),
        (0, "scales must be a Mapping"),
    ],
)
def test_scales_that_name_nothing_are_refused(here, scales, message):
    side = here("side")
    with pytest.raises(errors.InvalidRequest, match=message):
        side.connector.register(side.arrays, side.layout, name="other", scales=scales)


def test_a_layer_whose_bytes_are_unknown_has_no_scales(here):
    side = here("side")
    record = Record(tag="opaque", nbytes=64)
    layout = CacheLayout.from_tensors(
        {"l": np.zeros((4, 64), np.uint8)}, groups=TensorGroup(axes="B", record=record, block_tokens=16)
    )
    with pytest.raises(errors.InvalidRequest, match=r"planes \['k'\]; its records have \[\]"):
        side.connector.register(None, layout, name="other", scales={"l": {"k": 2.0}})


def test_two_caches_of_one_name_are_refused(here):
    side = here("side")
    with pytest.raises(errors.InvalidRequest, match="'kv' already"):
        side.connector.register(side.arrays, side.layout)


def test_blocks_in_read_only_memory_are_not_written(here):
    prefill, decode = here("prefill"), here("decode")
    frozen = {name: array.copy() for name, array in decode.arrays.items()}
    for array in frozen.values():
        array.flags.writeable = False
    cache = decode.connector.register(frozen, decode.layout, name="frozen")
    with pytest.raises(errors.InvalidRequest, match="read-only"):
        cache.fetch(prefill.publish([1]), into={"full": [1]})


def test_a_ring_smaller_than_one_chunk_says_how_large_it_must_be(start, here):
    large_blocks = {"kv_heads": 32, "head_dim": 256, "num_blocks": 4}
    small = {"limits": {"staging_bytes": 64, "chunk_bytes": 64}, "ways": ("packed",), "layout": large_blocks}
    prefill, decode = start("prefill", **small), here("decode", **small)
    with pytest.raises(errors.BufferTooSmall, match=r"staging_bytes to \d+"):
        decode.cache.fetch(prefill.publish([1]), into={"full": [1]}).wait(5)
    until(lambda: decode.connector.metrics.staging_lent_bytes == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"secret": b"short"}, "16 bytes or more, got 5"),
        ({"listen": "tcp://0.0.0.0:0", "secret": None}, "allow_unauthenticated"),
        ({"listen": "tcp://0.0.0.0:0"}, "advertise="),
        ({"listen": "nonsense"}, "listen"),
        ({"ways": ("teleport",)}, "teleport"),
        ({"ways": ()}, "ways"),
        ({"backends": ["pigeon"]}, "pigeon"),
        ({"backends": 5}, "backends must be 'auto', or names"),
        ({"backends": None}, "backends must be 'auto', or names"),
        ({"advertise": "tcp://h"}, "advertise must be"),
        ({"advertise": "tcp://0.0.0.0:5"}, "advertise must be an address that peers can dial"),
        ({"advertise": "tcp://*:5"}, "advertise must be an address that peers can dial"),
        ({"members": {0: "tcp://127.0.0.1:0"}}, "the endpoint of rank 0 must be"),
        ({"members": {0: "tcp://127.0.0.1:*"}}, "the endpoint of rank 0 must be"),
        ({"members": {"0": "tcp://127.0.0.1:5"}}, "a rank in members must be an integer"),
        ({"members": [0]}, "members must be a Mapping"),
        ({"members": 0}, "members must be a Mapping"),
        ({"engine": 5}, "engine must be a str"),
        ({"engine": ""}, "engine must be a str"),
        ({"generation": 1.5}, "generation must be an integer"),
        ({"rank": 2, "ranks": 2}, "rank must be an integer from 0 to 1, got 2"),
    ],
)
def test_a_connector_that_cannot_be_leaves_nothing_behind(nothing_left, arguments, message):
    with pytest.raises(errors.InvalidRequest, match=message):
        Connector("wrong", **({"secret": b"a secret of the tests"} | arguments))


@pytest.mark.parametrize("port", ["0", "*"])
def test_an_advertised_port_may_be_left_to_the_listener(nothing_left, port):
    with Connector(
        "a", secret=b"a secret of the tests", listen=f"tcp://0.0.0.0:{port}", advertise=f"tcp://127.0.0.1:{port}"
    ) as connector:
        host, _, number = connector.endpoint.rpartition(":")
        assert host == "tcp://127.0.0.1"
        assert 0 < int(number) < 65536


def test_an_endpoint_in_use_is_refused_and_leaves_nothing_behind(here):
    taken = here("first").endpoint()
    with pytest.raises(errors.InvalidRequest, match="cannot listen"):
        Connector("second", listen=taken, secret=b"a secret of the tests")


@pytest.mark.parametrize("name", ["staging_bytes", "mover_threads", "heartbeat_s"])
def test_limits_must_be_positive(name):
    with pytest.raises(errors.InvalidRequest, match=rf"{name} must be an? (integer|number)"):
        Limits(**{name: 0})
