"""A vLLM engine in a process of its own, driven over a pipe: `Engine`.

The process (engine_process.py) steps the engine whenever there is something to do, so a prefill engine keeps its
promises while a decode engine computes.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from .environment import Port, environment

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


@dataclass(frozen=True, kw_only=True)
class Answer:
    choices: list[Choice]
    kv: dict[str, Any] | None
    """kv_transfer_params of the response."""
    cached_tokens: int
    """Prompt tokens that were not computed here: from this engine's prefix cache, or fetched."""

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
        **options: Any,
    ) -> None:
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
        self._port = Port() if connector and "Nixl" in connector["kv_connector"] else None
        self._pipe, theirs = Pipe()
        ranks = options.get("tensor_parallel_size", 1)
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.vllm.engine_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment(core=core, ranks=ranks, nixl_port=self._port and self._port.number),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pipe.send(arguments)
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

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
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
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
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
