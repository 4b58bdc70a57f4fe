"""Options, versions, fingerprints, layouts, statistics, registration: each by itself."""

from __future__ import annotations

import functools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, KVQuantMode, MLAAttentionSpec

from kvxfer import GroupKind, Limits
from kvxfer.errors import InvalidLayout, InvalidRequest, LayoutMismatch, ProtocolMismatch
from kvxfer.layout.cache_layout import fingerprint_differences
from kvxfer.plan import join
from kvxfer.transfers.transfer import TransferStats
from kvxfer.vllm import KvxferConnector, plugin, versions
from kvxfer.vllm.engine import check_buffer_device, check_supported
from kvxfer.vllm.fingerprint import fingerprint_of
from kvxfer.vllm.layouts import Heads, TableGroup, cache_layout, table_groups
from kvxfer.vllm.options import limits_of, options_of
from kvxfer.vllm.stats import KvxferPromMetrics, KvxferStats

# --- options ------------------------------------------------------------------------------------------------


def options(role: str = "kv_both", **extra: object):
    return options_of(
        KVTransferConfig(kv_connector="KvxferConnector", kv_role=role, kv_connector_extra_config=dict(extra))
    )


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"waze": 1}, "unknown options waze; known are advertise_host"),
        ({"port": "x"}, "Expected `int`, got `str` - at `$.port`"),
        ({"port": 65536}, "<= 65535"),
        ({"lease_s": 0}, "> 0"),
        ({"lease_s": 7200}, "above limits.max_ttl_s"),
        ({"wire": "morse"}, "morse"),
        ({"limits": {"slots": 1}}, "unknown fields slots; known are lease_slots"),
        ({"limits": {"lease_slots": 0}}, "lease_slots"),
        ({"limits": {"chunk_bytes": 4096.5}}, "chunk_bytes must be an integer"),
        ({"secret": "x" * 16, "secret_file": "y"}, "both secret and secret_file"),
        ({"discovery_address": "a:1"}, "belong together"),
        ({"discovery_address": "a:1", "http_address": "b:1"}, "kv_producer or kv_consumer"),
    ],
)
def test_wrong_options(extra: dict, says: str) -> None:
    with pytest.raises(InvalidRequest, match=None) as error:
        options(**extra)
    assert says in str(error.value)


def test_buffer_size_keeps_its_meaning() -> None:
    assert limits_of(options()).staging_bytes is None
    assert limits_of(options(kv_buffer_size=1e6)).staging_bytes == 1_000_000
    old = SimpleNamespace(kv_connector_extra_config={}, kv_buffer_size=2e8, kv_role="kv_both")
    assert limits_of(options_of(old)).staging_bytes == 200_000_000
    old.kv_buffer_size = 1e9  # vLLM 0.26's default: nobody asked for it
    assert limits_of(options_of(old)).staging_bytes is None


@pytest.mark.parametrize("number", [128, 128.0])
def test_limits_are_numbers_however_they_are_written(number: float) -> None:
    fields = Limits.__dataclass_fields__
    given = {name: number for name, field in fields.items() if not isinstance(field.default, float)}
    given |= {"mover_threads": 3.0, "max_sms": 8}
    limits = limits_of(options(limits=given | {"max_ttl_s": 7200, "heartbeat_s": 2}))
    assert {name: getattr(limits, name) for name in given} == given
    assert (limits.max_ttl_s, limits.heartbeat_s) == (7200.0, 2.0)


# --- versions and registration ------------------------------------------------------------------------------


def test_the_installed_version_fits() -> None:
    versions.check(KvxferConnector)


def test_another_interface_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def update_state_after_alloc(self, request, blocks, num_external_tokens, more): ...

    monkeypatch.setattr(base.KVConnectorBase_V1, "update_state_after_alloc", update_state_after_alloc)
    monkeypatch.delattr(base.KVConnectorBase_V1, "on_new_request")
    with pytest.raises(ProtocolMismatch) as error:
        versions.check(type("Unfinished", (), {"__abstractmethods__": frozenset({"brand_new"})}))
    text = str(error.value)
    assert versions.installed() in text and "0.26, 0.32, 0.33" in text
    assert "on_new_request is missing" in text and "brand_new is new" in text
    assert "update_state_after_alloc takes (request, blocks, num_external_tokens, more), expected (request" in text


def test_failed_loads_of_several_groups_need_a_version_that_hears_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "REPORTS_FAILED_REQUESTS", False)
    versions.check_groups(1)
    with pytest.raises(ProtocolMismatch, match="2 cache groups"):
        versions.check_groups(2)


def test_what_a_drafter_reads_ahead() -> None:
    new = SimpleNamespace(num_prefill_lookahead_tokens=3)
    old = [
        SimpleNamespace(speculative_config=speculation)
        for speculation in (None, SimpleNamespace(use_eagle=lambda: False), SimpleNamespace(use_eagle=lambda: True))
    ]
    assert [versions.prefill_lookahead(config) for config in (new, *old)] == [3, 0, 0, 1]


