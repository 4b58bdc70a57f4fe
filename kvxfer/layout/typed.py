"""Fields of the types that they are declared with, for structs that travel to peers.

A struct of msgspec looks at types only when it is decoded, that is at the peer. `Typed` looks when it is made: what a
peer could not decode is refused where a user gives it, and what only looks like an integer or a str (NumPy's) becomes
one. Imports msgspec, checks and errors.
"""

from __future__ import annotations

import enum
import functools
import typing
from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvxfer import checks
from kvxfer.errors import InvalidLayout, InvalidRequest

_MAX_INTEGER = 2**62
_MAX_TEXT = 65536  # bytes; a description has its own limit, max_message_bytes


class Typed(msgspec.Struct, frozen=True, kw_only=True):
    """Root of what a layout consists of. InvalidLayout where a field is of another type than declared."""

    def __post_init__(self) -> None:
        for name, kind, convert in _fields_of(type(self)):
            given = getattr(self, name)
            if type(given) is kind and _is_plain(given):
                continue
            try:
                value = convert(f"{type(self).__name__}.{name}", given)
            except InvalidRequest as error:
                raise InvalidLayout(str(error)) from error
            if value is not given:
                msgspec.structs.force_setattr(self, name, value)


def _is_plain(value: object) -> bool:
    """Whether an int or a str needs no closer look: most do not."""
    if type(value) is int:
        return 0 <= value <= _MAX_INTEGER
    return type(value) is str and value.isascii() and len(value) <= _MAX_TEXT


def integer(name: str, value: object, *, least: int = 0) -> int:
    """An integer from `least` on, as an int. Raises InvalidLayout."""
    try:
        return checks.integer(name, value, least, _MAX_INTEGER)
    except InvalidRequest as error:
        raise InvalidLayout(str(error)) from error


def factors(name: str, value: object) -> dict[str, str]:
    """A fingerprint's names and values, each a str. Raises InvalidRequest that names the one that is none."""
    checks.instance(name, value, Mapping)
    return {
        checks.text(f"a name in {name}", key, longest=_MAX_TEXT, empty=True): checks.text(
            f"{name}[{key!r:.80}]", factor, longest=_MAX_TEXT, empty=True
        )
        for key, factor in value.items()
    }


Convert = Callable[[str, object], object]


@functools.cache
def _fields_of(kind: type[Typed]) -> tuple[tuple[str, object, Convert], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((name, hints[name], _converter(hints[name])) for name in kind.__struct_fields__)


def _converter(kind: object) -> Convert:
    if kind is int:
        return lambda name, value: checks.integer(name, value, 0, _MAX_INTEGER)
    if kind is str:
        return lambda name, value: checks.text(name, value, longest=_MAX_TEXT, empty=True)
    if typing.get_origin(kind) is dict:  # of str to str: there is no other
        return factors
    if typing.get_origin(kind) is tuple:
        (item, _) = typing.get_args(kind)
        return lambda name, value: _items(name, value, item)
    assert kind is bool or issubclass(kind, enum.Enum)
    return lambda name, value: _of_type(name, value, kind)


def _of_type(name: str, value: object, kind: type) -> object:
    checks.instance(name, value, kind)
    return value


def _items(name: str, value: object, kind: type) -> tuple:
    if not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a tuple of {kind.__name__}, got {type(value).__name__}")
    items = value if type(value) is tuple else tuple(value)
    for item in items:
        checks.instance(f"an item of {name}", item, kind)
    return items
