"""What NCCL itself holds after communicators that came and went, without kvxfer's backend in between.

    python tests/gpu/nccl_bare_cycles.py [CYCLES] [abort|deregister|destroy|plain[:AT_ONCE] ...]

Two processes of one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1). A cycle makes a communicator of two as the backend does
(non-blocking), memory of NCCL's and a window of it, has rank 0 put and rank 1 wait for the signal, and ends: `abort`
aborts the communicator, which is what the backend does; `deregister` takes the window back before that; `destroy`
ends it in agreement; `plain` makes no window, sends and receives, and aborts. With AT_ONCE so many communicators live
side by side, each made and ended by a new thread, as the backend does. Every tenth of the cycles: what each process
holds.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import sys
import threading
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
    current = importlib.import_module("cuda.core").Device(0).set_current
    current()
    streams: list[cuda.Stream] = []

    def on_a_thread(unique_id: bytes, ending: str, stream: cuda.Stream) -> None:
        current()
        cycle(nccl, rank, unique_id, ending, stream)

    while asked := pipe.recv():
        if asked == "id":
            pipe.send(bytes(nccl.get_unique_id()))
        elif asked == "held":
            gc.collect()
            pipe.send(held())
        else:
            unique_ids, ending = asked
            streams += [cuda.Stream(device=0) for _ in unique_ids[len(streams) :]]
            if len(unique_ids) == 1:
                cycle(nccl, rank, *unique_ids, ending, streams[0])
            else:
                threads = [
                    threading.Thread(target=on_a_thread, args=(unique_id, ending, stream))
                    for unique_id, stream in zip(unique_ids, streams, strict=True)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            pipe.send("done")


def main() -> None:
    cycles = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    context = multiprocessing.get_context("spawn")
    for name in sys.argv[2:] or ["abort", "deregister", "destroy", "plain"]:
        ending, _, at_once = name.partition(":")
        rounds, at_once = cycles // int(at_once or 1), int(at_once or 1)
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

        for number in range(1, rounds + 1):
            unique_ids = [ask(pipes[0], "id") for _ in range(at_once)]
            for pipe in pipes:
                pipe.send((unique_ids, ending))
            assert [pipe.recv() for pipe in pipes] == ["done", "done"]
            if number % max(1, rounds // 10) == 0:
                seen = [ask(pipe, "held") for pipe in pipes]
                print(f"bare, {name}: cycle {number * at_once}, {time.monotonic() - began:.1f} s: {seen}", flush=True)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(20)
        print(f"bare, {name}: {cycles} cycles, {(time.monotonic() - began) / cycles:.3f} s each", flush=True)


if __name__ == "__main__":
    main()
