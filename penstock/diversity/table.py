"""Diversity as text: what is random, what every split and reuse leaves, and a small plot of it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from string import ascii_lowercase

from penstock.diversity.part import Part, known
from penstock.diversity.report import Diversity
from penstock.diversity.theorem import WEAK

_WIDTH = 100
_STEPS = 10
"""The plot has a line for every tenth."""


def show(d: Diversity) -> str:
    """The whole report."""
    if not d.rows:
        return "Nothing on this road is random: every epoch sees the same samples."
    epochs = f"{d.epochs:,} epoch" + ("" if d.epochs == 1 else "s")
    seen = f"{d.standard:.1f}".removesuffix(".0")
    out = [f"Standard training sees {seen} versions of a sample in {epochs}", ""]
    out += _aligned([("random", "outcomes"), *((p.name, _count([p])) for p in _random(d.parts))])
    out += ["", *_splits(d), "", *_plot(d), ""]
    for note in _notes(d):
        out += textwrap.wrap(note, _WIDTH, subsequent_indent="  ")
    return "\n".join(line.rstrip() for line in out)


def _splits(d: Diversity) -> list[str]:
    reuses = [row.reuse for row in d.of(d.splits[0])]
    titles = ("", "split below", "|A_P|", "|A_F|", "strength ")
    lines: list[Sequence[str]] = [(*titles, *(f"x{reuse} " for reuse in reuses))]
    for letter, split in zip(_letters(d), d.splits, strict=True):
        rows = d.of(split)
        cells = (f"{_percent(row.share)}{'*' if row.here else ' '}" for row in rows)
        weak = "!" if rows[0].weak else "?" if d.unknown else " "
        lines.append(
            (
                letter,
                rows[0].below or "the source",
                _count(d.parts[:split]),
                _count(d.parts[split:]),
                f"{rows[0].strength:.2f}{weak}",
                *cells,
            )
        )
    return _aligned(lines, left=2)


def _plot(d: Diversity) -> list[str]:
    """Share over reuse: every split has its letter, and its own column, so that none hides."""
    reuses = [row.reuse for row in d.of(d.splits[0])]
    letters = _letters(d)
    least = min(round(row.share * _STEPS) for row in d.rows)
    lines = []
    for level in range(_STEPS, least - 1, -1):
        cells = []
        for reuse in reuses:
            here = [row for row in d.rows if row.reuse == reuse]
            cells.append(
                "".join(
                    letter if round(row.share * _STEPS) == level else " "
                    for letter, row in zip(letters, here, strict=True)
                )
            )
        lines.append(f"{level * 100 // _STEPS:>4}% | " + "  ".join(cells))
    wide = max(len(d.splits), 2)
    lines = [line.rstrip() for line in lines]
    lines.append("      +" + "-" * ((wide + 2) * len(reuses)))
    lines.append("        " + "  ".join(f"x{reuse}".ljust(wide) for reuse in reuses))
    return lines


def _notes(d: Diversity) -> list[str]:
    notes = [
        "|A_P|, |A_F|: outcomes above and below the split; strength: the part of the variety that "
        "is below it, log |A_F| / log |A|; x1, x2, ...: reuse, and the share of standard "
        "training's versions that it leaves."
    ]
    if any(row.weak for row in d.rows):
        notes.append(f"! weak: with a strength below {WEAK:g} accuracy may suffer.")
    if d.split is not None:
        here = "* this pipeline" if d.reuse is not None else "this pipeline's reuse is not fixed"
        notes.append(f"{here}.")
    if d.taken:
        notes.append(f"samples were taken to be {d.taken}: give shape= for yours.")
    if d.unknown:
        notes.append(
            f"? {', '.join(d.unknown)}: not known, and counted as one. Give a callable of yours an "
            "attribute outcomes: a number, or a function of the sample's shape."
        )
    return notes


def _letters(d: Diversity) -> list[str]:
    letters = ascii_lowercase + ascii_lowercase.upper()
    return [letters[place % len(letters)] for place in range(len(d.splits))]


def _random(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.random]


def _count(parts: Sequence[Part]) -> str:
    """All outcomes of some parts together, ``?`` for what is not known of them."""
    numbers = known(parts)
    unknown = any(part.outcomes is None for part in parts)
    if unknown and not numbers:
        return "?"
    size = math.fsum(map(math.log10, numbers))
    if size < 6:
        text = f"{math.prod(numbers):,.0f}"
    else:
        text = f"{10 ** (size % 1):.2g}e{math.floor(size)}"
    return f"? x {text}" if unknown else text


def _percent(value: float) -> str:
    """Rounded down, so that 100% is all."""
    return f"{math.floor(value * 1000 + 1e-6) / 10:.1f}%"


def _aligned(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Columns, the first ``left`` of them to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if place < left else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
