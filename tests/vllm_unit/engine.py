"""An engine that drives any KVConnectorBase_V1: vLLM's own scheduler and aggregator, and workers with a `FakeModel`.

Needs of vLLM only its Python, so a release that cannot run here (0.26, 0.33) can be looked at as well: unpack its wheel
and put that on PYTHONPATH.

The calls and their order are those of vLLM's V1 model runner. What a connector may not do raises `Breach`, beside the
assertions of vLLM's scheduler: a request reported twice by a worker, or one that was never handed to the connector.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.vllm import versions
from kvxfer.vllm.plugin import register
from kvxfer.vllm.scheduler import SchedulerSide
from tests.processes import until

from .model import HEAD_DIM, HEADS, LAYERS, STATE_VALUES, FakeModel, layer_name

BLOCK_TOKENS = 32
WINDOW = 50
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TO_DECODE = {"do_remote_decode": False, "do_remote_prefill": True}
SECRET = "a secret of the tests"

LASTING = {"_spent", "_ended", "_endpoints", "_index", "_tensors", "_ways_seen", "_seen", "_early"}
"""Attributes that do not belong to a request that is under way: of fixed size, or the newest of what is over."""

torch.set_num_threads(1)
register()
init_none_hash(sha256)
_serial = itertools.count()


class Breach(AssertionError):
    """The connector broke the contract."""


@dataclass
class Answer:
    """How a request ended."""

    status: FinishReason
    kv: dict[str, Any] | None
    local_tokens: int  # prompt tokens that this engine had cached
    external_tokens: int
    computed: list[int] = field(default_factory=list)  # tokens computed in each step


class Rank:
    """One worker: a connector and a model."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, *, rank: int, ranks: int, block_tokens: int) -> None:
        config.parallel_config.rank = rank
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        self.model = FakeModel(
            groups=len(cache.kv_cache_groups),
            state=next(
                (i for i, g in enumerate(cache.kv_cache_groups) if isinstance(g.kv_cache_spec, MambaSpec)), None
            ),
            num_blocks=cache.num_blocks,
            block_tokens=block_tokens,
            rank=rank,
            ranks=ranks,
        )
        self.connector.register_kv_caches(self.model.tensors)
        self.connector.set_host_xfer_buffer_ops(lambda *_: None)
        self.silent = False  # whether it lags behind the others and reports nothing for now
        self._reported: dict[str, set[str]] = {"sent": set(), "received": set()}

    def step(self, scheduled: Any, forward: Callable[[Rank], None] | None) -> KVConnectorOutput:
        connector, metadata = self.connector, scheduled.kv_connector_metadata
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if forward is not None:
            forward(self)
        connector.start_load_kv(None)
        connector.wait_for_save()
        output = KVConnectorOutput()
        if not self.silent:
            sent, received, failed = self._results(scheduled.finished_req_ids)
            output.finished_sending = self._once("sent", sent)
            output.finished_recving = self._once("received", received)
            output.failed_recving = failed
            if not failed <= received:
                raise Breach(f"failed but not received: {failed - received}")
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return output

    def _results(self, finished: set[str]) -> tuple[set[str], set[str], set[str]]:
        if not versions.REPORTS_FAILED_REQUESTS:
            sent, received = self.connector.get_finished(finished)
            return sent or set(), received or set(), set()
        results = self.connector.get_transfer_results(finished)
        return results.finished_sending, results.finished_recving, results.failed_recving

    def _once(self, what: str, requests: set[str]) -> set[str]:
        twice = requests & self._reported[what]
        if twice:
            raise Breach(f"reported as {what} twice: {twice}")
        self._reported[what] |= requests
        return requests


