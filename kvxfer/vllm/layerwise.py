"""Prefill's end of a stream, in a worker: what a prompt's last step computes goes to decode layer by layer.

A step that completes a streamed prompt *opens* it. When decode's rank says which blocks it has reserved, before the
step, during it or while the GPU still works it off, the prompt's blocks are sent there, each layer as soon as it is
computed. Nothing depends on it: until a send has succeeded, the lease that follows the step holds everything as well.

vLLM's main thread computes, kvxfer's progress thread brings decode's words. Imports metadata, notices, params, and
kvxfer's transfers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm.logger import init_logger

from kvxfer import ticket as tickets
from kvxfer.cache import Cache
from kvxfer.errors import KvxferError
from kvxfer.transfers.send import Send
from kvxfer.vllm import notices, params
from kvxfer.vllm.metadata import Opening
from kvxfer.vllm.notices import Reserved

_log = init_logger("vllm.kvxfer.worker")

_MAX_EARLY = 4096


@dataclass
class _Prompt:
    """A prompt that is open, or being sent."""

    opening: Opening
    computed: dict[str, object] = field(default_factory=dict)  # layers, and the event after which each may be read
    is_open: bool = True  # decode may still come
    send: Send | None = None


class Layerwise:
    """All prompts of one rank that are sent by layers. Any thread."""

    def __init__(
        self, cache: Cache, *, secret: bytes, timeout_s: float, mark: Callable[[], object], has_all_layers: bool
    ) -> None:
        """`mark()` is an event behind all that is launched on the GPU now, None for a cache in host memory.
        `has_all_layers`: what this rank lacks no other rank of the engine has."""
        self._cache, self._secret, self._timeout_s, self._mark = cache, secret, timeout_s, mark
        self._has_all_layers = has_all_layers
        self._layers = cache.layout.layers
        self._lock = threading.Lock()
        self._prompts: dict[str, _Prompt] = {}  # by request
        self._ids: dict[str, str] = {}  # request by stream
        self._step: list[_Prompt] = []  # what the step at work completes
        self._seen: set[str] = set()  # layers that it has computed
        self._early: OrderedDict[str, Reserved] = OrderedDict()  # words of streams that are not open yet

    # --- a step (main thread) -------------------------------------------------------------------------------

    def begin_step(self, openings: Iterable[Opening]) -> None:
        """Before anything of the step is launched."""
        with self._lock:
            self._step = [_Prompt(opening) for opening in openings]
            self._seen.clear()
            for prompt in self._step:
                opening = prompt.opening
                self._prompts[opening.request_id] = prompt
                self._ids[opening.stream_id] = opening.request_id
                if early := self._early.pop(opening.stream_id, None):
                    self._begin_send(prompt, early)

    def computed(self, layer: str) -> None:
        """All that the step writes of a layer is written, or launched."""
        if not self._step or layer not in self._layers:
            return
        if layer in self._seen:  # what was reported may not have been all of it
            with self._lock:
                for prompt in self._step:
                    self._close(prompt, f"layer {layer} is computed twice in one step")
            self._step = []
        else:
            self._report([layer])

    def end_step(self) -> None:
        """The same of every layer."""
        if self._step:
            self._report([layer for layer in self._layers if layer not in self._seen])
            self._step = []

    def _report(self, layers: list[str]) -> None:
        event = self._mark()
        with self._lock:
            self._seen.update(layers)
            for prompt in self._step:
                for layer in layers:
                    prompt.computed[layer] = event
                    self._tell(prompt, layer)

    # --- a request's end (main thread) ----------------------------------------------------------------------

    def close(self, request_id: str) -> None:
        """The prompt is leased now: whoever has not come may fetch it."""
        with self._lock:
            prompt = self._prompts.get(request_id)
            if prompt is not None:
                prompt.is_open = False

    def has_sent(self, request_id: str) -> bool:
        """Whether decode has received everything."""
        prompt = self._prompts.get(request_id)
        send = prompt and prompt.send
        return send is not None and send.done() and send.exception() is None

    def forget(self, request_id: str) -> None:
        """The blocks change hands: whatever is read of them from now on does not count."""
        with self._lock:
            prompt = self._prompts.pop(request_id, None)
            if prompt is None:
                return
            del self._ids[prompt.opening.stream_id]
            self._early.pop(prompt.opening.stream_id, None)
            self._close(prompt, "its blocks are given back")

    def _close(self, prompt: _Prompt, why: str) -> None:
        prompt.is_open = False
        if prompt.send is not None and not prompt.send.done():
            _log.debug("request %s is sent by layers no more: %s", prompt.opening.request_id, why)
            prompt.send.cancel()

    # --- what decode says (progress thread) -----------------------------------------------------------------

    def take(self, endpoint: str, payload: bytes) -> None:
        """A word of a rank of decode."""
        try:
            notice = notices.decode(payload)
        except KvxferError as error:
            _log.warning("a notice from %s was dropped: %s", endpoint, error)
            return
        if not isinstance(notice, Reserved):
            return
        with self._lock:
            request_id = self._ids.get(notice.id)
            if request_id is None:
                self._early[notice.id] = notice
                if len(self._early) > _MAX_EARLY:
                    self._early.popitem(last=False)
            else:
                self._begin_send(self._prompts[request_id], notice)

    def _begin_send(self, prompt: _Prompt, notice: Reserved) -> None:
        opening = prompt.opening
        if not prompt.is_open or prompt.send is not None:
            return
        try:
            ticket = tickets.parse(notice.ticket, self._secret)
            if ticket.tokens != opening.tokens or not params.is_bound_to(ticket, opening.prompt):
                _log.warning("request %s is not sent by layers: the blocks are for another prompt", opening.request_id)
                return
            prompt.send = self._cache.send(
                ticket,
                opening.blocks,
                layerwise=True,
                wire=notice.wire,
                timeout_s=self._timeout_s,
                allow_missing=notice.allow_missing and self._has_all_layers,
            )
        except KvxferError as error:
            _log.debug("request %s is not sent by layers: %s", opening.request_id, error)
            return
        for layer in prompt.computed:
            self._tell(prompt, layer)

    def _tell(self, prompt: _Prompt, layer: str) -> None:
        if prompt.send is not None:
            prompt.send.layer_ready(layer, prompt.computed[layer])
