"""NIXL between two processes: scattered blocks packed and direct, against NIXL with a descriptor a block and with one.

    python benchmarks/bench_nixl.py [--json FILE] [--megabytes 256] [--calls 9] [--tcp]

Rows: ours (a whole fetch, from the call to the confirmed end), the peer (NIXL's own API handed a descriptor for every
block, prepared beforehand, written or read), and the ceiling of the same run (the same bytes in one descriptor, written
or read, whichever is faster). Bytes are counted once. ``--tcp`` keeps UCX off shared memory, as between hosts.

A progress thread of NIXL's Python class takes a whole core, also at rest. So that NIXL's agents do not slow kvxfer's
rows down, they have processes of their own, which are stopped but for their own rows; and the one that moves bytes
makes progress by polling instead, so that it does not compete with itself either.

*Parts* are what a packed transfer consists of, each alone on one thread: gathering all chunks, writing them through
NIXL from a buffer that is still in a cache into as many places as a transfer is lent, scattering them. Two processors
that shared these evenly, and did nothing else, would reach the *bound*: nobody else has read what is written to there.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bench_shm
import timing

import kvxfer
from kvxfer.connector import WAYS
from kvxfer.kernels import PreparedPlan, bases
from kvxfer.plan import join
from kvxfer.transfers.staging import CHUNK_BYTES, SLOTS

BLOCK_KIB = (4, 16, 64)
ROWS = {
    "kvxfer packed": ("packed",),
    "kvxfer packed ahead": ("packed",),
    "kvxfer direct": ("direct",),
    "kvxfer as it chooses": WAYS,
}


def agent(name: str, *, progress_thread: bool = True):
    """An agent as NIXL's own Python class makes it."""
    from nixl_cu13 import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread))


def target(pipe: Connection, nbytes: int) -> None:
    """One process of NIXL's rows: registers memory and waits."""
    nixl = agent("target")
    memory = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    nixl.register_memory([(memory.ctypes.data, nbytes, 0, "")], "DRAM")
    pipe.send((nixl.get_agent_metadata(), memory.ctypes.data))
    pipe.recv()


def initiator(pipe: Connection, nbytes: int, metadata: bytes, remote: int) -> None:
    """The other one: moves what it is told to, and says how long that took."""
    nixl = agent("initiator", progress_thread=False)
    memory = np.ones(nbytes, np.uint8)
    nixl.register_memory([(memory.ctypes.data, nbytes, 0, "")], "DRAM")
    peer = nixl.add_remote_agent(metadata)
    prepared = {}
    while (message := pipe.recv()) is not None:
        number, what = message
        if what is not None:
            operation, block_bytes, *ids = what
            sides = []
            for name, base, side in (("", memory.ctypes.data, ids[0]), (peer, remote, ids[1])):
                rows = np.zeros((len(side), 3), np.uint64)
                rows[:, 0] = base + side.astype(np.uint64) * np.uint64(block_bytes)
                rows[:, 1] = block_bytes
                sides.append(nixl.prep_xfer_dlist(name, rows, "DRAM"))
            prepared[number] = operation, sides, np.arange(len(ids[0]), dtype=np.int32)
            pipe.send(None)
            continue
        operation, sides, every = prepared[number]
        started = time.perf_counter()
        handle = nixl.make_prepped_xfer(operation, sides[0], every, sides[1], every)
        state = nixl.transfer(handle)
        while state == "PROC":
            state = nixl.check_xfer_state(handle)
        handle.release()
        pipe.send(time.perf_counter() - started if state == "DONE" else state)


