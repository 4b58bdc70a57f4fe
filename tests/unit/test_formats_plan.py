"""Packed plans: every layout pair and every instruction set gives the reference's bytes, and writes nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer import formats, kernels
from kvxfer.errors import InvalidBlocks, InvalidRequest, LayoutMismatch, NonFiniteValue, UnknownGroup
from kvxfer.formats import elements, reference
from kvxfer.layout import CacheLayout, Group, Plane, Record, Region, Slice
from kvxfer.layout.records import (
    Field,
    cpu_attention_record,
    kv_sections,
    latent_record,
    paged_record,
    tiled_v_scale_record,
)

GUARD = 256
ISAS = ("portable", "avx2", "avx512")
NAMES = (
    "fp8_e4m3",
    "fp8_e4m3:per_128",
    "fp8_e4m3:tensor,scale=0.5",
    "nvfp4",
    "nvfp4:four_over_six",
    "nvfp4:scale=0.3",
    "mxfp4",
    "mxfp4:ceil",
    "mxfp4:even,hadamard",
    "mxfp8",
    "int4",
    "int4:asym,32",
    "int4:128,hadamard",
    "mixed",
    "nvfp4:first=5,last=9",
)


@pytest.fixture(params=ISAS)
def isa(request):
    before = kernels.cpu_isa()
    try:
        kernels.choose_cpu_isa(request.param)
    except InvalidRequest:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    kernels.choose_cpu_isa(before)


def layout_of(record, *, block_tokens: int, num_blocks: int = 24, layers: int = 2) -> CacheLayout:
    """Layers of one record, each in a region of its own."""
    names = [f"layer.{i}" for i in range(layers)]
    slices = tuple(Slice(layer=n, region=n, offset=0, block_stride=record.nbytes, record=record.tag) for n in names)
    return CacheLayout(
        regions=tuple(Region(name=n, nbytes=num_blocks * record.nbytes) for n in names),
        records=(record,),
        groups=(Group(name="full", block_tokens=block_tokens, num_blocks=num_blocks, slices=slices),),
    )


def attention(kv_dtype="bfloat16", *, block_tokens=16, heads=3, head_dim=64, order="NHD", together=False, **more):
    record = paged_record(
        f"kv.{kv_dtype}",
        kv_sections(kv_dtype, head_dim, together=together),
        entries=block_tokens,
        heads=heads,
        order=order,
        **more,
    )
    return layout_of(record, block_tokens=block_tokens)


def latent(name: str, *, block_tokens=16, ratio=1):
    record = latent_record(name, entries=block_tokens // ratio, tokens_per_entry=ratio)
    return layout_of(record, block_tokens=block_tokens)


class Memory:
    """Regions of a layout with guards around them."""

    def __init__(self, layout: CacheLayout, fill: int = 0) -> None:
        self.buffers = [np.full(r.nbytes + 2 * GUARD, 0xA5, np.uint8) for r in layout.regions]
        self.regions = [buffer[GUARD:-GUARD] for buffer in self.buffers]
        for region in self.regions:
            region[:] = fill
        self.bases = kernels.bases([region.ctypes.data for region in self.regions])

    def check_guards(self) -> None:
        for buffer in self.buffers:
            assert (buffer[:GUARD] == 0xA5).all() and (buffer[-GUARD:] == 0xA5).all()


def write_numbers(join, memory: Memory, side: str, blocks: np.ndarray, seed: int = 0) -> None:
    """Random finite numbers, stored as the layout's records store them, in all of `blocks`."""
    rng = np.random.default_rng(seed)
    for row in join.rows:
        quantity = getattr(row, side)
        for block in blocks.tolist():
            segment = (block, block, 0, 0, getattr(row, f"{side}_group").block_tokens)
            vectors = reference.vectors_of(row, segment)
            if quantity.is_number:
                x = rng.standard_normal((vectors, quantity.dim)) * np.exp2(rng.integers(-6, 6, (vectors, 1)))
                codes, scales = quantity.codec.pack(x.astype(np.float32))
            else:
                codes = rng.integers(0, 256, (vectors, quantity.dim), np.uint8)
                scales = np.zeros((vectors, 0), np.uint8)
            reference.write_vectors(row, side, quantity, segment, memory.regions, codes, scales)


