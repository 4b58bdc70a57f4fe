"""In MultiConnector, beside another connector; and loaded by the name that the entry point registers."""

from __future__ import annotations

from typing import Any

from tests.processes import until

from . import connectors
from .comparing import assert_same, hand_over, prefill, prompt
from .conftest import Reference, Start

LEASE_S = 10.0


def together(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def test_beside_nixl(start_here: Start, reference: Reference) -> None:
    both = together(
        connectors.kvxfer(response_keys="ticket", lease_s=LEASE_S), connectors.nixl(kv_lease_duration=LEASE_S)
    )
    pair = [start_here(role, connector=both, core=core) for core, role in enumerate(("prefill", "decode"))]
    prompts = [prompt(tokens, seed=1) for tokens in (20, 200, 1500)]
    expected = reference(*prompts)
    before = [engine.free_blocks() for engine in pair]
    assert all("kvxfer_ticket" in kv for kv in prefill(pair[0], prompt(50)))
    answers = hand_over(*pair, *prompts)
    assert_same(answers, expected)
    assert [answer.computed_tokens for answer in answers] == [1] * len(prompts)
    for engine, blocks in zip(pair, before, strict=True):
        until(lambda engine=engine, blocks=blocks: engine.free_blocks() == blocks, 4 * LEASE_S, "all blocks free")


def test_loaded_by_name(start_here: Start, reference: Reference) -> None:
    by_name = connectors.kvxfer()
    del by_name["kv_connector_module_path"]
    pair = [start_here(role, connector=by_name, core=core) for core, role in enumerate(("prefill", "decode"))]
    x = prompt(200, seed=2)
    assert_same(hand_over(*pair, x), reference(x))
