"""The door to csrc: instruction sets and what forces one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvxfer import kernels
from kvxfer.errors import InvalidRequest


def test_an_unknown_instruction_set_is_refused():
    before = kernels.cpu_isa()
    with pytest.raises(InvalidRequest, match=r"expected portable, avx2 or avx512.*'sse9'"):
        kernels.choose_cpu_isa("sse9")
    assert kernels.cpu_isa() == before


@pytest.mark.parametrize("name", ["portable", "avx2", "avx512"])
def test_the_environment_forces_an_instruction_set(name, tmp_path):
    before = kernels.cpu_isa()
    try:
        kernels.choose_cpu_isa(name)
    except InvalidRequest:
        pytest.skip(f"this CPU has no {name}")
    finally:
        kernels.choose_cpu_isa(before)
    code = "from kvxfer import kernels; print(kernels.cpu_isa())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"KVXFER_CPU_ISA": name},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == name


def test_a_wrong_name_in_the_environment_fails_at_import(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import kvxfer.kernels"],
        env=os.environ | {"KVXFER_CPU_ISA": "fast"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode and "KVXFER_CPU_ISA" in done.stderr


def test_words_of_a_lease_table():
    import ctypes

    word = ctypes.c_uint64(5)
    assert kernels.load_word(ctypes.addressof(word)) == 5
    kernels.store_word(ctypes.addressof(word), 2**64 - 1)
    assert word.value == 2**64 - 1
