"""A registered paged cache: publish and fetch, reserve and send.

Imports node, fetch, send, packed and plan; made by `Connector.register`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvxfer import checks, formats, kernels
from kvxfer import ticket as tickets
from kvxfer.arrays import Span, span_of
from kvxfer.backends.base import Registration
from kvxfer.control.messages import Claim, Pull, RegionHandles, Role
from kvxfer.errors import (
    BufferTooSmall,
    InvalidBlocks,
    InvalidLayout,
    InvalidRequest,
    InvalidTicket,
    LeaseExpired,
)
from kvxfer.formats import PackedJoin, PackedPlan
from kvxfer.layout import CacheLayout
from kvxfer.layout.shapes import check_arrays
from kvxfer.lease import Lease
from kvxfer.node import Node
from kvxfer.peers.remote import Peer
from kvxfer.plan import BlockLists, TransferPlan, check_blocks, check_tokens
from kvxfer.plan.request import BlockTable, Pairing
from kvxfer.sizing import least_staging_bytes
from kvxfer.ticket import Record, Ticket
from kvxfer.transfers import shelf
from kvxfer.transfers.fetch import Fetch
from kvxfer.transfers.foresight import Foresight
from kvxfer.transfers.pull import Serve
from kvxfer.transfers.reserve import Reservation
from kvxfer.transfers.send import Send

if TYPE_CHECKING:
    import numpy as np

    from kvxfer.cuda import Event

_MAX_REMEMBERED = 65536
_MAX_REQUEST_ID = 256

AnyTicket = Ticket | bytes | Mapping[str, str]


class Cache:
    """One paged cache of this process, as peers see it.

    All methods may be called from any thread. The memory must stay where it is until the connector is closed; of arrays
    that were registered the cache holds references, of bare addresses it cannot.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        arrays: Mapping[str, Any] | None,
        layout: CacheLayout,
        scales: Mapping[str, Mapping[str, float]],
    ) -> None:
        self.name = name
        self.scales = _checked_scales(scales, layout)
        self._node = node
        self._spans = _spans(arrays, layout)
        self._read_only = next((name for name, span in self._spans.items() if not span.writable), "")
        self.blocks = BlockTable(layout)
        self.layout = layout.bind({region: span.address for region, span in self._spans.items()})
        self.unbound_layout = layout.unbound()  # as peers are told it
        self.bases = kernels.bases([region.address for region in self.layout.regions])
        self.block_bytes = {group.name: layout.block_bytes(group.name) for group in layout.groups}
        self.device = _one_device(layout)
        _check_staging(node, layout)
        if self.device != "cpu":
            node.kernels.warm(self.device, node.limits.mover_threads)
        self.gates = None if self.device == "cpu" else node.kernels.lanes(self.device).gates
        self.fingerprint = tickets.fingerprint_digest(layout.fingerprint)
        self._used: OrderedDict[bytes, object] = OrderedDict()
        self._own_joins: dict[str, PackedJoin] = {}  # by wire format
        self.asked_joins: dict[bytes, PackedJoin] = {}  # with what peers have, by a digest of that
        self.foresight = Foresight(node)
        self._registrations: list[dict[str, Registration]] = []
        self._registrations = [
            {
                backend.name: backend.register(region.address, region.nbytes, region.device)
                for backend in node.backends.values()
                if region.device.split(":")[0] in backend.capabilities.devices
            }
            for region in self.layout.regions
        ]
        self.handles = tuple(
            RegionHandles(nbytes=region.nbytes, handles={name: r.handle for name, r in by_backend.items()})
            for region, by_backend in zip(self.layout.regions, self._registrations, strict=True)
        )
        _ = node.table  # allocated now, so that a full /dev/shm is seen here

    def __repr__(self) -> str:
        groups = ", ".join(f"{group.name} ({group.num_blocks} blocks)" for group in self.layout.groups)
        return f"<Cache {self.name!r}: {groups}>"

    # --- publish and fetch ----------------------------------------------------------------------------------

    def publish(
        self,
        blocks: BlockLists,
        *,
        tokens: int,
        ttl_s: float = 30.0,
        request_id: str = "",
        ticket: AnyTicket | None = None,
        pack_ahead: str | None = None,
        stream: object = None,
    ) -> Lease:
        """Promise to keep blocks as they are for `ttl_s` seconds, and get a ticket with which a peer may fetch them.

        `blocks` maps each group to its block ids, right-aligned: the last id is the block of the last token. Full
        groups list every block of the prompt, sliding groups at least those under the window. The blocks belong to the
        lease until ``lease.released`` is set.

        With `ticket` the lease is published under a ticket that another process of this engine has issued for the same
        block lists (`Connector.issue`); its `ttl_s` counts from now, too.

        With `stream`, a CUDA stream of a cache on a GPU (an integer, or a stream of torch, CuPy or cuda.core; 0 is the
        default stream), the blocks are read only after what is enqueued on it now: the stream itself says so in the
        lease table, and neither the host nor the stream waits. Without one they hold their bytes already. Before an
        event, let a stream wait for it.

        `pack_ahead` names a wire format in which the blocks are packed at once, in the background and into memory of
        `Limits.shelf_bytes`, as long as there is room: a fetch that goes packed, into the same layout and with that
        wire format, then reads what it needs without waking this process.

        Raises UnknownWireFormat, UnknownGroup, InvalidBlocks, InvalidRequest, InvalidTicket, LeaseTableFull,
        BackendError, Closed.
        """
        node = self._node
        node.check_open()
        ttl_s, tokens = check_ttl(ttl_s, node.limits.max_ttl_s), check_tokens(tokens)
        lists = check_blocks(self.layout, blocks, tokens=tokens, role="source")
        ahead = None if pack_ahead is None else self._own_join(pack_ahead)
        write_ready, after = self._writer_on(stream), None if ahead is None else self._event_on(stream)
        record = Record.of(tokens, lists).encode()
        signed = self._ticket_for(Role.FETCH, record, tokens, ttl_s, request_id, ticket)
        with self._slot_of(signed, numbered_here=ticket is None):
            lease = Lease(signed, lists, time.monotonic() + ttl_s, node)
            node.publish(lease, record, write_ready)
        try:
            self.foresight.published(self, lease)
            if ahead is not None:
                shelf.pack_ahead(node, self, lease, ahead, after)
        except BaseException:
            lease.release()  # whoever called learns of no lease
            raise
        return lease

    def fetch(
        self,
        ticket: AnyTicket,
        *,
        into: BlockLists,
        wire: str = "raw",
        timeout_s: float = 30.0,
        allow_missing: bool = False,
        stream: object = None,
    ) -> Fetch:
        """Start reading leased blocks into this cache's blocks; returns at once.

        `into` maps each group to destination block ids, right-aligned: a list that is shorter than the prompt fetches
        the suffix that it covers (an empty one nothing), for what is cached here already. The destination blocks belong
        to the transfer until it is done; what fails leaves them undefined. A ticket is good for one fetch that
        succeeds; the lease is then released. Layers that only this side has (those of a draft model, say) are refused,
        unless `allow_missing`: ``stats.missing`` then names what was not fetched.

        With `stream`, as in `publish`, nothing is written before what is enqueued on it now is done, which may still
        use the destination blocks. `Transfer.wait_on` lets a stream wait for the bytes.

        Raises InvalidTicket, UnknownGroup, InvalidBlocks, UnknownWireFormat, InvalidRequest, Closed at once, with
        nothing written. Everything else is raised by the transfer: LeaseExpired, PeerGone, DeadlineExceeded,
        Cancelled, UnknownCache, FingerprintMismatch, LayoutMismatch, NoCommonBackend, BufferTooSmall, BackendError, and
        of a packed transfer NonFiniteValue, InvalidChunk, ChecksumMismatch.
        """
        node = self._node
        node.check_open()
        wire = str(formats.parse(wire))
        parsed = tickets.parse(ticket, node.secret)
        if parsed.role is not Role.FETCH:
            raise InvalidTicket("this ticket is for sending into a reservation; fetch wants one from publish()")
        lists = self.blocks.check(into, tokens=parsed.tokens, role="destination")
        self._check_writable()
        fetch = Fetch(
            node,
            self,
            parsed,
            lists,
            wire=wire,
            timeout_s=timeout_s,
            allow_missing=bool(allow_missing),
            after=self._event_on(stream),
        )
        self._use(parsed, fetch)
        node.track(fetch)
        fetch.start(here=True)
        return fetch

    # --- reserve and send -----------------------------------------------------------------------------------

    def reserve(
        self,
        blocks: BlockLists,
        *,
        tokens: int,
        ttl_s: float = 30.0,
        request_id: str = "",
        ticket: AnyTicket | None = None,
    ) -> Reservation:
        """Lend blocks to a sender, and get a ticket with which a peer may fill them.

        `blocks` are destination lists as in `fetch`. They belong to the sender until the reservation is done; see
        `Reservation`. `ticket` as in `publish`.

        Raises UnknownGroup, InvalidBlocks, InvalidRequest, InvalidTicket, LeaseTableFull, Closed.
        """
        node = self._node
        node.check_open()
        ttl_s, tokens = check_ttl(ttl_s, node.limits.max_ttl_s), check_tokens(tokens)
        lists = check_blocks(self.layout, blocks, tokens=tokens, role="destination")
        self._check_writable()
        record = Record.of(tokens, lists).encode()
        signed = self._ticket_for(Role.SEND, record, tokens, ttl_s, request_id, ticket)
        with self._slot_of(signed, numbered_here=ticket is None):
            reservation = Reservation(node, self, signed, lists)
            node.publish(reservation, record)
        reservation.on_end(lambda: node.withdraw(reservation))
        node.track(reservation)
        reservation.arm()
        return reservation

    def send(
        self,
        ticket: AnyTicket,
        blocks: BlockLists,
        *,
        layerwise: bool = False,
        wire: str = "raw",
        timeout_s: float = 30.0,
        allow_missing: bool = False,
        stream: object = None,
    ) -> Send:
        """Start writing this cache's blocks into a peer's reservation; returns at once.

        `blocks` are source lists as in `publish`, for the ticket's token count; they must stay as they are until the
        transfer is done. With `layerwise` each layer moves after `Send.layer_ready`. `allow_missing` as in `fetch`:
        layers that only the receiver has are left as they are. `stream` as in `publish`; layers have their own events.

        Ranks are paired one to one; both engines must have equally many. Raises like `fetch`, and of the transfer
        InvalidRequest where they have not.
        """
        node = self._node
        node.check_open()
        wire = str(formats.parse(wire))
        parsed = tickets.parse(ticket, node.secret)
        if parsed.role is not Role.SEND:
            raise InvalidTicket("this ticket is for fetching a lease; send wants one from reserve()")
        if layerwise and stream is not None:
            raise InvalidRequest("a layerwise send waits for the event of each layer: pass them to layer_ready()")
        lists = check_blocks(self.layout, blocks, tokens=parsed.tokens, role="source")
        send = Send(
            node,
            self,
            parsed,
            lists,
            layerwise=bool(layerwise),
            wire=wire,
            timeout_s=timeout_s,
            allow_missing=bool(allow_missing),
            after=self._event_on(stream),
        )
        self._use(parsed, send)
        node.track(send)
        send.start()
        return send

    # --- what peers ask (progress thread) -------------------------------------------------------------------

    def serve_pull(self, peer: Peer, pull: Pull) -> None:
        """Pack leased blocks into the staging that a peer lends. Raises what the peer is refused for."""
        node = self._node
        lease = node.promises.get(pull.slot)
        if not isinstance(lease, Lease) or lease.ticket.lease != pull.lease:
            raise LeaseExpired("the lease has ended; fetch earlier, or publish with more ttl_s")
        Serve(node, self, lease, peer, pull).start()

    def serve_claim(self, peer: Peer, claim: Claim) -> None:
        """Let a peer write into a reservation. Raises what the peer is refused for."""
        reservation = self._node.promises.get(claim.slot)
        if (
            not isinstance(reservation, Reservation)
            or reservation.ticket.lease != claim.lease
            or reservation.cache is not self
        ):
            raise LeaseExpired("the reservation has ended; send earlier, or reserve with more ttl_s")
        reservation.claim(peer, claim)

    def deregister(self) -> None:
        """Withdraw the regions from the backends: the cache was never announced."""
        for by_backend in self._registrations:
            for name, registration in by_backend.items():
                self._node.backends[name].deregister(registration)

    # --- kernels --------------------------------------------------------------------------------------------

    def prepare(self, plan: TransferPlan | PackedPlan) -> Any:
        """The plan for kernels where this cache lies: a `PreparedPlan`, or its like on a GPU, which may convert."""
        return self._node.kernels.prepare(plan, self.device)

    def prepare_pairing(self, pairing: Pairing, src_bases: np.ndarray) -> Any:
        """Whole blocks of a mapped peer into this cache: a `HostPairing`, or its like on a GPU."""
        return self._node.kernels.prepare_pairing(pairing, self.device, src_bases, self.bases)

    def prepare_packed(self, plan: PackedPlan) -> Any:
        """The packed plan for kernels where this cache lies: a `PreparedPackedPlan`, or its like on a GPU."""
        return self._node.kernels.prepare_packed(plan, self.device)

    # --- small parts ----------------------------------------------------------------------------------------

    def _ticket_for(
        self, role: Role, record: bytes, tokens: int, ttl_s: float, request_id: str, issued: AnyTicket | None
    ) -> Ticket:
        """The ticket that another process of this engine has issued, or a new one of this process."""
        if issued is not None:
            return self._own_ticket(issued, role, record)
        return sign_ticket(
            self._node,
            role=role,
            cache=self.name,
            record=record,
            tokens=tokens,
            ttl_s=ttl_s,
            request_id=request_id,
            fingerprint=self.fingerprint,
        )

    def _own_ticket(self, ticket: AnyTicket, role: Role, record: bytes) -> Ticket:
        """A ticket that another process of this engine has issued for this record."""
        parsed = tickets.parse(ticket, self._node.secret)
        identity = self._node.identity
        for what, ours, theirs in (
            ("engine", identity.engine, parsed.engine),
            ("engine generation", identity.generation, parsed.generation),
            ("role", role, parsed.role),
            ("cache", self.name, parsed.cache),
            ("fingerprint", self.fingerprint.hex(), parsed.fingerprint.hex()),
        ):
            if ours != theirs:
                raise InvalidTicket(f"the ticket is for {what} {theirs!r}, this cache is of {ours!r}")
        if tickets.digest(record) != parsed.digest:
            raise InvalidBlocks("the block lists or the token count are not those that the ticket was issued for")
        return parsed

    def _use(self, ticket: Ticket, transfer: Fetch | Send) -> None:
        """Remember that a ticket is in use; a transfer that fails gives it back."""
        key = ticket.encoded[1:33]  # its signature
        if self._used.setdefault(key, transfer) is not transfer:
            raise InvalidTicket(f"the ticket of request {ticket.request_id!r} was used here before")
        while len(self._used) > _MAX_REMEMBERED:
            self._used.popitem(last=False)
        transfer.on_end(lambda: self._forget_use(key, transfer))

    def _forget_use(self, key: bytes, transfer: Fetch | Send) -> None:
        """A ticket whose transfer failed may be used again; of one that succeeded only the use is remembered."""
        if transfer.error is not None:
            self._used.pop(key, None)
        elif key in self._used:
            self._used[key] = None

    def _own_join(self, wire: str) -> PackedJoin:
        name = str(formats.parse(wire))
        if name not in self._own_joins:
            self._own_joins[name] = shelf.own_join(self, name)
        return self._own_joins[name]

    @contextlib.contextmanager
    def _slot_of(self, ticket: Ticket, *, numbered_here: bool) -> Iterator[None]:
        """Give the lease slot back when what is under the ticket is not published after all."""
        try:
            yield
        except BaseException:
            if numbered_here:  # else the slot is its issuer's, and may hold this very lease
                self._node.numbers.give_back(ticket.slot, ticket.lease)
            raise

    def _event_on(self, stream: object) -> Event | None:
        """An event that passes when what is enqueued on the stream now is done."""
        if stream is None:
            return None
        from kvxfer import cuda

        event = cuda.Event(device=self._ordinal())
        event.record(cuda.stream_address(stream))
        return event

    def _writer_on(self, stream: object) -> Callable[[int, int], None] | None:
        """What has the stream write a word of the lease table, given its address and value."""
        if stream is None:
            return None
        from kvxfer import cuda

        device, on = self._ordinal(), cuda.stream_address(stream)
        return lambda address, value: cuda.write_after(on, address, value, device=device)

    def _ordinal(self) -> int:
        if self.device == "cpu":
            raise InvalidRequest("a cache in host memory has no streams: call once its blocks may be used")
        return int(self.device.removeprefix("cuda:"))

    def _check_writable(self) -> None:
        if self._read_only:
            raise InvalidRequest(f"region {self._read_only!r} is read-only; blocks cannot be written into it")


