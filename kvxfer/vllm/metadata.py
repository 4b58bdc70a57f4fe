"""What the scheduler's side tells the workers with each step, and what they tell it.

Pickled by vLLM's executor, between processes of one engine. Imports vLLM's base classes only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

BlockIds = dict[str, list[int]]
"""Block ids by group name, right-aligned: the last one is the block of the last token."""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Blocks that a finished prefill request leaves to decode, under a ticket that the scheduler has signed."""

    request_id: str
    ticket: bytes
    blocks: BlockIds
    tokens: int
    ttl_s: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """Blocks to fetch with a ticket. `blank` are blocks of which the fetch may leave bytes as they are."""

    request_id: str
    ticket: bytes
    blocks: BlockIds
    blank: BlockIds
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Orders(KVConnectorMetadata):
    """One step's orders. `serial` rises by one with each step of the engine."""

    serial: int
    engine: str
    generation: int
    publications: tuple[Publication, ...] = ()
    loads: tuple[Load, ...] = ()
    releases: tuple[bytes, ...] = ()  # tickets with which nothing will be fetched
    cancelled: tuple[str, ...] = ()  # requests whose load nobody waits for any more
    knows_ranks: bool = False  # the scheduler has every rank's endpoint


@dataclass(kw_only=True)
class RankReport(KVConnectorWorkerMetadata):
    """Where ranks listen for peers."""

    endpoints: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """The reports of two workers as one."""
        assert isinstance(other, RankReport)
        return RankReport(endpoints=self.endpoints | other.endpoints)
