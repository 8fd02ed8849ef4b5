"""The diversity report: how many different samples reuse leaves, for every place of refurbish()."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from string import ascii_lowercase

from penstock.diversity.outcomes import PipelinePart, Shape, count_outcomes, known_outcomes
from penstock.diversity.theorem import WEAK, share, strength, unique
from penstock.errors import PipelineError
from penstock.pipeline import Pipeline
from penstock.stops.refurbish import refurbish_in

REUSES = (1, 2, 3, 4, 5)

_WIDTH = 100
_STEPS = 10
"""Lines of the plot above 0 %: one for every tenth."""


@dataclass(frozen=True, slots=True)
class DiversityRow:
    """One place for refurbish() with one reuse.

    ``split``: the number of ``parts`` above it. ``below``: the name of the last random part above
    it. ``unique``: the expected number of different versions of a sample. ``share``: the same as a
    share of standard training's versions. ``strength``: log |A_F| / log |A|; ``weak``: whether that
    is too little. ``here``: whether this is the pipeline's own place and reuse.
    """

    split: int
    below: str
    reuse: int
    unique: float
    share: float
    strength: float
    weak: bool
    here: bool


@dataclass(frozen=True, slots=True)
class Diversity:
    """How many different samples reuse leaves. ``print`` shows a table and a plot.

    ``parts``: the source and all maps, with the number of outcomes that each has for one sample;
    an unknown number (``None``) counts as one. ``rows``: every split right below a random part,
    with every reuse. ``split`` and ``reuse``: those of the pipeline, ``None`` without refurbish.
    ``taken``: the shape that samples were assumed to have, if the pipeline does not state it.
    """

    epochs: int
    parts: tuple[PipelinePart, ...]
    rows: tuple[DiversityRow, ...]
    split: int | None = None
    reuse: int | None = None
    taken: str = ""

    @property
    def standard(self) -> float:
        """The expected number of different versions of a sample in standard training."""
        return unique(math.prod(known_outcomes(self.parts)), 1.0, 1, self.epochs)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names of random parts whose number of outcomes is unknown."""
        return tuple(part.name for part in self.parts if part.outcomes is None)

    @property
    def splits(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row.split for row in self.rows))

    def of(self, split: int) -> tuple[DiversityRow, ...]:
        """The rows of one split, by reuse."""
        return tuple(row for row in self.rows if row.split == split)

    def __str__(self) -> str:
        return _text(self)

    def svg(self, path: str | PathLike[str]) -> None:
        """Write the report as an SVG drawing to a file."""
        Path(path).write_text(self._repr_svg_(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        from penstock.diversity.plot import svg

        return svg(self)


def diversity(pipeline: Pipeline, epochs: int, shape: Shape | None = None) -> Diversity:
    """Make the report. Warns if too little of the variety is below the pipeline's own split."""
    epochs = _checked_epochs(epochs)
    counted = count_outcomes(pipeline, None if shape is None else _checked_shape(shape))
    parts = counted.parts
    split = reuse = None
    stop = refurbish_in(pipeline.stops)
    if stop is not None:
        place = pipeline.stops.index(stop)
        split = _moved_up(parts, sum(at < place for at in counted.places))
        reuse = None if stop.reuse == "auto" else stop.reuse
    splits = [at for at, part in enumerate(parts, start=1) if part.random]
    if splits and split == 0:
        splits.insert(0, 0)
    reuses = sorted({*REUSES, reuse or 1})
    rows = tuple(_row(parts, at, r, epochs, (split, reuse)) for at in splits for r in reuses)
    if split is not None:
        _warn_if_weak(parts, split)
    return Diversity(epochs, parts, rows, split, reuse, counted.assumed)


def _row(
    parts: Sequence[PipelinePart],
    split: int,
    reuse: int,
    epochs: int,
    own: tuple[int | None, int | None],
) -> DiversityRow:
    above, below = known_outcomes(parts[:split]), known_outcomes(parts[split:])
    partial, final = math.prod(above), math.prod(below)
    return DiversityRow(
        split=split,
        below=parts[split - 1].name if split else "",
        reuse=reuse,
        unique=unique(partial, final, reuse, epochs),
        share=share(partial, final, reuse, epochs),
        strength=strength(above, below),
        weak=_weak(parts, split),
        here=(split, reuse) == own,
    )


def _moved_up(parts: Sequence[PipelinePart], split: int) -> int:
    """The equivalent split right below the last random part above it."""
    while split and not parts[split - 1].random:
        split -= 1
    return split


def _strength_at(parts: Sequence[PipelinePart], split: int) -> float:
    return strength(known_outcomes(parts[:split]), known_outcomes(parts[split:]))


def _weak(parts: Sequence[PipelinePart], split: int) -> bool:
    # If the outcomes of a part below the split are unknown, the final part may be strong enough.
    unknown = any(part.outcomes is None for part in parts[split:])
    return not unknown and _strength_at(parts, split) < WEAK


def _warn_if_weak(parts: Sequence[PipelinePart], split: int) -> None:
    if not _weak(parts, split):
        return
    better = max(at for at in range(split) if not _weak(parts, at))
    to_move = [part.name for part in parts[better:split] if part.random]
    warnings.warn(
        f"The maps below refurbish() make only {_strength_at(parts, split):.2f} of the variety "
        f"(log |A_F| / log |A|). Below {WEAK:g} accuracy may suffer, because every use of a kept "
        f"sample looks nearly the same. Move {_listed(to_move)} below refurbish().",
        UserWarning,
        stacklevel=4,
    )


def _listed(names: Sequence[str]) -> str:
    """Names as a list in a sentence.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _checked_epochs(epochs: int) -> int:
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise PipelineError(f"diversity(): epochs is {epochs!r}; give a whole number of 1 or more.")
    return epochs


def _checked_shape(shape: Sequence[int]) -> Shape:
    """The shape as a tuple of whole numbers."""
    try:
        sides = tuple(int(side) for side in shape)
    except (TypeError, ValueError):
        sides = ()
    if not sides or min(sides) < 1:
        raise PipelineError(
            f"diversity(): shape is {shape!r}; give the shape of a decoded sample, such as "
            "(height, width, channels)."
        )
    return sides


# The report as text.


def _text(d: Diversity) -> str:
    if not d.rows:
        return "Nothing in this pipeline is random: every epoch sees the same samples."
    epochs = f"{d.epochs:,} epoch" + ("" if d.epochs == 1 else "s")
    versions = f"{d.standard:.1f}".removesuffix(".0")
    out = [f"Standard training sees {versions} versions of a sample in {epochs}", ""]
    random = [part for part in d.parts if part.random]
    out += _aligned([("random", "outcomes"), *((part.name, _count([part])) for part in random)])
    out += ["", *_table(d), "", *_plot(d), ""]
    for note in _notes(d):
        out += textwrap.wrap(note, _WIDTH, subsequent_indent="  ")
    return "\n".join(line.rstrip() for line in out)


def _table(d: Diversity) -> list[str]:
    """A line for every split: its outcomes, its strength, and its share for every reuse."""
    reuses = [row.reuse for row in d.of(d.splits[0])]
    titles = ("", "split below", "|A_P|", "|A_F|", "strength ")
    lines: list[Sequence[str]] = [(*titles, *(f"x{reuse} " for reuse in reuses))]
    for letter, split in zip(_letters(d), d.splits, strict=True):
        rows = d.of(split)
        shares = (f"{_percent(row.share)}{'*' if row.here else ' '}" for row in rows)
        mark = "!" if rows[0].weak else "?" if d.unknown else " "
        lines.append(
            (
                letter,
                rows[0].below or "the source",
                _count(d.parts[:split]),
                _count(d.parts[split:]),
                f"{rows[0].strength:.2f}{mark}",
                *shares,
            )
        )
    return _aligned(lines, left=2)


def _plot(d: Diversity) -> list[str]:
    """Share over reuse. Every split has its own letter and column, so that none is hidden."""
    reuses = [row.reuse for row in d.of(d.splits[0])]
    letters = _letters(d)
    least = min(round(row.share * _STEPS) for row in d.rows)
    lines = []
    for level in range(_STEPS, least - 1, -1):
        cells = []
        for reuse in reuses:
            rows = [row for row in d.rows if row.reuse == reuse]
            cells.append(
                "".join(
                    letter if round(row.share * _STEPS) == level else " "
                    for letter, row in zip(letters, rows, strict=True)
                )
            )
        lines.append(f"{level * 100 // _STEPS:>4}% | " + "  ".join(cells))
    width = max(len(d.splits), 2)
    lines = [line.rstrip() for line in lines]
    lines.append("      +" + "-" * ((width + 2) * len(reuses)))
    lines.append("        " + "  ".join(f"x{reuse}".ljust(width) for reuse in reuses))
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
        own = "* this pipeline" if d.reuse is not None else "this pipeline's reuse is not fixed"
        notes.append(f"{own}.")
    if d.taken:
        notes.append(f"assumed shape of a sample: {d.taken}; give shape= for yours.")
    if d.unknown:
        notes.append(
            f"? {', '.join(d.unknown)}: outcomes unknown, counted as one. Give your callable an "
            "attribute outcomes: a number, or a function of the sample's shape."
        )
    return notes


def _letters(d: Diversity) -> list[str]:
    letters = ascii_lowercase + ascii_lowercase.upper()
    return [letters[place % len(letters)] for place in range(len(d.splits))]


def _count(parts: Sequence[PipelinePart]) -> str:
    """The number of outcomes of all these parts together; ``?`` stands for the unknown ones."""
    numbers = known_outcomes(parts)
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
    """Rounded down, so that only a share of 1 is shown as 100.0%."""
    return f"{math.floor(value * 1000 + 1e-6) / 10:.1f}%"


def _aligned(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Align columns: the first ``left`` of them to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if place < left else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
