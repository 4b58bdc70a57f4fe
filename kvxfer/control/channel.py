"""Sessions with peers over ZeroMQ: sealed, numbered, size-limited messages, with heartbeats.

One ROUTER socket listens; one DEALER dials each peer; a session goes both ways over one pair, or between processes of
one host over a line (local.py), which the dialling side opens before its first message. Everything here runs on
the progress thread. What is malformed, too large, unsigned, replayed or of no session is dropped, counted and logged,
and everyone else is served on.

Frame: header (magic, protocol, kind, sequence number, session id; little endian), HMAC, msgpack payload.

Imports pyzmq, auth.py, local.py, messages.py, progress.py.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import re
import secrets
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from kvxfer.control import auth, local, messages
from kvxfer.control.messages import Bye, Hello, Identity, Message, Ping, Refused, Welcome
from kvxfer.errors import (
    AuthenticationError,
    InvalidRequest,
    KvxferError,
    PeerGone,
    ProtocolMismatch,
    ResourceExhausted,
)
from kvxfer.progress import ProgressThread, Timer, need_descriptors

_log = logging.getLogger(__name__)

_MAGIC = b"KVX\x01"
_HEADER = struct.Struct("<4sHHQ16s")
_HANDSHAKE, _FROM_DIALER, _FROM_LISTENER = 0, 1, 2
_NO_SESSION = bytes(16)
_MAX_UNCONFIRMED = 256
_MAX_ENDED = 1024  # sessions whose last messages may still be under way
_MAX_REASON = 1000
_TOKEN_BYTES = 16
_DESCRIPTORS = 16  # that must be free when a channel is opened, libzmq's threads and the listening socket counted in
_DESCRIPTORS_OF_A_SOCKET = 4
_MAX_PER_TURN = 32  # messages taken from one socket before the others get their turn: a fraction of _MAX_UNCONFIRMED


Origin = zmq.Socket | bytes | local.Line  # where a frame came from: a DEALER, the ROUTER by this route, a line


class Listener(Protocol):
    """Who is told what happens on the channel. Called on the progress thread."""

    identity: Identity

    def session_opened(self, session: Session) -> None:
        """A peer has dialled this side."""

    def message_received(self, session: Session, message: Message) -> None:
        """A message of an open session."""

    def session_lost(self, session: Session, reason: PeerGone) -> None:
        """A peer has been silent for too long. What it still says about earlier transfers is delivered."""

    def session_closed(self, session: Session, reason: PeerGone) -> None:
        """A session has ended; it sends nothing more."""


class Session:
    """An authenticated conversation with one peer. Progress thread only, except `send`."""

    def __init__(self, channel: Channel, session_id: bytes, identity: Identity, keys: tuple[bytes, bytes]) -> None:
        self.identity = identity
        self.open = True
        self.lost = False  # silent for too long: kept only so that what was under way can be wound up
        self.said_bye = False  # the peer closed in an orderly way: it writes nothing more
        self.said_goodbye = False  # this side did
        self.id = session_id
        self.last_received = self.last_sent = time.monotonic()
        self.order = threading.Lock()  # of what is sent
        self.unsent: collections.deque[bytes] = collections.deque()  # what waits for the progress thread
        self._channel = channel
        self._send_key, self._receive_key = keys
        self._sent = self._received = 0
        self.socket: zmq.Socket | None = None  # the DEALER of a session that this side dialled
        self.route: bytes | None = None  # the ROUTER's address of a session that the peer dialled
        self.line: local.Line | None = None  # between processes of one host, in their place

    @property
    def hears(self) -> int:
        """The kind of frames that this end receives."""
        return _FROM_LISTENER if self.socket is not None else _FROM_DIALER

    def send(self, message: Message) -> None:
        """Send, without blocking. A peer that takes no messages loses its session; a closed session drops.

        Any thread: over a line the message leaves at once, else from the progress thread.
        """
        if self.open:
            self._channel.send(self, message)

    def close(self, reason: str = "closed by this side") -> None:
        """Say goodbye and end the session."""
        if self.open:
            self.said_goodbye = True
            self.send(Bye())
            self._channel.drop(self, PeerGone(reason))

    def seal(self, payload: bytes) -> bytes:
        self._sent += 1
        kind = _FROM_DIALER if self.socket is not None else _FROM_LISTENER
        header = _HEADER.pack(_MAGIC, messages.PROTOCOL_VERSION, kind, self._sent, self.id)
        return b"".join((header, auth.mac(self._send_key, header, payload), payload))

    def unseal(self, header: bytes, sequence: int, seal: bytes, payload: bytes) -> None:
        """AuthenticationError unless this is the peer's next message."""
        auth.check_mac(self._receive_key, seal, header, payload)
        if sequence <= self._received:
            raise AuthenticationError(f"message {sequence} came after message {self._received}: replayed")
        self._received = sequence
        self.last_received = time.monotonic()


