"""What one connector owns: identity, threads, backends, peers, leases, staging. Shared by its caches and transfers.

`Node` is the inside of `Connector`: it takes messages from the channel and hands each to the lease or the conversation
that it is meant for. Methods that touch peers run on the progress thread; the others say so.

Imports everything below connector.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvxfer import checks
from kvxfer.backends.base import Backend, ControlLine, Costs, Operation, Registration
from kvxfer.control.channel import Channel, Session
from kvxfer.control.messages import (
    MAX_MESSAGE_BYTES,
    NO_TRANSFER,
    CacheInfo,
    Claim,
    Description,
    Ended,
    Identity,
    LinkMessage,
    Message,
    Notice,
    Pull,
    Refused,
    RegionHandles,
    Release,
    Renew,
    Sources,
    Stop,
)
from kvxfer.errors import (
    Cancelled,
    Closed,
    InvalidRequest,
    InvalidTicket,
    KvxferError,
    PeerGone,
    as_kvxfer_error,
)
from kvxfer.kernels import Kernels
from kvxfer.lease import Lease, LeaseState, LeaseTable, SlotNumbers, table_bytes
from kvxfer.peers.directory import Directory
from kvxfer.peers.remote import Peer, remember
from kvxfer.progress import MoverPool, ProgressThread, Timer
from kvxfer.transfers.staging import (
    CHUNK_BYTES,
    GPU_CHUNK_BYTES,
    GPU_SLOTS,
    GPU_STAGING_BYTES,
    POSTED_CHUNK_BYTES,
    SLOTS,
    STAGING_BYTES,
    UNIT_BYTES,
    StagingRing,
)
from kvxfer.transfers.transfer import Transfer

if TYPE_CHECKING:
    from kvxfer.cache import Cache
    from kvxfer.ticket import Ticket
    from kvxfer.transfers.reserve import Reservation

_log = logging.getLogger(__name__)

_DEAD_POLL_S = 0.25
_SETTLE_S = 0.01
_MOST = {
    "lease_slots": 1 << 24,
    "lease_record_bytes": 1 << 40,
    "staging_bytes": 1 << 44,
    "shelf_bytes": 1 << 44,
    "chunk_bytes": 1 << 32,
    "max_message_bytes": 1 << 30,
    "copy_threads": 1024,
    "mover_threads": 256,
    "max_sms": 1024,
}
_MAX_SOURCES = 64  # of one peer
_MAX_EARLY = 4096  # leases whose releases came before they were published


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds and periods of a connector. Bytes and seconds.

    `staging_bytes` and `chunk_bytes` are for packed transfers; None stands for 64 MiB and 4 MiB in host memory, and for
    512 MiB and 32 MiB in a GPU's, or 128 MiB where a backend is asked to move each chunk (an eighth, a sixteenth, a
    quarter of the staging, where that is less).
    """

    lease_slots: int = 4096
    lease_record_bytes: int = 8 << 20
    staging_bytes: int | None = None
    shelf_bytes: int = 256 << 20
    chunk_bytes: int | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_ttl_s: float = 3600.0
    heartbeat_s: float = 1.0
    peer_timeout_s: float = 5.0
    dial_timeout_s: float = 10.0
    copy_threads: int = 1
    mover_threads: int = 2
    max_sms: int = 16

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if getattr(self, name) is not None or name not in ("staging_bytes", "chunk_bytes"):
                object.__setattr__(self, name, checks.integer(name, getattr(self, name), 1, most))
        for name in ("max_ttl_s", "heartbeat_s", "peer_timeout_s", "dial_timeout_s"):
            object.__setattr__(self, name, checks.seconds(name, getattr(self, name)))
        if self.peer_timeout_s <= self.heartbeat_s:
            raise InvalidRequest(
                f"peer_timeout_s ({self.peer_timeout_s:g}) must be longer than heartbeat_s ({self.heartbeat_s:g})"
            )

    def staging_on(self, device: str) -> int:
        """Bytes of the staging on a device."""
        return self.staging_bytes or (STAGING_BYTES if device == "cpu" else GPU_STAGING_BYTES)

    def chunk_on(self, device: str, *, posted: bool = False) -> int:
        """Bytes of a packed chunk on a device: by default no more than the staging has room for several times.

        `posted`: a backend is asked to move it there, which on a GPU takes longer than 32 MiB do.
        """
        usual, slots = (CHUNK_BYTES, SLOTS) if device == "cpu" else (GPU_CHUNK_BYTES, GPU_SLOTS)
        if posted:
            usual, slots = POSTED_CHUNK_BYTES, GPU_STAGING_BYTES // POSTED_CHUNK_BYTES
        return self.chunk_bytes or min(usual, max(UNIT_BYTES, self.staging_on(device) // slots))


def _in_units(nbytes: int) -> int:
    """What a ring of so many bytes has room for."""
    return max(1, nbytes // UNIT_BYTES) * UNIT_BYTES


class Node:
    """One connector's inside."""

    def __init__(
        self,
        identity: Identity,
        *,
        ranks: int,
        secret: bytes,
        backends: Mapping[str, Backend],
        ways: Sequence[str],
        checksums: bool,
        check_finite: bool,
        costs: Costs | None,
        limits: Limits,
        listen: str,
        advertise: str | None,
    ) -> None:
        self.secret = secret
        self.ranks = ranks
        self.backends = dict(backends)
        self.ways = tuple(ways)
        self.checksums = checksums  # asked for by this side where it receives packed chunks
        self.check_finite = check_finite  # by this side where it packs
        self.costs = costs  # of one-sided operations, where they are not to be measured
        self.limits = limits
        self.caches: dict[str, Cache] = {}
        self.promises: dict[int, Lease | Reservation] = {}  # by slot of the lease table
        self.numbers = SlotNumbers(limits.lease_slots)
        self.active: set[Transfer] = set()
        self.started = 0  # transfers ever
        self.foreign_releases = 0
        self.take_notice: Callable[[str, bytes], None] = lambda endpoint, payload: None
        self.transfers_total: collections.Counter[tuple[str, str]] = collections.Counter()  # by kind and state
        self.bytes_total: collections.Counter[tuple[str, str]] = collections.Counter()  # by kind and way
        self.packed_ahead: collections.Counter[str] = collections.Counter()  # packed, no room, failed
        self.under_way: set[Operation] = set()  # of backends; bytes of peers may depend on them
        self._early_releases: dict[tuple[int, int], tuple[Release, ...]] = {}  # by slot and lease
        self.quarantined = 0  # resources that wait for a peer to stop or to be known dead
        self._memory: list[Registration] = []
        self._table: LeaseTable | None = None
        self._table_handles: RegionHandles | None = None
        self.rings: dict[tuple[str, str], StagingRing] = {}  # by use and device
        self._lock = threading.RLock()
        self._expiry: Timer | None = None
        self._expiry_due = float("inf")
        self.closed = False
        self._pid = os.getpid()
        self.kernels = Kernels(max_sms=limits.max_sms)
        try:
            self.progress = ProgressThread(identity.name)
        except KvxferError:
            for backend in backends.values():
                backend.close()
            raise
        self.pool = MoverPool(identity.name, limits.mover_threads)
        self.directory = Directory(
            self.progress,
            self.backends,
            self.describe,
            self._connected,
            dial_timeout_s=limits.dial_timeout_s,
            pulse_s=limits.heartbeat_s,
        )
        self.identity = identity
        try:
            self.on_progress(lambda: self._open_channel(listen, advertise))
        except BaseException:
            self.close()
            raise

    # --- life -----------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Closed unless the connector is open. Any thread."""
        if self.is_foreign:
            raise Closed(f"connector {self.identity.name!r} belongs to process {self._pid}, which forked this one")
        if self.closed:
            raise Closed(f"connector {self.identity.name!r} is closed")

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child, which shares the memory but has none of the threads."""
        return os.getpid() != self._pid

    def on_progress(self, call: Callable[[], object]) -> object:
        """Run a call on the progress thread and return its result, or raise what it raised. Any thread."""
        if self.progress.is_current:
            return call()
        done = threading.Event()
        outcome: list[object] = []

        def run() -> None:
            try:
                outcome.append(call())
            except BaseException as error:
                outcome.append(error)
            done.set()

        self.progress.call(run)
        done.wait()
        result = outcome.pop()
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result  # else it keeps this frame, which keeps it
        return result

    def _open_channel(self, listen: str, advertise: str | None) -> None:
        self.channel = self.directory.channel = Channel(
            self.progress,
            self,
            secret=self.secret,
            max_message_bytes=self.limits.max_message_bytes,
            heartbeat_s=self.limits.heartbeat_s,
            peer_timeout_s=self.limits.peer_timeout_s,
        )
        endpoint = self.channel.listen(listen)
        if advertise is not None and advertise.endswith(":0"):
            advertise = advertise[:-1] + endpoint.rpartition(":")[2]
        self.set_identity(endpoint=advertise or endpoint)

    def set_identity(self, **changes: object) -> None:
        """Change what is said of this connector in later handshakes."""
        self.identity = self.directory.identity = Identity(
            **{name: getattr(self.identity, name) for name in Identity.__struct_fields__} | changes
        )

    def close(self, drain_timeout_s: float = 5.0) -> None:
        """End transfers, leases, sessions, threads and memory, in that order; idempotent."""
        if self.is_foreign:
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
        for transfer in list(self.active):
            transfer.abort(Cancelled("this connector was closed"))
        until = time.monotonic() + drain_timeout_s
        for transfer in list(self.active):
            while not transfer.done() and time.monotonic() < until:
                time.sleep(0.001)
            if not transfer.done():
                transfer.abandon()
        for lease in self.leases:
            self.end_lease(lease, LeaseState.RELEASED)
        self.pool.close()  # first: goodbye tells a peer that nothing is written into its memory any more
        while self.under_way and time.monotonic() < until:
            time.sleep(0.001)
        self.progress.close(self._close_channel)
        for peer in list(self.directory.peers.values()):
            if peer.link is not None:
                peer.link.close()
        for backend in self.backends.values():
            backend.close()
        for cache in self.caches.values():
            cache.foresight.forget()
        self.kernels.close()
        self.caches.clear()  # a connector that is kept should not keep the caches' memory

    def _close_channel(self) -> None:
        if self.directory.channel is not None:
            self.directory.channel.close(goodbye=not self.under_way)

    def track(self, transfer: Transfer) -> None:
        """Have `close` end the transfer. Any thread."""
        self.active.add(transfer)
        self.started += 1

        def ended() -> None:
            self.active.discard(transfer)
            kind = type(transfer).__name__.lower()
            self.transfers_total[kind, transfer.state.value] += 1
            if transfer.error is None:
                self.bytes_total[kind, transfer.stats.way] += transfer.stats.bytes

        transfer.on_end(ended)

    # --- memory ---------------------------------------------------------------------------------------------

    @property
    def table(self) -> LeaseTable:
        """The lease table, allocated at first use. Any thread. Raises SharedMemoryFull."""
        with self._lock:
            if self._table is None:
                nbytes = table_bytes(self.limits.lease_slots, self.limits.lease_record_bytes)
                memory, self._table_handles = self._allocate(nbytes)
                self._table = LeaseTable(_bytes_of(memory), self.limits.lease_slots)
            return self._table

    def ring(self, use: str, device: str = "cpu") -> StagingRing:
        """Bounded registered memory for a use, on the host or on a GPU; allocated at first use. Any thread.

        - staging: lent to peers, which write chunks into it, or used to read theirs;
        - outbox: where chunks are gathered for peers whose staging has no address here. Apart from staging, and lent
          for the time of one write: so no chunk waits here for one that waits at a peer;
        - shelf: where leases lie packed ahead.

        Raises SharedMemoryFull, ResourceExhausted, BackendError.
        """
        with self._lock:
            ring = self.rings.get((use, device))
            if ring is None:
                nbytes = self.limits.shelf_bytes if use == "shelf" else self.limits.staging_on(device)
                memory, handles = self._allocate(_in_units(nbytes), device)
                ring = self.rings[use, device] = StagingRing(memory, handles, device=device)
                if use == "shelf":
                    self.progress.post(self.directory.announce)
            return ring

    def _allocate(self, nbytes: int, device: str = "cpu") -> tuple[Registration, RegionHandles]:
        """Memory that peers of every backend can reach, and how each opens it.

        In host memory one that can be mapped where a backend makes such memory; the other backends register it.
        """
        if device != "cpu":
            return self._allocate_on_gpu(nbytes, device)
        maker = next((b for b in self.backends.values() if b.capabilities.mapped), next(iter(self.backends.values())))
        memory = maker.allocate(nbytes)
        self._memory.append(memory)  # stays mapped as long as somebody may look at it
        others = {n: b.register(memory.address, nbytes) for n, b in self.backends.items() if b is not maker}
        self._memory.extend(others.values())
        handles = {name: registration.handle for name, registration in others.items()}
        return memory, RegionHandles(nbytes=nbytes, handles={maker.name: memory.handle, **handles})

    def _allocate_on_gpu(self, nbytes: int, device: str) -> tuple[Registration, RegionHandles]:
        from kvxfer.cuda import DeviceMemory

        ordinal = int(device.removeprefix("cuda:"))
        reaching = {n: b for n, b in self.backends.items() if "cuda" in b.capabilities.devices}
        maker = next(iter(reaching.values()), None)
        memory = None if maker is None else maker.allocate_on_gpu(nbytes, ordinal)
        if memory is None:
            memory = DeviceMemory(nbytes, device=ordinal)
        registered = {name: b.register(memory.address, nbytes, device) for name, b in reaching.items()}
        self._memory.extend(registered.values())
        handles = RegionHandles(nbytes=nbytes, handles={name: r.handle for name, r in registered.items()})
        return Registration(address=memory.address, nbytes=nbytes, handle=b"", keep_alive=memory), handles

    def describe(self, reply: bool) -> Description:
        """What this connector has, for a peer."""
        return Description(
            backends={name: backend.hello() for name, backend in self.backends.items()},
            lease_table=self._table_handles,
            shelf=self.rings["shelf", "cpu"].handles if ("shelf", "cpu") in self.rings else None,
            caches=tuple(
                CacheInfo(name=name, layout=cache.unbound_layout, regions=cache.handles, scales=cache.scales)
                for name, cache in self.caches.items()
            ),
            outbox_bytes={kind: _in_units(self.limits.staging_on(kind)) for kind in ("cpu", "cuda")},
            reply=reply,
        )

    # --- leases ---------------------------------------------------------------------------------------------

    def publish(
        self,
        promise: Lease | Reservation,
        record: bytes,
        write_ready: Callable[[int, int], None] | None = None,
    ) -> None:
        """Keep a lease or reservation, then write it into the table for peers to see. Any thread.

        In this order, since a peer may be done with it before the call has returned. Raises InvalidTicket,
        InvalidRequest, LeaseTableFull.
        """
        ticket = promise.ticket
        table = self.table
        with self._lock:
            self.promises.setdefault(ticket.slot, promise)
            try:
                table.publish(ticket.slot, ticket.lease, record, write_ready)
            except BaseException:
                if self.promises[ticket.slot] is promise:
                    del self.promises[ticket.slot]
                raise
        if isinstance(promise, Lease):
            if (ticket.slot, ticket.lease) in self._early_releases:
                self.progress.post(lambda: self._apply_early_releases(promise))
            self.watch_deadline(promise.deadline)

    def watch_deadline(self, deadline: float) -> None:
        """Have leases looked at when the earliest one of them ends, which `deadline` may have become. Any thread."""
        if deadline < self._expiry_due:
            self.progress.post(self._expire_leases)

    def withdraw(self, promise: Lease | Reservation) -> bool:
        """Change the table's word and forget the promise: its blocks are about to be given back. Any thread.

        False when that had been done.
        """
        ticket = promise.ticket
        if self.is_foreign:
            return False
        with self._lock:
            if self.promises.get(ticket.slot) is not promise:
                return False
            self.table.end(ticket.slot, ticket.lease)
            del self.promises[ticket.slot]
        self._give_back_slot(ticket)
        return True

    def _give_back_slot(self, ticket: Ticket) -> None:
        """Let the slot be used again, once no stream of an earlier publish is going to write into it."""
        if self.table.settled(ticket.slot):
            self.numbers.give_back(ticket.slot, ticket.lease)
        else:
            self.progress.post(lambda: self.progress.call_later(_SETTLE_S, lambda: self._give_back_slot(ticket)))

    def end_lease(self, lease: Lease, state: LeaseState) -> None:
        """Withdraw a lease, then tell whoever waits for its blocks. Any thread; idempotent."""
        if self.withdraw(lease):
            lease.finish(state)

    def holds(self, ticket: Ticket) -> bool:
        """Whether a lease or reservation of this process lies under the ticket. Any thread."""
        promise = self.promises.get(ticket.slot)
        return promise is not None and promise.ticket.lease == ticket.lease

    @property
    def leases(self) -> list[Lease]:
        """The live leases. Any thread."""
        return [promise for promise in list(self.promises.values()) if isinstance(promise, Lease)]

    def _expire_leases(self) -> None:
        now = time.monotonic()
        for lease in self.leases:
            if lease.deadline <= now:
                self.end_lease(lease, LeaseState.EXPIRED)
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry_due = float("inf")  # first: whoever keeps a lease that the next line misses must call again
        self._expiry_due = min((lease.deadline for lease in self.leases), default=float("inf"))
        if self._expiry_due < float("inf"):
            self._expiry = self.progress.call_later(self._expiry_due - now, self._expire_leases)

    def _lease(self, message: Release | Renew) -> Lease | None:
        lease = self.promises.get(message.slot)
        return lease if isinstance(lease, Lease) and lease.ticket.lease == message.lease else None

    def _apply_early_releases(self, lease: Lease) -> None:
        for message in self._early_releases.pop((lease.ticket.slot, lease.ticket.lease), ()):
            self._released(message)

    def _released(self, message: Release) -> None:
        lease = self._lease(message)
        if lease is None and self._table is not None and self._table.is_awaited(message.slot, message.lease):
            # A reader that needs other ranks only may be done before this rank has published.
            early = self._early_releases.get((message.slot, message.lease), ())
            remember(self._early_releases, (message.slot, message.lease), (*early, message), limit=_MAX_EARLY)
            lease = self._lease(message)  # published meanwhile, by another thread?
            if lease is not None:
                self._apply_early_releases(lease)
            return
        if lease is None or not 0 <= message.reader < message.readers:
            self.foreign_releases += 1  # it ended before the message came, or the peer is confused
            return
        lease.readers_done.add(message.reader)
        if len(lease.readers_done) >= message.readers:
            self.end_lease(lease, LeaseState.RELEASED)

    def _renewed(self, message: Renew) -> None:
        lease = self._lease(message)
        if lease is None:
            self.foreign_releases += 1
        elif message.ttl_s > 0:
            lease.renew(message.ttl_s)

    def _connected(self, peer: Peer) -> None:
        session, backend = peer.session, peer.backend  # not the peer: what its link holds must not hold the peer

        def say(payload: bytes) -> None:
            message = LinkMessage(backend=backend, payload=payload)
            self.progress.post(lambda: session.send(message))

        peer.link.converse(
            ControlLine(say=say, until=self.progress.until, is_progress=lambda: self.progress.is_current)
        )
        peer.costs = self.costs
        if peer.costs is None:
            self.pool.submit(peer.measure)

    # --- what the channel says ------------------------------------------------------------------------------

    def session_opened(self, session: Session) -> None:
        self.directory.session_opened(session)

    def session_lost(self, session: Session, reason: PeerGone) -> None:
        self.directory.session_lost(session, reason)

    def session_closed(self, session: Session, reason: PeerGone) -> None:
        self.directory.session_closed(session, reason)

    def message_received(self, session: Session, message: Message) -> None:
        peer = self.directory.peers.get(session)
        if peer is None:
            self._wind_up(session, message)
        elif isinstance(message, Description):
            self.directory.described(session, message)
        elif isinstance(message, LinkMessage):
            peer.hear(message)
        elif isinstance(message, Release):
            self._released(message)
        elif isinstance(message, Renew):
            self._renewed(message)
        elif isinstance(message, Notice):
            self.take_notice(peer.identity.endpoint, message.payload)
        elif isinstance(message, Sources):
            remember(peer.sources, message.key, message, limit=_MAX_SOURCES)
        elif isinstance(message, (Pull, Claim)):
            self._serve(peer, message)
        elif isinstance(message, Refused) and message.transfer == NO_TRANSFER:
            self.directory.refused(session, message)
        else:
            if isinstance(message, Refused) and message.error == PeerGone.__name__:
                # The other end has given the session up and this one has not heard; what it refuses keeps it alive.
                # Before the transfer ends by it: who sees that may try again at once.
                self.channel.lose(session, PeerGone(message.reason))
            _converse(peer, message)

    def _wind_up(self, session: Session, message: Message) -> None:
        """A peer that was silent for too long goes on: only the end of what was under way is of interest."""
        peer = self.directory.lost.get(session)
        if peer is None:
            return
        if isinstance(message, (Pull, Claim)):
            reason = "the session was silent for too long; dial again"
            peer.session.send(Refused(transfer=message.transfer, error=PeerGone.__name__, reason=reason))
        elif isinstance(message, (Ended, Stop, Refused)):
            _converse(peer, message)

    def _serve(self, peer: Peer, message: Pull | Claim) -> None:
        try:
            cache = self.caches.get(message.cache)
            if cache is None:
                raise InvalidTicket(f"there is no cache {message.cache!r} here; known are {sorted(self.caches)}")
            if message.transfer in peer.conversations:
                raise InvalidRequest(f"transfer {message.transfer} is under way already")
            if isinstance(message, Pull):
                cache.serve_pull(peer, message)
            else:
                cache.serve_claim(peer, message)
        except Exception as failure:  # whatever it is, the peer waits to hear
            error = as_kvxfer_error(failure)
            if error is not failure:
                _log.exception("unexpected error while serving %s", peer.identity.name)
            if message.transfer not in peer.conversations:  # else there will be word of how that one ends
                peer.session.send(Refused(transfer=message.transfer, error=type(error).__name__, reason=str(error)))

    def when_dead(self, peer: Peer, call: Callable[[], None], settled: Callable[[], bool]) -> None:
        """Run `call` once the peer is known to write nothing more: it said goodbye, or its process has ended.

        A peer that is merely silent may wake up and go on writing, so silence is not enough. Where the backend cannot
        tell, whoever listens at the peer's endpoint is asked from time to time. Gives up looking once `settled`: the
        peer has woken up and said itself that it stopped.
        """
        self.quarantined += 1

        def look() -> None:
            if settled():
                self.quarantined -= 1
            elif peer.session.said_bye or peer.is_dead():
                self.quarantined -= 1
                call()
            else:
                if not self.closed:
                    self.directory.ask_for_successor(peer)
                self.progress.call_later(_DEAD_POLL_S, look)

        look()


def _converse(peer: Peer, message: Message) -> None:
    conversation = peer.conversations.get(getattr(message, "transfer", None))
    if conversation is not None:
        conversation.handle(message)
    elif isinstance(message, Stop):  # it has ended on this side, or never begun: the peer may not have heard so
        reason = "nothing of this transfer is under way"
        peer.session.send(Ended(transfer=message.transfer, error=Cancelled.__name__, reason=reason))


def _bytes_of(memory: Registration) -> np.ndarray:
    """Allocated memory as a uint8 array; whoever uses it holds the registration."""
    return np.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(memory.address), np.uint8)


def new_transfer_id() -> int:
    """A number that no other transfer of either side has."""
    return secrets.randbits(63)
