"""Which process a peer is, and whether it has ended, as far as one process can see another.

Imports msgspec, nothing of kvxfer.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import msgspec


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process, as it describes itself to a peer."""

    machine: str  # the kernel's id of this boot
    place: str  # its PID and network namespaces; others are taken for other hosts
    pid: int
    started: str  # in the kernel's clock ticks: tells it from a later process of the same number

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        return cls(machine=_machine(), place=_place(), pid=os.getpid(), started=_started(os.getpid()))

    def has_ended(self) -> bool:
        """Whether it has ended, for certain. False where that cannot be seen from here."""
        return (self.machine, self.place) == (_machine(), _place()) and _started(self.pid) != self.started


@functools.cache
def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def _place() -> str:
    return " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))


def _started(pid: int) -> str:
    """When a process started; empty when there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
