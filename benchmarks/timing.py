"""The one timing utility of the benchmarks.

Every measurement warms up, rotates over several sets of buffers so that none is found in a cache, and reports
the median with its quartiles. Work that runs on a device passes its own `clock` (an event pair) instead of
the host's.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

Buffers = TypeVar("Buffers")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call: median, quartiles, the best, and the number of calls measured."""

    median_s: float
    low_s: float
    high_s: float
    best_s: float
    calls: int

    def rate(self, nbytes: int) -> float:
        """Gigabytes (10**9) a second at the median, each byte counted once."""
        return nbytes / self.median_s / 1e9


def host_clock(call: Callable[[], Any]) -> float:
    """Seconds of one call by the host's clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def thread_clock(call: Callable[[], Any]) -> float:
    """Processor seconds of this thread: what one thread's work costs on a machine that others use too."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(
    function: Callable[[Buffers], Any],
    buffers: Sequence[Buffers],
    *,
    calls: int = 30,
    warm_up: int = 3,
    clock: Callable[[Callable[[], Any]], float] = host_clock,
    before: Callable[[], None] = lambda: None,
) -> Timing:
    """Time ``function(buffers[i])`` for `calls` calls, taking the sets of `buffers` in turn; `before` each, untimed."""

    def clocked(call: Callable[[], Any]) -> float:
        before()
        return clock(call)

    return measure_together({"": function}, buffers, calls=calls, warm_up=warm_up, clock=clocked)[""]


def measure_together(
    functions: dict[str, Callable[[Buffers], Any]],
    buffers: Sequence[Buffers],
    *,
    calls: int = 30,
    warm_up: int = 3,
    clock: Callable[[Callable[[], Any]], float] = host_clock,
) -> dict[str, Timing]:
    """Like `measure` for several functions that are to be compared: they take turns, call by call.

    A machine that slows down for a while then slows all of them down.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(warm_up + calls):
        for name, function in functions.items():
            given = buffers[number % len(buffers)]
            seconds = clock(lambda function=function, given=given: function(given))
            if number >= warm_up:
                samples[name].append(seconds)
    return {name: _summary(values) for name, values in samples.items()}


def _summary(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median_s=median, low_s=low, high_s=high, best_s=min(values), calls=len(values))


def environment(**more: Any) -> dict[str, Any]:
    """What a result must be read with: processor, system, versions, commit."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            check=False,
        ).stdout.strip()
    except FileNotFoundError:  # a machine without git cannot tell
        commit = ""
    return {
        "cpu": model,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": commit or os.environ.get("KVXFER_COMMIT", "unknown"),
        **more,
    }


def save(path: Path, env: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write results as JSON; a Timing in them becomes a dictionary."""
    path.write_text(json.dumps({"environment": env, "results": results}, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Timing) else str(value)
