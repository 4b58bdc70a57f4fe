"""A fetch counts only while its lease lives, and a lease always ends."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from processes import SIZES, SLACK_S, until

from kvxfer import LeaseState, TransferState
from kvxfer.errors import Cancelled, DeadlineExceeded, InvalidRequest, InvalidTicket, LeaseExpired, LeaseTableFull

WAYS = ("mapped", "direct", "packed")
QUICK = {"heartbeat_s": 0.2, "peer_timeout_s": 1.0, "dial_timeout_s": 2.0}
MANY = list(range(SIZES["large"]["num_blocks"]))

pytestmark = pytest.mark.timeout(60)


def options(way: str, **more: object) -> dict:
    return {"shared": way == "mapped", "ways": (way,), "limits": QUICK, **more}


@pytest.mark.parametrize("way", WAYS)
def test_the_lease_of_a_killed_decode_process_runs_out(start, here, way):
    prefill, decode = here("prefill", fill=1, **options(way)), start("decode", **options(way))
    first = prefill.publish([0])
    assert decode.fetch_now(first) == way
    assert prefill.released(first, 1)
    ticket = prefill.publish([1, 2], ttl_s=1.5)
    decode.kill()
    assert prefill.lease_state(ticket) == "live"
    assert prefill.released(ticket, 3)
    assert prefill.lease_state(ticket) == "expired"
    until(lambda: prefill.connector.metrics.peers == 0, 5, "the dead peer being noticed")
    assert prefill.connector.metrics.leases == prefill.connector.metrics.lease_slots_in_use == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_decode_process_killed_in_mid_fetch_leaves_the_lease_to_run_out(start, here, way):
    prefill = here("prefill", fill=1, size="large", **options(way))
    decode = start("decode", size="large", **options(way))
    assert decode.fetch_now(prefill.publish([0])) == way
    ticket = prefill.publish(MANY, ttl_s=2)
    fetch = decode.fetch(ticket, MANY)
    until(lambda: decode.state(fetch) != "posted")
    decode.kill()
    assert prefill.released(ticket, 4)
    until(lambda: prefill.connector.metrics.peers == 0, 5)
    assert prefill.connector.metrics.leases == 0


def test_a_stopped_decode_process_does_not_keep_a_lease_beyond_its_time(start, here):
    prefill, decode = here("prefill", fill=1), start("decode")
    assert decode.fetch_now(prefill.publish([0])) == "mapped"
    ticket = prefill.publish([1, 2], ttl_s=0.5)
    decode.stop()
    assert prefill.released(ticket, 1.5)
    decode.resume()
    assert decode.fetch_now(ticket) == "LeaseExpired"


@pytest.mark.parametrize("way", WAYS)
def test_an_expired_lease_cannot_be_fetched(start, here, way):
    prefill, decode = start("prefill", fill=1, **options(way)), here("decode", **options(way))
    ticket = prefill.publish([1, 2], ttl_s=0.05)
    assert prefill.released(ticket, 1)
    with pytest.raises(LeaseExpired, match="ttl_s"):
        decode.cache.fetch(ticket, into={"full": [5, 6]}).wait()
    assert not any(decode.blocks([5, 6]))


@pytest.mark.parametrize("way", WAYS)
def test_a_released_lease_cannot_be_fetched(start, here, way):
    prefill, decode = start("prefill", fill=1, **options(way)), here("decode", **options(way))
    ticket = prefill.publish([1, 2])
    prefill.release(ticket)
    with pytest.raises(LeaseExpired):
        decode.cache.fetch(ticket, into={"full": [5, 6]}).wait()
    assert not any(decode.blocks([5, 6]))


@pytest.mark.parametrize("way", WAYS)
def test_a_lease_that_ends_during_the_copy_fails_the_fetch_whatever_was_copied(start, here, way):
    prefill = start("prefill", fill=1, size="large", **options(way))
    decode = here("decode", size="large", **options(way))
    assert decode.fetch_now(prefill.publish([0])) == way
    caught = 0
    for _ in range(10):
        ticket = prefill.publish(MANY)
        fetch = decode.cache.fetch(ticket, into={"full": MANY})
        until(lambda: fetch.state is not TransferState.POSTED)  # noqa: B023
        prefill.release(ticket)
        try:
            fetch.wait()  # it may have been confirmed just before the release
        except LeaseExpired:
            caught += 1
        if caught >= 2:
            return
    pytest.fail("no fetch was under way when its lease ended")


@pytest.mark.parametrize("way", WAYS)
def test_wrong_bytes_are_never_returned_as_success(start, here, way):
    """The publisher overwrites blocks the moment their lease has ended, with many fetches under way."""
    prefill, decode = start("prefill", **options(way)), here("decode", **options(way))
    assert decode.fetch_now(prefill.publish([0])) == way
    ok, expired, pause_s = 0, 0, 0.0004
    for round_ in range(12):
        if round_ >= 4 and min(ok, expired) > 20:
            break
        before = ok
        prefill.post("churn", seconds=0.7, count=16, seed=round_, pause_s=pause_s)
        while True:
            tickets = prefill.answer()
            if not tickets:
                break
            fetches = [
                (value, into, decode.cache.fetch(ticket, into={"full": [into, into + 1]}, timeout_s=5))
                for into, (value, ticket) in zip(range(0, 64, 2), tickets, strict=False)
            ]
            for value, into, fetch in fetches:
                try:
                    fetch.wait()
                except LeaseExpired:
                    expired += 1
                    continue
                ok += 1
                assert set(decode.blocks([into, into + 1])) == {value}
        if ok - before < 10:  # a machine that is slow, or has other work: leases live longer
            pause_s *= 3
    assert ok > 20 and expired > 20, (ok, expired)


def test_a_fetch_waits_for_a_lease_that_is_published_later(start, here):
    decode = here("decode")
    prefill = start("prefill", fill=1)
    ticket = prefill.issue([1, 2])
    fetch = decode.cache.fetch(ticket, into={"full": [3, 4]}, timeout_s=10)
    until(lambda: "published" in fetch._waiting_for)
    assert not fetch.done()
    prefill.publish([1, 2], ticket=ticket)
    assert fetch.wait().way == "mapped"
    assert decode.blocks([3, 4]) == prefill.blocks([1, 2])


def test_a_fetch_of_a_lease_that_is_never_published_ends_at_its_deadline(start, here):
    prefill, decode = start("prefill"), here("decode")
    fetch = decode.cache.fetch(prefill.issue([1, 2]), into={"full": [3, 4]}, timeout_s=0.5)
    with pytest.raises(DeadlineExceeded, match="the lease to be published"):
        fetch.wait()


def test_a_release_that_comes_before_the_publish_ends_the_lease(start, here):
    """A reader may be done with the engine before its last rank has heard of the request."""
    prefill, decode = here("prefill"), start("decode")
    assert decode.fetch_now(prefill.publish([0])) == "mapped"
    ticket = prefill.connector.issue(prefill.layout, {"full": [1, 2]}, tokens=32, ttl_s=30)
    decode.release_ticket(bytes(ticket))
    after = prefill.publish([5])
    assert decode.fetch_now(after) == "mapped"
    assert prefill.released(after, 2)  # so the release before it has arrived, too
    lease = prefill.cache.publish({"full": [1, 2]}, tokens=32, ticket=ticket)
    assert lease.released.wait(2)


def test_a_ticket_is_published_once_and_a_second_attempt_disturbs_nothing(here):
    prefill = here("prefill")
    ticket = prefill.connector.issue(prefill.layout, {"full": [1, 2]}, tokens=32)
    lease = prefill.cache.publish({"full": [1, 2]}, tokens=32, ticket=ticket)
    with pytest.raises(InvalidTicket, match="before"):
        prefill.cache.publish({"full": [1, 2]}, tokens=32, ticket=ticket)
    assert lease.state is LeaseState.LIVE
    prefill.publish([3])  # takes another slot
    assert prefill.connector.metrics.leases == 2
    lease.release()
    with pytest.raises(InvalidTicket, match="before"):
        prefill.cache.publish({"full": [1, 2]}, tokens=32, ticket=ticket)


def test_a_full_lease_table_says_so_and_frees_up(here):
    prefill = here("prefill", limits={"lease_slots": 4})
    tickets = [prefill.publish([block]) for block in range(4)]
    with pytest.raises(LeaseTableFull, match="lease_slots"):
        prefill.publish([5])
    prefill.release(tickets[1])
    prefill.publish([5])


def test_leases_published_and_ended_from_many_threads_all_end(here):
    prefill = here("prefill", limits={"lease_slots": 8})
    ended = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(300):
            try:
                lease = prefill.cache.publish({"full": [seed]}, tokens=16, ttl_s=float(random.uniform(0.001, 0.01)))
            except LeaseTableFull:
                time.sleep(0.001)
                continue
            if random.random() < 0.7:
                threading.Thread(target=lease.release).start()
                lease.release()
            ended.append(lease)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(lease.released.wait(2) for lease in ended)
    until(lambda: prefill.connector.metrics.leases == prefill.connector.metrics.lease_slots_in_use == 0)


@pytest.mark.parametrize("ttl_s", [0.2, 1000.0])
def test_a_renewed_lease_ends_when_the_renewal_says_but_within_the_limit(here, ttl_s):
    prefill = here("prefill", limits={"max_ttl_s": 1.0})
    lease = prefill.cache.publish({"full": [1]}, tokens=16, ttl_s=0.9)
    started = time.monotonic()
    lease.renew(ttl_s)
    assert lease.released.wait(1.0 + SLACK_S)
    assert lease.state is LeaseState.EXPIRED
    assert (time.monotonic() - started >= 1.0) == (ttl_s > 1.0)


def test_a_shorter_renewal_is_honoured(here):
    prefill = here("prefill")
    lease = prefill.cache.publish({"full": [1]}, tokens=16, ttl_s=600)
    lease.renew(0.1)
    assert lease.released.wait(10)


def test_the_ticket_of_a_live_lease_is_not_retired(here):
    prefill = here("prefill")
    lease = prefill.cache.publish({"full": [1]}, tokens=16)
    with pytest.raises(InvalidRequest, match="release it"):
        prefill.connector.retire(lease.ticket)
    for block in range(2, 12):
        prefill.cache.publish({"full": [block]}, tokens=16).release()
    lease.release()
    prefill.connector.retire(lease.ticket)


def test_closing_the_publisher_ends_its_leases_and_fails_fetches(start, here):
    prefill, decode = start("prefill", fill=1), here("decode")
    assert decode.fetch_now(prefill.publish([0])) == "mapped"
    ticket = prefill.publish([1, 2])
    prefill.close()
    assert prefill.lease_state(ticket) == "released"
    outcome = decode.fetch_now(ticket, [3, 4], timeout_s=1)
    assert outcome in ("LeaseExpired", "PeerGone", "DeadlineExceeded")
    assert not any(decode.blocks([3, 4]))


def test_a_cancelled_fetch_leaves_the_ticket_good_for_another(start, here):
    prefill, decode = start("prefill", fill=1, size="large"), here("decode", size="large")
    ticket = prefill.publish(MANY)
    fetch = decode.cache.fetch(ticket, into={"full": MANY})
    fetch.cancel()
    with pytest.raises(Cancelled):
        fetch.wait()
    assert decode.fetch_now(ticket, MANY) == "mapped"
