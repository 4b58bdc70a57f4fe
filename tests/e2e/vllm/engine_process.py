"""The process behind `Engine`: steps a vLLM engine and carries out verbs that come over a pipe."""

from __future__ import annotations

import os
import runpy
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from .corruption import Corruption
from .engine import Answer, Choice, Request
from .environment import FEW_CORES

LIKELY_TOKENS = 20


class Side:
    """Public methods are the verbs."""

    def __init__(self, pipe: Connection, arguments: dict[str, Any]) -> None:
        self._pipe = pipe
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._scheduled_tokens = self._count_scheduled_tokens()
        self._internal_ids: dict[str, str] = {}
        self._answers: dict[str, Answer] = {}
        self._awaited: list[str] | None = None
        self._corruption: Corruption | None = None

    def run(self) -> None:
        """Serve until the other end of the pipe closes."""
        while True:
            busy = self._scheduler.has_requests()
            if self._pipe.poll(0 if busy else None):
                verb, args = self._pipe.recv()
                try:
                    reply = getattr(self, verb)(*args)
                except Exception as error:
                    reply = error
                if verb != "answers":
                    self._pipe.send(reply)
            if busy:
                self._step()
            self._deliver()

    def add(self, request: Request) -> None:
        params = SamplingParams(
            temperature=0.0 if request.n == 1 else 1.0,
            top_k=1,  # greedy too, where vLLM does not take a temperature of 0
            max_tokens=request.max_tokens,
            n=request.n,
            stop_token_ids=list(request.stop),
            ignore_eos=True,
            detokenize=False,
            logprobs=LIKELY_TOKENS,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": request.kv} if request.kv else None,
        )
        self._internal_ids[request.request_id] = self._engine.add_request(
            request.request_id, {"prompt_token_ids": list(request.prompt)}, params
        )

    def answers(self, request_ids: list[str]) -> None:
        """Answered once all of these requests have ended."""
        self._awaited = request_ids

    def abort(self, request_id: str) -> None:
        """As when a client hangs up."""
        self._engine.abort_request([self._internal_ids[request_id]], internal=True)

    def free_blocks(self) -> int:
        """Blocks that no request holds; those of the prefix cache count as free."""
        return self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def idle(self) -> bool:
        """Whether nothing is left to do: no request, and no finished one whose blocks are still promised."""
        return not self._scheduler.has_requests()

    def forget(self) -> bool:
        """Empty the prefix cache."""
        return self._engine.reset_prefix_cache()

    def corrupt(self, how: str | None) -> None:
        """Damage what is fetched from now on (`Corruption`), or stop doing so."""
        if self._corruption is None:
            self._corruption = Corruption(self._scheduler, self._engine.model_executor)
        self._corruption.how = how

    def _step(self) -> None:
        outputs = self._engine.step()
        for output in outputs:
            self._answers[output.request_id] = self._answer(output)
        if not outputs:
            time.sleep(0.001)  # as vLLM's own loop does, so that a transfer's threads get the core

    def _deliver(self) -> None:
        if self._awaited is not None and all(name in self._answers for name in self._awaited):
            self._pipe.send([self._answers.pop(name) for name in self._awaited])
            self._awaited = None

    def _count_scheduled_tokens(self) -> Counter[str]:
        """Tokens that each request has been given to compute."""
        counts: Counter[str] = Counter()
        schedule = self._scheduler.schedule

        def counted_schedule(*args: Any, **options: Any) -> Any:
            output = schedule(*args, **options)
            counts.update(output.num_scheduled_tokens)
            return output

        self._scheduler.schedule = counted_schedule
        return counts

    def _answer(self, output: RequestOutput) -> Answer:
        choices = [
            Choice(
                tokens=list(one.token_ids),
                logprobs=[step[token].logprob for step, token in zip(one.logprobs or [], one.token_ids, strict=True)],
                finish=str(one.finish_reason),
                first={token: entry.logprob for token, entry in (one.logprobs or [{}])[0].items()},
            )
            for one in output.outputs
        ]
        # With n > 1 the engine has one request for each choice, whose id ends with that of the whole.
        whole = self._internal_ids[output.request_id]
        scheduled = sum(count for name, count in self._scheduled_tokens.items() if name.endswith(whole))
        generated = sum(max(len(choice.tokens) - 1, 0) for choice in choices)  # the last one is not put in again
        return Answer(choices=choices, kv=output.kv_transfer_params, computed_tokens=scheduled - generated)


def run(pipe: Connection, log: Path, names: dict[str, str], arguments: dict[str, Any]) -> None:
    """The life of the process: `names` goes into its environment, all that it prints into `log`."""
    os.setsid()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(names)
    runpy.run_path(str(FEW_CORES / "sitecustomize.py"))
    torch.set_num_threads(1)
    try:
        side = Side(pipe, arguments)
        pipe.send(None)
        side.run()
    except EOFError:
        pass
