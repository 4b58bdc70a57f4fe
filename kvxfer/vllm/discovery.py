"""Tells vllm-router, started with ``--vllm-discovery-address``, that this engine is there.

The router forgets an engine that has not been heard for five seconds. It hears of one only while the engine's front end
accepts connections. Message: one msgpack map from a DEALER socket, ``{type, http_address, zmq_address}``, with type P
or D (vllm-router 0.1.17). Imports msgspec, pyzmq and errors.
"""

from __future__ import annotations

import socket
import threading

import msgspec
import zmq
from vllm.logger import init_logger

from kvxfer.errors import InvalidRequest

_log = init_logger("vllm.kvxfer.discovery")

INTERVAL_S = 1.0
_CONNECT_TIMEOUT_S = 1.0


class Announcer:
    """A thread that speaks to one router until `close`."""

    def __init__(self, router: str, *, http_address: str, zmq_address: str, is_prefill: bool) -> None:
        self._router = router
        self._http = _host_and_port("http_address", http_address)
        _host_and_port("discovery_address", router)
        self._message = msgspec.msgpack.encode(
            {"type": "P" if is_prefill else "D", "http_address": http_address, "zmq_address": zmq_address}
        )
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvxfer-discovery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 1)  # a router that comes back hears of now, not of the past
        dealer.connect(f"tcp://{self._router}")
        was_up = False
        while not self._closed.wait(INTERVAL_S if was_up else INTERVAL_S / 4):
            is_up = self._front_end_is_up()
            if is_up and not was_up:
                _log.info("announcing this engine to the router at %s", self._router)
            was_up = is_up
            if is_up:
                try:
                    dealer.send(self._message, zmq.NOBLOCK)
                except zmq.Again:
                    _log.debug("the router at %s does not listen", self._router)
        dealer.close()
        context.term()

    def _front_end_is_up(self) -> bool:
        try:
            socket.create_connection(self._http, _CONNECT_TIMEOUT_S).close()
        except OSError:
            return False
        return True


def _host_and_port(name: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise InvalidRequest(f"{name} must be host:port, got {address!r:.80}")
    return host.strip("[]"), int(port)
