"""Fuzz target: chunk headers and chunk bytes of every format. Needs atheris.

    python tests/fuzz/fuzz_chunks.py -max_total_time=60

A header either decodes to one that encodes to the same bytes, or raises an error of this library. Any bytes
unpack, into the destination's blocks and nowhere else, by the kernels as by the reference.
"""

from __future__ import annotations

import sys

import numpy as np

from kvxfer import formats, kernels
from kvxfer.errors import KvxferError
from kvxfer.formats import HEADER_BYTES, ChunkHeader, reference
from kvxfer.layout import CacheLayout

NAMES = (
    "fp8_e4m3",
    "fp8_e4m3:tensor",
    "nvfp4",
    "mxfp4:hadamard",
    "mxfp8",
    "int4",
    "int4:asym,32",
    "mixed",
    "nvfp4:first=3",
)
GUARD = 64


def plans():
    """For each format a join and a plan of one partial block, with the size of its packed bytes."""
    layout = CacheLayout.paged(
        layers=["0"], num_blocks=2, block_tokens=4, kv_heads=2, head_dim=64, dtype="bfloat16", order="HND"
    )
    for name in NAMES:
        (join,) = formats.join_packed([layout], layout, name)
        yield join, join.plan({"full": 1}, {"full": [1]}, tokens=3)


def check_header(data: bytes) -> None:
    """Decodes, or raises an error of ours."""
    try:
        header = ChunkHeader.decode(data)
        assert header.encode() == data[:HEADER_BYTES]
        header.check(data[HEADER_BYTES:])
    except KvxferError:
        pass


def check_payload(join, plan, data: bytes) -> None:
    """Unpacks any bytes, padded with zeros; kernels and reference agree and stay inside."""
    size = join.dst.regions[0].nbytes
    for chunk in plan.chunks(1 << 20):
        wire = np.zeros(chunk.wire_bytes, np.uint8)
        given = np.frombuffer(data[: chunk.wire_bytes], np.uint8)
        wire[: len(given)] = given
        memory = np.full(size + 2 * GUARD, 0xA5, np.uint8)
        expected = memory.copy()
        bases = kernels.bases([memory.ctypes.data + GUARD])
        kernels.PreparedPackedPlan(plan).unpack(chunk, wire.ctypes.data, bases)
        with np.errstate(all="ignore"):
            reference.unpack(join, plan, chunk, wire, [expected[GUARD:-GUARD]])
        assert (memory == expected).all()


def main() -> None:
    """Run under atheris."""
    import atheris

    prepared = list(plans())

    def target(data: bytes) -> None:
        if not data:
            return
        if data[0] & 1:
            check_header(data[1:])
        else:
            check_payload(*prepared[data[0] // 2 % len(prepared)], data[1:])

    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
