"""What goes wrong between two pools: wrong tickets, expiry, processes that die, clients that leave, garbage.

Whatever happens, nobody gets a wrong token. kv_load_failure_policy decides whether a request whose KV cannot be had is
computed afresh or ends with an error.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

import pytest

from tests.processes import until

from . import connectors
from .comparing import assert_same, hand_over, prefill, prompt
from .conftest import Reference, Start
from .engine import TO_PREFILL, Answer, Engine, Request
from .environment import Ports

SHORT_LEASE_S, LONG_LEASE_S = 3.0, 100.0
SOON_S = 20.0
"""Far less than a long lease: what is back by then has been given back, and did not run out."""
FETCH_S = 8.0
CACHE_BYTES = 20 << 20
"""160 blocks of 32 tokens: six prompts of 1,000 and every block has been used again."""
POLICIES = ["fail", "recompute"]
Decode = Callable[[str], Engine]


def wrong_in_nixl(reason: str) -> pytest.ParameterSet:
    """The same test with NixlConnector, which must fail it."""
    return pytest.param("nixl", marks=[pytest.mark.comparison, pytest.mark.xfail(strict=True, reason=reason)])


def config(name: str, policy: str = "fail", lease_s: float = LONG_LEASE_S) -> dict:
    if name == "nixl":
        return connectors.nixl(policy, kv_lease_duration=lease_s)
    return connectors.kvxfer(policy, lease_s=lease_s, fetch_timeout_s=FETCH_S)


@pytest.fixture(scope="module")
def decode(start: Start) -> Decode:
    """The decode engine with a policy, started at its first use."""
    engines: dict[tuple[str, str], Engine] = {}

    def get(policy: str, name: str = "kvxfer") -> Engine:
        key = (name, policy)
        if key not in engines:
            engines[key] = start(f"decode-{policy}", connector=config(name, policy), core=1)
        return engines[key]

    return get


@pytest.fixture(scope="module")
def steady(start: Start) -> Engine:
    """A prefill engine that nobody kills."""
    return start("prefill", connector=config("kvxfer"))


@pytest.fixture(scope="module")
def hasty(start: Start) -> Engine:
    """A prefill engine with short leases and few blocks."""
    connector = config("kvxfer", lease_s=SHORT_LEASE_S)
    return start("prefill-hasty", connector=connector, kv_cache_memory_bytes=CACHE_BYTES)


def assert_computed_or_error(answer: Answer, expected: Answer, policy: str) -> None:
    """What becomes of a request whose KV cannot be fetched."""
    if policy == "fail":
        assert (answer.finish, answer.tokens) == ("error", [])
    else:
        assert_same([answer], [expected])


def all_blocks_used_again(engine: Engine, seed: int) -> None:
    engine.generate(*(Request(prompt=prompt(1000, seed=seed + i), max_tokens=1) for i in range(6)))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_ticket_of_another_prompt(decode: Decode, steady: Engine, reference: Reference, policy: str) -> None:
    """It is refused: the prompt is computed here, and nothing wrong enters the prefix cache."""
    d = decode(policy)
    a, b = prompt(300, seed=POLICIES.index(policy)), prompt(300, seed=10 + POLICIES.index(policy))
    of_a_alone, of_b_alone = reference(a, b)  # before the lease begins: this may start an engine
    [of_a] = prefill(steady, a)
    for _ in range(2):
        [answer] = d.generate(Request(prompt=b, kv=of_a))
        assert_same([answer], [of_b_alone])
    [answer] = d.generate(Request(prompt=a, kv=of_a))
    assert_same([answer], [of_a_alone])
    assert answer.computed_tokens == 1


@pytest.mark.parametrize("name", ["kvxfer", wrong_in_nixl("answers for the prompt that the blocks belong to")])
def test_no_answer_to_another_prompt(start_here: Start, reference: Reference, name: str) -> None:
    p, d = start_here("prefill", connector=config(name)), start_here("decode", connector=config(name), core=1).ready()
    b = prompt(300, seed=21)
    expected = reference(b)
    [of_a] = prefill(p, prompt(300, seed=20))
    assert_same(d.generate(Request(prompt=b, kv=of_a)), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lease_that_has_run_out(decode: Decode, hasty: Engine, reference: Reference, policy: str) -> None:
    d = decode(policy)
    a = prompt(1000, seed=30)
    [of_a] = prefill(hasty, a)
    until(hasty.idle, 10 * SHORT_LEASE_S, "the lease's end")
    all_blocks_used_again(hasty, seed=31)
    [answer] = d.generate(Request(prompt=a, kv=of_a))
    assert_computed_or_error(answer, reference(a)[0], policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_dies_before_the_fetch(
    decode: Decode, start_here: Start, reference: Reference, policy: str
) -> None:
    p, d = start_here("mortal", connector=config("kvxfer")), decode(policy)
    a, b = prompt(300, seed=40), prompt(300, seed=41)
    assert_same(hand_over(p, d, a), reference(a))  # the two know each other
    [of_b] = prefill(p, b)
    p.kill()
    began = time.monotonic()
    [answer] = d.generate(Request(prompt=b, kv=of_b))
    assert_computed_or_error(answer, reference(b)[0], policy)
    assert time.monotonic() - began < 2 * FETCH_S


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_dies_amid_fetches(decode: Decode, start_here: Start, reference: Reference, policy: str) -> None:
    p, d = start_here("mortal", connector=config("kvxfer"), kv_cache_memory_bytes=256 << 20), decode(policy)
    prompts = [prompt(1200, seed=50 + i) for i in range(8)]
    requests = [Request(prompt=x, kv=kv) for x, kv in zip(prompts, prefill(p, *prompts), strict=True)]
    d.add(*requests[:4])
    p.kill()
    d.add(*requests[4:])
    answers = d.answers(*requests)
    for answer, expected in zip(answers, reference(*prompts), strict=True):
        if answer.finish == "error":
            assert policy == "fail" and not answer.tokens
        else:
            assert_same([answer], [expected])


def test_prefill_dies_after_the_fetch(decode: Decode, start_here: Start, reference: Reference) -> None:
    p, d = start_here("mortal", connector=config("kvxfer")), decode("fail")
    a = prompt(300, seed=60)
    [of_a] = prefill(p, a)
    request = Request(prompt=a, kv=of_a, max_tokens=400)
    d.add(request)
    until(p.idle, SOON_S, "the release")
    p.kill()
    [answer] = d.answers(request)
    assert_same([answer], reference(a, max_tokens=400))


def test_decode_dies_and_the_blocks_come_back(hasty: Engine, start_here: Start) -> None:
    """Those that it was to fetch come back when their lease has run out."""
    d = start_here("mortal", connector=config("kvxfer"), core=1).ready()
    prompts = [prompt(300, seed=70 + i) for i in range(3)]
    until(hasty.idle, 10 * SHORT_LEASE_S)
    blocks = hasty.free_blocks()
    handed = prefill(hasty, *prompts)
    d.add(*(Request(prompt=x, kv=kv) for x, kv in zip(prompts[:2], handed, strict=False)))
    d.kill()
    until(lambda: hasty.idle() and hasty.free_blocks() == blocks, 10 * SHORT_LEASE_S, "all blocks free")


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05])
def test_a_client_that_leaves_decode(decode: Decode, steady: Engine, reference: Reference, after_s: float) -> None:
    """Before, during and after the fetch: both engines get their blocks back, and go on."""
    d = decode("fail")
    until(lambda: steady.idle() and d.idle(), SOON_S)
    before = d.free_blocks(), steady.free_blocks()
    a = prompt(1200, seed=80 + int(1000 * after_s))
    [of_a] = prefill(steady, a)
    request = Request(prompt=a, kv=of_a, max_tokens=1000)
    d.add(request)
    time.sleep(after_s)
    d.abort(request.request_id)
    until(lambda: d.idle() and steady.idle(), SOON_S, "both idle")
    assert (d.free_blocks(), steady.free_blocks()) == before
    assert_same(hand_over(steady, d, a), reference(a))


def test_a_client_that_leaves_prefill(steady: Engine) -> None:
    until(steady.idle, SOON_S)
    before = steady.free_blocks()
    request = Request(prompt=prompt(3000, seed=90), max_tokens=1, kv=TO_PREFILL)
    steady.add(request)
    steady.abort(request.request_id)
    until(steady.idle, SOON_S, "prefill idle")
    assert steady.free_blocks() == before


def test_garbage_on_the_ports(decode: Decode, start_here: Start, reference: Reference) -> None:
    """Neither the scheduler's port nor the worker's is harmed by bytes that are not ours."""
    ports = Ports(2)
    connector = config("kvxfer")
    connector["kv_connector_extra_config"]["port"] = ports.first
    p, d = start_here("prefill", connector=connector).ready(), decode("fail")
    generator = random.Random(0)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # of ZeroMQ's protocol
    for number in (ports.first, ports.first + 1):
        for start in (b"", greeting, b"GET / HTTP/1.1\r\n\r\n"):
            for size in (1, 100, 100_000):
                with socket.create_connection(("127.0.0.1", number), timeout=5) as connection:
                    try:
                        connection.sendall(start + generator.randbytes(size))
                    except OSError:
                        continue  # it has hung up on us
    a = prompt(300, seed=100)
    assert_same(hand_over(p, d, a), reference(a))
    ports.close()


def test_one_of_two_prefill_engines_restarts(
    decode: Decode, steady: Engine, start_here: Start, reference: Reference
) -> None:
    """On the same ports. Its old tickets fail, its new ones are good, and the other's were never in danger."""
    ports, d = Ports(2), decode("recompute")
    connector = config("kvxfer")
    connector["kv_connector_extra_config"]["port"] = ports.first
    old = start_here("old", connector=connector)
    a, b, c = (prompt(300, seed=110 + i) for i in range(3))
    assert_same(hand_over(old, d, a), reference(a))
    [of_b] = prefill(old, b)
    [of_c] = prefill(steady, c)
    old.kill()
    [answer] = d.generate(Request(prompt=c, kv=of_c))
    assert_same([answer], reference(c))
    new = start_here("new", connector=connector)
    e = prompt(300, seed=114)
    [answer] = hand_over(new, d, e)
    assert_same([answer], reference(e))
    assert answer.computed_tokens == 1
    [answer] = d.generate(Request(prompt=b, kv=of_b))
    assert_same([answer], reference(b))
    ports.close()


