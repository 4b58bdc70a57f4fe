"""LMCache's multi_layer_kv_transfer: all layers gathered into one buffer, copied over, and scattered again."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from peers import Work, with_torch

LAYERS, BLOCK_TOKENS, HEADS, HEAD_DIM = 32, 16, 8, 128
_ROW = HEADS * HEAD_DIM


def rows(work: Work) -> Iterator[dict[str, Any]]:
    """One row: a bf16 cache of 32 layers in blocks of 32 KiB. KVXFER_PEER_LMCACHE may name the library."""
    import torch

    ops = _load()
    with_torch.connect()
    tokens = work.total // (LAYERS * 2 * _ROW * 2) // BLOCK_TOKENS * BLOCK_TOKENS
    blocks = 2 * tokens // BLOCK_TOKENS
    ends = []
    for seed, device in enumerate((with_torch.SOURCE, with_torch.TARGET)):
        shape = (2, blocks, BLOCK_TOKENS, HEADS, HEAD_DIM)
        layers = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
        pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=device)
        picked = with_torch.ids(blocks, tokens // BLOCK_TOKENS, seed, device)
        slots = (picked[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)).reshape(-1)
        buffer = torch.empty((2, LAYERS, tokens, _ROW), dtype=torch.bfloat16, device=device)
        ends.append((layers, pointers, slots, buffer, torch.device(device)))

    def pass_over(end: tuple, direction: Any) -> None:
        _, pointers, slots, buffer, device = end
        with torch.cuda.device(device):
            ops.multi_layer_kv_transfer(
                buffer,
                pointers,
                slots,
                device,
                blocks * BLOCK_TOKENS,
                direction,
                ops.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
                block_size=BLOCK_TOKENS,
                head_size=HEAD_DIM,
            )

    def move() -> None:
        source, target = ends
        pass_over(source, ops.TransferDirection.D2H)
        target[3].copy_(source[3], non_blocking=True)
        pass_over(target, ops.TransferDirection.H2D)

    move()
    flat = [end[0][-1].view(2, -1, HEADS, HEAD_DIM)[:, end[2]].cpu() for end in ends]
    assert torch.equal(*flat)
    nbytes = LAYERS * 2 * tokens * _ROW * 2
    what = "multi_layer_kv_transfer, copy, multi_layer_kv_transfer"
    yield with_torch.row(what, nbytes, move, work.calls, piece=BLOCK_TOKENS * _ROW * 2)


def _load() -> ModuleType:
    """The extension alone, without the package and what that needs."""
    path = os.environ.get("KVXFER_PEER_LMCACHE")
    if path is None:
        found = importlib.util.find_spec("lmcache")
        if found is None:
            raise ImportError("no module named lmcache")
        libraries = [p for f in found.submodule_search_locations for p in sorted(Path(f).glob("c_ops*.so"))]
        if not libraries:
            raise ImportError("lmcache has no c_ops library")
        path = str(libraries[0])
    spec = importlib.util.spec_from_file_location("c_ops", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