def sign_ticket(
    node: Node,
    *,
    role: Role,
    cache: str,
    record: bytes,
    tokens: int,
    ttl_s: float,
    request_id: str,
    fingerprint: bytes,
    holds_slot_s: float | None = None,
) -> Ticket:
    """A ticket under a new lease slot and number of this process. Raises LeaseTableFull, InvalidRequest.

    `holds_slot_s` bounds how long the slot is taken, for tickets whose lease ends in other processes.
    """
    request_id = checks.text("request_id", request_id, longest=_MAX_REQUEST_ID, empty=True)
    slot, lease = node.numbers.take(holds_slot_s)
    try:
        return tickets.sign(
            node.secret,
            role=role,
            engine=node.identity.engine,
            generation=node.identity.generation,
            endpoint=node.identity.endpoint,
            cache=cache,
            slot=slot,
            lease=lease,
            request_id=request_id,
            tokens=tokens,
            ttl_s=ttl_s,
            record_bytes=len(record),
            digest=tickets.digest(record),
            fingerprint=fingerprint,
        )
    except BaseException:
        node.numbers.give_back(slot, lease)
        raise


def _spans(arrays: Mapping[str, Any] | None, layout: CacheLayout) -> dict[str, Span]:
    if arrays is None:
        for region in layout.regions:
            if not region.address:
                raise InvalidLayout(f"region {region.name!r} has no address; pass arrays, or bind() the layout")
        return {
            r.name: Span(address=r.address, nbytes=r.nbytes, device=r.device, writable=True, keep_alive=None)
            for r in layout.regions
        }
    names = {region.name for region in layout.regions}
    if arrays.keys() != names:
        raise InvalidLayout(
            f"the layout's regions are {sorted(names)[:8]}, the arrays are called {sorted(arrays.keys(), key=str)[:8]}"
        )
    spans = {region.name: span_of(region.name, arrays[region.name]) for region in layout.regions}
    _check_apart(spans)
    check_arrays(layout, ((name, span.dtype, span.itemsize, span.shape) for name, span in spans.items()))
    for region in layout.regions:
        span = spans[region.name]
        if span.nbytes < region.nbytes:
            raise BufferTooSmall(f"region {region.name!r}: the layout needs {region.nbytes} bytes, got {span.nbytes}")
        if span.nbytes > region.nbytes and len(span.shape) > 1:
            raise InvalidLayout(
                f"region {region.name!r}: the layout says {region.nbytes} bytes, the array of shape {span.shape} has "
                f"{span.nbytes}; storage that is larger than the cache is registered as an array of one axis"
            )
        if span.device != region.device:
            raise InvalidLayout(
                f"region {region.name!r}: layout says device {region.device!r}, it is on {span.device!r}"
            )
    return spans


