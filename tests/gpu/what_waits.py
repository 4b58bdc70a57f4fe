"""Which calls of CUDA wait for a stream that waits at a gate, and which others they hold up meanwhile.

    python tests/gpu/what_waits.py [SECONDS]

For each call, alone and beside another one that began a little earlier: seconds until it returned. The gate opens
SECONDS (1.2) after it was closed, so what takes about that long was held up. `kvxfer/cuda/quiet.py` rests on the
answers. Ends with stacks and status 1 where a call never returns: it then keeps what the gate's opening needs.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from kvxfer import cuda
from kvxfer.cuda.gates import Gates
from kvxfer.cuda.runtime import DeviceMemory, Event, PinnedMemory, PinnedRange, Stream

HOLD_S = 1.2
FOR_GOOD_S = 30  # after the gate was opened
MIB = 1 << 20
FREEING = ("unmap a peer's", "free", "free pinned", "unpin")
BESIDE = ("launch", "map a peer's", "pin", "allocate", "allocate pinned", "make a stream")


def lend(pipe: Connection) -> None:
    """The other process: memory to map, until the pipe closes."""
    memory = [DeviceMemory(64 * MIB, device=0) for _ in range(32)]
    pipe.send([cuda.export_memory(piece.address) for piece in memory])
    pipe.poll(None)


def calls(handles: list[bytes], stream: Stream, keep: list[object]) -> dict[str, Callable[[], object]]:
    """What is tried, by name. What it makes is kept in `keep`."""
    target, host = DeviceMemory(64 * MIB, device=0), [np.zeros(4 * MIB, np.uint8) for _ in range(32)]
    mapped = [cuda.open_memory(handles.pop(), device=0) for _ in range(8)]
    pinned = [PinnedRange(array.ctypes.data, array.nbytes, device=0) for array in host[:8]]
    device, pages = ([kind(MIB, device=0) for _ in range(8)] for kind in (DeviceMemory, PinnedMemory))
    free = iter(host[8:])
    keep += [target, host]

    def launch() -> None:
        cuda.set_bytes(target.address, 1, MIB, device=0, stream=stream.address)
        event = Event(device=0)
        event.record(stream.address)
        keep.append(event)

    def pin() -> PinnedRange:
        array = next(free)
        return PinnedRange(array.ctypes.data, array.nbytes, device=0)

    return {
        "launch": launch,
        "map a peer's": lambda: cuda.open_memory(handles.pop(), device=0),
        "unmap a peer's": lambda: cuda.close_memory(mapped.pop(), device=0),
        "allocate": lambda: DeviceMemory(64 * MIB, device=0),
        "free": lambda: device.pop().close(),
        "allocate pinned": lambda: PinnedMemory(MIB, device=0),
        "free pinned": lambda: pages.pop().close(),
        "pin": pin,
        "unpin": lambda: pinned.pop().close(),
        "make a stream": lambda: Stream(device=0),
    }


def main(hold_s: float) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    context.Process(target=lend, args=(theirs,), daemon=True).start()
    handles, keep = pipe.recv(), []
    gates, waiting, other = Gates(0), Stream(device=0), Stream(device=0)
    possible = calls(handles, other, keep)
    possible["launch"]()  # loads what it needs
    other.synchronise()

    def timed(name: str, took: dict[str, str]) -> None:
        began = time.perf_counter()
        try:
            keep.append(possible[name]())
        except cuda.CudaError as error:
            took[name] = str(error)
        else:
            took[name] = f"{time.perf_counter() - began:.3f} s"

    for names in [(name,) for name in possible] + [(first, second) for first in FREEING for second in BESIDE]:
        faulthandler.dump_traceback_later(hold_s + FOR_GOOD_S, exit=True)
        gate, took = gates.take(), {}
        gate.hold(waiting.address)
        threads = [threading.Thread(target=timed, args=(name, took)) for name in names]
        for thread in threads:
            thread.start()
            time.sleep(hold_s / 4)
        time.sleep(hold_s * (1 - len(names) / 4))
        gate.open()
        for thread in threads:
            thread.join()
        waiting.synchronise()
        gates.give_back(gate)
        print(", then ".join(f"{name}: {took[name]}" for name in names), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) if sys.argv[1:] else HOLD_S)
