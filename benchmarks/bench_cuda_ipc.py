"""GPU caches of two processes: scattered blocks fetched and sent over NVLink or PCIe, against one plain peer copy.

    python benchmarks/bench_cuda_ipc.py [--json FILE] [--megabytes 1024] [--calls 15]

Each process sees one GPU (two where there are two). Rows: ours (a whole fetch, from the call to the confirmed end, at
several limits of multiprocessors), and the ceiling of the same run (one copy of as many bytes in one piece out of the
peer's memory). Bytes are counted once.
"""

from __future__ import annotations

import argparse
import collections
import os
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_shm
import msgspec
import numpy as np
import timing

import kvxfer
from kvxfer import CacheLayout, Limits

BLOCK_KIB = (4, 16, 64, 256)
SMS = (8, 16, 32)


def on_gpu(layout: CacheLayout) -> CacheLayout:
    """The layout with its regions on this process's GPU."""
    regions = tuple(msgspec.structs.replace(region, device="cuda:0") for region in layout.regions)
    return msgspec.structs.replace(layout, regions=regions)


def bench_blocks(peer: bench_shm.Prefill, secret: bytes, block_kib: int, megabytes: int, calls: int) -> list[dict]:
    """A fetch at every limit of multiprocessors, for one block size."""
    count = (megabytes << 10) // block_kib
    layout = on_gpu(bench_shm.layout_of(block_kib << 10, count))
    rng = np.random.default_rng(1)
    src_ids, dst_ids = (rng.permutation(count).astype(np.int32) for _ in range(2))
    arrays = bench_shm.allocate(layout, "gpu")
    functions, connectors = {}, []
    for sms in SMS:
        name = f"gpu-{block_kib}-{sms}"
        peer.ask("register", name, layout, "gpu")
        tickets, _ = peer.ask("publish", name, src_ids, calls + 3)
        connector = kvxfer.Connector(f"decode-{sms}", ways=("mapped",), secret=secret, limits=Limits(max_sms=sms))
        cache = connector.register(arrays, layout, name=name)
        connectors.append(connector)
        functions[f"kvxfer mapped, {sms} SMs"] = bench_shm._fetcher(
            cache, collections.deque(tickets), dst_ids, "mapped"
        )
    results = timing.measure_together(functions, [None], calls=calls)
    for connector in connectors:
        connector.close()
    total = (block_kib << 10) * count
    return [
        {
            "block_kib": block_kib,
            "row": row,
            "gigabytes_per_s": result.rate(total),
            "low": total / result.high_s / 1e9,
            "high": total / result.low_s / 1e9,
            "milliseconds": result.median_s * 1e3,
        }
        for row, result in results.items()
    ]


def ceiling(peer: bench_shm.Prefill, secret: bytes, megabytes: int, calls: int) -> dict:
    """One plain copy out of the peer's memory, as the connector has mapped it."""
    import cupy

    count = megabytes // 16
    layout = on_gpu(bench_shm.layout_of(16 << 20, count))
    peer.ask("register", "ceiling", layout, "gpu")
    tickets, _ = peer.ask("publish", "ceiling", np.arange(count), 1)
    target = cupy.zeros(count * (16 << 20), cupy.uint8)
    with kvxfer.Connector("decode-ceiling", ways=("mapped",), secret=secret) as connector:
        cache = connector.register({"kv": target}, layout, name="ceiling")
        cache.fetch(tickets[0], into={"full": np.arange(count)}).wait()
        [remote] = connector._node.directory.peers.values()
        address = remote.caches["ceiling"].regions[0].mapped_address

        def copy(_: None) -> None:
            cupy.cuda.runtime.memcpy(target.data.ptr, address, target.nbytes, cupy.cuda.runtime.memcpyDeviceToDevice)
            cupy.cuda.runtime.deviceSynchronize()

        result = timing.measure(copy, [None], calls=calls)
    return {"gigabytes_per_s": result.rate(target.nbytes), "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--megabytes", type=int, default=1024, help="bytes moved by a call (default %(default)s MiB)")
    parser.add_argument("--calls", type=int, default=15, help="measured calls of each row (default %(default)s)")
    args = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    import cupy

    gpus = os.environ.get("KVXFER_PEER_GPU", "0")
    secret = secrets.token_bytes(32)
    peer = bench_shm.Prefill(secret, gpu=gpus)
    best = ceiling(peer, secret, args.megabytes, args.calls)
    rows = [row for kib in BLOCK_KIB for row in bench_blocks(peer, secret, kib, args.megabytes, args.calls)]
    control = bench_shm.bench_control(peer, secret, on_gpu(bench_shm.layout_of(4096, 16)), "gpu")
    peer.pipe.close()
    print(f"ceiling: one piece {best['gigabytes_per_s']:.1f} GB/s")
    for row in rows:
        row["of_ceiling"] = row["gigabytes_per_s"] / best["gigabytes_per_s"]
        print(
            f"{row['block_kib']:>4} KiB  {row['row']:<26} {row['gigabytes_per_s']:>7.1f} GB/s "
            f"({row['low']:.1f}..{row['high']:.1f})  {row['of_ceiling']:.2f} of the ceiling"
        )
    print(f"one block: fetch p50 {control['fetch_p50_us']:.0f} us, p99 {control['fetch_p99_us']:.0f} us")
    if args.json:
        device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        environment = timing.environment(gpu=device, driver=cupy.cuda.runtime.driverGetVersion(), peer_gpu=gpus)
        timing.save(args.json, environment, [{"ceiling": best, "rows": rows, "control": control}])


if __name__ == "__main__":
    main()
