"""What two sides tell each other of themselves: too large, unreadable, or nothing at all. Whoever waits is told why."""

from __future__ import annotations

import logging

import msgspec
import numpy as np
import pytest
from processes import SECRET, until

import kvxfer
from kvxfer import CacheLayout, Connector, Limits, errors
from kvxfer.control import messages

pytestmark = pytest.mark.timeout(60)

LAYERS = {"small": 2, "large": 60}


def layout_of(layers: int, **heads: int) -> CacheLayout:
    return CacheLayout.paged(
        layers=[f"model.layers.{i}.self_attn" for i in range(layers)],
        num_blocks=2,
        block_tokens=1,
        head_dim=8,
        dtype="float16",
        **({"kv_heads": 1} | heads),
    )


def arrays_of(layout: CacheLayout) -> dict[str, np.ndarray]:
    return {region.name: kvxfer.shared_empty(region.nbytes) for region in layout.regions}


@pytest.fixture
def open_connector(nothing_left):
    opened = []

    def open_connector(name: str, *, limits: dict | None = None, **options: object) -> Connector:
        opened.append(Connector(name, secret=SECRET, limits=Limits(**(limits or {})), **options))
        return opened[-1]

    yield open_connector
    for connector in opened:
        connector.close()
    opened.clear()


def size_of(connector: Connector) -> int:
    return len(messages.encode(connector._node.describe(True)))


def test_a_cache_whose_description_is_over_the_limit_is_refused_when_it_is_registered(open_connector):
    connector = open_connector("prefill", limits={"max_message_bytes": 8192})
    layouts = {name: layout_of(layers) for name, layers in LAYERS.items()}
    with pytest.raises(errors.InvalidRequest, match=r"take \d+ bytes .* max_message_bytes is 8192: raise it on both"):
        connector.register(arrays_of(layouts["large"]), layouts["large"])
    cache = connector.register(arrays_of(layouts["small"]), layouts["small"])  # nothing is left of the other
    with pytest.raises(errors.InvalidRequest, match="max_message_bytes"):
        connector.register(arrays_of(layouts["large"]), layouts["large"], name="more")
    assert size_of(connector) < 8192
    assert cache.fetch(cache.publish({"full": [1]}, tokens=1).ticket, into={"full": [0]}).wait(20).way == "mapped"


def test_what_a_description_becomes_with_a_shelf_is_counted(open_connector):
    layout = layout_of(2)
    probe = open_connector("probe")
    probe.register(arrays_of(layout), layout).publish({"full": [1]}, tokens=1, pack_ahead="raw")
    until(lambda: ("shelf", "cpu") in probe._node.rings)
    needed = size_of(probe)
    with pytest.raises(errors.InvalidRequest, match="max_message_bytes"):
        open_connector("tight", limits={"max_message_bytes": needed - 1}).register(arrays_of(layout), layout)


def test_members_that_do_not_fit_a_message_are_refused(open_connector):
    members = {rank: f"tcp://10.0.0.{rank % 250}:5600" for rank in range(1000)}
    with pytest.raises(errors.InvalidRequest, match=r"members take .* max_message_bytes is 4096"):
        Connector("scheduler", secret=SECRET, members=members, limits=Limits(max_message_bytes=4096))
    connector = open_connector("scheduler", limits={"max_message_bytes": 4096})
    with pytest.raises(errors.InvalidRequest, match=r"members take .* max_message_bytes is 4096"):
        connector.set_members(members)


@pytest.mark.parametrize("larger", ["prefill", "decode"])
def test_unequal_limits_end_the_fetch_at_once_with_sizes_and_side(open_connector, larger):
    layouts = {name: layout_of(LAYERS["large" if name == larger else "small"]) for name in ("prefill", "decode")}
    nbytes = {}
    for name, layout in layouts.items():
        probe = open_connector(f"probe {name}")
        probe.register(arrays_of(layout), layout)
        nbytes[name] = size_of(probe)
    limit = int(0.7 * nbytes[larger])  # less than the larger has, more than the other
    assert limit > min(nbytes.values()) + 2000
    limits = {name: {"max_message_bytes": 4 * limit if name == larger else limit} for name in layouts}
    prefill, decode = (open_connector(name, limits=limits[name]) for name in ("prefill", "decode"))
    source, into = (c.register(arrays_of(layouts[c.name]), layouts[c.name]) for c in (prefill, decode))
    smaller = "decode" if larger == "prefill" else "prefill"
    fetch = into.fetch(source.publish({"full": [1]}, tokens=1).ticket, into={"full": [0]}, allow_missing=True)
    with pytest.raises(
        errors.InvalidRequest,
        match=rf"{smaller} cannot read what {larger} says: a message of \d+ bytes is over the limit of {limit}",
    ):
        fetch.wait(20)
    until(lambda: decode.metrics.peers == prefill.metrics.peers == 0, what="the session closed")


