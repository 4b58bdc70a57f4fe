"""What peers that work on torch tensors share: pools, random blocks, a clock over both GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import timing

from kvxfer import cuda

SOURCE, TARGET = "cuda:1", "cuda:0"


def connect() -> None:
    """Let each GPU read and write the other's memory, and make the target's current."""
    import torch

    for device in (0, 1):
        torch.zeros(1, device=f"cuda:{device}")
    cuda.enable_peer_access(0, 1)
    cuda.enable_peer_access(1, 0)
    torch.cuda.set_device(TARGET)


def pool(nbytes: int, piece: int, device: str) -> Any:
    """Bytes as rows of one piece."""
    import torch

    return torch.randint(0, 256, (nbytes // piece, piece), dtype=torch.uint8, device=device)


def ids(of: int, count: int, seed: int, device: str) -> Any:
    """Distinct random row numbers, int64."""
    import torch

    return torch.from_numpy(np.random.default_rng(seed).permutation(of)[:count]).to(device)


def seconds(call: Callable[[], Any]) -> float:
    """Of one call, until both GPUs are idle."""
    import torch

    devices = range(torch.cuda.device_count())
    for device in devices:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def row(what: str, nbytes: int, call: Callable[[], Any], calls: int, **more: Any) -> dict[str, Any]:
    """A measured row."""
    result = timing.measure(lambda _: call(), [None], calls=calls, warm_up=2, clock=seconds)
    return {
        "what": what,
        "nbytes": nbytes,
        "gb_s": result.rate(nbytes),
        "milliseconds": result.median_s * 1e3,
        **more,
    }
