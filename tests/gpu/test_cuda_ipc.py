"""The GPU backend between two processes: memory that CUDA IPC cannot export, streams, and peers that come, go and die.

What every backend must do is in tests/backends. KVXFER_PEER_GPU chooses the peer's GPU, which is the only one it sees.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, Limits, TransferState, cuda, errors
from kvxfer import ticket as tickets
from kvxfer.backends import cuda_ipc
from kvxfer.cuda.gates import Gates
from kvxfer.cuda.native import native
from kvxfer.lease import ENDED
from tests.backends.peer import SECRET, Peer, make_arrays, placed, read
from tests.gpu.memory import BusyStream, VirtualMemory, need_devices
from tests.processes import descriptors, segments, until

pytestmark = pytest.mark.gpu
need_devices(1)
cupy = pytest.importorskip("cupy")

BLOCKS = 64
ROUNDS = 800  # of a busy stream: about two tenths of a second
HANGS_S = 8.0  # longer than anything takes here
PEER_GPU = os.environ.setdefault("KVXFER_PEER_GPU", "0")


def paged(**changes) -> CacheLayout:
    options = {"num_blocks": BLOCKS, "kv_heads": 8, "head_dim": 128, "dtype": "float16", "fingerprint": {}}
    return CacheLayout.paged(layers=("layers.0", "layers.1"), block_tokens=16, **(options | changes))


LARGE = paged(kv_heads=512)  # 256 MiB a layer: tens of milliseconds on one multiprocessor


class Here:
    """A connector in this process with a zero cache in GPU memory."""

    def __init__(self, layout: CacheLayout, memory: str = "gpu", name: str = "kv", **options) -> None:
        self.connector = kvxfer.Connector("here", backends=["cuda_ipc"], secret=SECRET, **options)
        self.layout = layout
        self.arrays = make_arrays(layout, memory, None)
        self.cache = self.connector.register(self.arrays, placed(layout, memory), name=name)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self.connector.close()

    def meet(self, peer: Peer) -> Here:
        """One transfer, so that nothing has to be opened, pinned or loaded later."""
        name = self.cache.name
        self.cache.fetch(peer.publish(name, IDS, tokens=TOKENS), into=INTO).wait(20)
        return self

    def rows(self, layer: str = "layers.0") -> np.ndarray:
        return read(self.arrays)[layer].reshape(self.layout.groups[0].num_blocks, -1)


IDS = {"full": list(range(BLOCKS))[::-1]}
INTO = {"full": list(range(BLOCKS))}
TOKENS = 16 * BLOCKS


@pytest.fixture(scope="module")
def peer():
    with Peer("cuda_ipc") as peer:
        yield peer


def register(peer: Peer, layout: CacheLayout, memory: str = "gpu", seed: int | None = 1) -> str:
    name = f"kv{time.monotonic_ns()}"
    peer.register(name, layout, memory, seed)
    return name


@contextlib.contextmanager
def stacks_of(peer: Peer) -> Iterator[None]:
    """Prints where the threads of both processes are if the block takes long, which means that one waits in vain."""

    def tell() -> None:
        faulthandler.dump_traceback(sys.__stderr__)
        print(peer.stacks(), flush=True)

    timer = threading.Timer(HANGS_S, tell)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def assert_fetched(here: Here, there: dict[str, np.ndarray]) -> None:
    for layer in here.layout.layers:
        assert np.array_equal(here.rows(layer), there[layer].reshape(BLOCKS, -1)[::-1]), layer


# --- memory that CUDA IPC cannot export ---------------------------------------------------------------------


@pytest.mark.parametrize("here_memory", ["gpu", "vmm"])
@pytest.mark.parametrize("push", [False, True], ids=["fetch", "send"])
def test_allocations_mapped_in_a_row(peer, push, here_memory):
    layout = paged(num_blocks=BLOCKS, kv_heads=8)
    name = register(peer, layout, "vmm")
    with Here(layout, here_memory, name) as here:
        if push:
            reservation = here.cache.reserve(INTO, tokens=TOKENS)
            key = peer.send(name, bytes(reservation.ticket), IDS)
            assert reservation.wait(20).way == peer.wait(key).way == "mapped"
        else:
            ticket = peer.publish(name, IDS, tokens=TOKENS)
            assert here.cache.fetch(ticket, into=INTO).wait(20).way == "mapped"
        assert_fetched(here, peer.contents(name))


def test_more_allocations_than_one_packet_takes():
    from kvxfer.backends.descriptors import BATCH

    unit = 2 << 20
    values = np.arange(unit * (2 * BATCH + 3) // 4, dtype=np.uint32).view(np.uint8)
    memory = VirtualMemory(values.nbytes, pieces=2 * BATCH + 3)
    array = memory.holding(values)
    backend = cuda_ipc.CudaIpcBackend()
    try:
        registered = backend.register(array.data.ptr + 4096, values.nbytes - 8192, "cuda:0")
        handle = msgspec.msgpack.decode(registered.handle[1:], type=cuda_ipc._RangeHandle)
        mapped = cuda_ipc.receive_range(handle.server, handle.secret, handle.number, handle.span, 0)
        found = np.empty(values.nbytes, np.uint8)
        with cuda.Stream(device=0) as stream:
            cuda.copy_bytes(
                found.ctypes.data, mapped.address, found.nbytes, device=0, stream=stream.address
            )
            stream.synchronise()
        assert np.array_equal(found, values)
        mapped.close()
        backend.deregister(registered)
        backend.deregister(registered)
        with pytest.raises(errors.BackendError, match="not registered"):
            cuda_ipc.receive_range(handle.server, handle.secret, handle.number, handle.span, 0)
    finally:
        backend.close()


def test_memory_files_are_no_allocations():
    fake = os.memfd_create("no allocation")
    os.ftruncate(fake, 2 << 20)
    mapped = cuda.MappedRange(2 << 20, device=0)
    with pytest.raises(errors.BackendError, match="opening a peer's allocation"):
        mapped.append(fake, 2 << 20)
    with pytest.raises(errors.BackendError, match="are left"):
        mapped.append(fake, 4 << 20)
    mapped.close()
    os.close(fake)


def test_allocations_that_were_not_made_to_be_shared():
    memory = VirtualMemory(1 << 20, shareable=False)
    backend = cuda_ipc.CudaIpcBackend()
    try:
        with pytest.raises(errors.BackendError, match="POSIX_FILE_DESCRIPTOR"):
            backend.register(memory.address, 1 << 20, "cuda:0")
    finally:
        backend.close()


def test_memory_of_a_pool():
    memory = cupy.cuda.malloc_async(1 << 20)
    backend = cuda_ipc.CudaIpcBackend()
    try:
        with pytest.raises(errors.BackendError, match="cudaMallocAsync"):
            backend.register(memory.ptr, 1 << 20, "cuda:0")
    finally:
        backend.close()


def test_expandable_segments_of_torch(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    layout = paged(num_blocks=BLOCKS, kv_heads=64)  # some 16 MiB a layer
    with Peer("cuda_ipc") as peer, Here(layout) as here:
        peer.register("kv", layout, "expandable", 1)
        ticket = peer.publish("kv", IDS, tokens=TOKENS)
        assert here.cache.fetch(ticket, into=INTO).wait(30).way == "mapped"
        assert_fetched(here, peer.contents("kv"))


# --- streams ------------------------------------------------------------------------------------------------


def test_blocks_are_read_after_the_publishers_stream_and_a_stream_waits_for_them(peer):
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name).meet(peer) as here:
        busy = BusyStream()
        ticket, seconds = peer.publish_later(name, IDS, ROUNDS, 42, tokens=TOKENS)
        began = time.monotonic()
        transfer = here.cache.fetch(ticket, into=INTO)
        transfer.wait_on(busy.stream)
        copy = busy.copy(here.arrays["layers.1"])
        host_s = time.monotonic() - began
        waited = busy.is_busy()
        busy.stream.synchronise()
        assert (copy == 42).all()
        assert transfer.wait(20).way == "mapped"
        assert waited and host_s < 0.1 and seconds < 0.1, (host_s, seconds)
        transfer.wait_on(busy.stream)  # it has ended: nothing to wait for
        busy.stream.synchronise()


def test_blocks_are_written_after_the_readers_stream(peer):
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name) as here:
        busy = BusyStream()
        busy.work(ROUNDS)
        for array in here.arrays.values():
            busy.fill(array, 9)
        transfer = here.cache.fetch(peer.publish(name, IDS, tokens=TOKENS), into=INTO, stream=busy.stream)
        transfer.wait(20)
        busy.stream.synchronise()  # what it wrote comes before the blocks, whenever they came
        assert_fetched(here, peer.contents(name))


def test_a_packed_fetch_waits_for_both_streams(peer):
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name, ways=("packed",)).meet(peer) as here:
        busy = BusyStream()
        busy.work(ROUNDS)
        for array in here.arrays.values():
            busy.fill(array, 9)
        ticket, _ = peer.publish_later(name, IDS, ROUNDS, 43, tokens=TOKENS)
        transfer = here.cache.fetch(ticket, into=INTO, stream=busy.stream)
        transfer.wait_on(busy.stream)
        copy = busy.copy(here.arrays["layers.0"])
        busy.stream.synchronise()
        assert (copy == 43).all()
        assert transfer.wait(20).way == "packed"


def test_a_send_reads_after_its_stream_and_streams_wait_on_either_side(peer):
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name).meet(peer) as here:
        busy = BusyStream()
        reservation = here.cache.reserve(INTO, tokens=TOKENS)
        reservation.wait_on(busy.stream)
        copy = busy.copy(here.arrays["layers.0"])
        key = peer.send_later(name, bytes(reservation.ticket), IDS, ROUNDS, 44)
        with stacks_of(peer):
            busy.stream.synchronise()
        assert (copy == 44).all(), (reservation, reservation.elapsed_s, reservation.error)
        reservation.wait(20)
        peer.wait(key)
        assert (here.rows("layers.1") == 44).all()


@pytest.mark.parametrize("how", ["deadline", "cancelled", "released"])
def test_a_transfer_that_fails_releases_the_stream(peer, how):
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name).meet(peer) as here:
        busy = BusyStream()
        ticket = peer.issue(layout, IDS, tokens=TOKENS, cache=name)
        if how == "released":
            peer.publish(name, IDS, tokens=TOKENS, ticket=ticket)
            peer.release(ticket)
        transfer = here.cache.fetch(ticket, into=INTO, timeout_s=1.0)
        transfer.wait_on(busy.stream)
        busy.copy(here.arrays["layers.0"])
        if how == "cancelled":
            assert busy.is_busy()
            transfer.cancel()
        began = time.monotonic()
        busy.stream.synchronise()
        assert time.monotonic() - began < 3.0
        expected = {"deadline": errors.DeadlineExceeded, "cancelled": errors.Cancelled, "released": errors.LeaseExpired}
        with pytest.raises(expected[how]):
            transfer.wait(5)


def test_a_stream_may_wait_before_the_peer_is_known(peer):
    """Dialling opens the peer's memory and pins its lease table, which must not wait for the waiting stream."""
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name) as here:
        busy = BusyStream()
        transfer = here.cache.fetch(peer.publish(name, IDS, tokens=TOKENS), into=INTO, timeout_s=5.0)
        transfer.wait_on(busy.stream)
        copy = busy.copy(here.arrays["layers.0"])
        assert transfer.wait(10).way == "mapped"
        busy.stream.synchronise()
        assert copy.tobytes() == read(here.arrays)["layers.0"].tobytes()


