"""Engines for the tests with vLLM, which are collected where vLLM is installed: `make test-vllm`."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .engine import Answer, Engine, Request, tail

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from . import models

START_S, LOG_LINES = 400, 25
Start = Callable[..., Engine]
Reference = Callable[..., list[Answer]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: left out of CI for its time; `make test-vllm-full`")
    config.addinivalue_line("markers", "comparison: measures vLLM's NixlConnector, not kvxfer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(START_S))  # engines start within a test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test shows the last lines of the logs written while it ran."""
    report = yield
    if report.failed:
        for log in item.session.stash.get(_LOGS, []):
            if log.exists() and log.stat().st_mtime >= item.stash.get(_BEGAN, 0.0):
                report.sections.append((str(log), tail(log, LOG_LINES)))
    return report


_LOGS = pytest.StashKey[list[Path]]()
_BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEGAN] = time.time()


@pytest.fixture(scope="session")
def log_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives a log's path; pytest keeps the folders of the last three runs."""
    logs = request.session.stash[_LOGS] = []
    folder = tmp_path_factory.mktemp("logs")

    def path(name: str) -> Path:
        logs.append(folder / f"{len(logs):02}-{name}.log")
        return logs[-1]

    return path


def _starter(log_folder: Callable[[str], Path]) -> Iterator[Start]:
    started: list[Engine] = []

    def start(name: str, model: str = "gqa", **options: Any) -> Engine:
        """The engine starts in the background and is waited for at its first use."""
        engine = Engine(name, models.folder(model), log_folder(name), **options)
        started.append(engine)
        return engine

    try:
        yield start
    finally:
        for engine in started:
            engine.kill()


@pytest.fixture(scope="module")
def start(log_folder: Callable[[str], Path]) -> Iterator[Start]:
    """Starts engines that end with the module."""
    yield from _starter(log_folder)


@pytest.fixture
def start_here(log_folder: Callable[[str], Path]) -> Iterator[Start]:
    """Starts engines that end with the test."""
    yield from _starter(log_folder)


@pytest.fixture(scope="session")
def reference(log_folder: Callable[[str], Path]) -> Iterator[Reference]:
    """Answers of one engine that knows no connector: `reference(*prompts, model="gqa", max_tokens=16, ...)`.

    One request at a time, and each prompt from its beginning. The answers are kept.
    """
    starter = _starter(log_folder)
    start = next(starter)
    engines: dict[str, Engine] = {}
    known: dict[tuple, Answer] = {}

    def answers(*prompts: Sequence[int], model: str = "gqa", options: Any = None, **request: Any) -> list[Answer]:
        if model not in engines:
            engines[model] = start(f"reference-{model}", model, core=1, enable_prefix_caching=False, **(options or {}))
        found = []
        for prompt in prompts:
            key = (model, tuple(prompt), *sorted(request.items()))
            if key not in known:
                known[key] = engines[model].generate(Request(prompt=prompt, **request))[0]
            found.append(known[key])
        return found

    yield answers
    starter.close()
