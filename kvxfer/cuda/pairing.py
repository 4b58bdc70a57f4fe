"""Whole blocks between the caches of two processes, by one launch that no thread has to wait for.

What depends on the caches is prepared once. A request is one native call, from its pairs of blocks to the end of what
its stream does; whoever wants to know looks at a word in pinned memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from kvxfer.cuda.lanes import Ending, Lane, Lanes
from kvxfer.cuda.mover import PIECE_BYTES
from kvxfer.cuda.native import CudaError, check, native
from kvxfer.cuda.plan import check_bases
from kvxfer.errors import InvalidRequest
from kvxfer.plan.request import CheckedLists, Pairing, Request


class Flight:
    """One request on its way, on a lane of its own."""

    __slots__ = ("_ending", "_lane", "_lanes", "_said")

    def __init__(self, lanes: Lanes, lane: Lane, ending: Ending) -> None:
        self._lanes, self._lane, self._ending, self._said = lanes, lane, ending, lane.said

    def has_landed(self, timeout_s: float, *, nap_us: int = 0) -> bool:
        """Whether the last byte is written, and what `ending` asks for is done; waits up to so long for it.

        Spins for a moment first, or with `nap_us` sleeps between looks. Any thread; holds no lock. Raises CudaError
        where the device has failed.
        """
        return self._lane.await_said(self._said, timeout_s, nap_us=nap_us)

    def end(self) -> None:
        """It has landed: take down what the device has read, and let another request have the lane."""
        self._lane.take_down(self._ending)
        self._lanes.give_back([self._lane])

    def lose(self) -> None:
        """The device has failed, and writes nothing more."""
        self._lanes.lose(self._lane)


class CudaPairing:
    """The blocks of a peer's cache and of one on `lanes`' device, for all requests between them."""

    def __init__(
        self, pairing: Pairing, lanes: Lanes, src_bases: np.ndarray, dst_bases: np.ndarray, *, max_sms: int
    ) -> None:
        """The bases are uint64 region addresses as the device sees them, fixed from here on; the caller keeps the
        memory mapped. `max_sms` bounds the multiprocessors of a launch, 0: all. Raises InvalidRequest."""
        check_bases("src_bases", src_bases, pairing.regions[0])
        check_bases("dst_bases", dst_bases, pairing.regions[1])
        self.lanes = lanes
        self._pairing, self._max_sms = pairing, max_sms
        self._native = native().Pairing()
        for rows in pairing.rows:
            self._native.add(rows.ctypes.data, len(rows), src_bases.ctypes.data, dst_bases.ctypes.data)
        if self._native.problem:
            raise InvalidRequest(f"the GPU kernels cannot carry out this plan: {self._native.problem}")
        check(self._native.load_kernels(lanes.device), f"loading kernels onto device {lanes.device}")

    def request(self, record: bytes, dst: CheckedLists, *, tokens: int) -> Request | None:
        """As of `Pairing`. None also for more than is moved without looking whether to stop."""
        request = self._pairing.request(record, dst, tokens=tokens)
        return None if request is None or request.nbytes > PIECE_BYTES else request

    def has_room(self, request: Request, lane: Lane) -> bool:
        """Whether the lane has memory for the tables of a request."""
        return lane.tables.has_room(self._native.table_bytes(request.table), request.copies)

    def launch(self, request: Request, lane: Lane, *, after: Sequence[int], ending: Ending) -> Flight:
        """Enqueue a request on a lane that was taken, behind the events `after` (CUDA's handles).

        Waits for nothing; allocates where the tables are larger than any before on this lane. The request may go when
        the call returns. Raises CudaError, with the lane idle and not to be used again.
        """
        table = request.table
        try:
            lane.enqueue(self._native, table, request.copies, after, ending, max_sms=self._max_sms)
        except CudaError:
            with contextlib.suppress(CudaError):
                lane.synchronise()
            self.lanes.lose(lane)
            raise
        return Flight(self.lanes, lane, ending)
