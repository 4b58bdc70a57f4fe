"""Lines: Unix sockets that carry the frames of a session between two processes of one host.

ZeroMQ hands every message to a thread of its own at either end, so that three sleeping threads are woken where a line
wakes one. A line's address is made of the port that was dialled and of a token from the answer: it is found where both
processes share a host's network and nothing stands between them, and else ZeroMQ goes on carrying everything.

A frame on a line is its length (4 bytes, little endian) and the frame. A line checks lengths and nothing else; who
speaks is for the channel to find out. Progress thread only, except `Line.send`. Imports progress.py.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import re
import socket
import struct
import threading
from collections.abc import Callable

from kvxfer.errors import ResourceExhausted
from kvxfer.progress import ProgressThread, guarded, need_descriptors

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 20  # asked of the kernel, which may give less
_MAX_WAITING = 1000  # frames that the other side does not take, as ZeroMQ's default
_MAX_UNHEARD = 64  # frames kept for the long way, should nobody have taken them here
_MAX_UNKNOWN = 64  # lines that no session has claimed yet
_CLAIMED_BY_S = 10.0  # from when they are taken in
_AGAIN_S = 1.0  # until a listener that could take nobody in listens anew
_BACKLOG = 256
_LAST_WORDS_S = 0.2  # for what still waits when a line is closed

Received = Callable[["Line", bytes], None]
Ended = Callable[["Line"], None]


def address_of(endpoint: str, token: bytes) -> str | None:
    """Where who listens at an endpoint of this host takes lines in: a name in the abstract namespace.

    Of a TCP endpoint the port counts, since a host has many addresses. None without a token.
    """
    port = re.fullmatch(r"tcp://.*:(\d+)", endpoint)
    digest = hashlib.blake2b(token + (port[1] if port else endpoint).encode(), digest_size=20)
    return f"\0kvxfer {digest.hexdigest()}" if token else None


class Line:
    """One end of a line."""

    def __init__(
        self, progress: ProgressThread, there: socket.socket, max_bytes: int, received: Received, ended: Ended
    ) -> None:
        self.unheard: list[bytes] | None = []  # all that was sent, until something comes; None once that is too much
        self._progress, self._socket, self._max_bytes = progress, there, max_bytes
        self._received, self._ended = received, ended
        self._waiting: collections.deque[memoryview] = collections.deque()
        self._writes = False  # whether this waits for the other side to take more
        self._buffer = bytearray()
        self._lock = threading.Lock()  # of what is sent
        there.setblocking(False)
        with contextlib.suppress(OSError):
            there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        progress.watch(there, self._turn)

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._socket.fileno() < 0

    def send(self, frame: bytes) -> bool:
        """Send, without blocking. False where this end is closed, or the other has not taken too many frames. Any
        thread."""
        with self._lock:
            if self.closed or len(self._waiting) >= _MAX_WAITING:
                return False
            if self.unheard is not None:
                self.unheard = [*self.unheard, frame] if len(self.unheard) < _MAX_UNHEARD else None
            self._waiting.append(memoryview(_LENGTH.pack(len(frame)) + frame))
            if len(self._waiting) == 1:
                self._push()
            blocked = bool(self._waiting)
        if blocked:
            self._progress.post(self._watch)
        return True

    def close(self) -> None:
        """Close this end; what was sent is delivered if the other side takes it soon. Idempotent."""
        with self._lock:
            if self.closed:
                return
            self._progress.unwatch(self._socket)
            with contextlib.suppress(OSError):
                if self._waiting:
                    self._socket.settimeout(_LAST_WORDS_S)
                    self._socket.sendall(b"".join(self._waiting), socket.MSG_NOSIGNAL)
            self._waiting.clear()
            _end(self._socket)

    def read(self) -> None:
        """Take what has come, if anything has."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        self._buffer += data
        with self._lock:
            self.unheard = None
        for frame in self._whole_frames():
            if not self.closed:
                guarded(functools.partial(self._received, self, frame))

    def _turn(self) -> None:
        with self._lock:
            self._push()
        self._watch()
        self.read()

    def _push(self) -> None:
        """Hand the kernel what it takes."""
        try:
            while self._waiting:
                frame = self._waiting[0]
                sent = self._socket.send(frame, socket.MSG_NOSIGNAL)
                if sent < len(frame):
                    self._waiting[0] = frame[sent:]
                    return
                self._waiting.popleft()
        except BlockingIOError:
            return
        except OSError:  # it has ended, and reading says so
            self._waiting.clear()
        except BaseException:  # an interrupt: how much of a frame has left is not known
            self._waiting.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            raise

    def _watch(self) -> None:
        """Be told when the kernel takes more, where something waits for that."""
        writes = bool(self._waiting)
        if self._writes != writes and not self.closed:
            self._writes = writes
            self._progress.watch(self._socket, self._turn, writes=writes)

    def _whole_frames(self) -> list[bytes]:
        frames, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._buffer, start)
            if nbytes > self._max_bytes:
                self._end()
                return []
            end = start + _LENGTH.size + nbytes
            if end > len(self._buffer):
                break
            frames.append(bytes(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return frames

    def _end(self) -> None:
        self.close()
        self._ended(self)


class LineListener:
    """Takes lines in."""

    def __init__(
        self, progress: ProgressThread, address: str, max_bytes: int, received: Received, ended: Ended
    ) -> None:
        """Raises OSError where the address is taken."""
        self._progress, self._address, self._max_bytes = progress, address, max_bytes
        self._received, self._ended = received, ended
        self._unknown: collections.OrderedDict[Line, None] = collections.OrderedDict()
        self._socket: socket.socket | None = None
        self._closed = False
        self._listen()

    @property
    def takes_in(self) -> bool:
        """Whether anybody who dials would be taken in."""
        return self._socket is not None

    def known(self, line: Line) -> None:
        """Somebody else sees to the line from now on."""
        self._unknown.pop(line, None)

    def close(self) -> None:
        """Stop listening, and close the lines that nobody has claimed."""
        self._closed = True
        self._stop()
        for line in list(self._unknown):
            self._show_out(line)

    def _listen(self) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)
            listening.bind(self._address)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        self._socket = listening
        self._progress.watch(listening, self._accept)

    def _listen_again(self) -> None:
        if not self._closed:
            try:
                self._listen()
            except OSError:
                self._progress.call_later(_AGAIN_S, self._listen_again)

    def _stop(self) -> None:
        if self._socket is not None:
            self._progress.unwatch(self._socket)
            _end(self._socket)
            self._socket = None

    def _accept(self) -> None:
        try:
            there, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: whoever has dialled goes the long way
            self._stop()
            self._progress.call_later(_AGAIN_S, self._listen_again)
            return
        line = Line(self._progress, there, self._max_bytes, self._received, self._gone)
        self._unknown[line] = None
        line.read()  # what was sent with it, before others dial
        while len(self._unknown) > _MAX_UNKNOWN:
            self._show_out(next(iter(self._unknown)))
        if line in self._unknown:
            self._progress.call_later(_CLAIMED_BY_S, lambda: self._show_out(line))

    def _show_out(self, line: Line) -> None:
        if line in self._unknown:
            del self._unknown[line]
            line.close()

    def _gone(self, line: Line) -> None:
        self._unknown.pop(line, None)
        self._ended(line)


def _end(ends: socket.socket) -> None:
    """Close a socket for everyone: a forked child may have it, too."""
    with contextlib.suppress(OSError):
        ends.shutdown(socket.SHUT_RDWR)
    ends.close()


def dial(progress: ProgressThread, address: str, max_bytes: int, received: Received, ended: Ended) -> Line | None:
    """A line to whoever listens there; None where nobody does."""
    try:
        need_descriptors(1)
        there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except (OSError, ResourceExhausted):
        return None
    try:
        there.setblocking(False)
        there.connect(address)
    except OSError:
        there.close()
        return None
    return Line(progress, there, max_bytes, received, ended)