class _Dial:
    """A session in the making, on the dialling side."""

    def __init__(
        self, endpoint: str, socket: zmq.Socket, nonce: bytes, opened: Callable, failed: Callable, timer: Timer
    ) -> None:
        self.endpoint, self.socket, self.nonce = endpoint, socket, nonce
        self.opened, self.failed, self.timer = opened, failed, timer


class Channel:
    """This process's end of the control channel. Progress thread only, except `send` and `dropped`."""

    def __init__(
        self,
        progress: ProgressThread,
        listener: Listener,
        *,
        secret: bytes,
        max_message_bytes: int,
        heartbeat_s: float,
        peer_timeout_s: float,
    ) -> None:
        self.dropped: collections.Counter[str] = collections.Counter()
        self._progress = progress
        self._listener = listener
        self._key = auth.derive(secret, "kvxfer channel")
        self._max_bytes, self._max_frame_bytes = max_message_bytes, 2 * max_message_bytes + 4096
        self._heartbeat_s, self._peer_timeout_s = heartbeat_s, peer_timeout_s
        need_descriptors(_DESCRIPTORS)
        self._context = zmq.Context()
        self._router: zmq.Socket | None = None
        # By id and by who sends: a connector that dials itself holds both ends of a session.
        self._sessions: dict[tuple[bytes, int], Session] = {}
        self._unconfirmed: collections.OrderedDict[bytes, Session] = collections.OrderedDict()
        self._ended: collections.OrderedDict[tuple[bytes, int], Session] = collections.OrderedDict()
        self._dials: dict[zmq.Socket, _Dial] = {}
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._lines: local.LineListener | None = None
        self._speakers: dict[local.Line, Session] = {}
        self._heart: Timer | None = None
        self._last_warning: dict[str, float] = {}

    # --- opening and closing --------------------------------------------------------------------------------

    def listen(self, endpoint: str) -> str:
        """Bind the ROUTER; returns the endpoint with the real port. Raises InvalidRequest, ResourceExhausted."""
        self._router = self._socket(zmq.ROUTER, endpoint)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._router.bind(re.sub(r":0$", ":*", endpoint))
        except zmq.ZMQError as error:
            raise InvalidRequest(f"cannot listen on {endpoint!r}: {error}") from error
        self._progress.watch(self._router, lambda: self._read(self._router))
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        with contextlib.suppress(OSError):  # where there are no such sockets everything goes over ZeroMQ
            address = local.address_of(bound, self._token)
            self._lines = local.LineListener(
                self._progress, address, self._max_frame_bytes, self._read_line, self._end_line
            )
        return bound

    def dial(
        self,
        endpoint: str,
        identity: Identity,
        timeout_s: float,
        opened: Callable[[Session], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """Open a session; one of the two calls is made, once."""
        try:
            socket = self._socket(zmq.DEALER, endpoint)
        except ResourceExhausted as error:
            failed(error)
            return
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            failed(PeerGone(f"{endpoint!r} cannot be dialled: {error}"))
            return
        nonce = secrets.token_bytes(auth.NONCE_BYTES)
        hello = Hello(protocol=messages.PROTOCOL_VERSION, nonce=nonce, identity=identity)
        reason = (
            f"no answer from {endpoint} within {timeout_s:g} s: is the peer running, and does it have the same secret?"
        )
        timer = self._progress.call_later(timeout_s, lambda: self._end_dial(socket, PeerGone(reason)))
        self._dials[socket] = _Dial(endpoint, socket, nonce, opened, failed, timer)
        self._progress.watch(socket, lambda: self._read(socket))
        self._post(socket, None, self._seal_handshake(self._key, messages.encode(hello)))

    def close(self, *, goodbye: bool = True) -> None:
        """End every session and every socket; without goodbye where something may still be written into peers."""
        for dial in list(self._dials.values()):
            self._end_dial(dial.socket, PeerGone("this side closed"))
        for session in list(self._sessions.values()):
            if goodbye:
                session.close()
            else:
                self.drop(session, PeerGone("closed by this side"))
        if self._lines is not None:
            self._lines.close()
        if self._router is not None:
            self._progress.unwatch(self._router)
            self._router.close()
        if self._heart is not None:
            self._heart.cancel()
        self._context.term()

    def drop(self, session: Session, reason: PeerGone) -> None:
        """End a session without a word to the peer."""
        session.open = False
        confirmed = self._sessions.pop((session.id, session.hears), None) is not None
        self._ended[session.id, session.hears] = session
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        if self._unconfirmed.get(session.id) is session:
            del self._unconfirmed[session.id]
        self._close_line(session)
        if session.socket is not None:
            self._progress.unwatch(session.socket)
            session.socket.close()
        if confirmed:
            self._listener.session_closed(session, reason)

    def lose(self, session: Session, reason: PeerGone) -> None:
        """Give a session up but go on listening: what was under way can still be wound up."""
        if session.open and not session.lost:
            session.lost = True
            self._listener.session_lost(session, reason)

    def send(self, session: Session, message: Message) -> None:
        payload = messages.encode(message)
        self._check_size(payload)
        with session.order:
            session.unsent.append(payload)
            sent = self._send_unsent(session)
        if not sent:
            self._progress.do(lambda: self.drop(session, PeerGone(f"{session.identity.name} does not take messages")))

    def _send_unsent(self, session: Session) -> bool:
        """Send what is to be sent, in the order of the calls; where only the progress thread can, it does so soon.
        False where the peer takes no more. Under the session's lock."""
        while session.unsent:
            line = session.line
            by_line = line is not None and not line.closed
            if not by_line and not self._progress.is_current:
                self._progress.post(lambda: self._flush(session))
                return True
            payload = session.unsent.popleft()  # first: an interrupt may lose a message, but not send it twice
            frame = session.seal(payload)
            if not by_line:
                sent = self._post(session.socket or self._router, session.route, frame)
            elif not (sent := line.send(frame)) and line.closed:  # it has come to its end meanwhile
                session.unsent.appendleft(payload)
                continue
            if not sent:
                return False
            session.last_sent = time.monotonic()
        return True

    def _flush(self, session: Session) -> None:
        with session.order:
            sent = not session.open or self._send_unsent(session)
        if not sent:
            self.drop(session, PeerGone(f"{session.identity.name} does not take messages"))

    # --- reading --------------------------------------------------------------------------------------------

    def _read(self, socket: zmq.Socket) -> None:
        for _ in range(_MAX_PER_TURN):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            except zmq.ZMQError:  # closed by what an earlier message led to
                return
            route = frames[0] if socket is self._router else None
            if len(frames) == (1 if route is None else 2):
                self._read_frame(socket if route is None else route, frames[-1])
            else:
                self._drop_message("AuthenticationError", f"{len(frames)} frames are no kvxfer message")
            if socket.closed:
                return

    def _read_line(self, line: local.Line, frame: bytes) -> None:
        self._read_frame(line, frame)
        if line not in self._speakers and not line.closed:  # whoever dialled it knows no session of this side
            self._lines.known(line)
            line.close()

    def _read_frame(self, origin: Origin, frame: bytes) -> None:
        try:
            self._take(origin, frame)
        except (AuthenticationError, msgspec.MsgspecError, KvxferError) as error:
            self._drop_message(type(error).__name__, error)

    def _take(self, origin: Origin, data: bytes) -> None:
        if len(data) < _HEADER.size + auth.MAC_BYTES:
            raise AuthenticationError(f"{len(data)} bytes are no kvxfer message")
        header, rest = data[: _HEADER.size], data[_HEADER.size :]
        seal, payload = rest[: auth.MAC_BYTES], rest[auth.MAC_BYTES :]
        magic, version, kind, sequence, session_id = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise AuthenticationError(f"magic {magic!r} is not kvxfer's")
        if kind == _HANDSHAKE:
            self._check_size(payload)
            self._take_handshake(origin, header, seal, payload)
            return
        messages.check_protocol(version)
        session = self._sessions.get((session_id, kind))
        if session is None and kind == _FROM_DIALER:
            session = self._unconfirmed.get(session_id)
        if session is None and (session_id, kind) in self._ended:
            self._take_late(self._ended[session_id, kind], origin, header, sequence, seal, payload)
            return
        if session is None or not self._speaks_for(origin, session):
            raise AuthenticationError("a message of no open session")
        session.unseal(header, sequence, seal, payload)
        self._remember_way(session, origin)
        message = self._decode(session, payload)
        if self._unconfirmed.get(session_id) is session:
            self._confirm(self._unconfirmed.pop(session_id))
        self._deliver(session, message)

    def _speaks_for(self, origin: Origin, session: Session) -> bool:
        """Whether messages of the session may come that way."""
        if isinstance(origin, bytes):
            return session.socket is None
        if isinstance(origin, local.Line) and origin not in self._speakers:
            return session.socket is None and session.line is None
        return origin is (session.line if isinstance(origin, local.Line) else session.socket)

    def _remember_way(self, session: Session, origin: Origin) -> None:
        """Answers go the way that messages come."""
        if isinstance(origin, bytes):
            session.route = origin
            self._close_line(session)  # its other end has been given up
        elif isinstance(origin, local.Line) and session.line is None:
            self._speakers[origin], session.line = session, origin
            self._lines.known(origin)

    def _take_late(
        self, session: Session, origin: Origin, header: bytes, sequence: int, seal: bytes, payload: bytes
    ) -> None:
        """A message of a session that has ended here: it crossed the goodbye, or that was lost. Then the peer may wait
        for nothing else, since what this side may still write it cannot know. Say it again."""
        session.unseal(header, sequence, seal, payload)
        if session.said_goodbye and isinstance(origin, bytes):
            self._post(self._router, origin, session.seal(messages.encode(Bye())))

    def _decode(self, session: Session, payload: bytes) -> Message:
        """The message. One that cannot be read is refused, to its sender and here: somebody may wait for an answer."""
        try:
            self._check_size(payload)
            return messages.decode(payload)
        except (msgspec.MsgspecError, KvxferError) as error:
            kind = type(error) if isinstance(error, KvxferError) else ProtocolMismatch
            reason = f"{self._listener.identity.name} cannot read what {session.identity.name} says: {error}"
            refused = Refused(transfer=messages.NO_TRANSFER, error=kind.__name__, reason=reason[:_MAX_REASON])
            session.send(refused)
            self._listener.message_received(session, refused)
            raise

    def _check_size(self, payload: bytes) -> None:
        if len(payload) > self._max_bytes:
            raise InvalidRequest(
                f"a message of {len(payload)} bytes is over the limit of {self._max_bytes}; raise max_message_bytes on "
                "both sides"
            )

    def _deliver(self, session: Session, message: Message) -> None:
        if isinstance(message, Bye):
            session.said_bye = True
            self.drop(session, PeerGone(f"{session.identity.name} closed"))
        elif not isinstance(message, Ping):
            self._listener.message_received(session, message)

    def _take_handshake(self, origin: Origin, header: bytes, seal: bytes, payload: bytes) -> None:
        if isinstance(origin, bytes):
            auth.check_mac(self._key, seal, header, payload)
            hello = messages.decode(payload)
            if isinstance(hello, Hello) and len(hello.nonce) == auth.NONCE_BYTES:
                self._answer(origin, hello)
                return
        elif isinstance(origin, zmq.Socket):
            welcome = messages.decode(payload)
            dial = self._dials.get(origin)
            if isinstance(welcome, Welcome) and dial is not None and len(welcome.nonce) == auth.NONCE_BYTES:
                keys = self._session_keys(dial.nonce, welcome.nonce)
                auth.check_mac(keys[1], seal, header, payload)
                self._open_dialled(dial, welcome, keys)
                return
        raise AuthenticationError("an unexpected handshake message")

    def _answer(self, route: bytes, hello: Hello) -> None:
        nonce, session_id = secrets.token_bytes(auth.NONCE_BYTES), secrets.token_bytes(16)
        from_dialer, from_listener = self._session_keys(hello.nonce, nonce)
        session = Session(self, session_id, hello.identity, (from_listener, from_dialer))
        session.route = route
        if hello.protocol == messages.PROTOCOL_VERSION:  # else the answer only tells the peer our version
            self._unconfirmed[session_id] = session
        while len(self._unconfirmed) > _MAX_UNCONFIRMED:
            self._unconfirmed.popitem(last=False)
        welcome = Welcome(
            protocol=messages.PROTOCOL_VERSION,
            nonce=nonce,
            session=session_id,
            identity=self._listener.identity,
            line=self._token if self._lines is not None and self._lines.takes_in else b"",
        )
        self._post(self._router, route, self._seal_handshake(from_listener, messages.encode(welcome)))

    def _open_dialled(self, dial: _Dial, welcome: Welcome, keys: tuple[bytes, bytes]) -> None:
        try:
            messages.check_protocol(welcome.protocol)
        except KvxferError as error:
            self._end_dial(dial.socket, error)
            return
        del self._dials[dial.socket]
        dial.timer.cancel()
        session = Session(self, welcome.session, welcome.identity, keys)
        session.socket = dial.socket
        self._register(session)
        self._dial_line(session, local.address_of(dial.endpoint, welcome.line))
        dial.opened(session)

    def _dial_line(self, session: Session, address: str | None) -> None:
        if address is None:
            return
        line = local.dial(self._progress, address, self._max_frame_bytes, self._read_line, self._end_line)
        if line is not None:
            self._speakers[line], session.line = session, line

    def _close_line(self, session: Session) -> None:
        with session.order:
            line, session.line = session.line, None
        if line is not None:
            del self._speakers[line]
            line.close()

    def _end_line(self, line: local.Line) -> None:
        """A line has come to its end. Nobody took what was sent: it goes the long way. Else its process has ended, or
        has let go of the session without a word."""
        session = self._speakers.pop(line, None)
        if session is None:
            return
        with session.order:
            session.line = None
        if session.socket is not None and line.unheard is not None:
            for frame in line.unheard:
                self._post(session.socket, None, frame)
        else:
            self.lose(session, PeerGone(f"{session.identity.name} has closed its end of the connection"))

    def _confirm(self, session: Session) -> None:
        self._register(session)
        self._listener.session_opened(session)

    def _register(self, session: Session) -> None:
        self._sessions[session.id, session.hears] = session
        if self._heart is None:
            self._heart = self._progress.call_later(self._heartbeat_s / 2, self._beat)

    def _end_dial(self, socket: zmq.Socket, error: KvxferError) -> None:
        dial = self._dials.pop(socket, None)
        if dial is not None:
            dial.timer.cancel()
            self._progress.unwatch(socket)
            socket.close()
            dial.failed(error)

    # --- small parts ----------------------------------------------------------------------------------------

    def _beat(self) -> None:
        now = time.monotonic()
        for session in list(self._sessions.values()):
            silent = now - session.last_received
            if session.lost:
                continue
            if silent > self._peer_timeout_s:
                self.lose(session, PeerGone(f"nothing heard from {session.identity.name} for {silent:.1f} s"))
            elif now - session.last_sent >= self._heartbeat_s:
                session.send(Ping())
        self._heart = self._progress.call_later(self._heartbeat_s / 2, self._beat) if self._sessions else None

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket:
        need_descriptors(_DESCRIPTORS_OF_A_SOCKET)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.IPV6, int(not _is_ipv4(endpoint)))
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)
        return socket

    def _post(self, socket: zmq.Socket, route: bytes | None, data: bytes) -> bool:
        try:
            socket.send_multipart([data] if route is None else [route, data], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def _session_keys(self, dialer_nonce: bytes, listener_nonce: bytes) -> tuple[bytes, bytes]:
        """The keys of the two directions: from the dialer, from the listener."""
        return (
            auth.derive(self._key, "from dialer", dialer_nonce, listener_nonce),
            auth.derive(self._key, "from listener", dialer_nonce, listener_nonce),
        )

    def _seal_handshake(self, key: bytes, payload: bytes) -> bytes:
        header = _HEADER.pack(_MAGIC, messages.PROTOCOL_VERSION, _HANDSHAKE, 0, _NO_SESSION)
        return b"".join((header, auth.mac(key, header, payload), payload))

    def _drop_message(self, kind: str, error: Exception | str) -> None:
        self.dropped[kind] += 1
        now = time.monotonic()
        if now - self._last_warning.get(kind, -1e9) > 1.0:  # a flood must not become a flood of log lines
            self._last_warning[kind] = now
            _log.warning("dropped a control message (%d of this kind so far): %s", self.dropped[kind], error)


def _is_ipv4(endpoint: str) -> bool:
    """Whether the endpoint names an IPv4 address; with IPv6 switched on it would be shown in a mapped form."""
    return re.match(r"tcp://[0-9.]+:", endpoint) is not None
