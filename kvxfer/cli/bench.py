"""Runs a benchmark of the repository; what follows its name goes to it, ``--help`` too.

Each prints a table with our rows, peers on the same work in the same run, and the measured ceiling; with
``--json FILE`` it writes the results and what they were measured on as JSON too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from kvxfer.cli import checkout
from kvxfer.errors import InvalidRequest

HELP = "run a benchmark of the repository"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvxfer bench``."""
    parser.add_argument("name", nargs="?", help="which benchmark; without one, they are listed")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="passed on to the benchmark")


def run(args: argparse.Namespace) -> int:
    """Run one benchmark and return its exit status, or list them."""
    files = {
        path.stem.removeprefix("bench_"): path for path in sorted((checkout.root() / "benchmarks").glob("bench_*.py"))
    }
    if args.name is None:
        for name, path in files.items():
            print(f"{name:<10} {path.read_text().split(chr(34) * 3)[1].strip().splitlines()[0]}")
        return 0
    if args.name not in files:
        raise InvalidRequest(f"unknown benchmark {args.name!r}; there are {', '.join(files)}")
    return subprocess.call([sys.executable, str(files[args.name]), *args.options])
