"""What reusing costs in different samples, for every place where refurbish could stand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from penstock.diversity.counting import Shape, count
from penstock.diversity.part import Part, known, listed
from penstock.diversity.theorem import WEAK, share, strength, unique
from penstock.errors import PipelineError
from penstock.pipeline import Pipeline
from penstock.stops.refurbish import refurbish_in

REUSES = (1, 2, 3, 4, 5)


@dataclass(frozen=True, slots=True)
class Row:
    """One place for refurbish, and one reuse.

    ``split`` is how many of the ``parts`` stand above it, and ``below`` the last random one of
    them. ``unique`` is how many different versions of a sample are to be expected, ``share`` what
    part that is of standard training's, and ``strength`` log |A_F| / log |A|, which is too little
    where it is ``weak``. ``here`` marks the pipeline as it is.
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
    """What reusing costs in different samples. ``print`` shows a table and a plot of it.

    ``parts`` are the source and all maps, with how many outcomes each has for one sample; those
    that are not known (``None``) count as one. ``rows`` has every split, right below a random part,
    with every reuse. ``split`` and ``reuse`` are the pipeline's own: ``None`` without refurbish.
    ``taken`` is the shape that samples were taken to have where the pipeline does not say.
    """

    epochs: int
    parts: tuple[Part, ...]
    rows: tuple[Row, ...]
    split: int | None = None
    reuse: int | None = None
    taken: str = ""

    @property
    def standard(self) -> float:
        """How many different versions of a sample standard training sees."""
        return unique(math.prod(known(self.parts)), 1.0, 1, self.epochs)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Random parts of which nobody knows how many outcomes they have."""
        return tuple(part.name for part in self.parts if part.outcomes is None)

    @property
    def splits(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row.split for row in self.rows))

    def of(self, split: int) -> tuple[Row, ...]:
        """The rows of one split, by reuse."""
        return tuple(row for row in self.rows if row.split == split)

    def __str__(self) -> str:
        from penstock.diversity.table import show

        return show(self)

    def svg(self, path: str | PathLike[str]) -> None:
        """Draw it into a file."""
        Path(path).write_text(self._repr_svg_(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        from penstock.diversity.plot import svg

        return svg(self)


def diversity(pipeline: Pipeline, epochs: int, shape: Shape | None = None) -> Diversity:
    """Work it out. Warns where the pipeline's own split leaves too little to its final part."""
    epochs = _checked(epochs)
    counted = count(pipeline, None if shape is None else _shape(shape))
    parts = counted.parts
    split = reuse = None
    stop = refurbish_in(pipeline.stops)
    if stop is not None:
        place = pipeline.stops.index(stop)
        split = _settled(parts, sum(at < place for at in counted.places))
        reuse = None if stop.reuse == "auto" else stop.reuse
    splits = [at for at, part in enumerate(parts, start=1) if part.random]
    if splits and split == 0:
        splits.insert(0, 0)
    reuses = sorted({*REUSES, reuse or 1})
    rows = tuple(_row(parts, at, r, epochs, (split, reuse)) for at in splits for r in reuses)
    if split is not None:
        _warn_if_weak(parts, split)
    return Diversity(epochs, parts, rows, split, reuse, counted.taken)


def _row(
    parts: Sequence[Part], split: int, reuse: int, epochs: int, own: tuple[int | None, int | None]
) -> Row:
    above, below = known(parts[:split]), known(parts[split:])
    partial, final = math.prod(above), math.prod(below)
    return Row(
        split=split,
        below=parts[split - 1].name if split else "",
        reuse=reuse,
        unique=unique(partial, final, reuse, epochs),
        share=share(partial, final, reuse, epochs),
        strength=strength(above, below),
        weak=_weak(parts, split),
        here=(split, reuse) == own,
    )


def _settled(parts: Sequence[Part], split: int) -> int:
    """The same split right below the last random part above it."""
    while split and not parts[split - 1].random:
        split -= 1
    return split


def _weak(parts: Sequence[Part], split: int) -> bool:
    # With outcomes that nobody knows below the split, it may be strong enough.
    unknown = any(part.outcomes is None for part in parts[split:])
    return not unknown and strength(known(parts[:split]), known(parts[split:])) < WEAK


def _warn_if_weak(parts: Sequence[Part], split: int) -> None:
    if not _weak(parts, split):
        return
    found = strength(known(parts[:split]), known(parts[split:]))
    better = max(at for at in range(split) if not _weak(parts, at))
    moved = [part.name for part in parts[better:split] if part.random]
    warnings.warn(
        f"What stands below refurbish() makes only {found:.2f} of the variety (log |A_F| / log "
        f"|A|); below {WEAK:g} accuracy may suffer, because kept samples come back nearly as they "
        f"were. Move {listed(moved)} below refurbish().",
        UserWarning,
        stacklevel=4,
    )


def _checked(epochs: int) -> int:
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise PipelineError(f"diversity(): epochs is {epochs!r}; give a whole number of 1 or more.")
    return epochs


def _shape(shape: Sequence[int]) -> Shape:
    """The shape as a tuple of whole numbers."""
    try:
        sides = tuple(int(side) for side in shape)
    except (TypeError, ValueError):
        sides = ()
    if not sides or min(sides) < 1:
        raise PipelineError(
            f"diversity(): shape is {shape!r}; give that of a decoded sample, such as (height, "
            "width, channels)."
        )
    return sides
