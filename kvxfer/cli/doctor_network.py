"""What `kvxfer doctor` says of the way to other hosts: interfaces, RDMA devices, limits, and NIXL with its UCX."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import re
import resource
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = ("nixl-cu13", "nixl-cu12", "nixl")
_RDMA = Path("/sys/class/infiniband")
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LANES = re.compile(r"(?:intra|inter)-node cfg#\d+ (.*)")
_LANE = re.compile(r"[\w.]+/[\w.:]+")


def examine() -> dict:
    """What there is, and under ``advice`` what stands in the way of NIXL."""
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    report = {
        "interfaces": {name: addresses for _, name in socket.if_nameindex() if (addresses := _addresses(name))},
        "rdma_devices": sorted(path.name for path in _RDMA.iterdir()) if _RDMA.is_dir() else [],
        "ipv6": _has_ipv6(),
        "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
        "ephemeral_ports": "-".join(_PORTS.read_text().split()),
        "nixl": _nixl_version(),
        "ucx_variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")},
        "ucx_transports": [],  # between two processes of this host; filled in by who has tried
    }
    return report | {"advice": list(_advice(report))}


def _advice(report: dict) -> Iterator[str]:
    variables, interfaces, devices = report["ucx_variables"], report["interfaces"], report["rdma_devices"]
    known = {*interfaces, *devices, "all"}
    for name in filter(None, variables.get("UCX_NET_DEVICES", "").split(",")):
        if name.strip().split(":")[0] not in known:
            yield f"UCX_NET_DEVICES names {name.strip()!r}, which is not here: {', '.join(sorted(known - {'all'}))} are"
    if set(interfaces) <= {"lo"}:
        yield "there is no interface but loopback: no other host can be reached"
    if devices and report["memlock_bytes"] is not None:
        yield (
            f"only {report['memlock_bytes'] >> 10} KiB of memory may be locked, and RDMA locks every registered cache: "
            "ulimit -l unlimited (containers: --ulimit memlock=-1)"
        )
    if devices and not Path("/dev/infiniband").is_dir():
        yield "there are RDMA devices, but no /dev/infiniband here (containers: --device /dev/infiniband)"


@contextlib.contextmanager
def watched_ucx() -> Iterator[list[str]]:
    """Processes that are started meanwhile write down the transports that UCX picks; the list is filled at the end."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        changes = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": f"{folder}/%p"}
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield found
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            lines = "".join(path.read_text(errors="replace") for path in Path(folder).iterdir())
            found.extend(sorted({lane for lanes in _LANES.findall(lines) for lane in _LANE.findall(lanes)}))


def text(report: dict) -> list[str]:
    """The report in lines."""
    memlock = report["memlock_bytes"]
    return [
        "to other hosts",
        *(f"  {name:<8} {', '.join(addresses)}" for name, addresses in report["interfaces"].items()),
        f"  IPv6     {'yes' if report['ipv6'] else 'no'}",
        f"  RDMA     {', '.join(report['rdma_devices']) or 'no devices'}",
        f"  memlock  {'unlimited' if memlock is None else f'{memlock >> 10} KiB'}",
        f"  ports    {report['ephemeral_ports']} are given to who asks for any, NIXL among them",
        f"  NIXL     {report['nixl'] or 'not installed: pip install kvxfer[nixl]'}",
        *(f"  {name}={value}" for name, value in report["ucx_variables"].items()),
        f"  UCX took {', '.join(report['ucx_transports']) or 'nothing'} between two processes of this host",
        *(f"  - {line}" for line in report["advice"]),
    ]


def _nixl_version() -> str | None:
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    return None


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _addresses(interface: str) -> list[str]:
    """IPv4 and IPv6 addresses of an interface; empty when it has none, or is down."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker, contextlib.suppress(OSError):
        answer = fcntl.ioctl(asker, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            if name == interface:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return found
