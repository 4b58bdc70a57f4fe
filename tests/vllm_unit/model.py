"""A model that writes into each layer's cache what a token must leave at its place, and notices anything else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.platforms import current_platform

LAYERS = 2  # of each group
HEADS = 2
HEAD_DIM = 32
STATE_VALUES = 4  # of each head
NULL_BLOCK = 0


class WrongKV(AssertionError):
    """The cache of a scheduled request does not hold what its tokens left there."""


class FakeModel:
    """One rank's share of the heads, for all groups of one engine.

    All groups lie in the same memory, as vLLM's do. A block of the CPU build holds for each head its keys transposed,
    then its values; other builds (where vLLM's Python alone is looked at) keep a token's key and value side by side.
    """

    def __init__(
        self, *, groups: int, state: int | None, num_blocks: int, block_tokens: int, rank: int, ranks: int
    ) -> None:
        self.heads = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        self.block_tokens = block_tokens
        shape = (LAYERS, num_blocks, len(self.heads), block_tokens, 2 * HEAD_DIM)
        self._memory = torch.full(shape, float("nan"))
        self.tensors = {
            layer_name(group, layer): self._memory[layer] for group in range(groups) for layer in range(LAYERS)
        }
        self._state_group = state
        self._states = torch.zeros((LAYERS, num_blocks, 1, 1, len(self.heads) * STATE_VALUES * 8), dtype=torch.int8)
        if state is not None:
            self.tensors |= {layer_name(state, layer): self._states[layer] for layer in range(LAYERS)}

    def write(self, group: int, layer: int, table: Sequence[int], tokens: Sequence[int], first: int) -> None:
        """What the tokens from place `first` on leave in the blocks of one of a group's layers."""
        if group == self._state_group:
            self._states[layer, table[-1], 0, 0] = self._state(layer, tokens)
            return
        blocks, offsets, kept = self._places(table, first, len(tokens))
        keys, values = self._views(layer)
        rows = self._rows(group, layer, tokens, first)[kept]
        keys[blocks[kept], :, :, offsets[kept]] = rows
        values[blocks[kept], :, offsets[kept]] = -rows

    def check(self, group: int, layer: int, table: Sequence[int], tokens: Sequence[int], first: int) -> None:
        """Raise WrongKV unless the layer's blocks hold the tokens from place `first` on."""
        if group == self._state_group:
            if tokens and not torch.equal(self._states[layer, table[-1], 0, 0], self._state(layer, tokens)):
                raise WrongKV(f"the state of layer {layer} is not that after {len(tokens)} tokens")
            return
        blocks, offsets, kept = self._places(table, first, len(tokens))
        if not kept.all():
            raise WrongKV(f"group {group}: token {first + int(kept.argmin())} lies in the null block")
        keys, values = self._views(layer)
        rows = self._rows(group, layer, tokens, first)
        good = (keys[blocks, :, :, offsets] == rows) & (-values[blocks, :, offsets] == rows)
        if not good.all():
            place, head, _ = map(int, (~good).nonzero()[0])
            raise WrongKV(
                f"group {group}, layer {layer}, head {self.heads[head]}, token {first + place} of {len(tokens)} in "
                f"block {int(blocks[place])}"
            )

    def spoil(self, blocks: Sequence[int]) -> None:
        """Fill blocks with what no token leaves."""
        self._memory[:, list(blocks)] = -1e9

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self._memory[layer]
        blocks, heads, tokens, _ = memory.shape
        if not current_platform.is_cpu():
            return memory[..., :HEAD_DIM].transpose(2, 3), memory[..., HEAD_DIM:]
        halves = memory.view(blocks, heads, 2, tokens * HEAD_DIM)
        return (
            halves[:, :, 0].view(blocks, heads, HEAD_DIM, tokens),
            halves[:, :, 1].view(blocks, heads, tokens, HEAD_DIM),
        )

    def _state(self, layer: int, tokens: Sequence[int]) -> torch.Tensor:
        """What a recurrent layer keeps of all tokens so far."""
        value = 0
        for token in tokens:
            value = (value * 31 + token + layer) % (1 << 31)
        heads = torch.tensor([value + 1000 * head for head in self.heads], dtype=torch.int64)
        return heads[:, None].repeat(1, STATE_VALUES).view(-1).view(torch.int8)

    def _places(self, table: Sequence[int], first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Block and offset of each place, and whether it is kept at all."""
        places = torch.arange(first, max(first, end))
        blocks = torch.tensor(table, dtype=torch.long)[places // self.block_tokens]
        return blocks, places % self.block_tokens, blocks != NULL_BLOCK

    def _rows(self, group: int, layer: int, tokens: Sequence[int], first: int) -> torch.Tensor:
        """Keys ``[place, head, channel]``; values are their negatives."""
        heads = torch.tensor(self.heads)
        places = torch.arange(first, len(tokens))
        seeds = ((group * LAYERS + layer) * HEADS + heads)[None, :] * 8191
        seeds = seeds + (torch.tensor(tokens[first:], dtype=torch.long) * 131 + places)[:, None]
        return ((torch.arange(HEAD_DIM) * 7919 + seeds[:, :, None]) % 65521).float()


def layer_name(group: int, layer: int) -> str:
    """The name of a layer, which tells its group."""
    return f"model.layers.{LAYERS * group + layer}.self_attn.attn"
