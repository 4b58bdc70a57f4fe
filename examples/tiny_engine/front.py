"""The front: starts a prefill and a decode process and leads each request through both."""

from __future__ import annotations

import itertools
import multiprocessing
import secrets
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait

from . import decode_worker, prefill_worker
from .messages import (
    Channel,
    ChannelClosed,
    Decoded,
    DecodeRequest,
    Failed,
    Generated,
    Message,
    NotStarted,
    Prefilled,
    PrefillRequest,
    WorkerOptions,
)

STOP_TIMEOUT_S = 10.0


class WorkerDied(Exception):
    """A worker process ended, or could not start, while requests were waiting for it."""


class Front:
    """A prefill and a decode process, for as long as the `with` block lasts."""

    def __init__(self, options: WorkerOptions | None = None) -> None:
        options = options or WorkerOptions()
        # Whoever holds the secret can read the cache: it is made for these two and goes to no one else.
        secret = secrets.token_bytes(32)
        self._prefill = WorkerProcess("prefill", prefill_worker.run, secret, options)
        self._decode = WorkerProcess("decode", decode_worker.run, secret, options)
        self._request_numbers = itertools.count()

    def __enter__(self) -> Front:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(at_once=kind is not None)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        on_news: Callable[[Prefilled | Generated], None] = lambda news: None,
    ) -> list[Decoded | Failed]:
        """Answer prompts, given and returned in order; each answer has at most `max_tokens` tokens.

        The prefill worker has one prompt at a time; the decode worker generates for all that have arrived.
        `on_news` hears of every prefilled prompt and every token as it comes. Raises `WorkerDied`.
        """
        requests = [
            PrefillRequest(request_id=f"request-{next(self._request_numbers)}", prompt=prompt) for prompt in prompts
        ]
        ended: dict[str, Decoded | Failed] = {}
        to_prefill = deque(requests)
        self._prefill_next(to_prefill)
        while len(ended) < len(requests):
            for worker in wait([self._prefill, self._decode]):
                message = worker.receive()
                if isinstance(message, NotStarted):
                    raise WorkerDied(message.reason)
                if worker is self._prefill:
                    self._prefill_next(to_prefill)
                if isinstance(message, (Prefilled, Generated)):
                    on_news(message)
                if isinstance(message, Prefilled):
                    self._decode.send(DecodeRequest(prefilled=message, max_tokens=max_tokens))
                elif not isinstance(message, Generated):
                    ended[message.request_id] = message
        return [ended[request.request_id] for request in requests]

    def close(self, *, at_once: bool = False) -> None:
        """Stop both processes; `at_once` in the middle of what they do."""
        for worker in (self._prefill, self._decode):
            worker.ask_to_stop(at_once=at_once)
        for worker in (self._prefill, self._decode):
            worker.stop()

    def _prefill_next(self, requests: deque[PrefillRequest]) -> None:
        if requests:
            self._prefill.send(requests.popleft())


class WorkerProcess:
    """A worker in a fresh process, and the front's end of the channel to it."""

    def __init__(
        self,
        name: str,
        run: Callable[[Connection, bytes, WorkerOptions], None],
        secret: bytes,
        options: WorkerOptions,
    ) -> None:
        """`run(connection, secret, options)` serves its end of the pipe until this end is closed."""
        context = multiprocessing.get_context("spawn")
        connection, worker_connection = context.Pipe()
        self._process = context.Process(name=name, target=run, args=(worker_connection, secret, options), daemon=True)
        resource_tracker.ensure_running()  # started with the worker, it would unblock the signal
        with _without_interrupts():
            self._process.start()
        worker_connection.close()
        self._channel = Channel(connection)

    def send(self, message: Message) -> None:
        """Send the worker one message."""
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            raise self._died() from error

    def receive(self) -> Message:
        """Wait for one message of the worker."""
        try:
            return self._channel.receive()
        except ChannelClosed as error:
            raise self._died() from error

    def fileno(self) -> int:
        """The file descriptor that becomes readable when `receive` would return or raise."""
        return self._channel.fileno()

    def ask_to_stop(self, *, at_once: bool) -> None:
        """Have the worker end when it has nothing to do; `at_once` kills it, and its shared memory goes with it."""
        self._channel.close()
        if at_once:
            self._process.kill()

    def stop(self) -> None:
        """Wait for the worker to end by itself; kill it when it does not."""
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _died(self) -> WorkerDied:
        with suppress(ChannelClosed):
            while self._channel.has_message():
                message = self._channel.receive()
                if isinstance(message, NotStarted):
                    return WorkerDied(message.reason)
        self._process.join(STOP_TIMEOUT_S)
        return WorkerDied(
            f"expected an answer of the {self._process.name} worker, saw it end with exit code "
            f"{self._process.exitcode}: its own output says why"
        )


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started within never gets a Ctrl-C, and this process only afterwards.

    Ctrl-C reaches every process of a terminal, and is this one's to act on. A new process inherits that the signal is
    blocked; but that holds for one thread, and another one, of a library, may take it, so the handler waits as well.
    """
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt
