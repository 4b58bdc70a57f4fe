"""Edges that once did harm: forked children, racing registrations, sends that hang while a connector closes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout, errors
from tests.backends.peer import SECRET, Peer, make_arrays

LAYOUT = CacheLayout.paged(
    layers=["layers.0", "layers.1"], num_blocks=16, block_tokens=4, kv_heads=2, head_dim=8, dtype="float16"
)


def test_a_forked_child_cannot_touch_its_parents_leases() -> None:
    with kvxfer.Connector("parent", secret=SECRET) as connector:
        arrays = make_arrays(LAYOUT, "shared", 1)
        cache = connector.register(arrays, LAYOUT)
        lease = cache.publish({"full": [1, 2]}, tokens=8)
        child = os.fork()
        if child == 0:
            try:
                connector.close()
                lease.release()
                cache.publish({"full": [3, 4]}, tokens=8)
            except errors.Closed:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        target = make_arrays(LAYOUT, "shared", None)
        with kvxfer.Connector("decode", secret=SECRET) as decode:
            decode.register(target, LAYOUT).fetch(lease.ticket, into={"full": [5, 6]}).wait(10)
        blocks = {name: array.reshape(16, -1) for name, array in arrays.items()}
        assert all(np.array_equal(target[n].reshape(16, -1)[[5, 6]], b[[1, 2]]) for n, b in blocks.items())


def test_one_of_many_racing_registrations_succeeds() -> None:
    outcomes: list[str] = []
    with kvxfer.Connector("race", secret=SECRET) as connector:

        def register() -> None:
            try:
                connector.register(make_arrays(LAYOUT, "private", None), LAYOUT)
                outcomes.append("registered")
            except errors.InvalidRequest:
                outcomes.append("refused")

        threads = [threading.Thread(target=register) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(outcomes) == ["refused"] * 11 + ["registered"]


def test_closing_with_a_sender_that_stands_still_wakes_whoever_waits() -> None:
    woken = threading.Event()
    with Peer() as peer:
        peer.register("kv", LAYOUT, "shared", 1)
        connector = kvxfer.Connector("decode", secret=SECRET)
        cache = connector.register(make_arrays(LAYOUT, "shared", None), LAYOUT)
        reservation = cache.reserve({"full": [1, 2]}, tokens=8)
        reservation.add_done_callback(lambda _: woken.set())
        send = peer.send("kv", bytes(reservation.ticket), {"full": [3, 4]}, layerwise=True)
        peer.layer_ready(send, "layers.0")
        while reservation.state is not kvxfer.TransferState.MOVING:
            assert not reservation.done()
        peer.send_signal(signal.SIGSTOP)
        connector.close()
        assert woken.wait(5) and not reservation.done()
        with pytest.raises(errors.Closed, match="stands still"):
            reservation.wait(5)
        peer.send_signal(signal.SIGCONT)


def test_issued_tickets_leave_no_timers() -> None:
    with kvxfer.Connector("scheduler", secret=SECRET, limits=kvxfer.Limits(lease_slots=4, max_ttl_s=0.2)) as connector:
        for _ in range(50):
            connector.retire(connector.issue(LAYOUT, {"full": [1]}, tokens=4, ttl_s=0.1))
        for _ in range(4):
            connector.issue(LAYOUT, {"full": [1]}, tokens=4, ttl_s=0.1)
        with pytest.raises(errors.LeaseTableFull, match="retire"):
            connector.issue(LAYOUT, {"full": [1]}, tokens=4, ttl_s=0.1)
        threading.Event().wait(0.25)
        connector.issue(LAYOUT, {"full": [1]}, tokens=4, ttl_s=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"listen": "tcp://127.0.0.1:99999"},
        {"listen": 5},
        {"listen": "inproc://x"},
        {"advertise": "x"},
        {"generation": 2**70},
        {"generation": "a"},
        {"members": {"a": "b"}},
        {"rank": "0"},
        {"ranks": 0},
        {"ways": 3},
        {"limits": {}},
        {"name": 5},
    ],
    ids=str,
)
def test_connectors_refuse_arguments_of_the_wrong_kind(options: dict) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"must be|expected"):
        kvxfer.Connector(**{"name": "x", "secret": SECRET} | options)


@pytest.mark.parametrize("shape", [-1, 4.5, "a", (2**60, 2**60), (3, -1)], ids=str)
def test_shared_memory_of_impossible_shapes(shape: object) -> None:
    with pytest.raises(errors.InvalidRequest):
        kvxfer.shared_empty(shape)


def test_a_shelf_that_cannot_be_had_costs_the_lease_nothing() -> None:
    with kvxfer.Connector("huge", secret=SECRET, limits=kvxfer.Limits(shelf_bytes=1 << 44)) as connector:
        cache = connector.register(make_arrays(LAYOUT, "private", 1), LAYOUT)
        lease = cache.publish({"full": [1, 2]}, tokens=8, pack_ahead="raw")
        assert lease.state is kvxfer.LeaseState.LIVE
        assert connector.metrics.packed_ahead_total == {"failed": 1}


def test_a_closed_connector_and_its_caches_need_no_garbage_collector() -> None:
    def used_and_closed() -> weakref.ref:
        with kvxfer.Connector("brief", secret=SECRET) as connector:
            cache = connector.register(make_arrays(LAYOUT, "shared", 1), LAYOUT)
            return weakref.ref(cache)

    used_and_closed()
    gc.collect()
    gc.disable()
    try:
        assert used_and_closed()() is None
    finally:
        gc.enable()


FEW_DESCRIPTORS = """
import os, resource, threading, time
import kvxfer

def descriptors():
    return len(os.listdir("/proc/self/fd")) - 1

kvxfer.Connector("warm").close()
used = descriptors()
for more in range(28):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, 4096))
    try:
        kvxfer.Connector("short of descriptors").close()
        print("opened")
    except kvxfer.errors.ResourceExhausted:
        print("refused")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    until = time.monotonic() + 20
    while descriptors() > used:
        assert time.monotonic() < until, (more, used, descriptors())
assert threading.active_count() == 1, threading.enumerate()
"""


def test_without_file_descriptors_a_connector_is_refused_and_the_process_lives() -> None:
    ended = subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr[-2000:]
    outcomes = ended.stdout.split()
    assert outcomes[0] == "refused"
    assert outcomes[-1] == "opened"