def test_a_lease_that_ends_while_the_device_waits_is_not_confirmed(peer):
    """The device reads the lease's word after the bytes, whatever the host had seen before."""
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name).meet(peer) as here:
        [remote] = here.connector._node.directory.peers.values()
        ticket = peer.publish(name, IDS, tokens=TOKENS)
        busy = BusyStream()
        busy.work(ROUNDS)
        transfer = here.cache.fetch(ticket, into=INTO, stream=busy.stream)
        legs = until(lambda: transfer._legs, what="moving")
        peer.release(ticket)
        with pytest.raises(errors.LeaseExpired):
            transfer.wait(20)
        assert remote.table is not None and legs[0].ending.seen == tickets.parse(ticket, SECRET).lease | ENDED


def test_many_transfers_use_the_gates_again(peer):
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name) as here:
        busy = BusyStream()
        for _ in range(200):
            transfer = here.cache.fetch(peer.publish(name, {"full": [1]}, tokens=16), into={"full": [2]})
            transfer.wait_on(busy.stream)
            transfer.wait(20)
            busy.stream.synchronise()
        assert len(here.cache.gates._pages) == 1


def test_a_driver_without_stream_waits_has_a_thread_look(monkeypatch):
    monkeypatch.setattr(native(), "stream_wait_word", lambda *_: 801)  # cudaErrorNotSupported
    busy, gates = BusyStream(), Gates(0)
    gate, target = gates.take(), cupy.asarray(np.full(4096, 5, np.uint8))
    gate.hold(busy.stream)
    copy = busy.copy(target)
    time.sleep(0.05)
    assert busy.is_busy() and (copy == 77).all()
    gate.open()
    busy.stream.synchronise()
    assert (copy == 5).all()
    gates.give_back(gate)


