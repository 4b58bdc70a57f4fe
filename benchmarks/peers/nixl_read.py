"""NIXL over UCX between two processes: a descriptor a piece, and one descriptor for everything."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import timing

from kvxfer import cuda
from peers import Work

MOST_PIECES = 16384  # what takes seconds otherwise


def rows(work: Work) -> Iterator[dict[str, Any]]:
    """Pieces are read out of the other process; the time is from posting to the end, with prepared lists."""
    import nixl_cu13 as nixl

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    target = context.Process(target=_target, args=(theirs, 2 * work.total), daemon=True)
    target.start()
    if not ours.poll(60):
        raise TimeoutError("the other process did not start")
    metadata, remote_base = ours.recv()
    memory = cuda.DeviceMemory(2 * work.total, device=0)
    agent = nixl.nixl_agent("reader", nixl.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.address, memory.nbytes, 0, "")], "VRAM")
    peer = agent.add_remote_agent(metadata)

    def read(count: int, piece: int) -> tuple[timing.Timing, float]:
        handles = []
        for name, base, seed in (("", memory.address, 0), (peer, remote_base, 1)):
            numbers = np.random.default_rng(seed).permutation(2 * work.total // piece)[:count]
            triples = np.zeros((count, 3), np.uint64)
            triples[:, 0] = np.uint64(base) + numbers.astype(np.uint64) * np.uint64(piece)
            triples[:, 1] = piece
            handles.append(agent.prep_xfer_dlist(name, triples, "VRAM"))
        every = np.arange(count, dtype=np.int32)
        posted: list[float] = []

        def once(_: None) -> None:
            transfer = agent.make_prepped_xfer("READ", handles[0], every, handles[1], every)
            start = time.perf_counter()
            state = agent.transfer(transfer)
            posted.append(time.perf_counter() - start)
            while state == "PROC":
                state = agent.check_xfer_state(transfer)
            if state != "DONE":
                raise RuntimeError(f"NIXL says {state}")
            transfer.release()

        result = timing.measure(once, [None], calls=min(work.calls, 5), warm_up=1)
        return result, float(np.median(posted))

    for what, piece, most in (
        ("one descriptor", work.total, 1),
        *((f"a descriptor a piece, {MOST_PIECES} at most", piece, MOST_PIECES) for piece in work.pieces),
    ):
        count = min(most, work.total // piece)
        result, posted_s = read(count, piece)
        yield {
            "what": what,
            "piece": piece,
            "nbytes": count * piece,
            "gb_s": result.rate(count * piece),
            "milliseconds": result.median_s * 1e3,
            "post_ms": posted_s * 1e3,
        }
    ours.close()
    target.join(5)


def _target(pipe: Connection, nbytes: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    import nixl_cu13 as nixl

    memory = cuda.DeviceMemory(nbytes, device=0)
    agent = nixl.nixl_agent("source", nixl.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.address, memory.nbytes, 0, "")], "VRAM")
    pipe.send((agent.get_agent_metadata(), memory.address))
    try:
        pipe.recv()
    except EOFError:
        pass
