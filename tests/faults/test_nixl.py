"""NIXL between processes of one host: either side dies, stops, restarts or lies, at every stage; and nothing is left.

The other fault tests run on NIXL, too: KVXFER_TEST_BACKEND=nixl pytest tests/faults -k "direct or packed".
"""

from __future__ import annotations

import importlib.util
import random
import resource
import socket
import time
from pathlib import Path

import msgspec
import pytest
from processes import SIZES, Process, until
from tap import Tap, mangler

from kvxfer.errors import BackendError

if importlib.util.find_spec("nixl_cu13") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)

WAYS = ("direct", "packed")
QUICK = {"heartbeat_s": 0.2, "peer_timeout_s": 1.0, "dial_timeout_s": 2.0}
MANY = list(range(SIZES["large"]["num_blocks"]))
ENDS = ("PeerGone", "DeadlineExceeded")

pytestmark = pytest.mark.timeout(90)


def options(way: str, **more: object) -> dict:
    quiet = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
    process = {"env": quiet, "at_once": False}
    return {"backends": ["nixl"], "shared": False, "ways": (way,), "limits": QUICK, **process, **more}


def rest(side: Process) -> None:
    """Wait until nothing is lent, under way or quarantined."""
    names = ("transfers", "reservations", "staging_lent_bytes", "staging_waiting", "quarantined")
    until(lambda: not any(side.metrics()[name] for name in names), 15, "rest")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def reach(decode: Process, key: int, stage: str) -> None:
    """Wait until a fetch is at a stage."""
    if stage == "moving":
        until(lambda: decode.state(key) != "posted", 10)
        time.sleep(0.005)
    elif stage == "confirming":
        assert decode.confirmation_held()


@pytest.mark.parametrize(
    ("stage", "way"),
    [("handshake", "packed"), ("published", "direct"), *(("moving", way) for way in WAYS), ("confirming", "direct")],
)
def test_a_prefill_that_is_killed_ends_the_fetch_and_another_serves_the_next(start, way, stage):
    prefill, other = start("prefill", fill=1, size="large", **options(way)), None
    decode = start("decode", size="large", **options(way))
    if stage != "handshake":
        assert decode.fetch_now(prefill.publish([0])) == way
    if stage == "confirming":
        decode.hold_confirmations()
    ticket = prefill.publish(MANY)
    if stage in ("moving", "confirming"):
        key = decode.fetch(ticket, MANY, timeout_s=5)
        reach(decode, key, stage)
        prefill.kill()
    else:
        prefill.kill()
        key = decode.fetch(ticket, MANY, timeout_s=5)
    if stage == "confirming":
        decode.let_confirm()
    assert decode.outcome(key) in (ENDS if stage != "moving" else (*ENDS, way))
    rest(decode)
    other = start("other", fill=2, size="large", **options(way))
    assert decode.fetch_now(other.publish([1, 2]), [3, 4]) == way
    assert decode.blocks([3, 4]) == other.blocks([1, 2])


@pytest.mark.parametrize("way", WAYS)
def test_a_decode_that_is_killed_leaves_the_lease_to_run_out_and_others_go_on(start, way):
    prefill, decode = start("prefill", fill=1, size="large", **options(way)), None
    decode, other = [start(name, size="large", **options(way)) for name in ("decode", "other")]
    assert decode.fetch_now(prefill.publish([0])) == way
    ticket = prefill.publish(MANY, ttl_s=1.5)
    reach(decode, decode.fetch(ticket, MANY), "moving")
    decode.kill()
    assert other.fetch_now(prefill.publish([1, 2]), [3, 4]) == way
    assert other.blocks([3, 4]) == prefill.blocks([1, 2])
    assert prefill.released(ticket, 4)
    until(lambda: prefill.metrics()["peers"] == 1, 10, "the dead peer being noticed")
    rest(prefill)


