"""What is freed while a stream waits for a transfer, over the stand-in for the device. Needs the extension, and no
GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from kvxfer.backends.cuda_ipc import _Mapping
from kvxfer.cuda import quiet
from kvxfer.cuda.gates import Gate, Gates
from kvxfer.cuda.lanes import Lanes
from kvxfer.cuda.native import CudaError
from kvxfer.cuda.runtime import DeviceMemory
from tests.gpu import stand_in
from tests.processes import until

stand_in.need_no_gpu()

STREAM = 7


@pytest.fixture
def device() -> Iterator[stand_in.Device]:
    with stand_in.installed() as device:
        yield device
        assert not quiet._waits and not quiet._put_off


@pytest.fixture
def gate(device: stand_in.Device) -> Iterator[Gate]:
    gates = Gates(0)
    gate = gates.take()
    yield gate
    gate.open()


def collected(device: stand_in.Device) -> int:
    """The address of memory that nobody holds any more."""
    memory = DeviceMemory(100, device=0)
    address = memory.address
    assert address in device._memory
    del memory
    gc.collect()
    return address


def test_memory_is_freed_where_it_is_collected_as_long_as_no_stream_waits(device, gate):
    assert collected(device) not in device._memory
    gate.hold(STREAM)
    gate.open()
    assert collected(device) not in device._memory


def test_memory_that_is_collected_while_a_stream_waits_is_freed_once_it_passes(device, gate):
    other = Gates(0).take()
    gate.hold(STREAM)
    other.hold(STREAM)
    address = collected(device)
    assert address in device._memory
    gate.open()
    gate.open()
    assert address in device._memory
    other.open()
    until(lambda: address not in device._memory, what="the memory to be freed")


def test_a_peers_memory_is_unmapped_and_lanes_are_freed_once_no_stream_waits(device, gate):
    closed, lanes = [], Lanes(0)
    lanes.warm(1)
    there = set(device._memory)
    gate.hold(STREAM)
    mapping = _Mapping(4096, 10, lambda number: closed.append((number, threading.current_thread().name)), 3)
    del mapping
    gc.collect()
    lanes.close()
    until(lambda: len(quiet._put_off) == 2, what="both to be put off")
    assert not closed and set(device._memory) == there
    gate.open()
    until(lambda: closed and len(device._memory) < len(there), what="both to be freed")
    assert closed == [(3, "kvxfer-free")]


def test_a_stream_that_cannot_be_made_to_wait_puts_nothing_off(device, gate):
    device.stream_wait_word = lambda *_: 719
    with pytest.raises(CudaError):
        gate.hold(STREAM)
    assert collected(device) not in device._memory


def test_what_fails_late_keeps_nothing_else_back(device, gate):
    done: list[int] = []
    gate.hold(STREAM)
    quiet.when_quiet(lambda: 1 / 0)
    quiet.when_quiet(lambda: done.append(1))
    gate.open()
    until(lambda: done == [1], what="the second call")


def test_a_stream_that_cannot_be_made_to_wait_forgets_no_other(device, gate):
    gate.hold(STREAM)
    device.stream_wait_word = lambda *_: 719
    with pytest.raises(CudaError):
        gate.hold(STREAM + 1)
    address = collected(device)
    assert address in device._memory
    gate.open()
    until(lambda: address not in device._memory, what="the memory to be freed")


def test_a_gate_that_is_given_back_holds_nothing_up(device):
    """A stream may be made to wait at a gate that was opened a moment ago, as the transfer ends."""
    gates = Gates(0)
    gate = gates.take()
    gate.open()
    gate.hold(STREAM)
    gates.give_back(gate)
    assert collected(device) not in device._memory


def test_nothing_is_freed_where_a_collection_comes_in_between(device, gate):
    with quiet._held():
        address = collected(device)
        assert address in device._memory
    assert collected(device) not in device._memory
    until(lambda: address not in device._memory, what="the memory to be freed")
