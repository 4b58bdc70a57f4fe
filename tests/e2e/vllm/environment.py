"""Environment variables of engines under test, and ports that nobody else takes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

FEW_CORES = Path(__file__).parent / "few_cores"
_REPOSITORY = Path(__file__).parents[3]


COMMON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # One thread a worker: torch would start one for each core of the machine, on the single core that vLLM binds it to.
    "OMP_NUM_THREADS": "1",
    # The worker in the engine's process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # With eager execution only the ranking of log-probabilities would be compiled, for seconds.
    "TORCHDYNAMO_DISABLE": "1",
    # Also for the processes that an engine starts: few_cores/sitecustomize.py.
    "PYTHONPATH": f"{FEW_CORES}:{_REPOSITORY}",
}
"""For every engine. Without these and the others, two engines on two cores take seconds to answer."""


def for_engine(*, core: int, ranks: int = 1, nixl_port: int | None = None) -> dict[str, str]:
    """What one engine needs besides `COMMON`: its worker computes on `core`, or rank i of several on core i."""
    names = {"VLLM_CPU_OMP_THREADS_BIND": str(core) if ranks == 1 else "|".join(map(str, range(ranks)))}
    if ranks > 1:
        names["FEW_CORES_YIELD_S"] = "1e-4"
    if nixl_port is not None:
        names |= {"FEW_CORES_NIXL_US": "200", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(nixl_port)}
    return names


def for_server(**options: Any) -> dict[str, str]:
    """The whole environment of a server's process; options are those of `for_engine`."""
    return {**os.environ, **COMMON, **for_engine(**options)}


class Ports:
    """Neighbouring ports of 127.0.0.1 that only a server which reuses addresses, as ours do, can still listen on.

    The sockets are bound and never listen, so the kernel gives the numbers to nobody else until `close`.
    """

    def __init__(self, count: int = 1) -> None:
        self._sockets: list[socket.socket] = []
        for _ in range(100):
            try:
                self.first: int = self._bind(0)
                for offset in range(1, count):
                    self._bind(self.first + offset)
                return
            except OSError:  # a neighbour is taken
                self.close()
        raise OSError(f"found no {count} free ports in a row")

    def _bind(self, number: int) -> int:
        bound = socket.socket()
        self._sockets.append(bound)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", number))
        return bound.getsockname()[1]

    def close(self) -> None:
        while self._sockets:
            self._sockets.pop().close()
