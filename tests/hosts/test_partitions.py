"""Hosts that are cut off, told or not: every transfer ends, nothing leaks, and afterwards it goes on."""

from __future__ import annotations

import time

import pytest
from processes import SIZES, SLACK_S, until

from .conftest import QUICK, at_rest, works_again

WAYS = ("direct", "packed")
MANY = list(range(SIZES["large"]["num_blocks"]))
ENDS = ("PeerGone", "DeadlineExceeded")
TIMEOUT_S = 6.0
RATE = "200mbit"  # at which the large cache takes five seconds

pytestmark = pytest.mark.timeout(90)


def usually(way: str) -> list:
    """Both ways, one of them only where slow tests are run."""
    return [way if way == each else pytest.param(each, marks=pytest.mark.slow) for each in WAYS]


@pytest.fixture
def pair(network, start):
    """Two hosts, prefill and decode on them, which know each other, and a slow link."""

    def pair(way: str, **options: object):
        one, two = network(2)
        large = {"size": "large", "ways": (way,), **options}
        prefill, decode = start(one, "prefill", fill=1, **large), start(two, "decode", **large)
        assert decode.fetch_now(prefill.publish([0])) == way
        one.limit(RATE)
        two.limit(RATE)
        return one, two, prefill, decode

    return pair


def under_way(decode, ticket: bytes, blocks: list[int], **options: object) -> int:
    """A fetch of which some bytes have moved."""
    key = decode.fetch(ticket, blocks, **options)
    until(lambda: decode.state(key) == "moving", 5, "the fetch being under way")
    time.sleep(0.3)
    return key


@pytest.mark.parametrize("way", usually("direct"))
def test_a_short_interruption_costs_time_only(pair, way):
    one, _, prefill, decode = pair(way)
    blocks = MANY[:300]
    key = under_way(decode, prefill.publish(blocks), blocks, timeout_s=20)
    one.cut()
    time.sleep(0.5)
    one.mend()
    assert decode.outcome(key) == way
    assert decode.digest(blocks) == prefill.digest(blocks)
    at_rest(prefill, decode)


@pytest.mark.parametrize(
    ("side", "way"),
    [
        ("prefill", "direct"),
        ("decode", "packed"),
        pytest.param("prefill", "packed", marks=pytest.mark.slow),
        pytest.param("decode", "direct", marks=pytest.mark.slow),
    ],
)
def test_an_interface_that_goes_down_and_up_ends_the_transfer_one_way_or_the_other(pair, way, side):
    one, two, prefill, decode = pair(way)
    host = one if side == "prefill" else two
    key = under_way(decode, prefill.publish(MANY), MANY, timeout_s=TIMEOUT_S)
    host.link(up=False)
    time.sleep(0.7)
    host.link(up=True)
    outcome = decode.outcome(key)
    assert outcome in (way, *ENDS)
    if outcome == way:
        assert decode.digest() == prefill.digest()
    works_again(prefill, decode, way)
    at_rest(prefill, decode)


@pytest.mark.parametrize("way", WAYS)
def test_a_fetch_whose_prefill_is_cut_off_fails_and_everything_comes_back(pair, way):
    one, _, prefill, decode = pair(way)
    ticket = prefill.publish(MANY, ttl_s=8)
    key = under_way(decode, ticket, MANY, timeout_s=TIMEOUT_S)
    one.cut()
    started = time.monotonic()
    assert decode.outcome(key) in ENDS
    assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    # Still cut off: the connection is given up, so that nothing can come late, and what was lent comes back.
    until(lambda: not decode.metrics()["staging_lent_bytes"], 10, "the staging coming back")
    until(lambda: decode.state(key) == "failed", 10, "the blocks coming back")
    assert decode.metrics()["quarantined"] == 0
    before = decode.digest()
    one.mend()
    time.sleep(0.5)
    assert decode.digest() == before  # nothing came late
    works_again(prefill, decode, way)
    at_rest(prefill, decode)


@pytest.mark.parametrize("way", usually("direct"))
def test_a_partition_while_the_lease_is_confirmed_yields_an_error_or_the_truth(pair, way):
    one, _, prefill, decode = pair(way)
    decode.hold_confirmations()
    key = decode.fetch(prefill.publish([1, 2], ttl_s=3), [3, 4], timeout_s=TIMEOUT_S)
    assert decode.confirmation_held()
    one.cut()
    decode.let_confirm()
    started = time.monotonic()
    assert decode.outcome(key) in ENDS
    assert time.monotonic() - started < TIMEOUT_S + SLACK_S
    one.mend()
    works_again(prefill, decode, way)
    at_rest(prefill, decode)


