"""Workers of one transfer: never more than allowed, none forgotten, and others get their turn."""

from __future__ import annotations

import collections
import dataclasses
import threading

import pytest

import kvxfer
from kvxfer.progress import MoverPool
from kvxfer.transfers.workers import ChunkWorkers, workers_for


@pytest.fixture
def pool():
    pool = MoverPool("test", 4)
    yield pool
    pool.close()


class Queue:
    """Calls that workers take, and what they saw."""

    def __init__(self, pool: MoverPool, most: int) -> None:
        self.calls: collections.deque = collections.deque()
        self.workers = ChunkWorkers(pool, self.take, most=most)
        self.at_work = self.most_at_work = self.done = 0
        self.changed = threading.Condition()

    def take(self):
        return self.calls.popleft() if self.calls else None

    def call(self, work=lambda: None):
        def run() -> None:
            with self.changed:
                self.at_work += 1
                self.most_at_work = max(self.most_at_work, self.at_work)
            work()
            with self.changed:
                self.at_work -= 1
                self.done += 1
                self.changed.notify_all()

        return run

    def wait_for(self, done: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.done >= done, 30), (self.done, done)


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_work_at_once_than_allowed_and_all_of_it_is_done(pool, most):
    queue = Queue(pool, most)
    for _ in range(300):
        queue.calls.append(queue.call())
        queue.workers.wake()
    queue.wait_for(300)
    assert 1 <= queue.most_at_work <= most


def test_as_many_as_allowed_work_side_by_side(pool):
    queue, together = Queue(pool, 3), threading.Barrier(3, timeout=30)
    queue.calls.extend(queue.call(together.wait) for _ in range(3))
    queue.workers.wake()
    queue.wait_for(3)


def test_no_call_is_forgotten_whoever_adds_it(pool):
    queue = Queue(pool, 2)

    def add() -> None:
        for _ in range(500):
            queue.calls.append(queue.call())
            queue.workers.wake()

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.wait_for(2000)


def test_other_jobs_of_the_pool_get_their_turn():
    pool = MoverPool("test", 1)
    queue, order, added = Queue(pool, 1), [], threading.Event()
    queue.calls.append(queue.call(lambda: (order.append("first"), added.wait(30))))
    queue.calls.extend(queue.call(lambda: order.append("later")) for _ in range(5))
    queue.workers.wake()
    other = threading.Event()
    pool.submit(lambda: (order.append("other"), other.set()))
    added.set()
    assert other.wait(30)
    queue.wait_for(6)
    pool.close()
    assert order.index("other") <= 2


def test_one_end_of_a_transfer_keeps_half_of_the_processors_busy(monkeypatch):
    limits = dataclasses.replace(kvxfer.Limits(), mover_threads=4)
    for processors, workers in ((1, 1), (2, 1), (4, 2), (64, 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=processors: set(range(n)))
        assert workers_for(limits) == workers
