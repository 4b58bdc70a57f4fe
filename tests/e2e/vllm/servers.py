"""Servers as operators start them: `vllm serve` and vllm-router, with the lines of docs/vllm.md."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

from .connectors import SECRET
from .engine import Answer, Choice, EngineFailed, tail

PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"
START_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 120.0
FOR_CPU = (
    "--dtype float32 --enforce-eager --max-model-len 4096 --kv-cache-memory-bytes 268435456 --served-model-name m "
    "--host 127.0.0.1 --disable-uvicorn-access-log"
).split()
"""What a test adds to a line of the page."""
_MODULES = {"vllm": "vllm.entrypoints.cli.main", "vllm-router": "vllm_router.launch_router"}


def launch_line(name: str, replacements: Mapping[str, str]) -> list[str]:
    """The words of the command below the page's mark of that name, with text replaced in each.

    The program is the one installed beside this Python.
    """
    [command] = re.findall(rf"<!-- launch: {name} -->\n```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    for old, new in replacements.items():
        if not any(old in word for word in words):
            raise ValueError(f"the launch line {name} of {PAGE} has no {old!r}")
        words = [word.replace(old, new) for word in words]
    return [*program(words[0]), *words[1:]]


def with_options(words: Sequence[str], **extra: Any) -> list[str]:
    """The words of a launch line whose connector gets more options."""
    place = words.index("--kv-transfer-config") + 1
    connector = json.loads(words[place])
    connector["kv_connector_extra_config"] = connector.get("kv_connector_extra_config", {}) | extra
    return [*words[:place], json.dumps(connector), *words[place + 1 :]]


def program(name: str) -> list[str]:
    """The first words of a command: the program beside this Python, or its module, where only the package is there."""
    installed = Path(sys.executable).parent / name
    return [str(installed)] if installed.exists() else [sys.executable, "-m", _MODULES[name]]


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """In a new process: end when the one that started it does, also when that was killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """A process group that answers HTTP at `url` once it is ready. The constructor returns at once."""

    def __init__(
        self, name: str, words: Sequence[str], log: Path, *, port: int, environment: Mapping[str, str]
    ) -> None:
        """`environment` is the whole of it."""
        self.name, self.log, self.url = name, log, f"http://127.0.0.1:{port}"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                words,
                env={**environment, "KVXFER_SECRET": SECRET, "VLLM_LOG_STATS_INTERVAL": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> Server:
        """Wait until it is healthy."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._process.poll() is not None:
                raise EngineFailed(f"{self.name} ended; its last lines:\n{tail(self.log)}")
            try:
                if requests.get(self.url + "/health", timeout=2).ok:
                    return self
            except requests.RequestException:
                pass
            if time.monotonic() > deadline:
                raise EngineFailed(f"{self.name} is not ready; its last lines:\n{tail(self.log)}")
            time.sleep(0.1)

    def post(self, path: str, body: dict[str, Any], timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The JSON that a request is answered with. Raises requests' exceptions, with the server's words."""
        response = requests.post(self.url + path, json={"model": "m", "temperature": 0, **body}, timeout=timeout_s)
        if not response.ok:
            raise requests.HTTPError(f"{self.name}: {response.status_code} {response.text[:1000]}", response=response)
        return response.json()

    def complete(self, prompt: str | Sequence[int], max_tokens: int = 16, **body: Any) -> Answer:
        """A greedy completion."""
        answer = self.post(
            "/v1/completions",
            {
                "prompt": prompt,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "logprobs": 0,
                "return_token_ids": True,
                **body,
            },
        )
        choices = [
            Choice(
                tokens=choice["token_ids"],
                logprobs=(choice["logprobs"] or {}).get("token_logprobs", []),
                finish=choice["finish_reason"],
            )
            for choice in answer["choices"]
        ]
        return Answer(choices=choices, kv=answer.get("kv_transfer_params"), computed_tokens=-1)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a Prometheus metric's values whose labels fit."""
        total = 0.0
        for line in requests.get(self.url + "/metrics", timeout=10).text.splitlines():
            if re.match(rf"{re.escape(name)}[ {{]", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def processes(self) -> list[psutil.Process]:
        """Those of the server that run now."""
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pause(self) -> None:
        """SIGSTOP to the whole process group."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to the whole process group, as often as one likes."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the whole process group, as often as one likes."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass
