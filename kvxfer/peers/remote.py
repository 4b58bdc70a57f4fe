"""What this process knows of a peer: who it is, how to reach its memory, its caches and its lease table.

A `Peer` lives as long as one session. Its caches and table are set up on the progress thread when the peer's
description arrives, and read by any thread after.

Imports control, backends and plan.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvxfer import kernels
from kvxfer.backends.base import Backend, Costs, Link, RemoteRegion
from kvxfer.control.channel import Session
from kvxfer.control.messages import CacheInfo, Description, LinkMessage, Message, RegionHandles, Sources
from kvxfer.errors import BackendError, InvalidLayout, KvxferError, LeaseExpired, NoCommonBackend, PeerGone
from kvxfer.formats import PackedJoin
from kvxfer.layout import CacheLayout
from kvxfer.lease import ENDED, HEADER_BYTES, SLOT_BYTES, SLOT_WORDS
from kvxfer.progress import waiting_for_a_peer
from kvxfer.ticket import Record, Ticket, digest

if TYPE_CHECKING:
    from kvxfer.transfers.choice import Chooser

_log = logging.getLogger(__name__)

_READ_TIMEOUT_S = 5.0  # for a word or a record of a lease table
_ANY_SIZE = 1 << 62


class Conversation(Protocol):
    """One transfer's exchange of messages with a peer. Progress thread only."""

    def handle(self, message: Message) -> None:
        """A message of this transfer."""

    def peer_gone(self, reason: PeerGone) -> None:
        """The session has ended."""


class RemoteCache:
    """A peer's cache: its layout, its regions, and the ways in which they can be reached."""

    def __init__(self, info: CacheInfo, regions: Sequence[RemoteRegion], ways: Mapping[str, str]) -> None:
        self.name = info.name
        self.layout: CacheLayout = info.layout
        self.scales = info.scales
        self.regions = tuple(regions)
        self.device = self.layout.regions[0].device.split(":")[0]  # cpu or cuda
        self.ways = dict(ways)  # mapped, direct, packed: empty, or why not
        self.mapped_bases = kernels.bases([region.mapped_address or 0 for region in regions])
        self.remote_bases = kernels.bases([region.remote_address for region in regions])

    def best_way(self, allowed: Sequence[str]) -> str:
        """The first possible way among the allowed ones. NoCommonBackend when there is none."""
        for way in allowed:
            if self.ways.get(way) == "":
                return way
        reasons = "; ".join(f"{way}: {self.ways.get(way, 'unknown')}" for way in allowed)
        raise NoCommonBackend(f"cache {self.name!r} of the peer cannot be reached: {reasons}")


@dataclass(slots=True)
class Published:
    """A lease as its table has it: its record, and where in the shelf it lies packed ahead, if it does."""

    data: bytes  # of the record, as the ticket's digest covers it
    shelf_offset: int | None

    @property
    def record(self) -> Record:
        """The block lists. BackendError for bytes that are no record, whoever signed them."""
        record = Record.decode(self.data)
        if record is None:
            raise BackendError("the record of the lease cannot be read")
        return record


@dataclass(frozen=True)
class OnShelf:
    """A place in a peer's shelf: its header, its address here (`mapped`) or there, and bytes up to the shelf's end."""

    header: bytes
    address: int
    nbytes: int
    mapped: bool


class RemoteTable:
    """A peer's lease table, read one-sidedly."""

    def __init__(self, link: Link, region: RemoteRegion, shelf: RemoteRegion | None) -> None:
        self._link, self._region, self._shelf = link, region, shelf

    @property
    def is_mapped(self) -> bool:
        """Whether words are read in place, without asking the transport."""
        return self._region.mapped_address is not None

    def word_state(self, ticket: Ticket) -> bool:
        """Whether the lease is live: True, or False when it has not been published yet.

        Everything that was copied before the call was leased when the answer is True. Raises LeaseExpired.
        """
        return self.judge(self._word(ticket.slot), ticket)

    def device_word(self, ticket: Ticket) -> int:
        """The address at which this side's GPU reads the lease's word, or 0 where it cannot."""
        at = HEADER_BYTES + ticket.slot * SLOT_BYTES
        if self._region.device_address is None or at + SLOT_BYTES > self._region.nbytes:
            return 0
        return self._region.device_address + at

    def judge(self, word: int, ticket: Ticket) -> bool:
        """What a word that was read says of the ticket's lease, as `word_state` does."""
        if word == ticket.lease:
            return True
        if word & ~ENDED < ticket.lease:
            return False
        how = "has ended (released or expired)" if word == ticket.lease | ENDED else "ended and its slot was used again"
        raise LeaseExpired(
            f"the lease of request {ticket.request_id!r} {how}; fetch earlier, or publish with more ttl_s if it ran out"
        )

    def published(self, ticket: Ticket, *, verified: bool = True) -> Published | None:
        """What the lease says, or None when it, or the blocks' bytes, are not there yet.

        Raises LeaseExpired, BackendError. With `verified` False the caller still has to call `verify`.
        """
        word, ready, shelf, data = self._slot(ticket)
        if not self.judge(word, ticket) or ready < ticket.lease:
            return None
        published = Published(data or b"", shelf - 1 if shelf else None)
        if verified or data is None:
            self.verify(published, ticket)
        return published

    def verify(self, published: Published, ticket: Ticket) -> None:
        """Raises LeaseExpired or BackendError unless the record is the one that the ticket was signed for."""
        if digest(published.data) == ticket.digest:
            return
        self.word_state(ticket)  # the lease may have ended while its record was read
        raise BackendError(f"the record of lease {ticket.lease} is not the one that the ticket was signed for")

    def shelved(self, offset: int | None, header_bytes: int) -> OnShelf | None:
        """What lies in the shelf at an offset that a slot gave; None for no offset, or a shelf not known of here."""
        if offset is None or self._shelf is None or not 0 <= offset <= self._shelf.nbytes - header_bytes:
            return None
        mapped = self._shelf.mapped_address
        if mapped is None and not self._link.one_sided:
            return None  # it could not be read
        address = (self._shelf.remote_address if mapped is None else mapped) + offset
        if mapped is not None:
            header = ctypes.string_at(address, header_bytes)
        else:
            with waiting_for_a_peer():
                header = self._link.read(address, header_bytes, timeout_s=_READ_TIMEOUT_S)
        return OnShelf(header, address, self._shelf.nbytes - offset, mapped is not None)

    def _slot(self, ticket: Ticket) -> tuple[int, int, int, bytes | None]:
        """The ticket's slot: word, ready word, shelf, and the record where it can be that of the ticket."""
        at, address = self._offset_of(ticket.slot), self._region.mapped_address
        if address is not None:
            return kernels.load_slot(address, self._region.nbytes, address + at, ticket.record_bytes)
        word = int.from_bytes(self._read(at, 8), "little")  # first, as it was written last
        _, offset, nbytes, ready, shelf = SLOT_WORDS.unpack_from(self._read(at, SLOT_BYTES))
        fits = nbytes == ticket.record_bytes and offset + nbytes <= self._region.nbytes
        return word, ready, shelf, self._read(offset, nbytes) if fits and self.judge(word, ticket) else None

    def _word(self, slot: int) -> int:
        at = self._offset_of(slot)
        if self._region.mapped_address is not None:
            return kernels.load_word(self._region.mapped_address + at)
        return int.from_bytes(self._read(at, 8), "little")

    def _offset_of(self, slot: int) -> int:
        at = HEADER_BYTES + slot * SLOT_BYTES
        if at + SLOT_BYTES > self._region.nbytes:
            raise BackendError(f"lease slot {slot} lies outside the peer's lease table")
        return at

    def _read(self, offset: int, nbytes: int) -> bytes:
        if self._region.mapped_address is not None:
            return ctypes.string_at(self._region.mapped_address + offset, nbytes)
        with waiting_for_a_peer():
            return self._link.read(self._region.remote_address + offset, nbytes, timeout_s=_READ_TIMEOUT_S)


