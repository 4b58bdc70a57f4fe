"""Two GPUs, one run: kvxfer between two processes, its kernels, other libraries on the same work, and the ceilings.

    python benchmarks/bench_gpu.py [--json FILE] [--steps ceilings,fetch,...] [--calls 9]

Needs CuPy and two GPUs that reach each other: this process owns GPU 0, the other one GPU 1. Where there is one, both
processes share it: what the host does is measured as well there, and what crosses a link is not (steps and rows that
need a second GPU are left out). Bytes are counted once. What is measured is saved after every step, so a step that
fails costs its own rows only.

Steps, in this order: `fetch` (whole fetches, from the call to the confirmed end; alone, and two at a time), `large` (of
four times the bytes), `model` (a long prompt of DeepSeek-V4.1-Flash), `latency` (one request of 64 tokens of it),
`packed` (a fetch in a wire format), `nixl` (fetches over the NIXL backend), `post` (the host's time for 100,000
pieces), `ceilings` (one piece), `kernels` (the copy kernel alone, by events), `formats` (kernels of wire formats),
`peers`.
"""

from __future__ import annotations

import argparse
import collections
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bench_shm
import peers
import timing
from bench_cuda_copy import Clock, Pools, scattered
from bench_cuda_ipc import on_gpu

import kvxfer
from kvxfer import CacheLayout, Limits, cuda
from kvxfer.cuda.lanes import Ending, Lanes
from kvxfer.cuda.pairing import CudaPairing
from kvxfer.layout import Group, Plane, Record, Region, Slice
from kvxfer.models import layout_for
from kvxfer.plan import check_blocks, join
from kvxfer.plan.request import BlockTable, pairing_of
from kvxfer.ticket import Record as LeaseRecord

MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"
LAYERS = 64  # of the caches that `fetch` moves: a block is a piece in each
PIECES = (512, 1024, 4096, 16384, 65536, 1 << 20)
SMS = (8, 16)
PUSH, PULL = (0, 1, 0), (0, 1, 1)  # device of source, destination, kernel
POST_PIECES = 100_000

Rows = Iterator[dict[str, Any]]


