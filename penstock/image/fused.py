"""Fused steps: several image operations of a pipeline that run as one.

``Fused`` is decode, crop, resize, flip and normalize. ``FusedAugment`` is an automatic augmentation
and normalize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock import native
from penstock.image import jpeg_index, kernel, partial
from penstock.image.augment import AutoAugment, RandAugment, TrivialAugment, apply_and_normalize
from penstock.image.codec import Decode
from penstock.image.geometry import (
    CenterCrop,
    Frame,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    Resize,
)
from penstock.image.kernel import RegionRequest
from penstock.image.normalizing import Normalize
from penstock.image.pixels import check_image
from penstock.image.program import ImageWork
from penstock.keyed import Key, Keyed, Keys
from penstock.operation import Operation, fits
from penstock.stops.field import Field, On, works_on
from penstock.stops.stop import (
    Joined,
    KernelWork,
    StageFailure,
    Step,
    StepContext,
    Stop,
    Upstream,
    each,
)

_RESIZING = (Resize, RandomResizedCrop)

FILES_PER_CALL = 4
"""Files in one call of the kernel. With four, two threads are a sixth faster than with one: they
release the GIL less often and wait for it less. Eight are no faster."""

Look = Callable[[Any], tuple[Any, tuple[int, int, int]]]
"""Reads the header of a file. Returns the file as requests need it, and height, width, channels."""

DecodeAll = Callable[[Sequence[RegionRequest]], Sequence[object]]
"""Decodes requests; returns an exception for each one that failed, and anything else otherwise."""

Framing = Resize | CenterCrop | RandomCrop | RandomResizedCrop


@dataclass(frozen=True)
class Fused(Joined):
    """Decode, crop, resize, flip and normalize, written as separate maps, in one step.

    ``ordinals`` key the randomness of the maps, so the parameters drawn are those of the single
    operations. Pixels agree within the tolerance stated in ``image.kernel`` or, without the kernel,
    in ``image.partial``. Samples that neither supports run through the single operations.
    """

    decode: Decode | None
    framing: tuple[Framing, ...]
    flip: RandomFlip | None
    normalize: Normalize | None
    ordinals: tuple[int, ...]
    on: On = None

    @property
    def operations(self) -> list[Operation]:
        parts = (self.decode, *self.framing, self.flip, self.normalize)
        return [part for part in parts if part is not None]

    @property
    def note(self) -> str:
        """How the step runs, for ``Pipeline.explain``."""
        if self.decode is None:
            return "in one step: the compiled kernel reads only the pixels it needs"
        if native.kernel_available():
            return "in one step: the compiled kernel decodes only the pixels it needs"
        return (
            "in one step: simplejpeg decodes no rows below the crop (the compiled kernel "
            f"would be faster: {native.why_no_kernel()})"
        )

    @property
    def preferred_group(self) -> int:  # type: ignore[override]
        return FILES_PER_CALL if self.decode is not None else 1

    def step(self, context: StepContext) -> Step:
        keyed = [Keyed(context.seed, f"map/{ordinal}") for ordinal in self.ordinals]
        field = self.operations[0].field
        place = Field(self.name, self.on, field).replace
        table = None if self.normalize is None else self.normalize.table(3)
        dtype = np.dtype(np.uint8 if table is None else np.float32)
        rows = context.rows
        look, decode_all = self._look_and_decoder()

        def request_region(data: Any, key: Key, requests: list[RegionRequest]) -> Any:
            """The array that will hold the result once its request in ``requests`` has run."""
            # Take a row for every sample, used or not: rows are handed out in sample order.
            out = None if rows is None else rows.next(self.on, field)
            try:
                file, shape = look(data)
                if self.decode is not None:
                    self.decode.check_size(shape[0], shape[1])
                frame, flip = self._draw(shape, key, keyed)
            except kernel.Unsupported:
                return run_single(data, key)
            wanted = (*frame.size, 3) if table is None else (3, *frame.size)
            if out is None or not fits(out, wanted, dtype):
                out = np.empty(wanted, dtype)
            corner = frame.part[:2]
            requests.append(RegionRequest(file, frame.box, out, flip, table, frame.full, corner))
            return out

        def run_single(data: Any, key: Key) -> Any:
            return self._one_by_one(data, key, keyed)

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            inputs, samples = upstream(keys), []
            requests: list[RegionRequest] = []
            owners: list[tuple[int, Key]] = []
            for number, key in enumerate(keys):
                try:
                    samples.append(
                        place(
                            inputs[number],
                            lambda data, key: request_region(data, key, requests),
                            key,
                        )
                    )
                except Exception as error:
                    raise StageFailure(self.name, key.index) from error
                if len(requests) > len(owners):
                    owners.append((number, key))
            try:
                outcomes = decode_all(requests)
            except Exception as error:  # the runner finds the sample by running them one by one
                raise StageFailure(self.name, keys.indices[0]) from error
            for (number, key), outcome in zip(owners, outcomes, strict=True):
                if not isinstance(outcome, Exception):
                    continue
                try:
                    if not isinstance(outcome, kernel.Unsupported):
                        raise outcome
                    samples[number] = place(inputs[number], run_single, key)
                except Exception as error:
                    raise StageFailure(self.name, key.index) from error
            return samples

        return step

    def for_kernel(self, seed: int, field: str | int | None) -> KernelWork | None:
        if not works_on(self.on, self.operations[0].field, field) or not native.kernel_available():
            return None
        keys = iter([Keyed(seed, f"map/{ordinal}").key for ordinal in self.ordinals])
        decode, flip, normalize = self.decode, self.flip, self.normalize
        if decode is not None:
            next(keys)
        framing = [operation.for_kernel(next(keys)) for operation in self.framing]
        if None in framing:
            return None
        return ImageWork(
            decodes=decode is not None,
            most_pixels=0 if decode is None else decode.most_pixels,
            framing=tuple(framed for framed in framing if framed is not None),
            flip=None if flip is None else (flip.p, next(keys)),
            table=None if normalize is None else normalize.table(3),
            indexed=decode is not None and self._crops,
        )

    @property
    def _crops(self) -> bool:
        # Without a crop every row is read anyway, so the JPEG index would save nothing.
        return not all(isinstance(operation, Resize) for operation in self.framing)

    def _look_and_decoder(self) -> tuple[Look, DecodeAll]:
        if self.decode is None:
            return lambda image: (image, _array_size(image)), _sequentially(kernel.resize)
        if not native.kernel_available():
            return _read_jpeg, _sequentially(partial.region)
        regions = jpeg_index.regions if self._crops else kernel.regions
        return lambda data: (data, kernel.size(data)), regions

    def _draw(self, size: tuple[int, int, int], key: Key, keyed: list[Keyed]) -> tuple[Frame, bool]:
        """The frame and the flip of one sample, drawn as the single operations draw them."""
        frame = Frame.of(size[0], size[1])
        first = 0 if self.decode is None else 1
        for number, operation in enumerate(self.framing, start=first):
            params: Any = None
            if operation.random:
                params = operation.draw(keyed[number].at(key), (*frame.size, 3))
            next_frame = operation.frame(frame, params)
            if next_frame is None:
                raise kernel.Unsupported(f"{operation.name} pads, or resizes a second time")
            frame = next_frame
        if self.flip is None:
            return frame, False
        return frame, self.flip.draw(keyed[len(self.framing) + first].at(key), (*frame.size, 3))

    def _one_by_one(self, value: Any, key: Key, keyed: list[Keyed]) -> Any:
        for operation, drawn in zip(self.operations, keyed, strict=True):
            params = operation.draw(drawn.at(key), value.shape) if operation.random else None
            value = operation.apply(value, params)
        return value


def _read_jpeg(data: Any) -> tuple[partial.JpegFile, tuple[int, int, int]]:
    file = partial.read_file(data)
    return file, file.size


def _sequentially(decode_one: Callable[..., None]) -> DecodeAll:
    """A ``DecodeAll`` that runs the requests one after the other."""

    def decode_all(requests: Sequence[RegionRequest]) -> list[Exception | None]:
        outcomes: list[Exception | None] = []
        for request in requests:
            try:
                decode_one(*request)
            except Exception as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
        return outcomes

    return decode_all


def fuse(stops: tuple[Stop, ...]) -> tuple[Stop, ...]:
    """Replace each sequence of maps that can run as one step by a ``Fused`` stop."""
    out: list[Stop] = []
    at = 0
    while at < len(stops):
        fused = _fuse_first(stops[at:])
        out.append(stops[at] if fused is None else fused)
        at += 1 if fused is None else len(fused.operations)
    return tuple(out)


def _fuse_first(stops: tuple[Stop, ...]) -> Fused | None:
    """Fuse as many of the first stops as possible; ``None`` if they cannot be fused.

    The order is: decode, one or more crops and resizes, optionally a flip, optionally normalize.
    With the kernel, decode is optional too.
    """
    on = getattr(stops[0], "on", None)
    parts: list[Any] = []
    for stop in stops:
        if getattr(stop, "on", None) != on:
            break
        parts.append(getattr(stop, "function", None))
    decode = None
    if parts and isinstance(parts[0], Decode):
        decode = parts.pop(0)
        if decode.mode != "rgb":
            return None
    elif not native.kernel_available():
        return None
    framing: list[Framing] = []
    while parts and isinstance(parts[0], Framing) and not _resized_again(framing, parts[0]):
        framing.append(parts.pop(0))
    if not framing or (decode is None and not any(isinstance(f, _RESIZING) for f in framing)):
        return None  # crops of a decoded image cost next to nothing by themselves
    flip = normalize = None
    if parts and isinstance(parts[0], RandomFlip) and not parts[0].vertical:
        flip = parts.pop(0)
    if parts and isinstance(parts[0], Normalize) and parts[0].layout == "chw":
        normalize = parts.pop(0)
    count = (decode is not None) + len(framing) + (flip is not None) + (normalize is not None)
    ordinals = tuple(getattr(stop, "ordinal", 0) for stop in stops[:count])
    return Fused(decode, tuple(framing), flip, normalize, ordinals, on)


def _resized_again(framing: list[Framing], following: Framing) -> bool:
    return isinstance(following, _RESIZING) and any(isinstance(f, _RESIZING) for f in framing)


def _array_size(image: Any) -> tuple[int, int, int]:
    """The shape of an image that the kernel can resize; raises ``Unsupported`` for others."""
    if (
        type(image) is not np.ndarray
        or image.dtype != np.uint8
        or image.ndim != 3
        or image.shape[2] != 3
        or not image.flags.c_contiguous
        or not image.size
        or max(image.shape) > kernel.LONGEST_SIDE
    ):
        raise kernel.Unsupported("not a contiguous uint8 image of three channels")
    height, width, channels = image.shape
    return height, width, channels


Augment = RandAugment | AutoAugment | TrivialAugment


@dataclass(frozen=True)
class FusedAugment(Joined):
    """An automatic augmentation and normalize in one step.

    The augmentation's last lookup table joins normalize's table: the same bits, one pass less.
    """

    augment: Augment
    normalize: Normalize
    ordinal: int
    on: On = None

    @property
    def operations(self) -> list[Operation]:
        return [self.augment, self.normalize]

    @property
    def note(self) -> str:
        """How the step runs, for ``Pipeline.explain``."""
        return "in one step: every level is looked up once for both"

    def for_kernel(self, seed: int, field: str | int | None) -> KernelWork | None:
        if not works_on(self.on, self.augment.field, field) or self.normalize.layout != "chw":
            return None
        augment = self.augment.for_kernel(Keyed(seed, f"map/{self.ordinal}").key)
        if augment is None:
            return None
        return ImageWork(augment=augment, table=self.normalize.table(3))

    def step(self, context: StepContext) -> Step:
        keyed = Keyed(context.seed, f"map/{self.ordinal}")
        place = Field(self.name, self.on, self.augment.field).replace
        augment, normalize, rows = self.augment, self.normalize, context.rows
        fill: Any = augment.fill
        smooth = augment.interpolation == "bilinear"
        name = augment.name

        def call(value: Any, key: Key) -> Any:
            out = None if rows is None else rows.next(self.on, augment.field)
            params = augment.draw(keyed.at(key), value.shape)
            image = check_image(name, value)
            return apply_and_normalize(image, params, fill, smooth, normalize, out)

        return each(self.name, lambda sample, key: place(sample, call, key))


def fuse_augment(stops: tuple[Stop, ...]) -> tuple[Stop, ...]:
    """Replace each augmentation right above normalize by a ``FusedAugment`` stop."""
    out: list[Stop] = []
    for stop in stops:
        above: Any = out[-1] if out else None
        augment, normalize = (getattr(each_stop, "function", None) for each_stop in (above, stop))
        same_field = getattr(above, "on", None) == getattr(stop, "on", None)
        if isinstance(augment, Augment) and isinstance(normalize, Normalize) and same_field:
            out[-1] = FusedAugment(augment, normalize, above.ordinal, above.on)
        else:
            out.append(stop)
    return tuple(out)
