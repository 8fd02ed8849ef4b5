"""Builds the pipeline of a torch dataset, with the stages that reuse and echo samples.

Classes are recognised by name: this module imports neither torch nor torchvision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn

from penstock.errors import ErrorCode, PipelineError
from penstock.keyed import preserved_globals
from penstock.operation import Operation
from penstock.options import is_whole
from penstock.pipeline import Pipeline, from_dataset
from penstock.source.dataset import DatasetSource, holds_data
from penstock.stops.map import make_map
from penstock.store.encoding import DEFAULT as DEFAULT_ENCODING
from penstock.torch.image_folder import MapArguments, list_transforms, take_apart

EchoPlace = Literal["sample", "augmented", "batch"]
"""Where samples are repeated: before the augmentation, after it, or as whole batches."""


def reads_together(dataset: Any) -> bool:
    """Whether a dataset reads all samples of a batch in one call, by code of the user.

    Then these samples may depend on each other: a tokenizer pads them to one length.
    """
    kind = type(dataset)
    where = f"{kind.__module__}.{kind.__qualname__}"
    if where == "torch.utils.data.dataset.Subset":
        return reads_together(dataset.dataset)
    if where == "torch.utils.data.dataset.StackDataset":
        inner = dataset.datasets
        return any(map(reads_together, inner.values() if isinstance(inner, dict) else inner))
    return bool(getattr(dataset, "__getitems__", None)) and not holds_data(dataset)


def refuse(why: str, code: ErrorCode | None = None) -> NoReturn:
    """Raise an error about the arguments of a DataLoader."""
    raise PipelineError(f"DataLoader: {why}", code=code)


@dataclass(frozen=True)
class ReuseOptions:
    """The arguments of ``DataLoader`` about using samples more than once, checked."""

    reuse: int | Literal["auto"] | None = None
    split: int | None = None
    partial: Operation | Callable[..., Any] | None = None
    final: Operation | Callable[..., Any] | None = None
    reuse_size: int | str | None = None
    reuse_where: str = "memory"
    reuse_encode: str = DEFAULT_ENCODING
    echo: float | Literal["auto"] | None = None
    echo_at: EchoPlace = "sample"
    echo_window: int | None = None

    def __post_init__(self) -> None:
        if self.echo_at not in ("sample", "augmented", "batch"):
            refuse(f'echo_at is {self.echo_at!r}; give "sample", "augmented" or "batch".')
        if self.split is not None and (self.partial is not None or self.final is not None):
            refuse(
                "split says which transforms run every time that a sample is used, and so do "
                "partial and final: give either split, or partial and final."
            )
        if self.echo is None:
            self._refuse_given("echo_at", "echo_window", without="echo", example="echo=2")
        if self.reuse is None:
            names = ("split", "reuse_size", "reuse_where", "reuse_encode")
            self._refuse_given(*names, without="reuse", example="reuse=3")
        elif self.reuse != "auto":
            self._check_reuse(self.reuse)
        elif self.split is not None:
            refuse(
                f'split={self.split!r} has no effect with reuse="auto", which chooses itself how '
                "many transforms run every time. Leave out split, or give a number for reuse, such "
                "as reuse=3."
            )

    def _refuse_given(self, *names: str, without: str, example: str) -> None:
        """Refuse these arguments if one of them is given, because they would have no effect."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            value = getattr(self, name)
            if value != defaults[name]:
                refuse(
                    f"{name}={value!r} has no effect without {without}. Give {without}, such as "
                    f"{example}, or leave out {name}."
                )

    def _check_reuse(self, reuse: int) -> None:
        if not is_whole(reuse) or reuse < 1:
            refuse(
                f"reuse is {reuse!r}; give how often a partly transformed sample is used, a whole "
                'number from 1 on, or "auto".'
            )
        if self.split is None and self.final is None:
            refuse(
                f"reuse={reuse!r} needs to know which transforms run every time that a sample is "
                "used. Give split, the number of these transforms at the end of the dataset's "
                "Compose; or give partial= and final=, two callables."
            )

    @property
    def needs_transforms(self) -> bool:
        """Whether a stage must stand between transforms that the dataset itself applies."""
        given = self.partial is not None or self.final is not None
        return not given and (self.reuse is not None or self.echoes("sample"))

    def echoes(self, place: EchoPlace) -> bool:
        """Whether samples are repeated at this place."""
        return self.echo is not None and self.echo_at == place


