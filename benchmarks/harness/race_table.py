"""A race as a table: medians and extremes, ratios to the best peer, targets reached or missed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness.environments import facts
from benchmarks.harness.measure import Lane, Spread, ratios
from benchmarks.harness.report import Found, Table
from benchmarks.harness.sameness import difference


@dataclass(frozen=True)
class Column:
    """One thing that was measured, and how it is written."""

    title: str
    key: str
    form: str
    scale: float = 1.0


@dataclass(frozen=True)
class Versus:
    """A ratio to the best peer of each round; reached when not worse than ``target``, or than what
    ``own`` gives for a contestant's title."""

    title: str
    key: str
    more_is_better: bool
    target: float | None = None
    own: Mapping[str, float] = field(default_factory=dict)

    def ratios(self, lane: Lane, peers: Sequence[Lane]) -> list[float]:
        return ratios(lane, peers, self.key, max if self.more_is_better else min)

    def target_of(self, title: str) -> float | None:
        return self.own.get(title, self.target)

    def reached(self, ratio: float, title: str = "") -> bool:
        target = self.target_of(title)
        if target is None:
            return True
        return ratio >= target if self.more_is_better else ratio <= target


RATE = Column("samples/s", "rate", "{:,.0f}")
CPU = Column("CPU s per 1000", "cpu", "{:.3g}")
MEMORY = Column("peak memory MB", "memory", "{:,.0f}", 1e-6)
FIRST = Column("first batch ms", "first", "{:,.1f}", 1e3)
COLUMNS = (RATE, CPU, MEMORY, FIRST)


def against_peers(rate: float, own: Mapping[str, float] | None = None) -> tuple[Versus, ...]:
    """So many times as fast as the fastest peer, and no more CPU time, memory or waiting than the
    peer that takes least of it; ``own`` are the targets for rate of single contestants."""
    return (
        Versus("rate / best peer", "rate", True, rate, own or {}),
        Versus("CPU / best peer", "cpu", False, 1.0),
        Versus("memory / best peer", "memory", False, 1.0),
        Versus("first / best peer", "first", False, 1.0),
    )


def found(
    name: str,
    title: str,
    lanes: Sequence[Lane],
    columns: Sequence[Column],
    versus: Sequence[Versus],
    beside: Sequence[str] = (),
) -> Found:
    """One race, as it is printed and kept. Ours are compared with the peers, or with those whose
    titles are in ``beside``."""
    others = [lane for lane in lanes if (lane.title in beside if beside else not lane.ours)]
    compared = [lane for lane in lanes if lane.ours and lane not in others]
    heads = ("contestant", *(c.title for c in columns), *(v.title for v in versus))
    against = {
        lane.title: [v.ratios(lane, others) if lane in compared else [] for v in versus]
        for lane in lanes
    }
    return Found(
        (Table(title, heads, tuple(_row(lane, columns, against[lane.title]) for lane in lanes)),),
        (
            *(note for lane in lanes for note in _conversion(name, lane)),
            *(
                note
                for lane in compared
                for note in _notes(name, lane, zip(versus, against[lane.title], strict=True))
            ),
        ),
        tuple(_wrong(name, lanes)),
        {name: {lane.title: _data(lane, versus, against[lane.title]) for lane in lanes}},
        {lane.env: facts(lane.python) for lane in lanes if lane.env and lane.python},
    )


def joined(parts: Sequence[Found]) -> Found:
    """Several races of one benchmark."""
    return Found(
        tuple(table for part in parts for table in part.tables),
        tuple(note for part in parts for note in part.notes),
        tuple(wrong for part in parts for wrong in part.wrong),
        {key: value for part in parts for key, value in part.data.items()},
        {key: value for part in parts for key, value in part.environments.items()},
    )


def _row(
    lane: Lane, columns: Sequence[Column], against: Sequence[Sequence[float]]
) -> tuple[str, ...]:
    if not lane.runs:
        # Beside the title, where the column is wide enough for a sentence.
        return (f"{lane.title}\n{lane.why_not}", *[""] * (len(columns) + len(against)))
    return (
        lane.title,
        *(_cell(lane.spread(c.key), c.form, c.scale) for c in columns),
        *(_cell(Spread.of(values), "{:.2f}") if values else "" for values in against),
    )


def _cell(spread: Spread, form: str, scale: float = 1.0) -> str:
    middle, low, high = (
        form.format(value * scale) for value in (spread.median, spread.low, spread.high)
    )
    return middle if low == high else f"{middle}\n{low} - {high}"


def _conversion(name: str, lane: Lane) -> list[str]:
    if lane.conversion is None:
        return []
    cost = f"{lane.conversion.seconds:.1f} s and {lane.conversion.bytes / 1e6:,.1f} MB"
    return [f"{name}: {lane.title}: converting the data took {cost}, off the clock"]


def _notes(name: str, lane: Lane, versus: Iterable[tuple[Versus, Sequence[float]]]) -> list[str]:
    notes = []
    for v, values in versus:
        target = v.target_of(lane.title)
        if target is None:
            continue
        if not values:
            notes.append(f"{name}: {lane.title}: {v.title}: nothing to compare")
            continue
        ratio = Spread.of(values).median
        wanted = f"at {'least' if v.more_is_better else 'most'} {target:g}"
        verdict = "reached" if v.reached(ratio, lane.title) else "MISSED"
        notes.append(f"{name}: {lane.title}: {v.title} {ratio:.2f}, target {wanted}: {verdict}")
    return notes


def _wrong(name: str, lanes: Sequence[Lane]) -> list[str]:
    """What makes the race worthless: a contestant that failed, or did something else."""
    wrong = []
    first = next((run for lane in lanes for run in lane.runs.values()), None)
    for lane in lanes:
        if lane.why_not.startswith("failed"):
            wrong.append(f"{name}: {lane.title} {lane.why_not}")
        for run in list(lane.runs.values())[:1]:
            apart = difference(first.look, run.look) if first is not None else None
            if apart is not None:
                wrong.append(f"{name}: {lane.title} does other work: {apart}")
    return wrong


def _data(
    lane: Lane, versus: Sequence[Versus], against: Sequence[Sequence[float]]
) -> dict[str, Any]:
    return {
        "ours": lane.ours,
        "environment": lane.env,
        "why_not": lane.why_not,
        "conversion": asdict(lane.conversion) if lane.conversion is not None else None,
        "rounds": {number: asdict(run) for number, run in lane.runs.items()},
        "ratios": {v.title: values for v, values in zip(versus, against, strict=True) if values},
    }
