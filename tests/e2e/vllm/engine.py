"""A vLLM engine in a process of its own, driven over a pipe: `Engine`.

The process (engine_process.py) steps the engine whenever there is something to do, so a prefill engine keeps its
promises while a decode engine computes. It is forked from one that has imported vLLM already, which saves most of the
time of a start.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.hosts.network import Host

from .environment import COMMON, Ports, for_engine

START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 120.0
KV_CACHE_BYTES = 64 << 20

TO_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The kv_transfer_params with which vllm-router sends a request to a prefill engine."""

_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Request:
    """A greedy request, answered with the log-probability of every token."""

    prompt: Sequence[int]
    max_tokens: int = 16
    kv: dict[str, Any] | None = None
    """kv_transfer_params."""
    n: int = 1
    stop: Sequence[int] = ()
    """Tokens that end the answer."""
    request_id: str = field(default_factory=lambda: f"request-{next(_numbers)}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    tokens: list[int]
    logprobs: list[float]
    finish: str
    """vLLM's finish reason."""
    first: dict[int, float] = field(default_factory=dict)
    """Log-probabilities of the tokens most likely to come first."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    choices: list[Choice]
    kv: dict[str, Any] | None
    """kv_transfer_params of the response."""
    computed_tokens: int
    """Prompt tokens that this engine computed, as its scheduler counted them: not fetched and not in its cache."""

    @property
    def tokens(self) -> list[int]:
        return self.choices[0].tokens

    @property
    def logprobs(self) -> list[float]:
        return self.choices[0].logprobs

    @property
    def finish(self) -> str:
        return self.choices[0].finish


class EngineFailed(Exception):
    """The engine's process ended, or did not answer in time."""


class Engine:
    """An engine in a process group of its own. `connector` is its kv_transfer_config; options are vLLM's `EngineArgs`.

    The constructor starts the process and returns; `ready` waits for it. `log` takes all that the process prints.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        log: Path,
        *,
        connector: dict[str, Any] | None = None,
        core: int = 0,
        on: Host | None = None,
        **options: Any,
    ) -> None:
        """`on` is a host of tests/hosts; by default the engine runs on this one."""
        self.name, self.log = name, log
        arguments = {
            "model": str(model),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 4096,
            "block_size": 32,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "kv_transfer_config": connector,
            **options,
        }
        self._port = Ports() if "Nixl" in json.dumps(connector) else None
        self._pipe, theirs = multiprocessing.Pipe()
        names = for_engine(
            core=core,
            ranks=options.get("tensor_parallel_size", 1),
            nixl_port=self._port and self._port.first,
        )
        with theirs, patch.dict(os.environ, COMMON):
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([f"{__package__}.engine_process"])
            forkserver.ensure_running()
            self._process = context.Process(
                name=name, target=_run, args=(on and on.pid, theirs, log, names, arguments), daemon=False
            )
            self._process.start()
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def ready(self) -> Engine:
        """Wait until the engine takes requests."""
        if not self._ready:
            self._answer(START_TIMEOUT_S)
            self._ready = True
        return self

    def generate(self, *requests: Request) -> list[Answer]:
        """Give the requests to the engine at once and wait for all answers, in order."""
        self.add(*requests)
        return self.answers(*requests)

    def add(self, *requests: Request) -> None:
        """Give the engine requests."""
        for request in requests:
            self._call("add", request)

    def answers(self, *requests: Request, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Answer]:
        """Wait for the answers to requests that were added."""
        return self._call("answers", [request.request_id for request in requests], timeout_s=timeout_s)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        """The other verbs of the engine's process: `engine_process.Side`."""
        if verb.startswith("_"):
            raise AttributeError(verb)
        return lambda *args: self._call(verb, *args)

    def kill(self) -> None:
        """SIGKILL to the whole process group, as often as one likes."""
        self._ready = False
        for victim in (os.killpg, os.kill):  # it may not have made itself a group yet
            try:
                victim(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.join()
        self._pipe.close()
        if self._port:
            self._port.close()

    def _call(self, verb: str, *args: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        self.ready()
        try:
            self._pipe.send((verb, args))
        except OSError as error:
            raise self._failed("ended") from error
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise self._failed(f"gave no answer within {timeout_s:g} s")
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._failed("ended") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _failed(self, what: str) -> EngineFailed:
        return EngineFailed(f"engine {self.name} {what}; its last lines:\n{tail(self.log)}")


def tail(log: Path, lines: int = 40) -> str:
    """The last lines of a log, long ones cut."""
    return "\n".join(line[:300] for line in log.read_text(errors="replace").splitlines()[-lines:])


def _run(host_pid: int | None, *args: Any) -> None:
    if host_pid is not None:
        _enter(host_pid)
    from .engine_process import run

    run(*args)


def _enter(pid: int) -> None:
    """Go where a process of another host stands: its network and its mounts."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "mnt"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"entering the {kind} namespace of process {pid}")
