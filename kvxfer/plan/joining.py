"""How one or several sources fill a destination, slice by slice: `join` and, in words, `compare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvxfer.errors import InvalidRequest, LayoutMismatch
from kvxfer.layout import CacheLayout, Group, GroupKind, Plane, Record, Slice, fingerprint_differences
from kvxfer.plan.blocks import BlockLists, check_blocks
from kvxfer.plan.compare import Comparison, Finding, Verdict, collect
from kvxfer.plan.rows import (
    ROW,
    fold_heads,
    fuse,
    merge_whole_rows,
    plane_problem,
    plane_row,
    run_bytes,
    whole_head_rows,
    whole_row,
)
from kvxfer.plan.segments import most_segments, segments_for
from kvxfer.plan.transfer import PlanPart, TransferPlan, most_segment_bytes


@dataclass(frozen=True, kw_only=True)
class JoinPart:
    """The rows between one source group and one destination group. `layers[i]` is the layer of ``rows[i]``.

    The last token span of a request is rounded up to `tile` tokens: 1 for rows that can be cut anywhere, more
    for tiled planes, 0 for rows that copy whole blocks and look at no tokens.
    """

    src_group: Group
    dst_group: Group
    rows: np.ndarray
    layers: tuple[str, ...]
    merged: np.ndarray  # the same copies with neighbouring whole rows made one
    tile: int


@dataclass(frozen=True, kw_only=True)
class Join:
    """What one source holds for one destination, ready for any block lists. Made by `join`.

    `missing` names the destination's layers that no source has: after the transfer decode lacks them.
    """

    source: int  # index in the list that was given to `join`
    src: CacheLayout
    dst: CacheLayout
    parts: tuple[JoinPart, ...]
    missing: tuple[str, ...] = ()

    @property
    def shortest_run_bytes(self) -> int:
        """The least that lies together on both sides, before neighbours are merged."""
        return min(run_bytes(row) for part in self.parts for row in part.merged)

    def most_bytes(self, dst_counts: Mapping[str, int], *, tokens: int) -> tuple[int, int]:
        """At most how many packed bytes a plan into so many blocks of each group has, and one segment of it."""
        whole = largest = 0
        for part in self.parts:
            count, span = most_segments(part.src_group, part.dst_group, dst_counts[part.dst_group.name], tokens)
            if not count:
                continue
            segment = most_segment_bytes(part.merged, -(-span // max(part.tile, 1)) * max(part.tile, 1))
            whole += count * segment
            largest = max(largest, segment)
        return whole, largest

    def plan(
        self, src_blocks: BlockLists, dst_blocks: BlockLists, *, tokens: int, layer: str | None = None
    ) -> TransferPlan:
        """The copies of one request of `tokens` tokens.

        Lists are ids per group, right-aligned (see the module); NumPy int arrays are taken without a Python
        loop. With `layer` the plan holds that layer only. Raises InvalidBlocks, UnknownGroup or
        InvalidRequest before anything is touched.
        """
        src_lists = check_blocks(self.src, src_blocks, tokens=tokens, role="source")
        dst_lists = check_blocks(self.dst, dst_blocks, tokens=tokens, role="destination")
        return self.plan_checked(src_lists, dst_lists, tokens=tokens, layer=layer)

    def plan_checked(
        self,
        src_lists: Mapping[str, np.ndarray],
        dst_lists: Mapping[str, np.ndarray],
        *,
        tokens: int,
        layer: str | None = None,
    ) -> TransferPlan:
        """`plan` for lists that `check_blocks` has returned."""
        parts = []
        for part in self.parts:
            rows = part.merged if layer is None else part.rows[[name == layer for name in part.layers]]
            if not len(rows):
                continue
            segments = segments_for(
                part.src_group,
                part.dst_group,
                src_lists[part.src_group.name],
                dst_lists[part.dst_group.name],
                tokens,
                tile=part.tile,
            )
            if segments is not None and len(segments.src_block):
                parts.append(PlanPart(rows=rows, segments=segments))
        return TransferPlan(parts=tuple(parts), src_regions=len(self.src.regions), dst_regions=len(self.dst.regions))


def join(
    sources: Sequence[CacheLayout],
    dst: CacheLayout,
    *,
    first: int = 0,
    layers: Sequence[str] | None = None,
    allow_missing: bool = False,
) -> list[Join]:
    """How the sources together fill `dst`; sources with nothing to give are left out.

    Several sources are the ranks of one engine. Where more than one holds the same heads (replicated
    latents), the search starts at source `first`, so that destination ranks can spread over them. `layers`
    fills only these of the destination's layers. A destination layer that no source has is refused, unless
    `allow_missing`: then `Join.missing` names what decode lacks. Layers that only a source has stay behind.

    Raises LayoutMismatch, listing field by field what cannot be joined.
    """
    match = _Match(sources, dst, first, layers, allow_missing)
    comparison = collect(match.findings)
    if not comparison:
        raise LayoutMismatch(f"the layouts cannot be joined:\n{comparison}")
    parts: dict[int, list[JoinPart]] = {}
    for (index, src_name, dst_name, tile), named in match.rows.items():
        table = np.array([row for row, _ in named], dtype=ROW)
        parts.setdefault(index, []).append(
            JoinPart(
                src_group=sources[index].group(src_name),
                dst_group=dst.group(dst_name),
                rows=table,
                layers=tuple(layer for _, layer in named),
                merged=merge_whole_rows(table),
                tile=tile,
            )
        )
    missing = tuple(match.missing)
    return [Join(source=i, src=sources[i], dst=dst, parts=tuple(parts[i]), missing=missing) for i in sorted(parts)]


def compare(
    sources: CacheLayout | Sequence[CacheLayout],
    dst: CacheLayout,
    *,
    layers: Sequence[str] | None = None,
    allow_missing: bool = False,
) -> Comparison:
    """What `join` would say, in words: every field that is equal, convertible or refused, and why.

    The fingerprint's factors are compared too, against the first source; `join` leaves those to the
    handshake.
    """
    ranks = [sources] if isinstance(sources, CacheLayout) else list(sources)
    match = _Match(ranks, dst, 0, layers, allow_missing)
    factors = [
        Finding(
            field="fingerprint",
            verdict=Verdict.REFUSED,
            src=line,
            dst=line,
            why="must agree for KV to mean the same",
        )
        for line in fingerprint_differences(ranks[0].fingerprint, dst.fingerprint)
    ] or [Finding(field="fingerprint", verdict=Verdict.EQUAL, src="every factor agrees", dst="every factor agrees")]
    return collect([*factors, *match.findings])


_Candidate = tuple[int, Group, Slice, Record]
_Key = tuple[int, str, str, int]  # source, its group, destination group, tile


@dataclass
class _Match:
    """One walk over the destination's slices: the rows that fill them, and what there is to say about it."""

    sources: Sequence[CacheLayout]
    dst: CacheLayout
    first: int
    layers: Sequence[str] | None
    allow_missing: bool
    rows: dict[_Key, list[tuple[np.void, str]]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.sources:
            raise InvalidRequest("join needs at least one source layout")
        count = len(self.sources)
        self._order = [(self.first + i) % count for i in range(count)]
        held = {layer for group in self.dst.groups for layer in group.layers}
        wanted = held if self.layers is None else set(self.layers)
        if wanted - held:
            raise InvalidRequest(f"layers {sorted(wanted - held)} are not in the destination's layout")
        self._regions = [_region_numbers(layout) for layout in self.sources]
        self._dst_regions = _region_numbers(self.dst)
        self._by_layer = self._index_sources()
        self._dst_planes = _plane_names((self.dst,))
        self._src_planes = _plane_names(self.sources)
        for group in self.dst.groups:
            for piece in group.slices:
                if piece.layer in wanted:
                    self._slice(group, piece)
        only_source = sorted(self._by_layer.keys() - held)
        if only_source:
            self._find("layers", Verdict.CONVERTIBLE, "has them", "does not", "they stay behind", tuple(only_source))

    def _index_sources(self) -> dict[str, list[_Candidate]]:
        found: dict[str, list[_Candidate]] = {}
        for index in self._order:
            layout = self.sources[index]
            records = {record.tag: record for record in layout.records}
            for group in layout.groups:
                for piece in group.slices:
                    found.setdefault(piece.layer, []).append((index, group, piece, records[piece.record]))
        return found

    def _find(
        self,
        name: str,
        verdict: Verdict,
        src: object,
        dst: object,
        why: str = "",
        layers: tuple[str, ...] = (),
    ) -> None:
        self.findings.append(Finding(field=name, verdict=verdict, src=str(src), dst=str(dst), why=why, layers=layers))

    def _add(self, index: int, src: Group, dst: Group, row: np.void, layer: str, tile: int = 0) -> None:
        self.rows.setdefault((index, src.name, dst.name, tile), []).append((row, layer))

    def _slice(self, dst_group: Group, dst_slice: Slice) -> None:
        """Rows that fill one destination slice, or findings that say why that is not possible."""
        layer = dst_slice.layer
        wanted = self.dst.record(dst_slice.record)
        every = self._by_layer.get(layer, [])
        if not every:
            self.missing.append(layer)
            if self.allow_missing:
                self._find(
                    "layers",
                    Verdict.CONVERTIBLE,
                    "does not have them",
                    "has them",
                    "decode lacks them",
                    (layer,),
                )
            else:
                self._find(
                    "layers",
                    Verdict.REFUSED,
                    "does not have them",
                    "has them",
                    "allow_missing joins without them",
                    (layer,),
                )
            return
        names = {plane.name for plane in wanted.planes}
        candidates = [c for c in every if c[3] == wanted or not names or names & {p.name for p in c[3].planes}]
        if not candidates:
            tags = _join(record.tag for *_, record in every)
            self._find("record", Verdict.REFUSED, tags, wanted.tag, "no plane in common", (layer,))
            return
        problem = next((p for c in candidates if (p := _group_problem(c[1], dst_group))), None)
        if problem:
            self._find(problem[0], Verdict.REFUSED, problem[1], problem[2], problem[3], (layer,))
            return
        left_out = self._src_planes.get(layer, set()) - self._dst_planes.get(layer, set())
        if wanted.planes and left_out:
            tags = _join(record.tag for *_, record in candidates)
            why = f"the destination has no place for {_join(sorted(left_out))}"
            self._find("record", Verdict.REFUSED, tags, wanted.tag, why, (layer,))
            return
        for index, group, piece, record in candidates:
            if record == wanted and group.block_tokens == dst_group.block_tokens:
                regions = self._regions[index][piece.region], self._dst_regions[dst_slice.region]
                row = whole_row(piece, dst_slice, wanted.nbytes, *regions)
                self._add(index, group, dst_group, row, layer)
                self._find("record", Verdict.EQUAL, record.tag, wanted.tag, "", (layer,))
                return
        if not wanted.planes:
            self._opaque(candidates, dst_group, wanted, layer)
            return
        self._planes(candidates, dst_group, dst_slice, wanted)

    def _opaque(self, candidates: Sequence[_Candidate], dst_group: Group, wanted: Record, layer: str) -> None:
        tags = _join(record.tag for *_, record in candidates)
        why = "opaque bytes fit only an equal record"
        if any(record == wanted for *_, record in candidates):
            sizes = _join(str(group.block_tokens) for _, group, *_ in candidates)
            self._find("block_tokens", Verdict.REFUSED, sizes, dst_group.block_tokens, why, (layer,))
        else:
            self._find("record", Verdict.REFUSED, tags, wanted.tag, why, (layer,))

    def _planes(self, candidates: Sequence[_Candidate], dst_group: Group, dst_slice: Slice, wanted: Record) -> None:
        layer = dst_slice.layer
        filled: list[tuple[int, Group, np.void, int]] = []
        used: list[_Candidate] = []
        for plane in wanted.planes:
            problem = self._plane(candidates, dst_group, dst_slice, plane, filled, used)
            if problem:
                self._find(f"plane {plane.name!r}", Verdict.REFUSED, *problem, (layer,))
                return
        for index, group, row, tile in _fused(filled):
            self._add(index, group, dst_group, fold_heads(row), layer, tile)
        tags = _join(record.tag for *_, record in used)
        sizes = _join(str(group.block_tokens) for _, group, *_ in used)
        if sizes != str(dst_group.block_tokens):
            name = "ring capacity" if dst_group.kind is GroupKind.RING else "block_tokens"
            self._find(name, Verdict.CONVERTIBLE, sizes, dst_group.block_tokens, "", (layer,))
        self._find("record", Verdict.CONVERTIBLE, tags, wanted.tag, "plane by plane", (layer,))

    def _plane(
        self,
        candidates: Sequence[_Candidate],
        dst_group: Group,
        dst_slice: Slice,
        plane: Plane,
        filled: list[tuple[int, Group, np.void, int]],
        used: list[_Candidate],
    ) -> tuple[str, str, str] | None:
        """Appends the rows that fill one plane; or returns source, destination and why none can."""
        lacking = [(plane.head_start, plane.head_start + plane.heads)]
        seen = []
        for candidate in candidates:
            index, group, piece, record = candidate
            for src_plane in record.planes:
                if src_plane.name != plane.name:
                    continue
                problem = plane_problem(src_plane, plane)
                if problem:
                    return problem
                last_head = src_plane.head_start + src_plane.heads
                seen.append(f"{src_plane.head_start}..{last_head}")
                left = []
                for begin, end in lacking:
                    low, high = max(begin, src_plane.head_start), min(end, last_head)
                    if low >= high:
                        left.append((begin, end))
                        continue
                    regions = self._regions[index][piece.region], self._dst_regions[dst_slice.region]
                    way = (piece, src_plane, dst_slice, plane, (low, high), regions)
                    whole = whole_head_rows(*way) if group.block_tokens == dst_group.block_tokens else None
                    if whole is not None:
                        filled += [(index, group, row, 0) for row in whole]
                    else:
                        tile = plane.tokens_per_entry if plane.tiled else 1
                        filled.append((index, group, plane_row(*way), tile))
                    used.append(candidate)
                    left += [(a, b) for a, b in ((begin, low), (high, end)) if a < b]
                lacking = left
        if not seen:
            return "no source has it", "has it", "every plane must be filled"
        if lacking:
            wanted = ", ".join(f"{a}..{b}" for a, b in lacking)
            return f"heads {_join(seen)}", f"heads {wanted}", "no source holds them"
        return None


def _fused(filled: Sequence[tuple[int, Group, np.void, int]]) -> list[tuple[int, Group, np.void, int]]:
    """Rows of one slice; a row that continues an earlier one in every entry and head is made part of it."""
    rows: list[tuple[int, Group, np.void, int]] = []
    for index, group, row, tile in filled:
        for place, (other, other_group, earlier, other_tile) in enumerate(rows):
            if (other, other_group.name, other_tile) == (index, group.name, tile):
                fused = fuse(earlier, row)
                if fused is not None:
                    rows[place] = (index, group, fused, tile)
                    break
        else:
            rows.append((index, group, row, tile))
    return rows


def _group_problem(src: Group, dst: Group) -> tuple[str, str, str, str] | None:
    """Field, source, destination and why, when a group's blocks cannot serve the other's."""
    if src.kind is not dst.kind and (src.kind, dst.kind) != (GroupKind.FULL, GroupKind.SLIDING):
        return "group kind", src.kind.value, dst.kind.value, "their block tables mean other tokens"
    if src.kind is GroupKind.SLIDING and src.window < dst.window:
        return "window", str(src.window), str(dst.window), "the source keeps fewer tokens than decode needs"
    if src.compression_ratio != dst.compression_ratio:
        why = "the states belong to other compressed entries"
        return "compression_ratio", str(src.compression_ratio), str(dst.compression_ratio), why
    return None


def _plane_names(layouts: Sequence[CacheLayout]) -> dict[str, set[str]]:
    """The planes of each layer, over all its slices and ranks."""
    names: dict[str, set[str]] = {}
    for layout in layouts:
        planes = {record.tag: {plane.name for plane in record.planes} for record in layout.records}
        for group in layout.groups:
            for piece in group.slices:
                names.setdefault(piece.layer, set()).update(planes[piece.record])
    return names


def _region_numbers(layout: CacheLayout) -> dict[str, int]:
    return {region.name: number for number, region in enumerate(layout.regions)}


def _join(words: Iterator[str] | Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(words))
