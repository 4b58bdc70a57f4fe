"""Damages blocks on their way into a decode engine, to prove that the tests would notice a connector that does so."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

KINDS = ("zeroed", "shifted", "reversed", "dropped")


class Corruption:
    """Stands between a connector and its engine, both in this process.

    When the connector reports a request as received, the request's full blocks are changed as `how` says:
    one becomes zeros, all move by one place, their order is reversed, or one gets back what it held before.
    """

    def __init__(self, scheduler: Any, executor: Any) -> None:
        self.how: str | None = None
        self._manager = scheduler.kv_cache_manager
        runner = executor.driver_worker.worker.model_runner
        context = runner.compilation_config.static_forward_context
        self._caches = [
            [context[layer].kv_cache for layer in group.layer_names]
            for group in scheduler.kv_cache_config.kv_cache_groups
        ]
        self._tokens_by_request: dict[str, int] = {}
        self._before: dict[str, list[list[torch.Tensor]]] = {}
        self._block_tokens = scheduler.block_size
        self._wrap_scheduler(scheduler.connector)
        self._wrap_worker(get_kv_transfer_group())

    def _wrap_scheduler(self, connector: Any) -> None:
        allocated = connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, count: int) -> None:
            if count > 0:
                self._tokens_by_request[request.request_id] = request.num_prompt_tokens
                self._before[request.request_id] = [
                    [cache[list(ids)].clone() for cache in caches]
                    for caches, ids in zip(self._caches, self._full_blocks(request.request_id), strict=True)
                ]
            allocated(request, blocks, count)

        connector.update_state_after_alloc = update_state_after_alloc

    def _wrap_worker(self, connector: Any) -> None:
        get = connector.get_transfer_results

        def get_transfer_results(finished_ids: set[str]) -> Any:
            results = get(finished_ids)
            for request_id in results.finished_recving or ():
                before = self._before.pop(request_id, None)
                if before is not None and self.how:
                    for caches, ids, old in zip(self._caches, self._full_blocks(request_id), before, strict=True):
                        for cache, was in zip(caches, old, strict=True):
                            self._damage(cache, list(ids), was)
            return results

        connector.get_transfer_results = get_transfer_results

    def _full_blocks(self, request_id: str) -> list[list[int]]:
        full = self._tokens_by_request[request_id] // self._block_tokens
        return [ids[:full] for ids in self._manager.get_block_ids(request_id)]

    def _damage(self, cache: torch.Tensor, ids: list[int], before: torch.Tensor) -> None:
        now, middle = cache[ids].clone(), len(ids) // 2
        match self.how:
            case "zeroed":
                cache[ids[middle]] = 0
            case "shifted":
                cache[ids] = now.roll(1, 0)
            case "reversed":
                cache[ids] = now.flip(0)
            case "dropped":
                cache[ids[middle]] = before[middle]
