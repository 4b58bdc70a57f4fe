"""Prefill and decode pools that differ: architectures, block sizes, tensor parallelism, number formats."""

from __future__ import annotations

import pytest

from . import connectors
from .comparing import assert_same, hand_over, prompt
from .conftest import Reference, Start

PLAIN_ROTARY = {"custom_ops": ["all", "-rotary_embedding"]}
"""vLLM 0.32's rotary kernel for CPUs rotates only the first rows of what latent attention hands it."""
LENGTHS = (20, 200, 1500)

OPTIONS = {
    "gqa": {},
    "mla": {"block_size": 16, "compilation_config": PLAIN_ROTARY},
    "window": {},
}
"""Options that a model needs on a CPU."""

CONNECTORS = ["kvxfer", pytest.param("nixl", marks=pytest.mark.comparison)]


@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize("model", ["mla", "window"])
def test_architectures(start_here: Start, reference: Reference, model: str, name: str) -> None:
    """Latent attention; and sliding windows beside full attention, where the windows' blocks are clipped."""
    options = {"model": model, "connector": getattr(connectors, name)(), **OPTIONS[model]}
    pair = start_here("prefill", core=0, **options), start_here("decode", core=1, **options)
    prompts = [prompt(tokens) for tokens in LENGTHS]
    answers = hand_over(*pair, *prompts)
    assert_same(answers, reference(*prompts, model=model, options=OPTIONS[model]))
    assert [answer.computed_tokens for answer in answers] == [1] * len(prompts)
    # Latent attention has no prefix cache on a CPU. Elsewhere the second half alone is fetched.
    halves = [p[: len(p) // 2] + prompt(70, seed=1) for p in prompts]
    assert_same(hand_over(*pair, *halves), reference(*halves, model=model))


@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=str)
def test_tensor_parallelism(start_here: Start, reference: Reference, ranks: tuple[int, int], name: str) -> None:
    connector = getattr(connectors, name)()
    pair = [
        start_here(role, connector=connector, core=core, tensor_parallel_size=count)
        for core, (role, count) in enumerate(zip(("prefill", "decode"), ranks, strict=True))
    ]
    prompts = [prompt(tokens) for tokens in LENGTHS]
    answers = hand_over(*pair, *prompts)
    assert_same(answers, reference(*prompts))
    assert [answer.computed_tokens for answer in answers] == [1] * len(prompts)
