"""What joins, what is refused, and what either says."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.errors import InvalidBlocks, InvalidRequest, LayoutMismatch, UnknownGroup
from kvxfer.layout import CacheLayout, Group, GroupKind, Record, Region, Slice
from kvxfer.models import layout_for
from kvxfer.plan import ROW, Verdict, compare, join

SMALL = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "torch_dtype": "bfloat16",
}
V41 = "DeepSeek-V4.1-Flash"


def verdicts(*args, **options):
    return {(f.field, f.verdict) for f in compare(*args, **options)}


def test_equal_layouts_are_one_row_a_slab():
    ours = layout_for(V41, num_blocks=8)
    comparison = compare(ours, ours)
    assert comparison and {f.verdict for f in comparison} == {Verdict.EQUAL}
    (joined,) = join([ours], ours)
    assert [len(part.merged) for part in joined.parts] == [1] * len(ours.groups)


@pytest.mark.parametrize(
    ("src", "dst", "field"),
    [
        (dict(kv_cache_dtype="bf16"), dict(kv_cache_dtype="fp16"), "plane 'k'"),
        (dict(kv_cache_dtype="bf16"), dict(kv_cache_dtype="fp8"), "plane 'k'"),
        (dict(kv_cache_dtype="fp8_per_token_head"), dict(kv_cache_dtype="fp8"), "record"),
        (dict(kv_cache_dtype="fp8"), dict(kv_cache_dtype="fp8_per_token_head"), "plane 'k_scale'"),
        (dict(kv_cache_dtype="nvfp4"), dict(kv_cache_dtype="fp8"), "record"),
    ],
)
def test_other_records_are_refused(src, dst, field):
    ours, theirs = layout_for(SMALL, **src), layout_for(SMALL, **dst)
    assert (field, Verdict.REFUSED) in verdicts(ours, theirs)
    with pytest.raises(LayoutMismatch, match="cannot be joined"):
        join([ours], theirs)


@pytest.mark.parametrize(
    ("model", "src", "dst"),
    [
        (V41, dict(arch="sm100"), dict(arch="sm90")),
        (V41, dict(kv_cache_dtype="nvfp4_ds_mla"), dict(kv_cache_dtype="fp8_ds_mla")),
        (V41, dict(indexer_dtype="fp8"), dict(indexer_dtype="mxfp4")),
        (V41, dict(kv_cache_dtype="fp8"), dict(kv_cache_dtype="fp8_ds_mla")),
        ("DeepSeek-V3.2", dict(kv_cache_dtype="nvfp4_ds_mla"), dict(kv_cache_dtype="fp8_ds_mla")),
    ],
)
def test_latents_of_other_records_are_refused(model, src, dst):
    with pytest.raises(LayoutMismatch, match="refused"):
        join([layout_for(model, **src)], layout_for(model, **dst))


def test_permuted_scales_keep_a_name_of_their_own():
    """Same bytes, other order inside the entry: never joined with plain scales."""
    from kvxfer.layout.records import LATENT

    dtypes = {field.dtype for section in LATENT["v32.nvfp4_ds_mla.352"] for field in section}
    assert not dtypes & {"float8_e4m3fn.perm"} and "float8_e4m3fn.perm4x8" in dtypes


def one_layer(record: Record, *, block_tokens=16, kind=GroupKind.FULL, window=0, num_blocks=8) -> CacheLayout:
    piece = Slice(layer="a", region="m", offset=0, block_stride=record.nbytes, record=record.tag)
    group = Group(
        name="g", block_tokens=block_tokens, num_blocks=num_blocks, slices=(piece,), kind=kind, window=window
    )
    return CacheLayout(
        regions=(Region(name="m", nbytes=num_blocks * record.nbytes),), records=(record,), groups=(group,)
    )


def test_scales_of_one_size_and_another_meaning_are_refused():
    from kvxfer.layout.records import latent_record

    fp32, packed = (latent_record(name, entries=16) for name in ("indexer.fp8.132", "indexer.fp8_mx.132"))
    assert fp32.nbytes == packed.nbytes
    with pytest.raises(LayoutMismatch, match="dtype differs"):
        join([one_layer(fp32)], one_layer(packed))


def test_tiled_scales_join_only_tiled_ones():
    from kvxfer.layout.records import kv_sections, paged_record, tiled_v_scale_record

    tiled = tiled_v_scale_record(block_tokens=16, kv_heads=2, head_dim=32)
    plain = paged_record("p", kv_sections("nvfp4", 32, together=False), entries=16, heads=2, order="HND")
    with pytest.raises(LayoutMismatch, match="plane 'v_scale'"):
        join([one_layer(tiled)], one_layer(plain))
    longer = tiled_v_scale_record(block_tokens=32, kv_heads=2, head_dim=32)
    assert join([one_layer(tiled)], one_layer(longer, block_tokens=32))


def test_opaque_records_fit_only_themselves():
    opaque = Record(tag="x", nbytes=64)
    assert join([one_layer(opaque)], one_layer(opaque))
    with pytest.raises(LayoutMismatch, match="opaque"):
        join([one_layer(opaque)], one_layer(Record(tag="y", nbytes=64)))
    with pytest.raises(LayoutMismatch, match="block_tokens"):
        join([one_layer(opaque)], one_layer(opaque, block_tokens=8))


def test_amx_packing_is_opaque():
    amx = layout_for(SMALL, "vllm-cpu", arch="amx")
    plain = layout_for(SMALL, "vllm-cpu")
    assert join([amx], amx)
    for src, dst in (
        (amx, plain),
        (plain, amx),
        (amx, layout_for(SMALL, "vllm-cpu", arch="amx", block_tokens=64)),
    ):
        with pytest.raises(LayoutMismatch):
            join([src], dst)


def test_cpu_and_gpu_layouts_convert():
    assert join([layout_for(SMALL, "vllm-cpu", block_tokens=32)], layout_for(SMALL, order="BLNHC"))


# --- layers, groups, ranks ----------------------------------------------------------------------------------


def test_draft_layers_that_prefill_lacks():
    prefill, decode = layout_for(V41, num_blocks=4), layout_for(V41, draft="dspark", num_blocks=4)
    with pytest.raises(LayoutMismatch, match=r"layers\.40\.swa"):
        join([prefill], decode)
    (joined,) = join([prefill], decode, allow_missing=True)
    assert joined.missing == ("layers.40.swa", "layers.41.swa", "layers.42.swa")
    assert ("layers", Verdict.CONVERTIBLE) in verdicts(prefill, decode, allow_missing=True)
    assert join([decode], prefill)[0].missing == ()


def test_a_subset_of_layers():
    whole = layout_for(SMALL)
    (joined,) = join([whole], whole, layers=["layers.1"])
    assert joined.parts[0].layers == ("layers.1",)
    with pytest.raises(InvalidRequest, match="not in the destination"):
        join([whole], whole, layers=["layers.9"])


def test_pipeline_stages_fill_one_decoder():
    def stage(first, last):
        return CacheLayout.paged(
            layers=[f"layers.{i}" for i in range(first, last)],
            num_blocks=8,
            block_tokens=16,
            kv_heads=2,
            head_dim=8,
            dtype="float16",
        )

    joins = join([stage(0, 2), stage(2, 4)], stage(0, 4))
    assert [j.parts[0].layers for j in joins] == [("layers.0", "layers.1"), ("layers.2", "layers.3")]
    (half,) = join([stage(0, 4)], stage(2, 4))
    assert half.parts[0].layers == ("layers.2", "layers.3")


def test_tensor_parallel_ranks_share_the_heads():
    sources = [layout_for(SMALL, tp=4, rank=rank) for rank in range(4)]
    assert [j.source for j in join(sources, layout_for(SMALL, tp=2, rank=1))] == [2, 3]
    assert [j.source for j in join([layout_for(SMALL)], layout_for(SMALL, tp=4, rank=3))] == [0]
    with pytest.raises(LayoutMismatch, match=r"heads 0\.\.1"):
        join(sources[1:], layout_for(SMALL))


def test_replicated_latents_are_spread():
    ranks = [layout_for("DeepSeek-V3", tp=4, rank=rank) for rank in range(4)]
    assert [join(ranks, ranks[0], first=first)[0].source for first in range(4)] == [0, 1, 2, 3]


def test_windows():
    from kvxfer.layout.records import kv_sections, paged_record

    record = paged_record("kv", kv_sections("float16", 8, together=True), entries=16)
    full = one_layer(record)
    long, short = (one_layer(record, kind=GroupKind.SLIDING, window=window) for window in (40, 20))
    assert join([full], short) and join([long], short)
    with pytest.raises(LayoutMismatch, match="window"):
        join([short], long)
    with pytest.raises(LayoutMismatch, match="group kind"):
        join([long], full)


# --- block lists --------------------------------------------------------------------------------------------


def plan(src, dst, src_blocks, dst_blocks, tokens):
    return join([src], dst)[0].plan(src_blocks, dst_blocks, tokens=tokens)


def test_groups_over_one_slab_must_not_share_a_block():
    ours = layout_for(V41, num_blocks=64)
    source = {g.name: list(range(g.blocks_for(300)))[-g.tail_blocks :] for g in ours.groups}
    taken = iter(range(64))
    target = {name: [next(taken) for _ in ids] for name, ids in source.items()}
    assert plan(ours, ours, source, target, 300).nbytes
    with pytest.raises(InvalidBlocks, match="same memory"):
        plan(ours, ours, source, {**target, "ring": [target["mla"][0]]}, 300)


def test_positions_of_a_hybrid_share_memory_too():
    ours = layout_for("gpt-oss-20b", num_blocks=64)
    source = {"full": [1, 2], "sliding": [3, 4]}
    assert plan(ours, ours, source, {"full": [5, 6], "sliding": [7, 8]}, 20).nbytes
    with pytest.raises(InvalidBlocks, match=r"block 6 of group 'full' and block 6 of group 'sliding'"):
        plan(ours, ours, source, {"full": [5, 6], "sliding": [6, 8]}, 20)


def test_null_blocks_before_the_window_do_no_harm():
    ours = layout_for("gpt-oss-20b", num_blocks=64)
    tokens = 20 * 16
    lists = {"full": list(range(20, 40)), "sliding": [0] * 11 + list(range(40, 49))}
    moved = plan(ours, ours, lists, lists, tokens)
    assert len(moved.parts[1]) == 128 // 16 + 1


def test_a_state_that_is_not_needed_may_be_left_out():
    ours = layout_for(V41, num_blocks=64)
    lists = {g.name: list(range(i * 6, i * 6 + min(g.blocks_for(64), 5))) for i, g in enumerate(ours.groups)}
    assert plan(ours, ours, {**lists, "ring": []}, {**lists, "ring": []}, 64).nbytes
    with pytest.raises(InvalidBlocks, match="ring"):
        plan(ours, ours, {**lists, "ring": []}, {**lists, "ring": []}, 63)


@pytest.mark.parametrize(
    ("src", "dst", "error"),
    [
        ({"full": [0, 1]}, {"full": [1, 1]}, InvalidBlocks),
        ({"full": [0]}, {"full": [1, 2]}, InvalidBlocks),
        ({"full": [0, 1, 2]}, {"full": [1, 2]}, InvalidBlocks),
        ({"full": [0, 99]}, {"full": [1, 2]}, InvalidBlocks),
        ({"full": [0, -1]}, {"full": [1, 2]}, InvalidBlocks),
        ({"full": [[0, 1]]}, {"full": [1, 2]}, InvalidBlocks),
        ({"full": [0.5, 1]}, {"full": [1, 2]}, InvalidBlocks),
        ({"full": [0, 1]}, {"window": [1, 2]}, UnknownGroup),
        ({"full": [0, 1]}, [1, 2], InvalidRequest),
    ],
)
def test_wrong_lists_are_refused(src, dst, error):
    ours = layout_for(SMALL, num_blocks=8)
    with pytest.raises(error):
        plan(ours, ours, src, dst, 20)


def test_one_layer_of_a_plan():
    ours = layout_for(SMALL, num_blocks=8)
    (joined,) = join([ours], ours)
    whole = joined.plan({"full": [0, 1]}, {"full": [2, 3]}, tokens=20)
    parts = [
        joined.plan({"full": [0, 1]}, {"full": [2, 3]}, tokens=20, layer=layer)
        for layer in ("layers.0", "layers.1")
    ]
    assert sum(p.nbytes for p in parts) == whole.nbytes


# --- offsets past 2**31 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("src_tokens", "dst_tokens"), [(16, 16), (16, 32), (32, 16)])
def test_addresses_past_two_gib(src_tokens, dst_tokens):
    """Arithmetic of `runs` on caches of 300 GB: every address is exact."""

    def big(block_tokens):
        return layout_for("Llama-3.1-70B", block_tokens=block_tokens, num_blocks=60_000, order="BLNHC")

    src, dst = big(src_tokens), big(dst_tokens)
    tokens = 90
    src_blocks = [59_999 - 7 * i for i in range(-(-tokens // src_tokens))]
    dst_blocks = [59_000 + 11 * i for i in range(-(-tokens // dst_tokens))]
    made = plan(src, dst, {"full": src_blocks}, {"full": dst_blocks}, tokens)
    bases = np.array([1 << 45], np.uint64), np.array([1 << 46], np.uint64)
    runs = made.runs(*bases)
    per_token = 80 * 8 * 2 * 256
    whole = src_tokens == dst_tokens
    assert (
        int(runs[:, 2].sum())
        == made.nbytes
        == (len(src_blocks) * src_tokens if whole else tokens) * per_token
    )
    where = {}
    for source, target, nbytes in runs.tolist():
        where[source - (1 << 45)] = (target - (1 << 46), nbytes)
    layer_bytes = 8 * 2 * 256
    for token in (0, 17, 40, 89):
        for layer in (0, 79):

            def place(blocks, size, token=token, layer=layer):
                block = blocks[token // size]
                return (
                    block * 80 * size * layer_bytes + layer * size * layer_bytes + token % size * layer_bytes
                )

            source, target = place(src_blocks, src_tokens), place(dst_blocks, dst_tokens)
            assert source > 2**31
            start = max(offset for offset in where if offset <= source)
            moved_to, nbytes = where[start]
            assert source - start + layer_bytes <= nbytes and moved_to + source - start == target


def test_copies_past_two_gib(tmp_path):
    """A sparse region of 5 GiB: the kernels reach its far end."""
    from kvxfer.kernels import PreparedPlan

    count, page = 5 << 14, 1 << 16
    ours = CacheLayout.paged(
        layers=["a"], num_blocks=count, block_tokens=16, kv_heads=8, head_dim=128, dtype="float16"
    )
    assert ours.records[0].nbytes == page
    memory = np.memmap(tmp_path / "cache", np.uint8, mode="w+", shape=(count, page))
    memory[count - 1], memory[count - 3] = 7, 9
    made = plan(ours, ours, {"full": [count - 1, count - 3]}, {"full": [0, count // 2 + 1]}, 32)
    base = np.array([memory.ctypes.data], np.uint64)
    for chunk in made.chunks(page):
        PreparedPlan(made).copy(chunk, base, base)
    assert (memory[0] == 7).all() and (memory[count // 2 + 1] == 9).all()
    assert not memory[1].any() and not memory[count // 2].any() and not memory[count // 2 + 2].any()


def test_row_is_as_long_as_the_kernels_read():
    assert ROW.itemsize == 112
