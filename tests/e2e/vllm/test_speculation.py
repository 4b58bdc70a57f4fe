"""Speculative decoding in both pools, and in one alone."""

from __future__ import annotations

from typing import Any

import pytest

from . import connectors, models
from .comparing import assert_same, hand_over, prompt
from .conftest import Reference, Start


def speculation(kind: str) -> dict[str, Any]:
    if kind == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    return {"method": "draft_model", "model": str(models.folder("gqa")), "num_speculative_tokens": 2}


@pytest.mark.parametrize("where", ["both", "decode"])
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_speculation(start_here: Start, reference: Reference, kind: str, where: str) -> None:
    """A draft model's KV comes along. Where prefill has none, decode says what differs and computes itself."""
    connector, options = connectors.kvxfer("recompute"), {"speculative_config": speculation(kind)}
    p = start_here("prefill", connector=connector, **(options if where == "both" else {}))
    d = start_here("decode", connector=connector, core=1, **options)
    prompts = [prompt(200, seed=2), prompt(40, seed=1) * 8]
    answers = hand_over(p, d, *prompts)
    assert_same(answers, reference(*prompts))
    refused = (kind, where) == ("draft", "decode")
    for answer, x in zip(answers, prompts, strict=True):
        assert (answer.computed_tokens >= len(x)) == refused  # drafts that were wrong are counted too, a few tens
    assert ("speculative.method" in d.log.read_text()) == refused


def test_decode_alone_drafts_when_allowed(start_here: Start, reference: Reference) -> None:
    """The prompt's KV comes, that of the draft model does not: right answers, from worse drafts."""
    p = start_here("prefill", connector=connectors.kvxfer())
    d = start_here(
        "decode",
        connector=connectors.kvxfer(allow_missing_layers=True),
        core=1,
        speculative_config=speculation("draft"),
    )
    x = prompt(200, seed=3)
    [answer] = hand_over(p, d, x)
    assert_same([answer], reference(x))
    assert answer.computed_tokens < len(x)