@pytest.mark.parametrize("way", usually("packed"))
def test_a_confirmation_that_comes_late_counts_only_while_the_lease_lives(pair, way):
    one, _, prefill, decode = pair(way)
    decode.hold_confirmations()
    kept, ended = prefill.publish([1, 2]), prefill.publish([5, 6])
    keys = [decode.fetch(kept, [3, 4], timeout_s=10), decode.fetch(ended, [7, 8], timeout_s=10)]
    until(lambda: [decode.state(key) for key in keys] == ["moving"] * 2)
    assert decode.confirmation_held()
    one.cut()
    prefill.release(ended)
    decode.let_confirm()
    time.sleep(0.6)
    one.mend()
    assert [decode.outcome(key) for key in keys] in ([way, "LeaseExpired"], ["PeerGone", "PeerGone"])
    works_again(prefill, decode, way)
    at_rest(prefill, decode)


@pytest.mark.parametrize("way", usually("packed"))
def test_a_reservation_whose_sender_is_cut_off_comes_back(pair, way):
    one, _, prefill, decode = pair(way)
    ticket, key = decode.reserve(MANY, ttl_s=TIMEOUT_S)
    send = prefill.send(ticket, MANY, timeout_s=TIMEOUT_S)
    until(lambda: decode.state(key) == "moving", 5)
    time.sleep(0.3)
    one.cut()
    assert decode.outcome(key) in ENDS
    until(lambda: decode.state(key) == "failed", 10, "the blocks coming back")
    before = decode.digest()
    one.mend()
    assert prefill.outcome(send) in (*ENDS, "Cancelled")
    time.sleep(1)
    assert decode.digest() == before  # nothing came late
    works_again(prefill, decode, way)
    at_rest(prefill, decode)


@pytest.mark.parametrize("way", usually("direct"))
def test_one_host_that_is_cut_off_slows_nobody_else(network, start, way):
    one, two, three = network(3)
    limits = {**QUICK, "staging_bytes": 4 << 20}
    dead, alive = start(one, "dead", fill=1, ways=(way,)), start(two, "alive", fill=2, ways=(way,))
    decode = start(three, "decode", ways=(way,), limits=limits)
    for prefill in (dead, alive):
        assert decode.fetch_now(prefill.publish([0])) == way
    lost = [dead.publish([block]) for block in range(8)]
    good = [alive.publish([block]) for block in range(20)]
    one.cut()
    keys = [decode.fetch(ticket, [40 + i], timeout_s=TIMEOUT_S) for i, ticket in enumerate(lost)]
    outcomes, slowest = decode.fetch_in_background(good)
    assert outcomes == [way] * len(good)
    assert slowest < 1.0  # whoever had to wait for the dead host would wait for longer
    assert decode.blocks(list(range(20))) == alive.blocks(list(range(20)))
    assert {decode.outcome(key) for key in keys} <= {*ENDS}
    one.mend()
    at_rest(dead, alive, decode)


def test_a_prefill_host_that_never_comes_back_costs_nothing_for_good(network, start):
    one, two = network(2)
    large = {"size": "large", "ways": ("packed",)}
    prefill, decode = start(one, "prefill", fill=1, **large), start(two, "decode", **large)
    assert decode.fetch_now(prefill.publish([0])) == "packed"
    one.limit(RATE)
    key = under_way(decode, prefill.publish(MANY), MANY, timeout_s=TIMEOUT_S)
    one.cut()
    prefill.kill()
    assert decode.outcome(key) in ENDS
    at_rest(decode)


@pytest.mark.slow
def test_what_the_backend_sets_bounds_an_operation_on_a_dead_path(network, start):
    """Without any of UCX's variables in the environment."""
    one, two = network(2)
    options = {"size": "large", "ways": ("direct",), "ucx": {}}
    prefill, decode = start(one, "prefill", fill=1, **options), start(two, "decode", **options)
    assert decode.fetch_now(prefill.publish([0])) == "direct"
    one.limit(RATE)
    key = under_way(decode, prefill.publish(MANY), MANY, timeout_s=2)
    one.cut()
    started = time.monotonic()
    until(lambda: decode.state(key) == "failed", 20, "the operation's end")
    assert 5 < time.monotonic() - started < 18
    one.mend()
    at_rest(prefill, decode)


def test_a_connection_that_only_the_other_side_has_given_up_is_noticed(network, start):
    """The reader sends nothing and is sent nothing any more, and its session goes on."""
    one, two = network(2)
    options = {"size": "large", "ways": ("direct",), "limits": {**QUICK, "peer_timeout_s": 30.0}}
    patient = {"UCX_TCP_USER_TIMEOUT": "60s", "UCX_KEEPALIVE_INTERVAL": "100s"}
    prefill = start(one, "prefill", fill=1, **options)
    decode = start(two, "decode", ucx=patient, **options)
    assert decode.fetch_now(prefill.publish([0])) == "direct"
    one.limit(RATE)
    key = under_way(decode, prefill.publish(MANY), MANY, timeout_s=4)
    one.cut()
    time.sleep(4)
    one.mend()
    until(lambda: decode.state(key) == "failed", 20, "the operation's end")
    works_again(prefill, decode, "direct")
    at_rest(prefill, decode)
