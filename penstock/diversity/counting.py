"""The parts of a pipeline and how many outcomes each has, for samples of some shape.

Shapes are followed along the road as far as operations state what comes out of them. Where the
source does not say how large samples are they are taken to be typical, and a map of the user's own
is taken to keep the shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from penstock.diversity.part import Part
from penstock.errors import PipelineError
from penstock.operation import ArraySpec, BytesSpec, Operation, Spec
from penstock.pipeline import Pipeline
from penstock.stops.field import On
from penstock.stops.map import Map
from penstock.stops.road import SOURCE
from penstock.stops.stop import Fields

Shape = tuple[int, ...]

_TYPICAL: dict[str, tuple[tuple[ArraySpec, str], ...]] = {
    "image": ((ArraySpec.of((375, 500, 3), np.uint8), "a typical photograph"),),
    "audio": (
        (ArraySpec.of((1, 160_000), np.float32), "ten seconds of sound at 16 kHz"),
        (ArraySpec.of((1, 80, 1000), np.float32), "a spectrogram of ten seconds"),
    ),
}
"""By the field that an operation looks for. 375 x 500 is the most frequent size in ImageNet."""


@dataclass(frozen=True, slots=True)
class Count:
    """The parts of a road, from its source down; ``places`` are those of its stops.

    ``taken`` says which shape samples were taken to have where the pipeline does not say.
    """

    parts: tuple[Part, ...]
    places: tuple[int, ...]
    taken: str = ""


def count(pipeline: Pipeline, shape: Shape | None = None) -> Count:
    """A part for the source and for every map, with the outcomes of each."""
    source = pipeline.source
    fields = source.fields()
    shapes = _Shapes(fields, shape)
    # A stream may be random too; but its samples have no index, and nothing of them is kept.
    varies = bool(getattr(source, "random", False))
    parts = [Part(SOURCE, _stated(SOURCE, getattr(source, "dataset", None), shape, varies))]
    places = [-1]
    for place, stop in enumerate(pipeline.stops):
        if not isinstance(stop, Map):
            continue
        found = shapes.into(stop)
        if isinstance(stop.function, Operation):
            outcomes = stop.function.outcomes(found) if stop.random else 1.0
        else:
            outcomes = _stated(stop.name, stop.function, found, stop.random)
        parts.append(Part(stop.name, outcomes))
        places.append(place)
    return Count(tuple(parts), tuple(places), shapes.taken)


def _stated(name: str, function: Any, shape: Shape | None, random: bool) -> float | None:
    """What a callable of the user's, or a dataset, says of itself in ``outcomes``."""
    if not random:
        return 1.0
    given = getattr(function, "outcomes", None)
    if given is None:
        return None
    found = given(shape) if callable(given) else given
    try:
        number = math.nan if found is None else float(found)
    except (TypeError, ValueError):
        number = math.nan
    if not 1.0 <= number < math.inf:
        raise PipelineError(
            f"{name}.outcomes is {found!r}, for samples of shape {shape}; it must be how many "
            "different results it has for one sample: a number of 1 or more, or a function of the "
            "sample's shape that returns one."
        )
    return number


class _Shapes:
    """Follows the shape of a sample's fields from map to map."""

    def __init__(self, fields: Fields, given: Shape | None) -> None:
        self.taken = ""
        self._given = given
        # The first field of a tuple and a sample that is a single value are one thing to a map.
        self._seen: dict[str | int, Spec] = (
            dict(fields) if isinstance(fields, dict) else {0: fields}
        )
        self._latest: Spec = self._seen.get(0)

    def into(self, stop: Map) -> Shape | None:
        """The shape of what comes into a map; what leaves it is remembered for the next."""
        if isinstance(stop.function, Operation):
            return self._through(stop.function, stop.on)
        return self._beside(self._latest if stop.on is None else self._seen.get(stop.on))

    def _through(self, operation: Operation, on: On) -> Shape | None:
        field = on if on is not None else 0 if 0 in self._seen else operation.field
        refused: PipelineError | None = None
        for spec, taken in self._tries(operation.field, self._seen.get(field)):
            try:
                out = operation.output(spec)
            except PipelineError as error:
                # A wrong guess, or what a map of the user's changed: the pipeline itself is sound.
                refused = refused or error
                continue
            found = _shape(spec)
            if found is None and operation.random and self._given is not None and refused:
                raise PipelineError(f"diversity(shape={self._given}) does not fit: {refused}")
            self._seen[field] = self._latest = out
            self.taken = self.taken or taken
            return found
        return None

    def _beside(self, known: Spec) -> Shape | None:
        """The same for a map of the user's own, which says nothing of what it takes."""
        if not isinstance(known, ArraySpec):
            return self._given if known is None else None
        for spec, taken in chain.from_iterable(self._tries(field, known) for field in _TYPICAL):
            if isinstance(spec, ArraySpec) and spec.known and len(spec.shape) == len(known.shape):
                self.taken = self.taken or taken
                return _shape(spec)
        return None

    def _tries(self, field: str, known: Spec) -> Iterator[tuple[Spec, str]]:
        """What may come into an operation, the likeliest first, and what was taken for granted."""
        if isinstance(known, BytesSpec) or (known is not None and known.known):
            yield known, ""
        guesses = _TYPICAL.get(field, ())
        if self._given is not None:
            guesses = tuple((ArraySpec(self._given, spec.dtype), "") for spec, _ in guesses[:1])
        for guess, what in guesses:
            spec = _filled(known, guess) if isinstance(known, ArraySpec) else None
            if spec is not None:
                yield spec, what and f"{spec.shape}, {what}"
        for guess, what in guesses:
            yield guess, what and f"{guess.shape}, {what}"
        yield known, ""
        yield None, ""


def _filled(known: ArraySpec, guess: ArraySpec) -> ArraySpec | None:
    """What is known, with the rest taken from a guess."""
    if len(known.shape) != len(guess.shape):
        return None
    sides = zip(known.shape, guess.shape, strict=True)
    return ArraySpec(tuple(b if a is None else a for a, b in sides), known.dtype)


def _shape(spec: Spec) -> Shape | None:
    if not isinstance(spec, ArraySpec) or not spec.known:
        return None
    return tuple(side for side in spec.shape if side is not None)
