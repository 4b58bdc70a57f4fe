"""Statistics of transfers through vLLM's hooks: its log line and its Prometheus endpoint.

Workers record transfers, the scheduler records what it refused; both sides' objects are added up by vLLM, travel as
plain dictionaries, and end in `reduce` (log) and `KvxferPromMetrics.observe`.

Imports vLLM's metric classes and transfer (for statistics).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvxfer.transfers.transfer import TransferStats

SAMPLES = ("seconds", "posted_seconds", "bytes", "wire_bytes")
"""Lists with one number for each fetch that succeeded."""
COUNTS = ("failed", "refused", "expired", "released", "not_published", "parts", "layerwise", "given_up")
"""Loads that failed; tickets refused before a fetch; leases that ran out, that were released, that never began; fetches
that took part of a prompt while the rest was computed; prompts whose end came layer by layer; streams that ended too
early."""


@dataclass
class KvxferStats(KVConnectorStats):
    """Numbers since the last report."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.data = {name: [] for name in SAMPLES} | dict.fromkeys(COUNTS, 0) | {"ways": {}}

    def fetched(self, stats: TransferStats) -> None:
        """A fetch has succeeded."""
        self.data["seconds"].append(stats.seconds)
        self.data["posted_seconds"].append(stats.posted_s)
        self.data["bytes"].append(stats.bytes)
        self.data["wire_bytes"].append(stats.wire_bytes)
        ways = self.data["ways"]
        ways[stats.way] = ways.get(stats.way, 0) + 1

    def count(self, name: str) -> None:
        """One more of COUNTS."""
        self.data[name] += 1

    def take(self) -> KvxferStats | None:
        """What has been recorded, which is forgotten here; None where there is nothing."""
        if self.is_empty():
            return None
        taken = KvxferStats(data=self.data)
        self.reset()
        return taken

    def is_empty(self) -> bool:
        """Whether nothing has been recorded."""
        return not self.data["seconds"] and not any(self.data[name] for name in COUNTS)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another process has recorded."""
        for name in SAMPLES:
            self.data[name].extend(other.data[name])
        for name in COUNTS:
            self.data[name] += other.data[name]
        for way, number in other.data["ways"].items():
            self.data["ways"][way] = self.data["ways"].get(way, 0) + number
        return self

    def reduce(self) -> dict[str, int | float | str]:
        """A line's worth."""
        seconds, size = sorted(self.data["seconds"]), sum(self.data["bytes"])
        number = len(seconds)
        line: dict[str, int | float | str] = {"Fetched": number}
        if number:
            line |= {
                "ways": "+".join(f"{way} {count}" for way, count in sorted(self.data["ways"].items())),
                "ms (median)": round(seconds[number // 2] * 1e3, 3),
                "ms (p99)": round(seconds[min(number - 1, number * 99 // 100)] * 1e3, 3),
                "MB": round(size / 1e6, 3),
                "GB/s": round(size / sum(seconds) / 1e9, 3) if sum(seconds) else 0.0,
            }
        return line | {f"{name.replace('_', ' ')}": self.data[name] for name in COUNTS if self.data[name]}


_SECONDS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
_BYTES = [float(1 << power) for power in range(12, 38, 2)]
_COUNT_NAMES = {
    "failed": ("vllm:kvxfer_failed_fetches", "Fetches of KV that failed."),
    "refused": ("vllm:kvxfer_refused_tickets", "Tickets that were refused: forged, spent, or of another prompt."),
    "expired": ("vllm:kvxfer_expired_leases", "Leases of prefilled blocks that ran out."),
    "released": ("vllm:kvxfer_released_leases", "Leases of prefilled blocks that decode released."),
    "parts": ("vllm:kvxfer_streamed_parts", "Fetches of part of a prompt whose rest was still being computed."),
    "layerwise": ("vllm:kvxfer_layerwise_prompts", "Streamed prompts whose last step came layer by layer."),
    "given_up": ("vllm:kvxfer_streams_given_up", "Streamed prompts of which decode could not get all."),
    "not_published": ("vllm:kvxfer_unpublished_requests", "Prefilled requests that could not be offered to decode."),
}


class KvxferPromMetrics(KVConnectorPromMetrics):
    """The same numbers for Prometheus."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def for_engines(metric: Any) -> dict[int, Any]:
            return {engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()}

        def histogram(name: str, text: str, buckets: list[float]) -> dict[int, Any]:
            return for_engines(
                self._histogram_cls(name=name, documentation=text, buckets=buckets, labelnames=labelnames)
            )

        self._samples = {
            "seconds": histogram("vllm:kvxfer_fetch_seconds", "Time from the start of a fetch to its end.", _SECONDS),
            "posted_seconds": histogram(
                "vllm:kvxfer_posted_seconds", "Part of a fetch's time before its first byte moved.", _SECONDS
            ),
            "bytes": histogram("vllm:kvxfer_fetch_bytes", "Bytes of KV cache in a fetch.", _BYTES),
            "wire_bytes": histogram("vllm:kvxfer_wire_bytes", "Bytes that a fetch moved between processes.", _BYTES),
        }
        self._counts = {
            key: for_engines(self._counter_cls(name=name, documentation=text, labelnames=labelnames))
            for key, (name, text) in _COUNT_NAMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in one engine's numbers."""
        for name, metrics in self._samples.items():
            for value in transfer_stats_data[name]:
                metrics[engine_idx].observe(value)
        for name, metrics in self._counts.items():
            if transfer_stats_data[name]:
                metrics[engine_idx].inc(transfer_stats_data[name])
