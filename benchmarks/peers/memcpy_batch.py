"""CUDA's cudaMemcpyBatchAsync with a descriptor a piece, of at most 16,384 pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import timing

from kvxfer import cuda
from peers import Work

MOST_PIECES = 16384


def rows(work: Work) -> Iterator[dict[str, Any]]:
    """A row for each piece size; the host's time to describe and enqueue the copies is in it."""
    cuda.enable_peer_access(0, 1)
    source, target = (cuda.DeviceMemory(2 * work.total, device=device) for device in (1, 0))
    stream = cuda.Stream(device=0)
    for piece in work.pieces:
        count = min(MOST_PIECES, work.total // piece)
        src, dst = (_addresses(memory, piece, count, seed) for seed, memory in enumerate((source, target)))
        sizes = np.full(count, piece, np.uint64)

        def move(_: None, src=src, dst=dst, sizes=sizes) -> None:
            cuda.copy_bytes_batch(dst, src, sizes, device=0, stream=stream.address)
            stream.synchronise()

        result = timing.measure(move, [None], calls=work.calls, warm_up=2)
        nbytes = count * piece
        yield {
            "what": "cudaMemcpyBatchAsync",
            "piece": piece,
            "nbytes": nbytes,
            "gb_s": result.rate(nbytes),
            "milliseconds": result.median_s * 1e3,
        }


def _addresses(memory: cuda.DeviceMemory, piece: int, count: int, seed: int) -> np.ndarray:
    numbers = np.random.default_rng(seed).permutation(memory.nbytes // piece)[:count]
    return np.uint64(memory.address) + numbers.astype(np.uint64) * np.uint64(piece)
