"""kvxfer moves a request's KV cache from the worker that prefills it to the worker that decodes it.

The public names, each imported at first use: ``import kvxfer`` alone loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "Cache": "kvxfer.cache",
    "CacheLayout": "kvxfer.layout",
    "Connector": "kvxfer.connector",
    "Costs": "kvxfer.backends.base",
    "Fetch": "kvxfer.transfers.fetch",
    "Group": "kvxfer.layout",
    "GroupKind": "kvxfer.layout",
    "KvxferError": "kvxfer.errors",
    "Lease": "kvxfer.lease",
    "LeaseState": "kvxfer.lease",
    "Limits": "kvxfer.node",
    "Padding": "kvxfer.layout",
    "Plane": "kvxfer.layout",
    "Record": "kvxfer.layout",
    "Region": "kvxfer.layout",
    "Reservation": "kvxfer.transfers.reserve",
    "Role": "kvxfer.control.messages",
    "Send": "kvxfer.transfers.send",
    "Slice": "kvxfer.layout",
    "TensorGroup": "kvxfer.layout.tensors",
    "Ticket": "kvxfer.ticket",
    "Transfer": "kvxfer.transfers.transfer",
    "TransferState": "kvxfer.transfers.transfer",
    "TransferStats": "kvxfer.transfers.transfer",
    "layout_for": "kvxfer.models",
    "shared_empty": "kvxfer.backends.segments",
}
_SUBMODULES = ("errors", "layout", "plan")

__all__ = [
    "Cache",
    "CacheLayout",
    "Connector",
    "Costs",
    "Fetch",
    "Group",
    "GroupKind",
    "KvxferError",
    "Lease",
    "LeaseState",
    "Limits",
    "Padding",
    "Plane",
    "Record",
    "Region",
    "Reservation",
    "Role",
    "Send",
    "Slice",
    "TensorGroup",
    "Ticket",
    "Transfer",
    "TransferState",
    "TransferStats",
    "__version__",
    "errors",
    "layout",
    "layout_for",
    "plan",
    "shared_empty",
]

if TYPE_CHECKING:
    from kvxfer import errors, layout, plan
    from kvxfer.backends.base import Costs
    from kvxfer.backends.segments import shared_empty
    from kvxfer.cache import Cache
    from kvxfer.connector import Connector
    from kvxfer.control.messages import Role
    from kvxfer.errors import KvxferError
    from kvxfer.layout import CacheLayout, Group, GroupKind, Padding, Plane, Record, Region, Slice
    from kvxfer.layout.tensors import TensorGroup
    from kvxfer.lease import Lease, LeaseState
    from kvxfer.models import layout_for
    from kvxfer.node import Limits
    from kvxfer.ticket import Ticket
    from kvxfer.transfers.fetch import Fetch
    from kvxfer.transfers.reserve import Reservation
    from kvxfer.transfers.send import Send
    from kvxfer.transfers.transfer import Transfer, TransferState, TransferStats


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"kvxfer.{name}")
    else:
        raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
