"""The options of the connector: what stands under ``kv_connector_extra_config``, typed and checked.

Imports connector and node (for `Limits`), msgspec and errors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvxfer import formats
from kvxfer.connector import WAYS
from kvxfer.errors import InvalidRequest
from kvxfer.node import Limits

SECRET_VARIABLE = "KVXFER_SECRET"
_UNSET_BUFFER_BYTES = 1e9  # vLLM's default of kv_buffer_size, where it has one: nobody asked for it

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set. Times in seconds."""

    host: str = "127.0.0.1"
    """Address on which scheduler and workers listen for peers."""
    port: Port = 0
    """The scheduler's port; rank r listens on ``port + 1 + r``, and a further data-parallel replica on the ports after
    that. 0: any free ones."""
    advertise_host: str | None = None
    """What peers dial instead of `host`; needed for 0.0.0.0 and ::."""
    secret: str | None = None
    """Shared by all pools, 16 bytes or more. Better in a file or in the environment (KVXFER_SECRET)."""
    secret_file: str | None = None
    allow_unauthenticated: bool = False
    """Allow an address that other hosts reach without a secret."""

    backends: Literal["auto"] | list[str] = "auto"
    ways: tuple[str, ...] = WAYS
    """Ways that a decode engine may take, best first."""
    wire: str = "raw"
    """Wire format in which a decode engine fetches."""
    checksums: bool = False
    check_finite: bool = True
    allow_missing_layers: bool = False
    """For the side that speculates where the other does not: decode goes on without the draft model's KV, or prefill's
    stays behind. Otherwise speculation must be equal on both sides, and no layer may be missing."""

    lease_s: Seconds = 30.0
    """How long prefill keeps blocks that nobody fetches or renews."""
    renew_for_s: Seconds = 600.0
    """How long decode renews the lease of a request that waits in its queue."""
    fetch_timeout_s: Seconds = 30.0
    """How long a fetch may take."""
    max_leased_share: Share = 0.75
    """Share of prefill's blocks that leases may hold before new prompts wait."""

    stream: bool = False
    """Hand over finished blocks while the rest of a prompt is still being computed. Both engines need it, and a front
    end that asks both at once."""
    stream_layers: bool = False
    """Of a prefill engine that streams: hand over what a prompt's last step computes layer by layer, while that step
    is at work. vLLM then captures no full CUDA graphs, only piecewise ones."""
    stream_timeout_s: Seconds = 60.0
    """How long decode waits for a sign that a streamed prompt has reached prefill, and then for each advance of its
    computation; how long prefill remembers who has asked for a prompt that has not come yet."""

    discovery_address: str | None = None
    """``host:port`` of a vllm-router that finds its engines itself."""
    http_address: str | None = None
    """``host:port`` at which that router reaches this engine's front end."""

    model_id: str | None = None
    """What has to be equal on both sides instead of the model's path."""
    response_keys: Literal["vllm", "ticket"] = "vllm"
    """``ticket``: answer with kvxfer's key only, beside another connector of a MultiConnector that sets vLLM's."""

    kv_buffer_size: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Bytes of the buffer that packed transfers are received in, as in vLLM's own field of that name."""
    limits: dict[str, float] = {}
    """Other fields of `kvxfer.Limits`."""


def options_of(kv_transfer_config: Any) -> Options:
    """The options in a vLLM KVTransferConfig. Raises InvalidRequest, which names what is known."""
    given = dict(kv_transfer_config.kv_connector_extra_config or {})
    known = {field.name for field in msgspec.structs.fields(Options)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise InvalidRequest(
            f"kv_connector_extra_config has unknown options {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    buffer_bytes = getattr(kv_transfer_config, "kv_buffer_size", None)
    if buffer_bytes not in (None, _UNSET_BUFFER_BYTES):
        given.setdefault("kv_buffer_size", buffer_bytes)
    try:
        options = msgspec.convert(given, Options)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"kv_connector_extra_config: {error}") from error
    formats.parse(options.wire)
    limits = limits_of(options)
    if options.lease_s > limits.max_ttl_s:
        raise InvalidRequest(f"lease_s is {options.lease_s:g}, above limits.max_ttl_s ({limits.max_ttl_s:g})")
    if options.secret is not None and options.secret_file is not None:
        raise InvalidRequest("kv_connector_extra_config has both secret and secret_file; set one of them")
    if options.stream_layers and not options.stream:
        raise InvalidRequest("stream_layers needs stream: set both, or neither")
    _check_discovery(options, kv_transfer_config.kv_role)
    return options


def limits_of(options: Options) -> Limits:
    """The connector's limits. Raises InvalidRequest for an unknown one."""
    known = Limits.__dataclass_fields__
    unknown = sorted(options.limits.keys() - known.keys())
    if unknown:
        raise InvalidRequest(f"limits has unknown fields {', '.join(unknown)}; known are {', '.join(known)}")
    values: dict[str, Any] = {  # numbers of a configuration file may have become floats on the way
        name: value if isinstance(known[name].default, float) or not value.is_integer() else int(value)
        for name, value in options.limits.items()
    }
    if options.kv_buffer_size is not None:
        values.setdefault("staging_bytes", int(options.kv_buffer_size))
    return Limits(**values)


def connector_arguments(options: Options, offset: int) -> dict[str, Any]:
    """Arguments of `kvxfer.Connector` for the process that listens on ``port + offset``."""
    port = options.port + offset if options.port else 0
    return {
        "listen": _endpoint(options.host, port),
        "advertise": _endpoint(options.advertise_host, port) if options.advertise_host else None,
        "secret": _secret(options),
        "allow_unauthenticated": options.allow_unauthenticated,
        "backends": options.backends,
        "ways": options.ways,
        "checksums": options.checksums,
        "check_finite": options.check_finite,
        "limits": limits_of(options),
    }


def _check_discovery(options: Options, role: str | None) -> None:
    if (options.discovery_address is None) != (options.http_address is None):
        raise InvalidRequest("discovery_address and http_address belong together; set both or neither")
    if options.discovery_address is not None and role == "kv_both":
        raise InvalidRequest(
            "a router has to know whether this engine prefills or decodes: with discovery_address, kv_role must be "
            "kv_producer or kv_consumer"
        )


def _endpoint(host: str, port: int) -> str:
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"tcp://{bracketed}:{port}"


def _secret(options: Options) -> str | bytes | None:
    if options.secret_file is not None:
        try:
            return Path(options.secret_file).read_bytes().strip()
        except OSError as error:
            raise InvalidRequest(f"secret_file cannot be read: {error}") from error
    return options.secret or os.environ.get(SECRET_VARIABLE) or None
