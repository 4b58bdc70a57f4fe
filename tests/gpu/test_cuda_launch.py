"""Fetches between GPU caches over the stand-in for the device: what is launched where, who sees the end, and what a
request of whole blocks is made of. Needs the extension, and no GPU."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, Limits, TransferState, errors
from kvxfer import ticket as tickets
from kvxfer.cuda.native import CudaError, native
from kvxfer.kernels import HostPairing, bases
from kvxfer.plan import join
from kvxfer.plan.request import BlockTable, pairing_of
from kvxfer.ticket import Record
from tests.gpu import stand_in
from tests.processes import until

stand_in.need_no_gpu()

SECRET = b"the secret of the stand-in"
BLOCKS = 24
IDS, INTO = list(range(BLOCKS))[::-1], list(range(BLOCKS))
LAUNCH_FAILED = 719


def paged(**changes: object) -> CacheLayout:
    options = {"num_blocks": BLOCKS, "block_tokens": 16, "kv_heads": 2, "head_dim": 16, "dtype": "float16"}
    layout = CacheLayout.paged(layers=("layers.0", "layers.1"), fingerprint={}, **(options | changes))
    regions = tuple(msgspec.structs.replace(region, device="cuda:0") for region in layout.regions)
    return msgspec.structs.replace(layout, regions=regions)


class Side:
    """A connector with a cache in the stand-in's memory."""

    def __init__(self, name: str, layout: CacheLayout, seed: int | None, **options: object) -> None:
        self.connector = kvxfer.Connector(name, backends=["cuda_ipc"], secret=SECRET, **options)
        rng = np.random.default_rng(seed)
        fill = (lambda n: np.zeros(n, np.uint8)) if seed is None else (lambda n: rng.integers(0, 256, n, np.uint8))
        self.arrays = {region.name: stand_in.DeviceArray(fill(region.nbytes)) for region in layout.regions}
        self.cache = self.connector.register(self.arrays, layout, name="kv")

    def publish(self, ids: list[int] = IDS, **options: object) -> kvxfer.Lease:
        return self.cache.publish({"full": ids}, tokens=16 * len(ids), **options)

    def fetch(self, lease: kvxfer.Lease, into: list[int] = INTO, **options: object) -> kvxfer.Transfer:
        return self.cache.fetch(bytes(lease.ticket), into={"full": into}, **options)

    def rows(self, layer: str) -> np.ndarray:
        return self.arrays[layer].get().reshape(BLOCKS, -1)


