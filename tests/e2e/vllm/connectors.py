"""kv_transfer_config of the connectors under test."""

from __future__ import annotations

from typing import Any

SECRET = "a secret of the tests"


def kvxfer(policy: str = "fail", **extra: Any) -> dict[str, Any]:
    """Ours. `policy` is vLLM's kv_load_failure_policy; `extra` are options of the connector."""
    return {
        "kv_connector": "KvxferConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"secret": SECRET, **extra},
    }


def nixl(policy: str = "fail", **extra: Any) -> dict[str, Any]:
    """vLLM's own, for comparison."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }
