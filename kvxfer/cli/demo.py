"""Hands a KV cache from a prefill process to a decode process and shows that it arrived.

Without --synthetic: SmolLM2-135M-Instruct on the tiny engine of examples/. The prefill process computes the prompt,
the decode process fetches its KV cache and writes the answer, and one process alone writes it again to compare. With
--synthetic: a cache of a big model's size, with random contents, checked by its checksum.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os

from kvxfer import checks
from kvxfer.errors import InvalidRequest

HELP = "hand a KV cache from a prefill process to a decode process"

DEFAULT_PROMPT = "Why is the sky blue?"
DEFAULT_MAX_TOKENS = 48
DEFAULT_MODEL = "deepseek-ai/DeepSeek-V4.1-Flash"
DEFAULT_TOKENS = 100_000
_ON_GPUS = ("cuda_ipc", "nccl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvxfer demo``."""
    parser.add_argument("--prompt", help=f"what to ask the model (default: {DEFAULT_PROMPT})")
    parser.add_argument("--max-tokens", type=int, help=f"longest answer in tokens (default {DEFAULT_MAX_TOKENS})")
    parser.add_argument("--synthetic", action="store_true", help="random contents in the size of --model and --tokens")
    parser.add_argument("--model", help=f"with --synthetic: a known model (default {DEFAULT_MODEL})")
    parser.add_argument("--tokens", type=int, help=f"with --synthetic: prompt length (default {DEFAULT_TOKENS:,})")
    parser.add_argument(
        "--memory", choices=("shared", "private", "gpu"), help="where the caches lie (default: where --backend reaches)"
    )
    parser.add_argument("--backend", default="auto", help="shm, nixl, ... (default: the best)")
    parser.add_argument("--way", choices=("mapped", "direct", "packed"), help="force a way (default: the best)")
    parser.add_argument("--wire", default="raw", help="wire format (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What ``kvxfer demo --json`` prints."""

    model: str
    backend: str
    way: str
    wire: str
    tokens: int
    bytes: int  # of cache
    wire_bytes: int  # that crossed between the processes
    seconds: float
    gigabytes_per_s: float
    verified: bool | None  # the bytes that arrived are those that were sent; None for a lossy wire format
    text: str | None
    text_matches: bool | None
    reference_text: str | None = None
    equal_tokens: int | None = None  # how many tokens of the two texts agree before the first that differs


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when what arrived is what was sent."""
    # One BLAS thread a process, before NumPy is loaded: two processes share the cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _take_defaults(args)
    if args.synthetic:
        from kvxfer.cli.demo_synthetic import demonstrate
    else:
        from kvxfer.cli.demo_model import demonstrate
    report = demonstrate(args)
    if args.json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        _print(report)
    # A lossy wire format may change the text: that is reported, and is no failure.
    return 1 if report.verified is False or (report.verified and report.text_matches is False) else 0


def _take_defaults(args: argparse.Namespace) -> None:
    """Fill in what was not given. Raises InvalidRequest for a flag of the other kind of demo."""
    real = {"prompt": DEFAULT_PROMPT, "max_tokens": DEFAULT_MAX_TOKENS}
    synthetic = {"model": DEFAULT_MODEL, "tokens": DEFAULT_TOKENS}
    for name in real if args.synthetic else synthetic:
        if getattr(args, name) is not None:
            with_or_without = "without" if args.synthetic else "with"
            raise InvalidRequest(f"--{name.replace('_', '-')} goes {with_or_without} --synthetic")
    for name, default in (synthetic if args.synthetic else real).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    from kvxfer.backends import discovery

    backends = discovery.installed()
    if args.backend not in {"auto", *backends, *discovery.ALIASES}:
        raise InvalidRequest(f"--backend is auto or one of {', '.join(sorted(backends))}; got {args.backend!r}")
    on_gpu = discovery.ALIASES.get(args.backend, args.backend) in _ON_GPUS
    args.memory = args.memory or ("gpu" if on_gpu else "shared")
    if args.memory == "gpu" and not args.synthetic:
        raise InvalidRequest("the small model computes in host memory: caches on GPUs go with --synthetic")
    for name in ("tokens", "max_tokens"):
        if getattr(args, name) is not None:
            checks.integer(f"--{name.replace('_', '-')}", getattr(args, name), 1, 1 << 32)


def _print(report: Report) -> None:
    if report.text is not None:
        print(f"\n{report.text}\n")
    print(
        f"{report.bytes / 1e6:,.1f} MB of KV for {report.tokens:,} tokens of {report.model} "
        f"in {report.seconds * 1e3:,.1f} ms ({report.gigabytes_per_s:.2f} GB/s), "
        f"backend {report.backend}, way {report.way}, wire {report.wire} ({report.wire_bytes / 1e6:,.1f} MB)"
    )
    if report.verified is not None:
        print(f"checksum of what arrived: {'equal' if report.verified else 'DIFFERS'}")
    if report.text_matches:
        print("one process alone writes the same text")
    elif report.text_matches is False:
        print(
            f"with the exact cache the answer is another one from token {report.equal_tokens + 1} on (a lossy wire "
            "format changes the cache, and this small model is easily led to another wording):"
        )
        print(f"\n{report.reference_text}\n")