def test_a_word_in_memory_that_is_not_pinned_is_written_by_the_host():
    busy, memory = BusyStream(), np.zeros(1, np.uint64)
    busy.work(100)
    cuda.write_after(busy.stream.address, memory.ctypes.data, 5, device=0)
    assert memory[0] == 5 and not busy.is_busy()


# --- launched by the caller, seen by whoever looks ---------------------------------------------------------


def test_a_fetch_is_launched_before_the_call_returns(peer):
    """The reader's stream is busy, so nothing can have been moved yet, and no mover thread has been needed."""
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name).meet(peer) as here:
        free = len(here.connector._node.kernels.lanes("cuda:0")._free)
        busy = BusyStream()
        busy.work(ROUNDS)
        began = time.monotonic()
        transfer = here.cache.fetch(peer.publish(name, IDS, tokens=TOKENS), into=INTO, stream=busy.stream)
        host_s = time.monotonic() - began
        assert transfer.state is TransferState.MOVING and not transfer.done() and busy.is_busy()
        assert len(here.connector._node.kernels.lanes("cuda:0")._free) == free - 1
        with pytest.raises(errors.DeadlineExceeded, match="has not ended"):
            transfer.wait(0.001)
        assert transfer.wait(20).way == "mapped" and host_s < 0.1, host_s
        assert_fetched(here, peer.contents(name))
        assert len(here.connector._node.kernels.lanes("cuda:0")._free) == free


