"""Wire formats on a GPU: gather and pack, unpack and scatter, and packing straight into a peer.

``python benchmarks/bench_cuda_formats.py [--json FILE] [--total-mib N] [--quick]``. The work is a request of bf16 keys
and values at random blocks; rates count the bf16 bytes once. Ceilings of the same run: a copy in one piece, and the
gather of the same blocks as they are. Times are of CUDA events, the median of the calls with quartiles in the JSON;
the cache is many times the L2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_cuda_copy import Clock
from timing import Timing, environment, measure, save

from kvxfer import cuda, formats
from kvxfer.layout import CacheLayout
from kvxfer.plan import Chunk

SM_LIMITS = (16, 32, 64, 132)
# A warp goes through a range of its own, as in csrc/cuda; a vector is 8 values, two of them have a byte of scales.
BARE = r"""
#define WALK                                                                          \
  const long warps = gridDim.x * 32L, share = (vectors / warps + 127) / 128 * 128;    \
  const long first = share * (blockIdx.x * 32L + threadIdx.x / 32);                   \
  const long last = first + share < vectors ? first + share : vectors;                \
  for (long i = first + threadIdx.x % 32; i < last; i += 128)
#define EACH _Pragma("unroll") for (int u = 0; u < 4; ++u) if (i + 32 * u < last)

