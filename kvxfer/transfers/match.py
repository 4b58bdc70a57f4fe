"""How a cache of this process and a cache of a peer fit together: fingerprints, the way to take, the plans.

Imports choice, formats, plan, kernels, remote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvxfer.errors import FingerprintMismatch, NoCommonBackend
from kvxfer.formats import PackedJoin
from kvxfer.formats.plan import Blocks
from kvxfer.kernels import PreparedPackedPlan
from kvxfer.layout import fingerprint_differences
from kvxfer.node import Node
from kvxfer.peers.remote import Peer, RemoteCache
from kvxfer.plan import TransferPlan
from kvxfer.ticket import Ticket, fingerprint_digest
from kvxfer.transfers.choice import Choice, Chooser

if TYPE_CHECKING:
    from kvxfer.cache import Cache


_DIRECT_RUN_BYTES = 1024
"""A run costs the direct way about half a microsecond; shorter ones are gathered and scattered sooner than read."""


def check_fingerprints(cache: Cache, remote: RemoteCache, ticket: Ticket) -> None:
    """FingerprintMismatch unless both layouts and the ticket mean the same by KV."""
    differences = fingerprint_differences(cache.layout.fingerprint, remote.layout.fingerprint)
    if differences:
        lines = "".join(f"\n  - {line}" for line in differences)
        raise FingerprintMismatch(f"the caches do not mean the same by KV:{lines}")
    if fingerprint_digest(remote.layout.fingerprint) != ticket.fingerprint:
        raise FingerprintMismatch(f"the ticket of request {ticket.request_id!r} was signed for another fingerprint")


def best_way(cache: Cache, remote: RemoteCache, joined: PackedJoin, node: Node) -> str:
    """The best way that this side allows.

    What is compressed goes packed, and so does what lies in host memory on one side and in a GPU's on the other; what
    falls into many short runs does not go directly. A GPU converts between cache formats on the mapped way. Raises
    NoCommonBackend.
    """
    together = cache.device.split(":")[0] == remote.device
    if joined.plain is not None and together:
        ways = node.ways
        if "packed" in ways and joined.plain.shortest_run_bytes < _DIRECT_RUN_BYTES:
            ways = [way for way in ways if way != "direct"]
        return remote.best_way(ways)
    ways = [way for way in node.ways if way != "direct" and not remote.ways[way]]
    if together and remote.device == "cuda" and joined.wire.lossless and ways:
        return ways[0]
    if "packed" in node.ways:
        return remote.best_way(("packed",))
    if joined.plain is not None:
        raise NoCommonBackend(
            f"the caches lie on {cache.device} and on the peer's {remote.device}, which takes the packed way, and this "
            f"connector allows only {', '.join(node.ways)}: add 'packed' to its ways"
        )
    raise NoCommonBackend(
        f"wire format {str(joined.wire)!r} between these caches has to be packed and unpacked, and this connector "
        f"allows only {', '.join(node.ways)}: add 'packed' to its ways"
    )


def choose_way(way: str, node: Node, peer: Peer, plain: Callable[[], TransferPlan]) -> Choice:
    """`way`, the best one, but between direct and packed the one that the link's costs speak for, where they are
    known."""
    if way != "direct" or "packed" not in node.ways or peer.costs is None:
        return Choice(way, "")
    if peer.chooser is None:
        peer.chooser = Chooser(peer.costs, learns=node.costs is None)
    return peer.chooser.choose(plain())


def why_not_mapped(cache: Cache, remote: RemoteCache, node: Node) -> str:
    """For the statistics of a packed transfer: why the peer's memory was not reached directly."""
    if "mapped" not in node.ways:
        return ""
    if cache.device.split(":")[0] != remote.device:
        return f"one cache lies in {cache.device} memory, the other in {remote.device}"
    return remote.ways["mapped"]


def packed_stages(
    cache: Cache,
    joined: PackedJoin,
    src_blocks: Blocks,
    dst_blocks: Blocks,
    tokens: int,
    layers: Sequence[str | None],
) -> list[PreparedPackedPlan]:
    """One packed plan for everything (layers is ``(None,)``), or one a layer; of one side only counts are needed."""
    return [cache.prepare_packed(joined.plan(src_blocks, dst_blocks, tokens=tokens, layer=layer)) for layer in layers]