def test_a_fetch_that_nobody_looks_at_ends_and_releases(peer):
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name).meet(peer) as here:
        ticket = peer.publish(name, IDS, tokens=TOKENS)
        transfer = here.cache.fetch(ticket, into=INTO)
        until(lambda: transfer.state is TransferState.DONE, what="the end")
        assert peer.lease_state(ticket, 10.0) == "released"
        called = threading.Event()
        other = here.cache.fetch(peer.publish(name, IDS, tokens=TOKENS), into=INTO)
        other.add_done_callback(lambda _: called.set())
        assert called.wait(10) and other.state is TransferState.DONE
        assert_fetched(here, peer.contents(name))


def test_more_fetches_at_once_than_lanes(peer):
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name).meet(peer) as here:
        lanes = here.connector._node.kernels.lanes("cuda:0")
        busy, made = BusyStream(), lanes._made
        busy.work(ROUNDS)
        fetches = [
            here.cache.fetch(peer.publish(name, {"full": [b]}, tokens=16), into={"full": [b]}, stream=busy.stream)
            for b in range(BLOCKS)
        ]
        for transfer in fetches:
            transfer.wait(20)
        there = peer.contents(name)
        for layer in layout.layers:
            assert np.array_equal(here.rows(layer), there[layer].reshape(BLOCKS, -1))
        until(lambda: len(lanes._free) == lanes._made == made, what="every lane given back, and none made")


