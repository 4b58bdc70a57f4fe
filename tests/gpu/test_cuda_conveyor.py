"""Packed fetches between GPU caches over the stand-in for the device: launched and seen by the progress thread, several
under way at once. Needs the extension, and no GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import ml_dtypes
import msgspec
import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, Limits, errors
from kvxfer.cuda.conveyor import Conveyor
from kvxfer.cuda.lanes import Lane, Lanes
from kvxfer.cuda.mover import CudaPackedPlan
from kvxfer.cuda.native import CudaError
from kvxfer.transfers.fetch import Fetch
from kvxfer.transfers.staging import UNIT_BYTES
from tests.gpu import stand_in
from tests.processes import until

stand_in.need_no_gpu()

SECRET = b"the secret of the stand-in"
BLOCKS, HEADS, DIM = 96, 8, 64
IDS, INTO = list(range(BLOCKS))[::-1], list(range(BLOCKS))
LAUNCH_FAILED = 719


def layout(dtype: str = "bfloat16") -> CacheLayout:
    made = CacheLayout.paged(
        layers=("layers.0", "layers.1"), num_blocks=BLOCKS, block_tokens=16, kv_heads=HEADS, head_dim=DIM, dtype=dtype
    )
    regions = tuple(msgspec.structs.replace(region, device="cuda:0") for region in made.regions)
    return msgspec.structs.replace(made, regions=regions)


class Pair(contextlib.ExitStack):
    """Both ends, which pack into chunks of 256 KiB; some 13 of them for a fetch of everything, raw."""

    def __init__(self, *, slots: int = 4) -> None:
        super().__init__()
        self.device = self.enter_context(stand_in.installed())
        limits = Limits(chunk_bytes=UNIT_BYTES, staging_bytes=slots * UNIT_BYTES)
        self.sides, self.arrays = {}, {}
        for name in ("prefill", "decode"):
            options = {"backends": ["cuda_ipc"], "secret": SECRET, "ways": ("packed",), "limits": limits}
            connector = self.enter_context(kvxfer.Connector(name, **options))
            values = np.random.default_rng(1).standard_normal((BLOCKS, 2, 16, HEADS, DIM)).astype(ml_dtypes.bfloat16)
            self.arrays[name] = {
                region.name: stand_in.DeviceArray(values.view(np.uint8).ravel() * (name == "prefill"))
                for region in layout().regions
            }
            self.sides[name] = connector.register(self.arrays[name], layout(), name="kv")
        self.threads: list[str] = []  # of launches
        moves, conversion = self.device.launch_moves, self.device._launch_conversion
        self.device.launch_moves = lambda *given: self._noted(moves, given)
        self.device._launch_conversion = lambda *given: self._noted(conversion, given)

    def _noted(self, launch, given):
        self.threads.append(threading.current_thread().name)
        return launch(*given)

    def fetch(self, **options: object) -> kvxfer.Transfer:
        lease = self.sides["prefill"].publish({"full": IDS}, tokens=16 * BLOCKS)
        return self.sides["decode"].fetch(bytes(lease.ticket), into={"full": INTO}, timeout_s=20, **options)

    def blocks(self, name: str, layer: str) -> np.ndarray:
        values = self.arrays[name][layer].get().view(ml_dtypes.bfloat16)
        return values.reshape(BLOCKS, -1).astype(np.float32)

    def lent(self) -> int:
        """Bytes of decode's staging that are not free."""
        return self.sides["decode"]._node.ring("staging", "cuda:0").lent_bytes


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as both:
        yield both


