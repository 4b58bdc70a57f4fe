"""A wire format by name: which codec each plane of a cache gets between pack and unpack.

A name is ``family`` or ``family:option,option``; the canonical form, which travels in chunk headers, is
``str`` of the parsed object and parses to an equal one.

| name | options (the first of each group is the default) |
|---|---|
| raw | none |
| fp8_e4m3 | token_head, per_128, tensor; scale=G with tensor |
| nvfp4 | four_over_six; scale=G |
| mxfp4 | floor, ceil, even; hadamard |
| mxfp8 | ceil, floor, even |
| int4 | sym, asym; 64, 32, 128; hadamard |
| mixed | four_over_six: keys fp8_e4m3 per token and head, values nvfp4 |
| mla | rope=raw, rope=fp8; four_over_six: latent nvfp4, RoPE dims apart |

Every family but raw takes ``first=N`` and ``last=M``: so many tokens at the start (attention sinks) and at
the end (the recent window) of a prompt stay raw.

Planes are told apart by their name: ``k``, ``v``, ``kv``, ``latent``, ``rope``. All other planes, states, and
planes that a codec cannot hold (not numbers, or a vector that is not a multiple of 16 values) travel raw.

Imports errors and the formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kvxfer.errors import InvalidRequest, NonFiniteValue, UnknownWireFormat
from kvxfer.formats import fp8, int4, mx, nvfp4
from kvxfer.formats.codec import Codec, Rule

MAX_NAME_BYTES = 80
MAX_RAW_TOKENS = 2**31 - 1

Codecs = dict[str, Codec]


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """One wire format with its parameters. Made by `parse`."""

    name: str
    options: tuple[str, ...] = ()
    codecs: tuple[tuple[str, Codec], ...] = ()  # (plane name, codec); planes without one travel raw
    first_tokens: int = 0
    last_tokens: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{','.join(self.options)}" if self.options else self.name

    @property
    def lossless(self) -> bool:
        """Whether every value arrives as it was, between equal cache formats."""
        return not self.codecs

    def codec(self, plane: str, dim: int) -> Codec | None:
        """The codec of vectors of `dim` values of a plane, or None where it travels raw."""
        found = dict(self.codecs).get(plane)
        return found if found is not None and found.fits(dim) else None

    def packed_bytes(self, num_elements: int, *, dim: int = 128, plane: str = "k", source_bits: int = 16) -> int:
        """Bytes of `num_elements` values in vectors of `dim`, without the alignment of rows to 16 bytes.

        What travels raw takes `source_bits` a value. Known before anything is packed; first and last tokens
        not counted as raw.
        """
        if num_elements % dim:
            raise InvalidRequest(f"{num_elements} values are no whole number of vectors of {dim}")
        codec = self.codec(plane, dim)
        vector = dim * source_bits // 8 if codec is None else codec.vector_bytes(dim)
        return num_elements // dim * vector


class _Options:
    """The options of one name, taken out one by one; what is left over is unknown."""

    def __init__(self, family: str, text: str) -> None:
        self.family = family
        self.given = [part.strip() for part in text.split(",")] if text else []
        self.known: list[str] = []
        self.canonical: list[str] = []

    def choice(self, *words: str) -> str:
        """One of `words`, the first where none is given."""
        self.known += words
        found = [word for word in self.given if word in words]
        if len(found) > 1:
            raise UnknownWireFormat(f"wire format {self.family!r} takes one of {words}, got {found}")
        return self._take(found[0], keep=found[0] != words[0]) if found else words[0]

    def flag(self, word: str) -> bool:
        """Whether `word` is given."""
        self.known.append(word)
        return word in self.given and bool(self._take(word, keep=True))

    def number(self, key: str, convert: Callable[[str], int | float], default: int | float) -> int | float:
        """The value of ``key=value``."""
        self.known.append(f"{key}=N")
        found = [part for part in self.given if part.startswith(key + "=")]
        if not found:
            return default
        try:
            value = convert(found[0].removeprefix(key + "="))
        except (ValueError, OverflowError) as error:
            raise UnknownWireFormat(f"wire format {self.family!r}: {found[0]!r} is not a number") from error
        self.given.remove(found[0])
        if value != default:
            self.canonical.append(f"{key}={value!r}")
        return value

    def _take(self, word: str, *, keep: bool) -> str:
        self.given.remove(word)
        if keep:
            self.canonical.append(word)
        return word

    def finish(self) -> tuple[str, ...]:
        """The canonical options, or UnknownWireFormat for what no one took."""
        if self.given:
            raise UnknownWireFormat(
                f"wire format {self.family!r} has no option {', '.join(map(repr, self.given))}, or it "
                f"is given twice; known are {', '.join(dict.fromkeys(self.known)) or 'none'}"
            )
        return tuple(self.canonical)


def _everywhere(codec: Codec) -> Codecs:
    """Keys, values and latents; RoPE dims stay as they are, since four bits there cost twice the error."""
    return {"k": codec, "v": codec, "kv": codec, "latent": codec}


def _raw(options: _Options) -> Codecs:
    return {}


def _fp8(options: _Options) -> Codecs:
    kind = options.choice("token_head", "per_128", "tensor")
    if kind == "tensor":
        return _everywhere(fp8.Fp8(global_scale=options.number("scale", float, 1.0)))
    return _everywhere(fp8.PER_TOKEN_HEAD if kind == "token_head" else fp8.PER_128)


def _nvfp4_codec(options: _Options) -> Codec:
    rule = Rule.FOUR_OVER_SIX if options.flag("four_over_six") else Rule.NEAREST
    return nvfp4.Nvfp4(rule=rule, global_scale=options.number("scale", float, 1.0))


def _nvfp4(options: _Options) -> Codecs:
    return _everywhere(_nvfp4_codec(options))


def _mxfp4(options: _Options) -> Codecs:
    return _everywhere(mx.mxfp4(options.choice("floor", "ceil", "even"), hadamard=options.flag("hadamard")))


def _mxfp8(options: _Options) -> Codecs:
    return _everywhere(mx.mxfp8(options.choice("ceil", "floor", "even")))


def _int4(options: _Options) -> Codecs:
    asymmetric = options.choice("sym", "asym") == "asym"
    group = int(options.choice("64", "32", "128"))
    return _everywhere(int4.int4(asymmetric=asymmetric, group=group, hadamard=options.flag("hadamard")))


def _mixed(options: _Options) -> Codecs:
    values = _nvfp4_codec(options)
    return _everywhere(fp8.PER_TOKEN_HEAD) | {"v": values}


def _mla(options: _Options) -> Codecs:
    codecs = {"latent": _nvfp4_codec(options)}
    if options.choice("rope=raw", "rope=fp8") == "rope=fp8":
        codecs["rope"] = fp8.PER_TENSOR
    return codecs


_FAMILIES: dict[str, Callable[[_Options], Codecs]] = {
    "raw": _raw,
    "fp8_e4m3": _fp8,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "int4": _int4,
    "mixed": _mixed,
    "mla": _mla,
}

NAMES = tuple(_FAMILIES)
"""The families of wire formats."""


def not_finite(wire: WireFormat, what: str) -> NonFiniteValue:
    """The error for `what` of a chunk that holds NaN or infinity where numbers are packed into smaller ones."""
    if wire.lossless:  # then it is the destination's cache that has no room for them
        return NonFiniteValue(
            f"the destination's cache stores smaller numbers than the source's, finite ones only, and {what} hold "
            "NaN or infinity: keep both caches in one type, or let them saturate with Connector(check_finite=False)"
        )
    return NonFiniteValue(
        f"wire format {wire} packs finite values only, and {what} hold NaN or infinity: send caches of one type with "
        "wire='raw', or let them saturate with Connector(check_finite=False)"
    )


def parse(name: str | WireFormat) -> WireFormat:
    """The wire format of a name; see the module for the names.

    Raises UnknownWireFormat, naming the known families or the family's options.
    """
    if isinstance(name, WireFormat):
        return name
    if not isinstance(name, str):
        raise UnknownWireFormat(f"a wire format is named by a string, got {type(name).__name__}")
    return _parse(name)


@lru_cache(maxsize=64)
def _parse(name: str) -> WireFormat:
    family, _, text = name.partition(":")
    if family not in _FAMILIES or len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise UnknownWireFormat(f"no wire format {name[:MAX_NAME_BYTES]!r}; known are {', '.join(NAMES)}")
    options = _Options(family, text)
    codecs = _FAMILIES[family](options)
    first, last = 0, 0
    if family != "raw":
        first, last = options.number("first", _count, 0), options.number("last", _count, 0)
    return WireFormat(
        name=family,
        options=options.finish(),
        codecs=tuple(codecs.items()),
        first_tokens=int(first),
        last_tokens=int(last),
    )


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text, re.ASCII) or int(text) > MAX_RAW_TOKENS:
        raise ValueError(text)
    return int(text)
