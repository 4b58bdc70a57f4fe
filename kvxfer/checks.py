"""Checks of plain arguments at the edge: each raises InvalidRequest saying what was expected and what was seen.

Imports errors only.
"""

from __future__ import annotations

import math
import operator
import re
from numbers import Real

from kvxfer.errors import InvalidRequest

MAX_NAME = 64
MAX_ENDPOINT = 256
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[^/:\[\]]+):(\*|\d{1,5})")


def text(name: str, value: object, *, longest: int = MAX_NAME, empty: bool = False) -> str:
    """A str that can be encoded, of at most `longest` bytes. What derives from str (NumPy's) becomes one."""
    if isinstance(value, str):
        try:
            nbytes = len(value.encode())
        except UnicodeEncodeError:
            nbytes = longest + 1
        if (nbytes or empty) and nbytes <= longest:
            return str.__str__(value)
    least = 0 if empty else 1
    raise InvalidRequest(f"{name} must be a str of {least} to {longest} bytes (UTF-8), got {value!r:.80}")


def integer(name: str, value: object, least: int, most: int) -> int:
    """An integer in a range, as an int; NumPy's and torch's are taken, bool and float are not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise InvalidRequest(f"{name} must be an integer from {least} to {most}, got {value!r:.80}")
    return number


def positive(name: str, value: object, *, most: float = 1e30, unit: str = "") -> float:
    """A finite number above 0, as a float; NumPy's are taken."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number <= most:
        raise InvalidRequest(f"{name} must be a number{unit} over 0 and at most {most:g}, got {value!r:.80}")
    return number


def seconds(name: str, value: object, *, most: float = 1e9) -> float:
    """A finite number of seconds above 0."""
    return positive(name, value, most=most, unit=" of seconds")


def endpoint(name: str, value: object, *, dialled: bool = False) -> str:
    """A ZeroMQ endpoint: tcp://host:port (port ``*`` becomes 0: any free one) or ipc://path.

    With `dialled` one that peers can be told: a host, and a port that is known.
    """
    found = _TCP.fullmatch(value) if isinstance(value, str) else None
    port = 0 if found is None or found[2] == "*" else int(found[2])
    if found and port <= 65535 and (not dialled or (port and found[1] != "*")):
        return text(name, f"tcp://{found[1]}:{port}", longest=MAX_ENDPOINT)
    if isinstance(value, str) and value.startswith("ipc://") and len(value) > len("ipc://"):
        return text(name, value, longest=MAX_ENDPOINT)
    wanted = "tcp://host:port" + ("" if dialled else " (port 0: any free one)")
    raise InvalidRequest(f"{name} must be {wanted} or ipc://path, got {value!r:.80}")


def instance(name: str, value: object, kind: type) -> None:
    """An instance of a type."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