@pytest.mark.parametrize("zeroing", [False, True])
@pytest.mark.parametrize("second_runner", [False, True])
def test_what_workers_write_before_leases_can_end(second_runner: bool, zeroing: bool) -> None:
    engine, cache = SimpleNamespace(use_v2_model_runner=second_runner), SimpleNamespace(needs_kv_cache_zeroing=zeroing)
    assert versions.writes_before_revoking(engine, cache) == (second_runner and zeroing)


def test_registered_once_by_name_and_by_module() -> None:
    plugin.register()
    plugin.register()
    for module in (None, "kvxfer.vllm"):
        config = KVTransferConfig(kv_connector=plugin.NAME, kv_role="kv_both", kv_connector_module_path=module)
        assert KVConnectorFactory.get_connector_class(config) is KvxferConnector
        assert KVConnectorFactory.supports_hma_config(config)


def test_the_library_does_not_import_vllm() -> None:
    code = "import kvxfer, kvxfer.vllm, sys; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- fingerprints -------------------------------------------------------------------------------------------


def engine_config(speculative: object = None, **model: object) -> SimpleNamespace:
    text = SimpleNamespace(model_type="llama", hidden_size=64, num_hidden_layers=4)
    return SimpleNamespace(
        model_config=SimpleNamespace(**({"model": "m", "revision": None, "hf_text_config": text} | model)),
        speculative_config=speculative,
    )


def test_speculation_on_one_side_is_named_field_by_field() -> None:
    draft = SimpleNamespace(model="draft", revision="1", hf_config=SimpleNamespace())
    eagle = SimpleNamespace(method="eagle3", draft_model_config=draft, parallel_drafting=False)
    without, with_draft = fingerprint_of(engine_config(), None), fingerprint_of(engine_config(eagle), None)
    lines = fingerprint_differences(with_draft, without)
    assert "speculative.method: ours 'eagle3', theirs 'not stated'" in lines
    assert {line.split(":")[0] for line in lines} == {key for key in with_draft if key.startswith("speculative.")}
    assert fingerprint_of(engine_config(eagle), None, with_speculation=False) == without
    ngram = SimpleNamespace(method="ngram", draft_model_config=None)
    assert fingerprint_of(engine_config(ngram), None) == without  # keeps no KV


def test_a_model_id_stands_for_the_path() -> None:
    assert fingerprint_of(engine_config(model="/a/m"), "m") == fingerprint_of(engine_config(model="/b/m"), "m")
    assert fingerprint_of(engine_config(model="/a/m"), None) != fingerprint_of(engine_config(model="/b/m"), None)


# --- layouts ------------------------------------------------------------------------------------------------

BLOCKS, HEADS, TOKENS, DIM = 6, 4, 16, 8
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)