def _check_apart(spans: Mapping[str, Span]) -> None:
    ordered = sorted((span.device, span.address, span.nbytes, name) for name, span in spans.items() if span.nbytes)
    for (device, start, nbytes, name), (other, address, _, second) in itertools.pairwise(ordered):
        if device == other and address < start + nbytes:
            raise InvalidLayout(
                f"regions {name!r} and {second!r} share memory: register the storage once, as one region"
            )


def _checked_scales(scales: Mapping[str, Mapping[str, float]], layout: CacheLayout) -> dict[str, dict[str, float]]:
    checks.instance("scales", scales, Mapping)
    planes_of = _plane_names(layout)
    checked: dict[str, dict[str, float]] = {}
    for layer, planes in scales.items():
        if layer not in planes_of:
            raise InvalidRequest(f"scales name layer {layer!r}, which the layout does not have")
        checks.instance(f"scales of layer {layer!r}", planes, Mapping)
        unknown = [plane for plane in planes if plane not in planes_of[layer]]
        if unknown:
            raise InvalidRequest(
                f"scales of layer {layer!r} name planes {unknown}; its records have {sorted(planes_of[layer])}"
            )
        checked[str(layer)] = {
            str(plane): checks.positive(f"the scale of {layer!r} {plane!r}", scale) for plane, scale in planes.items()
        }
    return checked


