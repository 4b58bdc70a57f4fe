"""A kernel and a write behind it, and an arrival and a kernel behind it, as operations of their own."""

from __future__ import annotations

import pytest

from kvxfer.backends.base import Operation
from kvxfer.errors import BackendError, NonFiniteValue
from kvxfer.transfers.packed import _PackedAndWritten, _Unpacking


class Step(Operation):
    """Ends, or fails, when it is told to."""

    def __init__(self, announced: int = 0, *, behind: bool = True) -> None:
        self.announced = announced
        self.ends: bool | Exception = False
        self.can_be_behind = behind

    def poll(self) -> bool:
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends

    def behind(self, kernel):
        return Step() if self.can_be_behind and kernel(0) else None


def test_a_write_behind_a_kernel_ends_when_both_have():
    packed, write = Step(), Step(announced=7)
    both = _PackedAndWritten(packed, lambda: write)
    assert both.announced == 7 and not both.poll()
    packed.ends = True
    assert not both.poll()
    write.ends = True
    assert both.poll()


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_write_that_fails_ends_after_the_kernel_that_it_came_after(when):
    """Until then the kernel writes into memory that would be lent to another."""
    packed, write = Step(), Step()

    def post() -> Step:
        if when == "at once":
            raise BackendError("the link is lost")
        return write

    both = _PackedAndWritten(packed, post)
    write.ends = BackendError("the link is lost")
    assert not both.poll() and not both.poll()
    packed.ends = True
    with pytest.raises(BackendError, match="lost"):
        both.poll()


def test_what_a_kernel_found_is_told_when_the_write_has_ended():
    packed, write = Step(), Step()
    both = _PackedAndWritten(packed, lambda: write)
    packed.ends = NonFiniteValue("a NaN")
    assert not both.poll()
    write.ends = True
    with pytest.raises(NonFiniteValue):
        both.poll()


def test_a_kernel_is_enqueued_once_behind_what_comes():
    arrival, asked = Step(), []
    unpacking = _Unpacking(arrival, lambda stream: bool(asked.append(stream)) or True, lambda: pytest.fail("launched"))
    assert not unpacking.poll() and not unpacking.poll()
    assert asked == [0]
    unpacking._unpacked.ends = True
    assert unpacking.poll()


@pytest.mark.parametrize("why", ["the link cannot", "the kernel is not ready"])
def test_a_kernel_that_cannot_be_enqueued_behind_is_launched_afterwards(why):
    arrival, kernel = Step(behind=why != "the link cannot"), Step()
    launched = []
    unpacking = _Unpacking(arrival, lambda _: False, lambda: launched.append(kernel) or kernel)
    assert not unpacking.poll() and not launched
    arrival.ends = True
    assert not unpacking.poll() and not unpacking.poll()
    assert launched == [kernel]
    kernel.ends = True
    assert unpacking.poll()


def test_what_does_not_come_is_not_unpacked():
    arrival = Step(behind=False)
    arrival.ends = BackendError("it does not come")
    unpacking = _Unpacking(arrival, lambda _: False, lambda: pytest.fail("launched"))
    with pytest.raises(BackendError, match="does not come"):
        unpacking.poll()
