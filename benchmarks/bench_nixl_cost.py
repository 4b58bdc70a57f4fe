"""What packed transfers over NIXL cost beside time: processors, staging, memory.

    python benchmarks/bench_nixl_cost.py [--json FILE] [--gigabytes 2] [--transfers 10000]

Processor time is that of the prefill process, by whose thread it is, and per GiB of packed cache:
- *copies*: inside the gathering kernel and inside NIXL's post (which, over shared memory, does the copying itself);
- *engine*: the thread that published the leases, after it has;
- *kvxfer*: movers outside of copies, the progress thread, and ZeroMQ's threads;
- *NIXL*: threads that NIXL and UCX have started. Over TCP these send the bytes.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import secrets
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bench_shm
import timing

import kvxfer
from kvxfer.backends.nixl import NixlLink
from kvxfer.kernels import PreparedPackedPlan

BLOCK_BYTES = 16 << 10
CALL_MIB = 256
REQUESTS, REQUEST_BLOCKS = 64, 256  # at once; 4 MiB each


class Copies:
    """Processor seconds of calls of a method, by the threads that called it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: type, name: str) -> None:
        """From now on calls of this method count."""
        method = getattr(owner, name)

        def timed(*args: object, **options: object) -> object:
            started = time.thread_time()
            try:
                return method(*args, **options)
            finally:
                self.seconds += time.thread_time() - started

        setattr(owner, name, timed)


def processor_seconds() -> collections.Counter[str]:
    """Of this process's threads so far, by whose they are."""
    names, spent = {thread.native_id: thread.name for thread in threading.enumerate()}, collections.Counter()
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name), (task / "comm").read_text().strip())
        ours = name.startswith(("kvxfer", "ZMQ"))
        whose = "kvxfer" if ours else "engine" if name == "MainThread" else "NIXL"
        spent[whose] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prefill(pipe: Connection, secret: bytes) -> None:
    """Publishes what it is told to and says what that costs, until the pipe closes."""
    copies = Copies()
    copies.watch(PreparedPackedPlan, "pack")
    copies.watch(NixlLink, "post")
    layout = layout_of()
    limits = kvxfer.Limits(lease_record_bytes=128 << 20)
    with kvxfer.Connector("prefill", backends=["nixl"], secret=secret, limits=limits) as connector:
        cache = connector.register(bench_shm.allocate(layout, "private"), layout)
        while True:
            try:
                what = pipe.recv()
            except EOFError:
                return
            if what == "cost":
                spent = processor_seconds()
                spent["kvxfer"] -= copies.seconds
                pipe.send({**spent, "copies": copies.seconds, "resident_bytes": resident_bytes()})
            else:
                leases = [cache.publish({"full": ids}, tokens=16 * len(ids), ttl_s=600) for ids in what]
                pipe.send([bytes(lease.ticket) for lease in leases])


def layout_of() -> kvxfer.CacheLayout:
    """The cache of both sides."""
    return bench_shm.layout_of(BLOCK_BYTES, (CALL_MIB << 20) // BLOCK_BYTES)


class Pair:
    """A prefill process, and a decode cache here."""

    def __init__(self, tls: str | None = None, **limits: int) -> None:
        """`tls`: what UCX may use."""
        os.environ.pop("UCX_TLS", None)
        if tls is not None:
            os.environ["UCX_TLS"] = tls
        context, secret = multiprocessing.get_context("spawn"), secrets.token_bytes(32)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=prefill, args=(theirs, secret), daemon=True)
        self._process.start()
        theirs.close()
        layout = layout_of()
        self.connector = kvxfer.Connector(
            "decode", backends=["nixl"], ways=("packed",), secret=secret, limits=kvxfer.Limits(**limits)
        )
        self.cache = self.connector.register(bench_shm.allocate(layout, "private"), layout)

    def ask(self, what: object) -> object:
        """One request and its answer."""
        self._pipe.send(what)
        return self._pipe.recv()

    def close(self) -> None:
        """End both sides."""
        self._pipe.close()
        self._process.join()
        self.connector.close()


