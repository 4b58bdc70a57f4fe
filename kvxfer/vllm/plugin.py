"""Makes ``"kv_connector": "KvxferConnector"`` known to vLLM, through its entry-point group ``vllm.general_plugins``.

Imports vLLM's factory only.
"""

from __future__ import annotations

NAME = "KvxferConnector"


def register() -> None:
    """Register the connector once; vLLM loads plugins in each of its processes, in some more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvxfer.vllm.connector", NAME)
