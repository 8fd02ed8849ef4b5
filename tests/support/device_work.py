"""A small random operation, and the same as work of a device: for tests of the cooperation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

import penstock as ps
from penstock.device.work import Allocate, PackedPart
from penstock.keyed import Keyed, Keys
from penstock.operation import Operation, Spec
from penstock.pipeline import Pipeline

SHAPE = (4, 5, 3)


@dataclass(frozen=True)
class Shift(Operation):
    """Adds a random number to each pixel, modulo 256, and turns the rows of a picture."""

    random: ClassVar[bool] = True

    def output(self, spec: Spec) -> Spec:
        return spec

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return int(rng.integers(256)), int(rng.integers(shape[0]))

    def apply(self, value: Any, params: Any) -> Any:
        add, turn = params
        return np.roll(value + np.uint8(add), turn, axis=0)


class ShiftWork:
    """``Shift`` on a device, from the first map of the pipelines below on.

    - ``refuse``: indices of samples that ``pack`` leaves to the CPU.
    - ``before_run``: called by each ``run``; may raise.
    """

    on = None
    field = "image"
    name = "shift"
    exact = True
    tolerance = ""

    def __init__(self, seed: int, above: int = 0) -> None:
        self.above = above
        self.ordinal = 0
        """Maps above ``Shift``."""
        self.seed = seed
        self.refuse: frozenset[int] = frozenset()
        self.before_run: Callable[[], None] | None = None
        self.packed: list[int] = []
        """Indices that were packed for the device."""
        self.runs = 0

    def sizes(self, indices: Sequence[int] | NDArray[np.int64]) -> Sequence[int]:
        return [int(index) * 7919 % 1000 for index in indices]

    def usual_bytes(self) -> int:
        return int(np.prod(SHAPE)) + 8

    def pack(self, keys: Keys, values: Sequence[Any], allocate: Allocate) -> PackedPart | None:
        if not self.refuse.isdisjoint(keys.indices):
            return None
        operation, keyed = Shift(), Keyed(self.seed, f"map/{self.ordinal}")
        drawn = [operation.draw(keyed.at(key), SHAPE) for key in keys]
        head = np.array(drawn, np.int32).reshape(-1).view(np.uint8)
        pixels = np.concatenate([np.asarray(value).reshape(-1) for value in values])
        buffer = allocate(head.nbytes + pixels.nbytes)
        buffer[: head.nbytes] = head
        buffer[head.nbytes :] = pixels
        self.packed += keys.indices
        return PackedPart(buffer, len(keys))

    def rehearsal(
        self, samples: int, allocate: Allocate
    ) -> tuple[PackedPart, tuple[int, ...], torch.dtype] | None:
        buffer = allocate(samples * self.usual_bytes())
        buffer[:] = 0
        return PackedPart(buffer, samples), (samples, *SHAPE), torch.uint8

    def run(self, buffer: torch.Tensor, about: Any, rows: torch.Tensor) -> None:
        self.runs += 1
        if self.before_run is not None:
            self.before_run()
        drawn = buffer[: 8 * about].view(torch.int32).reshape(about, 2)
        pixels = buffer[8 * about :].reshape(about, *SHAPE)
        for row, (add, turn), value in zip(rows, drawn.tolist(), pixels, strict=True):
            row.copy_(torch.roll(value + add, turn, 0))

    def failed(self, about: Any) -> bool:
        return False


def pictures(count: int) -> list[tuple[Any, int]]:
    """Pictures of one size, each with its number."""
    rng = np.random.default_rng(7)
    return [(rng.integers(0, 256, SHAPE, np.uint8), i) for i in range(count)]


def shifted(count: int, batch: int) -> Pipeline:
    """A pipeline whose one map can run on a device."""
    return ps.from_dataset(pictures(count), random=False).map(Shift()).batch(batch)
