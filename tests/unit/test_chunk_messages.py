"""What the two ends of a packed transfer tell each other: slots in turn, and several chunks in a message."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest

import kvxfer
from kvxfer.control.channel import Session
from kvxfer.control.messages import Chunks, Credit
from kvxfer.layout import CacheLayout, Group, Plane, Record, Region, Slice
from tests.processes import until

BLOCK_BYTES = 4096
CHUNKS, SLOTS = 24, 8
UNIT = 256 << 10  # of staging; a chunk and its header fill one
BLOCKS = CHUNKS * (UNIT // BLOCK_BYTES - 1)


@pytest.fixture
def said(monkeypatch) -> list:
    """Messages of both ends, as they are sent."""
    said, send = [], Session.send

    def record(session: Session, message) -> None:
        said.append(message)
        send(session, message)

    monkeypatch.setattr(Session, "send", record)
    return said


def test_slots_take_turns_and_a_message_tells_of_several(said):
    record = Record(
        tag="messages",
        nbytes=BLOCK_BYTES,
        planes=(Plane(name="kv", dtype="uint8", offset=0, entries=16, entry_stride=256, unit_bytes=256),),
    )
    layout = CacheLayout(
        regions=(Region(name="kv", nbytes=BLOCK_BYTES * BLOCKS),),
        records=(record,),
        groups=(
            Group(
                name="full",
                block_tokens=16,
                num_blocks=BLOCKS,
                slices=(Slice(layer="0", region="kv", offset=0, block_stride=BLOCK_BYTES, record=record.tag),),
            ),
        ),
        fingerprint={"model": "messages"},
    )
    rng = np.random.default_rng(0)
    arrays = [{"kv": rng.integers(0, 256, BLOCK_BYTES * BLOCKS, np.uint8)} for _ in range(2)]
    limits = kvxfer.Limits(chunk_bytes=UNIT, mover_threads=1)  # one worker at each end: everything is in order
    options = {"backends": ["shm"], "ways": ("packed",), "limits": limits}
    with kvxfer.Connector("prefill", **options) as prefill, kvxfer.Connector("decode", **options) as decode:
        source, target = (c.register(a, layout) for c, a in zip((prefill, decode), arrays, strict=True))
        lease = source.publish({"full": list(range(BLOCKS))}, tokens=16 * BLOCKS)
        assert target.fetch(lease.ticket, into={"full": list(range(BLOCKS))}).wait().way == "packed"
    assert np.array_equal(arrays[0]["kv"], arrays[1]["kv"])
    told = [message.placed for message in said if isinstance(message, Chunks)]
    assert [(one.index, one.slot) for placed in told for one in placed] == [(i, i % SLOTS) for i in range(CHUNKS)]
    given_back = [message.slots for message in said if isinstance(message, Credit)]
    assert [slot for slots in given_back for slot in slots] == [i % SLOTS for i in range(sum(map(len, given_back)))]
    assert len(told) <= 2 * CHUNKS // 3 and len(given_back) <= 2 * CHUNKS // 3  # pairs, but for the last few


def test_nothing_is_written_for_a_layer_that_is_ready_too_late():
    """The receiver has been told that nothing more is, and lends the slots to the next one."""
    layers = ("0", "1")
    layout = CacheLayout.paged(
        layers=layers, num_blocks=4, block_tokens=16, kv_heads=2, head_dim=64, dtype="float16", fingerprint={}
    )
    memory = [{region.name: np.full(region.nbytes, 7, np.uint8) for region in layout.regions} for _ in range(2)]
    options = {"backends": ["shm"], "ways": ("packed",)}
    with kvxfer.Connector("prefill", **options) as prefill, kvxfer.Connector("decode", **options) as decode:
        source, target = (c.register(a, layout) for c, a in zip((prefill, decode), memory, strict=True))
        ids = {"full": [0, 1, 2, 3]}
        reservation = target.reserve(ids, tokens=64)
        sent = source.send(bytes(reservation.ticket), blocks=ids, layerwise=True)
        sent.layer_ready("0")
        until(lambda: sent.state.value == "moving")
        reservation.cancel()
        until(lambda: reservation.done() and sent.done())
        ring = decode._node.ring("staging")
        until(lambda: ring.lent_bytes == 0)
        staging = np.frombuffer((ctypes.c_uint8 * ring.nbytes).from_address(ring.memory.address), np.uint8)
        staging[:] = 0xAB
        sent.layer_ready("1")
        prefill._node.on_progress(lambda: None)
        time.sleep(0.1)
        assert (staging == 0xAB).all()
