"""A race as a table: medians and extremes, ratios to the best peer, targets reached or missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measure import Lane, Spread, ratios
from benchmarks.report import Found, Table
from benchmarks.sameness import difference


@dataclass(frozen=True)
class Column:
    """One thing that was measured, and how it is written."""

    title: str
    key: str
    form: str
    scale: float = 1.0


@dataclass(frozen=True)
class Versus:
    """A ratio to the best peer of each round; reached when not worse than ``target``."""

    title: str
    key: str
    more_is_better: bool
    target: float | None = None

    def ratios(self, lane: Lane, peers: Sequence[Lane]) -> list[float]:
        return ratios(lane, peers, self.key, max if self.more_is_better else min)

    def reached(self, ratio: float) -> bool:
        if self.target is None:
            return True
        return ratio >= self.target if self.more_is_better else ratio <= self.target


RATE = Column("samples/s", "rate", "{:,.0f}")
CPU = Column("CPU s per 1000", "cpu", "{:.3g}")
MEMORY = Column("peak memory MB", "memory", "{:,.0f}", 1e-6)
FIRST = Column("first batch ms", "first", "{:,.1f}", 1e3)


def found(
    name: str,
    title: str,
    lanes: Sequence[Lane],
    columns: Sequence[Column],
    versus: Sequence[Versus],
) -> Found:
    """One race, as it is printed and kept."""
    peers = [lane for lane in lanes if not lane.ours]
    heads = ("contestant", *(c.title for c in columns), *(v.title for v in versus))
    rows = tuple(_row(lane, peers, columns, versus) for lane in lanes)
    notes = [line for lane in lanes if lane.ours for line in _notes(name, lane, peers, versus)]
    data = {name: {lane.title: _data(lane, peers, versus) for lane in lanes}}
    return Found((Table(title, heads, rows),), tuple(notes), tuple(_wrong(name, lanes)), data)


def joined(parts: Sequence[Found]) -> Found:
    """Several races of one benchmark."""
    return Found(
        tuple(table for part in parts for table in part.tables),
        tuple(note for part in parts for note in part.notes),
        tuple(wrong for part in parts for wrong in part.wrong),
        {key: value for part in parts for key, value in part.data.items()},
    )


def _row(
    lane: Lane, peers: Sequence[Lane], columns: Sequence[Column], versus: Sequence[Versus]
) -> tuple[str, ...]:
    if not lane.runs:
        return (lane.title, lane.why_not, *[""] * (len(columns) + len(versus) - 1))
    against = [v.ratios(lane, peers) if lane.ours else [] for v in versus]
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


def _notes(name: str, lane: Lane, peers: Sequence[Lane], versus: Sequence[Versus]) -> list[str]:
    notes = []
    for v in versus:
        values = v.ratios(lane, peers)
        if v.target is None:
            continue
        if not values:
            notes.append(f"{name}: {lane.title}: {v.title}: nothing to compare")
            continue
        ratio = Spread.of(values).median
        wanted = f"at {'least' if v.more_is_better else 'most'} {v.target:g}"
        verdict = "reached" if v.reached(ratio) else "MISSED"
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


def _data(lane: Lane, peers: Sequence[Lane], versus: Sequence[Versus]) -> dict[str, Any]:
    return {
        "ours": lane.ours,
        "why_not": lane.why_not,
        "rounds": {number: asdict(run) for number, run in lane.runs.items()},
        "ratios": {v.title: v.ratios(lane, peers) for v in versus} if lane.ours else {},
    }
