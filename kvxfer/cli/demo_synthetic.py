"""The demo at a big model's size: random contents in the model's own layout, checked by checksum at both ends."""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import secrets
import time
from multiprocessing.connection import Connection

import numpy as np

import kvxfer
from kvxfer import formats
from kvxfer.cli.demo import Report
from kvxfer.cli.progress_bar import ProgressBar
from kvxfer.errors import BackendError, InvalidRequest
from kvxfer.layout import CacheLayout
from kvxfer.models import layout_for

_START_TIMEOUT_S = 120.0
_FETCH_TIMEOUT_S = 300.0
_FINITE = 0xBFBF_BFBF_BFBF_BFBF  # clears the top exponent bit of bf16, fp16, fp32, e4m3 and e8m0: no NaN, no infinity


def demonstrate(args: argparse.Namespace) -> Report:
    """Publish a random cache of the model's size in one process and fetch it in another."""
    if args.tokens < 1:
        raise InvalidRequest(f"--tokens must be 1 or more, got {args.tokens}")
    layout = _layout(args.model, args.tokens)
    secret = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_prefill, args=(theirs, args.model, args.tokens, args.memory, secret), daemon=True)
    process.start()
    theirs.close()
    try:
        return _decode(args, layout, secret, ours)
    except (EOFError, ConnectionError) as error:
        raise BackendError("the prefill process ended early; its own output says why") from error
    finally:
        ours.close()
        process.join(10)
        process.kill()


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


def _arrays(layout: CacheLayout, memory: str, seed: int | None) -> dict[str, np.ndarray]:
    arrays = {}
    for region in layout.regions:
        array = kvxfer.shared_empty(region.nbytes) if memory == "shared" else np.zeros(region.nbytes, np.uint8)
        array.fill(0)  # an engine's cache has been touched long before its first request
        if seed is not None:
            words = array[: region.nbytes // 8 * 8].view(np.uint64)
            words[:] = np.random.default_rng(seed).integers(0, 2**64, len(words), np.uint64)
            words &= np.uint64(_FINITE)
        arrays[region.name] = array
    return arrays


def _checksum(layout: CacheLayout, arrays: dict[str, np.ndarray], lists: dict[str, np.ndarray]) -> bytes:
    """BLAKE2b over every slice of the listed blocks, read with plain NumPy indexing and no plan."""
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


def _prefill(pipe: Connection, model: str, tokens: int, memory: str, secret: bytes) -> None:
    """The prefill process: publish, send the ticket and the checksum, and wait for the end of the lease."""
    layout = _layout(model, tokens)
    arrays = _arrays(layout, memory, seed=1)
    lists = _block_lists(layout, tokens, seed=2)
    try:
        with kvxfer.Connector("prefill-0", secret=secret) as connector:
            cache = connector.register(arrays, layout)
            lease = cache.publish(lists, tokens=tokens, ttl_s=_FETCH_TIMEOUT_S, request_id="synthetic")
            pipe.send_bytes(bytes(lease.ticket))
            pipe.send_bytes(_checksum(layout, arrays, lists))
            lease.released.wait(_FETCH_TIMEOUT_S)
            pipe.recv_bytes()  # the other side closes its end
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass


def _decode(args: argparse.Namespace, layout: CacheLayout, secret: bytes, pipe: Connection) -> Report:
    arrays = _arrays(layout, args.memory, seed=None)
    lists = _block_lists(layout, args.tokens, seed=3)
    ways = (args.way,) if args.way else ("mapped", "direct", "packed")
    if not pipe.poll(_START_TIMEOUT_S):
        raise BackendError(f"the prefill process did not publish within {_START_TIMEOUT_S:g} s")
    ticket = pipe.recv_bytes()
    expected = pipe.recv_bytes()
    with kvxfer.Connector("decode-0", ways=ways, secret=secret) as connector:
        cache = connector.register(arrays, layout)
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
        seconds=stats.seconds,
        gigabytes_per_s=stats.gigabytes_per_s,
        verified=same if formats.parse(args.wire).lossless else None,
        text=None,
        text_matches=None,
    )
