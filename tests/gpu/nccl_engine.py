"""Stands in for an engine's own collectives: all-reduce, again and again, on a communicator and a stream of its own."""

from __future__ import annotations

import importlib
import threading
import time

import numpy as np

from kvxfer import cuda

NBYTES = 8 << 20


class AllReduceLoop:
    """One rank of two. Both have to be started with as many rounds."""

    def __init__(self, unique_id: bytes, rank: int, rounds: int) -> None:
        self.done = 0
        self.error = ""
        self.seconds = 0.0
        self._arguments = unique_id, rank, rounds
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> str:
        """Wait for the last round; what went wrong, or an empty string."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return f"round {self.done} hangs"
        return self.error

    def _run(self) -> None:
        try:
            self._reduce(*self._arguments)
        except Exception as error:
            self.error = repr(error)

    def _reduce(self, unique_id: bytes, rank: int, rounds: int) -> None:
        nccl = importlib.import_module("nccl.bindings.nccl")
        importlib.import_module("cuda.core").Device(0).set_current()
        config = nccl.Config()  # lives until NCCL has read it
        comm = nccl.comm_init_rank_scalable(2, rank, 1, bytearray(unique_id), config.ptr)
        stream, memory = cuda.Stream(device=0), cuda.DeviceMemory(NBYTES, device=0)
        ones = np.ones(NBYTES // 4, np.float32)
        began = time.monotonic()
        for self.done in range(rounds):
            cuda.copy_bytes(memory.address, ones.ctypes.data, NBYTES, device=0, stream=stream.address)
            for _ in range(8):
                nccl.all_reduce(
                    memory.address,
                    memory.address,
                    NBYTES // 4,
                    int(nccl.DataType.Float32),
                    int(nccl.RedOp.Sum),
                    comm,
                    stream.address,
                )
            stream.synchronise()
        self.seconds = time.monotonic() - began
        found = np.empty(NBYTES // 4, np.float32)
        cuda.copy_bytes(found.ctypes.data, memory.address, NBYTES, device=0, stream=stream.address)
        stream.synchronise()
        if not (found == 256).all():  # doubled eight times
            self.error = f"all-reduce gave {found[:4]}"
        nccl.comm_abort(comm)
