"""The NCCL backend on two GPUs: this process owns one, its peers the other (KVXFER_PEER_GPU).

On one GPU both sides share it, where NCCL allows that (NCCL_MULTI_RANK_GPU_ENABLE=1).

What every backend must do is in tests/backends; the states that need no GPU are tested on a fake in
tests/unit/test_nccl_channel.py and tests/faults/test_nccl.py.

The one-sided way is taken where libnccl has it (2.29 or newer): run this with LD_PRELOAD of such a library as well.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, Limits, TransferState, errors
from kvxfer.backends.nccl import NcclBackend
from tests.backends.peer import SECRET, Peer, held, make_arrays, placed, read
from tests.gpu.memory import BusyStream, need_devices
from tests.processes import until

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, pytest.mark.timeout(120)]
need_devices(1)
pytest.importorskip("cupy")
pytest.importorskip("nccl.bindings.nccl")
SHARED = os.environ.get("KVXFER_PEER_GPU", "0") == os.environ.get("CUDA_VISIBLE_DEVICES", "0")
if SHARED and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1" and "NCCL_HOSTID" not in os.environ:
    pytest.skip(
        "needs KVXFER_PEER_GPU, a GPU that this process does not see, or NCCL_MULTI_RANK_GPU_ENABLE=1",
        allow_module_level=True,
    )

BLOCKS = 64
CYCLES = int(os.environ.get("KVXFER_CYCLES", "1000"))
AT_ONCE = 4
LOOKS = 20
ONE_ARENA = os.environ.get("MALLOC_ARENA_MAX") == "1"  # as many as threads at once else, and none is given back
GROWTH = {"descriptors": 2, "threads": 0, "gpu_bytes": 4 << 20} | ({"resident_bytes": 24 << 20} if ONE_ARENA else {})
QUICK = {"heartbeat_s": 0.5, "peer_timeout_s": 3.0, "dial_timeout_s": 5.0}
ENDS = (errors.PeerGone, errors.DeadlineExceeded, errors.BackendError)
IDS = {"full": list(range(BLOCKS))[::-1]}
INTO = {"full": list(range(BLOCKS))}
TOKENS = 16 * BLOCKS


def paged(**changes) -> CacheLayout:
    options = {"num_blocks": BLOCKS, "kv_heads": 8, "head_dim": 128, "dtype": "float16", "fingerprint": {}}
    return CacheLayout.paged(layers=("layers.0", "layers.1"), block_tokens=16, **(options | changes))


LARGE = paged(kv_heads=512)  # 256 MiB a layer
CHUNKS = {"chunk_bytes": 8 << 20, "staging_bytes": 64 << 20}  # so that a large fetch has many


class Here:
    """A connector in this process with a zero cache in GPU memory."""

    def __init__(self, layout: CacheLayout, name: str = "kv", limits: dict | None = None, **options) -> None:
        self.backend = NcclBackend(**options)
        chosen = Limits(**(QUICK | CHUNKS | (limits or {})))
        self.connector = kvxfer.Connector("here", backends=[self.backend], secret=SECRET, limits=chosen)
        self.layout, self.arrays = layout, make_arrays(layout, "gpu", None)
        self.cache = self.connector.register(self.arrays, placed(layout, "gpu"), name=name)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self.connector.close()

    def fetch(self, peer: Peer, **options) -> kvxfer.Transfer:
        return self.cache.fetch(peer.publish(self.cache.name, IDS, tokens=TOKENS), into=INTO, **options)

    def meet(self, peer: Peer) -> Here:
        name = self.cache.name
        self.cache.fetch(peer.publish(name, {"full": [0]}, tokens=16), into={"full": [0]}).wait(60)
        return self

    def rows(self, layer: str) -> np.ndarray:
        return read(self.arrays)[layer].reshape(self.layout.groups[0].num_blocks, -1)

    def check(self, peer: Peer) -> None:
        """What a fetch of all blocks has brought."""
        there = peer.contents(self.cache.name)
        for layer in self.layout.layers:
            assert np.array_equal(self.rows(layer), there[layer].reshape(BLOCKS, -1)[::-1]), layer

    @property
    def links(self) -> list:
        return list(self.backend._links)


def peer_of(layout: CacheLayout, seed: int = 1, name: str = "kv", limits: dict | None = None) -> Peer:
    peer = Peer("nccl", limits=Limits(**(QUICK | CHUNKS | (limits or {}))))
    peer.register(name, layout, "gpu", seed)
    return peer


def rest(here: Here) -> None:
    names = ("transfers", "reservations", "staging_lent_bytes", "staging_waiting", "quarantined")
    until(lambda: not any(getattr(here.connector.metrics, name) for name in names), 20, "rest")


def under_way(here: Here, peer: Peer, **options) -> kvxfer.Transfer:
    """A fetch some of whose chunks have arrived, and some have not."""
    for _ in range(10):
        transfer = here.fetch(peer, **options)
        while not transfer.done():
            if 0 < transfer.progress < 0.8:
                return transfer
        transfer.result()
    raise AssertionError("fetches are too quick to be met in the middle: make the cache larger")


# --- bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["raw", "nvfp4"])
@pytest.mark.parametrize("push", [False, True], ids=["fetch", "send"])
def test_large_caches(push, wire):
    with peer_of(LARGE) as peer, Here(LARGE) as here:
        peer.mask("kv", 0xBF)
        if push:
            reservation = here.cache.reserve(INTO, tokens=TOKENS)
            key = peer.send("kv", bytes(reservation.ticket), IDS, wire=wire)
            stats = reservation.wait(60)
            peer.wait(key)
        else:
            stats = here.fetch(peer, wire=wire).wait(60)
        assert (stats.backend, stats.way, stats.wire, stats.conversation) == ("nccl", "packed", wire, True)
        if wire == "raw":
            here.check(peer)
        assert ("staging", "cuda:0") in here.connector._node.rings
        rest(here)


def test_which_way_chunks_go():
    """The one-sided way where this libnccl has it; the log says why not."""
    with peer_of(paged()) as peer, Here(paged()).meet(peer) as here:
        [link] = here.links
        print(f"{here.backend.libnccl}: one-sided {link._taker.one_sided}")
        if here.backend.libnccl.missing:
            assert not link._taker.one_sided
    with peer_of(paged()) as peer, Here(paged(), one_sided=False).meet(peer) as here:
        [link] = here.links
        assert not link._taker.one_sided
        here.fetch(peer).wait(60)
        here.check(peer)


@pytest.mark.parametrize("max_ctas", [1, 4, 32, 0])
def test_limits_of_ctas(max_ctas):
    with peer_of(paged()) as peer, Here(paged(), max_ctas=max_ctas) as here:
        here.fetch(peer).wait(60)
        here.check(peer)


def test_both_directions_at_once():
    layout = paged(kv_heads=128)
    with peer_of(layout) as peer, Here(layout) as here:
        peer.register("back", layout, "gpu", None)
        for array in here.arrays.values():
            array[:] = 7
        half = BLOCKS // 2
        out = here.cache.publish({"full": list(range(half))}, tokens=16 * half)
        ticket = peer.publish("kv", {"full": list(range(half))}, tokens=16 * half)
        key = peer.fetch("back", bytes(out.ticket), {"full": list(range(half))})
        here.cache.fetch(ticket, into={"full": list(range(half, BLOCKS))}).wait(60)
        peer.wait(key)
        there, back = peer.contents("kv"), peer.contents("back")
        for layer in layout.layers:
            assert np.array_equal(here.rows(layer)[half:], there[layer].reshape(BLOCKS, -1)[:half])
            assert (back[layer].reshape(BLOCKS, -1)[:half] == 7).all()


def test_three_peers_on_two_gpus():
    """Two on the other GPU. They cannot join each other, and are told so, unless NCCL lets GPUs be shared."""
    with peer_of(paged(), 1, "one") as first, peer_of(paged(), 2, "two") as second, Here(paged(), "one") as here:
        arrays = make_arrays(paged(), "gpu", None)
        two = here.connector.register(arrays, placed(paged(), "gpu"), name="two")
        for _ in range(5):
            transfers = [
                here.fetch(first),
                two.fetch(second.publish("two", IDS, tokens=TOKENS), into=INTO),
            ]
            for transfer in transfers:
                transfer.wait(60)
        here.check(first)
        there = second.contents("two")
        assert all(
            np.array_equal(array.reshape(BLOCKS, -1), there[layer].reshape(BLOCKS, -1)[::-1])
            for layer, array in read(arrays).items()
        )
        first.register("two", paged(), "gpu", None)
        key = first.fetch("two", second.publish("two", IDS, tokens=TOKENS), INTO, timeout_s=20)
        if SHARED:
            first.wait(key)
            return
        with pytest.raises(errors.KvxferError, match="one GPU"):
            first.wait(key)


def test_transfers_beside_an_engines_collectives():
    """All-reduce without a pause on both GPUs while blocks move: neither waits for the other for good."""
    import nccl.bindings.nccl as nccl

    from tests.gpu.nccl_engine import AllReduceLoop

    layout = paged(kv_heads=64)
    with peer_of(layout) as peer, Here(layout).meet(peer) as here:
        unique_id = bytes(nccl.get_unique_id())
        peer.reduce_all(unique_id, 1, 1500)
        engine = AllReduceLoop(unique_id, 0, 1500)
        until(lambda: engine.done > 5 or engine.error, 60, "the first rounds")
        transfers = 0
        while engine.done < 1490 and not engine.error:
            here.fetch(peer, timeout_s=20).wait(30)
            transfers += 1
        assert engine.join(60) == "" and peer.reduced(20) == ""
        here.check(peer)
        print(f"{transfers} fetches of {64 << 20 >> 20} MiB beside 12000 all-reduces in {engine.seconds:.1f} s")
        assert transfers > 3


def test_blocks_are_read_after_the_publishers_stream():
    with peer_of(paged()) as peer, Here(paged()).meet(peer) as here:
        ticket, seconds = peer.publish_later("kv", IDS, 800, 42, tokens=TOKENS)
        here.cache.fetch(ticket, into=INTO).wait(30)
        assert all((here.rows(layer) == 42).all() for layer in here.layout.layers)
        assert seconds < 0.1  # the stream itself says when the bytes are there: the lease table is pinned


def test_a_stream_waits_for_chunks():
    layout = paged()
    with peer_of(layout) as peer, Here(layout).meet(peer) as here:
        busy = BusyStream()
        transfer = here.fetch(peer)
        transfer.wait_on(busy.stream)
        copy = busy.copy(here.arrays["layers.1"])
        busy.stream.synchronise()
        assert transfer.wait(30).way == "packed"
        assert np.array_equal(copy.reshape(BLOCKS, -1), here.rows("layers.1"))


# --- peers that die, stop, or are slow ------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["in mid-chunk", "at rest"])
def test_a_killed_peer(moment):
    with Here(LARGE) as here:
        peer = peer_of(LARGE, limits={"max_sms": 1})
        here.meet(peer)
        if moment == "in mid-chunk":
            transfer = under_way(here, peer, timeout_s=30)
        else:
            here.fetch(peer).wait(60)
        peer.kill()
        if moment == "in mid-chunk":
            with pytest.raises(ENDS):
                transfer.wait(40)
        until(lambda: not here.connector._node.directory.peers, 20, "the peer forgotten")
        rest(here)
        with peer_of(LARGE, 2) as another:
            here.fetch(another, timeout_s=60).wait(60)
            here.check(another)


def test_a_killed_reader():
    """The publisher goes on, its chunks under way end, and its blocks come back."""
    import signal

    layout = LARGE
    with Here(layout, limits={"max_sms": 1}) as here:
        for array in here.arrays.values():
            array[:] = 5
        reader = Peer("nccl", limits=Limits(**(QUICK | CHUNKS)))
        reader.register("kv", layout, "gpu", None)
        lease = here.cache.publish(IDS, tokens=TOKENS, ttl_s=10)
        reader.fetch("kv", bytes(lease.ticket), INTO)
        until(lambda: any(link._writer and link._writer._issued for link in here.links), 30, "chunks under way")
        reader.send_signal(signal.SIGKILL)
        reader.process.join(20)
        assert lease.released.wait(20)
        until(lambda: not here.connector._node.directory.peers, 20, "the reader forgotten")
        until(lambda: all(link.is_at_rest for link in here.links), 20, "nothing under way")
        rest(here)


def test_a_hung_peer_is_given_up_and_fetched_from_again():
    import signal

    with peer_of(LARGE, limits={"max_sms": 1}) as peer, Here(LARGE).meet(peer) as here:
        transfer = under_way(here, peer, timeout_s=5)
        peer.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(ENDS):
                transfer.wait(30)
            assert time.monotonic() - began < 20
            until(lambda: not here.connector._node.directory.peers, 20, "the session given up")
        finally:
            peer.send_signal(signal.SIGCONT)
        rest(here)
        here.fetch(peer, timeout_s=60).wait(60)
        here.check(peer)


def test_a_slow_peer_holds_up_no_other():
    with (
        peer_of(LARGE, 1, "slow", {"max_sms": 1, "mover_threads": 1}) as slow,
        peer_of(paged(), 2, "quick") as quick,
        Here(LARGE, "slow") as here,
    ):
        arrays = make_arrays(paged(), "gpu", None)
        cache = here.connector.register(arrays, placed(paged(), "gpu"), name="quick")
        here.meet(slow)
        cache.fetch(quick.publish("quick", IDS, tokens=TOKENS), into=INTO).wait(60)
        transfer, seconds = under_way(here, slow), []
        while not transfer.done():
            began = time.monotonic()
            cache.fetch(quick.publish("quick", IDS, tokens=TOKENS), into=INTO).wait(30)
            seconds.append(time.monotonic() - began)
        transfer.result()
        here.check(slow)
        slowest = max(seconds, default=0)
        print(f"a slow fetch: {transfer.stats.seconds:.3f} s; {len(seconds)} others, the slowest {slowest:.3f} s")


def test_aborted_in_mid_chunk_the_channel_stays_in_step():
    with peer_of(LARGE) as peer, Here(LARGE).meet(peer) as here:
        for _ in range(5):
            transfer = here.fetch(peer)
            until(lambda: transfer.state is not TransferState.POSTED, 30)  # noqa: B023
            transfer.cancel()
            try:
                transfer.wait(30)
            except errors.Cancelled:
                pass
        here.fetch(peer).wait(60)
        here.check(peer)
        rest(here)
        assert len([link for link in here.links if not link.lost]) == 1


def test_a_channel_that_is_aborted_is_made_again():
    with peer_of(LARGE) as peer, Here(LARGE).meet(peer) as here:
        transfer = under_way(here, peer)
        [link] = [link for link in here.links if not link.lost]
        link._taker.fail(errors.BackendError("a test pulled the plug"))
        with pytest.raises(errors.KvxferError):
            transfer.wait(30)
        rest(here)
        here.fetch(peer, timeout_s=60).wait(60)
        here.check(peer)


# --- coming and going ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_connect_and_disconnect_without_growth():
    """KVXFER_CYCLES times, some at once: a connector, a fetch, a goodbye. What is held may grow over the first fifth
    only. Each look is printed when it is made. Several of this test may run beside each other: what is held is this
    process's, of the GPU's memory too."""
    import cupy

    layout = paged(num_blocks=8)
    limits = {"chunk_bytes": 1 << 20, "staging_bytes": 2 << 20}
    rounds = max(1, CYCLES // AT_ONCE)
    looks = {rounds * look // LOOKS for look in range(1, LOOKS + 1)}
    with peer_of(layout, limits=limits) as peer:
        seen = []
        began = time.monotonic()
        for number in range(1, rounds + 1):
            with contextlib.ExitStack() as stack:
                everyone = [stack.enter_context(Here(layout, limits=limits)) for _ in range(AT_ONCE)]
                tickets = [peer.publish("kv", {"full": [3]}, tokens=16) for _ in everyone]
                transfers = [
                    here.cache.fetch(ticket, into={"full": [5]}) for here, ticket in zip(everyone, tickets, strict=True)
                ]
                for transfer in transfers:
                    transfer.wait(60)
                if number in (1, rounds):
                    source = peer.contents("kv")["layers.0"].reshape(8, -1)[3]
                    assert all(np.array_equal(here.rows("layers.0")[5], source) for here in everyone)
            del everyone, transfers
            if number in looks:
                gc.collect()
                cupy.get_default_memory_pool().free_all_blocks()
                until(lambda: not peer.metrics().peers, 20, "the peer's sessions closed")
                time.sleep(1)  # aborts end in the background
                seen.append((held(), peer.held()))
                print(f"cycle {number * AT_ONCE}, {time.monotonic() - began:.1f} s: {seen[-1]}", flush=True)
        for before, after in zip(seen[len(seen) // 5], seen[-1], strict=True):
            grown = {key: after[key] - before[key] for key in GROWTH}
            assert all(grown[key] <= most for key, most in GROWTH.items()), grown
