"""The fuzz target's checks on random bytes, so that they run without atheris too."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import kernels

TARGET = Path(__file__).with_name("fuzz_chunks.py")
_spec = importlib.util.spec_from_file_location("fuzz_chunks", TARGET)
fuzz = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fuzz)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_any_bytes_unpack_into_their_blocks_and_nowhere_else(isa):
    before = kernels.cpu_isa()
    try:
        kernels.choose_cpu_isa(isa)
    except ValueError:
        pytest.skip(f"this CPU has no {isa}")
    source = random.Random(11)
    try:
        for join, plan in fuzz.plans():
            for _ in range(30):
                fuzz.check_payload(join, plan, source.randbytes(source.choice([0, 100, 4096])))
            fuzz.check_payload(join, plan, b"\xff" * 4096)
            fuzz.check_payload(join, plan, b"\x7f" * 4096)
    finally:
        kernels.choose_cpu_isa(before)


def test_random_bytes_are_no_header():
    source = random.Random(12)
    for _ in range(2000):
        fuzz.check_header(b"KVXC" + source.randbytes(source.randrange(300)))


def test_atheris():
    pytest.importorskip("atheris")
    done = subprocess.run(
        [sys.executable, str(TARGET), "-max_total_time=10"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