def test_one_large_list_after_small_ones(peer):
    """Tables that outgrow the lane's memory, and are copied to the device first."""
    layout = paged(num_blocks=100_000, kv_heads=1, head_dim=16)
    name = register(peer, layout)
    with Here(layout, name=name) as here:
        for count in (1, 5000, 99_999, 3):
            ids = np.random.default_rng(count).permutation(100_000)[:count].astype(np.int32)
            into = np.random.default_rng(count + 1).permutation(100_000)[:count].astype(np.int32)
            ticket = peer.publish(name, {"full": ids}, tokens=16 * count)
            stats = here.cache.fetch(ticket, into={"full": into}).wait(20)
            assert stats.way == "mapped" and stats.copies == 2 * count
            there = peer.contents(name)
            for layer in layout.layers:
                assert np.array_equal(here.rows(layer)[into], there[layer].reshape(100_000, -1)[ids])


# --- unequal caches, host memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("push", [False, True], ids=["fetch", "send"])
def test_one_kernel_converts_into_the_other_cache(peer, push):
    src, dst = paged(dtype="bfloat16"), paged(dtype="float16", order="HND")
    found = []
    for ways in (("mapped",), ("packed",)):
        name = f"kv{time.monotonic_ns()}"
        with Peer("cuda_ipc", ways=ways) as other, Here(dst, name=name, ways=ways) as here:
            other.register(name, src, "gpu", 1)
            other.mask(name, 0xBF)
            if push:
                reservation = here.cache.reserve(INTO, tokens=TOKENS)
                key = other.send(name, bytes(reservation.ticket), IDS)
                reservation.wait(20)
                stats = other.wait(key)
            else:
                stats = here.cache.fetch(other.publish(name, IDS, tokens=TOKENS), into=INTO).wait(20)
            assert stats.way == ways[0]
            found.append(read(here.arrays))
    assert all(np.array_equal(found[0][layer], found[1][layer]) and found[0][layer].any() for layer in dst.layers)


@pytest.mark.parametrize("there", ["private", "shared"])
def test_a_host_cache_and_a_gpu_cache_meet_through_pinned_staging(peer, there):
    layout = paged()
    name = register(peer, layout, there)
    with Here(layout, name=name) as here:
        stats = here.cache.fetch(peer.publish(name, IDS, tokens=TOKENS), into=INTO).wait(20)
        assert stats.way == "packed" and "memory" in stats.why_not_mapped
        assert_fetched(here, peer.contents(name))
        backend = here.connector._node.backends["cuda_ipc"]
        assert len(backend._pinned) == 2  # the lease table and the staging


def test_gpus_that_do_not_reach_each_other_meet_through_pinned_staging(peer, monkeypatch, caplog):
    def no_access(*_, **__):
        raise cuda.CudaError("opening a peer's memory: no peer access", status=217)

    monkeypatch.setattr(cuda, "open_memory", no_access)
    layout = paged()
    name = register(peer, layout)
    with Here(layout, name=name) as here:
        stats = here.cache.fetch(peer.publish(name, IDS, tokens=TOKENS), into=INTO).wait(20)
        assert stats.way == "packed" and "no peer access" in stats.why_not_mapped
        assert_fetched(here, peer.contents(name))
    assert "through pinned host memory" in caplog.text


# --- peers that leave ---------------------------------------------------------------------------------------


def free_bytes(gpu: str) -> int:
    """Free memory of a GPU, as a process of its own sees it."""
    code = "import cupy; print(cupy.cuda.runtime.memGetInfo()[0])"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("memory", ["gpu", "vmm"])
def test_peers_that_come_and_go_leave_nothing(memory):
    layout = paged(kv_heads=128)  # 64 MiB a layer
    with Here(layout) as here:
        seen, kept = [], []
        for _ in range(3):
            with Peer("cuda_ipc") as peer:
                peer.register("kv", layout, memory, 1)
                transfer = here.cache.fetch(peer.publish("kv", IDS, tokens=TOKENS), into=INTO)
                assert transfer.wait(20).way == "mapped"
                kept.append(transfer)  # an engine may keep the handle
            backend = here.connector._node.backends["cuda_ipc"]
            until(lambda: not here.connector._node.directory.peers, what="the peer forgotten")
            gc.collect()
            until(lambda: not backend._mappings, what="every mapping let go")  # noqa: B023
            until(lambda: "kvxfer-unmap" not in [t.name for t in threading.enumerate()], what="unmapped")
            seen.append((cupy.cuda.runtime.memGetInfo()[0], free_bytes(PEER_GPU), sum(descriptors().values())))
        ours, theirs, open_files = zip(*seen, strict=True)
        for free in (ours, theirs):
            assert abs(free[1] - free[2]) < 16 << 20, free
        assert open_files[1] == open_files[2], open_files