def run_both(src, dst, wire, *, tokens=100, chunk_bytes=9000, prefix=0, **options):
    """Carry a plan out by the kernels and by the reference; all bytes must be equal. Returns join and memories."""
    (join,) = formats.join_packed([src], dst, wire, **options)
    rng = np.random.default_rng(5)
    counts = [group.groups[0].blocks_for(tokens) for group in (src, dst)]
    src_ids = rng.permutation(src.groups[0].num_blocks)[: counts[0]]
    dst_ids = rng.permutation(dst.groups[0].num_blocks)[: counts[1] - prefix]
    source, ours, theirs = Memory(src), Memory(dst), Memory(dst)
    write_numbers(join, source, "src", src_ids)
    plan = join.plan({"full": src_ids}, {"full": dst_ids}, tokens=tokens)
    packer = join.plan({"full": src_ids}, {"full": len(dst_ids)}, tokens=tokens)
    unpacker = join.plan({"full": len(src_ids)}, {"full": dst_ids}, tokens=tokens)
    assert plan.plan_id == packer.plan_id == unpacker.plan_id
    chunks = list(plan.chunks(chunk_bytes))
    assert chunks == list(packer.chunks(chunk_bytes)) == list(unpacker.chunks(chunk_bytes))
    assert sum(chunk.wire_bytes for chunk in chunks) == plan.wire_bytes
    most = join.most_bytes({"full": len(dst_ids)}, tokens=tokens)
    assert plan.wire_bytes <= most[0] and plan.largest_segment_bytes <= most[1]
    for number, chunk in enumerate(chunks):
        wire_bytes = np.full(chunk.wire_bytes + 2 * GUARD, 0xA5, np.uint8)
        address = wire_bytes.ctypes.data + GUARD
        kernels.PreparedPackedPlan(packer).pack(chunk, source.bases, address, threads=2)
        expected = reference.pack(join, plan, chunk, source.regions)
        assert (wire_bytes[GUARD:-GUARD] == expected).all()
        assert (wire_bytes[:GUARD] == 0xA5).all() and (wire_bytes[-GUARD:] == 0xA5).all()
        kernels.PreparedPackedPlan(unpacker).unpack(chunk, address, ours.bases, threads=2)
        reference.unpack(join, plan, chunk, expected, theirs.regions)
        assert plan.header(number, chunk).payload_bytes == chunk.wire_bytes
    for a, b in zip(ours.regions, theirs.regions, strict=True):
        assert (a == b).all()
    ours.check_guards()
    return join, plan, source, ours


def values(join, memory: Memory, side: str, plan) -> dict[tuple[str, str], np.ndarray]:
    """All values that a plan moves, as floats in token order, by layer and quantity."""
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for row in join.rows:
        quantity = getattr(row, side)
        for part in plan.parts:
            if not any(row.table[i].tobytes() == entry.tobytes() for i in (0, 1) for entry in part.rows):
                continue
            s = part.segments
            for segment in zip(s.src_block, s.dst_block, s.src_token, s.dst_token, s.tokens, strict=True):
                read = reference.read_vectors(row, side, quantity, tuple(map(int, segment)), memory.regions)
                found.setdefault((row.layer, quantity.name), []).append(quantity.codec.unpack(*read))
    return {key: np.concatenate(pieces) for key, pieces in found.items()}


# --- formats on the wire between equal cache formats ---


@pytest.mark.parametrize("name", NAMES)
def test_every_format_between_unequal_layouts(name, isa):
    run_both(attention(order="NHD"), attention(order="HND", block_tokens=8, together=True), name)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", "mxfp4:ceil", "int4:asym,32", "mxfp8"])
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
def test_head_dims(name, head_dim, isa):
    layout = attention("float16", head_dim=head_dim, heads=2)
    run_both(layout, attention("float32", head_dim=head_dim, heads=2), name, tokens=20)


@pytest.mark.parametrize("name", ["nvfp4", "mixed"])
def test_a_prefix_that_is_there_already_does_not_move(name):
    _, plan, _, _ = run_both(attention(), attention(), name, tokens=100, prefix=3)
    assert plan.nbytes == 2 * 52 * 2 * 3 * 64 * 2


def test_transposed_keys_of_a_cpu_build(isa):
    record = cpu_attention_record(block_tokens=16, kv_heads=3, head_dim=64, dtype="float32")
    run_both(attention("bfloat16"), layout_of(record, block_tokens=16), "nvfp4", tokens=40)
    run_both(layout_of(record, block_tokens=16), attention("bfloat16"), "mxfp4", tokens=40)


