"""What ``penstock what-if`` prints: one change, a table or a grid, and what is enough."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from penstock.config import show_size
from penstock.diagnose.analyze.what_if import (
    ENOUGH,
    MOST_CORES,
    Forecast,
    Row,
    Saturation,
    Values,
    ranges,
)

UNITS: dict[str, Callable[[float], str]] = {
    "cache": show_size,
    "storage": lambda value: f"{show_size(value)}/s",
    "accelerator": lambda value: f"{value:g}x",
    "echo": lambda value: f"{value:g}",
}


def show(name: str, value: float) -> str:
    """The value of an option as people read it."""
    return UNITS[name](value) if name in UNITS else f"{value:g}"


def lines(
    forecast: Forecast,
    options: Sequence[Values],
    present: Row,
    rows: Sequence[Row],
    enough: Saturation,
) -> list[str]:
    """All that is said about some changes."""
    several = ranges(options)
    said = said_of(options)
    if len(several) == 2:
        found = [*([said] if said else []), *grid(several, rows)]
    elif several:
        found = [*([said] if said else []), *table(several[0], rows)]
    else:
        titled = [("as it is", present), *([(said, rows[0])] if options else [])]
        found = _columns(["", *HEADS], [[title, *_cells(row)] for title, row in titled])
    return [*found, "", *enough_lines(forecast, enough)]


def said_of(options: Sequence[Values]) -> str:
    """The options with one value, in words: ``cache 64.0 GB, cores 16``."""
    return ", ".join(
        one.name if one.values[0] is True else f"{one.name} {show(one.name, one.values[0])}"
        for one in options
        if len(one.values) == 1
    )


HEADS = ("samples/s", "gain", "stalled on fetch", "on prep", "bound", "epoch", "cost")


def table(option: Values, rows: Sequence[Row]) -> list[str]:
    """One line for each value of a range."""
    cells = [
        [show(option.name, value), *_cells(row)]
        for value, row in zip(option.values, rows, strict=True)
    ]
    return _columns([option.name, *HEADS], cells)


def grid(options: Sequence[Values], rows: Sequence[Row]) -> list[str]:
    """Samples a second, and what an epoch costs, over two ranges; a letter says what bounds it."""
    down, across = options
    width = len(across.values)
    chunks = [rows[at : at + width] for at in range(0, len(rows), width)]
    corner = f"{down.name} \\ {across.name}"
    heads = [corner, *(show(across.name, value) for value in across.values)]

    def part(title: str, cell: Callable[[Row], str]) -> list[str]:
        body = [
            [show(down.name, value), *map(cell, chunk)]
            for value, chunk in zip(down.values, chunks, strict=True)
        ]
        return [title, *_columns(heads, body)]

    found = part(
        "samples/s, bound by c(ompute), p(rep) or f(etch)",
        lambda row: f"{row.prediction.speed:,.0f} {row.prediction.bound[0]}",
    )
    if rows[0].cost is not None:
        found += ["", *part("cost of an epoch", lambda row: _cost(row.cost))]
    return found


def enough_lines(forecast: Forecast, enough: Saturation) -> list[str]:
    """Where more of something stops helping."""
    found = []
    if enough.cache is None:
        found.append("Cache: not known, because it is not known how much is read for a sample.")
    elif enough.cache == 0:
        found.append(
            "A cache of what is read does not help: fetching is not what training waits for."
        )
    else:
        found.append(
            f"More cache stops helping at {show_size(enough.cache)} of {show_size(forecast.data)}: "
            f"{enough.cache_speed:,.0f} samples/s."
        )
    if enough.cores is None:
        found.append(f"More cores help as far as was looked: up to {MOST_CORES}.")
    else:
        found.append(
            f"More cores stop helping at {enough.cores}: {enough.cores_speed:,.0f} samples/s."
        )
    found.append(f"(Stops helping: all that could be added brings less than {ENOUGH:.0%}.)")
    return found


def as_json(forecast: Forecast, present: Row, rows: Sequence[Row], enough: Saturation) -> str:
    """The same for programs."""
    return json.dumps(
        {
            "present": present.to_dict(),
            "rows": [row.to_dict() for row in rows],
            "enough": asdict(enough),
            "data_bytes": forecast.data,
        },
        indent=1,
    )


def _cells(row: Row) -> list[str]:
    found = row.prediction
    return [
        f"{found.speed:,.0f}",
        f"{row.gain:.2f}x",
        f"{found.fetch_stall:.0%}",
        f"{found.prep_stall:.0%}",
        found.bound,
        f"{found.epoch:,.1f} s",
        _cost(row.cost),
    ]


def _cost(cost: float | None) -> str:
    if cost is None:
        return ""
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.4f}"


def _columns(heads: list[str], body: list[list[str]]) -> list[str]:
    """Columns set straight; those without anything below their head are left out."""
    kept = [at for at in range(len(heads)) if at == 0 or any(row[at] for row in body)]
    widths = [max(len(row[at]) for row in [heads, *body]) for at in kept]
    return [
        "  ".join(
            f"{row[at]:<{width}}" if at == 0 else f"{row[at]:>{width}}"
            for at, width in zip(kept, widths, strict=True)
        ).rstrip()
        for row in [heads, *body]
    ]
