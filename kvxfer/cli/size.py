"""``kvxfer size``: bytes a token, a request, a receive buffer and staging for a model, offline."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from kvxfer.errors import InvalidRequest
from kvxfer.layout import CacheLayout
from kvxfer.models import layout_for
from kvxfer.models.config import ARCHS, DRAFTS, ENGINES, INDEXER_DTYPES, KV_CACHE_DTYPES, ORDERS
from kvxfer.sizing import CONCURRENCY, Sizes, size

HELP = "bytes a token, a request, receive and staging buffers for a model"

_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvxfer size``."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="name of a known model, e.g. deepseek-ai/DeepSeek-V4.1-Flash")
    source.add_argument("--config", help="path of a model's config.json")
    parser.add_argument(
        "--tokens", type=int, default=32768, help="longest prompt in tokens (default %(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=CONCURRENCY, help="such prompts at once (default %(default)s)"
    )
    parser.add_argument("--engine", default="vllm", help=f"{', '.join(ENGINES)} (default %(default)s)")
    parser.add_argument("--engine-version", help="e.g. 0.32.0; default: the newest described")
    parser.add_argument("--kv-cache-dtype", default="auto", help=", ".join(KV_CACHE_DTYPES))
    parser.add_argument("--indexer-dtype", default="auto", help=", ".join(INDEXER_DTYPES))
    parser.add_argument(
        "--indexer-sparse-logits", action="store_true", help="DeepSeek-V4.1: two-level indexer"
    )
    parser.add_argument("--block-tokens", type=int, help="tokens in a block; default: the engine's own")
    parser.add_argument("--order", default="auto", help=", ".join(ORDERS))
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; figures are per rank")
    parser.add_argument("--arch", help=f"{', '.join(ARCHS)}; default sm100 (avx512 on the CPU)")
    parser.add_argument("--draft", default="none", help=", ".join(DRAFTS))
    parser.add_argument("--draft-tokens", type=int, help="tokens that the draft proposes")
    parser.add_argument("--state-dtype", help="recurrent state of linear attention: fp32 or bf16")
    parser.add_argument(
        "--gpu-memory-gib", type=float, help="memory of one GPU; with it the output says what fits"
    )
    parser.add_argument("--weights-gib", type=float, help="weights, activations and all else on that GPU")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the sizes. Whether a load fits is in the report, not in the exit status."""
    layout = layout_for(
        args.model if args.config is None else Path(args.config),
        args.engine,
        engine_version=args.engine_version,
        kv_cache_dtype=args.kv_cache_dtype,
        indexer_dtype=args.indexer_dtype,
        block_tokens=args.block_tokens,
        tp=args.tp,
        arch=args.arch,
        draft=args.draft,
        order=args.order,
        indexer_sparse_logits=args.indexer_sparse_logits,
        state_dtype=args.state_dtype,
        draft_tokens=args.draft_tokens,
    )
    sizes = size(layout, tokens=args.tokens, concurrency=args.concurrency)
    report = {
        "model": layout.fingerprint["model"],
        "engine": args.engine,
        "tp": args.tp,
        "kv_cache": layout.fingerprint["kv_cache"],
        "records": [record.tag for record in layout.records],
        **dataclasses.asdict(sizes),
        **_fit(sizes, args.gpu_memory_gib, args.weights_gib),
    }
    print(json.dumps(report) if args.json else _table(report, layout, sizes))
    return 0


def _fit(sizes: Sizes, gpu_memory_gib: float | None, weights_gib: float | None) -> dict[str, Any]:
    if gpu_memory_gib is None:
        if weights_gib is not None:
            raise InvalidRequest("--weights-gib says nothing without --gpu-memory-gib; pass both")
        return {}
    weights_gib = weights_gib or 0.0
    if not (
        math.isfinite(gpu_memory_gib) and math.isfinite(weights_gib) and gpu_memory_gib > 0 <= weights_gib
    ):
        raise InvalidRequest(f"GiB must be finite and not negative, got {gpu_memory_gib} and {weights_gib}")
    room = int(gpu_memory_gib * _GIB) - int(weights_gib * _GIB)
    needed = sizes.receive_buffer_bytes + sizes.staging_bytes
    per_request = needed // sizes.concurrency
    return {
        "gpu_memory_bytes": int(gpu_memory_gib * _GIB),
        "weights_bytes": int(weights_gib * _GIB),
        "needed_bytes": needed,
        "left_bytes": room - needed,
        "requests_that_fit": max(0, room // per_request) if per_request else 0,
        "fits": needed <= room,
    }


# --- the table ----------------------------------------------------------------------------------------------


def _table(report: dict[str, Any], layout: CacheLayout, sizes: Sizes) -> str:
    lines = [
        f"{report['model']} on {report['engine']}, per rank of tp {report['tp']}",
        f"  KV cache: {report['kv_cache']}",
        "",
    ]
    rows = [
        ("bytes per token", f"{sizes.bytes_per_token:,}", _growth(sizes)),
        ("  as stored", f"{sizes.stored_bytes_per_token:,}", f"block stride {sizes.block_stride_bytes:,} B"),
        (f"one request of {sizes.tokens:,} tokens", _size(sizes.request_bytes), ""),
        ("  growing", _size(sizes.growing_bytes), ""),
        ("  fixed: sliding windows", _size(sizes.window_bytes_per_request), ""),
        ("  fixed: rings and states", _size(sizes.state_bytes_per_request), ""),
        ("  moved, in whole blocks", _size(sizes.moved_bytes_per_request), ""),
        ("  stored in the pool", _size(sizes.stored_bytes_per_request), ""),
        ("receive buffer", _size(sizes.receive_buffer_bytes), f"{sizes.concurrency} requests at once"),
        ("staging", _size(sizes.staging_bytes), ""),
    ]
    if "fits" in report:
        verdict = "fits" if report["fits"] else "DOES NOT FIT"
        rows.append(
            (
                "next to the weights",
                verdict,
                f"{_size(report['left_bytes'])} left; room for {report['requests_that_fit']}",
            )
        )
    lines += [f"{name:<36}{value:>14}  {note}".rstrip() for name, value, note in rows]
    widths = (("kind", "<9"), ("layers", ">6"), ("block", ">7"), ("window", ">8"), ("blocks", ">9"))
    header = f"{'group':<12}" + "".join(f"{name:{width}}" for name, width in widths)
    header += f"{'slices B':>12}{'stride B':>12}  moved"
    lines += ["", header]
    for group in sizes.groups:
        lines.append(
            f"{group.name:<12}{group.kind:<9}{group.layers:>6}{group.block_tokens or '-':>7}"
            f"{group.window or '-':>8}{group.blocks:>9,}{group.slice_bytes:>12,}"
            f"{group.block_stride_bytes:>12,}  {_size(group.moved_bytes)}"
        )
    return "\n".join(lines)


def _growth(sizes: Sizes) -> str:
    if sizes.bytes_per_token:
        return "the model's own records"
    window = max(group.window for group in sizes.groups)
    return f"all layers have windows: a request stops growing at {window:,} tokens"


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    return ""
