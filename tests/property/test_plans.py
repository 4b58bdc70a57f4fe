"""Executed plans against a slow reference that walks tokens, heads and bytes one by one.

Two random layouts of one model are joined; random block lists of a random prompt are planned; every way to
execute the plan (copy, gather and scatter in chunks, flat runs) must put the same bytes where the reference
puts them, and touch nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.kernels import PreparedPlan
from kvxfer.layout import CacheLayout, Group, GroupKind, Padding, Record, Region, Slice
from kvxfer.layout.records import (
    LATENT,
    compressor_state_record,
    cpu_attention_record,
    gated_delta_record,
    kv_sections,
    latent_record,
    paged_record,
    tiled_v_scale_record,
)
from kvxfer.plan import TransferPlan, join

RELAXED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

# --- small caches -------------------------------------------------------------------------------------------


def attention_records(style: str, tokens: int, heads: int, start: int, total: int) -> list[list[Record]]:
    """Ways to lay out one layer's keys and values: lists of slices, each a record."""
    place = {"heads": heads, "head_start": start, "total_heads": total, "entries": tokens}
    halves = kv_sections("float16", 8, together=False)
    match style:
        case "nhd" | "hnd":
            return [[paged_record("kv", halves, order=style.upper(), **place)]]
        case "content_nhd" | "content_hnd":
            sections = kv_sections("float16", 8, together=True)
            return [[paged_record("kvc", sections, order=style[-3:].upper(), **place)]]
        case "apart":
            return [
                [paged_record("k", halves[:1], **place), paged_record("v", halves[1:], order="HND", **place)]
            ]
        case "heads_outside":
            sections = kv_sections("float16", 8, together=True)
            return [
                [
                    paged_record(
                        f"h{h}", sections, entries=tokens, heads=1, head_start=start + h, total_heads=total
                    )
                    for h in range(heads)
                ]
            ]
        case "transposed":
            return [
                [
                    cpu_attention_record(
                        block_tokens=tokens,
                        kv_heads=heads,
                        head_dim=8,
                        dtype="float16",
                        head_start=start,
                        total_heads=total,
                    )
                ]
            ]
    raise AssertionError(style)


PLAIN = ("nhd", "hnd", "content_nhd", "content_hnd", "apart", "heads_outside", "transposed")


def quantised_records(
    kind: str, order: str, tokens: int, heads: int, start: int, total: int
) -> list[list[Record]]:
    if kind == "tiled":
        return [
            [
                tiled_v_scale_record(
                    block_tokens=tokens, kv_heads=heads, head_dim=32, head_start=start, total_heads=total
                )
            ]
        ]
    together = order == "content" and kind != "nvfp4"
    sections = kv_sections(kind, 32, together=together)
    record = paged_record(
        kind,
        sections,
        entries=tokens,
        heads=heads,
        order="HND" if order == "HND" else "NHD",
        head_start=start,
        total_heads=total,
    )
    return [[record]]


def cache(
    pieces: dict[str, list[Record]],
    *,
    block_tokens: int,
    num_blocks: int,
    slab: bool,
    kind: GroupKind = GroupKind.FULL,
    window: int = 0,
    gap: int = 0,
) -> CacheLayout:
    """Layers in one slab of interleaved blocks, or one after the other."""
    records: dict[str, Record] = {}
    slices, regions, padding = [], [], ()
    named = [(layer, record) for layer, several in pieces.items() for record in several]
    stride = sum(record.nbytes for _, record in named) + gap
    offset = 0
    for number, (layer, record) in enumerate(named):
        records[record.tag] = record
        region = "slab" if slab else f"r{number}"
        slices.append(
            Slice(
                layer=layer,
                region=region,
                offset=offset if slab else 0,
                block_stride=stride if slab else record.nbytes,
                record=record.tag,
            )
        )
        regions.append(Region(name=region, nbytes=num_blocks * record.nbytes))
        offset += record.nbytes
    if slab:
        regions = [Region(name="slab", nbytes=num_blocks * stride)]
        padding = (Padding(name="gap", offset=offset, nbytes=gap),) if gap else ()
    group = Group(
        name="g",
        block_tokens=0 if kind is GroupKind.STATE else block_tokens,
        num_blocks=num_blocks,
        slices=tuple(slices),
        kind=kind,
        window=window,
        padding=padding,
    )
    return CacheLayout(regions=tuple(regions), records=tuple(records.values()), groups=(group,))


