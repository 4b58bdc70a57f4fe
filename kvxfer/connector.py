"""`Connector`: this process's side of every transfer.

Imports node and cache; the backends come from the entry-point group ``kvxfer.backends``.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvxfer import checks
from kvxfer import ticket as tickets
from kvxfer.backends.base import Backend, Costs
from kvxfer.backends.discovery import start_backends
from kvxfer.cache import AnyTicket, Cache, check_ttl, sign_ticket
from kvxfer.control import auth
from kvxfer.control.messages import Description, Identity, Notice, Renew, Role, nbytes_of
from kvxfer.errors import InvalidRequest, KvxferError, NoCommonBackend
from kvxfer.extras import need
from kvxfer.layout import CacheLayout
from kvxfer.metrics import Metrics
from kvxfer.node import Limits, Node
from kvxfer.plan import BlockLists, check_blocks, check_tokens
from kvxfer.ticket import Record, Ticket
from kvxfer.transfers.fetch import release

_log = logging.getLogger(__name__)

WAYS = ("mapped", "direct", "packed")
_MAX_GENERATION = 2**63 - 1
_MAX_RANKS = 1 << 20


class Connector:
    """Publishes this process's caches to peers and fetches from theirs.

    ```python
    with kvxfer.Connector("prefill-0", listen="tcp://127.0.0.1:5600", secret=key) as connector:
        cache = connector.register(arrays, layout)
        lease = cache.publish({"full": [3, 9, 4]}, tokens=700, ttl_s=30.0)
    ```

    It owns one progress thread and a few mover threads, which sleep when there is nothing to do. All methods may be
    called from any thread. `close` (or leaving the ``with`` block) ends transfers, leases, threads and memory.
    """

    def __init__(
        self,
        name: str,
        *,
        listen: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        backends: str | Sequence[str | Backend] = "auto",
        ways: Sequence[str] = WAYS,
        checksums: bool = False,
        check_finite: bool = True,
        secret: bytes | str | None = None,
        allow_unauthenticated: bool = False,
        engine: str | None = None,
        generation: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        members: Mapping[int, str] | None = None,
        costs: Costs | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Start the connector.

        `listen` is the ZeroMQ endpoint of the control channel (port 0: any free one); `advertise` is what peers are
        told instead, for wildcard addresses (port 0: the port that is listened on). `backends` are names, or instances,
        in order of preference; "auto" takes all that can be started and have a use: one for other hosts is left out
        where `listen` is a loopback address.

        `ways` are the ways that a fetch or send of this side may take, best first. Where memory is not mapped, direct
        and packed are weighed by what the link was measured to cost when it was made; `costs` says it instead.

        `checksums` asks for a checksum of every packed chunk that this side receives (needs the extra ``checksum``
        where hosts pack or check xxh3). `check_finite` refuses to pack NaN or infinity into a lossy wire format;
        without it they saturate.

        `secret` signs messages and tickets; every connector that may talk to another has the same. Without one, only
        loopback addresses are allowed, unless `allow_unauthenticated` is set.

        The connectors of one engine share `engine` (default: `name`) and `generation` (default: random; it must change
        when the engine restarts); `rank` of `ranks` is this one's place. `members` maps the engine's ranks to their
        endpoints and is needed where peers are given the endpoint of only one of them; `set_members` gives it later.

        Raises InvalidRequest, NoCommonBackend, SharedMemoryFull.
        """
        key = auth.secret_bytes(secret)
        name = checks.text("name", name)
        engine = name if engine is None else checks.text("engine", engine)
        if generation is None:
            generation = secrets.randbits(63)
        generation = checks.integer("generation", generation, 0, _MAX_GENERATION)
        ranks = checks.integer("ranks", ranks, 1, _MAX_RANKS)
        rank = checks.integer("rank", rank, 0, ranks - 1)
        listen = checks.endpoint("listen", listen)
        if advertise is not None:
            advertise = checks.endpoint("advertise", advertise)
            if _is_wildcard(advertise):
                raise InvalidRequest(f"advertise must be an address that peers can dial, got the wildcard {advertise}")
        if costs is not None:
            checks.instance("costs", costs, Costs)
        if limits is not None:
            checks.instance("limits", limits, Limits)
        limits = limits or Limits()
        if isinstance(ways, str) or not isinstance(ways, Sequence):
            raise InvalidRequest(f"ways must be a sequence of {', '.join(WAYS)}; got {ways!r:.80}")
        if not isinstance(backends, (str, Backend, Sequence)):
            raise InvalidRequest(f"backends must be 'auto', or names or instances of backends; got {backends!r:.80}")
        if checksums:
            need("xxhash", "checksum")
        unknown = [way for way in ways if way not in WAYS]
        if unknown or not ways:
            raise InvalidRequest(f"ways must be some of {', '.join(WAYS)}; got {list(ways)}")
        if not key and not allow_unauthenticated and not auth.is_loopback(listen):
            raise InvalidRequest(
                f"{listen} can be reached from other hosts: pass secret=, or allow_unauthenticated=True if you mean it"
            )
        if advertise is None and _is_wildcard(listen):
            raise InvalidRequest(f"{listen} is a wildcard: pass advertise= with the address that peers should dial")
        identity = Identity(
            name=name,
            engine=engine,
            generation=generation,
            rank=rank,
            endpoint=listen,
            members=_checked_members({} if members is None else members),
        )
        _check_fits(identity, limits)
        loopback = auth.is_loopback(listen)
        started, self.why_not = start_backends(backends, loopback=loopback)  # why_not: of backends that do not run
        self._node = Node(
            identity,
            ranks=ranks,
            secret=key,
            backends=started,
            ways=ways,
            checksums=bool(checksums),
            check_finite=bool(check_finite),
            costs=costs,
            limits=limits,
            listen=listen,
            advertise=advertise,
        )
        self._finalizer = weakref.finalize(self, self._node.close)

    # --- who this is ----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The connector's name, in logs and messages."""
        return self._node.identity.name

    @property
    def endpoint(self) -> str:
        """Where peers dial this connector; tickets carry it."""
        return self._node.identity.endpoint

    @property
    def generation(self) -> int:
        """The engine's generation."""
        return self._node.identity.generation

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends that run, in order of preference."""
        return tuple(self._node.backends)

    @property
    def metrics(self) -> Metrics:
        """Counters and gauges as of now."""
        return Metrics.of(self._node)

    def set_members(self, members: Mapping[int, str]) -> None:
        """Tell peers that dial from now on where the engine's ranks listen (rank: endpoint)."""
        self._node.check_open()
        known = _checked_members(members)
        _check_fits(msgspec.structs.replace(self._node.identity, members=known), self._node.limits)
        self._node.on_progress(lambda: self._node.set_identity(members=known))

    def join_engine(self, engine: str, generation: int) -> None:
        """Belong to an engine whose name and generation another of its processes has chosen.

        For a rank that starts before its scheduler, and before it publishes anything.
        """
        self._node.check_open()
        engine = checks.text("engine", engine)
        generation = checks.integer("generation", generation, 0, _MAX_GENERATION)
        self._node.on_progress(lambda: self._node.set_identity(engine=engine, generation=generation))

    # --- caches and tickets ---------------------------------------------------------------------------------

    def register(
        self,
        arrays: Mapping[str, Any] | None,
        layout: CacheLayout,
        *,
        name: str = "kv",
        scales: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Cache:
        """Register a paged cache.

        `arrays` maps the layout's region names to contiguous NumPy arrays, torch tensors or CuPy arrays; None takes the
        addresses in the layout, whose memory the caller keeps. Memory from `kvxfer.shared_empty` is read and written by
        peers of this host in place.

        An array has the dtype of the region's planes, or is an integer of their size, and its axes are the layout's,
        of which neighbours may be one. Bytes (uint8, int8) may have any shape. Sizes are equal; only an array of one
        axis is storage that may be larger than the region, from its first byte on, and its rest is left alone.

        `scales` maps layers to their planes' scales, where values are stored divided by one factor per tensor that is
        not in the cache itself (``{"layers.0": {"k": 0.5, "v": 0.25}}`` for fp8 keys and values): a transfer between
        caches of other formats or scales applies it. A plane that is not named has scale 1.

        Peers learn of the cache in one message: with layouts of many thousand slices it may be over
        `Limits.max_message_bytes`, which is refused here.

        Raises InvalidLayout, InvalidRequest, BufferTooSmall, SharedMemoryFull, Closed.
        """
        node = self._node
        node.check_open()
        name = checks.text("the cache's name", name)
        checks.instance("layout", layout, CacheLayout)
        if arrays is not None:
            checks.instance("arrays", arrays, Mapping)
        for region in layout.regions:
            if not any(region.device.split(":")[0] in b.capabilities.devices for b in node.backends.values()):
                raise NoCommonBackend(
                    f"region {region.name!r} is on {region.device!r}; none of {', '.join(node.backends)} reaches it"
                )
        cache = Cache(node, name, arrays, layout, {} if scales is None else scales)

        def announce() -> None:
            if name in node.caches:
                raise InvalidRequest(f"there is a cache {name!r} already; pass another name")
            node.caches[name] = cache
            try:
                _check_fits(node.describe(False), node.limits)
            except InvalidRequest:
                del node.caches[name]
                raise
            node.directory.announce()

        try:
            node.on_progress(announce)
        except BaseException:
            cache.deregister()
            raise
        return cache

    def issue(
        self,
        layout: CacheLayout,
        blocks: BlockLists,
        *,
        tokens: int,
        ttl_s: float = 30.0,
        request_id: str = "",
        cache: str = "kv",
        role: Role = Role.FETCH,
    ) -> Ticket:
        """A ticket for blocks that the ranks of this engine will publish (or reserve) under it a moment later.

        For a scheduler process, which knows block ids and owns no memory. `layout` is the ranks' (addresses are not
        needed). Peers may use the ticket at once; their transfer waits for the ranks to publish. Call `retire` when
        every rank's lease has ended: until then, but for `Limits.max_ttl_s` at most, the ticket holds a lease slot.

        Raises like `Cache.publish`.
        """
        node = self._node
        node.check_open()
        role_name = "source" if role is Role.FETCH else "destination"
        ttl_s, tokens = check_ttl(ttl_s, node.limits.max_ttl_s), check_tokens(tokens)
        cache = checks.text("cache", cache)
        checks.instance("layout", layout, CacheLayout)
        checks.instance("role", role, Role)
        lists = check_blocks(layout, blocks, tokens=tokens, role=role_name)
        ticket = sign_ticket(
            node,
            role=role,
            cache=cache,
            record=Record.of(tokens, lists).encode(),
            tokens=tokens,
            ttl_s=ttl_s,
            request_id=request_id,
            fingerprint=tickets.fingerprint_digest(layout.fingerprint),
            holds_slot_s=node.limits.max_ttl_s,
        )
        return ticket

    def retire(self, ticket: AnyTicket) -> None:
        """Every rank's lease of an issued ticket has ended: its slot may be used again. Idempotent.

        Raises InvalidTicket, and InvalidRequest while this process holds the lease itself.
        """
        node = self._node
        parsed = tickets.parse(ticket, node.secret)
        if (parsed.engine, parsed.generation) != (node.identity.engine, node.identity.generation):
            return
        if node.holds(parsed):
            raise InvalidRequest(f"the lease of request {parsed.request_id!r} is live in this process: release it")
        node.numbers.give_back(parsed.slot, parsed.lease)

    def release(self, ticket: AnyTicket) -> None:
        """Tell the publisher that this rank will not fetch, or not again: a request was aborted, say.

        Returns at once; dials the publisher where necessary. When that fails, the lease runs out by itself.
        """
        node = self._node
        node.check_open()
        parsed = tickets.parse(ticket, node.secret)
        node.progress.post(
            lambda: node.directory.look_up(
                parsed,
                lambda engine: release(node, engine, parsed),
                lambda error: self._not_reached(parsed, "released", error),
            )
        )

    def renew(self, ticket: AnyTicket, ttl_s: float) -> None:
        """Ask the publisher to keep the lease for another `ttl_s` seconds from when it hears of it.

        Returns at once; dials the publisher where necessary. For requests that wait in decode's queue.
        """
        node = self._node
        node.check_open()
        ttl_s = checks.seconds("ttl_s", ttl_s)
        parsed = tickets.parse(ticket, node.secret)
        message = Renew(slot=parsed.slot, lease=parsed.lease, ttl_s=ttl_s)
        node.progress.post(
            lambda: node.directory.look_up(
                parsed,
                lambda engine: node.directory.send_all(engine, message),
                lambda error: self._not_reached(parsed, "renewed", error),
            )
        )

    def _not_reached(self, ticket: Ticket, what: str, error: KvxferError) -> None:
        level = logging.DEBUG if self._node.closed else logging.WARNING  # to a connector that closes it is no news
        _log.log(level, "the lease of %r was not %s: %s", ticket.request_id, what, error)

    # --- words between engines ------------------------------------------------------------------------------

    def notify(self, endpoint: str, payload: bytes, *, failed: Callable[[KvxferError], None] | None = None) -> None:
        """Send a few bytes to the connector that listens at `endpoint`, over the authenticated control channel.

        Returns at once; dials where necessary. Words to one endpoint arrive in order, or not at all where the
        connection breaks: whoever needs an answer asks again. `failed` is called on the progress thread where nobody
        answers. Raises InvalidRequest, for more than half of `Limits.max_message_bytes` too, and Closed.
        """
        node = self._node
        node.check_open()
        checks.endpoint("endpoint", endpoint)
        checks.instance("payload", payload, bytes)
        if len(payload) > node.limits.max_message_bytes // 2:
            raise InvalidRequest(
                f"a notice of {len(payload)} bytes is over the limit of {node.limits.max_message_bytes // 2}"
            )
        node.progress.post(
            lambda: node.directory.reach(
                endpoint,
                lambda peer: peer.session.send(Notice(payload=payload)),
                failed or (lambda error: _log.warning("%s was not notified: %s", endpoint, error)),
            )
        )

    def on_notice(self, call: Callable[[str, bytes], None]) -> None:
        """Have ``call(endpoint, payload)`` made for every notice that comes, with the endpoint of who sent it.

        On the progress thread, so briefly; until then notices are dropped. The payload is as the peer made it.
        """
        self._node.check_open()
        self._node.take_notice = call

    # --- life -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything: transfers (cancelled, drained), leases, sessions, threads, shared memory. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Connector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Connector {self.name!r} at {self.endpoint}, backends {', '.join(self.backends)}>"


def _checked_members(members: Mapping[int, str]) -> dict[int, str]:
    checks.instance("members", members, Mapping)
    checked = {}
    for rank, endpoint in members.items():
        number = checks.integer("a rank in members", rank, 0, _MAX_RANKS)
        checked[number] = checks.endpoint(f"the endpoint of rank {number}", endpoint, dialled=True)
    return checked


def _check_fits(said: Identity | Description, limits: Limits) -> None:
    """InvalidRequest when peers could not be told, since it is more than a message may have."""
    nbytes = nbytes_of(said)
    if nbytes > limits.max_message_bytes:
        what = "name, endpoint and members" if isinstance(said, Identity) else "registered caches, with this one,"
        raise InvalidRequest(
            f"this connector's {what} take {nbytes} bytes in a message to peers; max_message_bytes is "
            f"{limits.max_message_bytes}: raise it on both sides (Limits), or register fewer slices"
        )


def _is_wildcard(endpoint: str) -> bool:
    return any(f"//{host}:" in endpoint for host in ("0.0.0.0", "*", "[::]"))
