"""The same plans through the connector and the shared-memory backend: layouts of unequal sides, every way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvxfer
from kvxfer.kernels import PreparedPlan
from kvxfer.layout import CacheLayout
from kvxfer.models import layout_for
from kvxfer.plan import join

MODELS = {
    "attention": {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "torch_dtype": "bfloat16",
    },
    "hybrid": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "v41": {
        "model_type": "deepseek_v41",
        "num_hidden_layers": 4,
        "head_dim": 512,
        "sliding_window": 128,
        "compress_ratios": [0, 2, 1, 0],
        "kv_source_layer_ids": [1, 2],
    },
}


def options(draw, model: str) -> dict[str, object]:
    if model == "v41":
        return {
            "engine_version": draw(st.sampled_from(["0.32", "0.33"])),
            "block_tokens": draw(st.sampled_from([32, 64, 128])),
            "draft_tokens": draw(st.sampled_from([None, 9])),
        }
    return {
        "order": draw(st.sampled_from(["NHD", "HND", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])),
        "block_tokens": draw(st.sampled_from([4, 16, 24])),
    }


def lists(draw, layout: CacheLayout, tokens: int, *, suffix: bool) -> dict[str, np.ndarray]:
    """Fragmented blocks from one pool, right-aligned; with `suffix` a prefix may be there already."""
    order = draw(st.permutations(range(layout.groups[0].num_blocks)))
    taken = 0
    found = {}
    for group in layout.groups:
        count = min(group.blocks_for(tokens), group.tail_blocks)
        if suffix and group.kind is kvxfer.GroupKind.FULL:
            count = draw(st.integers(0, count))
        found[group.name] = np.array(order[taken : taken + count], np.int32)
        taken += count
    return found


@pytest.mark.parametrize("way", ["mapped", "packed"])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_fetch_puts_the_bytes_where_the_plan_says(way, data):
    model = data.draw(st.sampled_from(list(MODELS)), label="model")
    tokens = data.draw(st.integers(1, 150), label="tokens")
    src, dst = (layout_for(MODELS[model], num_blocks=96, **options(data.draw, model)) for _ in range(2))
    src_lists, dst_lists = (lists(data.draw, layout, tokens, suffix=layout is dst) for layout in (src, dst))
    memory = []
    for seed, layout in enumerate((src, dst)):
        rng = np.random.default_rng(seed)
        arrays = {region.name: kvxfer.shared_empty(region.nbytes) for region in layout.regions}
        for array in arrays.values():
            array[:] = rng.integers(0, 256, len(array), np.uint8)
        memory.append(arrays)
    expected = {name: array.copy() for name, array in memory[1].items()}
    bases = [
        np.array([arrays[region.name].ctypes.data for region in layout.regions], np.uint64)
        for arrays, layout in ((memory[0], src), (expected, dst))
    ]
    (joined,) = join([src], dst)
    plan = joined.plan(src_lists, dst_lists, tokens=tokens)
    for chunk in plan.chunks(1 << 20):
        PreparedPlan(plan).copy(chunk, *bases)
    with (
        kvxfer.Connector("prefill", listen="tcp://127.0.0.1:0", backends=["shm"]) as prefill,
        kvxfer.Connector("decode", listen="tcp://127.0.0.1:0", backends=["shm"], ways=[way]) as decode,
    ):
        lease = prefill.register(memory[0], src).publish(src_lists, tokens=tokens)
        transfer = decode.register(memory[1], dst).fetch(bytes(lease.ticket), into=dst_lists)
        transfer.wait(timeout_s=20)
    for name, array in expected.items():
        assert np.array_equal(memory[1][name], array)
