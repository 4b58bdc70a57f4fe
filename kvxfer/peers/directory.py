"""Who is out there: peers by session, and engines by name, dialled on demand.

Progress thread only, except `find`, which any thread may call.

Imports remote.py and control.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from kvxfer.backends.base import Backend
from kvxfer.control import auth
from kvxfer.control.channel import Channel, Session
from kvxfer.control.messages import Description, Identity, Message, Refused
from kvxfer.errors import DeadlineExceeded, InvalidTicket, KvxferError, PeerGone, by_name
from kvxfer.peers.remote import Peer, remember
from kvxfer.progress import ProgressThread
from kvxfer.ticket import Ticket

_log = logging.getLogger(__name__)

_MAX_LOST = 256
_UNUSABLE = "what %s has cannot be used: %s"

EngineKey = tuple[str, int]
Found = Callable[["Engine"], None]
Failed = Callable[[KvxferError], None]


class Engine:
    """Another engine: one peer for each rank that has been described. Immutable once complete."""

    def __init__(self, key: EngineKey, peers: dict[int, Peer]) -> None:
        self.key = key
        self.peers = peers
        self.joins: dict[tuple, object] = {}  # kept by whoever fetches or sends, as long as the engine is known

    @property
    def has_lost_links(self) -> bool:
        """Whether a rank has to be dialled anew."""
        return any(peer.link is not None and peer.link.lost for peer in self.peers.values())


class _Search:
    """An engine being dialled: who waits for it, and which ranks are still to be described."""

    def __init__(self, key: EngineKey) -> None:
        self.key = key
        self.waiting: list[tuple[Found, Failed]] = []
        self.peers: dict[int, Peer] = {}
        self.missing: set[int] | None = None  # None until the first peer has told the members


class Directory:
    """All peers of this connector."""

    def __init__(
        self,
        progress: ProgressThread,
        backends: Mapping[str, Backend],
        describe: Callable[[bool], Description],
        connected: Callable[[Peer], None],
        *,
        dial_timeout_s: float,
        pulse_s: float,
    ) -> None:
        self._progress = progress
        self._backends = backends
        self._describe = describe
        self._connected = connected
        self._dial_timeout_s = dial_timeout_s
        self._pulse_s = pulse_s
        self._pulsing = False
        self.channel: Channel | None = None
        self.identity: Identity | None = None
        self.peers: dict[Session, Peer] = {}
        self.lost: dict[Session, Peer] = {}  # silent for too long, neither closed nor known to be dead
        self._engines: dict[EngineKey, Engine] = {}
        self._searches: dict[EngineKey, _Search] = {}
        self._reached: dict[str, Peer] = {}  # by the endpoint that was dialled
        self._reaching: dict[str, list[tuple[Callable[[Peer], None], Failed]]] = {}

    def find(self, ticket: Ticket) -> Engine | None:
        """The ticket's engine when all its ranks are at hand. Any thread."""
        engine = self._engines.get((ticket.engine, ticket.generation))
        return None if engine is None or engine.has_lost_links else engine

    def look_up(self, ticket: Ticket, found: Found, failed: Failed) -> None:
        """Find the ticket's engine, dialling it where necessary; one of the two calls is made, once."""
        key = (ticket.engine, ticket.generation)
        self._look_at_peers()
        engine = self._engines.get(key)
        if engine is not None:
            found(engine)
            return
        search = self._searches.get(key)
        if search is None:
            search = self._searches[key] = _Search(key)
            search.waiting.append((found, failed))
            self._dial(search, ticket.endpoint)
        else:
            search.waiting.append((found, failed))

    def reach(self, endpoint: str, found: Callable[[Peer], None], failed: Failed) -> None:
        """Find the connector that listens at an endpoint, dialling it where necessary; one call is made, once.

        For words only: neither side describes what it has.
        """
        self._look_at_peers()
        known = self._reached.get(endpoint)
        here = [peer for peer in self.peers.values() if peer is known or peer.identity.endpoint == endpoint]
        if here:
            found(here[0])
            return
        waiting = self._reaching.setdefault(endpoint, [])
        waiting.append((found, failed))
        if len(waiting) > 1:
            return

        def opened(session: Session) -> None:
            peer = self._reached[endpoint] = self.session_opened(session)
            for found, _ in self._reaching.pop(endpoint):
                found(peer)

        def refused(error: KvxferError) -> None:
            self._reached.pop(endpoint, None)
            for _, failed in self._reaching.pop(endpoint):
                failed(error)

        self.channel.dial(endpoint, self.identity, self._dial_timeout_s, opened, refused)

    # --- sessions -------------------------------------------------------------------------------------------

    def session_opened(self, session: Session) -> Peer:
        """Remember a peer; whoever dialled describes itself first."""
        peer = self.peers[session] = Peer(session)
        if not self._pulsing:
            self._pulsing = True
            self._progress.call_later(self._pulse_s, self._pulse)
        return peer

    def session_closed(self, session: Session, reason: PeerGone) -> None:
        """Forget a peer and the engine that it belongs to; a later ticket dials again."""
        self.lost.pop(session, None)
        self._part_with(session, reason)

    def session_lost(self, session: Session, reason: PeerGone) -> None:
        """Like `session_closed`, but what the peer still says of earlier transfers is listened to.

        A process that stood still may go on and write; it says so when it has stopped.
        """
        peer = self.peers.get(session)
        if peer is not None:
            remember(self.lost, session, peer, limit=_MAX_LOST)
            if peer.link is not None:
                peer.link.doubt()
        self._part_with(session, reason)

    def _part_with(self, session: Session, reason: PeerGone) -> None:
        peer = self.peers.pop(session, None)
        if peer is None:
            return
        self._reached = {endpoint: there for endpoint, there in self._reached.items() if there is not peer}
        key = (peer.identity.engine, peer.identity.generation)
        engine = self._engines.get(key)
        if engine is not None and peer in engine.peers.values():
            del self._engines[key]
        search = self._searches.get(key)
        if search is not None and peer in search.peers.values():
            self._fail(search, reason)
        peer.gone(reason)

    def described(self, session: Session, description: Description) -> None:
        """A peer says what it has."""
        peer = self.peers.get(session)
        if peer is None:
            return
        key = (peer.identity.engine, peer.identity.generation)
        search = self._searches.get(key)
        engine = self._engines.get(key)
        if engine is not None:  # it has registered another cache
            engine.joins.clear()
        first = peer.link is None
        try:
            peer.describe(description, self._backends)
            if first:
                self._connected(peer)
        except KvxferError as error:
            if search is not None and peer in search.peers.values():
                _log.warning(_UNUSABLE, peer.identity.name, error)
                self._fail(search, error)
            else:  # it may be about to say goodbye, with its memory gone already
                self._progress.call_later(self._pulse_s, lambda error=error: self._complain(session, error))
        if description.reply:
            session.send(self._describe(False))
        if search is not None and peer.described and peer in search.peers.values():
            self._progress_search(search, peer)

    def refused(self, session: Session, message: Refused) -> None:
        """One side cannot read what the other says: whoever waits for the peer's description waits in vain."""
        peer = self.peers.get(session)
        if peer is None:
            return
        error = by_name(message.error)(message.reason)
        search = self._searches.get((peer.identity.engine, peer.identity.generation))
        if search is not None and peer in search.peers.values():
            self._fail(search, error)
        else:
            _log.warning("%s", error)

    def _complain(self, session: Session, error: KvxferError) -> None:
        """Say what was wrong with a description, if the peer is still there."""
        level = logging.WARNING if session in self.peers else logging.DEBUG
        _log.log(level, _UNUSABLE, session.identity.name, error)

    def _dial(self, search: _Search, endpoint: str) -> None:
        def opened(session: Session) -> None:
            peer = self.session_opened(session)
            identity = session.identity
            if (identity.engine, identity.generation) != search.key:
                session.close("it is another engine")
                self._fail(search, _other_engine(search.key, identity))
                return
            search.peers[identity.rank] = peer
            self._progress.call_later(self._dial_timeout_s, lambda: self._still_undescribed(session))
            try:
                session.send(self._describe(True))
            except KvxferError as error:
                self._fail(search, error)

        self.channel.dial(
            endpoint, self.identity, self._dial_timeout_s, opened, lambda error: self._fail(search, error)
        )

    def _still_undescribed(self, session: Session) -> None:
        peer, identity = self.peers.get(session), session.identity
        search = self._searches.get((identity.engine, identity.generation))
        if search is not None and peer in search.peers.values() and not peer.described:
            reason = f"has not said what it has within {self._dial_timeout_s:g} s of being dialled; see its log"
            self._fail(search, DeadlineExceeded(f"{identity.name} at {identity.endpoint} {reason}"))

    def _progress_search(self, search: _Search, peer: Peer) -> None:
        if self._searches.get(search.key) is not search:
            return
        if search.missing is None:
            members = peer.identity.members
            search.missing = set(members)
            if members and members.get(peer.identity.rank) != peer.identity.endpoint:
                del search.peers[peer.identity.rank]  # a scheduler: it issues tickets and holds no cache
            for endpoint in members.values():
                if endpoint != peer.identity.endpoint:
                    self._dial(search, endpoint)
        elif peer.identity.rank not in search.missing:
            self._fail(search, _unknown_member(peer.identity))
            return
        if peer in search.peers.values():
            search.missing.discard(peer.identity.rank)
        if search.missing:
            return
        del self._searches[search.key]
        engine = self._engines[search.key] = Engine(search.key, dict(sorted(search.peers.items())))
        for found, _ in search.waiting:
            found(engine)

    def ask_for_successor(self, peer: Peer) -> None:
        """Dial a silent peer's endpoint now and then: if somebody else answers there, the peer has ended.

        Not where the endpoint is a loopback address that only the peer has named: that may be another host's.
        """
        endpoint, now = peer.identity.endpoint, time.monotonic()
        if now < peer.ask_again_at or (peer.session.socket is None and auth.is_loopback(endpoint)):
            return
        peer.ask_again_at = now + 2 * self._dial_timeout_s

        def answered(session: Session) -> None:
            there = session.identity
            same = (there.engine, there.generation, there.rank) == (
                peer.identity.engine,
                peer.identity.generation,
                peer.identity.rank,
            )
            peer.has_successor = peer.has_successor or not same
            session.close("it was only asked who it is")

        self.channel.dial(endpoint, self.identity, self._dial_timeout_s, answered, lambda _: None)

    def _fail(self, search: _Search, error: KvxferError) -> None:
        if self._searches.get(search.key) is search:
            del self._searches[search.key]
            for peer in search.peers.values():  # the next ticket dials again
                peer.session.close(f"this side gave up: {error}")
            for _, failed in search.waiting:
                failed(error)

    def announce(self) -> None:
        """Tell every peer what this side has now."""
        for session in list(self.peers):
            session.send(self._describe(False))

    def ask_again(self, engine: Engine) -> None:
        """Ask every rank of an engine what it has; it may have registered a cache. Any thread."""
        self._progress.post(lambda: self.send_all(engine, self._describe(True)))

    def forget(self, engine: Engine) -> None:
        """Have the next ticket dial an engine anew of which nobody has any cache: it may not have known its own members
        when it was dialled. Any thread."""

        def part() -> None:
            if any(peer.caches for peer in engine.peers.values()):
                return
            if self._engines.get(engine.key) is engine:
                del self._engines[engine.key]
            for peer in engine.peers.values():
                peer.session.close("it has no cache; whoever needs one dials anew")

        self._progress.post(part)

    def send_all(self, engine: Engine, message: Message) -> None:
        """The same message to every rank of an engine."""
        for peer in engine.peers.values():
            peer.session.send(message)

    def _look_at_peers(self) -> None:
        """Part with peers that are known to be gone, sooner than their silence would tell, or over whose link nothing
        moves any more. A later ticket dials anew."""
        for session, peer in [*self.peers.items(), *self.lost.items()]:
            if peer.is_dead():  # it is told: one that was only cut off must not wait for what this side would write
                session.close(f"{peer.identity.name} is gone")
            elif peer.link is not None and peer.link.lost:
                self.channel.lose(session, PeerGone(f"the link to {peer.identity.name} was lost"))

    def _pulse(self) -> None:
        self._look_at_peers()
        self._pulsing = bool(self.peers or self.lost)
        if self._pulsing:
            self._progress.call_later(self._pulse_s, self._pulse)


def _other_engine(key: EngineKey, identity: Identity) -> KvxferError:
    if identity.engine != key[0]:
        return InvalidTicket(f"the ticket is of engine {key[0]!r}, its endpoint answers as {identity.engine!r}")
    return InvalidTicket(f"engine {key[0]!r} has restarted since the ticket was issued; its leases are gone")


def _unknown_member(identity: Identity) -> KvxferError:
    return InvalidTicket(
        f"{identity.endpoint} answers as rank {identity.rank} of engine {identity.engine!r}, which set_members() did "
        "not name"
    )
