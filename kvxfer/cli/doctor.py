"""Says what kvxfer can do on this machine and why not more, and tries every way with real bytes.

A second process is started for that, so what it reports is what a prefill and a decode process on this host will see.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import secrets
import sys
from multiprocessing.connection import Connection

import numpy as np

import kvxfer
from kvxfer.backends import segments
from kvxfer.cli import doctor_network
from kvxfer.connector import WAYS
from kvxfer.errors import KvxferError
from kvxfer.layout import CacheLayout

HELP = "say what works on this machine, and why not more"

EXTRAS = {"torch": "torch", "cuda": "cupy-cuda13x", "nixl": "nixl-cu13", "nccl": "nccl4py", "vllm": "vllm"}
_TOKENS = 4096
_TIMEOUT_S = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvxfer doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 when at least one way works."""
    report = examine()
    print(json.dumps(report) if args.json else _text(report))
    return 0 if any(way["works"] for way in report["ways"]) else 1


def examine() -> dict:
    """The report as a dictionary."""
    orphans = segments.remove_orphans()
    room = os.statvfs(segments.DIRECTORY)
    with kvxfer.Connector("doctor") as connector:
        started, why_not = connector.backends, dict(connector.why_not)
    network = doctor_network.examine()
    ways = [_try(way, memory) for way in WAYS for memory in ("shared", "private")]
    if network["nixl"]:
        with doctor_network.watched_ucx() as transports:
            ways += [_try(way, "private", backend="nixl") for way in ("direct", "packed")]
        network["ucx_transports"] = transports
    return {
        "versions": {
            "kvxfer": kvxfer.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "system": platform.platform(terse=True),
        },
        "extras": {name: _version(package) for name, package in EXTRAS.items()},
        "backends": {**{name: "" for name in started}, **why_not},
        "shared_memory": {
            "directory": str(segments.DIRECTORY),
            "bytes": room.f_blocks * room.f_frsize,
            "free_bytes": room.f_bavail * room.f_frsize,
            "orphans_removed": len(orphans),
        },
        "network": network,
        "ways": ways,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _layout() -> CacheLayout:
    return CacheLayout.paged(
        layers=[f"layers.{i}" for i in range(4)],
        num_blocks=_TOKENS // 16,
        block_tokens=16,
        kv_heads=2,
        head_dim=64,
        dtype="float16",
    )


def _arrays(memory: str) -> dict[str, np.ndarray]:
    make = kvxfer.shared_empty if memory == "shared" else lambda nbytes: np.zeros(nbytes, np.uint8)
    return {region.name: make(region.nbytes) for region in _layout().regions}


def _try(way: str, memory: str, backend: str = "auto") -> dict:
    """Fetch from a second process, one way and no other, and compare the bytes."""
    result = {"backend": "", "way": way, "memory": memory, "works": False, "why_not": "", "gigabytes_per_s": 0.0}
    if backend != "auto":
        result["backend"] = backend
    secret = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_publish, args=(theirs, memory, backend, secret), daemon=True)
    process.start()
    theirs.close()
    blocks = np.random.default_rng(1).permutation(_TOKENS // 16)
    try:
        if not ours.poll(_TIMEOUT_S):
            return result | {"why_not": f"the second process did not start within {_TIMEOUT_S:g} s"}
        tickets = ours.recv()
        arrays = _arrays(memory)
        with kvxfer.Connector("doctor-decode", backends=backend, ways=(way,), secret=secret) as connector:
            cache = connector.register(arrays, _layout())
            for ticket in tickets:  # the first dials and touches the memory
                stats = cache.fetch(ticket, into={"full": blocks}, timeout_s=_TIMEOUT_S).wait()
        equal = all(
            (array.reshape(len(blocks), -1)[blocks] == _pattern(array, len(blocks))).all() for array in arrays.values()
        )
        return result | {
            "backend": stats.backend,
            "works": equal,
            "why_not": "" if equal else "other bytes arrived than were sent",
            "gigabytes_per_s": stats.gigabytes_per_s,
        }
    except (KvxferError, EOFError) as error:
        return result | {"why_not": (str(error) or type(error).__name__).rsplit(f"{way}: ", 1)[-1]}
    finally:
        ours.close()
        process.join(_TIMEOUT_S)
        process.kill()


def _pattern(array: np.ndarray, blocks: int) -> np.ndarray:
    """Every block is filled with its own number."""
    return np.broadcast_to(np.arange(blocks, dtype=np.uint8)[:, None], (blocks, len(array) // blocks))


def _publish(pipe: Connection, memory: str, backend: str, secret: bytes) -> None:
    blocks = _TOKENS // 16
    arrays = _arrays(memory)
    for array in arrays.values():
        array.reshape(blocks, -1)[:] = _pattern(array, blocks)
    with kvxfer.Connector("doctor-prefill", backends=backend, secret=secret) as connector:
        cache = connector.register(arrays, _layout())
        leases = [cache.publish({"full": np.arange(blocks)}, tokens=_TOKENS, ttl_s=60) for _ in range(3)]
        pipe.send([bytes(lease.ticket) for lease in leases])
        try:
            pipe.recv()
        except EOFError:
            sys.exit(0)


def _text(report: dict) -> str:
    versions, memory = report["versions"], report["shared_memory"]
    lines = [
        f"kvxfer {versions['kvxfer']}, Python {versions['python']}, NumPy {versions['numpy']}, {versions['system']}",
        "",
        "extras",
        *(f"  {name:<8} {version or 'not installed'}" for name, version in report["extras"].items()),
        "",
        "backends",
        *(f"  {name:<8} {why or 'runs'}" for name, why in report["backends"].items()),
        "",
        f"shared memory: {memory['free_bytes'] / 2**30:.1f} of {memory['bytes'] / 2**30:.1f} GiB free in "
        f"{memory['directory']}, {memory['orphans_removed']} orphaned segments removed",
        "",
        *doctor_network.text(report["network"]),
        "",
        "ways between two processes of this host, tried with real bytes",
    ]
    for way in report["ways"]:
        outcome = f"works, {way['gigabytes_per_s']:.1f} GB/s ({way['backend']})" if way["works"] else way["why_not"]
        name = way["way"] if way["backend"] != "nixl" else f"nixl {way['way']}"
        lines.append(f"  {name:<11} {way['memory']:<8} {outcome}")
    return "\n".join(lines)
