"""Counters and gauges of a connector, for an engine's own metrics.

Names follow Prometheus: a unit suffix, and ``_total`` for counters only. Imports node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.node import Node


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """A snapshot."""

    leases: int  # live leases of this process
    lease_slots_in_use: int
    reservations: int
    transfers: int  # under way
    peers: int
    staging_bytes: int
    staging_lent_bytes: int
    staging_waiting: int  # transfers in line for staging
    shelf_lent_bytes: int  # that leases packed ahead take
    packed_ahead_total: dict[str, int]  # leases: packed, no room, failed
    quarantined: int  # resources that wait for a peer to stop or to be known dead
    transfers_total: dict[tuple[str, str], int]  # ended, by kind (fetch, send, reservation) and state
    bytes_total: dict[tuple[str, str], int]  # of cache moved, by kind and way
    progress_turns_total: int
    messages_dropped_total: dict[str, int]  # by error
    foreign_releases_total: int  # releases and renewals of leases that had ended

    @classmethod
    def of(cls, node: Node) -> Metrics:
        """The numbers of a connector as of now."""
        leases, rings = node.leases, list(node.rings.items())
        staging = [ring for (use, _), ring in rings if use == "staging"]
        return cls(
            leases=len(leases),
            lease_slots_in_use=node.numbers.in_use,
            reservations=len(node.promises) - len(leases),
            transfers=len(node.active),
            peers=len(node.directory.peers),
            staging_bytes=sum(ring.nbytes for ring in staging),
            staging_lent_bytes=sum(ring.lent_bytes for ring in staging),
            staging_waiting=sum(ring.waiting for ring in staging),
            shelf_lent_bytes=sum(ring.lent_bytes for (use, _), ring in rings if use == "shelf"),
            packed_ahead_total=dict(node.packed_ahead),
            quarantined=node.quarantined,
            transfers_total=dict(node.transfers_total),
            bytes_total=dict(node.bytes_total),
            progress_turns_total=node.progress.turns,
            messages_dropped_total=dict(node.channel.dropped),
            foreign_releases_total=node.foreign_releases,
        )
