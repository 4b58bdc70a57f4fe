"""The demo at a big model's size: random contents in the model's own layout, checked by checksum at both ends."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import kvxfer
from kvxfer import cuda, formats
from kvxfer.backends.segments import DIRECTORY, remove_orphans
from kvxfer.cli.demo import Report
from kvxfer.cli.progress_bar import ProgressBar
from kvxfer.errors import BackendError, InvalidRequest, KvxferError
from kvxfer.extras import need
from kvxfer.layout import CacheLayout
from kvxfer.models import layout_for

_START_TIMEOUT_S = 120.0
_FETCH_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 10.0
_FILL_WORDS = 1 << 22
_FINITE = 0xBFBF_BFBF_BFBF_BFBF  # clears the top exponent bit of bf16, fp16, fp32, e4m3 and e8m0: no NaN, no infinity


def demonstrate(args: argparse.Namespace) -> Report:
    """Publish a random cache of the model's size in one process and fetch it in another."""
    layout = _layout(args.model, args.tokens)
    _check_room(layout, args.memory)
    secret = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    gpu = _other_gpu() if args.memory == "gpu" else None
    options = (args.model, args.tokens, args.memory, args.backend, gpu)
    process = context.Process(target=_prefill, args=(theirs, *options, secret), daemon=True)
    resource_tracker.ensure_running()  # started with the process, it would unblock the signal
    with _without_interrupts():
        process.start()
    theirs.close()
    try:
        report = _decode(args, layout, secret, ours)
        ours.close()  # which ends the other process
        process.join(_STOP_TIMEOUT_S)
        return report
    except (EOFError, ConnectionError) as error:
        process.join(_STOP_TIMEOUT_S)
        raise BackendError(f"the prefill process ended early, with exit code {process.exitcode}") from error
    finally:
        ours.close()
        process.kill()  # after an error or Ctrl-C, wherever it is
        process.join()
        remove_orphans()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started within never gets a Ctrl-C, and this process only afterwards.

    Ctrl-C reaches every process of a terminal, and is this one's to act on. A new process inherits that the signal is
    blocked; but that holds for one thread, and another one, of a library, may take it, so the handler waits as well.
    """
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


def _check_room(layout: CacheLayout, memory: str) -> None:
    """InvalidRequest unless both caches fit the memory that is free; the system would end a process otherwise."""
    if memory == "gpu":
        return  # its driver refuses an allocation, and ends nobody
    needed = 2 * sum(region.nbytes for region in layout.regions)
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    if memory == "shared":
        room = os.statvfs(DIRECTORY)
        free = min(free, room.f_bavail * room.f_frsize)
    if needed * 5 // 4 > free:
        raise InvalidRequest(
            f"two caches of this size take {needed / 2**30:.1f} GiB of {memory} memory, and a quarter more to fill and "
            f"check them; {free / 2**30:.1f} GiB are free: ask for fewer --tokens"
        )


def _layout(model: str, tokens: int) -> CacheLayout:
    """The model's layout on vLLM, with as many blocks as one prompt needs."""
    probe = layout_for(model, "vllm", num_blocks=1)
    blocks = sum(group.blocks_to_move(tokens) for group in probe.groups)
    return layout_for(model, "vllm", num_blocks=max(1, blocks))


def _block_lists(layout: CacheLayout, tokens: int, seed: int) -> dict[str, np.ndarray]:
    """Scattered blocks for every group; groups may share one slab, so no id stands in two of them."""
    counts = {group.name: group.blocks_to_move(tokens) for group in layout.groups}
    ids = np.random.default_rng(seed).permutation(sum(counts.values())).astype(np.int32)
    lists = np.split(ids, np.cumsum(list(counts.values()))[:-1])
    return dict(zip(counts, lists, strict=True))


def _other_gpu() -> str:
    """What the prefill process sees: the second GPU that is visible here, or the only one."""
    if why := cuda.why_unavailable():
        raise BackendError(why)
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed.split(",") if listed else [str(number) for number in range(cuda.device_count())]
    return visible[min(1, len(visible) - 1)]


def _placed(layout: CacheLayout, memory: str) -> CacheLayout:
    """The layout with its regions where `memory` says; of the GPUs it is the first that this process sees."""
    if memory != "gpu":
        return layout
    regions = tuple(msgspec.structs.replace(region, device="cuda:0") for region in layout.regions)
    return msgspec.structs.replace(layout, regions=regions)


