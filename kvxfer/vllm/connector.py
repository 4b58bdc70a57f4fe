"""`KvxferConnector`: vLLM's connector interface, each call handed to the scheduler's or the worker's side.

Imports scheduler, worker, options, stats, versions, and vLLM's base class.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvxfer.vllm import versions
from kvxfer.vllm.metadata import Orders, RankReport
from kvxfer.vllm.options import options_of
from kvxfer.vllm.scheduler import SchedulerSide
from kvxfer.vllm.stats import KvxferPromMetrics, KvxferStats
from kvxfer.vllm.worker import WorkerSide


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands KV from a prefill engine to a decode engine: prefill leases blocks, decode fetches them with a ticket."""

    _cache_hit_source = versions.peer_cache_hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = options_of(vllm_config.kv_transfer_config)
        versions.check_groups(len(kv_cache_config.kv_cache_groups))
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, options)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, options)

    def shutdown(self) -> None:
        """End transfers, leases and threads."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether layers are looked at one by one, which cannot be done within a graph of the whole model."""
        return bool(extra_config.get("stream_layers"))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Not supported: peers may read the cache at any time."""
        return False

    # --- worker ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before any block may be overwritten: leases of blocks that change hands in this step end."""
        assert isinstance(kv_connector_metadata, Orders)
        self._worker.revoke(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Before the forward pass: what is published or fetched need not wait for it."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Orders)
        self._worker.carry_out(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads have been started when the step's metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The layer of prompts that this step completes may go to decode now; others are read when they are done."""
        self._worker.computed(layer_name)

    def wait_for_save(self) -> None:
        """Nothing is waited for: blocks are leased until they have been read."""
        self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._worker.results()
        return versions.transfer_results(results.sent, results.received, results.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._worker.results()
        return results.sent or None, results.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> RankReport | None:
        return self._worker.report()

    # --- scheduler ------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._scheduler.loaded_groups()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.take_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_frees()

    # --- statistics -----------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvxferStats | None:
        return (self._scheduler or self._worker).stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferStats:
        return KvxferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvxferPromMetrics:
        return KvxferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


versions.check(KvxferConnector)