@dataclass
class Side:
    """A layout with memory under it."""

    layout: CacheLayout
    memory: dict[str, np.ndarray]
    blocks: np.ndarray

    @classmethod
    def make(cls, layout: CacheLayout, blocks: np.ndarray, seed: int) -> Side:
        rng = np.random.default_rng(seed)
        memory = {r.name: rng.integers(0, 256, r.nbytes, np.uint8) for r in layout.regions}
        return cls(layout, memory, np.asarray(blocks, np.int32))

    @property
    def bases(self) -> np.ndarray:
        return np.array([self.memory[r.name].ctypes.data for r in self.layout.regions], np.uint64)

    def snapshot(self) -> dict[str, np.ndarray]:
        return {name: array.copy() for name, array in self.memory.items()}

    def restore(self, saved: dict[str, np.ndarray]) -> None:
        for name, array in saved.items():
            self.memory[name][:] = array

    def entries(self, tokens: int):
        """(layer, plane, head, entry) -> (region, byte offsets in channel order), for entries that exist."""
        (group,) = self.layout.groups
        capacity = group.block_tokens
        held = 1 if group.kind is GroupKind.STATE else tokens
        first = max(0, group.blocks_for(tokens) - len(self.blocks))
        for piece in group.slices:
            for plane in self.layout.record(piece.record).planes:
                ratio = plane.tokens_per_entry
                count = -(-held // ratio) if plane.tiled else held // ratio
                for entry in range(count):
                    token = entry * ratio
                    if group.kind is GroupKind.STATE:
                        block, row = 0, 0
                    elif group.kind is GroupKind.RING:
                        if token < tokens - capacity:
                            continue
                        block, row = 0, token % capacity
                    else:
                        block, row = token // capacity - first, token % capacity // ratio
                        if block < 0:
                            continue
                    base = piece.offset + int(self.blocks[block]) * piece.block_stride + plane.offset
                    for head in range(plane.heads):
                        places = [
                            base
                            + row * plane.entry_stride
                            + head * plane.head_stride
                            + c * plane.channel_stride
                            + b
                            for c in range(plane.channels)
                            for b in range(plane.unit_bytes)
                        ]
                        yield (
                            (piece.layer, plane.name, plane.head_start + head, entry),
                            (piece.region, places),
                        )

    def listed(self) -> dict[str, np.ndarray]:
        """True for the bytes of the slices of the listed blocks."""
        masks = {name: np.zeros(len(array), bool) for name, array in self.memory.items()}
        for piece in self.layout.groups[0].slices:
            nbytes = self.layout.record(piece.record).nbytes
            for block in self.blocks:
                start = piece.offset + int(block) * piece.block_stride
                masks[piece.region][start : start + nbytes] = True
        return masks


def check(sources: list[Side], dst: Side, tokens: int, data) -> None:
    """Plan, execute in three ways, compare with the reference."""
    before = dst.snapshot()
    expected = dst.snapshot()
    exact = dst.snapshot()
    held: dict[tuple, bytes] = {}
    for src in sources:
        for key, (region, places) in src.entries(tokens):
            held.setdefault(key, bytes(src.memory[region][places]))
    wanted = 0
    for key, (region, places) in dst.entries(tokens):
        if key in held:
            expected[region][places] = np.frombuffer(held[key], np.uint8)
            exact[region][places] = 1
            wanted += len(places)
    joins = join([src.layout for src in sources], dst.layout)
    plans = [(j, j.plan({"g": sources[j.source].blocks}, {"g": dst.blocks}, tokens=tokens)) for j in joins]
    for j, plan in plans:
        most = j.most_bytes({"g": len(dst.blocks)}, tokens=tokens)
        assert plan.wire_bytes <= most[0] and plan.largest_segment_bytes <= most[1]
    allowed = dst.listed()
    whole = any((part.rows["tokens_per_entry"] == 0).any() for _, plan in plans for part in plan.parts)
    if not whole:
        assert sum(plan.nbytes for _, plan in plans) == wanted
    results = []
    limit = data.draw(st.sampled_from([1, 100, 1 << 20]), label="chunk bytes")
    for execute in (by_copy, by_packing, by_runs):
        for j, plan in plans:
            execute(plan, sources[j.source].bases, dst.bases, limit)
        results.append(dst.snapshot())
        dst.restore(before)
    for name in before:
        for result in results[1:]:
            assert np.array_equal(result[name], results[0][name])
        got = results[0][name]
        assert np.array_equal(got[~allowed[name]], before[name][~allowed[name]]), "a byte outside was touched"
    for key, (region, places) in dst.entries(tokens):
        if key in held:
            assert bytes(results[0][region][places]) == held[key], key
        elif not whole:
            assert np.array_equal(results[0][region][places], before[region][places]), key
    if not whole:
        for name in before:
            assert np.array_equal(results[0][name], expected[name])


def by_copy(plan: TransferPlan, src: np.ndarray, dst: np.ndarray, limit: int) -> None:
    prepared = PreparedPlan(plan)
    for chunk in plan.chunks(limit):
        prepared.copy(chunk, src, dst, threads=2)


def by_packing(plan: TransferPlan, src: np.ndarray, dst: np.ndarray, limit: int) -> None:
    prepared = PreparedPlan(plan)
    total = 0
    for chunk in plan.chunks(limit):
        wire = np.full(chunk.wire_bytes + 32, 0xEE, np.uint8)
        prepared.gather(chunk, src, wire.ctypes.data + 16)
        prepared.scatter(chunk, wire.ctypes.data + 16, dst)
        assert (wire[:16] == 0xEE).all() and (wire[-16:] == 0xEE).all()
        total += chunk.wire_bytes
    assert total == plan.wire_bytes


def by_runs(plan: TransferPlan, src: np.ndarray, dst: np.ndarray, limit: int) -> None:
    import ctypes

    runs = plan.runs(src, dst)
    assert int(runs[:, 2].sum()) == plan.nbytes
    for source, target, nbytes in runs.tolist():
        ctypes.memmove(target, source, nbytes)


@st.composite
def block_lists(draw, num_blocks: int, needed: int, least: int) -> np.ndarray:
    count = draw(st.integers(least, needed))
    order = draw(st.permutations(range(num_blocks)))
    return np.array(order[:count], np.int32)


@st.composite
def ranks(draw, total: int) -> list[tuple[int, int]]:
    """(first head, heads) of every rank: sharded, or replicated where there are more ranks than heads."""
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if total % n == 0 or n % total == 0]))
    return [(rank * total // tp, max(1, total // tp)) for rank in range(tp)]


# --- properties ---------------------------------------------------------------------------------------------


@RELAXED
@given(st.data())
def test_attention_between_any_two_layouts(data):
    total = data.draw(st.sampled_from([1, 2, 4]), label="heads")
    quantised = data.draw(st.sampled_from([None, None, "nvfp4", "fp8_per_token_head", "tiled"]))
    layers = ["a", "b"]
    tokens = data.draw(st.integers(1, 40), label="tokens")

    def side(start: int, heads: int, block: int, style: str) -> dict[str, list[Record]]:
        if quantised:
            order = {"hnd": "HND", "content_nhd": "content"}.get(style, "NHD")
            (pieces,) = quantised_records(quantised, order, block, heads, start, total)
        else:
            (pieces,) = attention_records(style, block, heads, start, total)
        return {layer: pieces for layer in layers}

    sizes = st.sampled_from([4, 8, 12, 16] if quantised == "tiled" else [1, 3, 4, 6, 16])
    sides = []
    for role in ("source", "destination"):
        block = data.draw(sizes, label=f"{role} block")
        style = data.draw(st.sampled_from(PLAIN), label=f"{role} style")
        needed = -(-tokens // block)
        num_blocks = needed + data.draw(st.integers(0, 2))
        slab = data.draw(st.booleans())
        held = data.draw(ranks(total), label=f"{role} ranks")
        if role == "destination":
            held = [data.draw(st.sampled_from(held))]
        group = [
            Side.make(
                cache(
                    side(start, heads, block, style),
                    block_tokens=block,
                    num_blocks=num_blocks,
                    slab=slab,
                    gap=data.draw(st.sampled_from([0, 7])) if slab else 0,
                ),
                data.draw(block_lists(num_blocks, needed, needed if role == "source" else 0)),
                seed,
            )
            for seed, (start, heads) in enumerate(held)
        ]
        sides.append(group)
    # Replicated heads hold the same bytes on every rank that has them.
    known: dict[tuple, bytes] = {}
    for src in sides[0]:
        for key, (region, places) in src.entries(tokens):
            src.memory[region][places] = np.frombuffer(
                known.setdefault(key, bytes(src.memory[region][places])), np.uint8
            )
    check(sides[0], sides[1][0], tokens, data)


@RELAXED
@given(st.data())
def test_latents_between_byte_orders_and_block_sizes(data):
    family = data.draw(st.sampled_from(["v41.fp8_ds_mla.528", "v41.nvfp4_ds_mla.288", "v4.fp8_ds_mla.584"]))
    names = [name for name in LATENT if name.startswith(family)]
    ratios = data.draw(st.sampled_from([(1,), (2,), (1, 2), (4,)]))
    tokens = data.draw(st.integers(1, 50), label="tokens")
    sides = []
    for seed, role in enumerate(("source", "destination")):
        block = data.draw(st.sampled_from([4, 8, 12, 16]), label=f"{role} block")
        name = data.draw(st.sampled_from(names))
        multiple = data.draw(st.sampled_from([1, 512]))
        pieces = {
            f"r{ratio}": [
                latent_record(name, entries=block // ratio, tokens_per_entry=ratio, page_multiple=multiple)
            ]
            for ratio in ratios
        }
        needed = -(-tokens // block)
        layout = cache(pieces, block_tokens=block, num_blocks=needed + 1, slab=data.draw(st.booleans()))
        blocks = data.draw(block_lists(needed + 1, needed, needed if role == "source" else 0))
        sides.append(Side.make(layout, blocks, seed))
    check([sides[0]], sides[1], tokens, data)


@RELAXED
@given(st.data())
def test_sliding_windows(data):
    window = data.draw(st.integers(1, 24), label="window")
    tokens = data.draw(st.integers(1, 60), label="tokens")
    sides = []
    for seed, role in enumerate(("source", "destination")):
        block = data.draw(st.sampled_from([1, 3, 4, 8]), label=f"{role} block")
        record = paged_record(
            "kv", kv_sections("float16", 8, together=data.draw(st.booleans())), entries=block, heads=2
        )
        layout = cache(
            {"a": [record]},
            block_tokens=block,
            num_blocks=70,
            slab=True,
            kind=GroupKind.SLIDING,
            window=window,
        )
        (group,) = layout.groups
        needed = group.blocks_for(tokens) - group.first_needed_token(tokens) // block
        most = min(group.blocks_for(tokens), group.tail_blocks)
        least = most if role == "source" else data.draw(st.sampled_from([0, needed]))
        sides.append(Side.make(layout, data.draw(block_lists(70, most, least)), seed))
    src, dst = sides
    check([src], dst, tokens, data)


@RELAXED
@given(st.data())
def test_rings_of_unequal_capacity(data):
    tokens = data.draw(st.integers(1, 60), label="tokens")
    sides = []
    for seed in range(2):
        capacity = data.draw(st.sampled_from([2, 5, 8, 16]))
        layout = cache(
            {"a": [compressor_state_record("r2", rows=capacity, row_floats=4)]},
            block_tokens=capacity,
            num_blocks=4,
            slab=True,
            kind=GroupKind.RING,
        )
        sides.append(Side.make(layout, data.draw(block_lists(4, 1, 1)), seed))
    check([sides[0]], sides[1], tokens, data)


@RELAXED
@given(st.data())
def test_linear_attention_state_between_ranks(data):
    sides = []
    for role in ("source", "destination"):
        tp = data.draw(st.sampled_from([1, 2, 4]), label=f"{role} tp")
        page = data.draw(st.sampled_from([0, 4096]))
        picked = range(tp) if role == "source" else [data.draw(st.integers(0, tp - 1))]
        sides.append(
            [
                Side.make(
                    cache(
                        {
                            "a": [
                                gated_delta_record(
                                    key_heads=4,
                                    value_heads=8,
                                    key_dim=4,
                                    value_dim=4,
                                    conv_rows=3,
                                    dtype="bfloat16",
                                    state_dtype="float32",
                                    tp=tp,
                                    rank=rank,
                                    page_bytes=page,
                                )
                            ]
                        },
                        block_tokens=0,
                        num_blocks=3,
                        slab=False,
                        kind=GroupKind.STATE,
                    ),
                    data.draw(block_lists(3, 1, 1)),
                    seed=rank,
                )
                for rank in picked
            ]
        )
    check(sides[0], sides[1][0], 17, data)