class Peer:
    """One session's peer."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.identity = session.identity
        self.conversations: dict[int, Conversation] = {}
        self.backend = ""
        self.link: Link | None = None
        self.costs: Costs | None = None  # of one-sided operations, once measured
        self.chooser: Chooser | None = None  # between direct and packed, once it has chosen
        self.caches: dict[str, RemoteCache] = {}
        self.table: RemoteTable | None = None
        self.described = False
        self.has_successor = False  # another process listens where this one did
        self.ask_again_at = 0.0  # who listens there
        self.why_not: dict[str, str] = {}  # backend: why it was not possible
        self._outbox_bytes: dict[str, int] = {}
        self.told_sources: set[int] = set()  # keys of the Sources messages that this side has sent
        self.sources: dict[int, Sources] = {}  # by key: what the peer has sent
        self.joins: dict[tuple, PackedJoin] = {}  # what this side packs for the peer

    def describe(self, description: Description, backends: Mapping[str, Backend]) -> None:
        """Take in what the peer has. Raises NoCommonBackend or what the layouts or handles are wrong in."""
        if self.link is None:
            self._connect(description, backends)
        caches = {info.name: self._open_cache(info) for info in description.caches}
        if description.lease_table is not None:
            shelf = None if description.shelf is None else self.open_region(description.shelf)
            self.table = RemoteTable(self.link, self.open_region(description.lease_table), shelf)
        self.caches = caches
        self._outbox_bytes = description.outbox_bytes
        self.described = True

    def measure(self) -> None:
        """Find out what one-sided operations cost. Mover thread."""
        try:
            with waiting_for_a_peer():
                self.costs = self.link.measure()
        except KvxferError as error:
            level = logging.WARNING if self.session.open else logging.DEBUG
            _log.log(level, "the link to %s was not measured: %s", self.identity.name, error)
        else:
            if self.costs is not None:
                _log.info("the link to %s: %s", self.identity.name, self.costs)

    def hear(self, message: LinkMessage) -> None:
        """Hand the link what the peer's link says. Raises BackendError."""
        if self.link is not None and message.backend == self.backend:
            self.link.hear(message.payload)
        elif message.payload:
            self.session.send(LinkMessage(backend=message.backend, payload=b""))
            raise BackendError(
                f"{self.identity.name} reaches this process by {message.backend!r:.40}, which reaches it by "
                f"{self.backend!r}: give both the same order of backends"
            )

    def open_region(self, region: RegionHandles) -> RemoteRegion:
        """Open one region of the peer. Raises BackendError."""
        if self.link is None or self.backend not in region.handles:
            raise BackendError(f"{self.identity.name} sent no handle for backend {self.backend!r}")
        return self.link.open(region.handles[self.backend], region.nbytes)

    def outbox_bytes(self, device: str) -> int:
        """The most that a chunk may have which the peer packs into an outbox on such a device."""
        return self._outbox_bytes.get(device.split(":")[0], _ANY_SIZE)

    def gone(self, reason: PeerGone) -> None:
        """The session has ended: every conversation learns of it, and stays until its peer is known to write no more.

        The link stays, too, to tell whether the process lives.
        """
        for conversation in list(self.conversations.values()):
            try:
                conversation.peer_gone(reason)
            except KvxferError:
                _log.exception("while ending the conversations with %s", self.identity.name)
        if self.link is not None:
            self.link.hang_up(reason)
        self.caches, self.joins = {}, {}  # what no transfer uses any more is unmapped

    def is_dead(self) -> bool:
        """Whether the peer is known to write nothing more: its process has ended, or is cut off for good."""
        return self.has_successor or (self.link is not None and self.link.alive() is False)

    def _connect(self, description: Description, backends: Mapping[str, Backend]) -> None:
        for name, backend in backends.items():
            if name not in description.backends:
                self.why_not[name] = "the peer does not have it"
                continue
            try:
                self.link, self.backend = backend.connect(description.backends[name]), name
                return
            except KvxferError as error:
                self.why_not[name] = str(error)
        reasons = "".join(f"\n  - {name}: {reason}" for name, reason in self.why_not.items())
        raise NoCommonBackend(f"no backend joins this process and {self.identity.name}:{reasons}")

    def _open_cache(self, info: CacheInfo) -> RemoteCache:
        if len(info.regions) != len(info.layout.regions):
            raise InvalidLayout(
                f"cache {info.name!r} of {self.identity.name}: {len(info.layout.regions)} regions in the layout, "
                f"{len(info.regions)} handles"
            )
        regions = []
        for region, handles in zip(info.layout.regions, info.regions, strict=True):
            opened = self.open_region(handles)
            if opened.nbytes < region.nbytes:
                raise InvalidLayout(f"region {region.name!r}: layout {region.nbytes} bytes, handle {opened.nbytes}")
            regions.append(opened)
        private = [r.name for r, o in zip(info.layout.regions, regions, strict=True) if o.mapped_address is None]
        reasons = {opened.why_not_mapped for opened in regions if opened.why_not_mapped}
        devices = {region.device.split(":")[0] for region in info.layout.regions}
        ways = {
            "mapped": "; ".join(sorted(reasons)) or _why_private(private),
            "direct": _why_not_direct(self.link, devices),
            "packed": "",
        }
        return RemoteCache(info, regions, ways)


def _why_private(regions: Sequence[str]) -> str:
    if not regions:
        return ""
    return f"regions {list(regions[:3])} lie in private memory (kvxfer.shared_empty makes shared memory)"


def _why_not_direct(link: Link, devices: set[str]) -> str:
    if not devices <= link.one_sided_devices:
        return f"this backend has no one-sided operations for memory of {', '.join(sorted(devices))}"
    return "" if link.one_sided else link.why_not_one_sided


def remember(table: dict, key: object, value: object, *, limit: int) -> None:
    """Keep what a peer caused to be kept, the oldest giving way at the limit."""
    table[key] = value
    while len(table) > limit:
        table.pop(next(iter(table)))
