"""File descriptors handed from one process of a host to another over a Unix socket.

A `DescriptorServer` listens on an abstract address, which the kernel removes with the process, so a killed one leaves
nothing behind. It answers a client of the same user that knows its token, which travels in the handles of the backend,
over the authenticated channel; `receive` is that client. Every exchange has a deadline, one client is served at a time,
and descriptors that were received are closed again whatever happens.

Protocol, over SOCK_SEQPACKET: the client sends the token and the number of an export (8 bytes, little endian). The
server answers packets in msgpack: an error, or the sizes of the next few descriptors, which come along as SCM_RIGHTS,
and how many are left after them.

Imports msgspec and errors.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvxfer.errors import BackendError, KvxferError, PeerGone

_log = logging.getLogger(__name__)

TOKEN_BYTES = 16
DEADLINE_S = 3.0  # of a whole exchange, on either side
BATCH = 32  # descriptors in one packet; the kernel takes 253
_MOST = 1 << 20  # descriptors of one export
_PACKET_BYTES = 4096
_REQUEST = struct.Struct(f"<{TOKEN_BYTES}sQ")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Export(Protocol):
    """What a server hands out under one number."""

    sizes: Sequence[int]

    def descriptor(self, index: int) -> int:
        """A new file descriptor, which the caller closes."""


class _Packet(msgspec.Struct, frozen=True, array_like=True):
    error: str
    sizes: list[int]
    left: int


class DescriptorServer:
    """Hands out descriptors of exports by number, on a thread of its own. `close` ends it and frees the address."""

    def __init__(self, find: Callable[[int], Export | None]) -> None:
        """`find` is called on the server's thread."""
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.address = f"kvxfer-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        self._find = find
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wake, self._stop = socket.socketpair()
        try:
            self._socket.bind(f"\0{self.address}")
            self._socket.listen(64)
        except OSError as error:
            for each in (self._socket, self._wake, self._stop):
                each.close()
            raise BackendError(f"no Unix socket could be opened to hand out GPU memory: {error}") from error
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="kvxfer-descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the socket; idempotent."""
        if not self._closed:
            self._closed = True
            self._stop.close()
            self._thread.join(DEADLINE_S + 1.0)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        with self._socket, self._wake:
            while True:
                if any(ready == self._wake.fileno() for ready, _ in poller.poll()):
                    return
                with contextlib.suppress(OSError):
                    client, _ = self._socket.accept()
                    with client:
                        self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        deadline = time.monotonic() + DEADLINE_S
        try:
            _, uid, _ = _CREDENTIALS.unpack(
                client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.getuid():
                return
            _arm(client, deadline)
            request = client.recv(_REQUEST.size + 1)
            if len(request) != _REQUEST.size:
                return
            token, number = _REQUEST.unpack(request)
            if not hmac.compare_digest(token, self.token):
                return
            self._hand_out(client, number, deadline)
        except (OSError, KvxferError) as error:
            _log.warning("GPU memory was not handed out: %s", error)

    def _hand_out(self, client: socket.socket, number: int, deadline: float) -> None:
        export = self._find(number)
        if export is None:
            _send(client, _Packet("the memory is not registered any more", [], 0), [], deadline)
            return
        sizes = export.sizes
        for first in range(0, len(sizes), BATCH):
            batch = list(sizes[first : first + BATCH])
            descriptors: list[int] = []
            try:
                for index in range(first, first + len(batch)):
                    descriptors.append(export.descriptor(index))
                _send(client, _Packet("", batch, len(sizes) - first - len(batch)), descriptors, deadline)
            except KvxferError as error:
                _send(client, _Packet(str(error), [], 0), [], deadline)
                return
            finally:
                _close_all(descriptors)


def receive(
    address: str, token: bytes, number: int, take: Callable[[int, int], None], *, deadline_s: float = DEADLINE_S
) -> None:
    """Ask a server for an export, and call ``take(descriptor, nbytes)`` for each of its descriptors, in order.

    Descriptors are closed after each call. Raises PeerGone when nobody listens there, BackendError for what cannot be
    had, or not within `deadline_s`, and what `take` raises.
    """
    deadline = time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            _arm(server, deadline)
            server.connect(f"\0{address}")
            _, uid, _ = _CREDENTIALS.unpack(
                server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.getuid():
                raise BackendError(f"the process that hands out GPU memory at {address} is user {uid}'s")
            server.send(_REQUEST.pack(token, number))
            left, seen = 1, 0
            while left:
                left, count = _receive_packet(server, take, deadline)
                seen += count
                if seen + left > _MOST or (left and not count):
                    raise BackendError(f"the peer announces {seen + left} pieces of memory in packets of {count}")
        except TimeoutError as error:
            raise BackendError(f"the peer did not hand out its GPU memory within {deadline_s:g} s") from error
        except (ConnectionError, FileNotFoundError) as error:
            raise PeerGone(f"the peer does not hand out its GPU memory: {error}") from error
        except OSError as error:
            raise BackendError(f"the peer's GPU memory could not be asked for: {error}") from error


def _receive_packet(
    server: socket.socket, take: Callable[[int, int], None], deadline: float
) -> tuple[int, int]:
    """Take what one packet brings; returns how many descriptors are left after it, and how many came."""
    _arm(server, deadline)
    room = array.array("i").itemsize * BATCH
    data, ancillary, flags, _ = server.recvmsg(_PACKET_BYTES, socket.CMSG_SPACE(room), socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    try:
        if not data:
            raise BackendError("the peer ended without a word: it is closing, or does not accept the token")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise BackendError("the peer sent more descriptors than fit, or this process has too many open")
        try:
            packet = msgspec.msgpack.decode(data, type=_Packet)
        except msgspec.MsgspecError as error:
            raise BackendError(f"the peer sent a malformed answer with its GPU memory: {error}") from error
        if packet.error:
            raise BackendError(f"the peer cannot hand out its GPU memory: {packet.error[:500]}")
        if len(packet.sizes) != len(descriptors) or packet.left < 0:
            raise BackendError(f"the peer sent {len(descriptors)} descriptors and {len(packet.sizes)} sizes")
        for descriptor, nbytes in zip(descriptors, packet.sizes, strict=True):
            take(descriptor, nbytes)
        return packet.left, len(descriptors)
    finally:
        _close_all(descriptors)


def _send(client: socket.socket, packet: _Packet, descriptors: Sequence[int], deadline: float) -> None:
    _arm(client, deadline)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    client.sendmsg([msgspec.msgpack.encode(packet)], rights)


def _arm(channel: socket.socket, deadline: float) -> None:
    """Let the next operation end by the deadline. Raises TimeoutError when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    channel.settimeout(left)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
