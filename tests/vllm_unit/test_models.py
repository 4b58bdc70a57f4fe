"""What `kvxfer.models` makes of a configuration, against the configuration classes of Transformers and against vLLM."""

from __future__ import annotations

import pytest

from kvxfer.models import layer_kinds

LAYERS = 13
BASE = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 512,
    "sliding_window": 64,
}
MORE = (
    {},
    {"sliding_window_pattern": 3},
    {"global_attn_every_n_layers": 3},
    {"use_sliding_window": False},
    {"use_sliding_window": True, "max_window_layers": 0},
    {"use_sliding_window": True, "max_window_layers": LAYERS},
)
TYPES = sorted(
    {*layer_kinds._EVERY, *layer_kinds._FIRST_OF_EVERY, *layer_kinds._LAST_LAYERS, *layer_kinds._ALL} - {"gemma3"}
)  # gemma3 is the type of a configuration around gemma3_text's


def _config(model_type: str, **keys):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(model_type, **keys).get_text_config()


@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize("model_type", TYPES)
def test_windows_are_those_of_the_configuration_class(model_type, more):
    config = _config(model_type, **{**BASE, **more})
    kinds, window = getattr(config, "layer_types", None), config.sliding_window
    if kinds is None or set(kinds) == {layer_kinds.SLIDING}:  # vLLM gives every layer the model's window
        kinds = [layer_kinds.SLIDING] * LAYERS
    expected = [kind if window else layer_kinds.FULL for kind in kinds]
    assert layer_kinds.layer_kinds({"model_type": model_type, **BASE, **more}) == expected


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"multi_query": False},
        {"num_kv_heads": 4},
        {"new_decoder_architecture": True, "num_kv_heads": 4},
        {"new_decoder_architecture": True, "multi_query": True, "num_kv_heads": 2},
    ],
    ids=str,
)
def test_kv_heads_of_falcon_are_those_of_vllm(more):
    convertors = pytest.importorskip("vllm.transformers_utils.model_arch_config_convertor")
    from kvxfer.models import layout_for

    keys = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, **more}
    config = _config("falcon", **keys)
    theirs = convertors.FalconModelArchConfigConvertor(config, config).get_total_num_kv_heads()
    ours = layout_for({"model_type": "falcon", **keys}).records[0].planes[0].total_heads
    assert ours == theirs
