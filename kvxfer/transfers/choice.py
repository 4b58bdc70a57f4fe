"""Direct or packed: what a transfer is expected to take by either, from what transfers over this link have taken.

A direct transfer pays for every run; a packed one for gathering and scattering, and for a conversation with the peer.
The first expectations rest on what the link was measured to cost when it was made. Each transfer that had the link to
itself then corrects the terms of its way, each by the share that it had in the expectation.

A way that is not taken is not measured, and may have become the better one. So it is tried now and then: one that is
expected to take k times as long after `_TRIAL` (k - 1) transfers, so that trials are expected to cost at most one part
in `_TRIAL` of the time.

Imports base.py and plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvxfer.backends.base import Costs
from kvxfer.plan import TransferPlan

# Of the packed way, and first estimates, unlike a link's costs: asking, being answered, and the first chunk's way
# through staging; and what one thread gathers, which overlaps with writing and scattering.
_CONVERSATION_S = 1e-3
_GATHERED_BYTES_PER_S = 4e9
_GAIN = 0.25  # how far one transfer moves the expectation towards what it took: so far, or for the n-th 1/n
_TRIAL_GAIN = 0.5  # trials are rare
_SURPRISE = 8.0  # times longer or shorter than expected: what is beyond that counts as that
_TRIAL = 64


def _nothing(_: float) -> None:
    pass


@dataclass(frozen=True)
class Choice:
    """A way, and why. `took` is to be told the seconds of a transfer that had the link to itself."""

    way: str
    why: str
    took: Callable[[float], None] = _nothing


@dataclass(frozen=True, kw_only=True)
class WayCost:
    """What a way takes: so much for a transfer, for each run, and for each byte, in seconds."""

    transfer_s: float
    run_s: float
    byte_s: float

    def expected_s(self, runs: int, nbytes: int) -> float:
        """Of a transfer of `runs` pieces and so many bytes together."""
        return self.transfer_s + runs * self.run_s + nbytes * self.byte_s

    def corrected(self, runs: int, nbytes: int, took_s: float, gain: float = _GAIN) -> WayCost:
        """After such a transfer took `took_s`. `gain` 1 forgets what was before. Costs stay above zero."""
        expected = self.expected_s(runs, nbytes)
        surprise = min(_SURPRISE, max(1 / _SURPRISE, took_s / expected))

        def by_share(part_s: float) -> float:
            return surprise ** (gain * part_s / expected)

        return replace(
            self,
            transfer_s=self.transfer_s * by_share(self.transfer_s),
            run_s=self.run_s * by_share(runs * self.run_s),
            byte_s=self.byte_s * by_share(nbytes * self.byte_s),
        )


class Chooser:
    """Chooses between direct and packed for one peer. Any thread. Equal histories give equal choices."""

    def __init__(self, costs: Costs, *, learns: bool) -> None:
        """`costs`: what the link was measured to cost, or was said to: then it does not learn, and tries nothing."""
        self._learns = learns
        self._costs = {
            "direct": WayCost(transfer_s=costs.operation_s, run_s=costs.run_s, byte_s=1 / costs.bytes_per_s),
            "packed": WayCost(
                transfer_s=_CONVERSATION_S, run_s=0.0, byte_s=1 / min(costs.bytes_per_s, _GATHERED_BYTES_PER_S)
            ),
        }
        self._seen = dict.fromkeys(self._costs, 0)  # transfers that were learned from
        self._passed_over = dict.fromkeys(self._costs, 0)  # choices since a way was taken
        self._lock = threading.Lock()

    def choose(self, plan: TransferPlan) -> Choice:
        """The way that is expected to end sooner, or the other one as a trial."""
        runs = plan.run_count()
        sizes = {"direct": (runs, plan.nbytes), "packed": (runs, plan.wire_bytes)}
        with self._lock:
            expected = {way: cost.expected_s(*sizes[way]) for way, cost in self._costs.items()}
            way, other = sorted(expected, key=expected.__getitem__)
            trial = self._learns and expected[other] <= expected[way] * (1 + self._passed_over[other] / _TRIAL)
            if trial:
                way, other = other, way
            self._passed_over[way] = 0
            self._passed_over[other] += 1
        both = ", ".join(f"{name} {expected_s * 1e3:.2f} ms" for name, expected_s in expected.items())
        why = f"{runs} runs: {both} expected{'; a trial' if trial else ''}"
        return Choice(way, why, lambda took_s: self._learn(way, sizes[way], took_s, trial=trial))

    def _learn(self, way: str, size: tuple[int, int], took_s: float, *, trial: bool) -> None:
        if self._learns:
            with self._lock:
                self._seen[way] += 1
                gain = max(_TRIAL_GAIN if trial else _GAIN, 1 / self._seen[way])
                self._costs[way] = self._costs[way].corrected(*size, took_s, gain)