class Nixl:
    """NIXL's rows: the same blocks by prepared descriptor lists, and all bytes in one descriptor."""

    def __init__(self, nbytes: int, *, elsewhere: str = sys.executable) -> None:
        """`elsewhere`: a Python that runs on the host of the target."""
        self._context, self._processes, self._pipes = multiprocessing.get_context("spawn"), [], []
        self._movers = 0
        self._start(target, elsewhere, nbytes)
        self._start(initiator, sys.executable, nbytes, *self._pipes[0].recv())
        self._rest()

    def _start(self, body: Callable[..., None], python: str, *arguments: object) -> None:
        pipe, theirs = self._context.Pipe()
        self._context.set_executable(python)
        process = self._context.Process(target=body, args=(theirs, *arguments), daemon=True)
        process.start()
        self._pipes.append(pipe)
        self._processes.append(process)

    def _rest(self) -> None:
        for process in self._processes:
            os.kill(process.pid, signal.SIGSTOP)

    def _work(self) -> None:
        for process in self._processes:
            os.kill(process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End both processes."""
        self._work()
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()

    def mover(self, operation: str, block_bytes: int, local_ids: np.ndarray, remote_ids: np.ndarray):
        """A function that moves these blocks by READ or WRITE, and returns the seconds that took."""
        number, self._movers = self._movers, self._movers + 1
        self._ask((number, (operation, block_bytes, local_ids, remote_ids)))

        def move(_: None) -> float:
            seconds = self._ask((number, None))
            if not isinstance(seconds, float):
                raise RuntimeError(f"NIXL says {seconds}")
            return seconds

        return move

    def _ask(self, message: object) -> object:
        self._work()
        self._pipes[1].send(message)
        answer = self._pipes[1].recv()
        self._rest()
        return answer


def clock(call: Callable[[], float | None]) -> float:
    """Seconds of a call: what it says itself, else by the clock."""
    started = time.perf_counter()
    seconds = call()
    return time.perf_counter() - started if seconds is None else seconds


def parts(nixl: Nixl, layout: kvxfer.CacheLayout, memory: np.ndarray, src_ids: np.ndarray, dst_ids: np.ndarray) -> dict:
    """Seconds of each part of a packed transfer, and GB/s of two processors that share them."""
    plan = join([layout], layout)[0].plan({"full": src_ids}, {"full": dst_ids}, tokens=16 * len(src_ids))
    prepared, places, buffer = PreparedPlan(plan), bases([memory.ctypes.data]), bench_shm.private(CHUNK_BYTES)
    chunks, first = list(plan.chunks(CHUNK_BYTES)), np.zeros(1, np.int32)
    slots = min(SLOTS, len(memory) // CHUNK_BYTES)
    writes = [nixl.mover("WRITE", CHUNK_BYTES, first, first + slot) for slot in range(slots)]
    functions = {
        "gather_s": lambda _: any(prepared.gather(chunk, places, buffer.ctypes.data) for chunk in chunks) or None,
        "wire_s": lambda _: sum(write(None) for write, _ in zip(itertools.cycle(writes), chunks, strict=False)),
        "scatter_s": lambda _: any(prepared.scatter(chunk, buffer.ctypes.data, places) for chunk in chunks) or None,
    }
    measured = timing.measure_together(functions, [None], calls=7, clock=clock)
    seconds = {name: timing_.median_s for name, timing_ in measured.items()}
    return {**seconds, "bound_gigabytes_per_s": plan.nbytes / (sum(seconds.values()) / 2) / 1e9}


def bench_blocks(
    peer: bench_shm.Prefill, secret: bytes, block_kib: int, megabytes: int, calls: int
) -> tuple[list[dict], dict]:
    """All rows of one block size, and the parts."""
    block_bytes, count = block_kib << 10, (megabytes << 10) // block_kib
    total = block_bytes * count
    layout = bench_shm.layout_of(block_bytes, count)
    rng = np.random.default_rng(1)
    src_ids, dst_ids = (rng.permutation(count).astype(np.int32) for _ in range(2))
    nixl = Nixl(total)
    whole = np.zeros(1, np.int32)
    functions = {
        "ceiling: NIXL, one descriptor, READ": nixl.mover("READ", total, whole, whole),
        "ceiling: NIXL, one descriptor, WRITE": nixl.mover("WRITE", total, whole, whole),
        "peer: NIXL, a descriptor a block, READ": nixl.mover("READ", block_bytes, dst_ids, src_ids),
        "peer: NIXL, a descriptor a block, WRITE": nixl.mover("WRITE", block_bytes, src_ids, dst_ids),
    }
    connectors, arrays, chosen = [], bench_shm.allocate(layout, "private"), {}
    for row, ways in ROWS.items():
        name = f"{row}-{block_kib}"
        peer.ask("register", name, layout, "private")
        tickets, _ = peer.ask("pack" if "ahead" in row else "publish", name, src_ids, calls + 3)
        connector = kvxfer.Connector("decode", backends=["nixl"], ways=ways, secret=secret)
        connectors.append(connector)
        cache = connector.register(arrays, layout, name=name)
        functions[row] = fetcher(cache, collections.deque(tickets), dst_ids, row, chosen)
    results = timing.measure_together(functions, [None], calls=calls, clock=clock)
    for connector in connectors:
        connector.close()
    apart = parts(nixl, layout, arrays["kv"], src_ids, dst_ids)
    nixl.close()
    ceiling = max(result.rate(total) for row, result in results.items() if row.startswith("ceiling"))
    rows = [
        {
            "block_kib": block_kib,
            "row": row,
            "gigabytes_per_s": result.rate(total),
            "low": total / result.high_s / 1e9,
            "high": total / result.low_s / 1e9,
            "of_ceiling": result.rate(total) / ceiling,
            "way": chosen.get(row, ""),
        }
        for row, result in results.items()
    ]
    return rows, {"block_kib": block_kib, **apart}


def fetcher(cache: kvxfer.Cache, tickets: collections.deque, ids: np.ndarray, row: str, chosen: dict[str, str]):
    """A function that fetches with the next ticket, and notes the way that was taken."""

    def fetch(_: None) -> None:
        stats = cache.fetch(tickets.popleft(), into={"full": ids}, timeout_s=120).wait()
        assert stats.packed_ahead == ("ahead" in row), stats
        chosen[row] = stats.way

    return fetch


def at_rest(seconds: float = 5.0) -> dict[str, float]:
    """Share of a core that a process with an open NIXL peer takes while nothing moves: ours, and NIXL's own agent."""
    shares = {}
    for name, body in {"kvxfer": rest_of_kvxfer, "NIXL's Python agent": rest_of_nixl}.items():
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=body, args=(theirs, seconds), daemon=True)
        process.start()
        shares[name] = ours.recv()
        process.join()
    return shares


