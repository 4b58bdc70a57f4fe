"""Hosts on one machine: network namespaces, each with an address, /dev/shm and /sys of its own, joined by a switch.

A namespace lives as long as a process that stands in it, and that process ends when its standard input closes: so
everything here goes when the test process does, in whatever way it ends.
"""

from __future__ import annotations

import functools
import shutil
import subprocess

TOOLS = ("ip", "bridge", "tc", "nsenter", "unshare")
DEVICE = "eth0"
_OWN_MOUNTS = "mount -t sysfs none /sys && mount -t tmpfs -o size=2g none /dev/shm"  # UCX looks for devices in /sys


class NotPermitted(Exception):
    """This machine or its user cannot make hosts; the text says why."""


class _Namespace:
    def __init__(self, setup: str) -> None:
        try:
            self._holder = subprocess.Popen(
                ["unshare", "--net", "--mount", "sh", "-c", f"{setup} && echo ready && exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise NotPermitted(f"there is no {error.filename} command") from error
        if self._holder.stdout.readline() != "ready\n":
            reason = self._holder.communicate()[1].strip()
            raise NotPermitted(f"no network namespace: {reason}")
        self.pid = self._holder.pid
        self.enter = ("nsenter", f"--target={self.pid}", "--net", "--mount")  # in front of a command

    def run(self, command: str) -> str:
        """Run a command in here. Raises CalledProcessError with what it said."""
        done = subprocess.run([*self.enter, *command.split()], capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise NotPermitted(f"{command}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        self._holder.communicate()


class Host(_Namespace):
    """One host, on a port of the switch."""

    def __init__(self, switch: _Namespace, number: int) -> None:
        super().__init__(_OWN_MOUNTS)
        self._switch, self._port = switch, f"port{number}"
        self.address, self.address6 = f"10.77.0.{number}", f"fd77::{number}"
        switch.run(f"ip link add {self._port} type veth peer name {DEVICE} netns {self.pid}")
        switch.run(f"ip link set {self._port} master switch")
        switch.run(f"ip link set {self._port} up")
        self.run("ip link set lo up")
        self.run("sysctl -qw net.ipv6.conf.all.keep_addr_on_down=1")
        self.run(f"ip addr add {self.address}/24 dev {DEVICE}")
        self.run(f"ip addr add {self.address6}/64 dev {DEVICE} nodad")
        self.run(f"ip link set {DEVICE} up")

    def cut(self) -> None:
        """From now on the switch drops what this host sends and what is sent to it; nobody is told."""
        self._switch.run(f"bridge link set dev {self._port} state 0")

    def mend(self) -> None:
        """End what `cut` did."""
        self._switch.run(f"bridge link set dev {self._port} state 3")

    def link(self, *, up: bool) -> None:
        """Switch the host's interface off or on."""
        self.run(f"ip link set {DEVICE} {'up' if up else 'down'}")

    def limit(self, rate: str) -> None:
        """What the host can send at most, in tc's words (``1gbit``); and it can send in short bursts only."""
        self.run(f"tc qdisc replace dev {DEVICE} root tbf rate {rate} burst 256kb latency 50ms")

    def impair(self, how: str) -> None:
        """Delay or lose what the host sends, in netem's words. NotPermitted where the kernel has no netem."""
        self.run(f"tc qdisc replace dev {DEVICE} root netem {how}")

    def relieve(self) -> None:
        """End what `limit` or `impair` did."""
        self.run(f"tc qdisc del dev {DEVICE} root")


class Network:
    """Some hosts on one switch. Raises NotPermitted."""

    def __init__(self, hosts: int) -> None:
        self._switch = _Namespace("true")
        self.hosts: list[Host] = []
        try:
            self._switch.run("ip link add switch type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
            self._switch.run("ip link set switch up")
            for number in range(1, hosts + 1):
                self.hosts.append(Host(self._switch, number))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for namespace in [*self.hosts, self._switch]:
            namespace.close()


@functools.cache
def why_not() -> str:
    """Why no hosts can be made here; empty when they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no {', '.join(missing)} here"
    try:
        Network(1).close()
    except NotPermitted as error:
        return str(error)
    return ""
