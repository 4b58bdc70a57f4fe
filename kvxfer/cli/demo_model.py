"""The demo on a real model: the tiny engine of examples/, in two processes and in one."""

from __future__ import annotations

import argparse

from kvxfer import formats
from kvxfer.backends.segments import remove_orphans
from kvxfer.cli import checkout
from kvxfer.cli.demo import Report
from kvxfer.cli.progress_bar import ProgressBar
from kvxfer.errors import InvalidRequest, TransferError
from kvxfer.extras import need

MODEL = "SmolLM2-135M-Instruct"


def demonstrate(args: argparse.Namespace) -> Report:
    """Answer the prompt with two processes, then with one."""
    need("gguf", "demo")
    need("tokenizers", "demo")
    engine = checkout.load("examples.tiny_engine")
    checkpoints = checkout.load("examples.tiny_engine.checkpoint")
    try:
        checkpoint = checkpoints.Checkpoint(checkpoints.find_checkpoint())
    except checkpoints.CheckpointError as error:
        raise InvalidRequest(f"the demo's model is not there: {error}") from error
    tokenizer = checkout.load(f"{engine.__name__}.tokenizer").Tokenizer(checkpoint.metadata)
    prompt = tokenizer.encode_chat([("user", args.prompt)])
    try:
        answer = _with_two_processes(args, prompt)
    finally:
        remove_orphans()  # of processes that were killed, after an error or Ctrl-C
    reference = _with_one_process(args, checkpoint, prompt)
    equal = [ours == theirs for ours, theirs in zip(answer.tokens, reference, strict=False)]
    return Report(
        model=MODEL,
        backend=answer.backend,
        way=answer.way,
        wire=answer.wire,
        tokens=len(prompt),
        bytes=answer.fetched_bytes,
        wire_bytes=answer.wire_bytes,
        seconds=answer.fetch_seconds,
        gigabytes_per_s=answer.fetched_bytes / answer.fetch_seconds / 1e9,
        verified=answer.verified if formats.parse(answer.wire).lossless else None,
        text=tokenizer.decode(answer.tokens),
        text_matches=answer.tokens == reference,
        reference_text=tokenizer.decode(reference),
        equal_tokens=equal.index(False) if False in equal else len(equal),
    )


def _with_two_processes(args: argparse.Namespace, prompt: list[int]):
    front = checkout.load("examples.tiny_engine.front")
    messages = checkout.load("examples.tiny_engine.messages")
    options = messages.WorkerOptions(
        wire=args.wire,
        shared=args.memory == "shared",
        ways=(args.way,) if args.way else ("mapped", "direct", "packed"),
        backend=args.backend,
    )
    with ProgressBar("demo", shown=not args.json) as bar, front.Front(options) as workers:
        done = 0

        def show(news: object) -> None:
            nonlocal done
            if isinstance(news, messages.Prefilled):
                bar.show(0.1, f"prefill process: {news.prompt_tokens} tokens computed and published")
            else:
                done += 1
                bar.show(0.1 + 0.9 * done / args.max_tokens, f"decode process: token {done}")

        try:
            [answer] = workers.generate([prompt], args.max_tokens, on_news=show)
        except front.WorkerDied as error:
            raise TransferError(str(error)) from error
        if isinstance(answer, messages.Failed):
            raise TransferError(f"the request failed: {answer.reason}")
        bar.show(1.0, f"{done} tokens")
    return answer


def _with_one_process(args: argparse.Namespace, checkpoint, prompt: list[int]) -> list[int]:
    model = checkout.load("examples.tiny_engine.model").Llama(checkpoint)
    engine = checkout.load("examples.tiny_engine.engine").Engine(model, model.new_cache(num_blocks=256))
    with ProgressBar("alone", shown=not args.json) as bar:
        tokens = []
        for token in engine.decode(engine.prefill(prompt), args.max_tokens):
            tokens.append(token)
            bar.show(len(tokens) / args.max_tokens, f"token {len(tokens)}")
        bar.show(1.0, f"{len(tokens)} tokens")
    return tokens
