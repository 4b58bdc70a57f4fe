"""One NIXL agent: descriptor lists, requests, and NIXL's errors turned into ours.

The agent is made through NIXL's bindings, since its Python class fixes the pause of the progress thread at 0, which
burns a core at rest. NIXL cannot call an operation back: releasing a request or dropping the peer leaves its bytes
under way (seen with UCX over TCP and a peer that stands still), so a `Request` ends when NIXL says so and not before.

Imports base.py and errors and, at first use, nixl.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kvxfer.backends.base import Direction, Operation
from kvxfer.errors import BackendError, Closed, MissingExtra, PeerGone

_log = logging.getLogger(__name__)

HOST = -1  # the device number of host memory
_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
_PAUSE_US = 50_000  # of the progress thread at rest; events wake it, so nothing waits for this
# Without these, UCX over TCP waits for a host that is cut off until the kernel gives up, a quarter of an hour or never.
# What the environment says (UCX_TCP_USER_TIMEOUT=...) comes first.
_UCX_CONFIG = {
    "TCP_USER_TIMEOUT": "10s",  # for bytes that were sent and not acknowledged
    "TCP_KEEPIDLE": "5s",  # and for a connection on which nothing is sent
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "5",
    "TCP_SYN_CNT": "3",
}
_TRANSPORTS = ("tcp", "rc", "dc", "ud", "ib", "all")  # those over which UCX notices that a peer is gone


@dataclass(eq=False)
class Connection:
    """A peer's agent that has been loaded. Once NIXL has lost it, only loading the agent anew gives another."""

    name: str
    lost: bool = False
    links: int = 0
    under_way: int = 0  # requests that have not ended


class Request(Operation):
    """A posted request; its handle is given back once it has ended."""

    def __init__(self, agent: Agent, handle: int, connection: Connection, *, ended: bool) -> None:
        self._agent, self._handle, self.connection = agent, handle, connection
        self._ended = ended
        if ended:
            agent.release(self)

    @property
    def handle(self) -> int:
        """NIXL's handle."""
        return self._handle

    def poll(self) -> bool:
        if not self._ended:
            try:
                self._ended = not self._agent.is_under_way(self)
            except (PeerGone, BackendError):
                self._ended = True
                raise
            finally:
                if self._ended:
                    self._agent.release(self)
        return self._ended


