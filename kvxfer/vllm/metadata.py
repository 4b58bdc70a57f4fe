"""What the scheduler's side tells the workers with each step, and what they tell it.

Pickled by vLLM's executor, between processes of one engine. Imports vLLM's base classes only.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

BlockIds = dict[str, list[int]]
"""Block ids by group name, right-aligned: the last one is the block of the last token."""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Blocks of a prefill request that are leased to decode, under a ticket that the scheduler has signed.

    All of a finished request; or, of one that is streamed and still running, those at the prompt's beginning.
    """

    request_id: str
    ticket: bytes
    blocks: BlockIds
    tokens: int
    ttl_s: float
    is_part: bool = False


@dataclass(frozen=True, kw_only=True)
class Load:
    """Blocks to fill with a prompt's first `tokens` tokens, those before `cached_tokens` excepted.

    Without a ticket the request is streamed, and pieces will come. `blank` are blocks of which a fetch may leave bytes
    as they are.
    """

    request_id: str
    ticket: bytes | None
    tokens: int
    cached_tokens: int
    blocks: BlockIds
    blank: BlockIds
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A ticket for the first `tokens` tokens of a prompt that is streamed: for all that is loaded if it `is_last`.

    With the last one, what prefill still writes is waited for only for `patience_s`: its lease does not last for ever.
    """

    request_id: str
    ticket: bytes
    tokens: int
    is_last: bool
    patience_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A streamed prompt that the step completes: each layer may go to decode when it has been computed.

    `blocks` are those of the whole prompt, of groups that move this way; `prompt` is its digest.
    """

    request_id: str
    stream_id: str
    blocks: BlockIds
    tokens: int
    prompt: str


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Blocks of a load for what lies behind a streamed prompt's first `first_token` tokens, up to `tokens`.

    Each rank reserves its share under the ticket, and tells the same rank of prefill, which listens at `ranks[rank]`.
    """

    request_id: str
    stream_id: str
    ticket: bytes
    blocks: BlockIds
    first_token: int
    tokens: int
    ttl_s: float
    ranks: tuple[str, ...]


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
    pieces: tuple[Piece, ...] = ()
    openings: tuple[Opening, ...] = ()
    reserves: tuple[Reserve, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()  # streamed requests for which nothing more comes, and why
    revoked: tuple[str, ...] = ()  # requests whose leases end before anything else happens
    knows_ranks: bool = False  # the scheduler has every rank's endpoint
    is_idle: bool = False  # vLLM computes nothing in this step


@dataclass(kw_only=True)
class RankReport(KVConnectorWorkerMetadata):
    """Where ranks listen for peers; how many of them have ended the lease of a request's part, or its reservation."""

    endpoints: dict[int, str] = field(default_factory=dict)
    ended_parts: dict[str, int] = field(default_factory=dict)
    ended_reservations: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """The reports of two workers as one."""
        assert isinstance(other, RankReport)
        return RankReport(
            endpoints=self.endpoints | other.endpoints,
            ended_parts=dict(Counter(self.ended_parts) + Counter(other.ended_parts)),
            ended_reservations=dict(Counter(self.ended_reservations) + Counter(other.ended_reservations)),
        )
