"""Engines of several processes: a scheduler without memory issues tickets, ranks publish and fetch under them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import kvxfer
from kvxfer import CacheLayout, errors
from tests.backends.peer import SECRET, Peer, make_arrays
from tests.backends.reference import contents

HEADS, TOKENS = 8, 100
SRC, DST = [7, 2, 31, 4, 9, 11, 0], [1, 30, 3, 29, 5, 6, 28]


def layout(first_head: int, heads: int, block_tokens: int = 16) -> CacheLayout:
    return CacheLayout.paged(
        layers=("layers.0", "layers.1"),
        num_blocks=32,
        block_tokens=block_tokens,
        kv_heads=heads,
        head_dim=16,
        dtype="float16",
        head_start=first_head,
        total_heads=HEADS,
        fingerprint={"model": "ranks"},
    )


def start_engine(stack: ExitStack, name: str, heads: list[tuple[int, int]], memory: str) -> tuple[Peer, list[Peer]]:
    """A scheduler and one rank for each (first head, heads)."""
    shared = {"engine": name, "generation": 42, "ranks": len(heads)}
    scheduler = stack.enter_context(Peer(name=f"{name}-scheduler", **shared))
    ranks = [stack.enter_context(Peer(name=f"{name}-{i}", rank=i, **shared)) for i in range(len(heads))]
    for index, (rank, (first, count)) in enumerate(zip(ranks, heads, strict=True)):
        rank.register("kv", layout(first, count), memory, seed=index)
    scheduler.set_members({i: rank.endpoint() for i, rank in enumerate(ranks)})
    return scheduler, ranks


@pytest.fixture(params=["mapped-shared", "direct-private", "packed-private"])
def road(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    return request.param.split("-")


def all_heads(ranks: list[tuple[CacheLayout, dict]], blocks: dict) -> dict:
    """Contents of every rank, each plane's heads in the model's order."""
    import numpy as np

    parts = [contents(layout, arrays, blocks, TOKENS) for layout, arrays in ranks]
    return {key: np.concatenate([part[key] for part in parts], axis=1) for key in parts[0]}


@pytest.mark.parametrize("decode_heads", [[(0, 4), (4, 4)], [(0, 8)], [(0, 2), (2, 2), (4, 2), (6, 2)]], ids=len)
def test_one_ticket_serves_every_rank(road: tuple[str, str], decode_heads: list[tuple[int, int]]) -> None:
    way, memory = road
    prefill_heads = [(0, 4), (4, 4)]
    with ExitStack() as stack:
        scheduler, prefill = start_engine(stack, "prefill", prefill_heads, memory)
        decode = [
            stack.enter_context(
                kvxfer.Connector(
                    f"decode-{i}",
                    engine="decode",
                    generation=7,
                    rank=i,
                    ranks=len(decode_heads),
                    ways=(way,),
                    secret=SECRET,
                )
            )
            for i in range(len(decode_heads))
        ]
        ticket = scheduler.issue(layout(0, 4), {"full": SRC}, tokens=TOKENS, request_id="r1")
        arrays, transfers = [], []
        for connector, (first, count) in zip(decode, decode_heads, strict=True):
            arrays.append(make_arrays(layout(first, count), memory, None))
            cache = connector.register(arrays[-1], layout(first, count))
            transfers.append(cache.fetch(ticket, into={"full": DST}))
        with pytest.raises(errors.DeadlineExceeded):
            transfers[0].wait(0.1)  # nothing has been published yet
        for rank in prefill:
            rank.publish("kv", {"full": SRC}, tokens=TOKENS, ticket=ticket)
        stats = [transfer.wait(20) for transfer in transfers]
        assert {s.way for s in stats} == {way}
        sources = [(layout(*h), r.contents("kv")) for r, h in zip(prefill, prefill_heads, strict=True)]
        there = all_heads(sources, {"full": SRC})
        here = all_heads([(layout(*h), a) for a, h in zip(arrays, decode_heads, strict=True)], {"full": DST})
        assert all((there[key] == here[key]).all() and there[key].size for key in there)
        # A rank's blocks are free once every decode rank is done with the lease, also one that it read nothing from.
        assert [rank.lease_state(ticket, wait_s=5) for rank in prefill] == ["released"] * 2


def test_a_rank_that_publishes_other_blocks_is_refused() -> None:
    with ExitStack() as stack:
        scheduler, [rank] = start_engine(stack, "prefill", [(0, 8)], "shared")
        ticket = scheduler.issue(layout(0, 8), {"full": SRC}, tokens=TOKENS)
        with pytest.raises(errors.InvalidBlocks, match="not those that the ticket was issued for"):
            rank.publish("kv", {"full": SRC[::-1]}, tokens=TOKENS, ticket=ticket)
        rank.publish("kv", {"full": SRC}, tokens=TOKENS, ticket=ticket)
        with pytest.raises(errors.InvalidTicket, match="published here before"):
            rank.publish("kv", {"full": SRC}, tokens=TOKENS, ticket=ticket)
        rank.release(ticket)
        with pytest.raises(errors.InvalidTicket, match="published here before"):
            rank.publish("kv", {"full": SRC}, tokens=TOKENS, ticket=ticket)


def test_one_expired_rank_fails_the_whole_transfer_with_nothing_written() -> None:
    with ExitStack() as stack:
        scheduler, prefill = start_engine(stack, "prefill", [(0, 4), (4, 4)], "shared")
        ticket = scheduler.issue(layout(0, 4), {"full": SRC}, tokens=TOKENS)
        for rank in prefill:
            rank.publish("kv", {"full": SRC}, tokens=TOKENS, ticket=ticket)
        prefill[1].release(ticket)
        connector = stack.enter_context(kvxfer.Connector("decode", secret=SECRET))
        arrays = make_arrays(layout(0, 8), "shared", None)
        cache = connector.register(arrays, layout(0, 8))
        with pytest.raises(errors.LeaseExpired):
            cache.fetch(ticket, into={"full": DST}).wait(20)
        assert not any(array.any() for array in arrays.values())


def test_a_rank_joins_an_engine_that_is_named_later() -> None:
    with (
        kvxfer.Connector("rank", secret=SECRET) as rank,
        kvxfer.Connector("scheduler", engine="late", secret=SECRET) as scheduler,
        kvxfer.Connector("reader", secret=SECRET) as reader,
    ):
        whole = layout(0, HEADS)
        cache, into = (c.register(make_arrays(whole, "private", seed), whole) for seed, c in ((1, rank), (2, reader)))
        scheduler.set_members({0: rank.endpoint})
        ticket = scheduler.issue(whole, {"full": SRC}, tokens=TOKENS)
        with pytest.raises(errors.InvalidTicket, match="engine 'late'"):
            cache.publish({"full": SRC}, tokens=TOKENS, ticket=ticket)
        rank.join_engine("late", scheduler.generation)
        cache.publish({"full": SRC}, tokens=TOKENS, ticket=ticket)
        assert into.fetch(ticket, into={"full": DST}).wait(10.0).peers == 1


def test_an_advertised_port_of_0_is_the_one_that_is_listened_on() -> None:
    with kvxfer.Connector("c", listen="tcp://0.0.0.0:0", advertise="tcp://localhost:0", secret=SECRET) as connector:
        host, _, port = connector.endpoint.rpartition(":")
        assert host == "tcp://localhost" and int(port) > 0


def test_a_ticket_that_was_used_before_its_engine_knew_its_ranks() -> None:
    """It finds no cache; the next one dials anew and learns of them."""
    with (
        kvxfer.Connector("rank", secret=SECRET) as rank,
        kvxfer.Connector("scheduler", secret=SECRET) as scheduler,
        kvxfer.Connector("reader", secret=SECRET) as reader,
    ):
        whole = layout(0, HEADS)
        cache, into = (c.register(make_arrays(whole, "private", seed), whole) for seed, c in ((1, rank), (2, reader)))
        rank.join_engine("scheduler", scheduler.generation)

        def hand_over() -> kvxfer.TransferStats:
            ticket = scheduler.issue(whole, {"full": SRC}, tokens=TOKENS)
            cache.publish({"full": SRC}, tokens=TOKENS, ticket=ticket)
            return into.fetch(ticket, into={"full": DST}).wait(10.0)

        with pytest.raises(errors.UnknownCache, match="no rank of engine 'scheduler' has a cache 'kv'"):
            hand_over()
        scheduler.set_members({0: rank.endpoint})
        assert hand_over().peers == 1


def test_a_cache_that_no_rank_has_costs_no_session_each_time() -> None:
    with (
        kvxfer.Connector("rank", secret=SECRET) as rank,
        kvxfer.Connector("scheduler", secret=SECRET) as scheduler,
        kvxfer.Connector("reader", secret=SECRET) as reader,
    ):
        whole = layout(0, HEADS)
        _, into = (c.register(make_arrays(whole, "private", seed), whole) for seed, c in ((1, rank), (2, reader)))
        rank.join_engine("scheduler", scheduler.generation)
        scheduler.set_members({0: rank.endpoint})
        sessions = set()
        for _ in range(2):
            ticket = scheduler.issue(whole, {"full": SRC}, tokens=TOKENS, cache="draft")
            with pytest.raises(errors.UnknownCache, match="cache 'draft'"):
                into.fetch(ticket, into={"full": DST}).wait(10.0)
            sessions.add(len(reader._node.directory.peers))
        assert len(sessions) == 1