@pytest.mark.parametrize("way", WAYS)
def test_a_prefill_that_stood_still_is_read_from_again(start, way):
    prefill, decode = start("prefill", fill=1, **options(way)), start("decode", **options(way))
    assert decode.fetch_now(prefill.publish([0])) == way
    ticket = prefill.publish([1, 2])
    prefill.stop()
    assert decode.fetch_now(ticket, [3, 4], timeout_s=0.5) in (*ENDS, way)
    until(lambda: decode.metrics()["peers"] == 0, 5, "the session being given up")
    prefill.resume()
    rest(decode)
    assert decode.fetch_now(prefill.publish([5, 6]), [5, 6]) == way
    assert decode.blocks([5, 6]) == prefill.blocks([5, 6])


@pytest.mark.parametrize("way", WAYS)
def test_a_prefill_that_restarts_at_its_address_is_another_generation(start, way):
    listen = f"tcp://127.0.0.1:{free_port()}"
    prefill, decode = start("prefill", fill=1, listen=listen, **options(way)), start("decode", **options(way))
    assert decode.fetch_now(prefill.publish([0])) == way
    old = prefill.publish([1])
    prefill.kill()
    again = start("prefill", fill=2, listen=listen, **options(way))
    assert decode.fetch_now(again.publish([1]), [2]) == way
    assert decode.blocks([2]) == again.blocks([1])
    assert decode.fetch_now(old, [3], timeout_s=3) in ("InvalidTicket", *ENDS)
    rest(decode)


def test_staging_is_settled_by_a_successor_at_the_same_address(start):
    """Where neither NIXL nor the system can tell that the old process has ended."""
    listen = f"tcp://127.0.0.1:{free_port()}"
    prefill = start("prefill", fill=1, listen=listen, **options("packed"))
    decode = start("decode", **options("packed"))
    decode.never_sees_deaths()
    assert decode.fetch_now(prefill.publish([0])) == "packed"
    ticket = prefill.publish([1, 2])
    prefill.stop()
    assert decode.fetch_now(ticket, timeout_s=1.5) in ENDS
    if not decode.metrics()["staging_lent_bytes"]:
        pytest.skip("UCX did not read the lease of a process that stands still, so nothing was asked for, or lent")
    until(lambda: decode.metrics()["quarantined"] == 1, 5, "the session being given up")
    prefill.kill()
    time.sleep(1.5)
    assert decode.metrics()["quarantined"] == 1
    start("prefill", fill=2, listen=listen, **options("packed"))
    rest(decode)


def test_a_prefill_that_stands_still_slows_no_fetch_from_another(start):
    tcp = {"UCX_TLS": "tcp"}  # over shared memory one may read from it all the same
    stopped, healthy = [start(name, fill=1, **options("direct", env=tcp)) for name in ("stopped", "healthy")]
    decode = start("decode", **options("direct", env=tcp, limits={**QUICK, "peer_timeout_s": 4.0}))
    for prefill in (stopped, healthy):
        assert decode.fetch_now(prefill.publish([0])) == "direct"
    lost, good = [[p.publish([block]) for block in range(12)] for p in (stopped, healthy)]
    stopped.stop()
    keys = [decode.fetch(ticket, [40 + i], timeout_s=2) for i, ticket in enumerate(lost)]
    outcomes, slowest = decode.fetch_in_background(good)
    stopped.resume()
    assert outcomes == ["direct"] * len(good)
    assert slowest < 1.0  # whoever waited for the stopped one would wait for two seconds or more
    assert {decode.outcome(key) for key in keys} <= {"direct", *ENDS}
    rest(decode)


def test_messages_that_are_lost_doubled_or_out_of_order_end_transfers_and_leak_nothing(start):
    tap = Tap()
    try:
        port = free_port()
        own = {"listen": f"tcp://127.0.0.1:{port}", "advertise": tap.endpoint}
        prefill, decode = start("prefill", fill=1, **own, **options("packed")), start("decode", **options("packed"))
        tap.connect(own["listen"])
        assert decode.fetch_now(prefill.publish([0])) == "packed"
        tap.mangle = mangler(7)
        outcomes = []
        for round_ in range(4):
            blocks = list(range(12 * round_, 12 * round_ + 12))
            decode.post("fetch_each", {block: prefill.publish([block], ttl_s=10) for block in blocks}, timeout_s=1.5)
            outcomes += (ended := decode.answer())
            arrived = [block for block, outcome in zip(blocks, ended, strict=True) if outcome == "packed"]
            assert decode.blocks(arrived) == prefill.blocks(arrived)
        assert {*outcomes} <= {"packed", "Cancelled", *ENDS} and len({*outcomes}) > 1, outcomes
        tap.mangle = lambda data: [data]
        rest(decode)
        rest(prefill)
        until(lambda: decode.fetch_now(prefill.publish([1]), timeout_s=3) == "packed", 10, "a transfer that works")
        prefill.end()
        decode.end()
    finally:
        tap.close()


