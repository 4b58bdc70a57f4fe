"""NCCL: chunks from GPU to GPU, of one host or of two, by communicators of two processes each.

Nothing is mapped and nothing is read one-sidedly, so every transfer goes packed: the packing side gathers a chunk into
its outbox and writes it; the other side takes part, since NCCL moves bytes only where both ends call it. What the links
of a pair have to tell each other goes over the control channel. Where both sides have NCCL 2.29 or newer, chunks are
put into a window and signalled instead, which takes no multiprocessors; see nccl_channel.py.

Host memory (lease tables) goes through shared memory as in shm.py, which this backend contains; between hosts words and
records of lease tables are asked for over the control channel.

Imports base.py, shm.py, process.py, the nccl modules, checks and errors.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import os
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import msgspec

from kvxfer import _native, checks
from kvxfer.backends.base import Backend, Capabilities, ControlLine, Link, Registration
from kvxfer.backends.nccl_channel import Channel, Settings, Site
from kvxfer.backends.nccl_library import Gpus, Library, WindowMemory
from kvxfer.backends.nccl_link import GPU, HOST, PIECE_BYTES, Handle, Hello, NcclLink, decode_struct
from kvxfer.backends.nccl_messages import encode
from kvxfer.backends.process import Process
from kvxfer.backends.shm import SharedMemoryBackend
from kvxfer.errors import BackendError, PeerGone

_log = logging.getLogger(__name__)

MAX_CTAS = 16  # like `Limits.max_sms`: the engine's kernels and collectives keep the rest
_CLOSE_S = 5.0
_unsettled: list[WindowMemory] = []  # of connectors that were closed while NCCL was at work: never freed


class NcclBackend(Backend):
    """GPU memory of this host and of others."""

    name = "nccl"
    capabilities = Capabilities(mapped=False, one_sided=False, cross_host=True, devices=frozenset({"cuda"}))

    def __init__(
        self,
        *,
        max_ctas: int = MAX_CTAS,
        one_sided: bool = True,
        open_timeout_s: float = 30.0,
        stall_timeout_s: float = 20.0,
    ) -> None:
        """`max_ctas` bounds the thread blocks, and so the multiprocessors, that one call of NCCL takes (0: its own
        choice). `one_sided` has puts into windows tried where NCCL has them. A communicator that is not made within
        `open_timeout_s`, or moves nothing for `stall_timeout_s`, is aborted; the next ticket makes another.

        Raises MissingExtra without nccl4py, BackendError without NCCL, a driver or a GPU, InvalidRequest.
        """
        max_ctas = checks.integer("max_ctas", max_ctas, 0, 32)
        open_timeout_s = checks.seconds("open_timeout_s", open_timeout_s)
        stall_timeout_s = checks.seconds("stall_timeout_s", stall_timeout_s)
        self.libnccl, self.gpus = self._doors()
        if why := self.gpus.why_unavailable():
            raise BackendError(f"NCCL moves memory of GPUs: {why}")
        self.settings = Settings(
            max_ctas=max_ctas, one_sided=one_sided, open_timeout_s=open_timeout_s, stall_timeout_s=stall_timeout_s
        )
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            _log.warning(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue of the GPU: NCCL's kernels for "
                "transfers and those of the engine then wait for each other, and may do so for good"
            )
        self._host = SharedMemoryBackend()
        self.ordinal: int | None = None  # of the GPU that the caches lie on
        self._identity = ""
        self._gpu_spans = _Spans()
        self._host_spans = _Spans()
        self._windows: list[WindowMemory] = []
        self._allocated: dict[int, int] = {}  # of host memory, by address: bytes
        self._pinned: dict[int, Any] = {}
        self._links: weakref.WeakSet[NcclLink] = weakref.WeakSet()
        self.channels: weakref.WeakSet[Channel] = weakref.WeakSet()  # of all links, and of those that are gone
        self._lock = threading.Lock()

    def _doors(self) -> tuple[Library, Gpus]:
        return Library(), Gpus()

    # --- this process's memory ------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int, device: str = "cpu") -> Registration:
        if device.split(":")[0] not in self.capabilities.devices:
            return self._on_host(self._host.register(address, nbytes))
        ordinal = self.gpus.ordinal(device)
        with self._lock:
            if self.ordinal is None:
                self.ordinal, self._identity = ordinal, self.gpus.identity(ordinal)
                for start, size in self._allocated.items():
                    self._pin(start, size)
            elif self.ordinal != ordinal:
                raise BackendError(
                    f"this connector's caches lie on GPU {self.ordinal}, another on {ordinal}: use a connector for "
                    "each GPU"
                )
            self._gpu_spans.add(address, nbytes)
        return _registration(Handle(kind=GPU, address=address, nbytes=nbytes, gpu=self._identity, host=b""))

    def deregister(self, registration: Registration) -> None:
        handle = decode_struct(registration.handle, Handle)
        if handle.kind == GPU:
            self._gpu_spans.remove(handle.address, handle.nbytes)
            return
        self._host_spans.remove(handle.address, handle.nbytes)
        with self._lock:
            self._allocated.pop(handle.address, None)
            self._pinned.pop(handle.address, None)
        self._host.deregister(registration)

    def allocate(self, nbytes: int) -> Registration:
        memory = self._host.allocate(nbytes)
        with self._lock:
            self._allocated[memory.address] = memory.nbytes
            if self.ordinal is not None:
                self._pin(memory.address, memory.nbytes)
        return self._on_host(memory)

    def _pin(self, address: int, nbytes: int) -> None:
        try:
            self._pinned[address] = self.gpus.pin(address, nbytes, self.ordinal)
        except BackendError as error:
            _log.warning("the lease table stays pageable, so publishing waits for streams on the host: %s", error)

    def _on_host(self, host: Registration) -> Registration:
        self._host_spans.add(host.address, host.nbytes)
        handle = Handle(kind=HOST, address=host.address, nbytes=host.nbytes, gpu="", host=host.handle)
        return _registration(handle, keep_alive=host.keep_alive)

    def allocate_on_gpu(self, nbytes: int, ordinal: int) -> WindowMemory | None:
        """Memory that windows may be made of, where puts are possible; None where ordinary memory does as well."""
        if not self.settings.one_sided or self.libnccl.missing:
            return None
        made: list[WindowMemory | BaseException] = []

        def allocate() -> None:
            try:
                self.gpus.make_current(ordinal)
                made.append(self.libnccl.allocate(nbytes))
            except BaseException as error:
                made.append(error)

        thread = threading.Thread(target=allocate, name="kvxfer-nccl", daemon=True)  # its device stays its own
        thread.start()
        thread.join()
        if isinstance(made[0], BaseException):
            raise made[0]
        with self._lock:
            self._windows.append(made[0])
        return made[0]

    def window_memory(self, address: int) -> tuple[int, int] | None:
        """Address and bytes of the memory from `allocate_on_gpu` around an address, if there is some."""
        with self._lock:
            for memory in self._windows:
                if memory.address <= address < memory.address + memory.nbytes:
                    return memory.address, memory.nbytes
        return None

    # --- peers ----------------------------------------------------------------------------------------------

    def hello(self) -> bytes:
        return msgspec.msgpack.encode(
            Hello(
                version=self.libnccl.version,
                path=self.libnccl.path,
                process=Process.this(),
                host=self._host.hello(),
            )
        )

    def connect(self, hello: bytes) -> Link:
        version, path, *_ = [*decode_struct(hello, list), None, None]
        if version != self.libnccl.version:
            raise BackendError(
                f"the peer has NCCL {version!s:.40} ({path!s:.200}), this side {self.libnccl}: NCCL joins equal "
                "releases only, so install one on both sides (what LD_PRELOAD or the environment brings counts)"
            )
        link = NcclLink(self, decode_struct(hello, Hello), self._join_host(hello))
        self._links.add(link)
        return link

    def _join_host(self, hello: bytes) -> Link | None:
        """The shared-memory link of a peer on this host; None for one on another."""
        try:
            return self._host.connect(decode_struct(hello, Hello).host)
        except BackendError as error:
            _log.debug("not on this host: %s", error)
            return None

    def close(self) -> None:
        links = list(self._links)
        for link in links:
            link.hang_up(PeerGone("this side closed"))
        channels, until = list(self.channels), time.monotonic() + _CLOSE_S
        while not all(channel.has_let_go for channel in channels) and time.monotonic() < until:
            time.sleep(0.001)
        if not all(channel.has_let_go for channel in channels):
            _unsettled.extend(self._windows)
        for link in links:
            link.close()
        self._windows.clear()
        self._pinned.clear()  # before the memory is unmapped
        self._host.close()

    # --- what links use -------------------------------------------------------------------------------------

    def site(self, line: ControlLine, *, same_host: bool) -> Site:
        """What the channels of a link need. Raises BackendError before a cache is registered.

        Puts are for peers on this host. Over a network one may have passed its stream before its bytes have landed,
        and nothing would keep the other side from lending the memory again.
        """
        ordinal = self.ordinal
        if ordinal is None:
            raise BackendError("the peer wants to move memory of a GPU, and this side has registered none")

        def may_call() -> bool:
            if self.gpus.is_current(ordinal):
                return True
            if line.is_progress():  # kvxfer's own thread; any other keeps its device, and leaves the call to this one
                self.gpus.make_current(ordinal)
                return True
            return False

        return Site(
            libnccl=self.libnccl,
            gpus=self.gpus,
            ordinal=ordinal,
            settings=replace(self.settings, one_sided=self.settings.one_sided and same_host),
            say=lambda said: line.say(encode(said)),
            may_call=may_call,
            soon=lambda call: line.until(lambda: True, lambda _: call()),
            window_memory=self.window_memory,
        )

    def same_gpu(self, handle: Handle) -> bool:
        """Whether a peer's memory lies on the GPU of this side, which NCCL does not join with itself unless told to."""
        told = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" or "NCCL_HOSTID" in os.environ
        return bool(self._identity) and handle.gpu == self._identity and not told

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether all of these bytes are GPU memory that is registered here."""
        return self._gpu_spans.hold(address, nbytes)

    def read_host(self, address: int, nbytes: int) -> bytes:
        """Registered host memory, for a peer. Raises BackendError."""
        if not 0 < nbytes <= PIECE_BYTES or not self._host_spans.hold(address, nbytes):
            raise BackendError(f"the peer wants to read {nbytes} bytes at {address:#x}, which it may not")
        if nbytes == 8 and address % 8 == 0:
            return _native.load_word(address).to_bytes(8, "little")
        return ctypes.string_at(address, nbytes)


class _Spans:
    """Registered memory. A piece may be registered several times. Thread-safe."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._spans = sorted([*self._spans, (address, nbytes)])

    def remove(self, address: int, nbytes: int) -> None:
        with self._lock:
            spans = list(self._spans)
            if (address, nbytes) in spans:
                spans.remove((address, nbytes))
            self._spans = spans

    def hold(self, address: int, nbytes: int) -> bool:
        """Whether one of them holds all of these bytes."""
        spans = self._spans
        before = spans[: bisect.bisect_right(spans, (address, 1 << 64))]
        return nbytes > 0 and any(address + nbytes <= start + size for start, size in reversed(before))


def _registration(handle: Handle, keep_alive: object = None) -> Registration:
    return Registration(
        address=handle.address, nbytes=handle.nbytes, handle=msgspec.msgpack.encode(handle), keep_alive=keep_alive
    )
