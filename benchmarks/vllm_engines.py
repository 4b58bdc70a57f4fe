"""What the benchmarks with vLLM's servers share: models without a checkpoint, launch words, environment, counters.

Engines run on GPUs, or on one core each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.vllm import word_tokenizer
from tests.e2e.vllm.environment import for_server
from tests.e2e.vllm.servers import Server

WEIGHTS = Path(__file__).parent / "vllm_weights"
GRAPH_BATCHES = [1, 2, 4, 8, 16, 32, 64]

SHAPES: dict[str, dict[str, int]] = {
    "qwen2.5-14b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "qwen2.5-14b-kv": {
        "hidden_size": 5120,
        "intermediate_size": 1024,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
    },
}
"""Sizes as a Qwen2 configuration has them."""

_COUNTERS = {
    "kvxfer": {
        "seconds": "vllm:kvxfer_fetch_seconds_sum",
        "transfers": "vllm:kvxfer_fetch_seconds_count",
        "bytes": "vllm:kvxfer_wire_bytes_sum",
        "failed": "vllm:kvxfer_failed_fetches_total",
    },
    "nixl": {
        "seconds": "vllm:nixl_xfer_time_seconds_sum",
        "post_seconds": "vllm:nixl_post_time_seconds_sum",
        "transfers": "vllm:nixl_xfer_time_seconds_count",
        "bytes": "vllm:nixl_bytes_transferred_sum",
        "descriptors": "vllm:nixl_num_descriptors_sum",
        "failed": "vllm:nixl_num_failed_transfers_total",
    },
}


def write_model(shape: dict[str, int]) -> Path:
    """A folder with a configuration, and in it one with a tokenizer and a configuration of its own.

    Beside a configuration of Qwen2, transformers would take any tokenizer for Qwen2's; Llama's may have others.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-model-"))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config | shape))
    word_tokenizer.save(tokenizer(folder), shape["vocab_size"])
    (tokenizer(folder) / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def tokenizer(model: Path) -> Path:
    """Where `write_model` puts it."""
    return model / "tokenizer"


def launch_words(*, context_tokens: int, kv_cache_bytes: int, generates: bool, on_cpu: bool) -> list[str]:
    """What follows a model and its connector. Prefill has no use for CUDA graphs, engines that generate have."""
    # fmt: off
    words = [
        "--served-model-name", "m", "--host", "127.0.0.1", "--disable-uvicorn-access-log", "--load-format", "random",
        "--max-model-len", str(context_tokens), "--kv-cache-memory-bytes", str(kv_cache_bytes),
    ]
    # fmt: on
    if on_cpu:
        return [*words, "--enforce-eager", "--dtype", "float32"]
    words += ["--gpu-memory-utilization", "0.1"]  # that much has to be free
    if not generates:
        return [*words, "--enforce-eager"]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": GRAPH_BATCHES}
    return [*words, "--compilation-config", json.dumps(graphs)]


def environment(device: int, *, on_cpu: bool, nixl_port: int | None = None) -> dict[str, str]:
    """The whole environment of an engine on that GPU or core."""
    if on_cpu:
        names = for_server(core=device, nixl_port=nixl_port)
    else:
        names = dict(os.environ) | {
            "CUDA_VISIBLE_DEVICES": str(device),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if nixl_port is not None:
            names["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(nixl_port)
    path = names.get("PYTHONPATH")
    return names | {"PYTHONPATH": f"{WEIGHTS}:{path}" if path else str(WEIGHTS)}


def counters(connector: str, decode: Server) -> dict[str, float]:
    """What the connector of a decode engine says that it has moved. Engines report now and then."""
    return {name: decode.metric(metric) for name, metric in _COUNTERS[connector].items()}


def weight_bytes(shape: dict[str, int]) -> int:
    """In bfloat16."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    kv_hidden = hidden // heads * shape["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * kv_hidden
    layer = attention + 3 * hidden * shape["intermediate_size"]
    return 2 * (shape["num_hidden_layers"] * layer + 2 * shape["vocab_size"] * hidden)


@dataclass(frozen=True)
class Gpu:
    name: str
    nbytes: int


def gpus() -> list[Gpu]:
    """Of this machine, found by a process that ends: engines want GPUs that nobody has touched."""
    found = "[torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]"
    script = f"import json, torch; print(json.dumps([(gpu.name, gpu.total_memory) for gpu in {found}]))"
    words = [sys.executable, "-c", script]
    output = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    return [Gpu(*gpu) for gpu in json.loads(output)]


def versions(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Of what is measured."""
    import torch
    import vllm

    found = {"vllm": vllm.__version__, "torch": torch.__version__}
    return found | ({"gpu": f"{len(gpus)} x {gpus[0].name}"} if gpus else {})
