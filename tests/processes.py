"""A connector with one cache, in this process (`Side`) or in a peer process that is driven over a pipe (`Process`).

Run as a script it is the peer process.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import kvxfer
from kvxfer import CacheLayout, Connector, Fetch, Limits

SECRET = b"a secret of the tests"
SIZES = {
    "small": {"num_blocks": 64, "kv_heads": 4, "head_dim": 64},  # 16 KiB a block and layer
    "large": {"num_blocks": 1024, "kv_heads": 8, "head_dim": 128},  # 64 KiB a block and layer, 128 MiB in all
}
BLOCK_TOKENS = 16
SLACK_S = 6.0
"""What a loaded machine may add to a deadline before a test calls it missed."""


def make_layout(size: str = "small", **changes: Any) -> CacheLayout:
    """Two layers in one group called "full"."""
    options = {"layers": ["l0", "l1"], "dtype": "float16", "fingerprint": {"model": "tiny"}} | SIZES[size] | changes
    return CacheLayout.paged(block_tokens=BLOCK_TOKENS, **options)


def until(condition: Callable[[], Any], timeout_s: float = 20.0, what: str = "a condition") -> Any:
    """Poll until `condition` is true and return what it gave; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(0.002)
    return value


def segments(pid: int) -> list[str]:
    """Names of the shared-memory segments that process `pid` has made and that still exist."""
    return sorted(path.name for path in Path("/dev/shm").glob(f"kvxfer-*-{pid}-*"))


def descriptors() -> Counter[str]:
    """What this process's file descriptors point to."""
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{entry}").split(" ")[0]] += 1
        except OSError:  # the descriptor of the listing itself
            continue
    return Counter({name.split(":")[0] if ":[" in name else name: count for name, count in found.items()})


def backends_of(names: str | Sequence[str]) -> Any:
    """What `Connector(backends=)` takes: the fake of NCCL is not installed, and tests name it fake_nccl."""
    if "fake_nccl" not in names:
        return names
    from nccl_fake import FakeNcclBackend

    wanted = [names] if isinstance(names, str) else names
    return [FakeNcclBackend() if name == "fake_nccl" else name for name in wanted]