def test_a_peer_that_is_told_nothing_it_can_take_says_so_before_the_fetch_runs_out(open_connector):
    """Frames of more than twice the limit never arrive: the transport cuts the connection."""
    layout = layout_of(LAYERS["large"])
    decode = open_connector("decode", limits={"dial_timeout_s": 1.0})
    prefill = open_connector("prefill", limits={"max_message_bytes": 2048})
    small = layout_of(1)
    ticket = prefill.register(arrays_of(small), small).publish({"full": [1]}, tokens=1).ticket
    into = decode.register(arrays_of(layout), layout)
    assert size_of(decode) > 3 * 2048 + 4096
    fetch = into.fetch(ticket, into={"full": [0]}, allow_missing=True, timeout_s=40)
    with pytest.raises(errors.DeadlineExceeded, match=r"prefill at tcp://.* has not said what it has within 1 s"):
        fetch.wait(30)


def test_layouts_of_ranks_that_are_too_much_together_end_the_fetch_at_once(open_connector):
    """Each of them fits a message; a packed fetch from several tells every rank of all."""
    shares = [layout_of(40, kv_heads=2, head_start=2 * rank, total_heads=4) for rank in range(2)]
    probe = open_connector("probe")
    probe.register(arrays_of(shares[0]), shares[0])
    limit = size_of(probe) + 1024
    assert limit < 2 * len(msgspec.msgpack.encode(shares[0]))
    engine = {"engine": "e", "generation": 1, "limits": {"max_message_bytes": limit}}
    ranks = [open_connector(f"rank-{rank}", rank=rank, ranks=2, **engine) for rank in range(2)]
    scheduler = open_connector("scheduler", **engine)
    scheduler.set_members({rank: connector.endpoint for rank, connector in enumerate(ranks)})
    caches = [c.register(arrays_of(share), share) for c, share in zip(ranks, shares, strict=True)]
    ticket = scheduler.issue(shares[0], {"full": [1]}, tokens=1)
    for cache in caches:
        cache.publish({"full": [1]}, tokens=1, ticket=ticket)
    whole = layout_of(40, kv_heads=4)
    decode = open_connector("decode", ways=("packed",), limits={"max_message_bytes": limit})
    into = decode.register(arrays_of(whole), whole)
    with pytest.raises(errors.InvalidRequest, match=rf"over the limit of {limit}; raise max_message_bytes"):
        into.fetch(ticket, into={"full": [0]}).wait(20)
    until(lambda: decode.metrics.staging_lent_bytes == 0, what="staging given back")


def nonsense(reply: bool) -> messages.Description:
    """A description that no peer can read, as a release with other types would send it."""
    info = messages.CacheInfo(name=7, layout=layout_of(1), regions=())
    return messages.Description(
        backends={}, lease_table=None, shelf=None, caches=(info,), outbox_bytes={}, reply=reply
    )


@pytest.mark.parametrize("culprit", ["prefill", "decode"])
def test_a_description_that_cannot_be_read_ends_the_fetch_at_once(open_connector, caplog, culprit):
    layout = layout_of(2)
    prefill, decode, other = (open_connector(name) for name in ("prefill", "decode", "other"))
    caches = {c.name: c.register(arrays_of(layout), layout) for c in (prefill, decode, other)}
    broken = prefill if culprit == "prefill" else decode
    broken._node.directory._describe = nonsense
    ticket = caches["prefill"].publish({"full": [1]}, tokens=1).ticket
    reader = "decode" if culprit == "prefill" else "prefill"
    with pytest.raises(errors.ProtocolMismatch, match=rf"{reader} cannot read what {culprit} says: .*name"):
        caches["decode"].fetch(ticket, into={"full": [0]}).wait(20)
    broken._node.directory._describe = broken._node.describe  # and nothing is remembered of it
    assert caches["decode"].fetch(ticket, into={"full": [0]}).wait(20)
    ticket = caches["prefill"].publish({"full": [1]}, tokens=1).ticket
    assert caches["other"].fetch(ticket, into={"full": [0]}).wait(20)
    assert "dropped a control message" in caplog.text