def rest_of_kvxfer(pipe: Connection, seconds: float) -> None:
    """Two connectors of one process, joined; half of what both take."""
    layout = bench_shm.layout_of(4096, 16)
    connectors = [kvxfer.Connector(name, backends=["nixl"]) for name in ("a", "b")]
    caches = [connector.register(bench_shm.allocate(layout, "private"), layout) for connector in connectors]
    lease = caches[0].publish({"full": [1]}, tokens=16)
    caches[1].fetch(lease.ticket, into={"full": [2]}).wait()
    pipe.send(share_of_a_core(seconds) / 2)


def rest_of_nixl(pipe: Connection, seconds: float) -> None:
    """One agent of NIXL's own class."""
    keep = agent("resting")
    pipe.send(share_of_a_core(seconds))
    del keep


def share_of_a_core(seconds: float) -> float:
    """Processor time of this process while it sleeps, by the time slept."""
    time.sleep(1)
    used = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - used) / seconds


def table(rows: list[dict], parts: list[dict], rest: dict[str, float]) -> str:
    """What a person reads."""
    lines = [f"{'block':>7}  {'what':<42} {'GB/s':>7} {'quartiles':>15} {'of ceiling':>10}  way"]
    for row in rows:
        spread = f"{row['low']:.2f}..{row['high']:.2f}"
        lines.append(
            f"{row['block_kib']:>4} KiB  {row['row']:<42} {row['gigabytes_per_s']:>7.2f} {spread:>15} "
            f"{row['of_ceiling']:>10.2f}  {row['way']}"
        )
    lines.append("")
    for apart in parts:
        times = ", ".join(f"{name} {1e3 * apart[f'{name}_s']:.1f} ms" for name in ("gather", "wire", "scatter"))
        lines.append(f"{apart['block_kib']} KiB: {times}; bound {apart['bound_gigabytes_per_s']:.2f} GB/s")
    lines += ["", *(f"at rest: {name} {share:.3f} of a core" for name, share in rest.items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--megabytes", type=int, default=256, help="bytes moved by a call (default %(default)s MiB)")
    parser.add_argument("--calls", type=int, default=9, help="measured calls of each row (default %(default)s)")
    parser.add_argument("--tcp", action="store_true", help="keep UCX off shared memory")
    args = parser.parse_args()
    if args.tcp:
        os.environ["UCX_TLS"] = "tcp"
    rest = at_rest()
    secret = secrets.token_bytes(32)
    shelf_bytes = (args.calls + 3) * ((args.megabytes << 20) + (1 << 20))
    peer = bench_shm.Prefill(secret, backends=["nixl"], shelf_bytes=shelf_bytes)
    found = [bench_blocks(peer, secret, kib, args.megabytes, args.calls) for kib in BLOCK_KIB]
    peer.pipe.close()
    rows, apart = [row for rows, _ in found for row in rows], [parts for _, parts in found]
    print(table(rows, apart, rest))
    if args.json:
        result = {"rows": rows, "parts": apart, "at_rest": rest}
        timing.save(args.json, timing.environment(tcp=args.tcp), [result])


if __name__ == "__main__":
    main()