class Engine:
    """An engine of `ranks` tensor-parallel workers: full attention, beside it a sliding window, a state, or both."""

    def __init__(
        self,
        *,
        connector: dict[str, Any] | None = None,
        role: str = "kv_both",
        policy: str = "fail",
        num_blocks: int = 64,
        block_tokens: int = BLOCK_TOKENS,
        window: bool = False,
        state: bool = False,
        ranks: int = 1,
        prefix_caching: bool = True,
        max_batched_tokens: int = 4096,
        model_changes: dict[str, Any] | None = None,
        check: bool = True,
        **options: Any,
    ) -> None:
        if (window or state) and not versions.REPORTS_FAILED_REQUESTS:
            pytest.skip("this version of vLLM cannot be told of a failed load in a model with several groups")
        transfer = connector or {
            "kv_connector": "KvxferConnector",
            "kv_connector_extra_config": {"secret": SECRET, "model_id": "tiny", **options},
        }
        self._folder = tempfile.TemporaryDirectory()
        self.config = _config(
            Path(self._folder.name),
            KVTransferConfig(kv_role=role, kv_load_failure_policy=policy, kv_buffer_device="cpu", **transfer),
            block_tokens=block_tokens,
            ranks=ranks,
            prefix_caching=prefix_caching,
            max_batched_tokens=max_batched_tokens,
            model_changes=model_changes or {},
        )
        self.cache = _cache_config(num_blocks, block_tokens, window, state, ranks)
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.config.cache_config.kv_cache_layout = "LBHNC"
        self.check = check  # whether requests read their cache
        self.ranks = [
            Rank(self.config, self.cache, rank=rank, ranks=ranks, block_tokens=block_tokens) for rank in range(ranks)
        ]
        self.config.parallel_config.rank = 0
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=math.lcm(*(group.kv_cache_spec.block_size for group in self.cache.kv_cache_groups)),
            hash_block_size=block_tokens,
            log_stats=True,
        )
        handshakes = {(0, rank): one.connector.get_handshake_metadata() for rank, one in enumerate(self.ranks)}
        if any(handshakes.values()):
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, ranks)
        self._hasher = get_request_block_hasher(block_tokens, sha256)
        self.answers: dict[str, Answer] = {}
        self.stats: list[Any] = []  # of the connector, as vLLM's front end gets them
        self.closed = False
        self.after_layer: Callable[[int], None] = lambda layer: None  # called when the first rank has computed it
        self._computed: dict[str, list[int]] = {}
        self._cached: dict[str, Any] = {}

    # --- what a front end does ------------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], *, kv: dict[str, Any] | None = None, max_tokens: int = 1, **more: Any) -> str:
        """Hand a request to the scheduler; returns its id."""
        request = self.request(prompt, kv=kv, max_tokens=max_tokens, **more)
        self.scheduler.add_request(request)
        return request.request_id

    def request(self, prompt: Sequence[int], *, kv: dict[str, Any] | None, max_tokens: int, **more: Any) -> Request:
        extra = {"kv_transfer_params": dict(kv)} if kv is not None else None
        return Request(
            request_id=f"request-{next(_serial)}",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, extra_args=extra, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )

    def abort(self, request_id: str) -> None:
        """The client is gone."""
        self.answers[request_id] = Answer(FinishReason.ABORT, None, 0, 0)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reject(self, kv: dict[str, Any]) -> None:
        """What vLLM's front end does with a request that it refuses after a hand-off."""
        request = self.request([0], kv=kv, max_tokens=1)
        self.scheduler.add_request(request)
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def run(self, *request_ids: str, timeout_s: float = 60.0) -> list[Answer]:
        """Step until the requests have ended."""
        until(lambda: self.step() or self.answers.keys() >= set(request_ids), timeout_s, f"an end of {request_ids}")
        return [self.answers[request_id] for request_id in request_ids]

    def total(self, name: str) -> int:
        """Sum of one of the connector's counters."""
        return sum(stats[name] if isinstance(stats[name], int) else len(stats[name]) for stats in self.stats)

    def settle(self, timeout_s: float = 60.0) -> None:
        """Step until every block is free."""
        until(lambda: self.step() or self.free_blocks() == self.cache.num_blocks - 1, timeout_s, "all blocks free")

    def prefill(self, prompt: Sequence[int], *, published: bool = True) -> dict[str, Any]:
        """The kv_transfer_params with which a prompt can be fetched from this engine.

        The workers hear of it in the next step, which is made here unless it shall not be `published` yet.
        """
        [answer] = self.run(self.add(prompt, kv=TO_PREFILL))
        assert answer.kv is not None
        if published:
            self.step()
        return answer.kv

    def slots_in_use(self) -> int:
        """Lease slots that tickets of this engine hold."""
        return self.side._connector._node.numbers.in_use

    def cap_loads(self, tokens: int) -> None:
        """Let vLLM want at most so many tokens of what the connector offers, as it does for some of its features."""
        matched = self.scheduler.connector.get_num_new_matched_tokens

        def capped(request: Request, computed_tokens: int) -> tuple[int | None, bool]:
            offered, between_steps = matched(request, computed_tokens)
            return offered and min(offered, tokens), between_steps

        self.scheduler.connector.get_num_new_matched_tokens = capped

    def leftovers(self) -> list[str]:
        """What the connector, and vLLM with it, remembers of requests: names of attributes that are not empty."""
        workers = [rank.connector._worker for rank in self.ranks]
        sides = [self.side, self.side._streams_in, self.side._streams_out, *workers, self._aggregator]
        sides += [worker._layerwise for worker in workers if worker._layerwise is not None]
        looked_at = [(side, vars(side).keys() - LASTING) for side in sides] + [(self.scheduler, {"requests"})]
        for node in (side._connector._node for side in (self.side, *workers)):
            looked_at += [(node, {"promises", "active", "under_way"}), (node.numbers, {"_taken", "_deadlines"})]
        return [
            f"{type(part).__name__}.{name}"
            for part, names in looked_at
            for name in names
            if isinstance(value := getattr(part, name), dict | set | list | deque) and value
        ]

    @property
    def side(self) -> SchedulerSide:
        """Of kvxfer's connector."""
        return self.scheduler.connector._scheduler

    @property
    def endpoint(self) -> str:
        """Where peers reach this engine's scheduler."""
        return self.side._connector.endpoint

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.scheduler.shutdown()
            for rank in self.ranks:
                rank.connector.shutdown()
            self._folder.cleanup()

    # --- a step ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, let every worker do its step, and take in what they report."""
        scheduled = self.scheduler.schedule()
        forward = self._forward(scheduled) if scheduled.total_num_scheduled_tokens else None
        samples = self._samples(scheduled)
        ids = list(scheduled.num_scheduled_tokens)
        outputs = [
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=[samples[request_id] for request_id in ids],
                kv_connector_output=rank.step(scheduled, forward),
            )
            for rank in self.ranks
        ]
        output = self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]
        for found in self.scheduler.update_from_output(scheduled, output).values():
            if found.scheduler_stats is not None and found.scheduler_stats.kv_connector_stats:
                self.stats.append(found.scheduler_stats.kv_connector_stats)
            for one in found.outputs:
                if one.prefill_stats is not None:  # comes with the first token
                    self._cached[one.request_id] = one.prefill_stats
                if one.finish_reason is not None:
                    self.answers[one.request_id] = self._answer_of(one)

    def _forward(self, scheduled: Any) -> Callable[[Rank], None]:
        """The model's pass: it reads what it needs of each request's cache, then writes its new tokens."""
        work = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens  # advanced by schedule()
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            self._computed.setdefault(request_id, []).append(count)
            work.append((tables, list(request.all_token_ids)[:end], end - count))

        def forward(rank: Rank) -> None:
            for layer, group in itertools.product(range(LAYERS), range(len(self.cache.kv_cache_groups))):
                for tables, tokens, start in work:
                    first = max(0, start + 1 - WINDOW) if group else 0
                    if self.check:
                        rank.model.check(group, layer, tables[group], tokens[:start], first)
                    rank.model.write(group, layer, tables[group], tokens, start)
                name = layer_name(group, layer)
                rank.connector.save_kv_layer(name, rank.model.tensors[name], None)
                if rank is self.ranks[0]:
                    self.after_layer(LAYERS * group + layer)

        return forward

    def _samples(self, scheduled: Any) -> dict[str, list[int]]:
        found = {}
        for request_id in scheduled.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            complete = request.num_computed_tokens >= request.num_tokens
            found[request_id] = [7 + request.num_tokens % 90] if complete else []
        return found

    def _answer_of(self, output: Any) -> Answer:
        stats = self._cached.get(output.request_id)
        return Answer(
            status=output.finish_reason,
            kv=output.kv_transfer_params,
            local_tokens=stats.num_local_cached_tokens if stats else 0,
            external_tokens=stats.num_external_cached_tokens if stats else 0,
            computed=self._computed.get(output.request_id, []),
        )


def _config(
    folder: Path,
    transfer: KVTransferConfig,
    *,
    block_tokens: int,
    ranks: int,
    prefix_caching: bool,
    max_batched_tokens: int,
    model_changes: dict[str, Any],
) -> VllmConfig:
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 2 * LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(described | model_changes))
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=4096)
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=block_tokens, enable_prefix_caching=prefix_caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=max_batched_tokens,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=ranks, distributed_executor_backend="external_launcher")
        if ranks > 1
        else ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )


def _cache_config(num_blocks: int, block_tokens: int, window: bool, state: bool, ranks: int) -> KVCacheConfig:
    sizes = {
        "block_size": block_tokens,
        "num_kv_heads": HEADS // ranks,
        "head_size": HEAD_DIM,
        "dtype": torch.float32,
    }
    specs = [FullAttentionSpec(**sizes)] + ([SlidingWindowSpec(**sizes, sliding_window=WINDOW)] if window else [])
    if state:
        shape = (HEADS // ranks, STATE_VALUES)
        specs.append(MambaSpec(block_size=4096, shapes=(shape,), dtypes=(torch.int64,)))
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([layer_name(group, layer) for layer in range(LAYERS)], spec)
            for group, spec in enumerate(specs)
        ],
    )
