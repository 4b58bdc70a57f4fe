"""A tokenizer for random models, made without a network, for clients that speak in texts."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import transformers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

_UNKNOWN_TOKEN, _UNKNOWN = 3, "<unk>"


def save(into: Path, vocabulary: int) -> None:
    """Token 17 is the word "w17". The unknown one is none of these: its text is cut out of words that contain it."""
    words = {_UNKNOWN if token == _UNKNOWN_TOKEN else f"w{token}": token for token in range(vocabulary)}
    tokenizer = tokenizers.Tokenizer(WordLevel(words, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=_UNKNOWN).save_pretrained(into)
