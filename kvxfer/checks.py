"""Checks of plain arguments at the edge: each raises InvalidRequest saying what was expected and what was seen.

Imports errors only.
"""

from __future__ import annotations

import math
import re

from kvxfer.errors import InvalidRequest

MAX_NAME = 64
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[^/:\[\]]+):(\*|\d{1,5})")


def text(name: str, value: object, *, longest: int = MAX_NAME, empty: bool = False) -> str:
    """A str that can be encoded, of at most `longest` bytes."""
    if isinstance(value, str):
        try:
            nbytes = len(value.encode())
        except UnicodeEncodeError:
            nbytes = longest + 1
        if (nbytes or empty) and nbytes <= longest:
            return value
    least = 0 if empty else 1
    raise InvalidRequest(f"{name} must be a str of {least} to {longest} bytes (UTF-8), got {value!r:.80}")


def integer(name: str, value: object, least: int, most: int) -> int:
    """An integer in a range; no bool, no float."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= value.__index__() <= most:
        raise InvalidRequest(f"{name} must be an integer from {least} to {most}, got {value!r:.80}")
    return value.__index__()


def positive(name: str, value: object, *, most: float = 1e30, unit: str = "") -> float:
    """A finite number above 0."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not 0 < value <= most:
        raise InvalidRequest(f"{name} must be a number{unit} over 0 and at most {most:g}, got {value!r:.80}")
    return float(value)


def seconds(name: str, value: object, *, most: float = 1e9) -> float:
    """A finite number of seconds above 0."""
    return positive(name, value, most=most, unit=" of seconds")


def endpoint(name: str, value: object) -> str:
    """A ZeroMQ endpoint that peers can dial: tcp://host:port or ipc://path."""
    if isinstance(value, str):
        found = _TCP.fullmatch(value)
        if found and (found[2] == "*" or int(found[2]) <= 65535):
            return value
        if value.startswith("ipc://") and len(value) > len("ipc://"):
            return value
    raise InvalidRequest(f"{name} must be tcp://host:port (port 0: any free one) or ipc://path, got {value!r:.80}")


def instance(name: str, value: object, kind: type) -> None:
    """An instance of a type."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