def test_an_unreadable_message_in_an_open_session_is_logged_on_both_sides_and_nothing_else(open_connector, caplog):
    layout = layout_of(2)
    prefill, decode = open_connector("prefill"), open_connector("decode")
    source, into = (c.register(arrays_of(layout), layout) for c in (prefill, decode))

    def fetch() -> None:
        ticket = source.publish({"full": [1]}, tokens=1).ticket
        assert into.fetch(ticket, into={"full": [0]}).wait(20)

    fetch()
    for session in list(prefill._node.directory.peers):
        prefill._node.on_progress(lambda session=session: session.send(nonsense(False)))
    until(lambda: caplog.text.count("decode cannot read what prefill says") >= 2, what="both sides' lines")
    fetch()
    assert decode.metrics.peers == prefill.metrics.peers == 1


def test_numpy_values_go_all_the_way(open_connector, nothing_left):
    layout = CacheLayout.paged(
        layers=[np.str_("l")],
        num_blocks=np.int64(4),
        block_tokens=np.int32(16),
        kv_heads=np.uint8(2),
        head_dim=np.int64(8),
        dtype="float16",
        head_start=np.int64(0),
        total_heads=np.int64(2),
        fingerprint={"model": np.str_("m")},
    )
    limits = Limits(lease_slots=np.int64(8), chunk_bytes=np.int64(4096), max_ttl_s=np.float32(60))
    engine = {"generation": np.int64(3), "rank": np.int64(0), "ranks": np.int64(1), "secret": SECRET, "limits": limits}
    with (
        Connector(np.str_("prefill"), engine=np.str_("e"), **engine) as prefill,
        Connector("decode", ways=["packed"], **engine) as decode,
    ):
        prefill.set_members({np.int64(0): np.str_(prefill.endpoint)})
        source, into = (c.register(arrays_of(layout), layout, name=np.str_("kv")) for c in (prefill, decode))
        source._spans["l"].keep_alive[:] = 7
        common = {"tokens": np.int64(20), "ttl_s": np.int64(20), "request_id": np.str_("r")}
        blocks = {np.str_("full"): np.array([1, 2])}
        lease = source.publish(blocks, pack_ahead="raw", **common)
        lease.renew(np.float32(20))
        decode.renew(lease.ticket, np.int64(20))
        stats = into.fetch(
            lease.ticket, into=blocks, allow_missing=np.False_, timeout_s=np.float32(20)
        ).wait(np.int64(20))
        assert stats.way == "packed"
        held = into._spans["l"].keep_alive.reshape(4, 2, 16, -1)
        assert (held[1] == 7).all()
        issued = prefill.issue(layout, blocks, cache=np.str_("kv"), **common)
        source.publish(blocks, ticket=issued, tokens=np.int64(20))
        into.fetch(issued, into=blocks).wait(20)
        reservation = into.reserve(blocks, **common)
        source.send(reservation.ticket, blocks, layerwise=np.False_, timeout_s=np.int64(20)).wait(20)
        reservation.wait(20)
        prefill.retire(issued)
        until(lambda: prefill.metrics.lease_slots_in_use == 0)


def test_closing_connectors_in_any_order_warns_of_nothing(here, caplog):
    caplog.set_level(logging.DEBUG, "kvxfer")
    for turn in range(6):
        prefill, decode, third = here(f"prefill {turn}", fill=1), here(f"decode {turn}"), here(f"third {turn}")
        for block in range(3):
            assert decode.fetch_now(prefill.publish([block])) == "mapped"
            assert prefill.fetch_now(decode.publish([block])) == "mapped"
            assert third.fetch_now(decode.publish([block])) == "mapped"
        decode.reserve([1])
        order = [prefill, decode, third] if turn % 2 else [third, decode, prefill]
        order[0].connector.release(order[1].publish([1]))
        for side in order:
            side.close()
    loud = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not loud


def test_a_description_that_stays_unusable_is_warned_of(open_connector, caplog):
    """The publisher cannot reach the reader's memory: nobody there waits for it, so its log says so."""
    layout = layout_of(2)
    prefill, decode = open_connector("prefill", limits={"heartbeat_s": 0.2}), open_connector("decode")
    source, into = (c.register(arrays_of(layout), layout) for c in (prefill, decode))

    def lying(reply: bool) -> messages.Description:
        said = decode._node.describe(reply)
        return msgspec.structs.replace(said, caches=tuple(msgspec.structs.replace(c, regions=()) for c in said.caches))

    decode._node.directory._describe = lying
    assert into.fetch(source.publish({"full": [1]}, tokens=1).ticket, into={"full": [0]}).wait(20)
    until(lambda: "what decode has cannot be used: cache 'kv' of decode: 2 regions" in caplog.text, what="the line")
