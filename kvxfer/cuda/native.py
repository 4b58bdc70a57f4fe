"""The extension module, loaded at first use, and its statuses as errors."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

from kvxfer.errors import BackendError, KvxferError, MissingExtra


class CudaError(BackendError):
    """A CUDA call failed; `status` is its cudaError_t, `name` CUDA's name of it."""

    def __init__(self, message: str, *, status: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.name = name


@lru_cache(maxsize=1)
def native() -> ModuleType:
    """The extension. Raises MissingExtra where this installation was built without it."""
    try:
        from kvxfer import _cuda
    except ImportError as error:
        raise MissingExtra(
            "this installation of kvxfer has no CUDA kernels: install it again where nvcc is found, with "
            f"KVXFER_CUDA=on in the environment ({error})"
        ) from error
    return _cuda


def check(status: int, what: str) -> None:
    """Raises CudaError unless `status` is 0. `what` says what was tried, in the words of a sentence."""
    if status:
        name, text = native().error_name(status), native().error_text(status)
        raise CudaError(f"{what}: {name} ({status}): {text}", status=status, name=name)


def value(result: tuple[int, Any], what: str) -> Any:
    """The second of ``(status, value)``, once the status is checked."""
    check(result[0], what)
    return result[1]


def why_unavailable() -> str:
    """Why no GPU can be used from here, or an empty string where one can."""
    try:
        count = value(native().device_count(), "counting GPUs")
    except KvxferError as error:
        return str(error)
    return "" if count else "CUDA sees no GPU"


def available() -> bool:
    """Whether the extension is built and a GPU can be used."""
    return not why_unavailable()
