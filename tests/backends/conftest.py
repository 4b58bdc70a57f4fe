"""The conformance suite's parameters. A backend of another package runs the suite by its name:

pytest tests/backends --kvxfer-backend NAME
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import kvxfer
from kvxfer import CacheLayout
from kvxfer.connector import WAYS

from .peer import SECRET, Peer, chosen, make_arrays, placed

OWN = {
    "shm": (("mapped", "shared"), ("direct", "private"), ("packed", "private"), ("packed", "shared")),
    # The NCCL backend on a fake of NCCL, in host memory (tests/nccl_fake.py): by send and receive; by put and signal.
    "fake_nccl": (("packed", "private"),),
    "fake_nccl_put": (("packed", "private"),),
    "nccl": (("packed", "gpu"),),
    "nixl": (("direct", "private"), ("packed", "private"), ("packed", "shared")),
    "cuda_ipc": (
        ("mapped", "gpu"),
        ("mapped", "vmm"),
        ("packed", "gpu"),
        ("mapped", "shared"),
        ("packed", "private"),
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kvxfer-backend", action="append", help="run the conformance suite for this backend only")


def is_there(backend: str) -> bool:
    """Whether one of our backends can be tested here."""
    if backend == "nixl":
        return importlib.util.find_spec("nixl_cu13") is not None
    if backend == "nccl":
        return gpu_is_there() and importlib.util.find_spec("nccl") is not None and "KVXFER_PEER_GPU" in os.environ
    return backend == "shm" or backend.startswith("fake_") or gpu_is_there()


def gpu_is_there() -> bool:
    """Whether the GPU backend can be tested here."""
    from kvxfer import cuda

    return cuda.available() and importlib.util.find_spec("cupy") is not None


def ways_of(backend: str) -> list[tuple[str, str]]:
    """What a backend says that it can do."""
    [entry] = importlib.metadata.entry_points(group="kvxfer.backends", name=backend)
    able = entry.load().capabilities
    possible = {"mapped": able.mapped, "direct": able.one_sided, "packed": True}
    return [(way, "private") for way in WAYS if possible[way]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "road" not in metafunc.fixturenames:
        return
    if gpu_is_there():
        OWN["nixl"] = (("packed", "gpu"), ("direct", "gpu"), ("packed", "private"))
    names = metafunc.config.getoption("--kvxfer-backend") or [name for name in OWN if is_there(name)]
    roads = [(name, way, memory) for name in names for way, memory in OWN.get(name) or ways_of(name)]
    metafunc.parametrize("road", roads, ids="-".join, scope="session", indirect=True)


@dataclass
class Pair:
    """A connector here and a peer in another process, on one backend and way."""

    backend: str
    way: str
    memory: str
    here: kvxfer.Connector
    peer: Peer
    names: Iterator[str]

    def caches(self, src: CacheLayout, dst: CacheLayout) -> tuple[str, kvxfer.Cache, dict[str, np.ndarray]]:
        """A random cache at the peer and a zero one here, under one new name."""
        name = next(self.names)
        self.peer.register(name, src, self.memory, seed=len(name))
        arrays = make_arrays(dst, self.memory, None)
        return name, self.here.register(arrays, placed(dst, self.memory), name=name), arrays


@pytest.fixture(scope="session")
def road(request: pytest.FixtureRequest) -> Iterator[Pair]:
    backend, way, memory = request.param
    with (
        Peer(backend, ways=(way,)) as peer,
        kvxfer.Connector("here", backends=[chosen(backend)], ways=(way,), secret=SECRET) as here,
    ):
        yield Pair(backend, way, memory, here, peer, (f"kv{i}" for i in itertools.count()))
        if backend.startswith("fake_nccl"):
            from tests.nccl_fake import breaches

            assert breaches == peer.breaches() == []
            takers = [link._taker for link in here._node.backends[backend]._links if link._taker is not None]
            assert {taker.one_sided for taker in takers} <= {backend.endswith("put")}