def test_garbage_in_what_a_peer_says_of_itself_is_refused():
    """NIXL and UCX would end the process over it."""
    from kvxfer.backends.nixl import NixlBackend, _Hello, _Memory

    dice = random.Random(1)
    ours, theirs = NixlBackend(), NixlBackend()
    try:
        hello, memory = theirs.hello(), theirs.allocate(1 << 16)
        link = ours.connect(hello)
        for genuine, take in ((hello, ours.connect), (memory.handle, lambda handle: link.open(handle, 1 << 16))):
            for _ in range(150):
                data = bytearray(genuine)
                for _ in range(dice.randrange(1, 5)):
                    data[dice.randrange(len(data))] = dice.randrange(256)
                for bad in (data, data[: dice.randrange(len(data))], dice.randbytes(dice.randrange(200))):
                    try:
                        take(bytes(bad))
                    except BackendError:
                        continue
        decoded = msgspec.msgpack.decode(memory.handle, type=_Memory)
        for changes in ({"metadata": bytes(300)}, {"agent": "another"}, {"nbytes": 100}):
            with pytest.raises(BackendError):
                link.open(msgspec.msgpack.encode(msgspec.structs.replace(decoded, **changes)), 1 << 16)
        told = msgspec.msgpack.decode(hello, type=_Hello)
        with pytest.raises(BackendError, match=r"NIXL '0\.1'"):
            ours.connect(msgspec.msgpack.encode(msgspec.structs.replace(told, version="0.1")))
        assert link.read(memory.address, 64, timeout_s=5) == bytes(64)  # nothing was harmed
    finally:
        ours.close()
        theirs.close()


def test_sixty_four_fetches_at_once_stay_within_the_staging(start):
    limits = {**QUICK, "staging_bytes": 4 << 20, "chunk_bytes": 512 << 10}
    prefill, decode = [start(n, fill=f, **options("packed", limits=limits)) for n, f in (("p", 1), ("d", None))]
    tickets = [prefill.publish([block]) for block in range(64)]
    decode.post("fetch_all", tickets, 1, timeout_s=30)
    assert decode.answer() == ["packed"] * 64
    metrics = decode.metrics()
    assert metrics["staging_bytes"] == 4 << 20 and metrics["staging_waiting"] == 0
    assert decode.digest() == prefill.digest()
    rest(decode)


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_flat_over_many_transfers(start, way):
    small = options(way, limits={"staging_bytes": 2 << 20, "chunk_bytes": 256 << 10})  # all of it is touched soon
    prefill, decode = start("prefill", fill=1, **small), start("decode", **small)

    def fetch(times: int) -> None:
        for _ in range(times // 50):
            tickets = [prefill.publish([block]) for block in range(50)]
            assert set(decode.fetch_all(tickets, 1)) == {way}
            prefill.forget(), decode.forget()

    fetch(300)
    before = [resident(side) for side in (prefill, decode)]
    fetch(1000)
    grown = [resident(side) - was for side, was in zip((prefill, decode), before, strict=True)]
    assert max(grown) < 4 << 20, grown  # a few hundred bytes each, of tickets that are remembered as used


def resident(side: Process) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{side.pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_open_peers_with_nothing_to_do_cost_less_than_two_percent_of_a_core(start):
    prefill, other, decode = [start(name, fill=1, **options("direct", limits={})) for name in ("a", "b", "c")]
    assert decode.fetch_now(prefill.publish([1])) == decode.fetch_now(other.publish([1])) == "direct"
    sides = (prefill, other, decode)
    before = [side.cpu_seconds() for side in sides]
    time.sleep(3)
    assert max(side.cpu_seconds() - was for side, was in zip(sides, before, strict=True)) < 0.06
    assert decode.metrics()["peers"] == 2
