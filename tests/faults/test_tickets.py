"""A ticket that is not exactly what a publisher of the same secret signed is refused, on both sides."""

from __future__ import annotations

import base64

import pytest
from processes import BLOCK_TOKENS, SECRET, make_layout

from kvxfer import CacheLayout, Connector
from kvxfer import ticket as tickets
from kvxfer.control.messages import Role
from kvxfer.errors import AuthenticationError, InvalidTicket, LeaseExpired

pytestmark = pytest.mark.timeout(60)
INTO = {"full": [5]}


def resign(ticket: bytes, secret: bytes, **changes: object) -> bytes:
    """The ticket with other claims, signed with `secret`."""
    parsed = tickets.parse(ticket, secret)
    claims = {name: getattr(parsed, name) for name in parsed.__struct_fields__ if name != "encoded"}
    return bytes(tickets.sign(secret, **(claims | changes)))


def test_every_altered_byte_is_noticed(here):
    prefill, decode = here("prefill", fill=1), here("decode")
    ticket = prefill.publish([1])
    for at in range(len(ticket)):
        for bits in (0x01, 0x80):
            altered = bytearray(ticket)
            altered[at] ^= bits
            with pytest.raises(InvalidTicket):
                decode.cache.fetch(bytes(altered), into=INTO)
    assert not any(decode.blocks([5]))
    assert decode.fetch_now(ticket, [5]) == "mapped"


NO_TICKETS = [b"", b"\x01", bytes(40), bytes(1024), bytes(1025), {}, {"kvxfer_ticket": "&"}, "text", None]


@pytest.mark.parametrize("bad", NO_TICKETS)
def test_what_is_no_ticket_is_refused(here, bad):
    with pytest.raises(InvalidTicket, match=r"ticket|Ticket"):
        here("decode").cache.fetch(bad, into=INTO)


def test_a_truncated_or_extended_ticket_is_refused(here):
    prefill, decode = here("prefill"), here("decode")
    ticket = prefill.publish([1])
    for bad in (ticket[:-1], ticket + b"\0", ticket[1:]):
        with pytest.raises(InvalidTicket):
            decode.cache.fetch(bad, into=INTO)


def test_a_ticket_of_another_secret_is_refused(here):
    prefill, decode = here("prefill", secret=b"the secret of others"), here("decode")
    with pytest.raises(InvalidTicket, match="another secret"):
        decode.cache.fetch(prefill.publish([1]), into=INTO)


def test_a_publisher_refuses_tickets_that_its_engine_has_not_issued(here):
    prefill, other = here("prefill"), here("other")
    for ticket, match in (
        (other.issue([1]), "engine"),
        (resign(prefill.issue([1]), SECRET, generation=1), "generation"),
        (resign(prefill.issue([1]), SECRET, cache="draft"), "cache"),
        (resign(prefill.issue([1]), SECRET, role=Role.SEND), "role"),
        (resign(prefill.issue([1]), SECRET, fingerprint=bytes(16)), "fingerprint"),
    ):
        with pytest.raises(InvalidTicket, match=match):
            prefill.publish([1], ticket=ticket)


def test_a_ticket_of_an_engine_that_has_restarted_is_refused(start, here):
    prefill, decode = start("prefill"), here("decode")
    ticket = resign(prefill.publish([1]), SECRET, generation=5)
    with pytest.raises(InvalidTicket, match="restarted"):
        decode.cache.fetch(ticket, into=INTO).wait(5)


def test_a_ticket_whose_endpoint_is_another_engine_is_refused(start, here):
    prefill, decode = start("prefill"), here("decode")
    ticket = resign(prefill.publish([1]), SECRET, engine="another")
    with pytest.raises(InvalidTicket, match="another"):
        decode.cache.fetch(ticket, into=INTO).wait(5)


UNTRUE = [{"slot": 1 << 40}, {"slot": 4095, "lease": 1 << 40}, {"digest": bytes(16)}, {"record_bytes": 7}]


@pytest.mark.parametrize("changes", UNTRUE)
def test_claims_that_the_lease_table_does_not_bear_out_never_succeed(start, here, changes):
    prefill, decode = start("prefill", fill=1), here("decode")
    ticket = resign(prefill.publish([1]), SECRET, **changes)
    outcome = decode.fetch_now(ticket, [5], timeout_s=0.5)
    assert outcome in ("BackendError", "DeadlineExceeded", "InvalidTicket")
    assert not any(decode.blocks([5]))


def test_a_ticket_is_good_for_one_fetch(start, here):
    prefill, decode, other = start("prefill", fill=1), here("decode"), here("other")
    ticket = prefill.publish([1])
    decode.cache.fetch(ticket, into=INTO).wait()
    with pytest.raises(InvalidTicket, match="used here before"):
        decode.cache.fetch(ticket, into={"full": [6]})
    assert prefill.released(ticket, 2)
    with pytest.raises(LeaseExpired):
        other.cache.fetch(ticket, into={"full": [6]}).wait()
    assert not any(decode.blocks([6])) and not any(other.blocks([6]))


def test_a_ticket_that_was_used_once_is_refused_in_every_form(start, here):
    prefill, decode = start("prefill", fill=1), here("decode")
    ticket = prefill.publish([1])
    decode.cache.fetch(ticket, into=INTO)
    as_dict = {"kvxfer_ticket": base64.b64encode(ticket).decode()}
    for form in (ticket, as_dict, tickets.parse(ticket, SECRET)):
        with pytest.raises(InvalidTicket, match="used here before"):
            decode.cache.fetch(form, into=INTO)


def test_a_ticket_of_the_other_role_is_refused(here):
    prefill, decode = here("prefill"), here("decode")
    with pytest.raises(InvalidTicket, match="publish"):
        prefill.cache.fetch(decode.reserve([1])[0], into=INTO)
    with pytest.raises(InvalidTicket, match="reserve"):
        decode.cache.send(prefill.publish([1]), {"full": [1]})


def test_a_request_id_that_was_altered_is_noticed_before_anything_is_dialled(here):
    prefill, decode = here("prefill"), here("decode")
    ticket = prefill.publish([1], request_id="alice")
    with pytest.raises(AuthenticationError):
        decode.cache.fetch(ticket.replace(b"alice", b"mally"), into=INTO)
    assert decode.connector.metrics.peers == 0


def test_the_ticket_of_a_million_tokens_has_under_a_kilobyte(here):
    blocks = 1_000_000 // BLOCK_TOKENS
    layout = make_layout(num_blocks=blocks)
    assert isinstance(layout, CacheLayout)
    with Connector("scheduler", secret=SECRET) as scheduler:
        ticket = scheduler.issue(layout, {"full": range(blocks)}, tokens=1_000_000, request_id="r" * 256)
    assert len(bytes(ticket)) < 1024
