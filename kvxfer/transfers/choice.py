"""Direct or packed: what a transfer is expected to take by either, from what a link was measured to cost.

A direct transfer pays for every run; a packed one for gathering and scattering, and for a conversation with the peer.

Imports base.py and plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.backends.base import Costs
from kvxfer.plan import TransferPlan

# Of the packed way, and estimates, unlike a link's costs: asking, being answered, and the first chunk's way through
# staging; and what one thread gathers, which overlaps with writing and scattering.
_CONVERSATION_S = 1e-3
_GATHERED_BYTES_PER_S = 4e9


@dataclass(frozen=True)
class Choice:
    """A way, and why."""

    way: str
    why: str


def choose(costs: Costs, plan: TransferPlan) -> Choice:
    """The way that is expected to end sooner."""
    runs = plan.run_count()
    direct_s = costs.operation_s + runs * costs.run_s + plan.nbytes / costs.bytes_per_s
    packed_s = _CONVERSATION_S + plan.wire_bytes / min(costs.bytes_per_s, _GATHERED_BYTES_PER_S)
    way = "direct" if direct_s <= packed_s else "packed"
    return Choice(way, f"{runs} runs: direct {direct_s * 1e3:.2f} ms, packed {packed_s * 1e3:.2f} ms expected")