def _plane_names(layout: CacheLayout) -> dict[str, set[str]]:
    """Names of each layer's planes; none of a layer whose records are opaque."""
    records = {record.tag: record for record in layout.records}
    names: dict[str, set[str]] = {}
    for group in layout.groups:
        for piece in group.slices:
            names.setdefault(piece.layer, set()).update(plane.name for plane in records[piece.record].planes)
    return names


def _check_staging(node: Node, layout: CacheLayout) -> None:
    """BufferTooSmall where everything will go packed, and the staging takes not even one chunk."""
    able = [backend.capabilities for backend in node.backends.values()]
    needed, given = least_staging_bytes(layout), node.limits.staging_on(_one_device(layout))
    if given < needed and not any(abilities.mapped or abilities.one_sided for abilities in able):
        raise BufferTooSmall(
            f"{', '.join(node.backends)} moves every block through staging, which has {given} bytes; one chunk of this "
            f"cache needs {needed}: raise Limits.staging_bytes to that at least (kvxfer size says what a load needs)"
        )


def _one_device(layout: CacheLayout) -> str:
    devices = sorted({region.device for region in layout.regions})
    if len(devices) > 1:
        raise InvalidLayout(f"a cache lies on one device, got {', '.join(devices)}: register a cache for each")
    return devices[0]


def check_ttl(ttl_s: float, limit: float) -> float:
    """InvalidRequest unless a lease may run for `ttl_s` seconds."""
    return checks.seconds("ttl_s (bounded by max_ttl_s)", ttl_s, most=limit)
