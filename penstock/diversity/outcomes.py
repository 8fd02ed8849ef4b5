"""The parts of a pipeline and the number of outcomes that each has for one sample.

The number often depends on the shape of a sample. Shapes are followed from map to map as far as the
operations state their output. Where the source does not state the shape of its samples, a typical
shape is assumed. A callable of the user is assumed to keep the shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

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
"""Typical shapes by the field that an operation works on, each with a description.

375 x 500 is the most frequent size in ImageNet.
"""


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """The source or a map of a pipeline.

    ``outcomes``: the number of different results for one sample; 1 if the part is not random,
    ``None`` if unknown. ``seconds``: the cost of one sample.
    """

    name: str
    outcomes: float | None = 1.0
    seconds: float = 0.0

    @property
    def random(self) -> bool:
        """Whether it may have more than one result for a sample."""
        return self.outcomes != 1.0


def known_outcomes(parts: Iterable[PipelinePart]) -> list[float]:
    """The outcomes of the random parts whose number is known."""
    return [part.outcomes for part in parts if part.outcomes is not None and part.random]


@dataclass(frozen=True, slots=True)
class CountedParts:
    """The source and the maps of a pipeline, in order, with their outcomes.

    ``places``: the place of each part in ``pipeline.stops``; -1 for the source. ``assumed``:
    describes the shape that samples were assumed to have; empty if the pipeline states it.
    """

    parts: tuple[PipelinePart, ...]
    places: tuple[int, ...]
    assumed: str = ""


def count_outcomes(pipeline: Pipeline, shape: Shape | None = None) -> CountedParts:
    """Count the outcomes of the source and of every map."""
    source = pipeline.source
    fields = source.fields()
    shapes = _ShapeTracker(fields, shape)
    # A stream may be random too, but its samples have no index, so none of them are ever kept.
    random = bool(getattr(source, "random", False))
    dataset = getattr(source, "dataset", None)
    parts = [PipelinePart(SOURCE, _stated_outcomes(SOURCE, dataset, shape, random))]
    places = [-1]
    for place, stop in enumerate(pipeline.stops):
        if not isinstance(stop, Map):
            continue
        shape_in = shapes.into(stop)
        if isinstance(stop.function, Operation):
            outcomes = stop.function.visible_outcomes(shape_in) if stop.random else 1.0
        else:
            outcomes = _stated_outcomes(stop.name, stop.function, shape_in, stop.random)
        parts.append(PipelinePart(stop.name, outcomes))
        places.append(place)
    return CountedParts(tuple(parts), tuple(places), shapes.assumed)


def _stated_outcomes(name: str, function: Any, shape: Shape | None, random: bool) -> float | None:
    """The attribute ``outcomes`` of a user's callable or dataset; ``None`` if it has none."""
    if not random:
        return 1.0
    attribute = getattr(function, "outcomes", None)
    if attribute is None:
        return None
    value = attribute(shape) if callable(attribute) else attribute
    try:
        number = math.nan if value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 1.0 <= number < math.inf:
        raise PipelineError(
            f"{name}.outcomes is {value!r} for samples of shape {shape}. It must be the number of "
            "different results for one sample: a number of 1 or more, or a function that takes the "
            "sample's shape and returns such a number."
        )
    return number


class _ShapeTracker:
    """Follows the shape of a sample's fields from map to map.

    ``given`` is the shape that the user passed. ``assumed`` describes the shape that was assumed
    where neither the pipeline nor the user states one.
    """

    def __init__(self, fields: Fields, given: Shape | None) -> None:
        self.assumed = ""
        self._given = given
        # To a map, a sample that is a single value is the same as the first field of a tuple.
        self._specs: dict[str | int, Spec] = (
            dict(fields) if isinstance(fields, dict) else {0: fields}
        )
        self._latest: Spec = self._specs.get(0)

    def into(self, stop: Map) -> Shape | None:
        """The shape of a map's input. The shape of its output is remembered for the next map."""
        if isinstance(stop.function, Operation):
            return self._into_operation(stop.function, stop.on)
        return self._into_callable(self._latest if stop.on is None else self._specs.get(stop.on))

    def _into_operation(self, operation: Operation, on: On) -> Shape | None:
        field = on if on is not None else 0 if 0 in self._specs else operation.field
        first_error: PipelineError | None = None
        for spec, assumed in self._candidates(operation.field, self._specs.get(field)):
            try:
                output = operation.output(spec)
            except PipelineError as error:
                # The shape was assumed wrongly, or a user's callable changed it. The pipeline
                # itself is sound: it was checked when it was built.
                first_error = first_error or error
                continue
            shape = _shape(spec)
            if shape is None and operation.random and self._given is not None and first_error:
                raise PipelineError(f"diversity(shape={self._given}) does not fit: {first_error}")
            self._specs[field] = self._latest = output
            self.assumed = self.assumed or assumed
            return shape
        return None

    def _into_callable(self, known: Spec) -> Shape | None:
        """The shape of the input of a user's callable, which states no field and no output."""
        if not isinstance(known, ArraySpec):
            return self._given if known is None else None
        candidates = chain.from_iterable(self._candidates(field, known) for field in _TYPICAL)
        for spec, assumed in candidates:
            if isinstance(spec, ArraySpec) and spec.known and len(spec.shape) == len(known.shape):
                self.assumed = self.assumed or assumed
                return _shape(spec)
        return None

    def _candidates(self, field: str, known: Spec) -> Iterator[tuple[Spec, str]]:
        """Possible inputs of an operation, the likeliest first, each with what it assumes."""
        if isinstance(known, BytesSpec) or (known is not None and known.known):
            yield known, ""
        typical = _TYPICAL.get(field, ())
        if self._given is not None:
            typical = tuple((ArraySpec(self._given, spec.dtype), "") for spec, _ in typical[:1])
        for guess, description in typical:
            spec = _filled(known, guess) if isinstance(known, ArraySpec) else None
            if spec is not None:
                yield spec, description and f"{spec.shape}, {description}"
        for guess, description in typical:
            yield guess, description and f"{guess.shape}, {description}"
        yield known, ""
        yield None, ""


def _filled(known: ArraySpec, guess: ArraySpec) -> ArraySpec | None:
    """``known`` with its unknown sides taken from ``guess``; ``None`` if the ranks differ."""
    if len(known.shape) != len(guess.shape):
        return None
    sides = zip(known.shape, guess.shape, strict=True)
    return ArraySpec(tuple(b if a is None else a for a, b in sides), known.dtype)


def _shape(spec: Spec) -> Shape | None:
    if not isinstance(spec, ArraySpec) or not spec.known:
        return None
    return tuple(side for side in spec.shape if side is not None)
