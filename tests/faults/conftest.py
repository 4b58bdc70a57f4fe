"""Sides of a transfer, here and in processes of their own, and the check that nothing of them is left."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import Process, Side, descriptors, segments

WAYS = ("mapped", "direct", "packed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With KVXFER_TEST_BACKEND=nixl, say, everything runs on that backend; what is about mapped memory is left out."""
    if os.environ.get("KVXFER_TEST_BACKEND", "shm") == "shm":
        return
    for item in items:
        if getattr(item, "callspec", None) is not None and item.callspec.params.get("way") == "mapped":
            item.add_marker(pytest.mark.skip(reason="this backend maps nothing"))


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """What a process keeps for good (the sweeper, libraries' own descriptors) is there before anything is counted."""
    Side("warm").close()


@pytest.fixture(autouse=True)
def nothing_left(warm: None, caplog: pytest.LogCaptureFixture) -> Iterator[list[int]]:
    """After each test: no thread, no descriptor, no segment of this process or of those in the list."""
    gc.collect()
    pids: list[int] = []
    threads, fds, before = set(threading.enumerate()), descriptors(), set(segments(os.getpid()))
    yield pids
    ours = [os.getpid(), *pids]

    def nothing(what: str, look: Callable[[], object], timeout_s: float = 40.0) -> None:
        """Wait until `look` finds nothing."""
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            for phase in ("call", "teardown"):  # a thread may log until it ends; tracebacks hold everything
                caplog.get_records(phase).clear()
            gc.collect()
            found = look()
            if not found:
                return
            time.sleep(0.01)
        raise AssertionError(f"{what} are left: {found}")

    nothing("segments", lambda: {name for pid in ours for name in segments(pid)} - before)
    nothing("threads", lambda: set(threading.enumerate()) - threads)
    nothing("descriptors", lambda: dict(descriptors() - fds))


@pytest.fixture
def start(nothing_left: list[int]) -> Iterator[Callable[..., Process]]:
    """Start a `Process`; ended after the test in whatever state it is."""
    started: list[Process] = []

    def start(name: str, **options: object) -> Process:
        process = Process(name, **options)
        started.append(process)
        nothing_left.append(process.pid)
        return process

    yield start
    for process in started:
        process.discard()


@pytest.fixture
def here(nothing_left: list[int]) -> Iterator[Callable[..., Side]]:
    """Open a `Side` in this process; closed after the test."""
    opened: list[Side] = []

    def here(name: str, **options: object) -> Side:
        side = Side(name, **options)
        opened.append(side)
        return side

    yield here
    for side in opened:
        side.close()
    opened.clear()
