"""The paged KV cache: a pool that hands out blocks, and reads and writes through a block table."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

KEY, VALUE = 0, 1


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than were asked for. Nothing was allocated."""


class BlockNotAllocated(Exception):
    """A block was freed that was not allocated, or was freed twice. Nothing was freed."""


class BlockPool:
    """Hands out the block ids 0 to `num_blocks` - 1. Blocks that were freed last are reused first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._allocated: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """How many blocks `allocate` can still hand out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, which are the caller's until it frees them."""
        if count > len(self._free):
            raise OutOfBlocks(
                f"expected {count} free blocks, saw {len(self._free)} of {self.num_blocks}: "
                "finish sequences first, or give the cache more blocks"
            )
        blocks = [self._free.pop() for _ in range(count)]
        self._allocated.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back."""
        blocks = list(blocks)
        unknown = sorted(set(blocks) - self._allocated)
        if unknown or len(set(blocks)) != len(blocks):
            raise BlockNotAllocated(
                f"expected distinct allocated blocks, saw {blocks}, of which {unknown} are not allocated: "
                "free each block once"
            )
        self._allocated.difference_update(blocks)
        self._free.extend(reversed(blocks))


class PagedCache:
    """Keys and values of every layer, in blocks.

    `layers` maps a layer's name to an array [num_blocks, 2, block_tokens, kv_heads, head_dim]; its second
    dimension is keys (after RoPE), then values. A block id means the same place in every layer, so that a
    sequence needs one block table. These arrays are what kvxfer registers.

    A fresh block holds whatever its last owner left. Reads stop at the last position that was written.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "float32",
        allocate: Callable[..., np.ndarray] = np.zeros,
    ) -> None:
        """`dtype` is float32 or float16. `allocate(shape, dtype=...)` makes each layer's array.

        `kvxfer.shared_empty` in place of `numpy.zeros` gives memory that a peer on this host reads in place.
        """
        shape = (num_blocks, 2, block_tokens, kv_heads, head_dim)
        self.layers = {f"layers.{index}": allocate(shape, dtype=dtype) for index in range(num_layers)}
        self.pool = BlockPool(num_blocks)
        self.block_tokens = block_tokens
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self._arrays = list(self.layers.values())

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def write(self, layer: int, block_table: Sequence[int], start: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Store one layer's keys and values [tokens, kv_heads, head_dim] at positions `start` and after."""
        positions = np.arange(start, start + len(keys))
        blocks = np.asarray(block_table)[positions // self.block_tokens]
        slots = positions % self.block_tokens
        self._arrays[layer][blocks, KEY, slots] = keys
        self._arrays[layer][blocks, VALUE, slots] = values

    def read(self, layer: int, block_table: Sequence[int], tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Gather one layer's keys and values of the first `tokens` positions.

        Both are float32 copies [tokens, kv_heads, head_dim].
        """
        array = self._arrays[layer]
        blocks = list(block_table[: self.blocks_for(tokens)])
        by_position = (-1, self.kv_heads, self.head_dim)
        keys = array[blocks, KEY].reshape(by_position)[:tokens]
        values = array[blocks, VALUE].reshape(by_position)[:tokens]
        return keys.astype(np.float32, copy=False), values.astype(np.float32, copy=False)

    def checksum(self, block_table: Sequence[int], tokens: int) -> int:
        """CRC-32 over the keys and values of the first `tokens` positions of all layers, in float32."""
        crc = 0
        for layer in range(len(self._arrays)):
            for half in self.read(layer, block_table, tokens):
                crc = zlib.crc32(np.ascontiguousarray(half), crc)
        return crc
