"""Prefill on one host, decode on two others, over UCX's tcp: bytes arrive, also over slow and lossy networks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import SIZES, until

from .conftest import at_rest
from .network import NotPermitted

WAYS = ("direct", "packed")
MANY = list(range(SIZES["large"]["num_blocks"]))
MIB_A_BLOCK = 2 * 64 / 1024  # of the large cache

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("way", "ipv6"),
    [("direct", False), ("packed", False), ("packed", True)],
    ids=["direct-ipv4", "packed-ipv4", "packed-ipv6"],
)
def test_one_prefill_host_feeds_two_decode_hosts(network, start, way, ipv6):
    one, two, three = network(3)
    prefill = start(one, "prefill", ipv6=ipv6, fill=1, ways=(way,))
    decodes = [start(host, f"decode-{host.address}", ipv6=ipv6, ways=(way,)) for host in (two, three)]
    assert ("[" in prefill.endpoint()) == ipv6
    tickets = [[prefill.publish([block, block + 1]) for block in range(0, 60, 2)] for _ in decodes]
    for decode, mine in zip(decodes, tickets, strict=True):
        decode.post("fetch_all", mine, 2)
    for decode in decodes:
        assert set(decode.answer()) == {way}
        assert decode.blocks(list(range(60))) == prefill.blocks(list(range(60)))
    until(lambda: prefill.metrics()["leases"] == 0)
    at_rest(prefill, *decodes)


@pytest.mark.parametrize("way", WAYS)
def test_a_send_reaches_another_host(network, start, way):
    one, two = network(2)
    prefill, decode = start(one, "prefill", fill=1, ways=(way,)), start(two, "decode", ways=(way,))
    ticket, key = decode.reserve([3, 4])
    send = prefill.send(ticket, [1, 2], layerwise=True)
    for layer in ("l0", "l1"):
        prefill.layer_ready(send, layer)
    assert (prefill.outcome(send), decode.outcome(key)) == (way, way)
    assert decode.blocks([3, 4]) == prefill.blocks([1, 2])
    at_rest(prefill, decode)


def test_shared_memory_is_left_aside_between_hosts(network, start):
    one, two = network(2)
    both = {"backends": ["shm", "nixl"], "shared": True}
    prefill, decode = start(one, "prefill", fill=1, **both), start(two, "decode", **both)
    neighbour = start(two, "neighbour", fill=2, **both)
    across, within = decode.fetch(prefill.publish([1]), [1]), decode.fetch(neighbour.publish([2]), [2])
    assert decode.outcome(across) in WAYS and decode.outcome(within) == "mapped"
    assert (decode.stats(across)["backend"], decode.stats(within)["backend"]) == ("nixl", "shm")
    assert decode.blocks([1, 2]) == b"".join(
        part
        for layer in (0, 1)
        for part in (halves(prefill.blocks([1]))[layer], halves(neighbour.blocks([2]))[layer])
    )
    at_rest(prefill, decode, neighbour)


def halves(blocks: bytes) -> tuple[bytes, bytes]:
    return blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]


@pytest.mark.parametrize("way", WAYS)
def test_a_slow_link_is_used_to_the_full_and_by_nothing_else(network, start, way):
    one, two = network(2)
    large = {"size": "large", "ways": (way,)}
    prefill, decode = start(one, "prefill", fill=1, **large), start(two, "decode", **large)
    assert decode.fetch_now(prefill.publish([0])) == way
    one.limit("400mbit")
    blocks = MANY[:320]
    fetch = decode.fetch(prefill.publish(blocks), blocks, timeout_s=20)
    assert decode.outcome(fetch) == way
    at_best = len(blocks) * MIB_A_BLOCK * 2**20 * 8 / 400e6
    assert 0.9 * at_best < decode.stats(fetch)["seconds"] < 3 * at_best
    assert decode.digest(blocks) == prefill.digest(blocks)
    at_rest(prefill, decode)


@pytest.mark.parametrize("how", ["delay 20ms 5ms", "loss 1%", "delay 10ms reorder 25%", "duplicate 2%"])
@pytest.mark.parametrize("way", WAYS)
def test_delay_loss_and_disorder_cost_time_only(network, start, way, how):
    one, two = network(2)
    prefill, decode = start(one, "prefill", fill=1, ways=(way,)), start(two, "decode", ways=(way,))
    try:
        one.impair(how)
        two.impair(how)
    except NotPermitted as error:
        pytest.skip(f"this kernel has no netem: {error}")
    tickets = [prefill.publish([block]) for block in range(20)]
    assert set(decode.fetch_all(tickets, 1)) == {way}
    assert decode.blocks(list(range(20))) == prefill.blocks(list(range(20)))
    at_rest(prefill, decode)


def test_hosts_go_when_the_process_that_made_them_is_killed():
    code = "import sys\nsys.path.insert(0, sys.argv[1])\nfrom network import Network\nnetwork = Network(2)\n"
    code += "print(*(host.pid for host in network.hosts), flush=True)\nsys.stdin.read()"
    maker = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    maker.send_signal(signal.SIGKILL)
    maker.communicate()

    def gone(pid: int) -> bool:
        try:
            return ") Z" in Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True

    until(lambda: all(gone(pid) for pid in pids), 5, "the hosts' end")
