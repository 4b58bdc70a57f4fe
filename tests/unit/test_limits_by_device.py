"""Staging and chunks have other sizes on a GPU than in host memory, unless they are given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvxfer import Limits
from kvxfer.backends.base import Registration
from kvxfer.transfers.packed import borrow
from kvxfer.transfers.staging import GPU_SLOTS, SLOTS, Loan, StagingRing


@pytest.mark.parametrize(
    ("given", "device", "staging", "chunk"),
    [
        ({}, "cpu", 64 << 20, 4 << 20),
        ({}, "cuda:0", 512 << 20, 32 << 20),
        ({"chunk_bytes": 1 << 20}, "cuda:1", 512 << 20, 1 << 20),
        ({"staging_bytes": 8 << 20}, "cpu", 8 << 20, (8 << 20) // SLOTS),
        ({"staging_bytes": 64 << 20}, "cuda:0", 64 << 20, (64 << 20) // GPU_SLOTS),
        ({"staging_bytes": 1 << 30}, "cuda:0", 1 << 30, 32 << 20),
        ({"staging_bytes": 1000, "chunk_bytes": 5000}, "cpu", 1000, 5000),
    ],
)
def test_sizes(given, device, staging, chunk):
    limits = Limits(**given)
    assert (limits.staging_on(device), limits.chunk_on(device)) == (staging, chunk)


def test_chunks_are_larger_where_a_backend_is_asked_for_each():
    assert Limits().chunk_on("cuda:0", posted=True) == 128 << 20
    assert Limits(staging_bytes=64 << 20).chunk_on("cuda:0", posted=True) == 16 << 20
    assert Limits(chunk_bytes=1 << 20).chunk_on("cuda:0", posted=True) == 1 << 20


@pytest.mark.parametrize(
    ("outbox", "total", "slot_bytes"),
    [(64 << 20, 1 << 30, 64 << 20), (512 << 20, 1 << 30, 128 << 20), (1, 0, 256 << 10)],
)
def test_chunks_fit_into_the_outbox_of_whoever_packs_them(outbox, total, slot_bytes):
    ring = StagingRing(Registration(address=0, nbytes=512 << 20, handle=b""), device="cuda:0")
    node = SimpleNamespace(limits=Limits(), progress=SimpleNamespace(is_current=True))
    peer = SimpleNamespace(
        link=SimpleNamespace(one_sided_devices=frozenset({"cuda"})), outbox_bytes=lambda device: outbox
    )
    loans: list[Loan] = []
    borrow(node, peer, ring, total, 0, loans.append)
    assert loans[0].slot_bytes == slot_bytes
