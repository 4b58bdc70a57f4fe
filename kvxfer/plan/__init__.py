"""From two cache layouts and two block lists, the strided copies of one transfer.

`join` compares layouts once, when two sides meet: it says what cannot be joined, or returns the *rows* (one
strided copy per layer, or per plane of a layer) that do not depend on block ids. `Join.plan` then takes the
block lists of one request and adds the *segments* (pairs of blocks). Kernels carry out every row for every
segment; `csrc/plan.h` is the same table in C. `compare` says the same as `join` in words, field by field.

Block lists are right-aligned: the last id is the block that holds the last token, so a list may leave out
blocks at the front (a prefix that the destination already holds, or what has slid out of a window).

Packed order: for each segment, for each row, its bytes dense in (entry, head, channel), each row on 16 bytes.
Any range of segments is one contiguous range of the packed buffer.

Imports NumPy, layout, checks and errors.
"""

from kvxfer.plan.blocks import BlockLists, check_blocks, check_tokens
from kvxfer.plan.compare import Comparison, Finding, Verdict
from kvxfer.plan.joining import Join, JoinPart, compare, join
from kvxfer.plan.rows import ROW, WIRE_ALIGNMENT
from kvxfer.plan.transfer import Chunk, PlanPart, Segments, TransferPlan, distinct, together

__all__ = [
    "ROW",
    "WIRE_ALIGNMENT",
    "BlockLists",
    "Chunk",
    "Comparison",
    "Finding",
    "Join",
    "JoinPart",
    "PlanPart",
    "Segments",
    "TransferPlan",
    "Verdict",
    "check_blocks",
    "check_tokens",
    "compare",
    "distinct",
    "join",
    "together",
]