extern "C" __global__ void __launch_bounds__(1024, 1)
unpack(uint4* bf16, const unsigned* codes, const unsigned char* scales, long vectors) {
  WALK {
    unsigned a[4], b[4];
    EACH { a[u] = codes[i + 32 * u]; b[u] = scales[(i + 32 * u) / 2]; }
    EACH bf16[i + 32 * u] = make_uint4(a[u], b[u], a[u] ^ b[u], a[u] + b[u]);
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1)
pack(const uint4* bf16, unsigned* codes, unsigned char* scales, long vectors) {
  WALK {
    uint4 v[4];
    EACH v[u] = bf16[i + 32 * u];
    EACH {
      codes[i + 32 * u] = v[u].x ^ v[u].y;
      if (i % 2 == 0) scales[(i + 32 * u) / 2] = v[u].z ^ v[u].w;
    }
  }
}
"""
WIRES = ("nvfp4", "mxfp4", "fp8_e4m3", "mixed")
SLOW_WIRES = ("nvfp4:four_over_six", "mxfp4:hadamard", "int4")
LAYERS = 32


def paged(tokens: int, **changes: object) -> CacheLayout:
    """The cache of the request, and as many blocks again."""
    options = {"kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "block_tokens": 16} | changes
    return CacheLayout.paged(
        layers=[f"layers.{i}" for i in range(LAYERS)],
        num_blocks=2 * tokens // options["block_tokens"],
        **options,
    )


class Caches:
    """A source and a destination cache on device 0, a packed buffer on each device."""

    def __init__(self, total: int, devices: int) -> None:
        self.total = total
        self.memory = {side: cuda.DeviceMemory(2 * total, device=0) for side in ("src", "dst")}
        self.wires = [cuda.DeviceMemory(total, device=device) for device in range(devices)]
        # Normal numbers with a spread as keys have it, not one byte repeated: the same kilobytes, many times over.
        rng = np.random.default_rng(0)
        values = rng.standard_normal((1 << 14, 128)) * np.exp2(rng.integers(-4, 4, (1 << 14, 1)))
        halves = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        with cuda.Stream(device=0) as stream:
            for at in range(0, 2 * total, halves.nbytes):
                nbytes = min(halves.nbytes, 2 * total - at)
                cuda.copy_bytes(
                    self.memory["src"].address + at, halves.ctypes.data, nbytes, device=0, stream=stream.address
                )
            stream.synchronise()

    def bases(self, side: str, layout: CacheLayout) -> np.ndarray:
        sizes = np.array([0] + [region.nbytes for region in layout.regions], np.uint64)
        assert int(sizes.sum()) <= self.memory[side].nbytes
        return np.uint64(self.memory[side].address) + np.cumsum(sizes)[:-1]


class Bench:
    """All measurements, kept as they are made."""

    def __init__(self, caches: Caches, calls: int, peer: bool) -> None:
        self.caches, self.calls, self.peer = caches, calls, peer
        self.clock = Clock(0)
        self.stream = self.clock.stream.address
        self.results: list[dict[str, Any]] = []
        self.tokens = caches.total // (LAYERS * 2 * 8 * 128 * 2) // 16 * 16

    def timed(self, call: Callable[[], Any]) -> Timing:
        return measure(lambda _: call(), [None], calls=self.calls, warm_up=1, clock=self.clock)

    def add(self, what: str, nbytes: int, timing: Timing, **more: Any) -> None:
        self.results.append(
            {"what": what, "nbytes": nbytes, "tb_s": timing.rate(nbytes) / 1e3, "timing": timing, **more}
        )

    def format(self, wire: str, limits: tuple[int, ...], *, what: str = "", **layout: object) -> None:
        """Pack and unpack within the GPU, and pack into the peer."""
        heads = layout.get("kv_heads", 8) * layout.get("head_dim", 128)
        tokens = self.tokens * 1024 // heads // 16 * 16
        cache = paged(tokens, **layout)
        (join,) = formats.join_packed([cache], cache, wire)
        rng = np.random.default_rng(0)
        blocks = cache.groups[0].num_blocks
        ids = [
            {cache.groups[0].name: rng.permutation(blocks)[: blocks // 2].astype(np.int32)} for _ in range(2)
        ]
        plan = join.plan(*ids, tokens=tokens)
        src, dst = (self.caches.bases(side, cache) for side in ("src", "dst"))
        more = {"wire": wire, "cache": what or "NHD, 8 heads of 128", "packed_bytes": plan.wire_bytes}
        with cuda.PreparedCudaPackedPlan(plan, device=0, src_bases=src, dst_bases=dst) as prepared:
            prepared.upload(stream=self.stream)
            (chunk,) = plan.chunks(1 << 62)
            for limit in limits:
                self._ways(prepared, chunk, limit, plan.nbytes, more)

    def _ways(
        self, prepared: cuda.PreparedCudaPackedPlan, chunk: Chunk, limit: int, nbytes: int, more: dict[str, Any]
    ) -> None:
        options = {"stream": self.stream, "max_sms": limit}
        for device, wire in enumerate(self.caches.wires):
            timing = self.timed(lambda wire=wire: prepared.pack(chunk, wire.address, **options))
            name = "pack" if device == 0 else "pack into the peer"
            rate = chunk.wire_bytes / timing.median_s / 1e9
            self.add(name, nbytes, timing, max_sms=limit, link_gb_s=rate, **more)
        own = self.caches.wires[0].address
        prepared.pack(chunk, own, **options)  # what is unpacked is real
        timing = self.timed(lambda: prepared.unpack(chunk, own, **options))
        self.add("unpack", nbytes, timing, max_sms=limit, **more)

    def ceilings(self) -> None:
        """The same bytes in one piece, and a quarter of them, about what is packed."""
        src, total = self.caches.memory["src"].address, self.caches.total
        for device, wire in enumerate(self.caches.wires):

            def one_piece(wire=wire, device=device) -> None:
                if device:
                    cuda.copy_bytes_peer(wire.address, device, src, 0, total, device=0, stream=self.stream)
                else:
                    cuda.copy_bytes(wire.address, src, total, device=0, stream=self.stream)

            name = "ceiling: one piece" + (" into the peer" if device else "")
            self.add(name, total, self.timed(one_piece))
        self._bare()

    def _bare(self) -> None:
        """Loads and stores as NVFP4's kernels have them, with nothing in between: what the memory carries of such a
        mixture of reads and writes."""
        try:
            import cupy
        except ImportError:
            self.results.append({"what": "ceilings of loads and stores alone", "skipped": "CuPy is not installed"})
            return
        total, vectors = self.caches.total, self.caches.total // 16
        bf16, packed = self.caches.memory["dst"].address, self.caches.wires[0].address
        module, stream = cupy.RawModule(code=BARE), cupy.cuda.ExternalStream(self.stream)
        given = [np.uint64(address) for address in (bf16, packed, packed + 4 * vectors)]
        for kernel, what in (("unpack", "4.5 bits read for 16 written"), ("pack", "16 bits read for 4.5 written")):
            function = module.get_function(kernel)

            def call(function=function) -> None:
                with stream:
                    function((cuda.sm_count(0),), (1024,), (*given, np.int64(vectors)))

            self.add(f"ceiling: {what}", total, self.timed(call))

    def table(self) -> str:
        """TB/s of bf16, a line a format, cache and way, a column a limit."""
        grids: dict[tuple[str, str, str], dict[int, float]] = {}
        lines = []
        for row in self.results:
            if "max_sms" in row:
                key = (row["wire"], row["cache"], row["what"])
                grids.setdefault(key, {})[row["max_sms"]] = row["tb_s"]
            elif "tb_s" in row:
                lines.append(f"{row['what']:<48}{row['tb_s']:>8.3f} TB/s {row['timing'].median_s * 1e6:>9.0f} us")
            else:
                lines.append(str(row))
        lines.append(f"\n{'TB/s of bf16':<22}{'cache':<24}{'way':<20}" + "".join(f"{n:>8}" for n in SM_LIMITS))
        for (wire, cache, way), rates in grids.items():
            cells = "".join(f"{rates[n]:>8.3f}" if n in rates else f"{'':>8}" for n in SM_LIMITS)
            lines.append(f"{wire:<22}{cache:<24}{way:<20}{cells}")
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--total-mib", type=int, default=2048)
    parser.add_argument("--calls", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="few formats and limits, to see that all runs")
    args = parser.parse_args()
    if reason := cuda.why_unavailable():
        raise SystemExit(f"bench_cuda_formats needs a GPU: {reason}")
    devices = min(2, cuda.device_count())
    peer = devices > 1 and cuda.can_access_peer(0, 1)
    if peer:
        cuda.enable_peer_access(0, 1)
    else:
        print("no second GPU within reach: packing into a peer is left out")
    started = time.perf_counter()
    bench = Bench(Caches(args.total_mib << 20, 2 if peer else 1), args.calls, peer)
    limits = (132,) if args.quick else SM_LIMITS
    steps: list[Callable[[], None]] = [bench.ceilings]
    steps += [lambda wire=wire: bench.format(wire, limits) for wire in ("raw", *WIRES)]
    if not args.quick:
        steps += [
            lambda wire=wire, order=order, dim=dim, heads=heads: bench.format(
                wire, (132,), what=f"{order}, {heads} heads of {dim}", order=order, head_dim=dim, kv_heads=heads
            )
            for order, heads, dim in (("HND", 8, 128), ("NHD", 8, 64), ("HND", 8, 64), ("NHD", 1, 128))
            for wire in WIRES
        ]
        steps += [lambda wire=wire: bench.format(wire, (132,)) for wire in SLOW_WIRES]
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
