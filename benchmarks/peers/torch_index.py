"""PyTorch: index_select of the blocks, one copy to the other GPU, index_copy_ into place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peers import Work, with_torch


def rows(work: Work) -> Iterator[dict[str, Any]]:
    """A row for each piece size."""
    import torch

    with_torch.connect()
    for piece in work.pieces:
        source, target = (with_torch.pool(2 * work.total, piece, d) for d in (with_torch.SOURCE, with_torch.TARGET))
        count = work.total // piece
        src = with_torch.ids(len(source), count, 0, with_torch.SOURCE)
        dst = with_torch.ids(len(target), count, 1, with_torch.TARGET)

        def move(source=source, target=target, src=src, dst=dst) -> None:
            target.index_copy_(0, dst, source.index_select(0, src).to(with_torch.TARGET, non_blocking=True))

        move()
        assert torch.equal(target[dst].cpu(), source[src].cpu())
        yield with_torch.row("index_select, copy, index_copy_", count * piece, move, work.calls, piece=piece)
