"""Hosts of one test, processes on them, and the check that nothing is left of either."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import Process, until

from .network import DEVICE, Host, Network, NotPermitted, why_not

# Times after which a path counts as dead, shorter than those that are meant for real networks.
QUICK = {"heartbeat_s": 0.2, "peer_timeout_s": 1.5, "dial_timeout_s": 3.0}
QUICK_UCX = {
    "UCX_TCP_USER_TIMEOUT": "2s",
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "2",
}
UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE, "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if not ours:
        return
    reason = why_not()
    if importlib.util.find_spec("nixl_cu13") is None:
        reason = "NIXL is not installed"
    for item in ours if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def network() -> Iterator[Callable[[int], list[Host]]]:
    """Make hosts on one switch; they are gone after the test."""
    made: list[Network] = []

    def network(hosts: int) -> list[Host]:
        try:
            made.append(Network(hosts))
        except NotPermitted as error:
            pytest.skip(str(error))
        return made[-1].hosts

    yield network
    for one in made:
        one.close()


@pytest.fixture
def start(network: object) -> Iterator[Callable[..., Process]]:
    """Start a `Process` on a host; ended before the hosts are."""
    started: list[Process] = []

    def start(host: Host, name: str, *, ipv6: bool = False, ucx: dict[str, str] = QUICK_UCX, **options: object):
        address = f"[{host.address6}]" if ipv6 else host.address
        chosen = {
            "backends": ["nixl"],
            "shared": False,
            "limits": QUICK,
            "listen": f"tcp://{address}:0",
            "at_once": False,
            **options,
        }
        process = Process(name, enter=host.enter, env={**UCX, **ucx}, **chosen)
        started.append(process)
        return process

    yield start
    for process in started:
        process.discard()


def at_rest(*sides: Process, timeout_s: float = 15.0) -> None:
    """Wait until nothing is lent, under way or quarantined, and end the processes in an orderly way."""
    for side in sides:

        def busy(side: Process = side) -> dict[str, object]:
            metrics = side.metrics()
            names = ("transfers", "reservations", "staging_lent_bytes", "staging_waiting", "quarantined")
            return {name: metrics[name] for name in names if metrics[name]}

        until(lambda: not busy(), timeout_s, f"rest ({busy()})")
    for side in sides:
        assert side.end() == 0


def works_again(publisher: Process, reader: Process, way: str, timeout_s: float = 15.0) -> None:
    """A transfer succeeds, if not the first then one soon after."""
    outcomes: list[str] = []

    def fetched() -> bool:
        outcomes.append(reader.fetch_now(publisher.publish([7, 8]), [1, 2], timeout_s=5))
        return outcomes[-1] == way

    until(fetched, timeout_s, f"a transfer that works ({outcomes})")
    assert reader.blocks([1, 2]) == publisher.blocks([7, 8])
