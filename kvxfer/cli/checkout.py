"""Finds what lies beside the package in a checkout: examples and benchmarks are not installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import kvxfer
from kvxfer.errors import InvalidRequest


def root() -> Path:
    """The checkout: where the package comes from, or the working directory. InvalidRequest when there is none."""
    candidates = [Path(kvxfer.__file__).resolve().parent.parent, Path.cwd()]
    for folder in candidates:
        if (folder / "examples" / "tiny_engine").is_dir() and (folder / "benchmarks").is_dir():
            return folder
    raise InvalidRequest(
        "this command runs code of the repository (examples/, benchmarks/), which is not installed: run it in a "
        "checkout"
    )


def load(module: str) -> ModuleType:
    """Import a module of the checkout, such as ``examples.tiny_engine.front``."""
    folder = str(root())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(module)
