"""Calls that wake no thread, and threads that sleep again when there are none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvxfer.progress import MoverPool, ProgressThread
from tests.processes import until


@pytest.fixture
def progress() -> Iterator[ProgressThread]:
    thread = ProgressThread("test")
    yield thread
    thread.close(lambda: None)


@pytest.fixture
def pool() -> Iterator[MoverPool]:
    made = MoverPool("test", 2)
    yield made
    made.close()


def test_calls_that_may_wait_run_in_order_with_those_that_may_not(progress: ProgressThread) -> None:
    seen: list[int] = []
    for round_ in range(20):
        for number in range(5):
            (progress.post_soon if (round_ + number) % 2 else progress.post)(
                lambda value=5 * round_ + number: seen.append(value)
            )
        time.sleep(0.0005 * round_)
    until(lambda: len(seen) == 100)
    assert seen == list(range(100))


def test_a_call_that_may_wait_runs_without_another_one_that_wakes_the_thread(progress: ProgressThread) -> None:
    for pause_s in (0.0, 0.001, 0.01, 0.2):  # attentive, and asleep
        done = threading.Event()
        progress.post_soon(done.set)
        assert done.wait(10)
        time.sleep(pause_s)


def test_the_thread_sleeps_again(progress: ProgressThread) -> None:
    done = threading.Event()
    progress.post_soon(done.set)
    assert done.wait(10)

    def sleeps() -> bool:
        before = progress.turns
        time.sleep(0.2)
        return progress.turns == before

    until(sleeps, timeout_s=20)


def test_calls_that_may_wait_run_before_the_thread_ends() -> None:
    thread, seen = ProgressThread("test"), []
    thread.post_soon(lambda: seen.append("call"))
    thread.post_soon(lambda: seen.append("call"))
    thread.close(lambda: seen.append("last"))
    assert seen == ["call", "call", "last"]
    thread.post_soon(lambda: seen.append("late"))
    assert len(seen) == 3


def test_what_is_watched_is_come_to(pool: MoverPool) -> None:
    for pause_s in (0.0, 0.001, 0.01, 0.2):
        done = threading.Event()
        pool.watch(done.set)
        assert done.wait(10)
        time.sleep(pause_s)


def test_what_is_watched_holds_up_no_job(pool: MoverPool) -> None:
    """A call that watches itself again and again, as of something that takes its time."""
    stop, looks, ran = threading.Event(), [], []

    def look() -> None:
        looks.append(1)
        time.sleep(0.001)
        if not stop.is_set():
            pool.watch(look)

    for _ in range(3):
        pool.watch(look)
    for number in range(50):
        pool.submit(lambda number=number: ran.append(number))
    until(lambda: len(ran) == 50)
    stop.set()
    pool.hurry()
    assert looks


def test_a_closing_pool_comes_to_what_is_watched() -> None:
    pool, seen = MoverPool("test", 1), []
    pool.watch(lambda: seen.append(1))
    pool.watch(lambda: seen.append(2))
    pool.close()
    assert seen == [1, 2]


def test_where_no_thread_can_be_started_jobs_wait_for_those_that_there_are(pool: MoverPool, monkeypatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    go, done = threading.Event(), []
    monkeypatch.setattr(threading.Thread, "start", fail)

    def away() -> None:
        pool.leave()
        go.wait(10)
        pool.come_back()

    for _ in range(2):
        pool.submit(away)
    until(lambda: pool._away == 2)
    pool.submit(lambda: done.append(1))  # a spare thread would take it
    assert not done
    go.set()
    until(lambda: done)
