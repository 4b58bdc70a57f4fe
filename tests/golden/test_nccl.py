"""What the links of the NCCL backend say to each other, as bytes.

python -m tests.golden.test_nccl    rewrites nccl.json after a change that is meant
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvxfer.backends import nccl_messages as m

FILE = Path(__file__).with_name("nccl.json")
MESSAGES = {
    "open": m.Open(generation=1, unique_id=bytes(range(128)), address=4096, window_bytes=65536),
    "accept": m.Accept(generation=1, window_address=8192, window_bytes=65536),
    "window": m.Window(generation=1, why_not="why"),
    "came": m.Came(generation=1, chunks=(m.Chunk(3, 4096, 1024), m.Chunk(4, 8192, 512))),
    "coming": m.Coming(generation=1, chunks=(m.Chunk(number=3, address=4096, nbytes=1024),)),
    "taken": m.Taken(number=3),
    "failed": m.Failed(writing=True, reason="why"),
    "read": m.Read(key=9, address=4096, nbytes=8),
    "answer": m.Answer(key=9, data=b"\x01\x02", why_not=""),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes(name: str) -> None:
    golden = bytes.fromhex(json.loads(FILE.read_text())[name])
    assert m.encode(MESSAGES[name]) == golden
    assert m.decode(golden) == MESSAGES[name]


def test_all_of_them_have_golden_bytes() -> None:
    assert {type(said) for said in MESSAGES.values()} == set(m._Said.__subclasses__())


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: m.encode(said).hex() for name, said in MESSAGES.items()}, indent=1) + "\n")
