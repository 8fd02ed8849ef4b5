"""The fused stop: decode, crop, flip and normalize in one step that decodes only the crop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.image import kernel
from penstock.image.codec import Decode
from penstock.image.geometry import RandomFlip, RandomResizedCrop
from penstock.image.normalizing import Normalize
from penstock.operation import Operation, fits
from penstock.random import Key, Keyed
from penstock.stops.field import Field, On
from penstock.stops.stop import Fields, Site, Step, Stop, each


@dataclass(frozen=True)
class Fused(Stop):
    """Operations that were written as maps of their own, with the ordinals that key them.

    What is drawn is the same as one by one; pixels agree within the tolerance that
    ``image.kernel`` states. What the kernel cannot do goes the way of the single operations.
    """

    decode: Decode
    crop: RandomResizedCrop
    flip: RandomFlip | None
    normalize: Normalize | None
    ordinals: tuple[int, ...]
    on: On = None

    @property
    def operations(self) -> list[Operation]:
        parts = (self.decode, self.crop, self.flip, self.normalize)
        return [part for part in parts if part is not None]

    @property
    def name(self) -> str:
        return "+".join(operation.name for operation in self.operations)

    def output(self, fields: Fields) -> Fields:
        raise TypeError("fusing comes after checking")

    def fingerprint(self) -> str | None:
        raise TypeError("pipelines are known by what was written, not by how it runs")

    def step(self, site: Site) -> Step:
        keyed = [Keyed(site.seed, f"map/{ordinal}") for ordinal in self.ordinals]
        place = Field(self.name, self.on, self.decode.field).replace
        height, width = self.crop.size  # type: ignore[misc]
        table = None if self.normalize is None else self.normalize.table(3)

        rows = site.rows
        shape = (height, width, 3) if table is None else (3, height, width)
        dtype = np.dtype(np.uint8 if table is None else np.float32)

        def call(data: Any, key: Key) -> Any:
            # Asked for whatever becomes of this sample: rows are given one after the other.
            out = None if rows is None else rows.next(self.on, self.decode.field)
            try:
                size = kernel.size(data)
                box = self.crop.draw(keyed[1].at(key), size)
                flip = self.flip is not None and self.flip.draw(keyed[2].at(key), size)
                if out is None or not fits(out, shape, dtype):
                    out = np.empty(shape, dtype)
                kernel.region(data, box, out, flip=flip, table=table)
                return out
            except kernel.Unsupported:
                return self._one_by_one(data, key, keyed)

        return each(self.name, lambda sample, key: place(sample, call, key))

    def _one_by_one(self, value: Any, key: Key, keyed: list[Keyed]) -> Any:
        for operation, drawn in zip(self.operations, keyed, strict=True):
            params = operation.draw(drawn.at(key), value.shape) if operation.random else None
            value = operation.apply(value, params)
        return value


def fuse(stops: tuple[Stop, ...]) -> tuple[Stop, ...]:
    """Replace runs of maps that can be done in one step, where the kernel is there to do it."""
    if not kernel.available():
        return stops
    out: list[Stop] = []
    at = 0
    while at < len(stops):
        found = _run_at(stops, at)
        out.append(stops[at] if found is None else found)
        at += 1 if found is None else len(found.operations)
    return tuple(out)


def _run_at(stops: tuple[Stop, ...], at: int) -> Fused | None:
    """The longest run from here: decode and crop, then perhaps a flip, then perhaps normalize."""

    def operation(place: int) -> Any:
        return getattr(stops[place], "function", None) if place < len(stops) else None

    on = getattr(stops[at], "on", None)
    parts: list[Any] = [operation(at), operation(at + 1)]
    decode, crop = parts
    if not (isinstance(decode, Decode) and decode.mode == "rgb"):
        return None
    if not isinstance(crop, RandomResizedCrop):
        return None
    flip = operation(at + 2)
    if not (isinstance(flip, RandomFlip) and not flip.vertical):
        flip = None
    else:
        parts.append(flip)
    normalize = operation(at + len(parts))
    if not (isinstance(normalize, Normalize) and normalize.layout == "chw"):
        normalize = None
    else:
        parts.append(normalize)
    run = stops[at : at + len(parts)]
    if any(getattr(stop, "on", None) != on for stop in run):
        return None
    ordinals = tuple(getattr(stop, "ordinal", 0) for stop in run)
    return Fused(decode, crop, flip, normalize, ordinals, on)
