"""The vLLM connector: prefill and decode pools of vLLM hand over KV through kvxfer.

`KvxferConnector` is loaded by vLLM, by the name that the entry point registers or with
``"kv_connector_module_path": "kvxfer.vllm"``. Reading order: connector (what vLLM calls), scheduler (decides), metadata
(what it tells the workers), worker (publishes and fetches). Nothing else of kvxfer imports this package, and it is the
only one that imports vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.vllm.connector import KvxferConnector

__all__ = ["KvxferConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvxferConnector":  # late: plugins are loaded before vLLM itself
        from kvxfer.vllm.connector import KvxferConnector

        return KvxferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
