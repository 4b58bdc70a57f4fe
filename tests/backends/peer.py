"""A peer in a process of its own, driven over a pipe: `with Peer("shm") as peer: peer.publish(...)`."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import secrets
import signal
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import kvxfer
from kvxfer import CacheLayout

SECRET = b"the secret of the conformance suite"
TIMEOUT_S = 30.0


def make_arrays(layout: CacheLayout, memory: str, seed: int | None) -> dict[str, np.ndarray]:
    """Byte arrays for every region: random with a seed, else zero.

    `memory` is shared, private, gpu (of CuPy's pool), vmm (allocations mapped in a row), or expandable (segments of
    torch).
    """
    arrays = {}
    for index, region in enumerate(layout.regions):
        values = np.zeros(region.nbytes, np.uint8)
        if seed is not None:
            values = np.random.default_rng((seed, index)).integers(0, 256, region.nbytes, np.uint8)
        arrays[region.name] = _put(values, memory)
    return arrays


def _put(values: np.ndarray, memory: str) -> Any:
    if memory == "gpu":
        return importlib.import_module("cupy").asarray(values)
    if memory == "vmm":
        from tests.gpu.memory import VirtualMemory

        return VirtualMemory(values.nbytes).holding(values)
    if memory == "expandable":  # the environment has asked for them before torch was loaded
        torch = importlib.import_module("torch")
        return importlib.import_module("cupy").asarray(torch.from_numpy(values).cuda())
    if memory == "shared":
        shared = kvxfer.shared_empty(len(values))
        shared[:] = values
        return shared
    return values


def read(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """What arrays hold now, in host memory."""
    return {name: np.array(array) if isinstance(array, np.ndarray) else array.get() for name, array in arrays.items()}


def held() -> dict[str, int]:
    """What this process holds, there and on its GPU, and what is free on that."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    free, _ = importlib.import_module("cupy").cuda.runtime.memGetInfo()
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "gpu_bytes": _gpu_bytes(),
        "gpu_free_bytes": int(free),
    }


def _gpu_bytes() -> int:
    """Memory that the driver counts as this process's, on all GPUs; 0 where it does not tell."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return 0
    nvml.nvmlInit()
    try:
        processes = [
            process
            for number in range(nvml.nvmlDeviceGetCount())
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(number))
        ]
        return sum(process.usedGpuMemory or 0 for process in processes if process.pid == os.getpid())
    finally:
        nvml.nvmlShutdown()


def placed(layout: CacheLayout, memory: str) -> CacheLayout:
    """The layout with its regions where `memory` says."""
    on_gpu = memory in ("gpu", "vmm", "expandable")
    device = f"cuda:{importlib.import_module('cupy').cuda.runtime.getDevice()}" if on_gpu else "cpu"
    regions = tuple(msgspec.structs.replace(region, device=device) for region in layout.regions)
    return msgspec.structs.replace(layout, regions=regions)


def chosen(backend: str) -> Any:
    """What `Connector(backends=)` takes for a name: backends of the tests are not installed."""
    if backend.startswith("fake_nccl"):
        fake = importlib.import_module("tests.nccl_fake").FakeNcclBackend(fake={"one_sided": backend.endswith("put")})
        fake.name = backend
        return fake
    return backend


class Peer:
    """The peer's proxy. Every method of `_Servant` can be called on it; errors come back as they are."""

    def __init__(self, backend: str = "shm", **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, backend, options), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._pipe.send((method, args, kwargs))
            if not self._pipe.poll(TIMEOUT_S):
                self.send_signal(signal.SIGUSR1)  # it prints where every thread is
                raise TimeoutError(f"the peer did not answer {method} within {TIMEOUT_S} s")
            ok, value = self._pipe.recv()
            if not ok:
                raise value
            return value

        return call

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.process.kill()
        self.process.join(TIMEOUT_S)

    def close(self) -> None:
        """Let the process end in an orderly way."""
        self._pipe.close()
        self.process.join(TIMEOUT_S)
        if self.process.is_alive():
            self.kill()


