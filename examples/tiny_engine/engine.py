"""The engine: sequences, their blocks, and greedy generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .model import Llama
from .paged_cache import PagedCache

PREFILL_CHUNK_TOKENS = 512


@dataclass
class Sequence:
    """One request's place in the cache."""

    block_table: list[int]
    """Block ids in order of position: position p is in block `block_table[p // block_tokens]`."""
    cached_tokens: int
    """Positions 0 to `cached_tokens` - 1 have their keys and values in the cache."""
    next_token: int
    """The token generated last. It stands at position `cached_tokens`, where nothing has been written yet."""


class Engine:
    """Generates text for sequences that share one paged cache. One thread at a time may use it."""

    def __init__(self, model: Llama, cache: PagedCache) -> None:
        self.model = model
        self.cache = cache

    def prefill(self, prompt: list[int]) -> Sequence:
        """Compute a prompt's keys and values, and the first generated token.

        Runs the prompt in chunks, which bounds the memory of the attention scores. Raises `OutOfBlocks` when
        the prompt does not fit the free blocks, `ValueError` when it does not fit the model's context.
        """
        longest = self.model.config.context_tokens - 1
        if not 1 <= len(prompt) <= longest:
            raise ValueError(f"expected a prompt of 1 to {longest} tokens, saw {len(prompt)}: shorten it")
        block_table = self.cache.pool.allocate(self.cache.blocks_for(len(prompt)))
        try:
            for start in range(0, len(prompt), PREFILL_CHUNK_TOKENS):
                chunk = prompt[start : start + PREFILL_CHUNK_TOKENS]
                hidden = self.model.forward(chunk, start, block_table, self.cache)
        except BaseException:
            self.cache.pool.free(block_table)
            raise
        return Sequence(block_table, len(prompt), self._most_likely(hidden[-1]))

    def adopt(self, prompt_tokens: int, first_token: int) -> Sequence:
        """Make a sequence whose prompt, of `prompt_tokens` tokens, was prefilled elsewhere.

        Allocates its blocks and leaves them as they are: the caller has the prompt's keys and values written
        into them before it decodes the sequence, or frees it. Raises `OutOfBlocks`.
        """
        block_table = self.cache.pool.allocate(self.cache.blocks_for(prompt_tokens))
        return Sequence(block_table, prompt_tokens, first_token)

    def step(self, sequence: Sequence) -> None:
        """Generate one token: store the keys and values of `next_token`, then replace it by the next one.

        When that needs a block and none is free, raises `OutOfBlocks` and leaves the sequence as it was.
        """
        position = sequence.cached_tokens
        if position == len(sequence.block_table) * self.cache.block_tokens:
            sequence.block_table += self.cache.pool.allocate(1)
        hidden = self.model.forward([sequence.next_token], position, sequence.block_table, self.cache)
        sequence.cached_tokens += 1
        sequence.next_token = self._most_likely(hidden[-1])

    def decode(self, sequence: Sequence, max_tokens: int) -> Iterator[int]:
        """Yield the generated tokens, the first one included.

        Ends when the model ends its answer, after `max_tokens` tokens, or when the context is full. Iterators
        of several sequences may be advanced in turn. Once started, an iterator frees its sequence when it
        ends, fails or is closed.
        """
        limit = min(max_tokens, self.model.config.context_tokens - sequence.cached_tokens)
        try:
            for count in range(1, limit + 1):
                if sequence.next_token == self.model.config.end_token:
                    return
                yield sequence.next_token
                if count < limit:
                    self.step(sequence)
        finally:
            self.free(sequence)

    def free(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back. The sequence has none afterwards."""
        blocks, sequence.block_table = sequence.block_table, []
        self.cache.pool.free(blocks)

    def _most_likely(self, hidden: np.ndarray) -> int:
        return int(np.argmax(self.model.logits(hidden)))
