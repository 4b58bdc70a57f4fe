"""What two sides have in common, field by field: equal, convertible, or refused and why."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class Verdict(enum.Enum):
    """How a field of the two sides fits."""

    EQUAL = "equal"
    CONVERTIBLE = "convertible"  # a plan carries the difference out
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One field of the comparison. `layers` are the destination's layers that it holds for."""

    field: str
    verdict: Verdict
    src: str
    dst: str
    why: str = ""
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        sides = self.src if self.src == self.dst else f"source {self.src}, destination {self.dst}"
        where = f" [{_layers(self.layers)}]" if self.layers else ""
        return f"{self.field}{where}: {self.verdict.value}: {sides}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every finding between the sources and a destination; refused ones first in print."""

    findings: tuple[Finding, ...]

    @property
    def refused(self) -> tuple[Finding, ...]:
        """The findings for which the two sides cannot be joined."""
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.REFUSED)

    def __bool__(self) -> bool:
        return not self.refused

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        order = (Verdict.REFUSED, Verdict.CONVERTIBLE, Verdict.EQUAL)
        return listing(str(f) for f in sorted(self.findings, key=lambda f: order.index(f.verdict)))


def listing(lines: Iterable[str], limit: int = 40) -> str:
    """One line each, and how many more there are."""
    every = list(lines)
    more = [f"and {len(every) - limit} more"] if len(every) > limit else []
    return "\n".join(f"  - {line}" for line in every[:limit] + more)


def collect(findings: Iterable[Finding]) -> Comparison:
    """Findings that say the same of several layers become one."""
    layers: dict[tuple[str, Verdict, str, str, str], list[str]] = {}
    for finding in findings:
        key = (finding.field, finding.verdict, finding.src, finding.dst, finding.why)
        layers.setdefault(key, []).extend(finding.layers)
    return Comparison(
        findings=tuple(
            Finding(
                field=field,
                verdict=verdict,
                src=src,
                dst=dst,
                why=why,
                layers=tuple(dict.fromkeys(named)),
            )
            for (field, verdict, src, dst, why), named in layers.items()
        )
    )


def _layers(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} .. {names[-1]}, {len(names)} layers"
