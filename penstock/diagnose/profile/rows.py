"""From what was measured to the rows of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.diagnose.profile.batching import Batching
from penstock.diagnose.profile.describing import describe
from penstock.diagnose.profile.result import Kind, Row
from penstock.diagnose.profile.roads import Ledger, ProbedRoad, Round, middle
from penstock.pipeline import Pipeline
from penstock.source.stream import StreamSource
from penstock.stops.hold import keeps_samples
from penstock.stops.map import Map
from penstock.stops.road import draws_globally
from penstock.stops.stop import Stop

_GLOBALS = "may draw from the global generators"
_GIL = "may hold the GIL"


def rows_of(
    pipeline: Pipeline,
    road: ProbedRoad,
    ledger: Ledger,
    reading: Sequence[Round],
    left: Sequence[Sequence[Any]],
    batching: Batching | None,
    length: int | None,
) -> tuple[Row, ...]:
    """A row for every stage of a road; ``left`` is what was seen to leave each."""
    rows = []
    for stage, name in enumerate(road.names):
        rounds = reading if stage == 0 else ledger.rounds[stage]
        spent = middle(rounds)
        leaves, nbytes = describe(left[stage])
        row = Row(
            name=name,
            kind="source",
            ms=spent.wall * 1e3,
            cpu_ms=spent.cpu * 1e3,
            share=0.0,
            samples=_count(rounds),
            leaves=leaves,
            nbytes=nbytes,
        )
        if stage == 0:
            row = _source_row(row, pipeline)
        else:
            row = _stop_row(row, road.stops[stage - 1])
        if stage in road.stores:
            row = _hold_row(row, stage, road, ledger, length)
        rows.append(replace(row, parts=_parts(row, stage, ledger)))
    if batching is not None and not batching.trouble:
        rounds = ledger.rounds[len(road.names)]
        spent = middle(rounds)
        leaves, nbytes = batching.leaves()
        rows.append(
            Row(
                name="batch",
                kind="batch",
                ms=spent.wall * 1e3,
                cpu_ms=spent.cpu * 1e3,
                share=0.0,
                samples=_count(rounds),
                leaves=leaves,
                nbytes=nbytes,
                needs_process=batching.needs_process,
            )
        )
    total = sum(row.ms for row in rows)
    return tuple(_shared(row, total) for row in rows)


def _count(rounds: Sequence[Round]) -> int:
    return sum(samples for _, samples in rounds)


def _source_row(row: Row, pipeline: Pipeline) -> Row:
    source = pipeline.source
    if isinstance(source, StreamSource):
        return replace(row, needs_process="is a stream, which every worker reads for itself")
    if draws_globally(source):
        return replace(row, random=True, needs_process=_GLOBALS)
    return replace(row, needs_process="" if source.threadsafe else _GIL)


def _stop_row(row: Row, stop: Stop) -> Row:
    kind: Kind = "fused"
    random = any(operation.random for operation in getattr(stop, "operations", ()))
    if isinstance(stop, Map):
        kind, random = "map", stop.random
    elif stop.keeps:
        kind, random = stop.name, False  # type: ignore[assignment]
    why = _GLOBALS if stop.global_random else "" if stop.threadsafe else _GIL
    return replace(row, kind=kind, random=random, needs_process=why)


def _hold_row(row: Row, stage: int, road: ProbedRoad, ledger: Ledger, length: int | None) -> Row:
    stop = road.stops[stage - 1]
    held = road.kept.get(stage)
    if not ledger.hits[stage] or held is None or length is None:
        return row
    hit = middle(ledger.hits[stage])
    budget = getattr(stop, "budget", None)
    room = budget / (held * length) if held > 0 and budget is not None else 1.0
    share = stop.hit_share(min(1.0, room)) if keeps_samples(stop) else None
    return replace(row, hit_ms=hit.wall * 1e3, hit_cpu_ms=hit.cpu * 1e3, holds=share)


def _parts(row: Row, stage: int, ledger: Ledger) -> tuple[Row, ...]:
    """The parts of a row, in proportion to what they took in all rounds together."""
    whole = sum(spent.wall for spent, _ in ledger.rounds[stage])
    cpu = sum(spent.cpu for spent, _ in ledger.rounds[stage])
    return tuple(
        Row(
            name=name,
            kind="part",
            ms=row.ms * spent.wall / whole if whole > 0 else 0.0,
            cpu_ms=row.cpu_ms * spent.cpu / cpu if cpu > 0 else 0.0,
            share=0.0,
            samples=times,
        )
        for (at, name), (spent, times) in ledger.parts.items()
        if at == stage
    )


def _shared(row: Row, total: float) -> Row:
    def share(ms: float) -> float:
        return ms / total if total > 0 else 0.0

    parts = tuple(replace(part, share=share(part.ms)) for part in row.parts)
    return replace(row, share=share(row.ms), parts=parts)
