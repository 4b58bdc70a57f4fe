"""Carrying out a plan without the peer's help: mapped, or direct through a backend's one-sided operations.

Runs on a mover thread. Between pieces it looks whether the transfer is to stop, so that a cancelled or expired
transfer drains within the time of one piece.

Imports kernels, plan, backends/base.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.backends.base import Direction, Link
from kvxfer.kernels import PIECE_BYTES, PreparedPlan
from kvxfer.transfers.transfer import Transfer

if TYPE_CHECKING:
    from kvxfer.cuda.lanes import Ending
    from kvxfer.cuda.mover import CudaPlan

_POLL_S = 20e-6


def move_mapped(
    plan: PreparedPlan | CudaPlan,
    src_bases: np.ndarray,
    dst_bases: np.ndarray,
    transfer: Transfer,
    *,
    threads: int,
    after: Sequence[int] = (),
    ending: Ending | None = None,
) -> bool:
    """Copy blocks to blocks by a kernel. False when the transfer was told to stop before the end.

    `threads` counts for host memory; `after` (CUDA events to wait for) and `ending` (what the device does after the
    last byte) for a GPU's.
    """

    def go_on() -> bool:
        return not (transfer.stopping or transfer.done())

    if not isinstance(plan, PreparedPlan):
        return plan.carry_out(src_bases, dst_bases, go_on=go_on, moved=transfer.advance, after=after, ending=ending)
    for chunk in plan.plan.chunks(PIECE_BYTES):
        if not go_on():
            return False
        plan.copy(chunk, src_bases, dst_bases, threads=threads)
        transfer.advance(chunk.wire_bytes)
    return True


def move_direct(
    plan: PreparedPlan,
    link: Link,
    direction: Direction,
    src_bases: np.ndarray,
    dst_bases: np.ndarray,
    transfer: Transfer,
) -> bool:
    """Hand the plan's runs to the backend. False when the transfer was told to stop before the end.

    Raises PeerGone or BackendError.
    """
    runs = plan.plan.runs(src_bases, dst_bases)
    if direction is Direction.READ:
        runs = runs[:, [1, 0, 2]]  # local first: reading, the destination is local
    pieces = np.cumsum(runs[:, 2]) // np.uint64(PIECE_BYTES)
    borders = np.flatnonzero(np.diff(pieces)) + 1
    for piece in np.split(runs, borders):
        if transfer.stopping or transfer.done():
            return False
        operation = link.post(direction, piece)
        while not operation.poll():
            time.sleep(_POLL_S)
        transfer.advance(int(piece[:, 2].sum()))
    return True
