"""Public methods from any thread, callbacks, await, and closing in the middle."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import SIZES, SLACK_S, until

from kvxfer import KvxferError, TransferState
from kvxfer.errors import BackendError, Cancelled, Closed, DeadlineExceeded, InvalidRequest, InvalidTicket, PeerGone
from kvxfer.transfers.transfer import Transfer

WAYS = ("mapped", "direct", "packed")
MANY = list(range(SIZES["large"]["num_blocks"]))

pytestmark = pytest.mark.timeout(60)


def options(way: str) -> dict:
    return {"shared": way == "mapped", "ways": (way,)}


@pytest.mark.parametrize("way", WAYS)
def test_fetches_from_many_threads_at_once_are_all_right(start, here, way):
    prefill, decode = start("prefill", fill=1, **options(way)), here("decode", **options(way))
    tickets = [[prefill.publish([block]) for block in range(64)] for _ in range(4)]

    def work(thread: int) -> None:
        for block in range(thread, 64, 8):
            for round_ in tickets:
                decode.cache.fetch(round_[block], into={"full": [block]}).wait(20)
                decode.connector.metrics  # noqa: B018

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert decode.digest() == prefill.digest()
    until(lambda: prefill.metrics()["leases"] == 0)


def test_one_ticket_raced_by_many_threads_is_fetched_once(start, here):
    prefill, decode = start("prefill", fill=1), here("decode")
    barrier = threading.Barrier(8)

    def race(ticket: bytes) -> bool:
        barrier.wait()
        try:
            decode.cache.fetch(ticket, into={"full": [1]})
        except InvalidTicket:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        for _ in range(30):
            ticket = prefill.publish([1])
            assert sum(pool.map(race, [ticket] * 8)) == 1


def test_callbacks_run_on_the_progress_thread_also_when_added_after_the_end(start, here):
    prefill, decode = start("prefill", fill=1), here("decode")
    fetch = decode.cache.fetch(prefill.publish([1]), into={"full": [1]})
    ran: list[tuple[str, object]] = []

    def callback(transfer: object) -> None:
        ran.append((threading.current_thread().name, transfer))

    fetch.add_done_callback(callback)
    fetch.wait()
    until(lambda: len(ran) == 1)
    fetch.add_done_callback(callback)
    until(lambda: len(ran) == 2)
    assert ran == [("kvxfer-progress-decode", fetch)] * 2


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_whatever_a_callback_raises_the_thread_goes_on(start, here, error):
    prefill, decode = start("prefill", fill=1), here("decode")
    called = threading.Event()

    def raises(_: object) -> None:
        called.set()
        raise error("by a test")

    fetch = decode.cache.fetch(prefill.publish([1]), into={"full": [1]})
    fetch.add_done_callback(raises)
    assert called.wait(10)
    lease = decode.cache.publish({"full": [2]}, tokens=16, ttl_s=0.1)
    lease.add_done_callback(raises)
    assert lease.released.wait(10)
    assert decode.fetch_now(prefill.publish([3]), [3]) == "mapped"


@pytest.mark.parametrize("way", ["mapped", "direct"])
def test_an_interrupt_in_mid_transfer_ends_it_and_goes_on_to_who_waits(start, here, monkeypatch, way):
    prefill, decode = start("prefill", fill=1, **options(way)), here("decode", **options(way))
    assert decode.fetch_now(prefill.publish([0])) == way

    def interrupt(self: Transfer, nbytes: int) -> None:
        raise KeyboardInterrupt

    for _ in range(20):  # a mover thread may be faster than the one that waits
        fetch = decode.cache.fetch(prefill.publish([1]), into={"full": [1]}, timeout_s=60)
        with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, BackendError)):
            patched.setattr(Transfer, "advance", interrupt)
            fetch.wait()
        until(fetch.done)
        assert isinstance(fetch.exception(), BackendError)
        assert decode.connector.metrics.transfers == 0
    assert decode.fetch_now(prefill.publish([3]), [3]) == way


def test_waiting_in_a_callback_is_refused_and_the_thread_goes_on(start, here):
    prefill, decode = start("prefill", fill=1), here("decode")
    caught = []

    def callback(_: object) -> None:
        other = decode.cache.fetch(prefill_ticket, into={"full": [2]})
        try:
            other.wait()
        except InvalidRequest as error:
            caught.append((str(error), other))
        raise ValueError("a faulty callback")

    prefill_ticket = prefill.publish([2])
    decode.cache.fetch(prefill.publish([1]), into={"full": [1]}).add_done_callback(callback)
    until(lambda: caught)
    assert "progress thread" in caught[0][0]
    caught[0][1].wait()
    assert decode.fetch_now(prefill.publish([3])) == "mapped"


@pytest.mark.parametrize("way", WAYS)
def test_transfers_can_be_awaited(start, here, way):
    prefill, decode = start("prefill", fill=1, **options(way)), here("decode", **options(way))
    tickets = [prefill.publish([block]) for block in range(8)]
    late = prefill.publish([9], ttl_s=0.01)
    assert prefill.released(late, 2)

    async def main() -> None:
        fetches = [decode.cache.fetch(t, into={"full": [i]}) for i, t in enumerate(tickets)]
        assert [stats.way for stats in await asyncio.gather(*fetches)] == [way] * 8
        assert (await fetches[0]).bytes  # again, after its end
        with pytest.raises(KvxferError):
            await decode.cache.fetch(late, into={"full": [9]})

    asyncio.run(main())
    assert decode.digest(list(range(8))) == prefill.digest(list(range(8)))


def test_awaiting_ends_at_the_transfers_deadline(start, here):
    prefill, decode = start("prefill"), here("decode")
    ticket = prefill.issue([1])

    async def main() -> None:
        with pytest.raises(DeadlineExceeded):
            await decode.cache.fetch(ticket, into={"full": [1]}, timeout_s=0.3)

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 0.3 + SLACK_S


@pytest.mark.parametrize("way", WAYS)
def test_closing_ends_the_transfers_that_are_under_way(start, here, way):
    prefill = start("prefill", fill=1, size="large", **options(way))
    decode = here("decode", size="large", **options(way))
    assert decode.fetch_now(prefill.publish([0])) == way
    fetch = decode.cache.fetch(prefill.publish(MANY), into={"full": MANY})
    waiting = decode.cache.fetch(prefill.issue([1]), into={"full": [1]})
    _, key = decode.reserve([2])
    until(lambda: fetch.state is not TransferState.POSTED)
    with ThreadPoolExecutor(2) as pool:
        waiters = [pool.submit(transfer.wait) for transfer in (fetch, waiting)]
        started = time.monotonic()
        decode.close()
        assert time.monotonic() - started < 1 + SLACK_S
        for waiter in waiters[1:]:
            with pytest.raises(Cancelled, match="closed"):
                waiter.result()
    assert fetch.done()
    assert isinstance(fetch.exception(), Cancelled) or fetch.state is TransferState.DONE
    assert isinstance(decode.transfers[key].exception(), Cancelled)
    before = decode.digest()
    prefill.close()
    assert decode.digest() == before


def test_closing_from_many_threads_while_others_start_transfers_ends_everything(start, here):
    prefill = start("prefill", fill=1)
    for _ in range(5):
        decode = here("decode")
        tickets = [prefill.publish([block]) for block in range(60)]
        started = threading.Event()

        def work(thread: int, decode=decode, tickets=tickets, started=started) -> list[str]:
            outcomes = []
            for block in range(thread, 60, 4):
                try:
                    fetch = decode.cache.fetch(tickets[block], into={"full": [block]}, timeout_s=2)
                    started.set()
                    outcomes.append(fetch.wait().way)
                except (Closed, Cancelled, PeerGone, DeadlineExceeded) as error:
                    outcomes.append(type(error).__name__)
            return outcomes

        with ThreadPoolExecutor(6) as pool:
            works = [pool.submit(work, thread) for thread in range(4)]
            started.wait(5)
            ends = [pool.submit(decode.close) for _ in range(2)]
            for future in works + ends:
                future.result(10)
        assert decode.connector.metrics.transfers == 0


def test_closing_in_a_callback_works(start, here):
    prefill, decode = start("prefill", fill=1), here("decode")
    closed = threading.Event()

    def callback(_: object) -> None:
        decode.close()
        closed.set()

    decode.cache.fetch(prefill.publish([1]), into={"full": [1]}).add_done_callback(callback)
    assert closed.wait(10)
    with pytest.raises(Closed):
        decode.cache.fetch(prefill.publish([1]), into={"full": [1]})


def test_a_short_wait_is_short_though_the_transfer_is_long(start, here):
    prefill, decode = start("prefill", fill=1, size="large"), here("decode", size="large")
    assert decode.fetch_now(prefill.publish([0])) == "mapped"
    whole = []
    waited = []
    for _ in range(3):
        fetch = decode.cache.fetch(prefill.publish(MANY), into={"full": MANY})
        started = time.monotonic()
        try:
            fetch.wait(0.001)
        except DeadlineExceeded:
            pass
        waited.append(time.monotonic() - started)
        fetch.wait()
        whole.append(time.monotonic() - started)
    assert min(waited) < 0.5 * min(whole), (waited, whole)


@pytest.mark.parametrize("way", WAYS)
def test_cancelling_ends_a_transfer_soon_and_nothing_is_written_after(start, here, way):
    prefill = start("prefill", fill=1, size="large", **options(way))
    decode = here("decode", size="large", **options(way))
    assert decode.fetch_now(prefill.publish([0])) == way
    fetch = decode.cache.fetch(prefill.publish(MANY), into={"full": MANY})
    until(lambda: fetch.state is not TransferState.POSTED)
    fetch.cancel()
    until(fetch.done)
    before = decode.digest()
    assert decode.fetch_now(prefill.publish([0]), [0]) == way
    until(lambda: decode.connector.metrics.staging_lent_bytes == 0)
    decode.rows("l0")[0] = decode.rows("l1")[0] = 0
    zeroed = decode.digest()
    assert zeroed == decode.digest()
    assert before
