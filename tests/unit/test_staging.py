"""The staging ring: bounded, in order, and nothing lent twice."""

from __future__ import annotations

import itertools
import random

import pytest

from kvxfer import errors
from kvxfer.backends.base import Registration
from kvxfer.transfers.staging import Loan, StagingRing

UNIT = 1024


def ring(units: int = 8) -> StagingRing:
    return StagingRing(Registration(address=0, nbytes=units * UNIT, handle=b""), unit_bytes=UNIT)


def test_loans_do_not_overlap_and_come_back() -> None:
    staging, loans = ring(), []
    staging.borrow(2 * UNIT, 2, loans.append)
    staging.borrow(UNIT, 4, loans.append)
    spans = [(loan.offset, loan.offset + loan.nbytes) for loan in loans]
    assert spans == [(0, 4 * UNIT), (4 * UNIT, 8 * UNIT)] and staging.lent_bytes == 8 * UNIT
    for loan in loans:
        staging.give_back(loan)
    assert staging.lent_bytes == 0


def test_fewer_slots_are_lent_rather_than_none() -> None:
    staging, loans = ring(), []
    staging.borrow(3 * UNIT, 8, loans.append)
    assert (loans[0].slots, loans[0].slot_bytes) == (2, 3 * UNIT)


def test_the_line_is_served_in_order() -> None:
    staging, granted = ring(4), []
    staging.borrow(4 * UNIT, 1, lambda loan: granted.append(("first", loan)))
    staging.borrow(4 * UNIT, 1, lambda loan: granted.append(("second", loan)))
    staging.borrow(UNIT, 1, lambda loan: granted.append(("third", loan)))
    assert [name for name, _ in granted] == ["first"] and staging.waiting == 2
    staging.give_back(granted[0][1])
    assert [name for name, _ in granted] == ["first", "second"]


def test_who_leaves_the_line_lets_the_next_one_pass() -> None:
    staging, granted = ring(4), []
    loans: list[Loan] = []
    staging.borrow(2 * UNIT, 1, loans.append)
    key = staging.borrow(4 * UNIT, 1, lambda loan: granted.append("large"))
    staging.borrow(UNIT, 1, lambda loan: granted.append("small"))
    assert not granted
    staging.forget(key)
    assert granted == ["small"]


def test_what_never_fits_is_refused_at_once() -> None:
    with pytest.raises(errors.BufferTooSmall, match="staging_bytes"):
        ring(4).borrow(5 * UNIT, 1, lambda loan: None)


def test_random_loans_never_overlap() -> None:
    staging, live, rng = ring(32), [], random.Random(1)
    for _ in range(2000):
        if rng.random() < 0.5:
            staging.borrow(rng.randint(1, 6 * UNIT), rng.randint(1, 4), live.append)
        elif live:
            staging.give_back(live.pop(rng.randrange(len(live))))
        spans = sorted((loan.offset, loan.offset + loan.nbytes) for loan in live)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert sum(loan.nbytes for loan in live) == staging.lent_bytes


def test_a_chunk_without_bytes_takes_the_least_there_is() -> None:
    staging, loans = ring(2), []
    staging.borrow(0, 1, loans.append)
    assert (loans[0].slot_bytes, loans[0].slots) == (UNIT, 1)
    assert staging.borrow_now(0).nbytes == UNIT


def test_what_goes_wrong_for_one_keeps_nobody_else_waiting() -> None:
    staging, granted = ring(4), []

    def fail(loan: Loan) -> None:
        staging.give_back(loan)
        raise KeyboardInterrupt

    staging.borrow(4 * UNIT, 1, granted.append)
    staging.borrow(UNIT, 1, fail)
    staging.borrow(2 * UNIT, 1, granted.append)
    with pytest.raises(KeyboardInterrupt):
        staging.give_back(granted.pop())
    (second,) = granted
    staging.give_back(second)
    assert staging.lent_bytes == 0 and staging.waiting == 0


def test_a_long_line_of_those_who_give_back_at_once_is_no_recursion() -> None:
    staging, first, served = ring(1), [], []
    staging.borrow(UNIT, 1, first.append)
    for number in range(5000):
        staging.borrow(UNIT, 1, lambda loan, number=number: (served.append(number), staging.give_back(loan)))
    staging.give_back(first[0])
    assert served == list(range(5000)) and staging.lent_bytes == 0
