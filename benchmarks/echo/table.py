"""What data echoing gained, as a table and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from benchmarks.echo.work import BASE, PLACES, Outcome, Setting, Work
from benchmarks.harness.plot import Figure, Point, Range, Series
from benchmarks.harness.report import Result, Table

PAPER = "the paper's best was 3.25 times, at factor 5 before augmentation"

HEADS = (
    "echo",
    "reached",
    "seconds to target",
    "times as fast",
    "fresh samples",
    "of factor 1",
    "samples seen",
    "upstream / downstream",
    "waited",
)


def found(
    work: Work,
    downstream: float,
    ratio: float,
    outcomes: Mapping[Setting, Sequence[Outcome]],
    wrong: tuple[str, ...] = (),
) -> Result:
    """A row for each setting; those who never got there are said to."""
    rate = work.rate or downstream / ratio
    base = list(outcomes.get(BASE, ()))
    data: dict[str, Any] = {
        "target": work.target,
        "limit": work.limit,
        "downstream": downstream,
        "upstream": rate,
        "settings": {
            setting.title: {**asdict(setting), "runs": [_kept(one, rate) for one in runs]}
            for setting, runs in outcomes.items()
        },
    }
    cells = [_row(setting.title, runs, base, rate) for setting, runs in outcomes.items()]
    notes = []
    best = max(
        ((_faster(runs, base), setting.title) for setting, runs in outcomes.items()),
        key=lambda one: one[0] or 0.0,
        default=(None, ""),
    )
    if best[0] is not None:
        notes.append(f"echo: best {best[0]:.2f} times as fast, {best[1]}; {PAPER}")
    for setting, runs in outcomes.items():
        short = [one for one in runs if not one.reached]
        if short:
            top = max(one.last.accuracy for one in short)
            notes.append(
                f"echo: {setting.title}: {len(short)} of {len(runs)} did not reach "
                f"{work.target:.0%} in {work.limit:g} s (at most {top:.1%})"
            )
    title = (
        f"echo: CIFAR-10 to {work.target:.0%}, {rate:,.0f} samples/s read, {downstream:,.0f} "
        f"trained, batches of {work.batch}, {work.workers} workers"
    )
    return Result((Table(title, HEADS, tuple(cells)),), tuple(notes), wrong, data)


def _kept(one: Outcome, rate: float) -> dict[str, Any]:
    return {**asdict(one), "ratio": _ratio(one, rate)}


def _ratio(one: Outcome, rate: float) -> float | None:
    """How long reading a sample took beside what came after, in this run."""
    return 1 / rate / one.step if one.step > 0 else None


def _row(
    title: str, runs: Sequence[Outcome], base: Sequence[Outcome], rate: float
) -> tuple[str, ...]:
    reached = [one.last for one in runs if one.reached]
    cells = [title, f"{len(reached)} of {len(runs)}"]
    faster = _faster(runs, base)
    if reached:
        cells.append(_span([mark.seconds for mark in reached], "{:.1f}"))
        cells.append("-" if faster is None else f"{faster:.2f}")
        cells.append(f"{statistics.mean(mark.fresh for mark in reached):,.0f}")
        share = _compared(runs, base, "fresh")
        cells.append("-" if share is None else f"{share:.0%}")
        cells.append(f"{statistics.mean(mark.seen for mark in reached):,.0f}")
    else:
        cells += ["never", *["-"] * 4]
    ratios = [ratio for one in runs if (ratio := _ratio(one, rate)) is not None]
    cells.append(f"{statistics.mean(ratios):.1f}" if ratios else "-")
    cells.append(f"{statistics.mean(one.waited for one in runs):.0%}" if runs else "-")
    return tuple(cells)


def _compared(
    runs: Sequence[Outcome], base: Sequence[Outcome], what: Literal["seconds", "fresh"]
) -> float | None:
    """To what share of no echo, on average over the seeds with which both got there."""
    others = {one.seed: one.last for one in base if one.reached}
    shares = [
        getattr(one.last, what) / getattr(others[one.seed], what)
        for one in runs
        if one.reached and one.seed in others
    ]
    return statistics.mean(shares) if shares else None


def _faster(runs: Sequence[Outcome], base: Sequence[Outcome]) -> float | None:
    share = _compared(runs, base, "seconds")
    return None if share is None else 1 / share


def _span(values: Sequence[float], form: str) -> str:
    middle = form.format(statistics.mean(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))} - {form.format(max(values))})"


def figure(data: Mapping[str, Any]) -> Figure:
    """Time to the target over the factor."""
    places: dict[str, list[Point]] = {place: [] for place in PLACES}
    notes = []
    for title, entry in data["settings"].items():
        reached = [one["marks"][-1]["seconds"] for one in entry["runs"] if one["reached"]]
        if len(reached) < len(entry["runs"]):
            missed = len(entry["runs"]) - len(reached)
            notes.append(f"{title}: {missed} of {len(entry['runs'])} never got there")
        if reached:
            factor = float(entry["factor"])
            seconds = Range(statistics.mean(reached), min(reached), max(reached))
            places[entry["place"]].append(Point(Range(factor, factor, factor), seconds))
    series = tuple(
        Series(place, tuple(points), joined=len(points) > 1)
        for place, points in places.items()
        if points
    )
    title = f"echo: seconds until {data['target']:.0%} of the test set is right"
    return Figure(title, "echo factor", "seconds", series, zero=True, notes=tuple(notes))
