"""What kvxfer must know of this engine's cache."""

from __future__ import annotations

import kvxfer

from .model import ModelConfig
from .paged_cache import PagedCache

GROUP = "full"
"""The one group of layers that share a block table; tickets and block lists name it."""


def kv_layout(cache: PagedCache, config: ModelConfig) -> kvxfer.CacheLayout:
    """The layout of `cache`: a region for each layer; in a block keys, then values, both in NHD order.

    The fingerprint holds what must agree for keys and values to mean the same on both sides: a peer with
    another model is refused when the two first meet. Block size and block count may differ.
    """
    return kvxfer.CacheLayout.paged(
        layers=list(cache.layers),
        num_blocks=cache.pool.num_blocks,
        block_tokens=cache.block_tokens,
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        dtype=cache.dtype,
        order="NHD",
        group=GROUP,
        fingerprint={"model": config.name, "kv_dtype": cache.dtype},
    )
