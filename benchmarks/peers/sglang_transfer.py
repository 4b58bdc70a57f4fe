"""SGLang's transfer_kv_per_layer_mla (package sglang-kernel): one kernel, a warp an item, over peer memory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import Work, with_torch

QUOTAS = (2, 8, 32)  # blocks of 32 warps; 2 is its default


def rows(work: Work) -> Iterator[dict[str, Any]]:
    """A row for each piece size and quota: pieces pulled from the peer. KVXFER_PEER_SGLANG may name the library."""
    import torch

    torch.ops.load_library(str(_library()))
    move_items = torch.ops.sgl_kernel.transfer_kv_per_layer_mla
    with_torch.connect()
    for piece in work.pieces:
        source, target = (with_torch.pool(2 * work.total, piece, d) for d in (with_torch.SOURCE, with_torch.TARGET))
        count = work.total // piece
        src, dst = (with_torch.ids(len(source), count, seed, with_torch.TARGET) for seed in (0, 1))
        for quota in QUOTAS:

            def move(source=source, target=target, src=src, dst=dst, piece=piece, quota=quota) -> None:
                move_items(source, target, src, dst, piece, quota, 32)

            move()
            assert torch.equal(target[dst].cpu(), source[src.to(source.device)].cpu())
            yield with_torch.row("transfer_kv", count * piece, move, work.calls, piece=piece, max_sms=quota)


def _library() -> Path:
    if named := os.environ.get("KVXFER_PEER_SGLANG"):
        return Path(named)
    found = importlib.util.find_spec("sgl_kernel")
    if found is None:
        raise ImportError("no module named sgl_kernel")
    for folder in found.submodule_search_locations:
        for library in sorted(Path(folder).glob("sm90/common_ops*.so")):
            return library
    raise ImportError("sgl_kernel has no sm90/common_ops library")
