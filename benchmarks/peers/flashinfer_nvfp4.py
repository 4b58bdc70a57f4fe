"""FlashInfer's NVFP4: quantise and append to a paged cache, and dequantise; on one GPU.

Its kernels are compiled at their first use, which takes minutes. They are measured only where that has been done:
``python -m peers.flashinfer_nvfp4`` in benchmarks/ does it (nvcc and ninja needed, a GPU not; set
FLASHINFER_CUDA_ARCH_LIST=9.0a) into FLASHINFER_WORKSPACE_BASE.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peers import Work, with_torch

TOKENS, HEADS, HEAD_DIM, PAGE = 262_144, 8, 128, 16


def rows(work: Work) -> Iterator[dict[str, Any]]:
    """Bytes are of bf16, read by the append and written by the dequantisation."""
    import torch

    for spec in _kernels():
        if not spec.is_compiled:
            yield {"skipped": f"the kernels {spec.name!r} are not compiled ({spec.jit_library_path})"}
            return
    import flashinfer

    device = with_torch.TARGET
    torch.cuda.set_device(device)
    key, value = (torch.randn(TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    pages = TOKENS // PAGE
    shape = (2 * pages, PAGE, HEADS)
    cache = tuple(torch.zeros(*shape, HEAD_DIM // 2, dtype=torch.uint8, device=device) for _ in range(2))
    scales = tuple(torch.zeros(*shape, HEAD_DIM // 16, dtype=torch.float8_e4m3fn, device=device) for _ in range(2))
    ids = with_torch.ids(2 * pages, pages, 0, device).int()
    whole = torch.tensor([0, pages], dtype=torch.int32, device=device)
    last = torch.tensor([PAGE], dtype=torch.int32, device=device)
    batch = torch.zeros(TOKENS, dtype=torch.int32, device=device)
    positions = torch.arange(TOKENS, dtype=torch.int32, device=device)

    def append() -> None:
        flashinfer.page.nvfp4_quantize_append_paged_kv_cache(
            key, value, batch, positions, cache, scales, ids, whole, last, 1.0, 1.0, kv_layout="NHD"
        )

    nbytes = 2 * key.numel() * 2
    yield with_torch.row("NVFP4 quantise and append", nbytes, append, work.calls)

    vectors = TOKENS * HEADS
    codes = torch.randint(0, 256, (vectors, HEAD_DIM // 2), dtype=torch.uint8, device=device)
    block_scales = torch.full((vectors, HEAD_DIM // 16), 0x38, dtype=torch.uint8, device=device)
    one = torch.ones(1, dtype=torch.float32, device=device)

    def dequantise() -> None:
        flashinfer.quantization.fp4_quantization.nvfp4_kv_dequantize(codes, block_scales, one)

    yield with_torch.row("NVFP4 dequantise", vectors * HEAD_DIM * 2, dequantise, work.calls)


def _kernels() -> list[Any]:
    from flashinfer.jit.fp4_kv_dequantization import gen_fp4_kv_dequantization_module
    from flashinfer.jit.page import gen_page_module

    return [gen_page_module(), gen_fp4_kv_dequantization_module()]


if __name__ == "__main__":
    for kernel in _kernels():
        kernel.build(verbose=True)