class Two(contextlib.ExitStack):
    """Both ends, which have met, and the device."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.device = self.enter_context(stand_in.installed())
        self.prefill, self.decode = Side("prefill", paged(), 1), Side("decode", paged(), None, **options)
        for side in (self.prefill, self.decode):
            self.callback(side.connector.close)
        self.decode.fetch(self.prefill.publish([0]), [0]).wait(20)
        self.lanes = self.decode.cache._node.kernels.lanes("cuda:0")

    def assert_equal(self) -> None:
        for layer in ("layers.0", "layers.1"):
            assert np.array_equal(self.decode.rows(layer), self.prefill.rows(layer)[::-1]), layer


@pytest.fixture
def two() -> Iterator[Two]:
    with Two() as both:
        both.device.launches = 0
        yield both


def test_a_fetch_is_launched_before_the_call_returns_and_by_one_call(two):
    two.device.late = []
    transfer = two.decode.fetch(two.prefill.publish())
    assert two.device.launches == len(two.device.late) == 1
    assert transfer.state is TransferState.MOVING and not transfer.done()
    two.device.catch_up()
    assert transfer.done()  # who asks makes progress
    stats = transfer.result()
    assert (stats.way, stats.bytes, stats.copies) == ("mapped", 2 * BLOCKS * 2 * 2 * 16 * 16 * 2, 2 * BLOCKS)
    two.assert_equal()


def test_a_fetch_that_nobody_looks_at_ends_and_releases(two):
    lease = two.prefill.publish()
    transfer = two.decode.fetch(lease)
    until(lambda: transfer.state is TransferState.DONE, what="the end")
    assert lease.released.wait(10)
    two.assert_equal()


@pytest.mark.parametrize("late", [False, True])
def test_callbacks_and_await_see_the_end(two, late):
    called = threading.Event()
    two.device.late = [] if late else None
    transfer = two.decode.fetch(two.prefill.publish())
    transfer.add_done_callback(lambda _: called.set())
    if late:
        assert not called.wait(0.02)
        two.device.catch_up()
    assert called.wait(10)

    async def fetched() -> kvxfer.TransferStats:
        return await two.decode.fetch(two.prefill.publish())

    assert asyncio.run(asyncio.wait_for(fetched(), 20)).way == "mapped"
    two.assert_equal()


def test_many_wait_for_one_fetch(two):
    two.device.late = []
    transfer, ways = two.decode.fetch(two.prefill.publish()), []
    threads = [threading.Thread(target=lambda: ways.append(transfer.wait(20).way)) for _ in range(6)]
    for thread in threads:
        thread.start()
    two.device.catch_up()
    for thread in threads:
        thread.join(20)
    assert ways == ["mapped"] * 6
    two.assert_equal()


def test_more_fetches_at_once_than_lanes(two):
    free = len(two.lanes._free)
    two.device.late = []
    fetches = [two.decode.fetch(two.prefill.publish([block]), [block]) for block in range(BLOCKS)]
    launched = [transfer.state is TransferState.MOVING for transfer in fetches]
    movers = two.decode.connector._node.limits.mover_threads
    assert launched[: free - movers] == [True] * (free - movers)  # the others are left to mover threads
    until(lambda: two.device.launches == free, what="a launch on every lane")
    two.device.catch_up()
    for transfer in fetches:
        transfer.wait(20)
    for layer in ("layers.0", "layers.1"):
        assert np.array_equal(two.decode.rows(layer), two.prefill.rows(layer))
    until(lambda: len(two.lanes._free) == free, what="every lane given back, and none made")


@pytest.mark.parametrize("early", [False, True], ids=["published", "published later"])
def test_a_transfer_that_waits_for_a_lane_is_launched_once_and_judged(two, early):
    """Lanes are given back one by one; leases that end meanwhile are not confirmed."""
    two.device.late = []
    made, issue, leases, fetches = two.lanes._made, two.prefill.connector.issue, [], []
    for block in range(BLOCKS):
        ticket = issue(paged(), {"full": [block]}, tokens=16, cache="kv") if early else None
        if early:
            fetches.append(two.decode.cache.fetch(ticket, into={"full": [block]}))
        leases.append(two.prefill.publish([block], ticket=ticket))
        if not early:
            fetches.append(two.decode.fetch(leases[-1], [block]))
    until(lambda: two.device.launches == made and len(two.lanes._waiting) == BLOCKS - made, what="all in line")
    for lease in leases[::2]:
        lease.release()
    two.device.catch_up()
    for number, transfer in enumerate(fetches):
        if number % 2:
            assert transfer.wait(20).way == "mapped"
        else:
            with pytest.raises(errors.LeaseExpired):
                transfer.wait(20)
    assert two.device.launches == BLOCKS and not two.lanes._waiting


def test_a_lane_grows_on_a_mover_thread():
    """Which may have to wait for the device, as the caller must not."""
    blocks = 200_000
    layout = paged(num_blocks=blocks, kv_heads=1, head_dim=1, block_tokens=1)
    with stand_in.installed() as device, contextlib.ExitStack() as stack:
        prefill, decode = Side("prefill", layout, 1), Side("decode", layout, None)
        for side in (prefill, decode):
            stack.callback(side.connector.close)
        ids = {"full": np.arange(blocks, dtype=np.int32)}
        threads, real = [], device.enqueue_blocks
        device.enqueue_blocks = lambda *args: threads.append(threading.current_thread()) or real(*args)
        for count in (blocks, blocks):
            lease = prefill.cache.publish({"full": ids["full"][:count]}, tokens=count)
            transfer = decode.cache.fetch(bytes(lease.ticket), into={"full": ids["full"][:count]})
            until(transfer.done, what="the end")
            assert transfer.result().copies == 2 * count
        grown, again = threads
        assert grown is not threading.main_thread() and again is threading.main_thread()
        assert np.array_equal(decode.arrays["layers.1"].get(), prefill.arrays["layers.1"].get())


@pytest.mark.parametrize("how", ["deadline", "cancelled", "closed"])
def test_a_transfer_does_not_end_before_the_device_has(two, how):
    two.device.late = []
    transfer = two.decode.fetch(two.prefill.publish(), timeout_s=0.2 if how == "deadline" else 20)
    if how == "cancelled":
        transfer.cancel()
    elif how == "closed":
        closing = threading.Thread(target=two.decode.connector.close)
        closing.start()
    until(lambda: transfer.done() or transfer.state is TransferState.CANCELLING, what="cancelling")
    assert not transfer.done()
    two.device.catch_up()
    expected = errors.DeadlineExceeded if how == "deadline" else errors.Cancelled
    with pytest.raises(expected):
        transfer.wait(20)
    if how == "closed":
        closing.join(20)
    assert len(two.lanes._free) == len({id(lane) for lane in two.lanes._free})


def test_a_wait_keeps_to_its_time(two):
    two.device.late = []
    transfer = two.decode.fetch(two.prefill.publish())
    with pytest.raises(errors.DeadlineExceeded, match="has not ended within"):
        transfer.wait(0.01)
    with pytest.raises(errors.DeadlineExceeded, match="has not ended within"):
        transfer.wait(0)
    two.device.catch_up()
    transfer.wait(20)


def test_the_verdict_is_what_the_device_has_read(two):
    """A lease that ends before the last byte is not confirmed; one that ends after it is, whenever the host looks."""
    two.device.late = []
    before, after = two.prefill.publish(), two.prefill.publish()
    first, second = two.decode.fetch(before), two.decode.fetch(after)
    before.release()
    [late, early] = [two.device.late[0], two.device.late[1]]
    early()
    after.release()
    assert second.wait(20).way == "mapped"
    two.device.late = [late]
    two.device.catch_up()
    with pytest.raises(errors.LeaseExpired):
        first.wait(20)


@pytest.mark.parametrize("when", ["at the launch", "under way"])
def test_a_device_that_fails_ends_the_transfer_and_its_lane(two, when):
    free = len(two.lanes._free)
    two.device.late = []
    two.device.status = LAUNCH_FAILED if when == "at the launch" else 0
    transfer = two.decode.fetch(two.prefill.publish())
    two.device.status = LAUNCH_FAILED
    with pytest.raises(CudaError) as failed:
        transfer.wait(20)
    assert failed.value.status == LAUNCH_FAILED
    two.device.status, two.device.late = 0, None
    assert len(two.lanes._free) == free - 1
    two.decode.fetch(two.prefill.publish()).wait(20)
    two.assert_equal()


@pytest.mark.parametrize("ended", [False, True])
def test_a_record_of_other_bytes_is_seen_though_its_blocks_were_copied(two, ended):
    """The digest is compared while the device copies; the transfer fails whichever is done first."""
    lease = two.prefill.publish()
    other = tickets.Record.of(16 * BLOCKS, {"full": np.array(INTO, np.int32)}).encode()
    table = two.prefill.connector._node.table
    _, offset, nbytes = table._records[lease.ticket.slot]
    assert nbytes == len(other)
    table._memory[offset : offset + nbytes] = np.frombuffer(other, np.uint8)
    real = two.device.enqueue_blocks

    def enqueue(*arguments):
        status = real(*arguments)
        if ended:
            lease.release()
        return status

    two.device.enqueue_blocks = enqueue
    transfer = two.decode.fetch(lease)
    assert two.device.launches == 1
    error, message = (errors.LeaseExpired, "ended") if ended else (errors.BackendError, "not the one")
    with pytest.raises(error, match=message):
        transfer.wait(20)
    two.device.enqueue_blocks = real
    assert transfer.state is TransferState.FAILED
    two.decode.fetch(two.prefill.publish()).wait(20)
    two.assert_equal()


def test_a_stream_that_waits_is_let_go_by_the_device(two):
    two.device.late = []
    transfer = two.decode.fetch(two.prefill.publish())
    transfer.wait_on(7)
    gate = transfer.gate
    assert not gate.is_open()
    two.device.catch_up()
    transfer.wait(20)
    assert gate.value > 1  # it was given back, which is done with open gates only


def test_a_wait_that_cuda_holds_up_keeps_no_lock_of_the_transfer(two):
    """It may be held up until some gate opens, and what opens that needs the transfers' locks. The gate is given back
    when the wait is through."""
    inside, go = threading.Event(), threading.Event()

    def held_up(*_: object) -> int:
        inside.set()
        assert go.wait(10)
        return 0

    two.device.late = []
    transfer = two.decode.fetch(two.prefill.publish())
    two.device.stream_wait_word = held_up
    gate, value = transfer.gate, transfer.gate.value
    waits = threading.Thread(target=transfer.wait_on, args=(7,))
    waits.start()
    assert inside.wait(10)
    two.device.catch_up()
    assert transfer.wait(10).way == "mapped"
    assert gate.is_open() and gate.value == value and transfer.gate is gate
    go.set()
    waits.join()
    assert gate.value > value and transfer.gate is None


def test_what_is_wrong_is_said_as_ever(two):
    lease = two.prefill.publish()
    for into, message in (([99] * BLOCKS, "block ids are 0 to"), ([1] * BLOCKS, "more than once"), (IDS * 2, "lie in")):
        with pytest.raises(errors.InvalidBlocks, match=message):
            two.decode.fetch(lease, into)
    with pytest.raises(errors.UnknownGroup):
        two.decode.cache.fetch(bytes(lease.ticket), into={"other": INTO})
    two.decode.fetch(lease).wait(20)
    with pytest.raises(errors.InvalidTicket, match="used here before"):
        two.decode.fetch(lease)


def test_any_order_of_launches_looks_and_ends(two):
    """Threads that fetch, wait, poll, cancel and run out of time, over a device that takes its time: transfers end in a
    way that fits, every block of one that succeeded is there, and every lane comes back."""
    stop, ended = threading.Event(), []
    queue: collections.deque = collections.deque()
    made, real = two.lanes._made, two.device.enqueue_blocks

    def enqueue(pairing, request, device, stream, max_sms, pinned, tables, events, report):
        queue.append(lambda: two.device._real.walk_blocks(pairing, request, stand_in.SMS, pinned, tables, report))
        return 0

    def run_device() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set() or queue:
            for _ in range(len(queue)):
                queue.rotate(int(rng.integers(0, 4)))  # lanes are streams: none waits for another
                assert queue.popleft()() == 0
            time.sleep(float(rng.choice([0, 0.0002, 0.002])))

    def fetch_some(seed: int) -> None:
        rng = np.random.default_rng(seed)
        block = seed  # of this thread alone
        for _ in range(40):
            lease = two.prefill.publish([block])
            transfer = two.decode.fetch(lease, [block], timeout_s=float(rng.choice([0.0005, 20, 20, 20])))
            how = rng.integers(0, 6)
            if how == 0:
                transfer.cancel()
            elif how == 1:
                transfer.add_done_callback(lambda _: None)
            elif how == 2:
                lease.release()
            elif how == 3:
                with contextlib.suppress(errors.DeadlineExceeded):
                    transfer.wait(0.0003)
            if how < 3:
                until(transfer.done, timeout_s=60, what="the end")
            else:
                with contextlib.suppress(errors.KvxferError):
                    transfer.wait(60)
            assert transfer.done()
            ended.append(transfer)
            if transfer.state is TransferState.DONE:
                for layer in ("layers.0", "layers.1"):
                    assert np.array_equal(two.decode.rows(layer)[block], two.prefill.rows(layer)[block])
                    two.decode.arrays[layer].bytes.reshape(BLOCKS, -1)[block] = 0
            else:
                assert isinstance(
                    transfer.exception(), (errors.Cancelled, errors.DeadlineExceeded, errors.LeaseExpired)
                )
            lease.release()

    two.device.enqueue_blocks = enqueue
    device = threading.Thread(target=run_device)
    device.start()
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        running = [pool.submit(fetch_some, seed) for seed in range(10)]
        for one in running:
            one.result(120)
    stop.set()
    device.join(20)
    two.device.enqueue_blocks = real
    assert len(ended) == 400 and {t.state for t in ended} >= {TransferState.DONE, TransferState.CANCELLED}
    until(lambda: len(two.lanes._free) == two.lanes._made, what="every lane given back")
    assert two.lanes._made == made and not two.decode.connector._node.active
    two.decode.fetch(two.prefill.publish()).wait(20)
    two.assert_equal()


def test_unequal_blocks_are_planned_on_a_mover_thread():
    with stand_in.installed() as device, contextlib.ExitStack() as stack:
        prefill = Side("prefill", paged(), 1)
        decode = Side("decode", paged(block_tokens=8, num_blocks=2 * BLOCKS), None)
        for side in (prefill, decode):
            stack.callback(side.connector.close)
        for _ in range(2):
            assert decode.fetch(prefill.publish(), list(range(2 * BLOCKS))).wait(20).way == "mapped"
        assert device.launches == 2


@pytest.mark.parametrize("orders", [("HND", "HND"), ("HND", "NHD")], ids="-".join)
def test_several_ranks_are_one_transfer(orders):
    """Heads of two ranks, each with its own launch; one of them fails to launch, and nothing is left behind.

    Where one rank's heads have to be gathered token by token, all are planned.
    """
    engine = {"engine": "prefill", "generation": 42, "ranks": 2}
    halves = [paged(head_start=2 * i, total_heads=4, order=order) for i, order in enumerate(orders)]
    whole = paged(kv_heads=4, order="HND")
    with stand_in.installed() as device, contextlib.ExitStack() as stack:
        ranks = [
            kvxfer.Connector(f"prefill-{i}", rank=i, backends=["cuda_ipc"], secret=SECRET, **engine) for i in range(2)
        ]
        for rank in ranks:
            stack.callback(rank.close)
            rank.set_members({i: other.endpoint for i, other in enumerate(ranks)})
        arrays, caches = [], []
        for i, (rank, layout) in enumerate(zip(ranks, halves, strict=True)):
            values = np.random.default_rng(i).integers(0, 256, layout.regions[0].nbytes, np.uint8)
            arrays.append({region.name: stand_in.DeviceArray(values) for region in layout.regions})
            caches.append(rank.register(arrays[-1], layout, name="kv"))
        decode = Side("decode", whole, None)
        stack.callback(decode.connector.close)
        for fails in (False, False, True, False):
            ticket = ranks[0].issue(halves[0], {"full": IDS}, tokens=16 * BLOCKS, cache="kv")
            leases = [cache.publish({"full": IDS}, tokens=16 * BLOCKS, ticket=ticket) for cache in caches]
            name = "enqueue_blocks" if orders[0] == orders[1] else "launch_moves"
            device.launches, real = 0, getattr(device, name)
            if fails:
                setattr(device, name, lambda *args, real=real: real(*args) or LAUNCH_FAILED * (device.launches == 2))
            transfer = decode.cache.fetch(ticket, into={"full": INTO})
            if fails:
                with pytest.raises(CudaError):
                    transfer.wait(20)
                setattr(device, name, real)
                for lease in leases:
                    lease.release()
            else:
                assert transfer.wait(20).peers == 2
                assert all(lease.released.wait(10) for lease in leases)  # a slot is used again once every rank is done
            assert device.launches == 2
        for layer in whole.layers:
            found = decode.rows(layer).reshape(BLOCKS, 2, 4, 16, -1)  # block, K and V, head, token
            for i, (half, order) in enumerate(zip(arrays, orders, strict=True)):
                there = half[layer].get().reshape(BLOCKS, 2, *((2, 16) if order == "HND" else (16, 2)), -1)
                there = there if order == "HND" else there.swapaxes(2, 3)
                assert np.array_equal(found[:, :, 2 * i : 2 * i + 2], there[::-1])


def test_tables_of_many_blocks_are_copied_to_the_device():
    blocks = 3000
    layout = paged(num_blocks=blocks, kv_heads=1, head_dim=8)
    with stand_in.installed(), contextlib.ExitStack() as stack:
        prefill, decode = Side("prefill", layout, 1), Side("decode", layout, None)
        for side in (prefill, decode):
            stack.callback(side.connector.close)
        ids = np.random.default_rng(0).permutation(blocks).tolist()
        for _ in range(2):
            decode.fetch(prefill.publish(ids), list(range(blocks))).wait(20)
        found, there = (side.arrays["layers.0"].get().reshape(blocks, -1) for side in (decode, prefill))
        assert np.array_equal(found, there[ids])


def test_more_parts_than_one_launch_takes():
    """Groups of every kind of slice, walked as the device would, against the CPU's copy."""
    from kvxfer.models import layout_for

    layout = layout_for("deepseek-ai/DeepSeek-V4.1-Flash", num_blocks=64)
    [joined] = join([layout], layout)
    pairing, table = pairing_of(joined), BlockTable(layout)
    rng, lists = np.random.default_rng(0), []
    for _ in range(2):
        ids = rng.permutation(64).astype(np.int32)
        cuts = np.cumsum([0, *(min(group.blocks_for(300), group.tail_blocks) for group in layout.groups)])
        lists.append({g.name: ids[a:b] for g, a, b in zip(layout.groups, cuts, cuts[1:], strict=False)})
    record = Record.of(300, lists[0]).encode()
    src = [rng.integers(0, 256, region.nbytes, np.uint8) for region in layout.regions]
    by_cpu, by_walk = ([np.zeros_like(array) for array in src] for _ in range(2))
    addresses = [bases([array.ctypes.data for array in side]) for side in (src, by_cpu, by_walk)]

    def request():
        return pairing.request(record, table.check(lists[1], tokens=300, role="destination"), tokens=300)

    copied = request()
    assert HostPairing(pairing, *addresses[:2]).copy(copied, 1 << 40) == copied.nbytes
    made = native().Pairing()
    for rows in pairing.rows * 3:  # 27 parts: the extension's parts are those of the request three times
        made.add(rows.ctypes.data, len(rows), addresses[0].ctypes.data, addresses[2].ctypes.data)
    walked = request()
    tables = np.zeros(made.table_bytes(walked.table) + 16, np.uint8)
    at = -(-tables.ctypes.data // 16) * 16
    words = np.zeros(8, np.uint64)
    words[0] = 77
    lease, seen, gate, done = (words.ctypes.data + 8 * i for i in range(4))
    report = (lease, seen, gate, 5, done, 6)
    assert native().walk_blocks(made, walked.table, 3, at, 0, report) == 0
    assert words.tolist()[:4] == [77, 77, 5, 6]
    assert all(np.array_equal(a, b) for a, b in zip(by_cpu, by_walk, strict=True)) and any(a.any() for a in by_cpu)


def test_lanes_are_left_for_mover_threads():
    with Two(limits=Limits(mover_threads=3)) as both:
        lanes, called = both.lanes, []
        assert lanes.take(len(lanes._free) - 2, spare=True) is None
        taken = lanes.take(len(lanes._free) - 3, spare=True)
        assert lanes.take(1, spare=True) is None
        taken += lanes.take(3)
        assert lanes.take(1, otherwise=lambda: called.append(1)) is None and not called
        lanes.give_back([taken.pop()])
        assert called == [1]
        lanes.give_back(taken)
        assert len(lanes.take(len(lanes._free) + 5)) == lanes._made  # as many ranks as there may be
