"""The NCCL backend with peers that die, stop, restart, lie or come and go, on a fake of NCCL (tests/nccl_fake.py), as
if every process were on a host of its own. The same on GPUs is in tests/gpu.

The other fault tests run on it, too: KVXFER_TEST_BACKEND=fake_nccl pytest tests/faults -k "packed and not wrong_bytes"
(that one ends leases sooner than a process on another host can ask for them).
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import socket
import subprocess
import sys
import weakref

import msgspec
import numpy as np
import pytest
from nccl_fake import OPTIONS, FakeNcclBackend
from processes import SECRET, Process, Side, make_layout, until
from tap import Tap, mangler

import kvxfer
from kvxfer.backends import discovery, nccl
from kvxfer.backends.base import Direction
from kvxfer.backends.nccl_messages import Chunk, Coming, Read, encode
from kvxfer.errors import BackendError, BufferTooSmall, InvalidRequest, KvxferError, MissingExtra, NoCommonBackend

QUICK = {"heartbeat_s": 0.3, "peer_timeout_s": 3.0, "dial_timeout_s": 5.0, "chunk_bytes": 1 << 20}
LARGE = {"size": "large", "layout": {"num_blocks": 256}}  # 32 MiB
MANY = list(range(256))
ENDS = ("PeerGone", "DeadlineExceeded")
SLOW = {"seconds_per_chunk": 0.15}  # so that a transfer of MANY, of 33 chunks, takes five seconds
STUCK = {"most_chunks": 4}  # so that one never ends
MODES = {"sent": {"one_sided": False}, "put": {"one_sided": True}}

pytestmark = pytest.mark.timeout(90)


def options(fake: dict | None = None, **more: object) -> dict:
    process = {"env": {OPTIONS: json.dumps(fake or {})}, "at_once": False}
    return {"backends": ["fake_nccl"], "shared": False, "ways": ("packed",), "limits": QUICK, **process, **more}


def rest(*sides: Process) -> None:
    """Wait until nothing is lent, under way or quarantined, and see that NCCL was called as it may be."""
    names = ("transfers", "reservations", "staging_lent_bytes", "staging_waiting", "quarantined")
    for side in sides:
        found: dict[str, int] = {}

        def nothing(side: Process = side, found: dict[str, int] = found) -> bool:
            found.update({name: value for name, value in side.metrics().items() if name in names})
            return not any(found.values())

        with contextlib.suppress(AssertionError):
            until(nothing, 20)
        assert not any(found.values()), found
        assert side.breaches() == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def under_way(decode: Process | Side, key: int) -> None:
    """Wait until chunks of a fetch cross."""
    until(lambda: decode.progress(key) > 0, what="the first chunk")
    assert decode.state(key) == "moving"


# --- peers that die, stop, restart, or are slow ---------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", ["handshake", "published", "moving"])
def test_a_prefill_that_is_killed_ends_the_fetch_and_another_serves_the_next(start, stage, mode):
    prefill = start("prefill", fill=1, **options(MODES[mode] | STUCK, **LARGE))
    decode = start("decode", **options(MODES[mode], **LARGE))
    if stage != "handshake":
        assert decode.fetch_now(prefill.publish([0])) == "packed"
    ticket = prefill.publish(MANY)
    if stage == "moving":
        key = decode.fetch(ticket, MANY)
        under_way(decode, key)
        prefill.kill()
    else:
        prefill.kill()
        key = decode.fetch(ticket, MANY, timeout_s=2)
    assert decode.outcome(key) in ENDS
    until(lambda: decode.communicators() == 0, 10, "the communicator being aborted")
    rest(decode)
    other = start("other", fill=2, **options(MODES[mode], **LARGE))
    assert decode.fetch_now(other.publish([1, 2]), [3, 4]) == "packed"
    assert decode.blocks([3, 4]) == other.blocks([1, 2])


@pytest.mark.parametrize("mode", MODES)
def test_a_decode_that_is_killed_leaves_the_lease_to_run_out_and_others_go_on(start, mode):
    prefill = start("prefill", fill=1, **options(MODES[mode] | STUCK, **LARGE))
    decode, other = [start(name, **options(MODES[mode], **LARGE)) for name in ("decode", "other")]
    for side in (decode, other):
        assert side.fetch_now(prefill.publish([0])) == "packed"
    ticket = prefill.publish(MANY, ttl_s=2.0)
    under_way(decode, decode.fetch(ticket, MANY))
    decode.kill()
    assert other.fetch_now(prefill.publish([1, 2]), [3, 4]) == "packed"
    assert other.blocks([3, 4]) == prefill.blocks([1, 2])
    assert prefill.released(ticket, 10)
    until(lambda: prefill.metrics()["peers"] == 1, 10, "the dead peer being noticed")
    until(lambda: prefill.communicators() == 1, 10, "its communicator being aborted")
    rest(prefill, other)


@pytest.mark.parametrize("mode", MODES)
def test_a_prefill_that_hangs_is_given_up_and_fetched_from_again_when_it_goes_on(start, mode):
    prefill, decode = [start(n, fill=f, **options(MODES[mode])) for n, f in (("prefill", 1), ("decode", None))]
    assert decode.fetch_now(prefill.publish([0])) == "packed"
    ticket = prefill.publish([1, 2])
    prefill.stop()
    assert decode.fetch_now(ticket, [3, 4], timeout_s=0.5) in ENDS
    until(lambda: decode.metrics()["peers"] == 0, 10, "the session being given up")
    until(lambda: decode.communicators() == 0, 10, "the communicator being aborted")
    if mode == "sent":  # nothing comes that this side does not receive, so nothing has to wait for the peer
        rest(decode)
    prefill.resume()
    rest(decode, prefill)
    assert decode.fetch_now(prefill.publish([5, 6]), [5, 6]) == "packed"
    assert decode.blocks([5, 6]) == prefill.blocks([5, 6])


def test_a_decode_that_hangs_holds_up_no_other(start):
    prefill = start("prefill", fill=1, **options())
    hung, healthy = [start(name, **options()) for name in ("hung", "healthy")]
    for side in (hung, healthy):
        assert side.fetch_now(prefill.publish([0])) == "packed"
    hung.post("fetch_now", prefill.publish([1, 2], ttl_s=5), [1, 2])
    hung.stop()
    for _ in range(5):
        assert healthy.fetch_now(prefill.publish([3, 4]), [3, 4], timeout_s=10) == "packed"
    hung.resume()
    assert hung.answer() in ("packed", "LeaseExpired", *ENDS)
    rest(prefill, healthy, hung)


def test_a_prefill_that_restarts_at_its_address_is_another_generation(start):
    listen = f"tcp://127.0.0.1:{free_port()}"
    prefill, decode = start("prefill", fill=1, listen=listen, **options()), start("decode", **options())
    assert decode.fetch_now(prefill.publish([0])) == "packed"
    old = prefill.publish([1])
    prefill.kill()
    again = start("prefill", fill=2, listen=listen, **options())
    assert decode.fetch_now(again.publish([1]), [2]) == "packed"
    assert decode.blocks([2]) == again.blocks([1])
    assert decode.fetch_now(old, [3], timeout_s=3) in ("InvalidTicket", *ENDS)
    until(lambda: decode.communicators() == 1, 10, "the old communicator being aborted")
    rest(decode)


def test_a_slow_prefill_slows_no_fetch_from_another(start):
    slow = start("slow", fill=1, **options({"seconds_per_chunk": 0.3}, **LARGE))  # ten seconds in all
    quick, decode = start("quick", fill=2, **options(**LARGE)), start("decode", **options(**LARGE))
    for prefill in (slow, quick):
        assert decode.fetch_now(prefill.publish([0])) == "packed"
    key = decode.fetch(slow.publish(MANY[8:]), MANY[8:])
    under_way(decode, key)
    for _ in range(3):
        assert decode.fetch_now(quick.publish([1, 2]), [3, 4], timeout_s=10) == "packed"
    assert decode.state(key) == "moving"
    decode.cancel(key)
    assert decode.outcome(key) == "Cancelled"
    assert decode.fetch_now(slow.publish([1, 2]), [5, 6]) == "packed"  # on the same communicator
    assert decode.blocks([5, 6]) == slow.blocks([1, 2])
    assert decode.communicators() == 2
    rest(decode, slow, quick)


@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_transfer_in_mid_chunk_leaves_the_channel_in_step(start, mode):
    prefill = start("prefill", fill=1, **options(MODES[mode] | SLOW, **LARGE))
    decode = start("decode", **options(MODES[mode], **LARGE))
    assert decode.fetch_now(prefill.publish([0])) == "packed"
    for round_ in range(3):
        key = decode.fetch(prefill.publish(MANY), MANY)
        under_way(decode, key)
        decode.cancel(key)
        assert decode.outcome(key) == "Cancelled"
        blocks = [10 * round_, 10 * round_ + 1]
        assert decode.fetch_now(prefill.publish(blocks), blocks) == "packed"
        assert decode.blocks(blocks) == prefill.blocks(blocks)
    assert decode.communicators() == prefill.communicators() == 1
    rest(decode, prefill)


@pytest.mark.parametrize("mode", MODES)
def test_both_directions_at_once(start, mode):
    sides = [start(name, fill=fill, **options(MODES[mode], **LARGE)) for name, fill in (("a", 1), ("b", 2))]
    ours, theirs = MANY[:128], MANY[128:]
    sent = [side.blocks(ours) for side in sides]
    tickets = [side.publish(ours) for side in sides]
    for side, ticket in zip(sides, reversed(tickets), strict=True):
        side.post("fetch_now", ticket, theirs)
    assert [side.answer() for side in sides] == ["packed", "packed"]
    for side, bytes_ in zip(sides, reversed(sent), strict=True):
        assert side.blocks(theirs) == bytes_
    rest(*sides)


@pytest.mark.parametrize("mode", MODES)
def test_messages_that_are_lost_doubled_or_out_of_order_end_transfers_and_leak_nothing(start, mode):
    tap, given = Tap(), options(MODES[mode] | {"stall_timeout_s": 3.0, "open_timeout_s": 5.0})
    try:
        own = {"listen": f"tcp://127.0.0.1:{free_port()}", "advertise": tap.endpoint}
        prefill, decode = start("p", fill=1, **own, **given), start("d", **given)
        tap.connect(own["listen"])
        assert decode.fetch_now(prefill.publish([0])) == "packed"
        tap.mangle = mangler(7, 0.03)
        outcomes = []
        for round_ in range(4):
            blocks = list(range(12 * round_, 12 * round_ + 12))
            decode.post("fetch_each", {block: prefill.publish([block], ttl_s=10) for block in blocks}, timeout_s=1.5)
            outcomes += (ended := decode.answer())
            arrived = [block for block, outcome in zip(blocks, ended, strict=True) if outcome == "packed"]
            assert decode.blocks(arrived) == prefill.blocks(arrived)
        assert {*outcomes} <= {"packed", "Cancelled", "BackendError", *ENDS}, outcomes
        assert {*outcomes} != {"packed"}, outcomes
        tap.mangle = lambda data: [data]
        rest(decode, prefill)
        until(lambda: decode.fetch_now(prefill.publish([1]), timeout_s=5) == "packed", 30, "a transfer that works")
        rest(decode, prefill)
        prefill.end()
        decode.end()
    finally:
        tap.close()


@pytest.mark.parametrize("backend", ["shm", "fake_nccl"])
def test_a_session_that_only_one_end_has_given_up_is_made_again(start, backend):
    """The other end asks and is refused: that must not count as a sign of life for ever."""
    prefill, decode = [start(n, fill=f, **options(backends=[backend])) for n, f in (("prefill", 1), ("decode", None))]
    assert decode.fetch_now(prefill.publish([0])) == "packed"
    prefill.give_up_sessions()
    assert decode.fetch_now(prefill.publish([1]), [1]) in ENDS
    assert decode.fetch_now(prefill.publish([2]), [2]) == "packed"
    assert decode.blocks([2]) == prefill.blocks([2])
    rest(prefill, decode)


def test_connectors_that_come_and_go_leave_nothing(start, here):
    """Descriptors and threads of this process are counted around the test."""
    prefill = start("prefill", fill=1, **options())
    for round_ in range(25):
        decode = here(f"decode-{round_}", backends=["fake_nccl"], shared=False, limits=QUICK)
        assert decode.fetch_now(prefill.publish([1, 2]), [3, 4]) == "packed"
        decode.close()
    until(lambda: prefill.metrics()["peers"] == 0, 10)
    until(lambda: prefill.communicators() == 0, 10)
    prefill.forget()
    until(lambda: prefill.threads().count("fake-stream") <= 1, 10)
    until(lambda: sum(prefill.descriptors().values()) < 40, 10)
    rest(prefill)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_reader_had_opened_here_goes_with_it(here, mode):
    """At once, not with the next collection of garbage: it would be memory and descriptors until then."""
    backends = [[FakeNcclBackend(fake=MODES[mode])] for _ in range(2)]
    prefill = here("prefill", fill=1, backends=backends[0], shared=False, limits=QUICK)
    decode = here("decode", backends=backends[1], shared=False, limits=QUICK)
    assert decode.fetch_now(prefill.publish([1, 2]), [3, 4]) == "packed"
    directory = prefill.connector._node.directory
    [reader] = [weakref.ref(peer) for peer in directory.peers.values()]
    link = weakref.ref(reader().link)
    gc.collect()
    gc.disable()
    try:
        decode.close()
        until(lambda: not directory.peers, 10)
        until(lambda: reader() is None and link() is None, 10)
    finally:
        gc.enable()


def test_more_fetches_than_staging_stand_in_line(start, here):
    limits = {**QUICK, "staging_bytes": 1 << 20, "chunk_bytes": 256 << 10}
    prefill = start("prefill", fill=1, **options({"seconds_per_chunk": 0.02}, limits=limits))
    decode = here("decode", backends=["fake_nccl"], shared=False, limits=limits)
    tickets = [prefill.publish([2 * i, 2 * i + 1]) for i in range(30)]
    fetches = [decode.cache.fetch(t, into={"full": [2 * i, 2 * i + 1]}) for i, t in enumerate(tickets)]
    longest_line = most_lent = 0
    while not all(fetch.done() for fetch in fetches):
        metrics = decode.connector.metrics
        longest_line = max(longest_line, metrics.staging_waiting)
        most_lent = max(most_lent, metrics.staging_lent_bytes)
    for fetch in fetches:
        fetch.result()
    assert decode.blocks(list(range(60))) == prefill.blocks(list(range(60)))
    assert longest_line > 0 and 0 < most_lent <= 1 << 20
    rest(prefill)


def test_what_is_packed_ahead_is_packed_on_request_where_it_cannot_be_read(start):
    prefill, decode = start("prefill", fill=1, **options()), start("decode", **options())
    assert decode.fetch_now(prefill.publish([0], pack_ahead="raw")) == "packed"
    until(lambda: prefill.metrics()["packed_ahead_total"].get("packed") == 1, 10)
    key = decode.fetch(prefill.publish([1, 2], pack_ahead="raw"), [3, 4])
    assert decode.outcome(key) == "packed"
    assert (decode.stats(key)["packed_ahead"], decode.stats(key)["conversation"]) == (False, True)
    assert decode.blocks([3, 4]) == prefill.blocks([1, 2])


# --- what is told at the start -------------------------------------------------------------------------------


def test_staging_too_small_for_one_chunk_is_refused_at_registration(here):
    small = {"backends": ["fake_nccl"], "shared": False, "size": "large", "layout": {"kv_heads": 64}}
    with pytest.raises(BufferTooSmall, match="which has 524288 bytes; one chunk of this cache needs 1310720") as raised:
        here("decode", limits={"staging_bytes": 512 << 10}, **small | {"layout": {"kv_heads": 64, "num_blocks": 8}})
    needed = int(str(raised.value).split("needs ")[1].split(":")[0])
    prefill, decode = [
        here(n, fill=f, limits={"staging_bytes": needed}, **small | {"layout": {"kv_heads": 64, "num_blocks": 8}})
        for n, f in (("prefill", 1), ("decode", None))
    ]
    assert decode.fetch_now(prefill.publish([1, 2, 3]), [1, 2, 3]) == "packed"
    assert decode.blocks([1, 2, 3]) == prefill.blocks([1, 2, 3])


def test_unequal_releases_of_nccl_are_named_when_two_meet(start, here):
    other = {"version": "2.32.3", "path": "/opt/other/libnccl.so.2"}
    prefill, decode = start("prefill", fill=1, **options(other)), here("d", backends=["fake_nccl"], shared=False)
    fetch = decode.cache.fetch(prefill.publish([0]), into={"full": [0]})
    with pytest.raises(NoCommonBackend) as raised:
        fetch.wait(20)
    for part in ("2.28.9", "/fake/libnccl.so.2", "2.32.3", "/opt/other/libnccl.so.2"):
        assert part in str(raised.value)


def test_two_caches_of_one_gpu_are_refused(start):
    prefill, decode = [start(n, fill=1, **options({"gpu": "one GPU"})) for n in ("prefill", "decode")]
    key = decode.fetch(prefill.publish([0]), [0])
    assert decode.outcome(key) == "BackendError"


def test_a_peer_that_takes_another_backend_for_this_process_is_told(start, here):
    """Each side takes the first backend of its own order that both have."""
    prefill = start("prefill", fill=1, **options(backends=["fake_nccl", "shm"]))
    backends = [kvxfer.backends.shm.SharedMemoryBackend(), FakeNcclBackend()]
    layout = make_layout()
    with kvxfer.Connector("decode", backends=backends, ways=("packed",), secret=SECRET) as decode:
        cache = decode.register({r.name: np.zeros(r.nbytes, np.uint8) for r in layout.regions}, layout)
        fetch = cache.fetch(prefill.publish([0]), into={"full": [0]}, timeout_s=10)
        with pytest.raises(KvxferError):
            fetch.wait(20)


def test_hostile_words_are_refused():
    ours, theirs = FakeNcclBackend(fake={"gpu": "a"}), FakeNcclBackend(fake={"gpu": "b"})
    memory, peers = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    ours.register(memory.ctypes.data, 4096), theirs.register(peers.ctypes.data, 4096)
    link, said, dice = ours.connect(theirs.hello()), [], random.Random(1)
    link.converse(kvxfer.backends.base.ControlLine(say=said.append, until=lambda *_: None, is_progress=lambda: True))
    try:
        for handle in (theirs.hello(), theirs.register(peers.ctypes.data, 4096).handle):
            take = ours.connect if handle == theirs.hello() else (lambda data: link.open(data, 4096))
            for _ in range(100):
                data = bytearray(handle)
                data[dice.randrange(len(data))] = dice.randrange(256)
                for bad in (bytes(data), handle[: dice.randrange(len(handle))], dice.randbytes(30)):
                    try:
                        take(bad)
                    except BackendError:
                        continue
        with pytest.raises(BackendError):
            link.hear(dice.randbytes(40))
        for address, nbytes in ((memory.ctypes.data, 8), (1, 8), (memory.ctypes.data, 1 << 40)):
            said.clear()
            link.hear(encode(Read(key=1, address=address, nbytes=nbytes)))  # the cache is no lease table
            assert b"may not" in said[0]
        table = ours.allocate(4096)
        said.clear()
        link.hear(encode(Read(key=2, address=table.address, nbytes=8)))
        assert bytes(8) in said[0]
        with pytest.raises(BackendError, match="reads none"):
            link.post(Direction.READ, np.array([[memory.ctypes.data, 1, 8]], np.uint64))
        with pytest.raises(BackendError, match="not registered"):
            link.hear(encode(Coming(generation=1, chunks=(Chunk(0, memory.ctypes.data + 1, 4096),))))
        assert link.lost
    finally:
        ours.close(), theirs.close()


@pytest.mark.parametrize(
    "wrong", [{"max_ctas": -1}, {"max_ctas": 33}, {"max_ctas": True}, {"open_timeout_s": 0}, {"stall_timeout_s": "1"}]
)
def test_wrong_options(wrong):
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        FakeNcclBackend(**wrong)


def test_max_ctas_reaches_nccl():
    backend, seen = FakeNcclBackend(max_ctas=3), []
    nccl_ = backend.libnccl._nccl
    nccl_.comm_init_rank_scalable = lambda *args: seen.append(args[4].max_ctas) or object()
    backend.libnccl.communicator(bytes(128), 0, max_ctas=backend.settings.max_ctas)
    backend.libnccl.communicator(bytes(128), 0, max_ctas=0)
    assert seen == [3, None]
    backend.close()


# --- machines without what it takes --------------------------------------------------------------------------


def test_the_real_backend_says_what_is_missing_here():
    """On a machine with NCCL and two GPUs there is nothing to say."""
    try:
        backend = nccl.NcclBackend()
    except (MissingExtra, BackendError) as error:
        assert any(word in str(error) for word in ("kvxfer[nccl]", "no CUDA kernels", "GPUs", "libnccl")), error
        with pytest.raises(type(error)):
            kvxfer.Connector("here", backends="nccl")
    else:
        backend.close()


def test_without_nccl4py_the_message_says_which_package_it_is_and_which_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", None)
    with pytest.raises(MissingExtra, match=r"kvxfer\[nccl\].*pynccl"):
        nccl.NcclBackend()


def test_the_module_is_imported_without_anything_of_it():
    code = "import sys, kvxfer.backends.nccl; print([m for m in ('nccl', 'cuda', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_pynccl_is_another_name_for_it(monkeypatch, caplog):
    class Entry:
        name = "nccl"

        @staticmethod
        def load():
            return FakeNcclBackend

    monkeypatch.setattr(discovery, "installed", lambda: {"nccl": Entry})
    started, _ = discovery.start_backends("pynccl", loopback=False)
    assert list(started) == ["fake_nccl"] and "PyPI package pynccl, of 2020" in caplog.text
    started["fake_nccl"].close()


def test_hello_carries_the_version_first():
    backend = FakeNcclBackend()
    assert msgspec.msgpack.decode(backend.hello())[:2] == ["2.28.9", "/fake/libnccl.so.2"]
    backend.close()


def test_a_cache_in_host_memory_is_refused():
    """The real backend reaches GPUs only; the fake's stands for one."""
    assert nccl.NcclBackend.capabilities.devices == {"cuda"}
    assert not nccl.NcclBackend.capabilities.mapped and not nccl.NcclBackend.capabilities.one_sided


def test_side_is_closed_while_chunks_cross(start, here):
    prefill = start("prefill", fill=1, **options(SLOW, **LARGE))
    decode: Side = here("decode", backends=["fake_nccl"], shared=False, limits=QUICK, **LARGE)
    key = decode.fetch(prefill.publish(MANY), MANY)
    under_way(decode, key)
    decode.close()
    assert decode.outcome(key) in ("Cancelled", "Closed", *ENDS)
    until(lambda: prefill.communicators() == 0, 20)
    rest(prefill)
