"""Words that streams and the host wait for: the host's part, which needs the extension and no GPU."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvxfer import cuda
from kvxfer.cuda.gates import Gate, Gates
from kvxfer.errors import MissingExtra
from tests.processes import until

try:
    from kvxfer.cuda.native import native

    native()
except MissingExtra as reason:
    pytest.skip(str(reason), allow_module_level=True)


def test_a_gate_is_closed_until_it_is_opened():
    memory = np.zeros(16, np.uint32)
    gate = Gate(memory.ctypes.data, 0)
    assert not gate.is_open()
    gate.open()
    gate.open()
    assert gate.is_open() and memory[0] == 1 and not memory[1:].any()


@pytest.mark.parametrize(
    ("word", "value", "reached"),
    [(0, 0, True), (5, 5, True), (6, 5, True), (4, 5, False), (1, 0xFFFFFFFF, True), (0xFFFFFFFF, 1, False)],
)
def test_words_are_compared_cyclically(word, value, reached):
    memory = np.array([word], np.uint32)
    assert native().await_word(memory.ctypes.data, value, 0, 0) is reached


def test_waiting_spins_for_the_time_given_and_without_the_gil():
    memory = np.zeros(1, np.uint32)
    began = time.monotonic()
    assert not native().await_word(memory.ctypes.data, 1, 10_000, 10_000)
    assert 0.02 <= time.monotonic() - began < 1.0
    setter = threading.Timer(0.05, lambda: memory.__setitem__(0, 1))
    setter.start()
    assert native().await_word(memory.ctypes.data, 1, 0, 5_000_000)
    assert time.monotonic() - began < 4.0


def test_without_a_driver_every_call_says_so():
    if not cuda.why_unavailable():
        pytest.skip("this machine has a GPU")
    calls = [
        native().retain_piece(0, 4096),
        native().create_allocation(0, 1 << 21, True),
        native().import_allocation(0, 0),
        native().reserve_range(0, 1 << 21),
        native().pointer_traits(0, 4096),
    ]
    assert all(status for status, *_ in calls)
    assert native().report(0, 0, 0, 0, 0, 0, 0, 0) and native().stream_wait_word(0, 0, 4096, 1)


def test_a_gate_that_nobody_opens_opens_at_its_deadline():
    memory = np.zeros(16, np.uint32)
    gates = Gates(0)
    early, late, other = (Gate(memory.ctypes.data + 4 * i, 0) for i in range(3))
    now = time.monotonic()
    gates.open_by(late, now + 60)
    gates.open_by(early, now + 0.05)
    gates.open_by(other, now + 0.05)
    other.open()
    gates.give_back(other)
    until(early.is_open)
    assert not late.is_open() and not other.is_open()  # it has been given back, and is another one's by now
    gates.close()
    gates.close()
    assert late.is_open() and time.monotonic() - now < 30
    assert "kvxfer-gates" not in [thread.name for thread in threading.enumerate()]
