"""kv_transfer_config of the connectors under test."""

from __future__ import annotations

from typing import Any

import pytest

BOTH = ["kvxfer", pytest.param("nixl", marks=[pytest.mark.comparison, pytest.mark.full])]
"""Names of the functions below, for tests that either should pass."""

SECRET = "a secret of the tests"


def kvxfer(policy: str = "fail", **extra: Any) -> dict[str, Any]:
    """Ours. `policy` is vLLM's kv_load_failure_policy; `extra` are options of the connector.

    Its times are longer than the defaults: a machine of few cores may stand still for seconds.
    """
    return {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": "kvxfer.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"secret": SECRET, "lease_s": 120.0, "fetch_timeout_s": 100.0, **extra},
    }


def nixl(policy: str = "fail", **extra: Any) -> dict[str, Any]:
    """vLLM's own, for comparison."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }
