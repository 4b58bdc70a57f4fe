"""Blocks that a sender may be writing into are not handed back before it has stopped or died."""

from __future__ import annotations

import time

import pytest
from processes import SIZES, SLACK_S, until

from kvxfer import TransferState
from kvxfer.errors import Cancelled, DeadlineExceeded, PeerGone

WAYS = ("mapped", "direct", "packed")
QUICK = {"heartbeat_s": 0.2, "peer_timeout_s": 1.0, "dial_timeout_s": 2.0}
MANY = list(range(SIZES["large"]["num_blocks"]))

pytestmark = pytest.mark.timeout(60)


def options(way: str, **more: object) -> dict:
    return {"shared": way == "mapped", "ways": (way,), "limits": QUICK, "size": "large", **more}


@pytest.fixture
def interrupted(start, here):
    """A send that a SIGSTOP has caught in mid-write: the sender, the receiver, its reservation."""

    def interrupted(way: str, **reserve: object):
        sender = start("sender", fill=1, **options(way))
        receiver = here("receiver", **options(way))
        small, _ = receiver.reserve([0])
        assert sender.outcome(sender.send(small, [0])) == way  # they know each other
        for _ in range(20):
            _, key = ticket, _ = receiver.reserve(MANY, **reserve)
            reservation = receiver.transfers[key]
            last = receiver.rows("l1")[MANY[-1]]
            last[:] = 0
            sender.post("send", ticket, MANY)
            until(lambda: reservation.state is TransferState.MOVING)  # noqa: B023
            sender.stop()
            if not reservation.done() and not last.any():
                return sender, receiver, reservation
            sender.resume()
            reservation.wait(10)
            sender.answer()
        pytest.skip("the sender was always faster than its SIGSTOP")

    return interrupted


def nothing_comes_late(receiver, sender) -> str:
    """Check that what stands in the blocks now is what stands there when the sender has ended; its outcome."""
    before = receiver.digest()
    sender.answer()
    outcome = sender.outcome(len(receiver.transfers) - 1)
    assert receiver.digest() == before
    return outcome


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_reservation_stays_cancelling_until_its_sender_has_acknowledged(interrupted, way):
    sender, receiver, reservation = interrupted(way)
    reservation.cancel()
    with pytest.raises(DeadlineExceeded, match="cancelling"):
        reservation.wait(0.5)
    assert reservation.state is TransferState.CANCELLING
    sender.resume()
    until(reservation.done)
    assert nothing_comes_late(receiver, sender) == "Cancelled"
    assert isinstance(reservation.exception(), Cancelled)


@pytest.mark.parametrize("way", WAYS)
def test_a_reservation_that_runs_out_stays_cancelling_until_its_sender_has_acknowledged(interrupted, way):
    sender, receiver, reservation = interrupted(way, ttl_s=0.5)
    until(lambda: reservation.state is TransferState.CANCELLING)
    assert not reservation.done()
    sender.resume()
    until(reservation.done)
    assert nothing_comes_late(receiver, sender) == "Cancelled"
    assert isinstance(reservation.exception(), DeadlineExceeded)


@pytest.mark.parametrize("way", WAYS)
def test_a_silent_sender_is_not_taken_for_a_dead_one(interrupted, way):
    sender, receiver, reservation = interrupted(way)
    reservation.cancel()
    until(lambda: receiver.connector.metrics.peers == 0, 5, "the session being given up")
    assert not reservation.done()
    sender.kill()
    until(reservation.done, 5)
    assert isinstance(reservation.exception(), Cancelled)
    assert receiver.connector.metrics.quarantined == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_sender_that_was_silent_too_long_still_hands_the_blocks_back_when_it_goes_on(interrupted, way):
    sender, receiver, reservation = interrupted(way)
    reservation.cancel()
    until(lambda: receiver.connector.metrics.peers == 0, 5, "the session being given up")
    sender.resume()
    until(reservation.done, 5, "the blocks being handed back")
    nothing_comes_late(receiver, sender)
    assert isinstance(reservation.exception(), Cancelled)


@pytest.mark.parametrize("way", WAYS)
def test_a_sender_killed_in_mid_write_frees_the_reservation_with_an_error(interrupted, way):
    sender, receiver, reservation = interrupted(way)
    sender.kill()
    with pytest.raises(PeerGone):
        reservation.wait(5)
    assert receiver.connector.metrics.staging_lent_bytes == 0
    assert receiver.connector.metrics.reservations == 0


def test_closing_the_receiver_does_not_hand_back_blocks_that_a_silent_sender_may_write(interrupted):
    sender, receiver, reservation = interrupted("mapped")
    reservation.cancel()
    until(lambda: receiver.connector.metrics.peers == 0, 5, "the session being given up")
    receiver.close()
    ended, before = reservation.done(), receiver.digest()
    sender.resume()
    sender.answer()
    sender.outcome(len(receiver.transfers) - 1)
    assert not ended or receiver.digest() == before


def test_waiting_for_a_reservation_ends_near_its_deadline_though_the_sender_stands_still(interrupted):
    _, _, reservation = interrupted("mapped", ttl_s=1.0)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        reservation.wait()
    assert time.monotonic() - started < 1 + SLACK_S
    assert not reservation.done()


@pytest.mark.parametrize("way", WAYS)
def test_an_unclaimed_reservation_ends_at_once(here, way):
    receiver = here("receiver", **options(way))
    _, key = receiver.reserve([1, 2])
    receiver.cancel(key)
    assert receiver.outcome(key) == "Cancelled"
    assert receiver.connector.metrics.reservations == 0


def test_a_reservation_nobody_claims_runs_out(here):
    receiver = here("receiver")
    _, key = receiver.reserve([1, 2], ttl_s=0.2)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="a sender"):
        receiver.transfers[key].wait()
    assert 0.1 < time.monotonic() - started < 0.2 + SLACK_S


@pytest.mark.parametrize("way", WAYS)
def test_a_second_claim_of_a_reservation_is_refused_and_disturbs_nothing(start, here, way):
    first, second = start("first", fill=1, **options(way)), start("second", fill=2, **options(way))
    receiver = here("receiver", **options(way))
    ticket, key = receiver.reserve([3, 4])
    assert first.outcome(first.send(ticket, [1, 2])) == way
    assert receiver.outcome(key) == way
    expected = first.blocks([1, 2])
    assert second.outcome(second.send(ticket, [5, 6], timeout_s=3)) in ("LeaseExpired", "InvalidTicket")
    assert receiver.blocks([3, 4]) == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_receiver_that_dies_fails_the_send(start, here, way):
    receiver, sender = start("receiver", **options(way)), here("sender", fill=1, **options(way))
    small, _ = receiver.reserve([0])
    assert sender.outcome(sender.send(small, [0])) == way
    ticket, _ = receiver.reserve([1])
    receiver.stop()
    send = sender.cache.send(ticket, {"full": [1]}, timeout_s=10)
    receiver.kill()
    with pytest.raises(PeerGone):
        send.wait(5)


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_receiver_lets_the_send_end_by_its_deadline(start, here, way):
    receiver, sender = start("receiver", **options(way)), here("sender", fill=1, **options(way))
    small, _ = receiver.reserve([0])
    assert sender.outcome(sender.send(small, [0])) == way
    ticket, _ = receiver.reserve([1])
    receiver.stop()
    started = time.monotonic()
    with pytest.raises((DeadlineExceeded, PeerGone)):
        sender.cache.send(ticket, {"full": [1]}, timeout_s=0.5).wait()
    assert time.monotonic() - started < 0.5 + SLACK_S
