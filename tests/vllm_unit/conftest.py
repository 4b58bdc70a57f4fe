"""The connector without models: vLLM's scheduler, and workers whose model writes numbers that can be checked.

Without vLLM only test_environment.py is collected, and says so; `make test-vllm` has an environment with it.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_[!e]*.py"]
else:
    from .engine import Engine


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: left out of CI for its time; `make test-vllm-full`")


@pytest.fixture(autouse=True)
def first_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the workers here act like; vLLM 0.33 would choose by the platform."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


@pytest.fixture(autouse=True)
def vllm_logs_reach_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 keeps its log lines to itself."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Starts engines that are shut down after the test."""
    engines: list[Engine] = []

    def start(**options: object) -> Engine:
        engines.append(Engine(**options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
