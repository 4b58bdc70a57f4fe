"""Direct or packed: the model's expectations, how transfers correct them, and how the way not taken is tried."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvxfer import Costs
from kvxfer.transfers.choice import Chooser, WayCost

GUESS = Costs(operation_s=2e-5, run_s=2e-6, bytes_per_s=1e10)
MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What the model looks at."""

    runs: int
    nbytes: int

    @property
    def wire_bytes(self) -> int:
        return self.nbytes

    def run_count(self) -> int:
        return self.runs


SHAPES = [Plan(16384, 64 * MIB), Plan(64, 64 * MIB), Plan(4096, 16 * MIB), Plan(1, 4096), Plan(500, 2 * MIB)]


class Link:
    """A link on which transfers take what `costs` say, and the chooser's choices over it."""

    def __init__(self, chooser: Chooser, costs: dict[str, WayCost]) -> None:
        self.chooser, self.costs = chooser, costs
        self.seconds = self.best_seconds = 0.0

    def transfer(self, plan: Plan) -> str:
        took = {way: cost.expected_s(plan.runs, plan.nbytes) for way, cost in self.costs.items()}
        choice = self.chooser.choose(plan)
        choice.took(took[choice.way])
        self.seconds += took[choice.way]
        self.best_seconds += min(took.values())
        return choice.way


def link_of(*, direct: float, packed: float, learns: bool = True, guess: Costs = GUESS) -> Link:
    """Ways that take so many times what is guessed of them."""
    costs = {
        "direct": WayCost(transfer_s=2e-5 * direct, run_s=2e-6 * direct, byte_s=1e-10 * direct),
        "packed": WayCost(transfer_s=1e-3 * packed, run_s=0.0, byte_s=2.5e-10 * packed),
    }
    return Link(Chooser(guess, learns=learns), costs)


def test_an_expectation_counts_transfer_runs_and_bytes():
    cost = WayCost(transfer_s=1.0, run_s=0.5, byte_s=0.25)
    assert cost.expected_s(4, 8) == 1.0 + 2.0 + 2.0


def test_what_a_transfer_took_moves_the_terms_by_their_share():
    cost = WayCost(transfer_s=1e-6, run_s=1e-3, byte_s=1e-12)
    later = cost.corrected(1000, 1000, 2.0)  # nearly all of it is expected of the runs
    assert later.run_s == pytest.approx(cost.run_s * 2**0.25, rel=0.01)
    assert later.transfer_s == pytest.approx(cost.transfer_s, rel=0.01)
    assert later.byte_s == pytest.approx(cost.byte_s, rel=0.01)
    assert cost.expected_s(1000, 1000) < later.expected_s(1000, 1000) < 2.0


@pytest.mark.parametrize("took_s", [0.0, 1e-9, 1e9])
def test_one_transfer_moves_an_expectation_only_so_far(took_s):
    cost = WayCost(transfer_s=1e-3, run_s=1e-6, byte_s=1e-10)
    for _ in range(5):
        later = cost.corrected(100, MIB, took_s)
        assert 0.5 < later.expected_s(100, MIB) / cost.expected_s(100, MIB) < 2
        assert min(later.transfer_s, later.run_s, later.byte_s) > 0
        cost = later


@pytest.mark.parametrize("factor", [0.02, 0.2, 5, 50])
def test_expectations_come_to_what_transfers_take(factor):
    cost = WayCost(transfer_s=2e-5, run_s=2e-6, byte_s=1e-10)
    true = WayCost(transfer_s=2e-5 * factor, run_s=2e-6 * factor, byte_s=1e-10)
    for number in range(400):
        plan = SHAPES[number % len(SHAPES)]
        cost = cost.corrected(plan.runs, plan.nbytes, true.expected_s(plan.runs, plan.nbytes))
    for plan in SHAPES:
        assert cost.expected_s(plan.runs, plan.nbytes) == pytest.approx(
            true.expected_s(plan.runs, plan.nbytes), rel=0.15
        )


@pytest.mark.parametrize(("direct", "packed", "better"), [(30, 1, "packed"), (1, 40, "direct"), (0.05, 1, "direct")])
def test_the_way_that_is_faster_is_taken_in_the_end(direct, packed, better):
    link, plan = link_of(direct=direct, packed=packed), Plan(8192, 32 * MIB)
    for _ in range(300):
        link.transfer(plan)
    assert [link.transfer(plan) for _ in range(40)].count(better) >= 38


def test_a_way_that_has_become_faster_is_found_again():
    link, plan = link_of(direct=1, packed=40), Plan(8192, 32 * MIB)
    for _ in range(100):
        link.transfer(plan)
    assert link.transfer(plan) == "direct"
    link.costs = link_of(direct=1, packed=0.5).costs
    taken = [link.transfer(plan) for _ in range(8000)]
    assert taken[-10:] == ["packed"] * 10
    assert 0 < taken.index("packed") < 64 * 40


@pytest.mark.parametrize("times", [1.5, 4, 20])
def test_trials_cost_little(times):
    link, plan = link_of(direct=times / 2, packed=1), Plan(8192, 32 * MIB)  # twice as long was guessed of direct
    for _ in range(200):
        link.transfer(plan)
    link.seconds = link.best_seconds = 0.0
    taken = [link.transfer(plan) for _ in range(5000)]
    assert "direct" in taken and link.seconds < link.best_seconds * 1.03


def test_costs_that_were_given_are_kept_and_nothing_is_tried():
    link, plan = (
        link_of(direct=1000, packed=1, learns=False, guess=Costs(operation_s=1e-9, run_s=1e-12, bytes_per_s=1e15)),
        SHAPES[0],
    )
    first = link.chooser.choose(plan).why
    assert {link.transfer(plan) for _ in range(500)} == {"direct"}
    assert link.chooser.choose(plan).why == first


def test_equal_histories_give_equal_choices():
    links = [link_of(direct=3, packed=2) for _ in range(2)]
    histories = [[(link.transfer(plan), link.chooser.choose(plan).why) for plan in SHAPES * 40] for link in links]
    assert histories[0] == histories[1]
