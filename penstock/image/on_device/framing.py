"""Crops, resizes and flips of a tiny-batch, with the compiled kernel's filter and its bits.

The filter truncates each product, so taps are gathered as integers; a matrix product would round
differently. Positions and weights of the taps are computed on the host, as in ``native/filter.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.image.geometry import (
    Box,
    CenterCrop,
    Frame,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    Resize,
)
from penstock.image.kernel import LONGEST_SIDE
from penstock.image.on_device.parameters import Arrays, LeftToCpu
from penstock.keyed import Key, Keyed

FRAMINGS = (Resize, CenterCrop, RandomCrop, RandomResizedCrop)
RESIZING = (Resize, RandomResizedCrop)

ONE = 1 << 15
"""The sum of the weights of an output pixel."""

FEW_TAPS = 8
"""With at most this number of taps the kernel truncates each product to 7 fractional bits."""

Size = tuple[int, int]
"""Height and width."""


class Axis(NamedTuple):
    """The taps of one direction, for all pictures.

    ``first``: int32 (n, count), the first pixel of the picture that each output pixel needs, or -1
    for one that is filled. ``weights``: int32 (n, count, taps). ``taps``: int32 (n,); further
    weights are 0. ``start``, ``stop``: int64 (n,), the pixels of the picture that are needed.
    """

    first: NDArray[np.int32]
    weights: NDArray[np.int32]
    taps: NDArray[np.int32]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


def resizing_axis(given: NDArray[np.int64]) -> Axis:
    """The taps of a resize. ``given``: int64 (n, 6), start and length of the box, the length that
    it is resized to, start and length of the part that is kept, and whether it is flipped.

    The compiled kernel computes them, with the function that it resizes pictures with.
    """
    columns, taps, first, weights, about = native.kernel().taps(given)
    count = len(given)
    own = np.frombuffer(about, np.int64).reshape(count, 3)
    return Axis(
        np.frombuffer(first, np.int32).reshape(count, columns),
        np.frombuffer(weights, np.int32).reshape(count, columns, taps),
        own[:, 0].astype(np.int32),
        own[:, 1],
        own[:, 2],
    )


def copying_axis(maps: Sequence[NDArray[np.int64]]) -> Axis:
    """The taps of a copy. ``maps``: of each picture, the pixel that each output pixel copies."""
    count = max(map(len, maps))
    first = np.stack([np.pad(places, (0, count - len(places)), mode="edge") for places in maps])
    kept = first >= 0
    start = np.where(kept, first, LONGEST_SIDE).min(axis=1)
    stop = first.max(axis=1) + 1
    nothing = ~kept.any(axis=1)
    start[nothing], stop[nothing] = 0, 1
    weights = np.full((*first.shape, 1), ONE, np.int32)
    return Axis(first.astype(np.int32), weights, np.ones(len(maps), np.int32), start, stop)


@dataclass
class IndexMaps:
    """The source of each row and column of one picture, while crops and flips are applied."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    fill: tuple[int, ...] | None = None

    def pad(self, sides: tuple[int, int, int, int], mode: str, fill: tuple[int, ...]) -> None:
        left, top, right, bottom = sides
        if not (left or top or right or bottom):
            return
        if mode == "constant":
            if self.fill not in (None, fill):
                raise LeftToCpu("two paddings have different colours")
            self.fill = fill
            options: dict[str, Any] = {"mode": "constant", "constant_values": -1}
        else:
            options = {"mode": mode}
            if mode == "reflect" and (
                max(top, bottom) >= len(self.rows) or max(left, right) >= len(self.columns)
            ):
                raise LeftToCpu("the padding is wider than the picture that it mirrors")
        self.rows = np.pad(self.rows, (top, bottom), **options)
        self.columns = np.pad(self.columns, (left, right), **options)

    def cut(self, box: Box) -> None:
        top, left, height, width = box
        self.rows = self.rows[top : top + height]
        self.columns = self.columns[left : left + width]


def _levels(fill: Sequence[float]) -> tuple[int, ...]:
    return tuple(map(round, fill if len(fill) == 3 else tuple(fill) * 3))


class Framed(NamedTuple):
    """One picture: a frame or a copy, and whether it is flipped (down, across)."""

    frame: Frame | None
    maps: IndexMaps | None
    flip: tuple[bool, bool]

    @property
    def size(self) -> Size:
        if self.frame is not None:
            return self.frame.size
        assert self.maps is not None
        return len(self.maps.rows), len(self.maps.columns)