def test_values_stay_within_the_bound():
    join, plan, source, destination = run_both(attention(), attention(block_tokens=8), "mixed")
    before, after = values(join, source, "src", plan), values(join, destination, "dst", plan)
    wire = formats.parse("mixed")
    for key, x in before.items():
        error = np.abs(after[key] - x)
        codec = wire.codec(key[1], x.shape[1])
        assert 0 < error.max() and (error <= codec.error_bound(x) + np.abs(x) * 2**-8).all()


def test_first_and_last_tokens_stay_as_they_are():
    join, plan, source, destination = run_both(attention(), attention(block_tokens=8), "nvfp4:first=5,last=9")
    before, after = values(join, source, "src", plan), values(join, destination, "dst", plan)
    assert len(plan.parts) == 3
    for key, x in before.items():
        same = (after[key] == x).all(axis=1).reshape(100, 3).all(axis=1)
        assert same[:5].all() and same[-9:].all() and not same[5:-9].any()


@pytest.mark.parametrize("tokens", [1, 4, 14, 15, 40])
def test_short_prompts_with_raw_ends(tokens):
    run_both(attention(), attention(block_tokens=8), "mxfp4:first=5,last=9", tokens=tokens)


# --- conversion between cache formats ---


@pytest.mark.parametrize("there", ["fp8", "fp8_per_token_head", "nvfp4", "float16", "float32"])
@pytest.mark.parametrize("wire", ["raw", "nvfp4", "fp8_e4m3"])
def test_attention_caches_convert_both_ways(there, wire, isa):
    for src, dst in (
        (attention(), attention(there)),
        (attention(there), attention(block_tokens=8, order="HND")),
    ):
        run_both(src, dst, wire, tokens=50)


@pytest.mark.parametrize(
    ("plain", "record"),
    [
        ("mla.bf16", "mla.fp8"),
        ("mla.bf16", "v32.fp8_ds_mla.656"),
        ("mla.bf16", "v32.nvfp4_ds_mla.352"),
        ("mla.fp16", "v32.nvfp4_ds_mla.352"),
        ("indexer.fp8.132", "indexer.fp8_mx.132"),
        ("v4.bf16.1024", "v41.fp8_ds_mla.528.segregated"),
        ("v4.bf16.1024", "v41.fp8_ds_mla.528.interleaved"),
        ("v4.bf16.1024", "v41.nvfp4_ds_mla.288.segregated"),
        ("v4.bf16.1024", "v41.nvfp4_ds_mla.288.interleaved"),
    ],
)
def test_latent_records_convert_both_ways(plain, record, isa):
    run_both(latent(plain), latent(record, block_tokens=8), "raw", tokens=50)
    join, plan, source, destination = run_both(latent(record), latent(plain), "raw", tokens=50)
    before, after = values(join, source, "src", plan), values(join, destination, "dst", plan)
    if plain.startswith("indexer"):
        return
    for key, x in before.items():  # widening: exact but for the plain type's own rounding
        assert (np.abs(after[key] - x) <= np.abs(x) * 2**-8).all()


def test_the_584_byte_record_has_a_spare_scale_byte(isa):
    """448 channels in blocks of 64 are seven scales; the eighth byte is nobody's and is not written."""
    sections = ((Field("latent", "bfloat16", 896), Field("rope", "bfloat16", 128)),)
    plain = layout_of(paged_record("mla.bf16.448", sections, entries=16), block_tokens=16)
    record = latent("v4.fp8_ds_mla.584")
    join, plan, _, destination = run_both(plain, record, "raw", tokens=50)
    assert {row.dst.codec.block for row in join.rows if row.dst.name == "latent"} == {64}
    scales = record.records[0].planes[-1]
    block = int(plan.parts[0].segments.dst_block[0]) * record.records[0].nbytes + scales.offset
    assert destination.regions[0][block + 7] == 0
    run_both(record, plain, "raw", tokens=50)


def test_indexer_keys_convert(isa):
    """But no wire format compresses them."""
    fp8, mxfp4 = latent("indexer.fp8.132"), latent("indexer.mxfp4.68")
    join, _, _, _ = run_both(fp8, mxfp4, "nvfp4", tokens=50)
    assert join.rows[0].wire.vector_bytes(128) == 68
    run_both(mxfp4, fp8, "raw", tokens=50)


def test_records_of_the_same_numbers_in_another_order_pass_untouched():
    segregated, interleaved = (latent(f"v41.nvfp4_ds_mla.288.{order}") for order in ("segregated", "interleaved"))
    join, plan, _, _ = run_both(segregated, interleaved, "nvfp4", tokens=50)
    assert plan.nbytes == 50 * 2 * 288
    assert all(row.wire.same_bytes(row.src.codec, 512) for row in join.rows)


