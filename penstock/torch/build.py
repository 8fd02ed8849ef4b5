"""A torch dataset as a road: its transforms taken apart, and reuse put between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from penstock.errors import PipelineError
from penstock.keyed import preserved_globals
from penstock.operation import Operation
from penstock.pipeline import Pipeline, from_dataset
from penstock.stops.map import make_map
from penstock.store.encoding import DEFAULT as DEFAULT_ENCODING
from penstock.torch.apart import compose, take_apart

At = Literal["sample", "augmented", "batch"]


@dataclass(frozen=True)
class Reuse:
    """What a DataLoader was told about using samples more than once."""

    reuse: int | Literal["auto"] | None = None
    split: int | None = None
    partial: Callable[..., Any] | None = None
    final: Callable[..., Any] | None = None
    size: int | str | None = None
    where: str = "memory"
    encode: str = DEFAULT_ENCODING
    echo: float | Literal["auto"] | None = None
    echo_at: At = "sample"
    window: int | None = None

    def __post_init__(self) -> None:
        def refuse(why: str) -> None:
            raise PipelineError(f"DataLoader: {why}")

        if self.echo_at not in ("sample", "augmented", "batch"):
            refuse(f'echo_at is {self.echo_at!r}; give "sample", "augmented" or "batch".')
        if self.split is not None and (self.partial is not None or self.final is not None):
            refuse("split and partial or final say the same in two ways; give one of them.")
        if self.reuse is None and (self.split is not None or self.size is not None):
            refuse("split and reuse_size are for refurbishing; give reuse, such as reuse=3.")
        if self.reuse not in (None, "auto") and self.split is None and self.final is None:
            refuse(
                f"reuse={self.reuse!r} needs to know what is done to a sample every time. Give "
                "split, the number of transforms at the end of its Compose that are; or partial= "
                "and final=, two callables."
            )

    @property
    def wants_parts(self) -> bool:
        """The dataset's own transforms must be taken out of it."""
        inside = self.partial is None and self.final is None
        return inside and (
            self.reuse is not None or (self.echo is not None and self.echo_at == "sample")
        )


class Part(NamedTuple):
    """A map to be, on the first field of a sample unless ``on`` says else."""

    function: Any
    on: Any = None
    random: bool | None = None
    name: str | None = None


def build(
    dataset: Any,
    *,
    cache: int | str | None,
    where: str,
    random: bool | None,
    native: bool,
    whole: bool,
    reuse: Reuse,
) -> Pipeline:
    """The road of a dataset up to its batches; ``whole`` keeps it in one piece."""
    apart = None if whole else take_apart(dataset, native)
    if apart is not None:
        pipeline = apart.source
        parts = [Part(*part) for part in apart.maps]
        _check_split(reuse.split, apart.steps)
        final = 0 if reuse.split is None else apart.maps_of_last(reuse.split)
    else:
        parts, final = [], 0
        if reuse.wants_parts:
            dataset, steps = _without_transforms(dataset, reuse)
            _check_split(reuse.split, len(steps))
            parts = [Part(step, 0) for step in steps]
            final = reuse.split or 0
        pipeline = from_dataset(dataset, random=random)
    if cache is not None:
        pipeline = pipeline.cache(cache, where=where)
    given = [one for one in (reuse.partial, reuse.final) if one is not None]
    if given:
        on = None if apart is not None else _first_field(dataset)
        parts += [Part(one, None if isinstance(one, Operation) else on) for one in given]
        final = 0 if reuse.final is None else 1
    return _joined(pipeline, parts, final, reuse)


def _joined(pipeline: Pipeline, parts: Sequence[Part], final: int, reuse: Reuse) -> Pipeline:
    echo_first = reuse.echo is not None and reuse.echo_at == "sample"
    for place, part in enumerate(parts):
        if echo_first and _is_random(part):
            pipeline = pipeline.echo(reuse.echo or 1, window=reuse.window)
            echo_first = False
        if reuse.reuse is not None and place == len(parts) - final:
            pipeline = pipeline.refurbish(
                reuse.reuse, size=reuse.size, where=reuse.where, encode=reuse.encode
            )
        pipeline = pipeline.map(part.function, on=part.on, random=part.random, name=part.name)
    if reuse.reuse == "auto" and not final:
        pipeline = pipeline.refurbish("auto", size=reuse.size, where=reuse.where)
    if echo_first or (reuse.echo is not None and reuse.echo_at == "augmented"):
        pipeline = pipeline.echo(reuse.echo or 1, window=reuse.window)
    return pipeline


def _check_split(split: int | None, steps: int) -> None:
    if split is None:
        return
    if isinstance(split, bool) or not isinstance(split, int) or not 1 <= split <= steps:
        raise PipelineError(
            f"DataLoader: split is {split!r}, and the dataset has {steps} transforms: give how "
            "many of the last ones are done to a sample every time."
        )


def _is_random(part: Part) -> bool:
    return make_map(
        part.function, on=part.on, random=part.random, version=None, name=part.name, ordinal=0
    ).random


def _without_transforms(dataset: Any, reuse: Reuse) -> tuple[Any, list[Any]]:
    """The dataset without its transforms, and these; its own attribute must hold them."""
    steps = compose(getattr(dataset, "transform", None))
    count = len(steps) if steps is not None else 0
    if not count:
        what = "reuse" if reuse.reuse is not None else 'echo_at="sample"'
        raise PipelineError(
            f"DataLoader: {what} has to stand between the transforms of the dataset, and "
            f"{type(dataset).__name__} has none in an attribute 'transform'. Take them out of it, "
            "and give them as partial= and final=.",
            code="no-transforms",
        )
    bare = copy.copy(dataset)
    bare.transform = None
    # torchvision's datasets keep it twice, together with the transform of targets.
    both = getattr(dataset, "transforms", None)
    if both is not None and hasattr(both, "target_transform"):
        bare.transforms = copy.copy(both)
        bare.transforms.transform = None
    return bare, steps or []


def _first_field(dataset: Any) -> int | None:
    """Transforms are for the first field of a sample that has several."""
    with preserved_globals():
        sample = dataset[0]
    return 0 if isinstance(sample, (tuple, list)) else None
