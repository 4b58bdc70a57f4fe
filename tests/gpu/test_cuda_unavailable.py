"""What the door says where there is no GPU, no driver or no extension; and the checksum's reference."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvxfer import cuda
from kvxfer.errors import BackendError, InvalidRequest, MissingExtra


def test_importing_loads_neither_the_extension_nor_a_framework():
    code = (
        "import sys, kvxfer.cuda; print([m for m in ('kvxfer._cuda', 'torch', 'cupy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_extension_the_error_says_how_to_build_it():
    code = (
        "import sys; sys.modules['kvxfer._cuda'] = None\n"
        "from kvxfer import cuda\n"
        "print(cuda.why_unavailable())\n"
        "try: cuda.device_count()\n"
        "except Exception as error: print(type(error).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "KVXFER_CUDA=on" in done.stdout and done.stdout.strip().endswith(MissingExtra.__name__)


def test_without_a_gpu_the_error_has_cudas_name():
    try:
        if cuda.why_unavailable() == "":
            pytest.skip("this machine has a GPU")
        cuda.device_count()
    except MissingExtra as reason:
        pytest.skip(str(reason))
    except BackendError as error:
        assert error.name.startswith("cudaError") and error.name in str(error)


def test_streams_of_other_libraries():
    class Core:
        def __cuda_stream__(self):
            return (0, 7)

    class Torch:
        cuda_stream = 8

    class CuPy:
        ptr = 9

    assert [cuda.stream_address(s) for s in (None, 5, Core(), Torch(), CuPy())] == [0, 5, 7, 8, 9]
    with pytest.raises(InvalidRequest, match="got str"):
        cuda.stream_address("default")
