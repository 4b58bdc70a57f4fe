"""The copy kernels: scattered pieces within a GPU, pushed to a peer and pulled from it, by limit on multiprocessors.

``python benchmarks/bench_cuda_copy.py [--json FILE] [--total-mib N] [--quick]``. With one GPU the peer rows are
left out and said to be. Bytes are counted once; times are of CUDA events on the launching stream, a launch each;
the total is many times any L2 cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from timing import Timing, environment, measure, save

from kvxfer import cuda
from kvxfer.layout import CacheLayout
from kvxfer.plan import ROW, PlanPart, Segments, TransferPlan, join

PIECES = (512, 1024, 2048, 4096, 16384, 65536, 262144)
SM_LIMITS = (4, 8, 16, 32, 64, 132)
WAYS = {"local": (0, 0, 0), "push": (0, 1, 0), "pull": (0, 1, 1)}  # device of source, destination, kernel


@dataclass
class Clock:
    """Seconds on a stream between two events."""

    device: int

    def __post_init__(self) -> None:
        self.stream = cuda.Stream(device=self.device)
        self.begin, self.end = (cuda.Event(device=self.device, timed=True) for _ in range(2))

    def __call__(self, call: Callable[[], Any]) -> float:
        self.begin.record(self.stream.address)
        call()
        self.end.record(self.stream.address)
        self.end.synchronise()
        return self.end.ms_since(self.begin) / 1e3


class Pools:
    """One pool of memory a device and side, twice the size of what moves, filled with bytes that are not zero."""

    def __init__(self, nbytes: int, devices: int) -> None:
        self.nbytes = nbytes
        self._memory = {}
        for device in range(devices):
            for side in ("src", "dst"):
                memory = cuda.DeviceMemory(nbytes, device=device)
                with cuda.Stream(device=device) as stream:
                    cuda.set_bytes(
                        memory.address, 0x5A + device, nbytes, device=device, stream=stream.address
                    )
                    stream.synchronise()
                self._memory[side, device] = memory

    def address(self, side: str, device: int) -> int:
        return self._memory[side, device].address

    def bases(self, side: str, device: int, regions: int, region_bytes: int) -> np.ndarray:
        """Regions cut one after the other from a pool."""
        assert regions * region_bytes <= self.nbytes
        return self.address(side, device) + np.arange(regions, dtype=np.uint64) * np.uint64(region_bytes)


def scattered(piece: int, total: int, pool: int) -> TransferPlan:
    """`total` bytes in pieces, at random places of both pools."""
    rng = np.random.default_rng(piece)
    rows = np.zeros(1, ROW)
    rows["src_block_stride"] = rows["dst_block_stride"] = rows["unit_bytes"] = piece
    rows["heads"] = rows["channels"] = 1
    src, dst = (rng.permutation(pool // piece)[: total // piece].astype(np.int32) for _ in range(2))
    part = PlanPart(rows=rows, segments=Segments(src_block=src, dst_block=dst))
    return TransferPlan(parts=(part,), src_regions=1, dst_regions=1)


def between_layouts(total: int) -> Iterator[tuple[str, TransferPlan, int]]:
    """Names, plans and bytes of a region, of a model with 48 layers of 8 heads of 128, bf16."""
    layers = 48
    tokens = total // (layers * 2 * 8 * 128 * 2) // 64 * 64

    def paged(block_tokens: int = 16, **changes: object) -> CacheLayout:
        return CacheLayout.paged(
            layers=[f"layers.{i}" for i in range(layers)],
            num_blocks=2 * tokens // block_tokens,
            block_tokens=block_tokens,
            **({"kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"} | changes),
        )

    for name, src, dst in (
        ("equal layouts", paged(), paged()),
        ("blocks of 16 to 64 tokens", paged(), paged(64)),
        ("NHD to HND", paged(), paged(order="HND")),
        ("4 of 8 heads", paged(), paged(kv_heads=4, total_heads=8)),
        ("4 of 8 heads, HND", paged(order="HND"), paged(kv_heads=4, total_heads=8, order="HND")),
    ):
        (joined,) = join([src], dst)
        rng = np.random.default_rng(0)
        lists = []
        for layout in (src, dst):
            (group,) = layout.groups
            ids = rng.permutation(group.num_blocks)[: group.blocks_for(tokens)]
            lists.append({group.name: ids.astype(np.int32)})
        yield name, joined.plan(*lists, tokens=tokens), max(r.nbytes for r in (*src.regions, *dst.regions))


@dataclass
class Bench:
    """All measurements, kept as they are made."""

    pools: Pools
    total: int
    calls: int
    ways: dict[str, tuple[int, int, int]]

    def __post_init__(self) -> None:
        self.clocks = {device: Clock(device) for device in {way[2] for way in self.ways.values()}}
        self.results: list[dict[str, Any]] = []

    def add(self, what: str, nbytes: int, timing: Timing, **more: Any) -> None:
        self.results.append(
            {"what": what, "nbytes": nbytes, "gb_s": timing.rate(nbytes), "timing": timing, **more}
        )

    def timed(self, call: Callable[[], Any], device: int) -> Timing:
        return measure(lambda _: call(), [None], calls=self.calls, warm_up=1, clock=self.clocks[device])

    # --- ours -----------------------------------------------------------------------------------------------

    def pieces(self, sizes: tuple[int, ...], limits: tuple[int, ...]) -> None:
        """Whole rows of one size."""
        for piece in sizes:
            plan = scattered(piece, self.total, self.pools.nbytes)
            for way, (src, dst, runs_on) in self.ways.items():
                self._launches("copy", way, plan, runs_on, (src, dst), self.pools.nbytes, limits, piece=piece)
            if piece in (4096, 65536):
                self._packing(plan, piece)

    def layouts(self, limits: tuple[int, ...]) -> None:
        """Whole and token rows as joins of real layouts give them."""
        for name, plan, region_bytes in between_layouts(self.total // 2):
            for way, (src, dst, runs_on) in self.ways.items():
                self._launches("layouts", way, plan, runs_on, (src, dst), region_bytes, limits, case=name)

    def _launches(
        self,
        what: str,
        way: str,
        plan: TransferPlan,
        runs_on: int,
        sides: tuple[int, int],
        region_bytes: int,
        limits: tuple[int, ...],
        **more: Any,
    ) -> None:
        stream = self.clocks[runs_on].stream
        src = self.pools.bases("src", sides[0], plan.src_regions, region_bytes)
        dst = self.pools.bases("dst", sides[1], plan.dst_regions, region_bytes)
        with cuda.PreparedCudaPlan(plan, device=runs_on, src_bases=src, dst_bases=dst) as prepared:
            prepared.upload(stream=stream.address)
            stream.synchronise()
            chunks = list(plan.chunks(1 << 62))
            for limit in limits:
                timing = self.timed(
                    lambda limit=limit: prepared.copy(chunks, stream=stream.address, max_sms=limit), runs_on
                )
                self.add(what, plan.nbytes, timing, way=way, max_sms=limit, **more)

    def _packing(self, plan: TransferPlan, piece: int) -> None:
        """Gather into and scatter from a packed buffer, within a GPU."""
        stream = self.clocks[0].stream
        src, dst = (self.pools.bases(side, 0, 1, self.pools.nbytes) for side in ("src", "dst"))
        (chunk,) = plan.chunks(1 << 62)
        for direction, bases in (("gather", {"src_bases": src}), ("scatter", {"dst_bases": dst})):
            wire = self.pools.address("dst" if direction == "gather" else "src", 0)
            with cuda.PreparedCudaPlan(plan, device=0, **bases) as prepared:
                prepared.upload(stream=stream.address)
                stream.synchronise()
                launch = getattr(prepared, direction)
                for limit in (16, 132):
                    timing = self.timed(
                        lambda limit=limit, launch=launch, wire=wire: launch(
                            chunk, wire, stream=stream.address, max_sms=limit
                        ),
                        0,
                    )
                    self.add(direction, plan.nbytes, timing, way="local", max_sms=limit, piece=piece)

    def small(self) -> None:
        """Small transfers of 4 KiB pieces, all multiprocessors: what a launch costs."""
        for way, (src, dst, runs_on) in self.ways.items():
            for total in (1 << 16, 1 << 20, 1 << 24):
                plan = scattered(4096, total, self.pools.nbytes)
                self._launches(
                    "small", way, plan, runs_on, (src, dst), self.pools.nbytes, (0,), piece=4096, total=total
                )

    def checksums(self) -> None:
        """The digest of one buffer."""
        stream = self.clocks[0].stream
        data, digest = self.pools.address("src", 0), self.pools.address("dst", 0)
        for limit in (8, 16, 132):
            timing = self.timed(
                lambda limit=limit: cuda.checksum_on_device(
                    data, self.total, digest, device=0, stream=stream.address, max_sms=limit
                ),
                0,
            )
            self.add("checksum", self.total, timing, way="local", max_sms=limit)

    def host(self) -> None:
        """Host time to prepare, upload and launch 100,000 pieces, pinned tables; the GPU's time is not in it."""
        pieces = min(100_000, self.pools.nbytes // 4096)
        plan = scattered(4096, pieces * 4096, self.pools.nbytes)
        stream = self.clocks[0].stream
        src, dst = (self.pools.bases(side, 0, 1, self.pools.nbytes) for side in ("src", "dst"))
        (chunk,) = plan.chunks(1 << 62)
        pinned, tables = cuda.PinnedMemory(8 << 20), cuda.DeviceMemory(8 << 20, device=0)
        steps: dict[str, list[float]] = {"prepare": [], "upload": [], "launch": []}
        for _ in range(20):
            stamps = [time.perf_counter()]
            prepared = cuda.PreparedCudaPlan(plan, device=0, src_bases=src, dst_bases=dst)
            stamps.append(time.perf_counter())
            prepared.upload(stream=stream.address, memory=tables.address, pinned=pinned.array)
            stamps.append(time.perf_counter())
            prepared.copy(chunk, stream=stream.address)
            stamps.append(time.perf_counter())
            stream.synchronise()
            for name, begin, end in zip(steps, stamps[:-1], stamps[1:], strict=True):
                steps[name].append(end - begin)
        self.results.append(
            {"what": "host", "pieces": pieces}
            | {f"{k}_us": float(np.median(v)) * 1e6 for k, v in steps.items()}
        )

    # --- ceilings ---------------------------------------------------------------------------------

    def ceilings(self) -> None:
        """The same bytes in one piece, by the copy engine or what the runtime chooses."""
        for way, (src, dst, runs_on) in self.ways.items():
            stream = self.clocks[runs_on].stream.address
            to, source = self.pools.address("dst", dst), self.pools.address("src", src)

            def one_piece(to=to, source=source, src=src, dst=dst, runs_on=runs_on, stream=stream) -> None:
                if src == dst:
                    cuda.copy_bytes(to, source, self.total, device=runs_on, stream=stream)
                else:
                    cuda.copy_bytes_peer(to, dst, source, src, self.total, device=runs_on, stream=stream)

            self.add("ceiling: one piece", self.total, self.timed(one_piece, runs_on), way=way)

    # --- tables ---------------------------------------------------------------------------------------------

    def table(self) -> str:
        """GB/s, a line a way and size, a column a limit."""
        lines = []
        grids: dict[tuple, dict[int, float]] = {}
        for row in self.results:
            if row["what"] in ("copy", "layouts", "gather", "scatter"):
                name = str(row.get("case", row.get("piece")))
                grids.setdefault((row["what"], row["way"], name), {})[row["max_sms"]] = row["gb_s"]
            elif "gb_s" in row:
                size = row.get("total", row.get("piece", ""))
                extra = f"{size} sms={row.get('max_sms', '-')}"
                us = row["timing"].median_s * 1e6
                lines.append(
                    f"{row['what']:<44}{row['way']:<7}{extra:<26}{row['gb_s']:>9.1f} GB/s {us:>10.1f} us"
                )
            else:
                lines.append(str(row))
        lines.append(
            f"\n{'GB/s':<8}{'way':<7}{'pieces':<27}" + "".join(f"{n:>8}" for n in SM_LIMITS)
        )
        for (what, way, name), by_limit in grids.items():
            cells = "".join(f"{by_limit[n]:>8.0f}" if n in by_limit else f"{'':>8}" for n in SM_LIMITS)
            lines.append(f"{what:<8}{way:<7}{name:<27}{cells}")
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--total-mib", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few sizes and limits, to see that all runs")
    args = parser.parse_args()
    if reason := cuda.why_unavailable():
        raise SystemExit(f"bench_cuda_copy needs a GPU: {reason}")
    devices = min(2, cuda.device_count())
    ways = WAYS if devices > 1 and cuda.can_access_peer(0, 1) else {"local": WAYS["local"]}
    if len(ways) > 1:
        cuda.enable_peer_access(0, 1)
        cuda.enable_peer_access(1, 0)
    else:
        print("no second GPU within reach: push and pull are left out")
    started = time.perf_counter()
    total = args.total_mib << 20
    bench = Bench(Pools(2 * total, devices if len(ways) > 1 else 1), total, args.calls, ways)
    limits = (8, 132) if args.quick else SM_LIMITS
    steps: list[Callable[[], None]] = [
        bench.ceilings,
        lambda: bench.pieces((4096,) if args.quick else PIECES, limits),
        lambda: bench.layouts((8, 16, 132)),
        bench.small,
        bench.checksums,
        bench.host,
    ]
    major, minor = cuda.compute_capability(0)
    gpu = {
        "gpus": devices,
        "compute_capability": f"{major}.{minor}",
        "sms": cuda.sm_count(0),
        "driver": cuda.driver_version(),
    }
    env = environment(**gpu)
    for step in steps:  # what is measured is kept if a later step fails or runs out of time
        step()
        if args.json:
            save(args.json, env, bench.results)
    print(bench.table())
    print(f"\n{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
