"""The ranks of another engine that fill a cache, and what is prepared once for every fetch between two caches.

Imports match, formats, plan and remote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvxfer.control.messages import Sources
from kvxfer.errors import NoCommonBackend, UnknownCache
from kvxfer.formats import PackedJoin, join_packed
from kvxfer.kernels import HostPairing
from kvxfer.node import Node, new_transfer_id
from kvxfer.peers.directory import Engine
from kvxfer.peers.remote import Peer, RemoteCache
from kvxfer.plan.request import pairing_of
from kvxfer.ticket import Ticket
from kvxfer.transfers.choice import Choice
from kvxfer.transfers.match import best_way, check_fingerprints

if TYPE_CHECKING:
    from kvxfer.cache import Cache
    from kvxfer.cuda.pairing import CudaPairing

MAPPED, PACKED = Choice("mapped", ""), Choice("packed", "")


@dataclass(slots=True)
class Source:
    """One rank that a fetch reads from, and what to tell it where several fill the cache together."""

    peer: Peer
    cache: RemoteCache
    join: PackedJoin
    together: Sources | None
    way: str  # the best one, with which another may yet be weighed; "" where none is possible
    pairing: HostPairing | CudaPairing | None  # of the mapped way, where it copies whole blocks


@dataclass(slots=True)
class Route:
    """The ranks that together fill a cache. Kept with the engine, for every fetch between the two caches."""

    sources: list[Source]
    at_hand: bool  # whether a transfer can begin before anything is planned, and nothing has to be waited for
    counted: dict[str, object]  # what the statistics of every fetch that goes so have in common


def route_of(
    engine: Engine, key: tuple, ticket: Ticket, cache: Cache, node: Node, wire: str, allow_missing: bool
) -> Route:
    """The ranks that together fill this rank's cache, joined. Kept with the engine under the key.

    Raises InvalidTicket, FingerprintMismatch, LayoutMismatch.
    """
    holders = [peer for peer in engine.peers.values() if ticket.cache in peer.caches]
    if not holders:
        raise UnknownCache(f"no rank of engine {ticket.engine!r} has a cache {ticket.cache!r}")
    caches = [peer.caches[ticket.cache] for peer in holders]
    for remote in caches:
        check_fingerprints(cache, remote, ticket)
    first = node.identity.rank % len(caches)
    layouts = tuple(remote.layout for remote in caches)
    joins = join_packed(
        layouts,
        cache.layout,
        wire,
        first=first,
        allow_missing=allow_missing,
        src_scales=caches[0].scales,
        dst_scales=cache.scales,
    )
    together = Sources(
        key=new_transfer_id(), cache=ticket.cache, into_cache=cache.name, layouts=layouts, index=0, first=first
    )
    sources = []
    for j in joins:
        remote = caches[j.source]
        way = _best_way(cache, remote, j, node)
        told = _for_index(together, j.source) if len(caches) > 1 else None
        pairing = _mapped_pairing(cache, remote, j) if way == MAPPED.way else None
        sources.append(Source(holders[j.source], remote, j, told, way, pairing))
    ready = [source for source in sources if source.pairing is not None or source.way == PACKED.way]
    tables = [source.peer.table for source in ready]
    counted = {
        "backend": "+".join(sorted({source.peer.backend for source in sources})),
        "way": MAPPED.way,
        "wire": wire,
        "peers": len(sources),
        "missing": joins[0].missing if joins else (),
    }
    at_hand = len(tables) == len(sources) and all(table is not None and table.is_mapped for table in tables)
    found = engine.joins[key] = Route(sources, at_hand, counted)
    return found


def _best_way(cache: Cache, remote: RemoteCache, joined: PackedJoin, node: Node) -> str:
    try:
        return best_way(cache, remote, joined, node)
    except NoCommonBackend:  # said by the fetch, once it has found its lease
        return ""


def _mapped_pairing(cache: Cache, remote: RemoteCache, joined: PackedJoin) -> HostPairing | CudaPairing | None:
    """The blocks of two caches, where they go whole."""
    pairing = pairing_of(joined.plain)
    return None if pairing is None else cache.prepare_pairing(pairing, remote.mapped_bases)


def _for_index(together: Sources, index: int) -> Sources:
    return msgspec.structs.replace(together, index=index)
