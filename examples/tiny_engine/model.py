"""The Llama architecture in NumPy, with attention that reads and writes a paged KV cache.

All arithmetic is float32. One function, `Llama.forward`, computes prompts and single tokens alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .paged_cache import PagedCache


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a Llama model."""

    name: str
    num_layers: int
    num_heads: int
    """Query heads. Query head h reads KV head h // (num_heads // kv_heads)."""
    kv_heads: int
    head_dim: int
    context_tokens: int
    rope_base: float
    norm_epsilon: float
    end_token: int
    """The token with which the model ends its answer."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> ModelConfig:
        """The configuration in a GGUF file's metadata."""
        return cls(
            name=metadata["general.name"],
            num_layers=metadata["llama.block_count"],
            num_heads=metadata["llama.attention.head_count"],
            kv_heads=metadata["llama.attention.head_count_kv"],
            head_dim=metadata["llama.rope.dimension_count"],
            context_tokens=metadata["llama.context_length"],
            rope_base=metadata["llama.rope.freq_base"],
            norm_epsilon=metadata["llama.attention.layer_norm_rms_epsilon"],
            end_token=metadata["tokenizer.ggml.eos_token_id"],
        )


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer's weights, float32, named as in GGUF. Matrices are [outputs, inputs]."""

    attn_norm: np.ndarray
    attn_q: np.ndarray
    attn_k: np.ndarray
    attn_v: np.ndarray
    attn_output: np.ndarray
    ffn_norm: np.ndarray
    ffn_gate: np.ndarray
    ffn_up: np.ndarray
    ffn_down: np.ndarray

    @classmethod
    def load(cls, checkpoint: Checkpoint, index: int) -> LayerWeights:
        """The weights of layer `index`."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: checkpoint.tensor(f"blk.{index}.{name}.weight") for name in names})


class Llama:
    """A Llama model whose output matrix is its embedding matrix."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = ModelConfig.from_metadata(checkpoint.metadata)
        self._embedding = checkpoint.tensor("token_embd.weight")
        self._output_norm = checkpoint.tensor("output_norm.weight")
        self._layers = [LayerWeights.load(checkpoint, index) for index in range(self.config.num_layers)]
        self._rope = rope_table(self.config.context_tokens, self.config.head_dim, self.config.rope_base)

    def new_cache(
        self,
        *,
        num_blocks: int,
        block_tokens: int = 16,
        dtype: str = "float32",
        allocate: Callable[..., np.ndarray] = np.zeros,
    ) -> PagedCache:
        """An empty cache of this model's shape; the arguments are those of `PagedCache`."""
        return PagedCache(
            num_layers=self.config.num_layers,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
            allocate=allocate,
        )

    def forward(self, tokens: Sequence[int], start: int, block_table: Sequence[int], cache: PagedCache) -> np.ndarray:
        """Run `tokens`, which stand at positions `start` and after, and store their keys and values.

        Positions 0 to `start` - 1 are in the blocks of `block_table`, which has room for the new ones.
        Returns the hidden states after the last layer and its norm, float32 [tokens, hidden].
        """
        hidden = self._embedding[np.asarray(tokens)]
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attention(index, layer, hidden, start, block_table, cache)
            hidden = hidden + self._feed_forward(layer, hidden)
        return rms_norm(hidden, self._output_norm, self.config.norm_epsilon)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Each token's score to come next, float32 [..., vocabulary], from hidden states [..., hidden]."""
        return hidden @ self._embedding.T

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        hidden: np.ndarray,
        start: int,
        block_table: Sequence[int],
        cache: PagedCache,
    ) -> np.ndarray:
        end = start + len(hidden)
        heads = (len(hidden), -1, self.config.head_dim)
        x = rms_norm(hidden, layer.attn_norm, self.config.norm_epsilon)
        rope = self._rope[start:end]
        queries = rotate((x @ layer.attn_q.T).reshape(heads), rope)
        keys = rotate((x @ layer.attn_k.T).reshape(heads), rope)
        values = (x @ layer.attn_v.T).reshape(heads)
        cache.write(index, block_table, start, keys, values)
        keys, values = cache.read(index, block_table, end)
        return causal_attention(queries, keys, values) @ layer.attn_output.T

    def _feed_forward(self, layer: LayerWeights, hidden: np.ndarray) -> np.ndarray:
        x = rms_norm(hidden, layer.ffn_norm, self.config.norm_epsilon)
        return (silu(x @ layer.ffn_gate.T) * (x @ layer.ffn_up.T)) @ layer.ffn_down.T


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """Scale each row of x [..., hidden] to a root mean square of 1, then by `weight` [hidden]."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(epsilon)) * weight


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x), written with tanh because exp(-x) overflows."""
    return x * (np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * x))


def rope_table(context_tokens: int, head_dim: int, base: float) -> np.ndarray:
    """Cosines and sines of the rotary embedding: float32 [context_tokens, 2, head_dim / 2]."""
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(context_tokens), frequencies)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotate(x: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """Apply the rotary embedding `rope` [tokens, 2, head_dim / 2] to x [tokens, heads, head_dim].

    Neighbours make a pair: (0, 1), (2, 3) and so on. GGUF stores the query and key matrices of Llama models
    for that order; Hugging Face's files pair a number with the one half a head further on.
    """
    cosine, sine = rope[:, None, 0], rope[:, None, 1]
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1)
    return rotated.reshape(x.shape)


def causal_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Grouped-query attention of the last positions over all positions.

    `queries` is [tokens, num_heads, head_dim] and belongs to the last `tokens` positions; `keys` and `values`
    are [positions, kv_heads, head_dim]. Returns [tokens, num_heads * head_dim].
    """
    tokens, num_heads, head_dim = queries.shape
    positions, kv_heads, _ = keys.shape
    grouped = queries.reshape(tokens, kv_heads, num_heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    keys = keys.transpose(1, 2, 0)[:, None]
    values = values.transpose(1, 0, 2)[:, None]

    scores = grouped @ keys * np.float32(head_dim**-0.5)
    later = np.arange(positions) > np.arange(positions - tokens, positions)[:, None]
    scores[..., later] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ values).transpose(2, 0, 1, 3).reshape(tokens, num_heads * head_dim)
