"""What NCCL itself holds after communicators that came and went, without kvxfer's backend in between.

    python tests/gpu/nccl_bare_cycles.py [CYCLES] [abort|deregister|destroy|plain ...]

Two processes of one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1). A cycle makes a communicator of two as the backend does
(non-blocking), memory of NCCL's and a window of it, has rank 0 put and rank 1 wait for the signal, and ends: `abort`
aborts the communicator, which is what the backend does; `deregister` takes the window back before that; `destroy`
ends it in agreement; `plain` makes no window, sends and receives, and aborts. Every tenth of the cycles: what each
process holds.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from kvxfer import cuda
from tests.backends.peer import held

NBYTES = 4 << 20
PUT = 64 << 10
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC


def settle(nccl: Any, comm: Any) -> None:
    """Wait until NCCL has done what it was asked for."""
    while (state := int(nccl.comm_get_async_error(comm))) == int(nccl.Result.InProgress):
        time.sleep(1e-4)
    if state != int(nccl.Result.Success):
        raise nccl.NCCLError(state)


def cycle(nccl: Any, rank: int, unique_id: bytes, ending: str, of: cuda.Stream) -> None:
    """One communicator, from its making to its end."""
    config, uint8, stream = nccl.Config(), int(nccl.DataType.Uint8), of.address
    config.blocking, config.max_ctas = 0, 16
    memory = int(nccl.mem_alloc(NBYTES))
    comm = nccl.comm_init_rank_scalable(2, rank, 1, bytearray(unique_id), config.ptr)
    settle(nccl, comm)
    window = None
    if ending == "plain":
        move = nccl.recv if rank else nccl.send
        move(memory, PUT, uint8, 1 - rank, comm, stream)
    else:
        window = nccl.comm_window_register(comm, memory, NBYTES, SYMMETRIC)
        settle(nccl, comm)
        if rank == 0:
            nccl.put_signal(memory, PUT, uint8, 1, window, 0, 0, 0, 0, comm, stream)
        else:
            wanted = nccl.WaitSignalDesc()
            wanted.op_cnt, wanted.peer, wanted.sig_idx, wanted.ctx = 1, 0, 0, 0
            nccl.wait_signal(1, bytearray(bytes(wanted)), comm, stream)
    settle(nccl, comm)
    of.synchronise()
    if ending == "deregister":
        nccl.comm_window_deregister(comm, window)
        settle(nccl, comm)
    if ending == "destroy":
        nccl.comm_finalize(comm)
        settle(nccl, comm)
        nccl.comm_destroy(comm)
    else:
        nccl.comm_abort(comm)
    nccl.mem_free(memory)


def end(pipe: Connection, rank: int) -> None:
    """One process: a cycle for each unique id that comes, what it holds for each question."""
    nccl = importlib.import_module("nccl.bindings.nccl")
    importlib.import_module("cuda.core").Device(0).set_current()
    stream = cuda.Stream(device=0)
    while asked := pipe.recv():
        if asked == "id":
            pipe.send(bytes(nccl.get_unique_id()))
        elif asked == "held":
            pipe.send(held())
        else:
            cycle(nccl, rank, *asked, stream)
            pipe.send("done")


def main() -> None:
    cycles = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    context = multiprocessing.get_context("spawn")
    for ending in sys.argv[2:] or ["abort", "deregister", "destroy", "plain"]:
        pipes, processes = [], []
        for rank in (0, 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=end, args=(theirs, rank), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        began = time.monotonic()

        def ask(pipe: Connection, what: Any) -> Any:
            pipe.send(what)
            return pipe.recv()

        for number in range(1, cycles + 1):
            unique_id = ask(pipes[0], "id")
            for pipe in pipes:
                pipe.send((unique_id, ending))
            assert [pipe.recv() for pipe in pipes] == ["done", "done"]
            if number % max(1, cycles // 10) == 0:
                seen = [ask(pipe, "held") for pipe in pipes]
                print(f"bare, {ending}: cycle {number}, {time.monotonic() - began:.1f} s: {seen}", flush=True)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(20)
        print(f"bare, {ending}: {cycles} cycles, {(time.monotonic() - began) / cycles:.3f} s each", flush=True)


if __name__ == "__main__":
    main()
