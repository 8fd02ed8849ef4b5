"""A race as a table, with Penstock's ratio to the best peer and whether a target was reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measure import Lane, Spread, ratios
from benchmarks.report import Found, Table
from benchmarks.sameness import difference

COLUMNS = (
    "contestant",
    "samples/s",
    "CPU s per 1000",
    "peak memory MB",
    "first batch ms",
    "rate / best peer",
)


@dataclass(frozen=True)
class Target:
    """``rate``: at least so many times the best peer. ``sooner``: first batch before every peer."""

    rate: float
    sooner: bool = False


def found(title: str, lanes: Sequence[Lane], target: Target) -> Found:
    """One race, as it is printed and kept."""
    peers = [lane for lane in lanes if not lane.ours]
    table = Table(title, COLUMNS, tuple(_row(lane, peers) for lane in lanes))
    notes = [line for lane in lanes if lane.ours for line in _notes(title, lane, peers, target)]
    data = {title: {lane.title: _data(lane, peers) for lane in lanes}}
    return Found((table,), tuple(notes), tuple(_wrong(title, lanes)), data)


def joined(parts: Sequence[Found]) -> Found:
    """Several races of one benchmark."""
    return Found(
        tuple(table for part in parts for table in part.tables),
        tuple(note for part in parts for note in part.notes),
        tuple(wrong for part in parts for wrong in part.wrong),
        {key: value for part in parts for key, value in part.data.items()},
    )


def _row(lane: Lane, peers: Sequence[Lane]) -> tuple[str, ...]:
    if not lane.runs:
        return (lane.title, lane.why_not, "", "", "", "")
    against = ratios(lane, peers, "rate", max) if lane.ours else []
    return (
        lane.title,
        _cell(lane.spread("rate"), "{:,.0f}"),
        _cell(lane.spread("cpu"), "{:.3g}"),
        _cell(lane.spread("memory"), "{:,.0f}", 1e-6),
        _cell(lane.spread("first"), "{:,.1f}", 1e3),
        _cell(Spread.of(against), "{:.2f}") if against else "",
    )


def _cell(spread: Spread, form: str, scale: float = 1.0) -> str:
    middle, low, high = (
        form.format(value * scale) for value in (spread.median, spread.low, spread.high)
    )
    return f"{middle} ({low}-{high})"


def _notes(title: str, lane: Lane, peers: Sequence[Lane], target: Target) -> list[str]:
    rates = ratios(lane, peers, "rate", max)
    if not rates:
        return [f"{title}: {lane.title}: nothing to compare"]
    rate = Spread.of(rates).median
    said = f"{rate:.2f}x the best peer's rate, "
    said += f"target {target.rate:g}x {'reached' if rate >= target.rate else 'MISSED'}"
    if target.sooner:
        first = Spread.of(ratios(lane, peers, "first", min)).median
        said += f"; first batch after {first:.2f} of the soonest peer's time, "
        said += f"target below 1 {'reached' if first < 1 else 'MISSED'}"
    return [f"{title}: {lane.title}: {said}"]


def _wrong(title: str, lanes: Sequence[Lane]) -> list[str]:
    wrong = []
    first = next((run for lane in lanes for run in lane.runs.values()), None)
    for lane in lanes:
        if lane.why_not.startswith("failed"):
            wrong.append(f"{title}: {lane.title} {lane.why_not}")
        for run in list(lane.runs.values())[:1]:
            apart = difference(first.look, run.look) if first is not None else None
            if apart is not None:
                wrong.append(f"{title}: {lane.title} does other work: {apart}")
    return wrong


def _data(lane: Lane, peers: Sequence[Lane]) -> dict[str, Any]:
    return {
        "ours": lane.ours,
        "why_not": lane.why_not,
        "rounds": {number: asdict(run) for number, run in lane.runs.items()},
        "rate_to_best_peer": ratios(lane, peers, "rate", max) if lane.ours else [],
        "first_to_best_peer": ratios(lane, peers, "first", min) if lane.ours else [],
    }