def test_permuted_scales_against_linear_ones(isa):
    """Scale s of the 352-byte record lies at 8 * (s % 4) + s // 4, on the wire at s."""
    record = latent("v32.nvfp4_ds_mla.352")
    join, plan, source, destination = run_both(record, latent("mla.bf16"), "raw", tokens=30)
    row = next(row for row in join.rows if row.src.name == "latent")
    segment = (int(plan.parts[0].segments.src_block[0]), 0, 0, 0, 1)
    _, linear = reference.read_vectors(row, "src", row.src, segment, source.regions)
    start = segment[0] * record.records[0].nbytes + row.src.scales.offset
    stored = source.regions[0][start : start + 32]
    assert [stored[8 * (s % 4) + s // 4] for s in range(32)] == linear[0].tolist()
    before, after = values(join, source, "src", plan), values(join, destination, "dst", plan)
    assert all((before[key] == after[key]).all() for key in before)


def test_value_scales_in_tiles_of_four_tokens(isa):
    tiled = layout_of(tiled_v_scale_record(block_tokens=16, kv_heads=3, head_dim=64), block_tokens=16)
    for src, dst in (
        (attention(), tiled),
        (tiled, attention()),
        (attention("nvfp4"), tiled),
        (tiled, attention("nvfp4")),
    ):
        run_both(src, dst, "raw", tokens=45)


def test_compressed_entries(isa):
    src, dst = (
        latent("v4.bf16.1024", ratio=2),
        latent("v41.nvfp4_ds_mla.288.interleaved", block_tokens=32, ratio=2),
    )
    _, plan, _, _ = run_both(src, dst, "raw", tokens=45)
    assert plan.nbytes == 2 * 22 * 1024


def test_the_wire_carries_the_smallest_of_the_three_forms():
    def wire_of(src, dst, name):
        (join,) = formats.join_packed([attention(src)], attention(dst), name)
        row = next(row for row in join.rows if row.src.name == "k")
        return row.wire.vector_bytes(64)

    assert wire_of("bfloat16", "nvfp4", "raw") == 36
    assert wire_of("nvfp4", "bfloat16", "raw") == 36
    assert wire_of("bfloat16", "fp8", "nvfp4") == 36
    assert wire_of("fp8", "bfloat16", "fp8_e4m3") == 64
    assert wire_of("bfloat16", "bfloat16", "mxfp4") == 34
    assert wire_of("nvfp4", "nvfp4", "mxfp8") == 36


def test_a_layers_own_scale(isa):
    """A per-tensor fp8 cache keeps its scale outside the blocks; both ends know it."""
    scales = {f"layer.{i}": {"k": 0.25, "v": 2.0} for i in range(2)}
    join, plan, source, destination = run_both(attention(), attention("fp8"), "raw", dst_scales=scales)
    before, after = values(join, source, "src", plan), values(join, destination, "dst", plan)
    for key, x in before.items():
        g = scales[key[0]][key[1]]
        bound = np.maximum(np.maximum(np.abs(x) / 16, g / 1024), np.abs(x) - 448 * g)
        assert (np.abs(after[key] - x) <= bound * 1.001).all()
    run_both(attention("fp8"), attention(), "raw", src_scales=scales)
    run_both(attention("fp8"), attention("fp8"), "raw", src_scales=scales)


def test_tensor_parallel_ranks_fill_their_heads():
    whole = attention(heads=4)
    ranks = [attention("nvfp4", heads=2, head_start=2 * i, total_heads=4) for i in range(2)]
    for rank in ranks:
        (join,) = formats.join_packed([whole], rank, "raw")
        assert {row.heads for row in join.rows} == {2}
    joins = formats.join_packed(ranks, whole, "raw")
    assert [join.source for join in joins] == [0, 1]
    with pytest.raises(LayoutMismatch, match=r"lack heads 2\.\.4"):
        formats.join_packed(ranks[:1], whole, "nvfp4")


# --- raw, refusals, errors ---


def test_raw_is_the_plain_plan():
    layout = attention()
    (join,) = formats.join_packed([layout], attention(block_tokens=8), "raw")
    plan = join.plan({"full": [3, 1]}, {"full": [1, 2, 3]}, tokens=20)
    assert plan.raw is not None and plan.nbytes == plan.wire_bytes == plan.raw.wire_bytes
    source, wire, destination = Memory(layout), np.zeros(plan.wire_bytes, np.uint8), Memory(join.dst)
    rng = np.random.default_rng(0)
    for region in source.regions:
        region[:] = rng.integers(0, 256, region.size, np.uint8)
    prepared = kernels.PreparedPackedPlan(plan)
    position = wire.ctypes.data
    for chunk in plan.chunks(4096):
        prepared.pack(chunk, source.bases, position)
        prepared.unpack(chunk, position, destination.bases)
        position += chunk.wire_bytes
    whole = kernels.PreparedPlan(plan.raw)
    expected = Memory(join.dst)
    for chunk in plan.raw.chunks(1 << 30):
        whole.copy(chunk, source.bases, expected.bases)
    assert all((a == b).all() for a, b in zip(destination.regions, expected.regions, strict=True))


def test_what_cannot_be_converted_is_refused_field_by_field():
    with pytest.raises(LayoutMismatch, match="values a head: source 64, destination 128"):
        formats.join_packed([attention()], attention(head_dim=128), "nvfp4")
    with pytest.raises(LayoutMismatch, match="there is no conversion"):
        formats.join_packed([attention()], attention("int8_per_token_head"), "nvfp4")
    with pytest.raises(LayoutMismatch, match="no source has it"):
        formats.join_packed([attention()], latent("mla.bf16"), "raw")


def test_missing_layers_are_named_when_allowed():
    layout = attention()
    small = layout_of(layout.records[0], block_tokens=16, layers=1)
    with pytest.raises(LayoutMismatch, match=r"layer\.1"):
        formats.join_packed([small], layout, "nvfp4")
    (join,) = formats.join_packed([small], layout, "nvfp4", allow_missing=True)
    assert join.missing == ("layer.1",)
    (join,) = formats.join_packed([layout], layout, "nvfp4", layers=["layer.1"])
    assert {row.layer for row in join.rows} == {"layer.1"}


def test_one_layer_of_a_plan():
    (join,) = formats.join_packed([attention()], attention(), "nvfp4")
    blocks = {"full": [0, 1]}
    whole = join.plan(blocks, blocks, tokens=20)
    one = join.plan(blocks, blocks, tokens=20, layer="layer.1")
    assert 2 * one.wire_bytes == whole.wire_bytes and one.plan_id != whole.plan_id


def test_block_lists_are_checked():
    (join,) = formats.join_packed([attention()], attention(), "nvfp4")
    with pytest.raises(InvalidBlocks):
        join.plan({"full": 3}, {"full": [0, 1]}, tokens=20)
    with pytest.raises(InvalidBlocks):
        join.plan({"full": 2}, {"full": [0, 0]}, tokens=20)
    with pytest.raises(UnknownGroup):
        join.plan({}, {"full": [0, 1]}, tokens=20)


def test_a_plan_without_block_ids_cannot_run_on_that_side():
    (join,) = formats.join_packed([attention()], attention(), "nvfp4")
    plan = join.plan({"full": 2}, {"full": 2}, tokens=20)
    prepared = kernels.PreparedPackedPlan(plan)
    (chunk,) = plan.chunks(1 << 30)
    memory, wire = Memory(join.src), np.zeros(plan.wire_bytes, np.uint8)
    with pytest.raises(InvalidRequest, match="cannot pack"):
        prepared.pack(chunk, memory.bases, wire.ctypes.data)
    with pytest.raises(InvalidRequest, match="cannot unpack"):
        prepared.unpack(chunk, wire.ctypes.data, memory.bases)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3:tensor", "nvfp4", "mxfp4:hadamard", "int4", "int4:asym"])
@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFFC1])
def test_what_is_not_finite(name, bad, isa):
    layout = attention()
    (join,) = formats.join_packed([layout], layout, name)
    plan = join.plan({"full": [2]}, {"full": [3]}, tokens=16)
    source, ours, theirs = Memory(layout), Memory(layout), Memory(layout)
    write_numbers(join, source, "src", np.array([2]))
    source.regions[1].view(np.uint16)[2 * layout.records[0].nbytes // 2 + 77] = bad
    prepared = kernels.PreparedPackedPlan(plan)
    (chunk,) = plan.chunks(1 << 30)
    wire = np.zeros(chunk.wire_bytes, np.uint8)
    with pytest.raises(NonFiniteValue, match="wire='raw'"):
        prepared.pack(chunk, source.bases, wire.ctypes.data)
    prepared.pack(chunk, source.bases, wire.ctypes.data, check=False)
    expected = reference.pack(join, plan, chunk, source.regions, check=False)
    assert (wire == expected).all()
    prepared.unpack(chunk, wire.ctypes.data, ours.bases)
    with np.errstate(all="ignore"):
        reference.unpack(join, plan, chunk, expected, theirs.regions)
    assert all((a == b).all() for a, b in zip(ours.regions, theirs.regions, strict=True))


@pytest.mark.parametrize(
    ("wire", "message"), [("raw", "the destination's cache stores smaller numbers"), ("nvfp4", "wire='raw'")]
)
def test_what_to_do_about_infinity_depends_on_who_has_no_room_for_it(wire, message):
    src, dst = attention("float16"), attention("fp8_per_token_head")
    (join,) = formats.join_packed([src], dst, wire)
    plan = join.plan({"full": [2]}, {"full": [3]}, tokens=16)
    source = Memory(src)
    for region in source.regions:
        region.view(np.uint16)[:] = 0x7C00
    (chunk,) = plan.chunks(1 << 30)
    room = np.zeros(chunk.wire_bytes, np.uint8)
    with pytest.raises(NonFiniteValue, match=message) as raised:
        kernels.PreparedPackedPlan(plan).pack(chunk, source.bases, room.ctypes.data)
    assert ("wire='raw'" in str(raised.value)) == (wire != "raw")


def test_every_bf16_value_survives_plain_conversion(isa):
    """bf16 to fp32 and fp16 and back, all 65536 patterns, NaN as the canonical one."""
    bf16, other = attention("bfloat16", heads=4), attention("float32", heads=4)
    every = np.arange(65536, dtype=np.uint16)
    for there in ("float32", "float16"):
        other = attention(there, heads=4)
        source, middle = Memory(bf16), Memory(other)
        (join,) = formats.join_packed([bf16], other, "raw")
        blocks = {"full": np.arange(8)}
        source.regions[0].view(np.uint16)[:65536] = every
        plan = join.plan(blocks, blocks, tokens=128)
        for chunk in plan.chunks(1 << 30):
            wire = np.zeros(chunk.wire_bytes, np.uint8)
            prepared = kernels.PreparedPackedPlan(plan)
            prepared.pack(chunk, source.bases, wire.ctypes.data)
            prepared.unpack(chunk, wire.ctypes.data, middle.bases)
        x = elements.from_bf16(every)
        if there == "float32":
            expected = np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)
            assert (middle.regions[0].view(np.uint32)[:65536] == expected).all()
        else:
            assert (middle.regions[0].view(np.uint16)[:65536] == elements.to_fp16(x)).all()