@pytest.mark.parametrize("wire", ["raw", "nvfp4"])
def test_packed_chunks_go_from_gpu_to_gpu(wire):
    layout = paged()
    with Peer("cuda_ipc", ways=("packed",)) as peer, Here(layout, ways=("packed",)) as here:
        peer.register("kv", layout, "gpu", 1)
        peer.mask("kv", 0xBF)
        stats = here.cache.fetch(peer.publish("kv", IDS, tokens=TOKENS), into=INTO, wire=wire).wait(20)
        assert (stats.way, stats.wire) == ("packed", wire)
        assert list(here.connector._node.rings) == [("staging", "cuda:0")]


@pytest.mark.parametrize("memory", ["gpu", "vmm"])
@pytest.mark.parametrize("moment", ["during the kernel", "at rest"])
def test_a_killed_peer_leaves_nothing(memory, moment):
    before = free_bytes(PEER_GPU)
    kill_a_peer(memory, moment)
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    until(lambda: before - free_bytes(PEER_GPU) < 256 << 20, timeout_s=20, what="the peer's GPU memory free again")


def kill_a_peer(memory: str, moment: str) -> None:
    layout = LARGE
    with Here(layout, limits=Limits(max_sms=1)) as here:
        peer = Peer("cuda_ipc")
        peer.register("kv", layout, memory, 1)
        here.cache.fetch(peer.publish("kv", {"full": [0]}, tokens=16), into={"full": [0]}).wait(20)
        transfer = here.cache.fetch(peer.publish("kv", IDS, tokens=TOKENS), into=INTO)
        if moment == "during the kernel":
            until(lambda: transfer.state is TransferState.MOVING or transfer.done(), what="moving")
        else:
            transfer.wait(20)
        pid = peer.process.pid
        peer.kill()
        until(transfer.done, what="the end of the transfer")
        assert transfer.exception() is None or isinstance(transfer.exception(), errors.TransferError)
        directory = here.connector._node.directory
        until(lambda: not directory.peers, what="the peer forgotten")
        gc.collect()
        until(lambda: not here.connector._node.backends["cuda_ipc"]._mappings, what="every mapping let go")
        until(lambda: not segments(pid), what="its shared memory removed")
        sockets = Path("/proc/net/unix").read_text()
        assert f"kvxfer-{os.getuid()}-{pid}-" not in sockets
        # The GPU still works, for this connector and with another peer.
        with Peer("cuda_ipc") as another:
            another.register("kv", layout, memory, 2)
            here.cache.fetch(another.publish("kv", {"full": [3]}, tokens=16), into={"full": [5]}).wait(20)
            assert np.array_equal(here.rows()[5], another.contents("kv")["layers.0"].reshape(BLOCKS, -1)[3])


def test_a_killed_reader_leaves_nothing_at_the_publisher(peer):
    """The publisher survives: its memory, exported to a process that was killed, can be freed and used."""
    layout = LARGE
    name = register(peer, layout, "vmm")
    ticket = peer.publish(name, IDS, tokens=TOKENS, ttl_s=120)
    code = (
        "import os, signal, sys, time\n"
        "from tests.gpu.test_cuda_ipc import *\n"
        "here = Here(LARGE, name=sys.argv[1], limits=Limits(max_sms=1))\n"
        "transfer = here.cache.fetch(bytes.fromhex(sys.argv[2]), into=INTO)\n"
        "while transfer.state is TransferState.POSTED: time.sleep(0.0005)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code, name, ticket.hex()], env=environment, timeout=90)
    assert done.returncode == -9
    peer.release(ticket)
    assert peer.lease_state(ticket) == "released"
    with Here(layout, name=name) as here:
        here.cache.fetch(peer.publish(name, IDS, tokens=TOKENS), into=INTO).wait(20)
        assert_fetched(here, peer.contents(name))
