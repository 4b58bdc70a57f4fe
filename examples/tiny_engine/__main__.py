"""Command line: answer prompts in one process, or with prefill and decode in a process each.

Answers go to standard output, measurements to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time

from .checkpoint import Checkpoint, find_checkpoint
from .engine import Engine
from .model import Llama
from .tokenizer import Tokenizer

NUM_BLOCKS = 256


def main() -> int:
    """Parse the arguments and answer each prompt; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_engine", description=__doc__)
    parser.add_argument("prompts", nargs="+", metavar="prompt", help="what the user says to the model")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer, in tokens (128)")
    parser.add_argument(
        "--disaggregate", action="store_true", help="prefill and decode in a process each, joined by kvxfer"
    )
    arguments = parser.parse_args()

    checkpoint = Checkpoint(find_checkpoint())
    tokenizer = Tokenizer(checkpoint.metadata)
    prompts = [tokenizer.encode_chat([("user", prompt)]) for prompt in arguments.prompts]
    answer = answer_disaggregated if arguments.disaggregate else answer_in_one_process
    return answer(checkpoint, tokenizer, prompts, arguments.max_tokens)


def answer_in_one_process(
    checkpoint: Checkpoint, tokenizer: Tokenizer, prompts: list[list[int]], max_tokens: int
) -> int:
    """Answer one prompt after the other."""
    model = Llama(checkpoint)
    engine = Engine(model, model.new_cache(num_blocks=NUM_BLOCKS))
    for prompt in prompts:
        started = time.perf_counter()
        sequence = engine.prefill(prompt)
        prefilled = time.perf_counter()
        tokens = list(engine.decode(sequence, max_tokens))
        ended = time.perf_counter()
        print(tokenizer.decode(tokens))
        log(
            f"prefill: {len(prompt)} tokens, {len(prompt) / (prefilled - started):.0f} tokens/s; "
            f"decode: {len(tokens)} tokens, {len(tokens) / (ended - prefilled):.1f} tokens/s"
        )
    return 0


def answer_disaggregated(
    checkpoint: Checkpoint, tokenizer: Tokenizer, prompts: list[list[int]], max_tokens: int
) -> int:
    """Answer the prompts with a prefill process and a decode process."""
    from .front import Front  # one process alone does not need kvxfer
    from .messages import Failed

    status = 0
    with Front() as front:
        for result in front.generate(prompts, max_tokens):
            if isinstance(result, Failed):
                log(f"{result.request_id} failed: {result.reason}")
                status = 1
                continue
            print(tokenizer.decode(result.tokens))
            log(
                f"{result.request_id}: fetched {result.fetched_bytes} bytes "
                f"in {result.fetch_seconds * 1e3:.2f} ms ({result.backend}, {result.way}); "
                f"decode: {len(result.tokens)} tokens"
            )
    return status


def log(line: str) -> None:
    """One line to standard error."""
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
