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

HELP = "hand a KV cache from a prefill process to a decode process"

DEFAULT_PROMPT = "Why is the sky blue?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvxfer demo``."""
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to ask the model (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="longest answer in tokens (default %(default)s)")
    parser.add_argument("--synthetic", action="store_true", help="random contents in the size of --model and --tokens")
    parser.add_argument("--model", default="deepseek-ai/DeepSeek-V4.1-Flash", help="with --synthetic: a known model")
    parser.add_argument("--tokens", type=int, default=100_000, help="with --synthetic: prompt length (%(default)s)")
    parser.add_argument("--memory", choices=("shared", "private"), default="shared", help="where the caches lie")
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
    bytes: int
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


def _print(report: Report) -> None:
    if report.text is not None:
        print(f"\n{report.text}\n")
    print(
        f"{report.bytes / 1e6:,.1f} MB of KV for {report.tokens:,} tokens of {report.model} "
        f"in {report.seconds * 1e3:,.1f} ms ({report.gigabytes_per_s:.2f} GB/s), "
        f"backend {report.backend}, way {report.way}, wire {report.wire}"
    )
    if report.verified is not None:
        print(f"checksum of what arrived: {'equal' if report.verified else 'DIFFERS'}")
    if report.text_matches:
        print("one process alone writes the same text")
    elif report.text_matches is False:
        print(f"one process alone writes the same {report.equal_tokens} tokens, then goes on differently:")
        print(f"\n{report.reference_text}\n")
