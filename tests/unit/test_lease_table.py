"""The lease table and its records."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer import errors, kernels
from kvxfer.lease import ENDED, HEADER_BYTES, SLOT, SLOT_BYTES, LeaseTable, SlotNumbers, table_bytes
from kvxfer.ticket import Record, digest


def make(slots: int = 4, record_bytes: int = 1024) -> tuple[LeaseTable, np.ndarray]:
    memory = np.zeros(table_bytes(slots, record_bytes), np.uint8)
    return LeaseTable(memory, slots), memory


def slot_of(memory: np.ndarray, slot: int) -> np.void:
    return memory[HEADER_BYTES + slot * SLOT_BYTES :][:SLOT_BYTES].view(SLOT)[0]


def test_a_published_record_can_be_read_from_the_bytes() -> None:
    table, memory = make()
    record = Record.of(700, {"full": np.array([3, 9, 4], np.int32)}).encode()
    table.publish(2, 7, record)
    row = slot_of(memory, 2)
    assert int(row["word"]) == 7
    data = memory[int(row["offset"]) :][: int(row["nbytes"])].tobytes()
    assert digest(data) == digest(record) and Record.decode(data).lists()["full"].tolist() == [3, 9, 4]
    assert Record.decode(b"another") is None


def test_the_word_changes_when_the_lease_ends_and_only_then() -> None:
    table, memory = make()
    table.publish(0, 5, b"record")
    table.end(0, 4)  # another lease's end
    assert int(slot_of(memory, 0)["word"]) == 5
    table.end(0, 5)
    table.end(0, 5)
    assert int(slot_of(memory, 0)["word"]) == 5 | ENDED


def test_a_lease_number_is_published_once() -> None:
    table, _ = make()
    table.publish(0, 5, b"record")
    with pytest.raises(errors.InvalidTicket, match="published here before"):
        table.publish(0, 5, b"record")
    with pytest.raises(errors.InvalidRequest, match="in use"):
        table.publish(0, 6, b"record")
    table.end(0, 5)
    with pytest.raises(errors.InvalidTicket, match="published here before"):
        table.publish(0, 5, b"record")
    table.publish(0, 6, b"record")
    with pytest.raises(errors.InvalidRequest, match="lease_slots"):
        table.publish(4, 7, b"record")


def test_record_memory_is_bounded_and_comes_back() -> None:
    table, _ = make(slots=8, record_bytes=256)
    table.publish(0, 1, bytes(128))
    table.publish(1, 2, bytes(128))
    with pytest.raises(errors.LeaseTableFull, match="lease_record_bytes"):
        table.publish(2, 3, bytes(1))
    table.end(0, 1)
    table.end(1, 2)
    table.publish(2, 3, bytes(256))  # the two pieces have become one again


def test_slot_numbers_are_bounded_and_come_back_once() -> None:
    numbers = SlotNumbers(2)
    (slot_a, lease_a), (slot_b, lease_b) = numbers.take(), numbers.take()
    assert slot_a != slot_b and lease_a < lease_b
    with pytest.raises(errors.LeaseTableFull, match="lease_slots"):
        numbers.take()
    numbers.give_back(slot_a, lease_b)  # not its lease
    numbers.give_back(slot_a, lease_a)
    numbers.give_back(slot_a, lease_a)
    assert numbers.in_use == 1 and numbers.take()[0] == slot_a


def test_a_stream_may_say_later_that_the_blocks_are_ready() -> None:
    table, memory = make()
    table.publish(0, 5, b"record")
    assert int(slot_of(memory, 0)["ready"]) == 5
    written: list[tuple[int, int]] = []
    table.publish(1, 6, b"record", lambda address, lease: written.append((address, lease)))
    [(address, lease)] = written
    assert lease == 6 and int(slot_of(memory, 1)["word"]) == 6 and int(slot_of(memory, 1)["ready"]) == 0
    table.end(1, 6)
    assert not table.settled(1)
    with pytest.raises(errors.InvalidRequest, match="still at work"):  # its late write would undo the next one's
        table.publish(1, 7, b"record")
    assert address == memory.ctypes.data + HEADER_BYTES + SLOT_BYTES + 24
    kernels.store_word(address, lease)
    assert table.settled(1)
    table.publish(1, 7, b"record")
    assert int(slot_of(memory, 1)["ready"]) == 7


def test_a_stream_that_takes_no_more_work_publishes_nothing() -> None:
    table, memory = make(slots=1, record_bytes=64)

    def fail(address: int, lease: int) -> None:
        raise errors.BackendError("a broken stream")

    with pytest.raises(errors.BackendError, match="broken"):
        table.publish(0, 5, bytes(64), fail)
    assert int(slot_of(memory, 0)["word"]) == 0
    table.publish(0, 5, bytes(64))
