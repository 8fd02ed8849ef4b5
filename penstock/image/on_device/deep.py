"""Deep AutoAugment on a device: for each layer the frames, changes and erased squares of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.image.augment import AugmentStep
from penstock.image.deep_augment import GREY, DeepAutoAugment, DeepStep
from penstock.image.erasing import Erase, Patch
from penstock.image.geometry import Frame
from penstock.image.on_device.changes import NOTHING, ChangesStage, numbers_of
from penstock.image.on_device.erasing import EraseStage
from penstock.image.on_device.framing import Framed, FramingStage, IndexMaps, Size
from penstock.image.on_device.parameters import Arrays
from penstock.keyed import Key, Keyed


@dataclass(frozen=True)
class DeepDraws:
    """Draws the steps of a sample once for all its layers."""

    operation: DeepAutoAugment
    keyed: Keyed
    _last: dict[tuple[Key, Size], tuple[DeepStep, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def steps(self, key: Key, size: Size) -> tuple[DeepStep, ...]:
        steps = self._last.get((key, size))
        if steps is None:
            steps = self.operation.draw(self.keyed.at(key), (*size, 3))
            self._last.clear()
            self._last[key, size] = steps
        return steps


@dataclass(frozen=True)
class DeepLayerPart:
    """One part of a layer. It has no arrays, and is skipped, if no sample of a tiny-batch needs it.

    ``stage``: the stage that packs and runs the parameters.
    """

    draws: DeepDraws
    layer: int
    stage: Any
    frames: bool = field(default=False, init=False)

    def draw_one(self, key: Key, size: Size) -> Any:
        """What one sample needs."""
        raise NotImplementedError

    def step(self, key: Key, size: Size) -> DeepStep:
        return self.draws.steps(key, size)[self.layer]

    def needed(self, one: Any) -> bool:
        return bool(one)

    def pack(self, drawn: Sequence[Any], sizes: Sequence[Size]) -> dict[str, NDArray[Any]]:
        if not any(map(self.needed, drawn)):
            return {}
        packed: dict[str, NDArray[Any]] = self.stage.pack(drawn, sizes)
        packed.pop("region", None)
        return packed

    def run(self, backend: Any, pictures: Any, arrays: Arrays, host: Arrays, final: Any) -> Any:
        return self.stage.run(backend, pictures, arrays, host, final)


@dataclass(frozen=True)
class DeepFrames(DeepLayerPart):
    """Flips, shifts, and crops that are resized to the size of the picture."""

    def draw_one(self, key: Key, size: Size) -> Framed:
        step, frame = self.step(key, size), Frame.of(*size)
        if step.name == "Crop" and step.box is not None:
            return Framed(Frame(step.box, size, frame.part), None, (False, False))
        if step.name == "Shift" and step.box is not None:
            rows, columns = (np.arange(side) + by for side, by in zip(size, step.box, strict=False))
            rows[(rows < 0) | (rows >= size[0])] = -1
            columns[(columns < 0) | (columns >= size[1])] = -1
            return Framed(None, IndexMaps(rows, columns, GREY), (False, False))
        return Framed(frame, None, (False, step.name == "Flip"))

    def needed(self, one: Framed) -> bool:
        return one.maps is not None or one.flip[1] or one.frame != Frame.of(*one.size)


@dataclass(frozen=True)
class DeepChanges(DeepLayerPart):
    """Changes of colour and geometry."""

    def draw_one(self, key: Key, size: Size) -> list[Any]:
        step = self.step(key, size)
        if step.box is not None or step.name == "Flip":
            return []
        one = numbers_of(AugmentStep(step.name, step.magnitude), size)
        return [] if one.kind == NOTHING else [one]


@dataclass(frozen=True)
class DeepHoles(DeepLayerPart):
    """Erased squares."""

    def draw_one(self, key: Key, size: Size) -> Patch | None:
        step = self.step(key, size)
        return Patch(*step.box, None) if step.name == "Cutout" and step.box is not None else None


def deep_stages(operation: DeepAutoAugment, keyed: Keyed) -> list[DeepLayerPart]:
    """The stages of all layers."""
    draws = DeepDraws(operation, keyed)
    levels = operation._fill if len(operation._fill) == 3 else operation._fill * 3
    changes = ChangesStage(None, keyed, tuple(map(round, levels)))
    holes = EraseStage(Erase(value=GREY), keyed)
    return [
        part
        for layer in range(operation.depth)
        for part in (
            DeepFrames(draws, layer, FramingStage(())),
            DeepChanges(draws, layer, changes),
            DeepHoles(draws, layer, holes),
        )
    ]