def layered(piece: int, blocks: int, layers: int = LAYERS) -> CacheLayout:
    """A cache on the GPU in which a block is `piece` bytes in each of the layers."""
    plane = Plane(name="kv", dtype="uint8", offset=0, entries=16, entry_stride=piece // 16, unit_bytes=piece // 16)
    record = Record(tag=f"bench.{piece}", nbytes=piece, planes=(plane,))
    names = [f"layers.{i}" for i in range(layers)]
    return CacheLayout(
        regions=tuple(Region(name=name, nbytes=piece * blocks, device="cuda:0") for name in names),
        records=(record,),
        groups=(
            Group(
                name="full",
                block_tokens=16,
                num_blocks=blocks,
                slices=tuple(
                    Slice(layer=name, region=name, offset=0, block_stride=piece, record=record.tag) for name in names
                ),
            ),
        ),
        fingerprint={"model": "bench"},
    )


def halves(nbytes: int) -> tuple[CacheLayout, int]:
    """A cache on the GPU of about so many bytes of bf16, in 32 layers, and the tokens that fill it."""
    tokens = nbytes // (32 * 2 * 8 * 128 * 2) // 16 * 16
    layout = CacheLayout.paged(
        layers=[f"layers.{i}" for i in range(32)],
        num_blocks=tokens // 16,
        block_tokens=16,
        kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
    )
    return on_gpu(layout), tokens


class Bench:
    """The other process, and what is measured with it."""

    def __init__(self, calls: int, total: int, gpus: int) -> None:
        self.calls, self.total, self.gpus = calls, total, gpus
        self.secret = secrets.token_bytes(32)
        self.peer_gpu = str(gpus - 1)
        self.peer = bench_shm.Prefill(self.secret, gpu=self.peer_gpu)
        self._names = iter(range(1 << 30))
        self._host: list[tuple[float, float, float]] = []  # seconds of each fetch of a series; see _host_part

    # --- whole fetches --------------------------------------------------------------------------------------

    def fetches(
        self,
        layout: CacheLayout,
        lists: tuple[dict[str, np.ndarray], dict[str, np.ndarray]],
        tokens: int,
        *,
        max_sms: int,
        calls: int,
        at_once: tuple[int, ...] = (1,),
        wire: str = "raw",
        way: str = "mapped",
        memory: str = "gpu",
        peer: bench_shm.Prefill | None = None,
        backends: str | list[str] = "auto",
        **more: int,
    ) -> Iterator[tuple[int, timing.Timing, kvxfer.TransferStats]]:
        """Seconds of a fetch, for each number of fetches that are under way together. `more` are limits."""
        name, peer = f"bench-{next(self._names)}", peer or self.peer
        peer.ask("register", name, layout, memory)
        options = {"ways": (way,), "backends": backends, "limits": Limits(max_sms=max_sms, **more)}
        with kvxfer.Connector(f"decode-{name}", secret=self.secret, **options) as connector:
            cache = connector.register(bench_shm.allocate(layout, memory), layout, name=name)
            for many in at_once:
                warm_up = 2
                tickets: collections.deque[bytes] = collections.deque()
                before = bench_shm.one_by_one(peer, tickets, name, lists[0], many, tokens)
                if way == "mapped":  # to which it is all the same
                    tickets.extend(peer.ask("publish", name, lists[0], many * (calls + warm_up), tokens)[0])
                    before = _nothing
                stats: list[kvxfer.TransferStats] = []

                self._host = host = []

                def fetch(_: None, many=many, tickets=tickets, stats=stats, host=host) -> None:
                    began, worked = time.perf_counter(), time.thread_time()
                    under_way = [
                        cache.fetch(tickets.popleft(), into=lists[1], wire=wire, timeout_s=60) for _ in range(many)
                    ]
                    returned = time.perf_counter()
                    stats[:] = [transfer.wait() for transfer in under_way]
                    host.append((returned - began, time.thread_time() - worked, stats[0].posted_s))
                    assert stats[0].way == way, stats[0]

                result = timing.measure(fetch, [None], calls=calls, warm_up=warm_up, before=before)
                yield many, result, stats[0]

    def _host_part(self) -> dict[str, float]:
        """Of the last series, medians: until the calls had returned, the processor time of the thread that fetched
        (spinning for the device included), and until the first byte of the first fetch."""
        names = ("returned_us", "thread_us", "posted_us")
        return {name: 1e6 * float(np.median(v)) for name, v in zip(names, zip(*self._host, strict=True), strict=True)}

    def fetch(self) -> Rows:
        """Scattered blocks of a cache of many layers, and the same bytes in one layer."""
        cases = [(piece, LAYERS) for piece in PIECES] + [(4096, 1)]
        for piece, layers in cases:
            blocks = self.total // piece // layers
            layout = layered(piece, blocks, layers)
            lists = tuple({"full": np.random.default_rng(s).permutation(blocks).astype(np.int32)} for s in (1, 2))
            for sms in SMS:
                for many, result, stats in self.fetches(
                    layout, lists, 16 * blocks, max_sms=sms, calls=self.calls, at_once=(1, 2)
                ):
                    yield {
                        "what": "fetch",
                        "piece": piece,
                        "layers": layers,
                        "max_sms": sms,
                        "at_once": many,
                    } | self._host_part() | _rate(many * stats.bytes, result)
                    _tidy()

    def model(self) -> Rows:
        """1,048,576 tokens of DeepSeek-V4.1-Flash, in vLLM's blocks."""
        tokens = 1 << 20
        layout, lists = request(tokens)
        for sms in SMS:
            for _, result, stats in self.fetches(layout, lists, tokens, max_sms=sms, calls=self.calls):
                row = {"what": "model", "tokens": tokens, "max_sms": sms} | self._host_part()
                yield row | _rate(stats.bytes, result)
            _tidy()

    def latency(self) -> Rows:
        """One request of 64 tokens: from the handle to done."""
        layout, lists = request(64)
        calls = 300
        for _, result, stats in self.fetches(layout, lists, 64, max_sms=16, calls=calls):
            yield {"what": "latency", "tokens": 64, "bytes": stats.bytes, "p50_us": result.median_s * 1e6} | {
                "low_us": result.low_s * 1e6,
                "high_us": result.high_s * 1e6,
                "best_us": result.best_s * 1e6,
            } | self._host_part()

    def large(self) -> Rows:
        """As `fetch`, of four times the bytes: what comes before and after the kernel matters less."""
        for piece in (4096, 65536, 1 << 20):
            blocks = 4 * self.total // piece // LAYERS
            layout = layered(piece, blocks)
            lists = tuple({"full": np.random.default_rng(s).permutation(blocks).astype(np.int32)} for s in (1, 2))
            for sms in SMS:
                for _, result, stats in self.fetches(layout, lists, 16 * blocks, max_sms=sms, calls=self.calls):
                    row = {"what": "large", "piece": piece, "max_sms": sms} | self._host_part()
                    yield row | _rate(stats.bytes, result)
                _tidy()

    def packed(self) -> Rows:
        """bf16 blocks that cross in another format, packed by one end and unpacked by the other."""
        for times, cases in ((1, (("raw", 16), ("nvfp4", 16), ("nvfp4", 64))), (8, (("raw", 16), ("nvfp4", 64)))):
            layout, tokens = halves(times * self.total)
            (group,) = layout.groups
            lists = tuple(
                {group.name: np.random.default_rng(s).permutation(tokens // 16).astype(np.int32)} for s in (1, 2)
            )
            for wire, sms in cases:
                peer = bench_shm.Prefill(self.secret, gpu=self.peer_gpu, max_sms=sms)
                options = {"max_sms": sms, "calls": self.calls, "wire": wire, "way": "packed", "memory": "finite"}
                for _, result, stats in self.fetches(layout, lists, tokens, peer=peer, **options):
                    row = {"what": "packed", "wire": wire, "max_sms": sms, "wire_bytes": stats.wire_bytes}
                    yield row | self._host_part() | _rate(stats.bytes, result)
                peer.pipe.close()
                _tidy()

    def nixl(self) -> Rows:
        """The packed way over NIXL, staging on both GPUs: scattered pieces."""
        peer = bench_shm.Prefill(self.secret, gpu=self.peer_gpu, backends=["nixl"], max_sms=16)
        for times, piece in ((1, 4096), (1, 65536), (4, 65536)):
            blocks = times * self.total // piece // LAYERS
            layout = layered(piece, blocks)
            lists = tuple({"full": np.random.default_rng(s).permutation(blocks).astype(np.int32)} for s in (1, 2))
            options = {"max_sms": 16, "calls": self.calls, "way": "packed", "backends": ["nixl"]}
            for _, result, stats in self.fetches(layout, lists, 16 * blocks, peer=peer, **options):
                yield {"what": "nixl", "piece": piece, "way": stats.way} | _rate(stats.bytes, result)
            _tidy()
        peer.pipe.close()

    # --- within this process --------------------------------------------------------------------------------

    def ceilings(self) -> Rows:
        """The same bytes in one piece, by what the runtime chooses."""
        here = [cuda.DeviceMemory(self.total, device=0) for _ in range(2)]
        clock = Clock(0)
        stream = clock.stream.address
        calls = {
            "within a GPU": lambda: cuda.copy_bytes(
                here[1].address, here[0].address, self.total, device=0, stream=stream
            )
        }
        if self.gpus > 1:
            _connect()
            there = cuda.DeviceMemory(self.total, device=1)
            calls["push"] = lambda: cuda.copy_bytes_peer(
                there.address, 1, here[0].address, 0, self.total, device=0, stream=stream
            )
            calls["pull"] = lambda: cuda.copy_bytes_peer(
                here[1].address, 0, there.address, 1, self.total, device=0, stream=stream
            )
        for way, call in calls.items():
            yield {"what": "ceiling", "way": way} | _rate(self.total, self._timed(call, clock))

    def kernels(self) -> Rows:
        """The copy kernel on scattered pieces, without a connector around it."""
        ways = [("local", (0, 0, 0), (0,))]
        if self.gpus > 1:
            _connect()
            ways += [("push", PUSH, SMS), ("pull", PULL, SMS)]
        pools = Pools(2 * self.total, self.gpus)
        for way, (src, dst, runs_on), limits in ways:
            clock = Clock(runs_on)
            for piece in PIECES[:5]:
                plan = scattered(piece, self.total, pools.nbytes)
                bases = [pools.bases(side, device, 1, pools.nbytes) for side, device in (("src", src), ("dst", dst))]
                with cuda.PreparedCudaPlan(plan, device=runs_on, src_bases=bases[0], dst_bases=bases[1]) as prepared:
                    prepared.upload(stream=clock.stream.address)
                    chunks = list(plan.chunks(1 << 62))
                    for sms in limits:
                        result = self._timed(
                            lambda prepared=prepared, chunks=chunks, sms=sms, clock=clock: prepared.copy(
                                chunks, stream=clock.stream.address, max_sms=sms
                            ),
                            clock,
                        )
                        row = {"what": "kernel", "way": way, "piece": piece, "max_sms": sms}
                        yield row | _rate(plan.nbytes, result)

    def post(self) -> Rows:
        """From a lease's record and block lists to an enqueued kernel: checks, pairs of blocks, tables, launch."""
        lanes, flights = Lanes(0), []
        lanes.warm(1)
        memory = [cuda.DeviceMemory(4096 * POST_PIECES, device=0) for _ in range(2)]
        for layers in (1, 100):
            blocks = POST_PIECES // layers
            layout, tokens = layered(4096, blocks, layers), 16 * blocks
            ids = [{"full": np.random.default_rng(s).permutation(blocks).astype(np.int32)} for s in (1, 2)]
            record = LeaseRecord.of(tokens, check_blocks(layout, ids[0], tokens=tokens, role="source")).encode()
            starts = np.arange(layers, dtype=np.uint64) * np.uint64(4096 * blocks)
            bases = [np.uint64(m.address) + starts for m in memory]
            table, (joined,) = BlockTable(layout), join([layout], layout)
            pairing = CudaPairing(pairing_of(joined), lanes, *bases, max_sms=16)

            def enqueue(table=table, pairing=pairing, record=record, into=ids[1], tokens=tokens) -> None:
                dst = table.check(into, tokens=tokens, role="destination")
                found = pairing.request(record, dst, tokens=tokens)
                flights.append(pairing.launch(found, *lanes.take(1), after=(), ending=Ending()))

            def clock(call: Callable[[], Any]) -> float:
                seconds = timing.host_clock(call)
                while not flights[-1].has_landed(1.0):
                    pass
                flights.pop().end()
                return seconds

            result = timing.measure(lambda _, e=enqueue: e(), [None], calls=30, clock=clock)
            yield {"what": "post", "pieces": POST_PIECES, "layers": layers, "host_us": result.median_s * 1e6}

    def formats(self) -> Rows:
        """Gather and pack, into this GPU and into the peer; unpack and scatter. Bytes are of bf16."""
        import bench_cuda_formats

        if self.gpus > 1:
            _connect()
        caches = bench_cuda_formats.Caches(2 * self.total, self.gpus)
        inner = bench_cuda_formats.Bench(caches, self.calls, self.gpus > 1)
        for wire in ("nvfp4", "mxfp4", "fp8_e4m3", *bench_cuda_formats.SLOW_WIRES):
            inner.format(wire, (0,))
        for row in inner.results:
            yield {"what": "format", "wire": row["wire"], "way": row["what"]} | _rate(row["nbytes"], row["timing"])

    def _timed(self, call: Callable[[], Any], clock: Clock) -> timing.Timing:
        return timing.measure(lambda _: call(), [None], calls=self.calls, warm_up=1, clock=clock)


def request(tokens: int) -> tuple[CacheLayout, tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """The model's cache on a GPU, with random blocks for the source and the destination of one request."""
    plain = layout_for(MODEL)
    counts = {group.name: min(group.blocks_for(tokens), group.tail_blocks) for group in plain.groups}
    blocks = sum(counts.values()) + 16
    layout = on_gpu(layout_for(MODEL, num_blocks=blocks))
    lists = []
    for seed in (1, 2):
        ids = np.random.default_rng(seed).permutation(blocks).astype(np.int32)
        ends = np.cumsum(list(counts.values()))
        lists.append(dict(zip(counts, np.split(ids, ends)[:-1], strict=True)))
    return layout, tuple(lists)


def of_peers(total: int, calls: int, timeout_s: float) -> Rows:
    """Other libraries, each in a process of its own."""
    work = peers.Work(total=total // 2, pieces=(4096, 65536), calls=calls)
    for name in peers.NAMES:
        for row in peers.measured(name, work, timeout_s=timeout_s):
            yield {**row, "what": "peer", "name": row.get("what", "")}


def _rate(nbytes: int, result: timing.Timing) -> dict[str, Any]:
    return {
        "nbytes": nbytes,
        "gb_s": result.rate(nbytes),
        "low": nbytes / result.high_s / 1e9,
        "high": nbytes / result.low_s / 1e9,
        "milliseconds": result.median_s * 1e3,
    }


def _connect() -> None:
    """Let this process's two GPUs read and write each other's memory."""
    cuda.enable_peer_access(0, 1)
    cuda.enable_peer_access(1, 0)


def _nothing() -> None:
    """Before a call for which nothing is to be done."""


def _tidy() -> None:
    """Give the memory of caches that are gone back to the device."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def _line(row: dict[str, Any]) -> str:
    shown = {key: value for key, value in row.items() if key not in ("nbytes", "low", "high")}
    return "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--steps", default="", help="comma-separated; default: all")
    parser.add_argument("--megabytes", type=int, default=1024, help="moved by a call (default %(default)s MiB)")
    parser.add_argument("--calls", type=int, default=9, help="measured calls of each row (default %(default)s)")
    parser.add_argument("--peer-timeout", type=float, default=40, help="seconds for a peer's row (default %(default)s)")
    args = parser.parse_args()
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # peers' memory is reached through two devices here
    if reason := cuda.why_unavailable():
        raise SystemExit(f"bench_gpu needs a GPU: {reason}")
    gpus = min(cuda.device_count(), 2)
    if gpus > 1 and not cuda.can_access_peer(0, 1):
        raise SystemExit("bench_gpu needs GPUs that reach each other")
    if gpus == 1:
        print("one GPU: both processes share it, and nothing crosses a link", flush=True)
    total = args.megabytes << 20
    bench = Bench(args.calls, total, gpus)
    steps: dict[str, Callable[[], Rows]] = {
        "fetch": bench.fetch,
        "large": bench.large,
        "model": bench.model,
        "latency": bench.latency,
        "packed": bench.packed,
        "nixl": bench.nixl,
        "post": bench.post,
        "ceilings": bench.ceilings,
        "kernels": bench.kernels,
        "formats": bench.formats,
    }
    if gpus > 1:
        steps["peers"] = lambda: of_peers(total, args.calls, args.peer_timeout)
    wanted = args.steps.split(",") if args.steps else list(steps)
    if unknown := set(wanted) - steps.keys():
        raise SystemExit(f"unknown steps {sorted(unknown)}; there are {', '.join(steps)}")
    major, minor = cuda.compute_capability(0)
    gpu = {"compute_capability": f"{major}.{minor}", "sms": cuda.sm_count(0), "driver": cuda.driver_version()}
    environment = timing.environment(gpus=gpus, **gpu)
    results: list[dict[str, Any]] = []
    failed = False
    for name in wanted:
        started = time.perf_counter()
        try:
            for row in steps[name]():
                results.append(row)
                print(_line(row), flush=True)
        except Exception:  # what the other steps measure is worth having
            failed = True
            traceback.print_exc()
            results.append({"what": name, "failed": traceback.format_exc(limit=1).splitlines()[-1]})
        print(f"-- {name}: {time.perf_counter() - started:.1f} s", flush=True)
        if args.json:
            timing.save(args.json, environment, results)
    bench.peer.pipe.close()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
