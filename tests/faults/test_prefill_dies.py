"""The prefill process dies, or stands still, at each point of a fetch."""

from __future__ import annotations

import time

import pytest
from processes import SIZES, SLACK_S, until

from kvxfer import TransferState
from kvxfer.errors import DeadlineExceeded, PeerGone

WAYS = ("mapped", "direct", "packed")
QUICK = {"heartbeat_s": 0.2, "peer_timeout_s": 1.0, "dial_timeout_s": 2.0}
MANY = list(range(SIZES["large"]["num_blocks"]))

pytestmark = pytest.mark.timeout(60)


def options(way: str, **more: object) -> dict:
    return {"shared": way == "mapped", "ways": (way,), "limits": QUICK, **more}


def meet(prefill, decode) -> None:
    """One small fetch, so that the two know each other."""
    assert decode.fetch_now(prefill.publish([0])) == decode.connector._node.ways[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_fetch_from_a_dead_process_says_that_the_peer_is_gone(start, here, way):
    prefill, decode = start("prefill", fill=1, **options(way)), here("decode", **options(way))
    meet(prefill, decode)
    ticket = prefill.publish([1, 2])
    prefill.kill()
    fetch = decode.cache.fetch(ticket, into={"full": [5, 6]}, timeout_s=5)
    with pytest.raises(PeerGone):
        fetch.wait()
    assert not any(decode.blocks([5, 6]))


@pytest.mark.parametrize("way", WAYS)
def test_a_first_fetch_from_a_dead_process_ends_by_its_deadline(start, here, way):
    prefill, decode = start("prefill", fill=1, **options(way)), here("decode", **options(way))
    ticket = prefill.publish([1, 2])
    prefill.kill()
    started = time.monotonic()
    with pytest.raises((PeerGone, DeadlineExceeded)):
        decode.cache.fetch(ticket, into={"full": [5, 6]}, timeout_s=1).wait()
    assert time.monotonic() - started < 1 + SLACK_S


@pytest.mark.parametrize("way", WAYS)
def test_a_fetch_whose_prefill_dies_meanwhile_is_right_or_fails(start, here, way):
    prefill = start("prefill", fill=1, size="large", **options(way))
    decode = here("decode", size="large", **options(way))
    truth = here("truth", fill=1, size="large", shared=False)
    meet(prefill, decode)
    ticket = prefill.publish(MANY)
    fetch = decode.cache.fetch(ticket, into={"full": MANY[::-1]}, timeout_s=10)
    until(lambda: fetch.state is not TransferState.POSTED)
    prefill.kill()
    try:
        fetch.wait()
    except PeerGone:
        return
    assert decode.blocks(MANY[::-1]) == truth.blocks(MANY)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_fetched_stays_right_when_the_prefill_dies_after(start, here, way):
    prefill, decode = start("prefill", fill=1, **options(way)), here("decode", **options(way))
    expected = prefill.blocks([1, 2])
    fetch = decode.cache.fetch(prefill.publish([1, 2]), into={"full": [5, 6]}, timeout_s=5)
    fetch.wait()
    prefill.kill()
    assert decode.blocks([5, 6]) == expected
    until(lambda: decode.connector.metrics.peers == 0, 5, "the dead peer being noticed")
    assert decode.connector.metrics.staging_lent_bytes == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_fetch_from_a_stopped_prefill_is_right_or_ends_at_its_deadline(start, here, way):
    prefill, decode = start("prefill", fill=1, **options(way)), here("decode", **options(way))
    meet(prefill, decode)
    expected = prefill.blocks([1, 2])
    ticket = prefill.publish([1, 2])
    prefill.stop()
    started = time.monotonic()
    fetch = decode.cache.fetch(ticket, into={"full": [5, 6]}, timeout_s=0.5)
    if way == "packed":
        with pytest.raises((DeadlineExceeded, PeerGone)):
            fetch.wait()
        assert time.monotonic() - started < 0.5 + SLACK_S
    else:
        fetch.wait()
        assert decode.blocks([5, 6]) == expected
