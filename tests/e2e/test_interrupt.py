"""Ctrl-C in `kvxfer demo`, which every process of a terminal gets: it ends at once, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")
PATIENCE_S = 120.0  # for steps that take seconds; a machine may be busy
FORMS = {"synthetic": ("--synthetic", "--tokens", "300000"), "model": ("--max-tokens", "2000")}


def group(leader: int) -> dict[int, bool]:
    """The live processes of a process group, and whether each is a Python that multiprocessing started."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader and fields[0] != "Z":
                found[int(folder.name)] = b"spawn_main" in (folder / "cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue  # not a process, or gone
    return found


def segments(pids: set[int]) -> list[str]:
    """Shared-memory segments of these processes."""
    return [name.name for name in SHARED.glob("kvxfer-*") if int(name.name.split("-")[2]) in pids]


def workers(demo: subprocess.Popen) -> set[int]:
    return {pid for pid, spawned in group(demo.pid).items() if spawned}


def until(condition: Callable[[], bool], demo: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert demo.poll() is None, "the demo ended before it was interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("moment", ["start", "memory"])
@pytest.mark.parametrize("form", FORMS)
def test_ctrl_c_ends_the_demo_quietly(form, moment, tmp_path):
    if form == "model":
        pytest.importorskip("gguf")
        pytest.importorskip("tokenizers")
    with open(tmp_path / "out", "w+") as out:
        demo = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.cli", "demo", *FORMS[form]],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
        )
        seen: set[int] = set()
        try:
            until(lambda: bool(workers(demo)), demo)
            if moment == "memory":
                until(lambda: bool(segments(workers(demo))), demo)
            seen = set(group(demo.pid))
            os.killpg(demo.pid, signal.SIGINT)
            status = demo.wait(PATIENCE_S)
            seen |= set(group(demo.pid))
            deadline = time.monotonic() + PATIENCE_S
            while (group(demo.pid) or segments(seen)) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not group(demo.pid) and not segments(seen)
        finally:
            if demo.poll() is None:
                os.killpg(demo.pid, signal.SIGKILL)
                demo.wait()
        out.seek(0)
        text = out.read()
    assert status == 130, text
    assert "Traceback" not in text and "Exception" not in text and "Error" not in text, text


@pytest.mark.parametrize(("form", "status", "word"), [("synthetic", 1, "CUDA"), ("model", 2, "GPUs")])
def test_a_backend_that_cannot_start_is_one_line(form, status, word):
    try:
        from kvxfer import _cuda  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("cuda_ipc may well start here")
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "demo", *FORMS[form], "--backend", "cuda_ipc"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == status
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert word in done.stderr