class Agent:
    """Thread-safe: NIXL's strict mode, in which a call waits for another that moves bytes."""

    def __init__(self) -> None:
        """Raises MissingExtra without NIXL, BackendError when its UCX backend does not start."""
        self._nixl = nixl = _bindings()
        _check_transports(os.environ.get("UCX_TLS", "all"))
        self.name = f"kvxfer-{secrets.token_hex(8)}"
        self.version = _version(nixl)
        self._errors = tuple(kind for name, kind in vars(nixl).items() if name.startswith("nixl") and _is_error(kind))
        self._lost = (nixl.nixlRemoteDisconnectError, nixl.nixlCancelledError)
        self._requests: set[Request] = set()
        self._lock = threading.Lock()
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.pthrDelay, config.syncMode = _PAUSE_US, nixl.NIXL_THREAD_SYNC_STRICT
        with self._translated("NIXL's UCX backend does not start"):
            self._agent = nixl.nixlAgent(self.name, config)
            self._backends = [self._agent.createBackend("UCX", {"engine_config": _joined(_UCX_CONFIG)})]

    # --- memory ---------------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int, device: int) -> bytes:
        """Make memory reachable; `device` is a GPU's number or HOST. Returns what a peer has to `load`."""
        where = "host memory" if device == HOST else f"memory of GPU {device}"
        with self._translated(f"NIXL cannot register {nbytes} bytes of {where}"):
            span = self._list(self._nixl.nixlRegDList, np.array([[address, nbytes]], np.uint64), device)
            self._open.registerMem(span, self._backends)
            return self._open.getLocalPartialMD(span, False, self._backends)

    def deregister(self, address: int, nbytes: int, device: int) -> None:
        """Withdraw a registration."""
        with self._translated("NIXL cannot deregister memory"):
            span = self._list(self._nixl.nixlRegDList, np.array([[address, nbytes]], np.uint64), device)
            self._open.deregisterMem(span, self._backends)

    def _list(self, kind: type, spans: np.ndarray, device: int) -> Any:
        rows = np.empty((len(spans), 3), np.uint64)
        rows[:, :2], rows[:, 2] = spans, max(0, device)
        return kind(self._nixl.DRAM_SEG if device == HOST else self._nixl.VRAM_SEG, rows)

    # --- peers ----------------------------------------------------------------------------------------------

    def address(self) -> bytes:
        """How a peer's agent connects to this one: what it has to `load`."""
        with self._translated("NIXL has no connection information"):
            return self._open.getLocalPartialMD(self._nixl.nixlRegDList(self._nixl.DRAM_SEG), True, self._backends)

    def load(self, metadata: bytes, name: str) -> None:
        """Take in what the peer's agent `name` said of its address or of its memory."""
        with self._translated("the peer's NIXL metadata cannot be loaded"):
            loaded = self._open.loadRemoteMD(metadata)
        if loaded != name.encode():
            raise BackendError(f"the peer's NIXL metadata is of agent {loaded!r:.80}, not of {name!r:.80}")

    def forget(self, name: str) -> None:
        """Drop a peer's agent."""
        try:
            with self._translated(""):
                self._open.invalidateRemoteMD(name)
        except (BackendError, PeerGone, Closed) as error:  # it may be gone already
            _log.debug("forgetting agent %s: %s", name, error)

    # --- requests -------------------------------------------------------------------------------------------

    def post(
        self, direction: Direction, runs: np.ndarray, peer: Connection, *, local_device: int, remote_device: int
    ) -> Request:
        """Start moving runs, as `Link.post` takes them. Raises PeerGone for a connection that has been lost."""
        if peer.lost:
            raise PeerGone("NIXL has lost the connection to the peer's agent")
        operation = self._nixl.NIXL_READ if direction is Direction.READ else self._nixl.NIXL_WRITE
        with self._translated(f"NIXL cannot {direction.value}", peer):
            local = self._list(self._nixl.nixlXferDList, runs[:, [0, 2]], local_device)
            remote = self._list(self._nixl.nixlXferDList, runs[:, [1, 2]], remote_device)
            handle = self._open.createXferReq(operation, local, remote, peer.name, "", self._backends)
            try:
                status = self._open.postXferReq(handle, "")
            except self._errors:
                self._open.releaseXferReq(handle)
                raise
        ended = status != self._nixl.NIXL_IN_PROG
        with self._lock:
            peer.under_way += 1
        request = Request(self, handle, peer, ended=ended)
        if not ended:
            with self._lock:
                self._requests.add(request)
        return request

    def is_under_way(self, request: Request) -> bool:
        """Whether a posted request has not ended. Raises PeerGone or BackendError when it has failed."""
        with self._translated("a NIXL request failed", request.connection):
            return self._open.getXferStatus(request.handle) == self._nixl.NIXL_IN_PROG

    def release(self, request: Request) -> None:
        """Give a request's handle back."""
        with self._lock:
            self._requests.discard(request)
            request.connection.under_way -= 1
        try:
            with self._translated(""):
                self._open.releaseXferReq(request.handle)
        except (BackendError, PeerGone, Closed) as error:
            _log.debug("releasing a request: %s", error)

    def close(self) -> None:
        """End the agent and its connections, and with them everything under way; idempotent."""
        with self._lock:
            requests, self._requests = list(self._requests), set()
        for request in requests:
            self.release(request)
        self._agent = None

    @property
    def _open(self) -> Any:
        agent = self._agent
        if agent is None:
            raise Closed("the NIXL backend is closed")
        return agent

    @contextmanager
    def _translated(self, what: str, peer: Connection | None = None) -> Iterator[None]:
        try:
            yield
        except self._lost as error:
            if peer is not None:
                peer.lost = True
            raise PeerGone(f"NIXL lost the peer: {error}") from error
        except self._errors as error:
            raise BackendError(f"{what}: {error}") from error


def _joined(config: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in config.items())


def _version(nixl: ModuleType) -> str:
    return importlib.metadata.version(nixl.__name__.split(".")[0].replace("_", "-"))


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


def _bindings() -> ModuleType:
    for package in _PACKAGES:
        try:
            found = importlib.import_module(f"{package}._bindings")
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)  # its import sets up chatter on standard output
        return found
    raise MissingExtra("this needs NIXL: pip install 'kvxfer[nixl]'")


def _check_transports(allowed: str) -> None:
    names = [name.strip().lstrip("\\") for name in allowed.split(",")]
    if names and not allowed.startswith("^") and not any(name.startswith(_TRANSPORTS) for name in names):
        raise BackendError(
            f"UCX_TLS={allowed} names no transport over which UCX notices that a peer is gone, and NIXL refuses to run "
            f"without: add tcp (UCX_TLS={allowed},tcp), which carries no bytes where shared memory does"
        )
