"""Other libraries on the same work: one module each, with ``rows(work)``.

A peer is measured in a process of its own, so that one that is absent, fails or crashes is a row that says so and
nothing more. Modules import their library when they run. Nothing of a peer is part of this repository.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

NAMES = ("torch_index", "memcpy_batch", "sglang_transfer", "lmcache_layers", "flashinfer_nvfp4", "nixl_read")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What to move: `total` bytes in random pieces, from GPU 1 to GPU 0 unless a row says otherwise."""

    total: int
    pieces: tuple[int, ...]
    calls: int


def measured(name: str, work: Work, *, timeout_s: float) -> list[dict[str, Any]]:
    """The rows of one peer: what it printed before it ended, was ended, or said why it cannot be measured."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(name, work, theirs))
    process.start()
    theirs.close()
    found = list(_received(ours, timeout_s))
    if process.is_alive():
        process.join(2)
    if process.is_alive():
        process.kill()
        process.join()
    if not found or not found[-1].get("end"):
        found.append({"skipped": f"it did not end within {timeout_s:g} s, or crashed ({process.exitcode})"})
    return [{"peer": name, **row} for row in found if not row.get("end")]


def _received(pipe: Connection, timeout_s: float) -> Iterator[dict[str, Any]]:
    while pipe.poll(timeout_s):
        try:
            row = pipe.recv()
        except EOFError:
            return
        yield row
        if row.get("end"):
            return


def _run(name: str, work: Work, pipe: Connection) -> None:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # both GPUs
    try:
        for row in importlib.import_module(f"peers.{name}").rows(work):
            pipe.send(row)
    except ImportError as error:
        pipe.send({"skipped": f"not installed ({error})"[:200]})
    except Exception as error:  # a peer that does not run here is a row that says so
        pipe.send({"skipped": f"{type(error).__name__}: {error}"[:300]})
    pipe.send({"end": True})
