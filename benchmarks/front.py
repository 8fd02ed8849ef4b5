"""Draws the picture of the README, docs/front.svg, from the tables of docs/benchmarks.md.

``python -m benchmarks.front`` draws it again after a table has changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.chart import Bar, Panel, svg
from benchmarks.harness.measure import Spread

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "front.svg"

ONE_JOB = (
    "Penstock pipeline",
    "Penstock drop-in, torchvision ImageFolder",
    "tf.data",
    "DALI, no antialias",
    "Grain",
    "SPDL",
    "FFCV",
    "WebDataset",
    "torch DataLoader, PIL + torchvision",
)
FOUR_JOBS = (
    "Penstock, shared",
    "TensorSocket",
    "Penstock, not shared",
    "torch DataLoader, simplejpeg + OpenCV by hand",
    "DALI, no antialias",
)

VALUE = re.compile(r"([\d,.]+)(?: \(([\d,.]+) to ([\d,.]+)\))?")

Column = dict[str, Spread]


def column(page: str, heading: str, name: str) -> Column:
    """One column of the first table whose first heading is ``heading``, by the title of the row.

    >>> table = "| speed | images/s |\\n| --- | --- |\\n| **ours**, `fast` | **1,200** (1 to 2,000)"
    >>> column(table, "speed", "images/s")
    {'ours, fast': Spread(median=1200.0, low=1.0, high=2000.0)}
    """
    lines = iter(page.splitlines())
    for line in lines:
        cells = _cells(line)
        if cells[:1] == [heading] and name in cells:
            place = cells.index(name)
            break
    else:
        raise ValueError(f"no table begins with {heading!r} and has a column {name!r}")
    next(lines)  # the rule below the headings
    found = {}
    for line in lines:
        row = _cells(line)
        if not row:
            break
        found[row[0]] = _spread(row[place])
    return found


def _cells(line: str) -> list[str]:
    if not line.startswith("|"):
        return []
    return [re.sub(r"[*`]", "", cell).strip() for cell in line.strip("| \n").split("|")]


def _spread(cell: str) -> Spread:
    match = VALUE.match(cell)
    if match is None:
        raise ValueError(f"{cell!r} is not a number, nor a number with its least and most")
    median, low, high = (float((text or match[1]).replace(",", "")) for text in match.groups())
    return Spread(median, low, high)


def _panel(title: str, unit: str, rows: Mapping[str, Spread], shown: Sequence[str]) -> Panel:
    missing = [name for name in shown if name not in rows]
    if missing:
        raise ValueError(f"the table for {title!r} has no row {missing[0]!r}: it has {list(rows)}")
    order = sorted(shown, key=lambda name: -rows[name].median)
    bars = (Bar(name, name.startswith("Penstock"), rows[name]) for name in order)
    return Panel(title, unit, tuple(bars))


def picture(page: str) -> str:
    """The picture, with the figures that the page has now."""
    one = column(page, "float32, normalised, channels first", "images/s")
    four = column(page, "images/s", "4 jobs")
    unit = "images/s on 2 cores"
    return svg(
        [
            _panel("One job, photographs to batches", unit, one, ONE_JOB),
            _panel("Four jobs on the same data", f"{unit}, all jobs together", four, FOUR_JOBS),
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(PAGE.read_text()))