def processors(gigabytes: int, tls: str | None) -> dict[str, object]:
    """Milliseconds of processor time per GiB on the prefill side, and the share of a core of NIXL's threads."""
    pair = Pair(tls)
    ids = np.random.default_rng(1).permutation((CALL_MIB << 20) // BLOCK_BYTES).astype(np.int32)
    calls = (gigabytes << 10) // CALL_MIB
    tickets = pair.ask([ids] * (calls + 2))
    for ticket in tickets[:2]:
        pair.cache.fetch(ticket, into={"full": ids}, timeout_s=120).wait()
    before, started = pair.ask("cost"), time.perf_counter()
    for ticket in tickets[2:]:
        pair.cache.fetch(ticket, into={"full": ids}, timeout_s=120).wait()
    seconds, after = time.perf_counter() - started, pair.ask("cost")
    pair.close()
    spent = {whose: after[whose] - before[whose] for whose in ("copies", "engine", "kvxfer", "NIXL")}
    return {
        "transport": tls or "chosen by UCX: shared memory",
        "gigabytes_per_s": (calls * CALL_MIB << 20) / seconds / 1e9,
        "ms_per_gib": {whose: 1e3 * s / gigabytes for whose, s in spent.items()},
        "share_of_a_core": {whose: s / seconds for whose, s in spent.items()},
    }


def staging() -> dict[str, int]:
    """The most staging that is lent while many fetches are under way at once, and its bound."""
    pair, most, line = Pair(), 0, 0
    rng = np.random.default_rng(2)
    blocks = rng.permutation((CALL_MIB << 20) // BLOCK_BYTES).astype(np.int32).reshape(REQUESTS, REQUEST_BLOCKS)
    for _ in range(4):
        transfers = [
            pair.cache.fetch(ticket, into={"full": ids}, timeout_s=120)
            for ticket, ids in zip(pair.ask(list(blocks)), blocks, strict=True)
        ]
        while not all(transfer.done() for transfer in transfers):
            metrics = pair.connector.metrics
            most, line = max(most, metrics.staging_lent_bytes), max(line, metrics.staging_waiting)
        for transfer in transfers:
            transfer.result()
    bound = pair.connector.metrics.staging_bytes
    pair.close()
    return {"requests": REQUESTS, "bound_bytes": bound, "most_lent_bytes": most, "most_waiting": line}


def memory(transfers: int) -> dict[str, object]:
    """Resident memory of both sides after a tenth of many small packed transfers, and after all."""
    pair = Pair(staging_bytes=4 << 20)  # all of it is touched soon
    seen = []
    for share in (transfers // 10, transfers - transfers // 10):
        for _ in range(share // 100):
            for ticket in pair.ask([np.array([block], np.int32) for block in range(100)]):
                pair.cache.fetch(ticket, into={"full": [7]}, timeout_s=120).wait()
        seen.append({"decode": resident_bytes(), "prefill": pair.ask("cost")["resident_bytes"]})
    pair.close()
    return {
        "transfers": transfers,
        "after_a_tenth_bytes": seen[0],
        "after_all_bytes": seen[1],
        "grown_bytes": {side: seen[1][side] - seen[0][side] for side in seen[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--gigabytes", type=int, default=2, help="GiB moved (default %(default)s)")
    parser.add_argument("--transfers", type=int, default=10_000, help="small ones, for memory (default %(default)s)")
    args = parser.parse_args()
    result = {
        "processors": [processors(args.gigabytes, tls) for tls in (None, "tcp")],
        "staging": staging(),
        "memory": memory(args.transfers),
    }
    for name, values in result.items():
        print(name, *(values if isinstance(values, list) else [values]), sep="\n  ")
    if args.json:
        timing.save(args.json, timing.environment(), [result])


if __name__ == "__main__":
    main()
