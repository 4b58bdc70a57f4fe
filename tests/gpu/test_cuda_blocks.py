"""Requests of whole blocks on one GPU, byte for byte what the CPU copies: with the extension's stand-in where there is
none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer import cuda
from kvxfer.cuda.lanes import Ending, Lanes
from kvxfer.cuda.native import native
from kvxfer.cuda.pairing import CudaPairing
from kvxfer.errors import InvalidRequest, MissingExtra
from kvxfer.kernels import HostPairing
from kvxfer.layout import CacheLayout
from kvxfer.models import layout_for
from kvxfer.plan import check_blocks, join
from kvxfer.plan.request import BlockTable, pairing_of
from kvxfer.ticket import Record
from tests.gpu import stand_in
from tests.gpu.families import host_addresses
from tests.gpu.memory import Region, addresses

try:
    native()
except MissingExtra as reason:
    pytest.skip(str(reason), allow_module_level=True)

pytestmark = pytest.mark.gpu


def paged(**changes: object) -> CacheLayout:
    options = {"num_blocks": 48, "block_tokens": 16, "kv_heads": 4, "head_dim": 64, "dtype": "float16"}
    return CacheLayout.paged(layers=["a", "b", "c"], **(options | changes))


LAYOUTS = {
    "three layers": paged,
    "odd sizes": lambda: paged(kv_heads=3, head_dim=3, block_tokens=1),
    "many blocks": lambda: paged(num_blocks=2000, kv_heads=1, head_dim=8),  # tables that are copied to the device
    "more layers than parts of a launch": lambda: CacheLayout.paged(
        layers=[f"l{i}" for i in range(40)], num_blocks=40, block_tokens=16, kv_heads=1, head_dim=32, dtype="float16"
    ),
    "nine groups": lambda: layout_for("deepseek-ai/DeepSeek-V4.1-Flash", num_blocks=48),
}


@pytest.fixture(scope="module")
def lanes() -> Iterator[Lanes]:
    if cuda.available():
        yield Lanes(0)
        return
    with stand_in.installed():
        yield Lanes(0)


class Case:
    """A request at random blocks; what the CPU makes of it, and both sides on the device."""

    def __init__(self, layout: CacheLayout, lanes: Lanes, *, share: float = 1.0) -> None:
        rng = np.random.default_rng(0)
        self.tokens = int(layout.groups[0].block_tokens * layout.groups[0].num_blocks * share)
        lists = []
        for _ in range(2):
            ids, lists_of = rng.permutation(min(g.num_blocks for g in layout.groups)).astype(np.int32), {}
            for group in layout.groups:
                count = min(group.blocks_for(self.tokens), group.tail_blocks)
                lists_of[group.name], ids = ids[:count], ids[count:]
            lists.append(lists_of)
        [joined] = join([layout], layout)
        self.pairing, self.table, self.into = pairing_of(joined), BlockTable(layout), lists[1]
        self.record = Record.of(
            self.tokens, check_blocks(layout, lists[0], tokens=self.tokens, role="source")
        ).encode()
        src = [rng.integers(0, 256, region.nbytes, np.uint8) for region in layout.regions]
        self.expected = [np.full_like(array, 0xEE) for array in src]
        host = HostPairing(self.pairing, host_addresses(src), host_addresses(self.expected))
        request = self.request(host)
        assert host.copy(request, 1 << 40) == request.nbytes > 0
        self.src = [Region(array) for array in src]
        self.dst = [Region(np.full_like(array, 0xEE)) for array in src]
        self.on_gpu = CudaPairing(self.pairing, lanes, addresses(self.src), addresses(self.dst), max_sms=8)

    def request(self, pairing: HostPairing | CudaPairing) -> object:
        dst = self.table.check(self.into, tokens=self.tokens, role="destination")
        return pairing.request(self.record, dst, tokens=self.tokens)

    def assert_moved(self) -> None:
        for region, expected in zip(self.dst, self.expected, strict=True):
            assert np.array_equal(region.read()[: expected.nbytes], expected)


def landed(flight: object) -> None:
    for _ in range(30):
        if flight.has_landed(1.0):
            flight.end()
            return
    raise AssertionError("it has not landed")


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_land_where_the_cpu_copies_them(lanes, name, share):
    layout = LAYOUTS[name]()
    if len(layout.groups) > 1:
        share /= 4  # groups share the pool
    case = Case(layout, lanes, share=share)
    [lane] = lanes.take(1)
    landed(case.on_gpu.launch(case.request(case.on_gpu), lane, after=(), ending=Ending()))
    case.assert_moved()


def test_the_device_reads_the_leases_word_and_opens_the_gate(lanes):
    case = Case(paged(), lanes)
    with cuda.PinnedMemory(64, device=0) as word:
        word.array[:8] = np.frombuffer((12345).to_bytes(8, "little"), np.uint8)
        gate, ending = lanes.gates.take(), Ending(lease_word=word.address)
        ending.gate = gate
        [lane] = lanes.take(1)
        landed(case.on_gpu.launch(case.request(case.on_gpu), lane, after=(), ending=ending))
        assert ending.seen == 12345 and gate.is_open()
    case.assert_moved()


def test_lanes_are_used_again_and_tables_do_not_mix(lanes):
    cases = [Case(LAYOUTS[name](), lanes) for name in ("three layers", "many blocks", "odd sizes") for _ in range(2)]
    taken = lanes.take(2)
    for first, second in zip(cases[::2], cases[1::2], strict=True):
        flights = [
            case.on_gpu.launch(case.request(case.on_gpu), lane, after=(), ending=Ending())
            for case, lane in zip((first, second), taken, strict=True)
        ]
        for flight in flights:
            landed(flight)
        taken = lanes.take(2)
        first.assert_moved()
        second.assert_moved()
    lanes.give_back(taken)


def test_bases_are_checked(lanes):
    case = Case(paged(), lanes)
    with pytest.raises(InvalidRequest, match="src_bases"):
        CudaPairing(case.pairing, lanes, addresses(case.src)[:1], addresses(case.dst), max_sms=0)
