"""No call of this package keeps Python's lock while CUDA holds it up for a stream that waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gpu import what_waits
from tests.gpu.memory import need_devices

need_devices(1)


def test_a_gate_can_be_opened_while_memory_is_freed_and_something_else_is_called() -> None:
    """Whoever frees waits for the stream, others wait for whoever frees, and the stream waits for the gate."""
    done = subprocess.run(
        [sys.executable, what_waits.__file__, "0.3"], capture_output=True, text=True, timeout=120, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pairs = [line for line in done.stdout.splitlines() if ", then " in line]
    assert len(pairs) == len(what_waits.FREEING) * len(what_waits.BESIDE)
    assert any(line.startswith("free: 0.3") for line in done.stdout.splitlines()), (
        done.stdout
    )  # the gate did hold it up