def memory(order: str, layers: int = 2, dtype: torch.dtype = torch.bfloat16, width: int = 2 * DIM) -> dict:
    """Layers of shape [B, H, N, C] in one allocation whose bytes lie in the given order of L, B, H, N, C."""
    sizes = {"L": layers, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": width}
    whole = torch.zeros([sizes[axis] for axis in order], dtype=dtype).permute([order.index(axis) for axis in "LBHNC"])
    return {f"layers.{layer}": whole[layer] for layer in range(layers)}


def layout_of(tensors: dict, spec: object = FULL, **changes: object):
    group = TableGroup(
        index=0, name="0", kind=GroupKind.FULL, block_tokens=TOKENS, window=0, layers=tuple(tensors), spec=spec
    )
    options = {
        "num_blocks": BLOCKS,
        "heads": Heads(rank=0, ranks=1, total=HEADS),
        "cache_dtype": "auto",
        "latent_content": None,
        "cpu_isa": None,
        "fingerprint": {},
    }
    return cache_layout([group], tensors, **(options | changes))


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_layouts_of_every_order_join(order: str) -> None:
    layout = layout_of(memory(order))
    assert [plane.name for plane in layout.records[0].planes] == ["k", "v"]
    assert layout.block_bytes("0") == 2 * HEADS * TOKENS * 2 * DIM * 2
    assert join([layout], layout_of(memory("LBNHC")))


def test_heads_outside_the_block_are_refused_by_name() -> None:
    with pytest.raises(InvalidLayout, match="heads of a block do not lie together"):
        layout_of(memory("BHLNC"))


@pytest.mark.parametrize(
    ("place", "local", "expected"),
    [
        (Heads(rank=1, ranks=2, total=8), 4, (4, 8)),
        (Heads(rank=3, ranks=4, total=2), 1, (1, 2)),  # ranks 2 and 3 hold the second head
        (Heads(rank=0, ranks=4, total=2), 1, (0, 2)),
        (Heads(rank=1, ranks=2, total=8), 1, (1, 2)),  # a draft model with fewer heads
    ],
)
def test_heads_of_a_rank(place: Heads, local: int, expected: tuple[int, int]) -> None:
    assert place.range_of(local) == expected


def test_layers_that_share_a_cache_stand_once() -> None:
    tensors = memory("LBHNC")
    tensors["layers.9"] = tensors["layers.0"]
    assert layout_of(tensors).layers == ("layers.0", "layers.1")


def test_divided_blocks_are_refused_by_name() -> None:
    spec = FullAttentionSpec(block_size=2 * TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
    with pytest.raises(InvalidLayout, match="set --block-size"):
        layout_of(memory("LBHNC"), spec, num_blocks=BLOCKS // 2)


def test_fp8_planes_carry_their_own_name() -> None:
    spec = FullAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=DIM,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
    )
    layout = layout_of(memory("LBHNC", dtype=torch.uint8), spec, cache_dtype="fp8")
    assert {plane.dtype for plane in layout.records[0].planes} == {"float8_e4m3fn"}


def test_latent_rows() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
    tensors = {name: tensor[:, :1].contiguous() for name, tensor in memory("LBHNC", width=24).items()}
    layout = layout_of(tensors, spec, latent_content={"latent": 16, "rope": 8}, heads=Heads(rank=1, ranks=2, total=1))
    assert [(p.name, p.unit_bytes, p.head_start, p.all_heads) for p in layout.records[0].planes] == [
        ("latent", 32, 0, 1),
        ("rope", 16, 0, 1),
    ]
    without_heads = {name: tensor[:, 0] for name, tensor in tensors.items()}  # as in 0.26
    assert layout_of(without_heads, spec, latent_content={"latent": 16, "rope": 8}).records == layout.records
    index = layout_of(tensors, spec, latent_content={"latent": 512, "rope": 64})  # not a latent: an indexer's keys
    assert not index.records[0].planes


@pytest.mark.skipif(
    "state_content_bytes" not in FullAttentionSpec.__dataclass_fields__, reason="this version of vLLM has no such rows"
)
def test_rows_with_scales_among_them_move_whole_or_not_at_all() -> None:
    spec = FullAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=DIM,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.NVFP4,
        state_content_bytes=2 * DIM,
    )
    layout = layout_of(memory("LBHNC", dtype=torch.uint8), spec, cache_dtype="nvfp4")
    assert not layout.records[0].planes
    assert join([layout], layout)
    with pytest.raises(LayoutMismatch, match="nvfp4"):
        join([layout], layout_of(memory("LBNHC", dtype=torch.uint8), spec, cache_dtype="nvfp4"))


def test_kinds_that_are_not_known_are_refused_by_name() -> None:
    spec = ChunkedLocalAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16, attention_chunk_size=32
    )
    config = SimpleNamespace(
        transfer_group_ids=(0,), kv_cache_groups=[SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)]
    )
    with pytest.raises(InvalidLayout, match="ChunkedLocalAttentionSpec is not supported"):
        table_groups(config)


def test_blocks_that_the_backend_divides_are_refused_by_name() -> None:
    with pytest.raises(InvalidLayout, match="the attention backend divides blocks"):
        layout_of(memory("LBHNC"), num_blocks=BLOCKS // 2)


@pytest.mark.parametrize(
    ("parallel", "model", "says"),
    [
        ({"decode_context_parallel_size": 2}, {}, "decode_context_parallel_size above 1"),
        ({"prefill_context_parallel_size": 2}, {}, "prefill_context_parallel_size above 1"),
        ({}, {"enable_sleep_mode": True}, "sleep mode is not supported"),
    ],
)
def test_what_no_engine_may_do_is_refused_by_name(parallel: dict, model: dict, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check_supported(
            SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=SimpleNamespace(**model))
        )
    assert KvxferConnector.supports_sleep_mode(None) is False


def test_a_buffer_on_another_device_is_refused() -> None:
    layout = layout_of(memory("LBHNC"))
    check_buffer_device(SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_buffer_device="cpu")), layout)
    with pytest.raises(InvalidRequest, match="kv_buffer_device is 'cuda', and the cache lies on 'cpu'"):
        check_buffer_device(SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_buffer_device="cuda")), layout)


# --- statistics ---------------------------------------------------------------------------------------------


def test_statistics_add_up_and_reach_prometheus() -> None:
    worker, scheduler = KvxferStats(), KvxferStats()
    assert worker.take() is None
    for way in ("direct", "direct", "packed"):
        worker.fetched(TransferStats(way=way, bytes=1000, wire_bytes=500, seconds=0.002, posted_s=0.001))
    worker.count("failed")
    scheduler.count("refused")
    total = KvxferConnector.build_kv_connector_stats(worker.take().aggregate(scheduler.take()).data)
    assert total.reduce() == {
        "Fetched": 3,
        "ways": "direct 2+packed 1",
        "ms (median)": 2.0,
        "ms (p99)": 2.0,
        "MB": 0.003,
        "GB/s": 0.001,
        "failed": 1,
        "refused": 1,
    }
    registry = CollectorRegistry()
    types = {kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    metrics = KvxferPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    metrics.observe(total.data, 0)
    text = generate_latest(registry).decode()
    assert 'vllm:kvxfer_fetch_bytes_sum{engine="0"} 3000.0' in text
    assert 'vllm:kvxfer_failed_fetches_total{engine="0"} 1.0' in text
