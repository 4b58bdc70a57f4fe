"""Golden bytes of every control message and of the ticket: what is on the wire changes only with the version.

python -m tests.golden.test_control    rewrites control.json after a change that is meant
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvxfer import CacheLayout, errors, ticket
from kvxfer.control import messages as m

FILE = Path(__file__).with_name("control.json")
SECRET = b"a secret for golden bytes"

_LAYOUT = CacheLayout.paged(
    layers=["layers.0"],
    num_blocks=4,
    block_tokens=2,
    kv_heads=1,
    head_dim=8,
    dtype="float16",
    fingerprint={"model": "x"},
)
_IDENTITY = m.Identity(
    name="d", engine="decode", generation=7, rank=1, endpoint="tcp://127.0.0.1:5", members={0: "tcp://h:1"}
)
_REGION = m.RegionHandles(nbytes=64, handles={"shm": b"\x01\x02"})
_OFFER = m.PackedOffer(
    staging=_REGION, offset=4096, slot_bytes=1024, slots=3, wire="raw", checksums=False, on_gpu=False
)
MESSAGES = {
    "hello": m.Hello(protocol=4, nonce=bytes(16), identity=_IDENTITY),
    "welcome": m.Welcome(protocol=4, nonce=bytes(16), session=bytes(range(16)), identity=_IDENTITY, line=b"\x05"),
    "description": m.Description(
        backends={"shm": b"\x07"},
        lease_table=_REGION,
        shelf=_REGION,
        caches=(m.CacheInfo(name="kv", layout=_LAYOUT, regions=(_REGION,)),),
        outbox_bytes={"cpu": 64},
        reply=True,
    ),
    "ping": m.Ping(),
    "bye": m.Bye(),
    "link": m.LinkMessage(backend="nccl", payload=b"\x01\x02"),
    "release": m.Release(slot=1, lease=2, reader=0, readers=4),
    "renew": m.Renew(slot=1, lease=2, ttl_s=30.0),
    "notice": m.Notice(payload=b"a word"),
    "sources": m.Sources(key=5, cache="kv", into_cache="kv", layouts=(_LAYOUT,), index=0, first=0),
    "pull": m.Pull(
        transfer=9,
        slot=1,
        lease=2,
        cache="kv",
        into_cache="kv",
        blocks={"full": 3},
        sources=0,
        allow_missing=False,
        offer=_OFFER,
    ),
    "claim": m.Claim(
        transfer=9,
        slot=1,
        lease=2,
        cache="kv",
        from_cache="kv",
        layerwise=True,
        way="mapped",
        wire="raw",
        blocks={"full": 3},
        nbytes=4096,
        allow_missing=False,
    ),
    "grant": m.Grant(transfer=9, offer=_OFFER),
    "chunks": m.Chunks(transfer=9, placed=(m.Placed(0, 2, 1, b"\x05", 4), m.Placed(0, 3, 0, b"", 0))),
    "credit": m.Credit(transfer=9, slots=(1, 0)),
    "stop": m.Stop(transfer=9),
    "ended": m.Ended(transfer=9, error="Cancelled", reason="why"),
    "received": m.Received(transfer=9),
    "refused": m.Refused(transfer=9, error="LeaseExpired", reason="why"),
}


def _ticket() -> ticket.Ticket:
    return ticket.sign(
        SECRET,
        role=m.Role.FETCH,
        engine="prefill",
        generation=7,
        endpoint="tcp://127.0.0.1:5600",
        cache="kv",
        slot=3,
        lease=11,
        request_id="request-1",
        tokens=700,
        ttl_s=30.0,
        record_bytes=17,
        digest=bytes(range(16)),
        fingerprint=bytes(range(16, 32)),
    )


def _golden() -> dict[str, str]:
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("name", MESSAGES)
def test_message_bytes(name: str) -> None:
    golden = bytes.fromhex(_golden()[name])
    assert m.encode(MESSAGES[name]) == golden
    assert m.decode(golden) == MESSAGES[name]


def test_every_message_has_golden_bytes() -> None:
    kinds = {type(message) for message in MESSAGES.values()}
    assert kinds == set(m.Message.__subclasses__())


def test_ticket_bytes() -> None:
    golden = bytes.fromhex(_golden()["ticket"])
    assert bytes(_ticket()) == golden
    assert ticket.parse(golden, SECRET) == _ticket()


def test_every_flipped_byte_of_a_ticket_is_refused() -> None:
    golden = bytes.fromhex(_golden()["ticket"])
    for position in range(len(golden)):
        altered = bytearray(golden)
        altered[position] ^= 1
        with pytest.raises(errors.InvalidTicket):
            ticket.parse(bytes(altered), SECRET)
    with pytest.raises(errors.InvalidTicket, match="another secret"):
        ticket.parse(golden, b"another secret")


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x81\xa4type\xa4nope", b"\xc1", bytes(200)])
def test_other_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        m.decode(data)


if __name__ == "__main__":
    golden = {name: m.encode(message).hex() for name, message in MESSAGES.items()}
    FILE.write_text(json.dumps(golden | {"ticket": bytes(_ticket()).hex()}, indent=1) + "\n")
