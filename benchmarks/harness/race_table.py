"""Results of races as tables: medians, ranges, ratios to the best peer, targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness.environments import installed_versions
from benchmarks.harness.measure import Lane, Spread, ratios
from benchmarks.harness.report import Result, Table
from benchmarks.harness.sameness import difference


@dataclass(frozen=True)
class Column:
    """A measured value and how to print it: its ``key``, format ``form`` and ``scale``."""

    title: str
    key: str
    form: str
    scale: float = 1.0


@dataclass(frozen=True)
class Versus:
    """A ratio to the best peer of each round, with an optional ``target`` for its median.

    ``own`` maps the titles of single contestants to targets that replace ``target``.
    """

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
    """Targets of most races: ``rate`` times the rate of the fastest peer, and at most the CPU time,
    memory and time to the first batch of the best peer in each.

    ``own`` maps titles of single contestants to their targets for the rate.
    """
    return (
        Versus("rate / best peer", "rate", True, rate, own or {}),
        Versus("CPU / best peer", "cpu", False, 1.0),
        Versus("memory / best peer", "memory", False, 1.0),
        Versus("first / best peer", "first", False, 1.0),
    )


def race_result(
    name: str,
    title: str,
    lanes: Sequence[Lane],
    columns: Sequence[Column],
    versus: Sequence[Versus],
    beside: Sequence[str] = (),
    different: Sequence[str] = (),
) -> Result:
    """The result of one race. Penstock's contestants are compared with the peers, or with the
    contestants whose titles are in ``beside``. ``different``: titles of contestants that do other
    work on purpose, so that their batches are not checked."""
    others = [lane for lane in lanes if (lane.title in beside if beside else not lane.ours)]
    compared = [lane for lane in lanes if lane.ours and lane not in others]
    heads = ("contestant", *(c.title for c in columns), *(v.title for v in versus))
    against = {
        lane.title: [v.ratios(lane, others) if lane in compared else [] for v in versus]
        for lane in lanes
    }
    return Result(
        (Table(title, heads, tuple(_row(lane, columns, against[lane.title]) for lane in lanes)),),
        (
            *(note for lane in lanes for note in _conversion(name, lane)),
            *(
                note
                for lane in compared
                for note in _notes(name, lane, zip(versus, against[lane.title], strict=True))
            ),
        ),
        tuple(_wrong(name, lanes, different)),
        {name: {lane.title: _data(lane, versus, against[lane.title]) for lane in lanes}},
        {lane.env: installed_versions(lane.python) for lane in lanes if lane.env and lane.python},
    )


def join_results(parts: Sequence[Result]) -> Result:
    """Combine the results of several races of one benchmark."""
    return Result(
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
        # In the first column, the only one wide enough for a sentence.
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
    return [f"{name}: {lane.title}: converting the data took {cost}, not counted in the race"]


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


def _wrong(name: str, lanes: Sequence[Lane], different: Sequence[str]) -> list[str]:
    """Reasons why the race is invalid: a contestant failed, or its batches differ."""
    wrong = []
    first = next((run for lane in lanes for run in lane.runs.values()), None)
    for lane in lanes:
        if lane.failed:
            wrong.append(f"{name}: {lane.title} {lane.why_not}")
        if lane.title in different:
            continue
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
