"""Prefill and decode pools that differ: architectures, block sizes, tensor parallelism, number formats."""

from __future__ import annotations

import pytest
import torch

from . import connectors
from .comparing import assert_same, first_deviation, hand_over, prompt
from .conftest import Reference, Start
from .engine import Answer, Request

PLAIN_ROTARY = {"custom_ops": ["all", "-rotary_embedding"]}
"""vLLM 0.32's rotary kernel for CPUs rotates only the first rows of what latent attention hands it."""
LENGTHS = (20, 200, 1500)

OPTIONS = {
    "gqa": {},
    "mla": {"block_size": 16, "compilation_config": PLAIN_ROTARY},
    "window": {},
}
"""Options that a model needs on a CPU."""

@pytest.mark.parametrize("name", connectors.BOTH)
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


@pytest.mark.parametrize("name", connectors.BOTH)
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


@pytest.mark.parametrize(
    "name",
    [
        "kvxfer",
        pytest.param(
            "nixl",
            marks=[
                pytest.mark.comparison,
                pytest.mark.full,
                pytest.mark.xfail(strict=True, reason="larger on decode: silently wrong; smaller: refused by decode"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("blocks", [(32, 64), (64, 32), (32, 96)], ids=str)
def test_block_sizes(start_here: Start, reference: Reference, blocks: tuple[int, int], name: str) -> None:
    """On a CPU the tokens of a block lie interleaved, so this is more than other offsets."""
    connector = getattr(connectors, name)()
    pair = [
        start_here(role, connector=connector, core=core, block_size=size)
        for core, (role, size) in enumerate(zip(("prefill", "decode"), blocks, strict=True))
    ]
    prompts = [prompt(tokens) for tokens in (*LENGTHS, 64, 65, 96)]
    answers = hand_over(*pair, *prompts)
    assert_same(answers, reference(*prompts))
    assert [answer.computed_tokens for answer in answers] == [1] * len(prompts)
    halves = [p[: len(p) // 2] + prompt(70, seed=1) for p in prompts]
    assert_same(hand_over(*pair, *halves), reference(*halves))


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM stores fp8 KV on CPUs with AVX-512 or AMX only, and this one has neither",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_in_decode(start_here: Start, reference: Reference, dtype: str) -> None:
    """The first token's log-probabilities are as near to float32's as if the engine with fp8 had computed all itself.

    And that is near enough to notice a lost block.
    """
    connector = connectors.kvxfer()
    p = start_here("prefill", connector=connector, core=0, dtype=dtype)
    d = start_here("decode", connector=connector, core=1, dtype=dtype, kv_cache_dtype="fp8")
    prompts = [prompt(tokens, seed=9) for tokens in (100, 150, 200, 250, 300, 350)]
    references = reference(*prompts)

    def deviations(answers: list[Answer]) -> list[float]:
        d.forget()
        return [first_deviation(answer, expected) for answer, expected in zip(answers, references, strict=True)]

    answers = hand_over(p, d, *prompts)
    assert [answer.computed_tokens for answer in answers] == [1] * len(prompts)
    handed_over = deviations(answers)
    alone = deviations(d.generate(*(Request(prompt=x) for x in prompts)))
    d.corrupt("zeroed")
    damaged = deviations(hand_over(p, d, *prompts))
    assert max(handed_over) <= max(alone) < min(damaged), (handed_over, alone, damaged)
