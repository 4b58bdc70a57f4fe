"""The command line: ``kvxfer demo``, ``doctor``, ``size``, ``bench``. One file a command.

A command's module has HELP, `add_arguments(parser)` and `run(args)`, which returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from kvxfer import __version__
from kvxfer.errors import InvalidRequest, KvxferError

COMMANDS = ("demo", "doctor", "size", "bench")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    Errors of the library end it with one line on standard error: status 2 for what was asked wrongly, as for flags that
    do not exist, 1 for all others. Ctrl-C ends it without a word, with status 130.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvxfer",
        description="Moves a request's KV cache from the worker that prefills it to the one that decodes.",
    )
    parser.add_argument("--version", action="version", version=f"kvxfer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    modules = {name: importlib.import_module(f"kvxfer.cli.{name}") for name in COMMANDS}
    for name, module in modules.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.__doc__))
    args = parser.parse_args(argv)
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # UCX, where NIXL brings it, would write to standard output
    try:
        return modules[args.command].run(args)
    except KvxferError as error:
        message = " ".join(str(error).split())
        print(f"kvxfer {args.command}: {type(error).__name__}: {message}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1


if __name__ == "__main__":
    sys.exit(main())
