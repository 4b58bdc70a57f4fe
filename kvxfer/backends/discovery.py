"""Which backends there are, and starting them. Backends are found by the entry-point group ``kvxfer.backends``.

Imports base.py and errors.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Sequence

from kvxfer.backends.base import Backend
from kvxfer.errors import BackendError, InvalidRequest, KvxferError, NoCommonBackend, ResourceExhausted

_log = logging.getLogger(__name__)

GROUP = "kvxfer.backends"
ALIASES = {"pynccl": "nccl"}  # names that other projects use
PREFERENCE = ("cuda_ipc", "shm", "nixl", "nccl")  # of the backends that both ends have; others come after


def start_backends(
    wanted: str | Backend | Sequence[str | Backend], *, loopback: bool
) -> tuple[dict[str, Backend], dict[str, str]]:
    """The backends that run, by name and in order of preference, and why others do not.

    `wanted` is "auto" (all that can be started and have a use: with `loopback`, no peer is on another host), a name or
    an instance, or several of these, which then must all start. Raises InvalidRequest for an unknown name,
    NoCommonBackend when none runs, and what a backend raises.
    """
    entries = installed()
    if isinstance(wanted, str) and wanted == "auto":
        return _start_all(entries, loopback)
    started: dict[str, Backend] = {}
    try:
        for item in [wanted] if isinstance(wanted, (str, Backend)) else wanted:
            backend = item if isinstance(item, Backend) else _start(entries, item)
            started[backend.name] = backend
    except KvxferError:
        for backend in started.values():
            backend.close()
        raise
    if not started:
        raise InvalidRequest("backends must name one or more; 'auto' takes all that can be started")
    return started, {}


def installed() -> dict[str, importlib.metadata.EntryPoint]:
    """The backends' entry points, by name."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}


def _start_all(
    entries: dict[str, importlib.metadata.EntryPoint], loopback: bool
) -> tuple[dict[str, Backend], dict[str, str]]:
    started: dict[str, Backend] = {}
    left_out: dict[str, str] = {}
    full: ResourceExhausted | None = None
    for name in [name for name in PREFERENCE if name in entries] + sorted(entries.keys() - set(PREFERENCE)):
        try:
            if loopback and _load(entries[name]).capabilities.cross_host:
                raise BackendError("left out: this connector listens on loopback only, so no peer is on another host")
            started[name] = _start(entries, name)
        except KvxferError as error:
            left_out[name] = str(error)
            if isinstance(error, ResourceExhausted) and full is None:
                full = error.with_traceback(None)  # whose frames would keep the caller's arrays
    if not started and full is not None:
        raise full
    if not started:
        reasons = "".join(f"\n  - {name}: {reason}" for name, reason in left_out.items())
        raise NoCommonBackend(f"no backend could be started:{reasons}")
    return started, left_out


def _start(entries: dict[str, importlib.metadata.EntryPoint], name: str) -> Backend:
    if name in ALIASES and name not in entries:
        name = ALIASES[name]
        _log.warning(
            "backend 'pynccl' is kvxfer's 'nccl', which uses NVIDIA's nccl4py; the PyPI package pynccl, of 2020, has "
            "no part in it"
        )
    if name not in entries:
        raise InvalidRequest(f"unknown backend {name!r}; installed are {', '.join(sorted(entries)) or 'none'}")
    return _load(entries[name])()


def _load(entry: importlib.metadata.EntryPoint) -> type[Backend]:
    try:
        return entry.load()
    except ImportError as error:
        raise BackendError(f"backend {entry.name!r} cannot be loaded: {error}") from error
