"""Model folders for vLLM: SmolLM2-135M, converted from its GGUF file, and tiny random models of other architectures.

`folder(name)` makes a model at its first use and keeps it in build/models. Run as a script it makes the named
models: python -m tests.e2e.vllm.models smollm2 gqa
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from examples.tiny_engine.checkpoint import Checkpoint, find_checkpoint
from examples.tiny_engine.tokenizer import CONTROL_TOKEN_TYPE, Tokenizer

from . import word_tokenizer
from .comparing import VOCABULARY

CACHE = Path(__file__).parents[3] / "build" / "models"
CONTEXT_TOKENS = 4096
WINDOW_TOKENS = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT_TOKENS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def folder(name: str) -> Path:
    """The folder of a model, made now if it is not there yet. Names: `MODELS`."""
    code = b"".join(Path(module).read_bytes() for module in (__file__, word_tokenizer.__file__))
    made_by = hashlib.sha256(code + transformers.__version__.encode()).hexdigest()[:12]
    there = CACHE / f"{name}-{made_by}"
    if not there.is_dir():
        for older in CACHE.glob(f"{name}-*"):
            shutil.rmtree(older, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=CACHE))
        try:
            MODELS[name](work)
            os.rename(work, there)
        except OSError:  # another process was faster
            if not there.is_dir():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return there


def _random(config: transformers.PretrainedConfig, embedding_std: float = 1.0) -> Callable[[Path], None]:
    """Weights wide enough that greedy output depends on every block of the context."""

    def make(into: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for name, weights in model.named_parameters():
                    if "embed_tokens" in name:
                        weights.normal_(0.0, embedding_std)
                    elif weights.dim() >= 2:
                        weights.normal_(0.0, 0.08)
        model.save_pretrained(into)
        word_tokenizer.save(into, VOCABULARY)

    return make


def _deepseek() -> transformers.PretrainedConfig:
    sizes = {**_SIZES, "num_key_value_heads": _SIZES["num_attention_heads"]}
    del sizes["head_dim"]
    return transformers.DeepseekV2Config(
        **sizes,
        q_lora_rank=None,
        kv_lora_rank=512,  # the only latent that vLLM's kernel for CPUs is compiled for
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=128,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        moe_layer_freq=1,
    )


def _gemma() -> transformers.PretrainedConfig:
    return transformers.Gemma3TextConfig(
        **{**_SIZES, "tie_word_embeddings": True},
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=64,
    )


def _smollm2(into: Path) -> None:
    """Dequantised to float32, with the tokenizer."""
    checkpoint = Checkpoint(find_checkpoint())
    of = checkpoint.metadata
    heads, kv_heads = of["llama.attention.head_count"], of["llama.attention.head_count_kv"]
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(of["tokenizer.ggml.tokens"]),
        hidden_size=of["llama.embedding_length"],
        intermediate_size=of["llama.feed_forward_length"],
        num_hidden_layers=of["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=of["llama.context_length"],
        rms_norm_eps=of["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": of["llama.rope.freq_base"]},
        bos_token_id=of["tokenizer.ggml.bos_token_id"],
        eos_token_id=of["tokenizer.ggml.eos_token_id"],
        tie_word_embeddings=True,
    )
    weights = {
        "model.embed_tokens.weight": checkpoint.tensor("token_embd.weight"),
        "model.norm.weight": checkpoint.tensor("output_norm.weight"),
    }
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            tensor = checkpoint.tensor(f"blk.{layer}.{theirs}.weight")
            if theirs in ("attn_q", "attn_k"):
                # GGUF stores the two halves of a rotated pair side by side, here they are half a head apart.
                count = heads if theirs == "attn_q" else kv_heads
                paired = tensor.reshape(count, -1, 2, tensor.shape[1])
                tensor = paired.swapaxes(1, 2).reshape(tensor.shape)
            weights[f"model.layers.{layer}.{ours}.weight"] = tensor
    save_file(
        {name: torch.from_numpy(tensor.copy()) for name, tensor in weights.items()},
        into / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.save_pretrained(into)
    transformers.GenerationConfig(eos_token_id=config.eos_token_id).save_pretrained(into)
    _save_tokenizer(Tokenizer(of), of, into)


def _save_tokenizer(tokenizer: Tokenizer, of: dict[str, Any], into: Path) -> None:
    tokens, kinds = of["tokenizer.ggml.tokens"], of["tokenizer.ggml.token_type"]
    bpe = tokenizer._bpe
    bpe.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN_TYPE])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[of["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[of["tokenizer.ggml.eos_token_id"]],
        chat_template=of["tokenizer.chat_template"],
    )
    fast.save_pretrained(into)


MODELS: dict[str, Callable[[Path], None]] = {
    "smollm2": _smollm2,
    "gqa": _random(transformers.Qwen3Config(**_SIZES)),
    "mla": _random(_deepseek()),
    "window": _random(_gemma(), embedding_std=0.02),  # this architecture scales its embedding up, and ties it
}
"""Name -> what writes the model into a folder."""


if __name__ == "__main__":
    print(json.dumps({name: str(folder(name)) for name in sys.argv[1:]}))