def _arrays(layout: CacheLayout, memory: str, seed: int | None) -> dict[str, Any]:
    arrays = {}
    for region in layout.regions:
        array = kvxfer.shared_empty(region.nbytes) if memory == "shared" else np.zeros(region.nbytes, np.uint8)
        for first in range(0, region.nbytes, 8 * _FILL_WORDS):  # a cache has been touched long before its first request
            array[first : first + 8 * _FILL_WORDS] = 0
        if seed is not None:
            words = array[: region.nbytes // 8 * 8].view(np.uint64)
            generator = np.random.default_rng(seed)
            for first in range(0, len(words), _FILL_WORDS):
                part = words[first : first + _FILL_WORDS]
                part[:] = generator.integers(0, 2**64, len(part), np.uint64) & np.uint64(_FINITE)
        arrays[region.name] = need("cupy", "cuda").asarray(array) if memory == "gpu" else array
    return arrays


def _checksum(layout: CacheLayout, arrays: dict[str, Any], lists: dict[str, np.ndarray]) -> bytes:
    """BLAKE2b over every slice of the listed blocks, read with plain NumPy indexing and no plan."""
    arrays = {name: array if isinstance(array, np.ndarray) else array.get() for name, array in arrays.items()}
    digest = hashlib.blake2b()
    for group in layout.groups:
        for piece in group.slices:
            record = layout.record(piece.record)
            blocks = np.lib.stride_tricks.as_strided(
                arrays[piece.region][piece.offset :], (group.num_blocks, record.nbytes), (piece.block_stride, 1)
            )
            for block in lists[group.name]:
                digest.update(blocks[block])
    return digest.digest()


def _prefill(
    pipe: Connection, model: str, tokens: int, memory: str, backend: str, gpu: str | None, secret: bytes
) -> None:
    """The prefill process: publish, send the ticket and the checksum, and wait for the end of the lease.

    Before them goes an empty message, or an error that leaves no ticket to send.
    """
    if gpu is not None:  # before anything of CUDA is loaded
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _publish(pipe, model, tokens, memory, backend, secret)
        except KvxferError as error:
            pipe.send_bytes(str(error).encode())


def _publish(pipe: Connection, model: str, tokens: int, memory: str, backend: str, secret: bytes) -> None:
    layout = _layout(model, tokens)
    arrays = _arrays(layout, memory, seed=1)
    lists = _block_lists(layout, tokens, seed=2)
    with kvxfer.Connector("prefill-0", backends=backend, secret=secret) as connector:
        cache = connector.register(arrays, _placed(layout, memory))
        lease = cache.publish(lists, tokens=tokens, ttl_s=_FETCH_TIMEOUT_S, request_id="synthetic")
        pipe.send_bytes(b"")
        pipe.send_bytes(bytes(lease.ticket))
        pipe.send_bytes(_checksum(layout, arrays, lists))
        lease.released.wait(_FETCH_TIMEOUT_S)
        pipe.recv_bytes()  # the other side closes its end


def _decode(args: argparse.Namespace, layout: CacheLayout, secret: bytes, pipe: Connection) -> Report:
    arrays = _arrays(layout, args.memory, seed=None)
    lists = _block_lists(layout, args.tokens, seed=3)
    ways = (args.way,) if args.way else ("mapped", "direct", "packed")
    if not pipe.poll(_START_TIMEOUT_S):
        raise BackendError(f"the prefill process did not publish within {_START_TIMEOUT_S:g} s")
    reason = pipe.recv_bytes().decode()
    if reason:
        raise BackendError(f"the prefill process could not publish: {reason}")
    ticket = pipe.recv_bytes()
    expected = pipe.recv_bytes()
    with kvxfer.Connector("decode-0", backends=args.backend, ways=ways, secret=secret) as connector:
        cache = connector.register(arrays, _placed(layout, args.memory))
        transfer = cache.fetch(ticket, into=lists, wire=args.wire, timeout_s=_FETCH_TIMEOUT_S)
        with ProgressBar("transfer", shown=not args.json) as bar:
            while not transfer.done():
                bar.show(transfer.progress, f"{transfer.stats.bytes / 1e6:,.0f} MB")
                time.sleep(0.02)
            stats = transfer.wait()
            bar.show(1.0, f"{stats.bytes / 1e6:,.0f} MB")
        same = _checksum(layout, arrays, lists) == expected
    return Report(
        model=args.model,
        backend=stats.backend,
        way=stats.way,
        wire=stats.wire,
        tokens=args.tokens,
        bytes=stats.bytes,
        wire_bytes=stats.wire_bytes,
        seconds=stats.seconds,
        gigabytes_per_s=stats.gigabytes_per_s,
        verified=same if formats.parse(args.wire).lossless else None,
        text=None,
        text_matches=None,
    )
