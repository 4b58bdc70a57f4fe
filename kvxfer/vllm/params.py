"""`kv_transfer_params`: what vLLM's front end, the router and other connectors see of a hand-off.

vLLM's usual keys are there for routers; kvxfer itself reads the ticket, and of the request only its direction and,
where it is to be streamed, the stream. The ticket is bound to the prompt: its request id ends with a digest of all that
the blocks depend on.

Imports notices, ticket, checks and errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvxfer import checks
from kvxfer import ticket as tickets
from kvxfer.control.messages import Role
from kvxfer.errors import InvalidRequest, InvalidTicket
from kvxfer.ticket import DICT_KEY, Ticket
from kvxfer.vllm.notices import StreamId

_MAX_REQUEST_ID = 200
_DIGEST_CHARACTERS = 32
_MARK = "#"
STREAM_KEY = "kvxfer_stream"


@dataclass(frozen=True, kw_only=True)
class StreamKey:
    """What a front end tells both engines of a stream: an id of its own making, and decode where prefill listens."""

    id: StreamId
    prefill: str = ""


def wants_decode_elsewhere(request: Any) -> bool:
    """Whether this engine shall prefill the request for another one to decode."""
    given = request.kv_transfer_params
    return isinstance(given, Mapping) and bool(given.get("do_remote_decode"))


def stream_of(request: Any) -> StreamKey | None:
    """The stream that the front end has named; None where it has named none. Raises InvalidRequest."""
    params = request.kv_transfer_params
    if not isinstance(params, Mapping) or params.get(STREAM_KEY) is None:
        return None
    try:
        key = msgspec.convert(params[STREAM_KEY], StreamKey)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{STREAM_KEY}: {error}") from error
    if not wants_decode_elsewhere(request):
        checks.endpoint(f"{STREAM_KEY}: prefill", key.prefill)
    return key


def offered_ticket(request: Any, secret: bytes) -> Ticket | None:
    """The ticket with which another engine's prefill can be fetched; None where there is none. Raises InvalidTicket."""
    params = request.kv_transfer_params
    if not isinstance(params, Mapping) or DICT_KEY not in params:
        return None
    ticket = tickets.parse({DICT_KEY: params[DICT_KEY]}, secret)
    if ticket.role is not Role.FETCH:
        raise InvalidTicket("the ticket is for sending, not for fetching")
    return ticket


def bound_request_id(request: Any, tokens: int) -> str:
    """The request id that a ticket for the first `tokens` tokens of the prompt carries."""
    return f"{request.request_id[:_MAX_REQUEST_ID]}{_MARK}{prompt_digest(request, tokens)}"


def is_for_prompt(ticket: Ticket, request: Any) -> bool:
    """Whether the ticket was issued for the beginning of this request's prompt."""
    return ticket.tokens <= request.num_prompt_tokens and is_bound_to(ticket, prompt_digest(request, ticket.tokens))


def is_bound_to(ticket: Ticket, digest: str) -> bool:
    """Whether the ticket was issued for tokens with this digest."""
    _, mark, found = ticket.request_id.rpartition(_MARK)
    return bool(mark) and found == digest


def prompt_digest(request: Any, tokens: int) -> str:
    """Digest of what the KV of a prompt's first `tokens` tokens depends on, beside the model.

    Token ids or embeddings, multi-modal items and their places, the adapter, and the cache salt, which keeps prompts of
    different owners apart.
    """
    sha = hashlib.sha256()

    def add(what: str, data: bytes) -> None:
        sha.update(f"{what} {len(data)}\n".encode())
        sha.update(data)

    lora = request.lora_request
    add("adapter", b"" if lora is None else lora.lora_name.encode())
    add("salt", (request.cache_salt or "").encode())
    if request.prompt_token_ids is not None:
        add("tokens", np.asarray(request.prompt_token_ids[:tokens], "<i8").tobytes())
    if request.prompt_embeds is not None:
        embeds = request.prompt_embeds[:tokens].float().contiguous()
        add("embeddings", embeds.numpy().astype("<f4").tobytes())
    for feature in request.mm_features or ():
        place = feature.mm_position
        if place.offset < tokens:
            add("item", f"{feature.identifier} {place.offset} {place.length}".encode())
    return sha.hexdigest()[:_DIGEST_CHARACTERS]


def response(
    ticket: Ticket,
    *,
    engine_id: str,
    blocks: list[list[int]],
    tensor_ranks: int,
    pipeline_ranks: int,
    all_keys: bool,
) -> dict[str, Any]:
    """The parameters that prefill answers with. Without `all_keys` only kvxfer's own."""
    if not all_keys:
        return ticket.to_dict()
    host, _, port = ticket.endpoint.removeprefix("tcp://").rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": ticket.request_id.rpartition(_MARK)[0],
        "remote_block_ids": blocks,
        "remote_host": host,
        "remote_port": int(port) if port.isdigit() else port,
        "remote_num_tokens": ticket.tokens,
        "tp_size": tensor_ranks,
        "pp_size": pipeline_ranks,
        "dcp_size": 1,
        "transfer_mode": "pull",
        **ticket.to_dict(),
    }
