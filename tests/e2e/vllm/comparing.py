"""Prompts, hand-offs from a prefill to a decode engine, and the comparison of answers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .engine import TO_PREFILL, Answer, Engine, Request

VOCABULARY = 2048
"""Tokens of the random models. Prompts are lists of numbers."""

TOLERANCE = 1e-5
"""Between log-probabilities of one float32 model computed in different batches: 3e-6 was the most ever seen. A single
wrong block of many changes them by 1e-2 and more, often without changing a token."""


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Random tokens, which begin with the seed's own: no prefix is shared by accident."""
    generator = random.Random(f"{tokens} {seed}")
    return [generator.randrange(4, VOCABULARY) for _ in range(tokens)]


def prefill(engine: Engine, *prompts: Sequence[int], n: int = 1) -> list[dict]:
    """The kv_transfer_params with which a prefill engine answers, after the router's request."""
    answers = engine.generate(*(Request(prompt=p, max_tokens=1, kv=TO_PREFILL) for p in prompts))
    return [answer.kv for answer in answers]


def hand_over(source: Engine, target: Engine, *prompts: Sequence[int], **options: object) -> list[Answer]:
    """Answers of the decode engine `target`, all prompts at once."""
    handed = prefill(source, *prompts)
    return target.generate(
        *(Request(prompt=p, kv=kv, **options) for p, kv in zip(prompts, handed, strict=True))
    )


def deviation(answer: Answer, reference: Answer) -> float:
    """The largest difference of two log-probabilities; infinite where a token differs."""
    if answer.tokens != reference.tokens:
        return float("inf")
    return max(abs(a - b) for a, b in zip(answer.logprobs, reference.logprobs, strict=True))


def assert_same(answers: Sequence[Answer], references: Sequence[Answer], tolerance: float = TOLERANCE) -> None:
    """The same tokens, with the same log-probabilities."""
    deviations = [deviation(a, r) for a, r in zip(answers, references, strict=True)]
    assert max(deviations) <= tolerance, deviations


def first_deviation(answer: Answer, reference: Answer) -> float:
    """The largest difference among likely first tokens; infinite where less than half are likely to both."""
    mine, theirs = answer.choices[0].first, reference.choices[0].first
    shared = mine.keys() & theirs.keys()
    if 2 * len(shared) < len(theirs):
        return float("inf")
    return max(abs(mine[token] - theirs[token]) for token in shared)
