"""Text to tokens and back: SmolLM2's byte-level BPE and its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from .checkpoint import CheckpointError

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PRE_TOKENIZER = "smollm"
CONTROL_TOKEN_TYPE = 3


class Tokenizer:
    """SmolLM2's tokenizer, built from the vocabulary and the merges in a checkpoint's metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        pre_tokenizer = metadata["tokenizer.ggml.pre"]
        if pre_tokenizer != PRE_TOKENIZER:
            raise CheckpointError(
                f"expected the pre-tokenizer {PRE_TOKENIZER!r}, saw {pre_tokenizer!r}: use a SmolLM2 model"
            )
        vocabulary = {text: token for token, text in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        self._bpe = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        token_types = metadata["tokenizer.ggml.token_type"]
        self._control_tokens = {token for token, kind in enumerate(token_types) if kind == CONTROL_TOKEN_TYPE}
        self._message_start = vocabulary["<|im_start|>"]
        self._message_end = vocabulary["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text. What looks like a control token stays text: no user can forge a turn."""
        return self._bpe.encode(text).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, control tokens left out. Bytes that make no whole character become U+FFFD."""
        return self._bpe.decode([token for token in tokens if token not in self._control_tokens])

    def encode_chat(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of a conversation in the ChatML template, up to where the assistant's answer begins.

        `turns` are (role, text) pairs. The system prompt that the model was trained with goes in front unless
        the first turn is a system turn.
        """
        if not turns or turns[0][0] != "system":
            turns = [("system", SYSTEM_PROMPT), *turns]
        start, end, newline = self._message_start, self._message_end, self.encode("\n")
        tokens = []
        for role, text in turns:
            tokens += [start, *self.encode(f"{role}\n{text}"), end, *newline]
        return [*tokens, start, *self.encode("assistant\n")]
