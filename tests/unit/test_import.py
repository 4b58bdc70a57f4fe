"""`import kvxfer` is light: engines import it whether they transfer or not."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("numpy", "torch", "cupy", "zmq", "msgspec", "nixl", "nixl_cu13", "nccl", "vllm", "kvxfer._native")


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_loads_nothing_else() -> None:
    loaded = _run(f"import sys, kvxfer; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert loaded == "[]"


def test_importing_takes_under_a_fifth_of_a_second() -> None:
    code = "import time; start = time.perf_counter(); import kvxfer; print(time.perf_counter() - start)"
    assert min(float(_run(code)) for _ in range(3)) < 0.2


def test_every_public_name_is_there() -> None:
    assert (
        _run("import kvxfer; print([name for name in kvxfer.__all__ if getattr(kvxfer, name, None) is None])") == "[]"
    )


def test_connecting_loads_no_optional_package() -> None:
    code = """
import sys, kvxfer
with kvxfer.Connector("light"):
    pass
print([name for name in ("torch", "cupy", "nixl", "nixl_cu13", "nccl", "vllm") if name in sys.modules])
"""
    assert _run(code) == "[]"
