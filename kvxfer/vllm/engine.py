"""What is read from vLLM's configuration and its loaded model: this process's place, scales, the CPU kernel's layout.

Imports layouts and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import InvalidRequest
from kvxfer.layout import CacheLayout
from kvxfer.vllm.layouts import Heads

_MAX_NAME = 64


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker's place in its engine. Ranks are counted over tensor- and pipeline-parallel ones."""

    rank: int
    ranks: int
    heads: Heads

    @classmethod
    def of(cls, vllm_config: Any) -> Place:
        """Of this process. Raises InvalidRequest like `check_supported`."""
        check_supported(vllm_config)
        parallel = vllm_config.parallel_config
        tensor, pipeline = _ranks_here(parallel)
        return cls(
            rank=pipeline * parallel.tensor_parallel_size + tensor,
            ranks=rank_count(parallel),
            heads=Heads(
                rank=tensor,
                ranks=parallel.tensor_parallel_size,
                total=vllm_config.model_config.get_total_num_kv_heads(),
            ),
        )


def rank_count(parallel_config: Any) -> int:
    """Workers of one engine."""
    return parallel_config.tensor_parallel_size * parallel_config.pipeline_parallel_size


def port_offset(parallel_config: Any, rank: int | None) -> int:
    """What is added to the configured port: nothing for the scheduler, 1 and more for ranks, after earlier replicas."""
    replica = getattr(parallel_config, "data_parallel_index", 0) * (1 + rank_count(parallel_config))
    return replica + (0 if rank is None else 1 + rank)


def check_supported(vllm_config: Any) -> None:
    """InvalidRequest where tokens of a block are divided over ranks, or the cache may go while peers read it."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(vllm_config.parallel_config, name, 1) > 1:
            raise InvalidRequest(f"{name} above 1 is not supported: kvxfer expects whole blocks on each rank")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise InvalidRequest("sleep mode is not supported: peers may read the cache at any time; leave it off")


def check_layerwise(vllm_config: Any) -> None:
    """InvalidRequest where a layer's end says nothing: with drafters that look ahead, or a step in several batches."""
    if vllm_config.speculative_config is not None:
        raise InvalidRequest("stream_layers cannot be used with speculative decoding: leave it out (stream may stay)")
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        raise InvalidRequest("stream_layers cannot be used with --enable-dbo or --ubatch-size: leave one of them out")


def check_buffer_device(vllm_config: Any, layout: CacheLayout) -> None:
    """InvalidRequest where a buffer is asked for on another device than the cache's: there is none.

    Caches are read where they are, and packed chunks are received where the two ends of a link can reach them.
    """
    device = layout.regions[0].device.split(":")[0]
    wished = getattr(vllm_config.kv_transfer_config, "kv_buffer_device", device)
    if wished != device:
        raise InvalidRequest(
            f"kv_buffer_device is {wished!r}, and the cache lies on {device!r}: kvxfer reads caches where they are and "
            "has no buffer elsewhere; leave kv_buffer_device out"
        )


def _ranks_here(parallel_config: Any) -> tuple[int, int]:
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        pipeline, tensor = divmod(parallel_config.rank, parallel_config.tensor_parallel_size)
        return tensor, pipeline
    return parallel_state.get_tp_group().rank_in_group, parallel_state.get_pp_group().rank_in_group


def engine_name(vllm_config: Any) -> str:
    """The engine's name for peers."""
    return str(vllm_config.kv_transfer_config.engine_id)[-_MAX_NAME:]


def connector_name(vllm_config: Any, part: str) -> str:
    """A connector's name in logs."""
    return f"{engine_name(vllm_config)[: _MAX_NAME - len(part) - 1]} {part}"


def latent_content(vllm_config: Any) -> Mapping[str, int] | None:
    """Elements of a row of an MLA cache by name; None for models without MLA."""
    config = vllm_config.model_config.hf_text_config
    rank, rope = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    return {"latent": rank, "rope": rope} if vllm_config.model_config.use_mla and rank and rope else None


def cpu_isa(vllm_config: Any) -> Callable[[Any], str] | None:
    """Which of vLLM's CPU attention kernels, and with it which order of keys in a block, serves a cache specification.

    None where attention does not run on the CPU.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    return lambda spec: _get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)


def scales(vllm_config: Any, layout: CacheLayout) -> dict[str, dict[str, float]]:
    """Scales of fp8 keys and values, which vLLM keeps in its attention layers, by layer."""
    fp8 = {record.tag for record in layout.records if {plane.dtype for plane in record.planes} & {"float8_e4m3fn"}}
    found = {}
    for group in layout.groups:
        for piece in group.slices:
            layer = vllm_config.compilation_config.static_forward_context.get(piece.layer)
            if piece.record not in fp8 or layer is None:
                continue
            names = {plane.name for plane in layout.record(piece.record).planes}
            found[piece.layer] = {
                name: float(getattr(layer, "_v_scale_float" if name == "v" else "_k_scale_float", 1.0))
                for name in names
            }
    return found