@pytest.mark.parametrize("wire", ["raw", "nvfp4", "fp8_e4m3"])
def test_the_progress_threads_launch_every_chunk(pair, wire):
    stats = pair.fetch(wire=wire).wait(20)
    assert stats.way == "packed"
    chunks = -(-stats.wire_bytes // UNIT_BYTES)
    assert len(pair.threads) >= 2 * chunks
    assert {name.split("-")[1] for name in pair.threads} == {"progress"}
    for layer in ("layers.0", "layers.1"):
        given, got = pair.blocks("prefill", layer)[::-1], pair.blocks("decode", layer)
        assert np.array_equal(given, got) if wire == "raw" else np.abs(given - got).max() < 1
    assert until(lambda: pair.lent() == 0)


def test_chunks_follow_each_other_while_the_first_is_under_way(pair):
    pair.fetch().wait(20)
    pair.threads.clear()
    pair.device.silent = []
    transfer = pair.fetch()
    assert until(lambda: len(pair.threads) == 4)  # all slots
    assert not transfer.done()
    said, pair.device.silent = pair.device.silent, None
    for say in said:
        say()
    transfer.wait(20)
    for layer in ("layers.0", "layers.1"):
        assert np.array_equal(pair.blocks("prefill", layer)[::-1], pair.blocks("decode", layer))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_a_lossy_format_cannot_hold_ends_the_fetch(pair, value):
    array = pair.arrays["prefill"]["layers.1"].bytes.view(ml_dtypes.bfloat16)
    kept, array[len(array) // 2] = array[len(array) // 2], value
    with pytest.raises(errors.NonFiniteValue):
        pair.fetch(wire="nvfp4").wait(20)
    assert until(lambda: pair.lent() == 0)
    array[len(array) // 2] = kept
    pair.fetch(wire="nvfp4").wait(20)


def test_a_device_that_fails_under_way_ends_the_fetch_and_keeps_no_staging(pair):
    pair.fetch().wait(20)
    pair.device.silent = []
    transfer = pair.fetch()
    assert until(lambda: len(pair.device.silent) >= 4)
    pair.device.status = LAUNCH_FAILED
    with pytest.raises(errors.KvxferError):
        transfer.wait(20)
    assert until(lambda: pair.lent() == 0)
    pair.device.status, pair.device.silent = 0, None
    pair.fetch().wait(20)


@pytest.mark.parametrize("side", ["pack", "unpack"])
def test_tables_that_cannot_be_made_end_the_fetch_and_keep_no_staging(pair, monkeypatch, side):
    made = CudaPackedPlan._tables_of

    def fails(plan: CudaPackedPlan, which: str, bases: np.ndarray) -> object:
        if which == side:
            raise errors.InvalidRequest("no such tables")
        return made(plan, which, bases)

    monkeypatch.setattr(CudaPackedPlan, "_tables_of", fails)
    with pytest.raises(errors.InvalidRequest):
        pair.fetch().wait(20)
    assert until(lambda: pair.lent() == 0)
    monkeypatch.undo()
    pair.fetch().wait(20)


def test_a_fetch_that_is_cancelled_drains_what_was_launched(pair):
    pair.fetch().wait(20)
    pair.device.silent = []
    transfer = pair.fetch()
    assert until(lambda: len(pair.device.silent) >= 4)
    transfer.cancel()
    assert pair.lent() > 0  # a kernel may still write there
    said, pair.device.silent = pair.device.silent, None
    for say in said:
        say()
    with pytest.raises(errors.Cancelled):
        transfer.wait(20)
    assert until(lambda: pair.lent() == 0)


def test_many_fetches_at_once_share_the_conveyor(pair):
    transfers = [pair.fetch(wire=wire) for wire in ("raw", "nvfp4") for _ in range(6)]
    for transfer in transfers:
        transfer.wait(20)
    assert until(lambda: pair.lent() == 0)


# --- the conveyor alone -------------------------------------------------------------------------------------


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    with stand_in.installed() as device:
        made = Lanes(0)
        made.test_device = device
        yield made


def test_a_launch_is_seen_once_its_word_is_and_streams_take_turns(lanes):
    conveyor, streams = lanes.conveyor, []
    lanes.test_device.silent = silent = []
    launched = [conveyor.launch(lambda stream, flag: streams.append((stream, flag))) for _ in range(4)]
    assert [flag for _, flag in streams] == [0] * 4
    assert streams[0] == streams[2] != streams[1] == streams[3]
    assert not any(one.poll() for one in launched)
    silent[0]()
    assert [one.poll() for one in launched] == [True, False, False, False]
    for say in silent[1:]:
        say()
    assert all(one.poll() for one in launched)


def test_a_flag_that_is_set_is_an_error_and_clear_again_when_it_is_next_used(lanes):
    import ctypes

    flags = []

    def kernel(_: int, flag: int) -> None:
        word = ctypes.c_uint32.from_address(flag)
        assert word.value == 0
        flags.append(flag)
        word.value = 3

    for _ in range(2000):  # more than a page has
        with pytest.raises(errors.NonFiniteValue):
            lanes.conveyor.launch(kernel, flagged=lambda: errors.NonFiniteValue("set")).poll()
    assert len(set(flags)) < 2000


def test_flags_of_launches_under_way_differ(lanes):
    lanes.test_device.silent = []
    flags = []
    for _ in range(3000):
        lanes.conveyor.launch(lambda _, flag: flags.append(flag), flagged=lambda: errors.NonFiniteValue("set"))
    assert len(set(flags)) == 3000


def test_a_launch_that_fails_says_so(lanes):
    def kernel(_: int, flag: int) -> None:
        raise CudaError("launching failed", status=LAUNCH_FAILED)

    with pytest.raises(CudaError):
        lanes.conveyor.launch(kernel, flagged=lambda: errors.NonFiniteValue("set"))
    assert lanes.conveyor.launch(lambda *_: None).poll()


def test_a_device_that_has_failed_is_noticed_by_looking(lanes):
    lanes.test_device.silent = []
    launched = lanes.conveyor.launch(lambda *_: None)
    assert not launched.poll()
    lanes.test_device.status = LAUNCH_FAILED
    with pytest.raises(CudaError):
        until(launched.poll)


def test_tables_are_not_taken_again_while_they_are_uploaded(lanes):
    """A transfer that ends at once gives them back; the upload would write over the next plan's."""
    tables = lanes.take_tables(100, 1)
    tables.reserve()
    lanes.test_device.silent = silent = []
    tables.under_way = lanes.conveyor.before_all(lambda stream: None)
    lanes.give_back_tables(tables)
    assert lanes.take_tables(100, 1, at_hand=True) is None
    assert lanes.take_tables(100, 1) is not tables
    silent[0]()
    assert lanes.take_tables(100, 1, at_hand=True) is tables


def test_everything_later_comes_after_what_is_enqueued_before_all(lanes):
    conveyor, waited = Conveyor(lambda: Lane(0)), []
    lanes.test_device.wait_for_event = lambda device, stream, event: waited.append((stream, event)) or 0
    enqueued: list[int] = []
    assert conveyor.before_all(enqueued.append).poll()
    streams = []
    for _ in range(2):
        conveyor.launch(lambda stream, _: streams.append(stream))
    assert enqueued == [streams[0]] and [stream for stream, _ in waited] == [streams[1]]


def test_a_connector_that_is_closed_frees_what_it_had_on_the_device(pair):
    """Not when garbage is collected: that may be while a stream waits, and freeing waits for the device."""
    pair.fetch(wire="nvfp4").wait(20)
    arrays = {array.address for arrays in pair.arrays.values() for array in arrays.values()}
    rings = {s._node.rings[key].memory.address for s in pair.sides.values() for key in s._node.rings if key[1] != "cpu"}
    gates = {page.address for s in pair.sides.values() for page in s.gates._pages}
    nodes = [side._node for side in pair.sides.values()]
    for node in nodes:
        node.close()
    left = set(pair.device._memory) - arrays - rings - gates
    assert not left, f"{len(left)} pieces of memory"


def test_tables_come_back_from_fetches_that_are_cancelled_while_they_are_planned(monkeypatch):
    with Pair(slots=16) as pair:
        pair.fetch().wait(20)
        lanes = pair.sides["decode"]._node.kernels.lanes("cuda:0")
        until(lambda: pair.lent() == 0)
        idle, kept = len(lanes._tables), []
        make = Fetch.plan_late
        for late in range(6):
            asked, go = threading.Event(), threading.Event()

            def plan_late(fetch: Fetch, leg: object, asked=asked, go=go) -> None:
                asked.set()
                assert go.wait(10)
                make(fetch, leg)

            monkeypatch.setattr(Fetch, "plan_late", plan_late)
            kept.append(pair.fetch())
            assert asked.wait(10)
            if late % 2:
                until(lambda: pair.lent() > 0)
            kept[-1].cancel()
            go.set()
            until(lambda: pair.lent() == 0)
        until(lambda: len(lanes._tables) == idle, what="the tables to come back")