class _Servant:
    def __init__(self, backend: str, options: dict[str, Any]) -> None:
        options = {"secret": SECRET, **options}
        name = options.pop("name", f"peer-{secrets.token_hex(4)}")
        self.connector = kvxfer.Connector(name, backends=[chosen(backend)], **options)
        self.caches: dict[str, kvxfer.Cache] = {}
        self.arrays: dict[str, dict[str, np.ndarray]] = {}
        self.leases: dict[bytes, kvxfer.Lease] = {}
        self.transfers: dict[int, kvxfer.Transfer] = {}

    def endpoint(self) -> str:
        return self.connector.endpoint

    def reduce_all(self, unique_id: bytes, rank: int, rounds: int) -> None:
        """Begin what an engine does beside transfers."""
        self.engine = importlib.import_module("tests.gpu.nccl_engine").AllReduceLoop(unique_id, rank, rounds)

    def reduced(self, timeout_s: float) -> str:
        """Wait for its end; what went wrong, or an empty string."""
        return self.engine.join(timeout_s)

    def stacks(self) -> str:
        """Where every thread of this process is."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read()

    def held(self) -> dict[str, int]:
        """Memory, file descriptors, threads and free GPU memory of this process."""
        gc.collect()
        return held()

    def breaches(self) -> list[str]:
        return importlib.import_module("tests.nccl_fake").breaches

    def register(self, name: str, layout: CacheLayout, memory: str, seed: int | None) -> None:
        self.arrays[name] = make_arrays(layout, memory, seed)
        self.caches[name] = self.connector.register(self.arrays[name], placed(layout, memory), name=name)

    def publish(self, cache: str, blocks: dict[str, list[int]], **options: Any) -> bytes:
        lease = self.caches[cache].publish(blocks, **options)
        self.leases[bytes(lease.ticket)] = lease
        return bytes(lease.ticket)

    def publish_later(
        self, cache: str, blocks: dict[str, list[int]], rounds: int, value: int, **options: Any
    ) -> tuple[bytes, float]:
        """Publish blocks that a busy stream fills with a value later; returns the seconds that the call took, too."""
        from tests.gpu.memory import BusyStream

        self.busy = BusyStream()
        self.busy.work(rounds)
        for array in self.arrays[cache].values():
            self.busy.fill(array, value)
        begin = time.monotonic()
        ticket = self.publish(cache, blocks, stream=self.busy.stream, **options)
        return ticket, time.monotonic() - begin

    def send_later(
        self, cache: str, ticket: bytes, blocks: dict[str, list[int]], rounds: int, value: int, **options: Any
    ) -> int:
        """Send blocks that a busy stream fills with a value first, and overwrites once they are sent."""
        from tests.gpu.memory import BusyStream

        self.busy = BusyStream()
        self.busy.work(rounds)
        for array in self.arrays[cache].values():
            self.busy.fill(array, value)
        key = self.send(cache, ticket, blocks, stream=self.busy.stream, **options)
        self.transfers[key].wait_on(self.busy.stream)
        for array in self.arrays[cache].values():
            self.busy.fill(array, 255)
        return key

    def lease_state(self, ticket: bytes, wait_s: float = 0.0) -> str:
        self.leases[ticket].released.wait(wait_s)
        return self.leases[ticket].state.value

    def release(self, ticket: bytes) -> None:
        self.leases[ticket].release()

    def fill(self, cache: str, value: int) -> None:
        for array in self.arrays[cache].values():
            array[:] = value

    def mask(self, cache: str, bits: int) -> None:
        for array in self.arrays[cache].values():
            array &= array.dtype.type(bits)

    def contents(self, cache: str) -> dict[str, np.ndarray]:
        return read(self.arrays[cache])

    def fetch(self, cache: str, ticket: bytes, into: dict[str, list[int]], **options: Any) -> int:
        return self._keep(self.caches[cache].fetch(ticket, into=into, **options))

    def reserve(self, cache: str, blocks: dict[str, list[int]], **options: Any) -> tuple[int, bytes]:
        reservation = self.caches[cache].reserve(blocks, **options)
        return self._keep(reservation), bytes(reservation.ticket)

    def send(self, cache: str, ticket: bytes, blocks: dict[str, list[int]], **options: Any) -> int:
        return self._keep(self.caches[cache].send(ticket, blocks, **options))

    def layer_ready(self, transfer: int, layer: str) -> None:
        self.transfers[transfer].layer_ready(layer)

    def cancel(self, transfer: int) -> None:
        self.transfers[transfer].cancel()

    def wait(self, transfer: int, timeout_s: float = TIMEOUT_S) -> kvxfer.TransferStats:
        return self.transfers[transfer].wait(timeout_s)

    def state(self, transfer: int) -> str:
        return self.transfers[transfer].state.value

    def metrics(self) -> Any:
        return self.connector.metrics

    def issue(self, layout: CacheLayout, blocks: dict[str, list[int]], **options: Any) -> bytes:
        return bytes(self.connector.issue(layout, blocks, **options))

    def set_members(self, members: dict[int, str]) -> None:
        self.connector.set_members(members)

    def _keep(self, transfer: kvxfer.Transfer) -> int:
        self.transfers[id(transfer)] = transfer
        return id(transfer)


def _serve(pipe: Connection, backend: str, options: dict[str, Any]) -> None:
    if "KVXFER_PEER_GPU" in os.environ:  # before anything of CUDA is loaded
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["KVXFER_PEER_GPU"]
    faulthandler.register(signal.SIGUSR1)
    servant = _Servant(backend, options)
    with servant.connector, contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            method, args, kwargs = pipe.recv()
            try:
                answer = True, getattr(servant, method)(*args, **kwargs)
            except Exception as error:
                answer = False, error
            pipe.send(answer)
