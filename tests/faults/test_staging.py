"""The staging ring of the packed way: full, quarantined, and given back whatever happens to the writer."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
from processes import SIZES, until

from kvxfer import KvxferError
from kvxfer.errors import ChecksumMismatch, DeadlineExceeded, PeerGone
from kvxfer.formats import ChecksumKind, ChunkHeader

QUICK = {"heartbeat_s": 0.2, "peer_timeout_s": 1.0, "dial_timeout_s": 2.0}
TINY_RING = {"staging_bytes": 1 << 20, "chunk_bytes": 256 << 10}  # room for two small fetches
PACKED = {"ways": ("packed",), "shared": False, "limits": QUICK | TINY_RING}
MANY = list(range(SIZES["large"]["num_blocks"]))

pytestmark = pytest.mark.timeout(60)


def lent(side) -> int:
    return side.connector.metrics.staging_lent_bytes


def test_more_fetches_than_staging_all_finish_and_the_line_is_seen_in_the_metrics(start, here):
    prefill, decode = start("prefill", fill=1, **PACKED), here("decode", **PACKED)
    tickets = [prefill.publish([block, block + 1]) for block in range(0, 60, 2)]
    fetches = [decode.cache.fetch(t, into={"full": [2 * i, 2 * i + 1]}) for i, t in enumerate(tickets)]
    longest_line, most_lent = 0, 0
    while not all(fetch.done() for fetch in fetches):
        longest_line = max(longest_line, decode.connector.metrics.staging_waiting)
        most_lent = max(most_lent, lent(decode))
    for fetch in fetches:
        fetch.result()
    assert decode.blocks(list(range(60))) == prefill.blocks(list(range(60)))
    assert longest_line > 0
    assert 0 < most_lent <= decode.connector.metrics.staging_bytes <= TINY_RING["staging_bytes"]
    until(lambda: lent(decode) == 0)


def test_fetches_in_line_for_staging_end_at_their_deadlines(start, here):
    prefill, decode = start("prefill", fill=1, **PACKED), here("decode", **PACKED)
    assert decode.fetch_now(prefill.publish([0])) == "packed"
    tickets = [prefill.publish([block]) for block in range(8)]
    prefill.stop()
    fetches = [decode.cache.fetch(t, into={"full": [i]}, timeout_s=0.5) for i, t in enumerate(tickets)]
    until(lambda: decode.connector.metrics.staging_waiting > 0)
    for fetch in fetches:
        with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.5 s"):
            fetch.wait()
    until(lambda: decode.connector.metrics.staging_waiting == 0)
    assert lent(decode) > 0  # the stopped process may still write there


def test_fetches_in_line_for_staging_learn_that_the_prefill_died(start, here):
    prefill, decode = start("prefill", fill=1, **PACKED), here("decode", **PACKED)
    assert decode.fetch_now(prefill.publish([0])) == "packed"
    tickets = [prefill.publish([block]) for block in range(8)]
    prefill.stop()
    fetches = [decode.cache.fetch(t, into={"full": [i]}, timeout_s=20) for i, t in enumerate(tickets)]
    until(lambda: decode.connector.metrics.staging_waiting > 0)
    prefill.kill()
    for fetch in fetches:
        with pytest.raises(PeerGone):
            fetch.wait(5)
    until(lambda: lent(decode) == 0, 5, "the dead process's staging being given back")
    assert decode.connector.metrics.quarantined == 0


@pytest.mark.parametrize("stopped_for", ["a moment", "longer than its peers wait"])
def test_staging_of_a_stopped_prefill_is_given_back_once_it_goes_on(start, here, stopped_for):
    prefill, decode = start("prefill", fill=1, **PACKED), here("decode", **PACKED)
    assert decode.fetch_now(prefill.publish([0])) == "packed"
    ticket = prefill.publish([1, 2])
    prefill.stop()
    with pytest.raises(KvxferError):
        decode.cache.fetch(ticket, into={"full": [1, 2]}, timeout_s=0.3).wait()
    assert lent(decode) > 0  # quarantined
    if stopped_for != "a moment":
        until(lambda: decode.connector.metrics.peers == 0, 5, "the session being given up")
        assert lent(decode) > 0 and decode.connector.metrics.quarantined == 1
    prefill.resume()
    until(lambda: lent(decode) == 0, 5, "the staging being given back")


@pytest.mark.parametrize("moment_ms", [0, 2, 5])
def test_nothing_is_written_into_staging_after_a_closing_prefill_said_goodbye(start, here, moment_ms):
    limits = {"chunk_bytes": 32 << 20, "staging_bytes": 128 << 20}  # chunks that take a while
    large = {"ways": ("packed",), "shared": False, "size": "large", "limits": limits}
    prefill, decode = start("prefill", fill=1, **large), here("decode", **large)
    fetch = decode.cache.fetch(prefill.publish(MANY), into={"full": MANY})
    until(lambda: lent(decode))
    time.sleep(moment_ms / 1000)
    prefill.post("close")
    until(lambda: lent(decode) == 0)
    memory = decode.connector._node.ring("staging").memory
    pages = np.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(memory.address), np.uint8)[::4096]
    before = pages.copy()
    prefill.answer()  # it has closed, its threads have ended
    assert np.array_equal(pages, before)
    with pytest.raises(KvxferError):
        fetch.wait()


def test_fetches_from_a_healthy_prefill_go_on_beside_a_stopped_one(start, here):
    stopped, healthy = start("stopped", fill=1, **PACKED), start("healthy", fill=2, **PACKED)
    decode = here("decode", **PACKED)
    for prefill in (stopped, healthy):
        assert decode.fetch_now(prefill.publish([0])) == "packed"
    ticket = stopped.publish([1])
    stopped.stop()
    waiting = decode.cache.fetch(ticket, into={"full": [1]}, timeout_s=1)
    for block in range(2, 30):
        assert decode.fetch_now(healthy.publish([block]), [block]) == "packed"
    assert decode.blocks(list(range(2, 30))) == healthy.blocks(list(range(2, 30)))
    with pytest.raises(KvxferError):
        waiting.wait()


def test_chunks_with_checksums_arrive_and_damaged_ones_fail_the_transfer(start, here, monkeypatch):
    pytest.importorskip("xxhash")
    prefill, decode = start("prefill", fill=1, **PACKED), here("decode", **PACKED, checksums=True)
    decode.cache.fetch(prefill.publish([1, 2]), into={"full": [1, 2]}).wait(10)
    assert decode.blocks([1, 2]) == prefill.blocks([1, 2])
    seen = []
    check = ChunkHeader.check

    def damaged(self, payload, *, expected=None):
        seen.append(self.checksum)
        payload[0] ^= 1
        check(self, payload, expected=expected)

    monkeypatch.setattr(ChunkHeader, "check", damaged)
    with pytest.raises(ChecksumMismatch, match="the header says xxh3"):
        decode.cache.fetch(prefill.publish([3]), into={"full": [3]}).wait(10)
    assert all(made.kind is ChecksumKind.XXH3 for made in seen) and seen