@pytest.mark.parametrize("change", ["cut", "flipped", "empty", "number"])
def test_a_broken_ticket(decode: Decode, steady: Engine, reference: Reference, change: str) -> None:
    d = decode("fail")
    a = prompt(300, seed=120 + len(change))
    [kv] = prefill(steady, a)
    ticket = kv["kvxfer_ticket"]
    flipped = ticket[:40] + ("A" if ticket[40] != "A" else "B") + ticket[41:]
    broken = {"cut": ticket[:-9], "flipped": flipped, "empty": "", "number": 7}
    [answer] = d.generate(Request(prompt=a, kv={**kv, "kvxfer_ticket": broken[change]}))
    assert_same([answer], reference(a))


@pytest.mark.parametrize("name", ["kvxfer", wrong_in_nixl("reads what is in the blocks now, and says nothing")])
def test_no_answer_from_blocks_used_again(start_here: Start, reference: Reference, name: str) -> None:
    connector = config(name, lease_s=SHORT_LEASE_S)
    p = start_here("prefill", connector=connector, kv_cache_memory_bytes=CACHE_BYTES)
    d = start_here("decode", connector=config(name, "recompute"), core=1)
    a = prompt(1000, seed=130)
    [of_a] = prefill(p, a)
    until(p.idle, 60, "the lease's end")
    all_blocks_used_again(p, seed=131)
    [answer] = d.generate(Request(prompt=a, kv=of_a))
    assert_same([answer], reference(a))