class Side:
    """A connector with one registered cache, and short verbs that take and return plain values."""

    def __init__(
        self,
        name: str,
        *,
        shared: bool = True,
        size: str = "small",
        fill: int | None = None,
        ways: tuple[str, ...] = ("mapped", "direct", "packed"),
        limits: dict[str, Any] | None = None,
        layout: dict[str, Any] | None = None,
        **connector: Any,
    ) -> None:
        """`fill` seeds random contents; None leaves zeros."""
        self.layout = make_layout(size, **(layout or {}))
        backends = os.environ.get("KVXFER_TEST_BACKEND", "auto")
        chosen = {"secret": SECRET, "ways": ways, "backends": backends, "limits": Limits(**(limits or {}))}
        chosen |= connector
        self.connector = Connector(name, **chosen | {"backends": backends_of(chosen["backends"])})
        try:
            self.arrays: dict[str, np.ndarray] = {}
            for index, region in enumerate(self.layout.regions):
                array = kvxfer.shared_empty(region.nbytes) if shared else np.zeros(region.nbytes, np.uint8)
                if fill is not None:
                    array[:] = np.frombuffer(np.random.default_rng([fill, index]).bytes(region.nbytes), np.uint8)
                self.arrays[region.name] = array
            self.cache = self.connector.register(self.arrays, self.layout)
        except BaseException:
            self.connector.close()
            raise
        self.leases: dict[bytes, kvxfer.Lease] = {}
        self.transfers: dict[int, kvxfer.Transfer] = {}

    def close(self) -> None:
        self.connector.close()

    # --- blocks ---------------------------------------------------------------------------------------------

    def rows(self, layer: str) -> np.ndarray:
        """A layer's blocks, one a row."""
        return self.arrays[layer].reshape(self.layout.groups[0].num_blocks, -1)

    def blocks(self, ids: list[int]) -> bytes:
        """The bytes of some blocks, layer by layer."""
        return b"".join(self.rows(layer)[ids].tobytes() for layer in self.arrays)

    def digest(self, ids: list[int] | None = None) -> bytes:
        """A checksum of some blocks, or of all memory."""
        found = hashlib.blake2b()
        for array in self.arrays.values():
            found.update(array if ids is None else array.reshape(len(self.rows("l0")), -1)[ids])
        return found.digest()

    def fill(self, ids: list[int], value: int) -> None:
        """Set every byte of some blocks."""
        for layer in self.arrays:
            self.rows(layer)[ids] = value

    # --- publish, fetch, reserve, send ----------------------------------------------------------------------

    def publish(self, ids: list[int], *, tokens: int | None = None, **options: Any) -> bytes:
        lease = self.cache.publish({"full": ids}, tokens=tokens or BLOCK_TOKENS * len(ids), **options)
        self.leases[bytes(lease.ticket)] = lease
        return bytes(lease.ticket)

    def issue(self, ids: list[int], **options: Any) -> bytes:
        """A ticket for blocks that are published under it later."""
        tokens = BLOCK_TOKENS * len(ids)
        return bytes(self.connector.issue(self.layout, {"full": ids}, tokens=tokens, **options))

    def release_ticket(self, ticket: bytes) -> None:
        """As a reader: this side will not fetch it."""
        self.connector.release(ticket)

    def churn(self, seconds: float, count: int, seed: int, pause_s: float) -> Iterator[list[tuple[int, bytes]]]:
        """Publish pairs of blocks that hold one value each, end the leases at random moments, and overwrite the blocks
        at once. `pause_s` lies between two ends at most. Yields values and tickets a round, and an empty list at the
        end."""
        random, value = np.random.default_rng(seed), 0
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            leases = []
            for index in range(count):
                value = value % 200 + 1
                self.fill([2 * index, 2 * index + 1], value)
                leases.append((value, self.publish([2 * index, 2 * index + 1])))
            yield leases
            for index in random.permutation(count):
                time.sleep(float(random.uniform(0, pause_s)))
                self.release(leases[index][1])
                self.fill([2 * int(index), 2 * int(index) + 1], 255)
        yield []

    def lease_state(self, ticket: bytes) -> str:
        return self.leases[ticket].state.value

    def released(self, ticket: bytes, timeout_s: float) -> bool:
        return self.leases[ticket].released.wait(timeout_s)

    def release(self, ticket: bytes) -> None:
        self.leases[ticket].release()

    def fetch(self, ticket: bytes, into: list[int], **options: Any) -> int:
        return self._keep(self.cache.fetch(ticket, into={"full": into}, **options))

    def fetch_now(self, ticket: bytes, into: list[int] | None = None, **options: Any) -> str:
        """Fetch (into block 0 by default) and return the outcome."""
        return self.outcome(self.fetch(ticket, [0] if into is None else into, **options))

    def reserve(self, ids: list[int], **options: Any) -> tuple[bytes, int]:
        reservation = self.cache.reserve({"full": ids}, tokens=BLOCK_TOKENS * len(ids), **options)
        return bytes(reservation.ticket), self._keep(reservation)

    def send(self, ticket: bytes, ids: list[int], **options: Any) -> int:
        return self._keep(self.cache.send(ticket, {"full": ids}, **options))

    def layer_ready(self, key: int, layer: str) -> None:
        self.transfers[key].layer_ready(layer)

    def state(self, key: int) -> str:
        return self.transfers[key].state.value

    def progress(self, key: int) -> float:
        """Share of a transfer's bytes that are in place."""
        return self.transfers[key].progress

    def cancel(self, key: int) -> None:
        self.transfers[key].cancel()

    def outcome(self, key: int, timeout_s: float = 20.0) -> str:
        """How a transfer ended: its way when it succeeded, else the name of its error."""
        try:
            return self.transfers[key].wait(timeout_s).way
        except kvxfer.KvxferError as error:
            return type(error).__name__

    def stats(self, key: int) -> dict[str, Any]:
        """What a transfer did so far."""
        return dataclasses.asdict(self.transfers[key].stats)

    def fetch_all(self, tickets: Sequence[bytes], each: int, **options: Any) -> list[str]:
        """Fetch all at once, `each` blocks from each ticket; the outcomes."""
        keys = [self.fetch(t, list(range(each * i, each * i + each)), **options) for i, t in enumerate(tickets)]
        return [self.outcome(key) for key in keys]

    def fetch_each(self, tickets: Mapping[int, bytes], **options: Any) -> list[str]:
        """Fetch all at once, each ticket's block into the block that it stands for; the outcomes."""
        keys = [self.fetch(ticket, [block], **options) for block, ticket in tickets.items()]
        return [self.outcome(key) for key in keys]

    def fetch_in_background(self, tickets: Sequence[bytes]) -> tuple[list[str], float]:
        """Fetch one after the other, each into a block of its own; outcomes, and how long the slowest took.

        Only looks whether they have ended: a thread that waits would do the work itself.
        """
        outcomes, slowest = [], 0.0
        for block, ticket in enumerate(tickets):
            started = time.monotonic()
            key = self.fetch(ticket, [block])
            until(self.transfers[key].done, 20)
            slowest = max(slowest, time.monotonic() - started)
            outcomes.append(self.outcome(key))
        return outcomes, slowest

    def forget(self) -> None:
        """Let go of transfers and leases that have ended, and of what nobody holds."""
        self.transfers.clear()
        self.leases.clear()
        gc.collect()

    def never_sees_deaths(self) -> None:
        """As if peers were on hosts of which nothing is known."""
        from kvxfer.backends.nixl import NixlLink

        NixlLink.alive = lambda self: None

    def hold_confirmations(self) -> None:
        """From now on fetches stop between their last byte and the reading of the lease word, until `let_confirm`."""
        confirm, self._let_confirm, self._held = Fetch._confirm, threading.Event(), threading.Event()

        def held(fetch: Fetch) -> None:
            self._held.set()
            self._let_confirm.wait(30)
            confirm(fetch)

        Fetch._confirm = held

    def confirmation_held(self) -> bool:
        """Whether a fetch waits for `let_confirm`."""
        return self._held.wait(10)

    def let_confirm(self) -> None:
        """Let fetches go on."""
        self._let_confirm.set()

    def _keep(self, transfer: kvxfer.Transfer) -> int:
        key = len(self.transfers)
        self.transfers[key] = transfer
        return key

    # --- what a process holds -------------------------------------------------------------------------------

    def endpoint(self) -> str:
        return self.connector.endpoint

    def metrics(self) -> dict[str, Any]:
        return dataclasses.asdict(self.connector.metrics)

    def descriptors(self) -> Counter[str]:
        return descriptors()

    def give_up_sessions(self) -> None:
        """As if every peer had been silent for too long; they do not hear of it."""
        node = self.connector._node
        reason = kvxfer.errors.PeerGone("given up by a test")
        node.on_progress(lambda: [node.channel.lose(session, reason) for session in list(node.directory.peers)])

    def breaches(self) -> list[str]:
        """What the fake of NCCL complains of."""
        from nccl_fake import breaches

        return breaches

    def communicators(self) -> int:
        """Communicators of the fake of NCCL that have not been aborted."""
        from nccl_fake import open_communicators

        return open_communicators()

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())

    def cpu_seconds(self) -> float:
        return time.process_time()

    def hold_gil(self, seconds: float) -> None:
        """Keep the main thread in calls that hold the GIL, each for a few tens of milliseconds."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            sum(range(2_000_000))

    def one_long_call(self) -> float:
        """A single call that holds the GIL for some hundred milliseconds; returns its seconds."""
        started = time.monotonic()
        sum(range(30_000_000))
        return time.monotonic() - started


class Process:
    """A `Side` in a process of its own. Its verbs are called like methods; `post` starts one and `answer` waits."""

    def __init__(
        self,
        name: str,
        *,
        enter: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        at_once: bool = True,
        **options: Any,
    ) -> None:
        """`enter` is a command that runs the process elsewhere; `env` goes on top of this process's environment.

        Without `at_once` the first answer waits until the process has started, so that several start side by side.
        """
        self._pipe, theirs = Pipe()
        with theirs:
            self._popen = subprocess.Popen(
                [*enter, sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        self.pid = self._popen.pid
        self._pipe.send((name, options))
        self._starting = True
        if at_once:
            self._start()

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        if verb.startswith("_"):
            raise AttributeError(verb)

        def call(*args: Any, **options: Any) -> Any:
            self.post(verb, *args, **options)
            return self.answer()

        return call

    def _start(self) -> None:
        if self._starting:
            self._starting = False
            self.answer()

    def post(self, verb: str, *args: Any, **options: Any) -> None:
        self._start()
        self._pipe.send((verb, args, options))

    def answer(self, timeout_s: float = 60.0) -> Any:
        assert self._pipe.poll(timeout_s), f"no answer from process {self.pid} within {timeout_s:g} s"
        value = self._pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken the process apart."""
        self._popen.kill()
        self._popen.wait()

    def kill_group(self) -> None:
        """SIGKILL to its whole process group."""
        os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread stands still."""
        self._start()
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        tasks = Path(f"/proc/{self.pid}/task")
        until(lambda: all("(stopped)" in (task / "status").read_text() for task in tasks.iterdir()), what="stopped")

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self, timeout_s: float = 15.0) -> int:
        """Close the connector and exit; returns the exit code."""
        self._pipe.close()
        return self._popen.wait(timeout_s)

    def discard(self) -> None:
        """End the process in whatever state it is."""
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
        self._pipe.close()


def serve(pipe: Connection) -> None:
    """The peer process: carry out verbs until the pipe closes."""
    name, options = pipe.recv()
    try:
        side = Side(name, **options)
    except Exception as error:
        pipe.send(error)
        return
    pipe.send(None)
    while True:
        try:
            verb, args, options = pipe.recv()
        except EOFError:
            break
        try:
            answer = getattr(side, verb)(*args, **options)
            for part in answer if isinstance(answer, Iterator) else [answer]:
                pipe.send(part)
        except Exception as error:
            pipe.send(error)
    side.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