@dataclass(frozen=True)
class FramingStage:
    """Crops and at most one resize, then flips: one gather of taps for the whole tiny-batch.

    ``parts``: the operations, each with the generators of its stage.
    """

    parts: tuple[tuple[Any, Keyed], ...]
    frames: bool = field(default=True, init=False)

    def draw_one(self, key: Key, size: Size) -> Framed:
        """Draw the parameters of one sample. Raises ``LeftToCpu``."""
        frame = Frame.of(*size)
        flip = [False, False]
        for operation, keyed in self.parts:
            params: Any = None
            if operation.random:
                params = operation.draw(keyed.at(key), (*frame.size, 3))
            if isinstance(operation, RandomFlip):
                flip[0 if operation.vertical else 1] ^= params
                continue
            following = operation.frame(frame, params)
            if following is None:
                if any(isinstance(each, RESIZING) for each, _ in self.parts):
                    raise LeftToCpu(
                        f"{operation.name} pads a picture of {size[0]} x {size[1]} that is resized "
                        "too"
                    )
                return self._copied(key, size)
            frame = following
        if min(frame.size) < 1 or max(*size, *frame.full) > LONGEST_SIDE:
            raise LeftToCpu(f"the kernel does not resize {size} to {frame.full}")
        return Framed(frame, None, (flip[0], flip[1]))

    def of_kernel(self, drawn: Any, size: Size) -> Framed | None:
        """The same, of what the compiled kernel has drawn; ``None``: ``draw_one`` must draw it."""
        box, full, part, flip, _ = drawn
        if max(*size, *full) > LONGEST_SIDE:
            return None
        return Framed(Frame(Box(*box), full, Box(*part)), None, (False, flip))

    def _copied(self, key: Key, size: Size) -> Framed:
        copy = IndexMaps(np.arange(size[0]), np.arange(size[1]))
        for operation, keyed in self.parts:
            shape = (len(copy.rows), len(copy.columns), 3)
            params: Any = operation.draw(keyed.at(key), shape) if operation.random else None
            if isinstance(operation, RandomFlip):
                if params and operation.vertical:
                    copy.rows = copy.rows[::-1]
                elif params:
                    copy.columns = copy.columns[::-1]
            elif isinstance(operation, RandomCrop):
                fill = _levels(operation._fill)
                copy.pad(params.padding, operation.padding_mode, fill)
                copy.cut(params.box)
            else:
                height, width = operation._pair
                down, across = max(0, height - shape[0]), max(0, width - shape[1])
                sides = (across // 2, down // 2, across - across // 2, down - down // 2)
                copy.pad(sides, "constant", (0, 0, 0))
                top, left = operation._corner(len(copy.rows), len(copy.columns))
                copy.cut(Box(top, left, height, width))
        return Framed(None, copy, (False, False))

    def pack(self, drawn: Sequence[Framed], sizes: Sequence[Size]) -> dict[str, NDArray[Any]]:
        """The arrays of all samples."""
        count = len(drawn)
        down, across = self._axes(drawn)
        fill = np.zeros((count, 3), np.int32)
        for number, one in enumerate(drawn):
            if one.maps is not None and one.maps.fill is not None:
                fill[number] = one.maps.fill
        out = np.array([one.size for one in drawn], np.int64).reshape(count, 2)
        return {
            "down_first": down.first,
            "down_weights": down.weights,
            "across_first": across.first,
            "across_weights": across.weights,
            "taps": np.stack([down.taps, across.taps], axis=1),
            "fill": fill,
            "out": np.concatenate([offsets_of(out)[:, None], out], axis=1),
            "region": np.stack(
                [down.start, across.start, down.stop - down.start, across.stop - across.start],
                axis=1,
            ).astype(np.int32),
        }

    def _axes(self, drawn: Sequence[Framed]) -> tuple[Axis, Axis]:
        framed = [number for number, one in enumerate(drawn) if one.frame is not None]
        copied = [number for number, one in enumerate(drawn) if one.maps is not None]
        # A column for each direction of box, full, part and flip, as in ``Framed``.
        table = np.array(
            [
                (*one.frame.box, *one.frame.full, *one.frame.part, *one.flip)
                for one in drawn
                if one.frame is not None
            ],
            np.int64,
        )
        axes: list[Axis] = []
        for axis in (0, 1):
            parts = []
            if framed:
                parts.append(resizing_axis(np.ascontiguousarray(table[:, axis::2])))
            if copied:
                copies = [drawn[number].maps for number in copied]
                parts.append(
                    copying_axis([c.columns if axis else c.rows for c in copies if c is not None])
                )
            axes.append(
                parts[0] if len(parts) == 1 else _joined(parts[0], parts[1], framed + copied)
            )
        return axes[0], axes[1]

    def run(self, backend: Any, pictures: Any, arrays: Arrays, host: Arrays, final: Any) -> Any:
        return backend.frame(pictures, arrays, host, final)


def _joined(first: Axis, second: Axis, order: list[int]) -> Axis:
    """Both axes as one, with picture ``order[i]`` at place ``i`` of the two together."""
    count = max(first.first.shape[1], second.first.shape[1])
    taps = max(first.weights.shape[2], second.weights.shape[2])
    back = np.argsort(order)

    def padded(array: NDArray[Any], *lengths: int) -> NDArray[Any]:
        pads = [(0, 0)] + [
            (0, want - have) for want, have in zip(lengths, array.shape[1:], strict=True)
        ]
        return np.pad(array, pads)

    return Axis(
        np.concatenate([padded(part.first, count) for part in (first, second)])[back],
        np.concatenate([padded(part.weights, count, taps) for part in (first, second)])[back],
        np.concatenate([first.taps, second.taps])[back],
        np.concatenate([first.start, second.start])[back],
        np.concatenate([first.stop, second.stop])[back],
    )


def offsets_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The offsets of pictures of these sizes (n, 2), packed one after the other."""
    offsets = np.zeros(len(sizes), np.int64)
    offsets[1:] = (sizes[:-1, 0] * sizes[:-1, 1] * 3).cumsum()
    return offsets


def frames_of(drawn: Sequence[Framed]) -> NDArray[np.int32]:
    """``DeviceParameters.frames``."""
    rows = []
    for one in drawn:
        if one.frame is not None:
            rows.append((*one.frame.box, *one.frame.full))
        else:
            rows.append((0, 0, *one.size, *one.size))
    return np.array(rows, np.int32).reshape(len(drawn), 6)
