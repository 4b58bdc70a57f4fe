"""NIXL over a link of a given rate: two hosts made of network namespaces, joined by a switch, sending at most so much.

    sudo python benchmarks/bench_link.py [--json FILE] [--rate 10gbit] [--blocks 4 16 64] [--megabytes 64] [--calls 9]

The rows of bench_nixl.py, and the wire format nvfp4: bytes are those of the bf16 cache, counted once, so a format that
sends fewer may pass the link's rate. Ceilings are NIXL's own one descriptor of as many bytes over the same link. Needs
what tests/hosts needs: root, iproute2, util-linux. Both hosts share this machine's processors.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import secrets
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "hosts"))
import bench_nixl
import bench_shm
import timing
from network import Network

import kvxfer
from kvxfer import CacheLayout

ROWS = {
    "kvxfer packed": (("packed",), "raw"),
    "kvxfer packed ahead": (("packed",), "raw"),
    "kvxfer direct": (("direct",), "raw"),
    "kvxfer as it chooses": (kvxfer.connector.WAYS, "raw"),
    "kvxfer packed, nvfp4": (("packed",), "nvfp4"),
}
UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}


def layout_of(block_kib: int, num_blocks: int) -> CacheLayout:
    """One layer of bf16 whose blocks, keys and values, are that long."""
    return CacheLayout.paged(
        layers=["layers.0"],
        num_blocks=num_blocks,
        block_tokens=16,
        kv_heads=block_kib // 4,
        head_dim=64,
        dtype="bfloat16",
        fingerprint={"model": "bench"},
    )


def allocate(layout: CacheLayout) -> dict[str, np.ndarray]:
    """Memory for the one region, filled with bf16 of a normal distribution."""
    [region] = layout.regions
    array = bench_shm.private(region.nbytes)
    some = np.random.default_rng(0).standard_normal(1 << 20, np.float32).view(np.uint16)[1::2].copy().view(np.uint8)
    for first in range(0, len(array), len(some)):
        array[first : first + len(some)] = some[: len(array) - first]
    return {region.name: array}


def prefill(pipe: Connection, secret: bytes, address: str, shelf_bytes: int) -> None:
    """The process on the other host: registers and publishes what it is told to, until the pipe closes."""
    limits = kvxfer.Limits(lease_record_bytes=128 << 20, shelf_bytes=shelf_bytes)
    listen = f"tcp://{address}:0"
    with kvxfer.Connector("prefill", backends=["nixl"], secret=secret, limits=limits, listen=listen) as connector:
        caches, keep = {}, []
        while True:
            try:
                name, what = pipe.recv()
            except EOFError:
                return
            if isinstance(what, CacheLayout):
                keep.append(allocate(what))
                caches[name] = connector.register(keep[-1], what, name=name)
                pipe.send(None)
            else:
                ids, times, ahead = what
                leases = [
                    caches[name].publish({"full": ids}, tokens=16 * len(ids), ttl_s=600, pack_ahead=ahead)
                    for _ in range(times)
                ]
                pipe.send([bytes(lease.ticket) for lease in leases])


def bench_blocks(
    there: Connection, elsewhere: str, secret: bytes, address: str, block_kib: int, megabytes: int, calls: int
) -> list[dict]:
    """All rows of one block size."""
    count = (megabytes << 10) // block_kib
    layout, total = layout_of(block_kib, count), megabytes << 20
    rng = np.random.default_rng(1)
    src_ids, dst_ids = (rng.permutation(count).astype(np.int32) for _ in range(2))
    nixl, whole = bench_nixl.Nixl(total, elsewhere=elsewhere), np.zeros(1, np.int32)
    functions = {
        "ceiling: NIXL, one descriptor, READ": nixl.mover("READ", total, whole, whole),
        "ceiling: NIXL, one descriptor, WRITE": nixl.mover("WRITE", total, whole, whole),
        "peer: NIXL, a descriptor a block, READ": nixl.mover("READ", block_kib << 10, dst_ids, src_ids),
        "peer: NIXL, a descriptor a block, WRITE": nixl.mover("WRITE", block_kib << 10, src_ids, dst_ids),
    }
    connectors, arrays, chosen = [], allocate(layout), {}
    for row, (ways, wire) in ROWS.items():
        name, ahead = f"{row}-{block_kib}", "raw" if "ahead" in row else None
        tickets = []
        for what in (layout, (src_ids, calls + 3, ahead)):
            there.send((name, what))
            tickets = there.recv()
        connector = kvxfer.Connector(
            f"decode {row}", backends=["nixl"], ways=ways, secret=secret, listen=f"tcp://{address}:0"
        )
        connectors.append(connector)
        cache = connector.register(arrays, layout, name=name)
        functions[row] = fetcher(cache, collections.deque(tickets), dst_ids, wire, row, chosen)
    results = timing.measure_together(functions, [None], calls=calls, clock=bench_nixl.clock)
    for connector in connectors:
        connector.close()
    nixl.close()
    ceiling = max(result.rate(total) for row, result in results.items() if row.startswith("ceiling"))
    raw = results["kvxfer packed"].rate(total)
    return [
        {
            "block_kib": block_kib,
            "row": row,
            "gigabytes_per_s": result.rate(total),
            "low": total / result.high_s / 1e9,
            "high": total / result.low_s / 1e9,
            "of_ceiling": result.rate(total) / ceiling,
            "of_raw": result.rate(total) / raw,
            "way": chosen[row].way if row in chosen else "",
            "choice": chosen[row].choice if row in chosen else "",
        }
        for row, result in results.items()
    ]


def fetcher(
    cache: kvxfer.Cache, tickets: collections.deque, ids: np.ndarray, wire: str, row: str, chosen: dict[str, object]
):
    """A function that fetches with the next ticket, and notes how."""

    def fetch(_: None) -> None:
        chosen[row] = cache.fetch(tickets.popleft(), into={"full": ids}, wire=wire, timeout_s=120).wait()
        if ("ahead" in row) != chosen[row].packed_ahead:
            raise RuntimeError(f"{row}: {chosen[row]}")

    return fetch


def on_this_host(args: argparse.Namespace) -> None:
    """The decode host, entered; processes that are started from here run on the other one."""
    elsewhere = Path(tempfile.mkdtemp()) / "python-on-the-other-host"
    elsewhere.write_text(f'#!/bin/sh\nexec {args.enter} {sys.executable} "$@"\n')
    elsewhere.chmod(0o755)
    os.environ.update(UCX)
    secret, context = secrets.token_bytes(32), multiprocessing.get_context("spawn")
    context.set_executable(str(elsewhere))
    pipe, theirs = context.Pipe()
    shelf_bytes = (args.calls + 4) * ((args.megabytes << 20) + (1 << 20)) * len(args.blocks)
    process = context.Process(target=prefill, args=(theirs, secret, args.there, shelf_bytes), daemon=True)
    process.start()
    theirs.close()
    rows = [
        row
        for kib in args.blocks
        for row in bench_blocks(pipe, str(elsewhere), secret, args.here, kib, args.megabytes, args.calls)
    ]
    pipe.close()
    process.join(10)
    print(json.dumps(rows))


def table(rows: list[dict]) -> str:
    """What a person reads."""
    lines = [f"{'block':>7}  {'what':<40} {'GB/s':>7} {'quartiles':>15} {'of ceiling':>10} {'of raw':>7}  way"]
    for row in rows:
        spread = f"{row['low']:.3f}..{row['high']:.3f}"
        lines.append(
            f"{row['block_kib']:>4} KiB  {row['row']:<40} {row['gigabytes_per_s']:>7.3f} {spread:>15} "
            f"{row['of_ceiling']:>10.2f} {row['of_raw']:>7.2f}  {row['way']}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--rate", default="10gbit", help="what a host may send, in tc's words (default %(default)s)")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 16, 64], help="KiB (default 4 16 64)")
    parser.add_argument("--megabytes", type=int, default=64, help="bytes moved by a call (default %(default)s MiB)")
    parser.add_argument("--calls", type=int, default=9, help="measured calls of each row (default %(default)s)")
    for name in ("--enter", "--here", "--there"):  # the run inside
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.enter:
        on_this_host(args)
        return
    network = Network(2)
    try:
        one, two = network.hosts
        for host in (one, two):
            host.limit(args.rate)
        command = [*two.enter, sys.executable, __file__, *sys.argv[1:], "--enter", " ".join(one.enter)]
        done = subprocess.run(
            [*command, "--here", two.address, "--there", one.address], stdout=subprocess.PIPE, check=True
        )
    finally:
        network.close()
    rows = json.loads(done.stdout.splitlines()[-1])
    print(table(rows))
    if args.json:
        timing.save(args.json, timing.environment(rate=args.rate), [{"rows": rows}])


if __name__ == "__main__":
    main()
