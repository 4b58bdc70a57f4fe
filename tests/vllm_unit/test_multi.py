"""Beside another connector of a MultiConnector: no key of the answer, and no handshake, belongs to both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from .engine import SECRET, TO_PREFILL, Engine
from .test_contract import prompt, settle

OURS = {
    "kv_connector": "KvxferConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"secret": SECRET, "model_id": "tiny", "response_keys": "ticket"},
}
OTHERS = {
    "nixl": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    "bench": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
}


def beside(*connectors: dict) -> dict:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What NixlConnector asks of a worker's process."""
    pytest.importorskip("nixl")
    if not current_platform.device_type:
        pytest.skip("this build of vLLM finds no device here, and NixlConnector wants one")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize("order", ["first", "last"])
def test_beside_nixl(start: Callable[..., Engine], nixl: None, order: str) -> None:
    children = [OURS, OTHERS["nixl"]] if order == "first" else [OTHERS["nixl"], OURS]
    prefill = start(connector=beside(*children))
    [answer] = prefill.run(prefill.add(prompt(100), kv=TO_PREFILL))
    prefill.step()
    assert "kvxfer_ticket" in answer.kv and answer.kv["remote_block_ids"]
    decode = start(connector=beside(OURS))
    [answer] = decode.run(decode.add(prompt(100), kv=answer.kv, max_tokens=2))
    assert (answer.external_tokens, answer.computed) == (100, [1, 1])
    settle(decode)
    stats = [one for one in decode.stats if "KvxferConnector" in one]
    assert sum(len(one["KvxferConnector"]["bytes"]) for one in stats) == 1


def test_the_other_connector_loads(start: Callable[..., Engine]) -> None:
    """The one that is asked first loads; our lease is released."""
    prefill = start()
    decode = start(connector=beside(OTHERS["bench"], OURS), check=False)
    kv = prefill.prefill(prompt(100))
    decode.run(decode.add(prompt(100), kv=kv, max_tokens=2))
    settle(decode, prefill)
    assert prefill.total("released") == 1