def test_bounds_are_close_where_staging_might_be_too_small():
    """First tokens go raw, whole blocks do not; and a group of which nothing is fetched needs no staging."""
    layout = attention(block_tokens=16, heads=8)
    (join,) = formats.join_packed([layout], layout, "nvfp4:first=4")
    plan = join.plan({"full": [0, 1, 2]}, {"full": [0, 1, 2]}, tokens=48)
    whole, largest = join.most_bytes({"full": 3}, tokens=48)
    assert largest == plan.largest_segment_bytes and plan.wire_bytes <= whole <= 3 * plan.wire_bytes
    assert join.most_bytes({"full": 0}, tokens=48) == (0, 0)
    (join,) = formats.join_packed([layout], layout, "raw")
    assert join.most_bytes({"full": 0}, tokens=48) == (0, 0)


def test_segments_without_bytes_make_no_chunks():
    """Two tokens of a tile of four have no entry yet."""
    plane = Plane(
        name="kv", dtype="uint8", offset=0, entries=4, entry_stride=64, unit_bytes=64, tokens_per_entry=4
    )
    record = Record(tag="tiles", nbytes=256, planes=(plane,))
    piece = Slice(layer="a", region="a", offset=0, block_stride=256, record="tiles")
    sides = [
        CacheLayout(
            regions=(Region(name="a", nbytes=1024),),
            records=(record,),
            groups=(Group(name="full", block_tokens=16, num_blocks=4, slices=(piece,)),),
        )
    ] * 2
    (join,) = formats.join_packed(sides[:1], sides[1], "raw")
    plan = join.plan({"full": [0]}, {"full": [1]}, tokens=2)
    assert sum(chunk.wire_bytes for chunk in plan.chunks(1)) == plan.wire_bytes
    assert all(chunk.wire_bytes for chunk in plan.chunks(1))