def build_pipeline(
    dataset: Any,
    *,
    cache: int | str | None,
    cache_where: str,
    random: bool | None,
    native: bool,
    whole: bool,
    calls: Literal["groups", "batches", "none"],
    options: ReuseOptions,
) -> Pipeline:
    """The pipeline of a dataset, down to the stage above ``batch``.

    ``native``: use operations of ``penstock.image`` for the transforms of an ImageFolder.
    ``whole``: do not take an ImageFolder apart. ``calls``: see ``DatasetSource``.
    """
    if calls != "groups":
        return Pipeline(DatasetSource(dataset, random=random, calls=calls))
    folder = None if whole else take_apart(dataset, native)
    maps: list[MapArguments] = []
    final = 0  # how many of the maps run every time that a sample is used
    if folder is not None:
        pipeline, maps = folder.source, list(folder.maps)
        _check_split(options.split, folder.transforms)
        if options.split is not None:
            final = folder.maps_of_last(options.split)
    else:
        if options.needs_transforms:
            dataset, transforms = _without_transforms(dataset, options)
            _check_split(options.split, len(transforms))
            maps = [MapArguments(transform, 0) for transform in transforms]
            final = options.split or 0
        pipeline = from_dataset(dataset, random=random)
    if cache is not None:
        pipeline = pipeline.cache(cache, where=cache_where)
    given = [function for function in (options.partial, options.final) if function is not None]
    if given:
        on = 0 if folder is not None else _first_field(dataset)
        # An operation knows its field.
        maps += [
            MapArguments(function, None if isinstance(function, Operation) else on)
            for function in given
        ]
        final = 0 if options.final is None else 1
    return _add_stages(pipeline, maps, final, options)


def add_echo(pipeline: Pipeline, options: ReuseOptions) -> Pipeline:
    """Add an echo stage, if the user asked for one."""
    if options.echo is None:
        return pipeline
    return pipeline.echo(options.echo, window=options.echo_window)


def _add_refurbish(pipeline: Pipeline, options: ReuseOptions) -> Pipeline:
    if options.reuse is None:
        return pipeline
    return pipeline.refurbish(
        options.reuse,
        size=options.reuse_size,
        where=options.reuse_where,
        encode=options.reuse_encode,
    )


def _add_stages(
    pipeline: Pipeline, maps: Sequence[MapArguments], final: int, options: ReuseOptions
) -> Pipeline:
    """Add the maps, with refurbish above the last ``final`` of them, and with echo."""
    echo_above_random = options.echoes("sample")
    for place, arguments in enumerate(maps):
        if echo_above_random and _is_random(arguments):
            pipeline = add_echo(pipeline, options)
            echo_above_random = False
        if place == len(maps) - final:
            pipeline = _add_refurbish(pipeline, options)
        function, on, random, name = arguments
        pipeline = pipeline.map(function, on=on, random=random, name=name)
    if not final:  # only refurbish("auto") comes without final maps; it chooses its place itself
        pipeline = _add_refurbish(pipeline, options)
    if echo_above_random or options.echoes("augmented"):
        pipeline = add_echo(pipeline, options)
    return pipeline


def _check_split(split: int | None, transforms: int) -> None:
    if split is None:
        return
    if not is_whole(split) or not 1 <= split <= transforms:
        refuse(
            f"split is {split!r}, and the dataset has {transforms} transforms. Give "
            "the number of transforms, counted from the last one, that run every time that a "
            "sample is used."
        )


def _is_random(arguments: MapArguments) -> bool:
    function, on, random, name = arguments
    return make_map(function, on=on, random=random, version=None, name=name, ordinal=0).random


def _without_transforms(dataset: Any, options: ReuseOptions) -> tuple[Any, list[Any]]:
    """A copy of the dataset without its transforms, and the list of these transforms."""
    transforms = list_transforms(getattr(dataset, "transform", None))
    if not transforms:
        stage = "reuse" if options.reuse is not None else 'echo_at="sample"'
        refuse(
            f"{stage} has to stand between the transforms of the dataset, and "
            f"{type(dataset).__name__} has none in an attribute 'transform'. Take the transforms "
            "out of the dataset, and give them as partial= and final=.",
            code="no-transforms",
        )
    bare = copy.copy(dataset)
    bare.transform = None
    # torchvision's datasets hold the transform a second time, beside the transform of targets.
    both = getattr(dataset, "transforms", None)
    if both is not None and hasattr(both, "target_transform"):
        bare.transforms = copy.copy(both)
        bare.transforms.transform = None
    return bare, transforms


def _first_field(dataset: Any) -> int | None:
    """The field for ``partial`` and ``final``: the first one if a sample has several."""
    with preserved_globals():
        sample = dataset[0]
    return 0 if isinstance(sample, (tuple, list)) else None
