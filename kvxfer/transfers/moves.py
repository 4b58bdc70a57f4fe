"""Carrying out a plan without the peer's help: mapped, or direct through a backend's one-sided operations.

Runs on a mover thread. Between pieces it looks whether the transfer is to stop, so that a cancelled or expired
transfer drains within the time of one piece.

Imports kernels, plan, backends/base, transfer, node (for its threads).
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.backends.base import Direction, Link, Operation
from kvxfer.errors import KvxferError, as_kvxfer_error
from kvxfer.kernels import PIECE_BYTES, HostPairing, PreparedPlan
from kvxfer.plan.request import Request
from kvxfer.transfers.transfer import Transfer

if TYPE_CHECKING:
    from kvxfer.cuda.lanes import Ending
    from kvxfer.cuda.mover import CudaPlan
    from kvxfer.node import Node


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


def move_blocks(
    pairing: HostPairing, request: Request, transfer: Transfer, *, threads: int, piece_bytes: int = PIECE_BYTES
) -> bool:
    """Copy a request's blocks in host memory. False when the transfer was told to stop before the end."""
    left = request.nbytes
    while left > 0:
        if transfer.stopping or transfer.done():
            return False
        moved = pairing.copy(request, piece_bytes, threads=threads)
        transfer.advance(moved)
        left -= moved
    return True


def move_direct(
    plan: PreparedPlan,
    link: Link,
    direction: Direction,
    src_bases: np.ndarray,
    dst_bases: np.ndarray,
    transfer: Transfer,
    *,
    then: Callable[[bool, KvxferError | None], None],
    node: Node,
) -> None:
    """Hand the plan's runs to the backend, some MiB at a time.

    Returns while bytes are under way; `then` is called once, here or on the progress or a mover thread, when nothing
    of this is under way any more: with False when the transfer was told to stop before the end, or with an error.
    """
    runs = plan.plan.runs(src_bases, dst_bases)
    if direction is Direction.READ:
        runs = runs[:, [1, 0, 2]]  # local first: reading, the destination is local
    borders = np.flatnonzero(np.diff(np.cumsum(runs[:, 2]) // np.uint64(PIECE_BYTES))) + 1
    pieces = iter(np.split(runs, borders) if len(runs) else ())

    def go_on() -> None:
        try:
            for piece in pieces:
                if transfer.stopping or transfer.done():
                    then(False, None)
                    return
                operation = link.post(direction, piece)
                if not operation.poll():
                    await_operation(node, operation, functools.partial(moved, piece))
                    return
                transfer.advance(int(piece[:, 2].sum()))
        except Exception as error:
            then(False, as_kvxfer_error(error))
            return
        except BaseException as interrupt:  # of the thread that waits, and meanwhile moves the bytes
            then(False, as_kvxfer_error(interrupt))
            raise
        then(True, None)

    def moved(piece: np.ndarray, error: KvxferError | None) -> None:
        if error is not None:
            then(False, error)
            return
        transfer.advance(int(piece[:, 2].sum()))
        node.pool.submit(go_on)

    go_on()


def await_operation(node: Node, operation: Operation, then: Callable[[KvxferError | None], None]) -> None:
    """Have the progress thread call `then` once the operation has ended, with an error or None. Any thread.

    An operation cannot be called back: a transfer that is to stop has drained only when its operations have ended, be
    it because the peer is known to be gone.
    """

    def ended(error: BaseException | None) -> None:
        node.under_way.discard(operation)
        then(None if error is None else as_kvxfer_error(error))

    node.under_way.add(operation)
    node.progress.until(operation.poll, ended)


class InOrder:
    """Operations over one link, which end in the order in which they were posted, or nearly so.

    Only the oldest is looked at again and again. Any thread may add one.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._waiting: collections.deque[tuple[Operation, Callable[[KvxferError | None], None]]] = collections.deque()
        self._lock = threading.Lock()

    def add(self, operation: Operation, then: Callable[[KvxferError | None], None]) -> None:
        """Have the progress thread call `then` once the operation has ended, with an error or None."""
        self._node.under_way.add(operation)
        with self._lock:
            self._waiting.append((operation, then))
            first = len(self._waiting) == 1
        if first:
            await_operation(self._node, operation, self._ended)

    def _ended(self, error: KvxferError | None) -> None:
        """The oldest has ended; progress thread. Those behind it that have ended as well are seen at once."""
        ended = []
        while True:
            with self._lock:
                operation, then = self._waiting.popleft()
                following = self._waiting[0][0] if self._waiting else None
            self._node.under_way.discard(operation)
            ended.append((then, error))
            if following is None:
                break
            error = None
            try:
                if not following.poll():
                    await_operation(self._node, following, self._ended)
                    break
            except Exception as failure:
                error = as_kvxfer_error(failure)
        for then, error in ended:
            then(error)
