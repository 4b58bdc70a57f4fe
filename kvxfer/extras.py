"""Optional packages, imported at first use."""

from __future__ import annotations

import importlib
from types import ModuleType

from kvxfer.errors import MissingExtra


def need(module: str, extra: str) -> ModuleType:
    """The module, or MissingExtra naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(f"this needs the package {module!r}: pip install 'kvxfer[{extra}]'") from error
