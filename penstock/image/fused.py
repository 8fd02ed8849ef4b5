"""The fused stop: crop, resize, flip and normalize in one step, with decode where it is above."""

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
from penstock.keyed import Key, Keyed, Keys
from penstock.operation import Operation, fits
from penstock.stops.field import Field, On
from penstock.stops.stop import Joined, Site, StageFailure, Step, Stop, Upstream, each

_RESIZING = (Resize, RandomResizedCrop)

FILES_PER_CALL = 4
"""So many files the kernel is given at a time: two threads are a sixth faster than with one at a
time, because they give up the GIL less often and wait for it less. Eight bring no more."""

TakeAll = Callable[[Sequence[RegionRequest]], Sequence[object]]
"""Fulfils requests, and says of each what it could not: an exception, or something else."""

Framing = Resize | CenterCrop | RandomCrop | RandomResizedCrop


@dataclass(frozen=True)
class Fused(Joined):
    """Operations that were written as maps of their own, with the ordinals that key them.

    What is drawn is the same as one by one; pixels agree within the tolerance that
    ``image.kernel`` states, and ``image.partial``, which serves where there is no kernel. What
    they cannot do goes the way of the single operations.
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
    def how(self) -> str:
        """Who does it, for people."""
        if self.decode is None:
            return "in one step: the compiled kernel takes only what is wanted"
        if native.kernel_available():
            return "in one step: the compiled kernel decodes only what is wanted"
        return (
            "in one step: simplejpeg decodes no row below what is wanted (the compiled kernel "
            f"would do better: {native.why_no_kernel()})"
        )

    @property
    def together(self) -> int:  # type: ignore[override]
        return FILES_PER_CALL if self.decode is not None else 1

    def step(self, site: Site) -> Step:
        keyed = [Keyed(site.seed, f"map/{ordinal}") for ordinal in self.ordinals]
        field = self.operations[0].field
        place = Field(self.name, self.on, field).replace
        table = None if self.normalize is None else self.normalize.table(3)
        dtype = np.dtype(np.uint8 if table is None else np.float32)
        rows = site.rows
        size, take = self._functions()

        def ask(data: Any, key: Key, requests: list[RegionRequest]) -> Any:
            """The array that will be what is wanted, once its request is fulfilled."""
            # Asked for whatever becomes of this sample: rows are given one after the other.
            out = None if rows is None else rows.next(self.on, field)
            try:
                frame, flip = self._draw(size(data), key, keyed)
            except kernel.Unsupported:
                return single(data, key)
            shape = (*frame.size, 3) if table is None else (3, *frame.size)
            if out is None or not fits(out, shape, dtype):
                out = np.empty(shape, dtype)
            corner = frame.part[:2]
            requests.append(RegionRequest(data, frame.box, out, flip, table, frame.full, corner))
            return out

        def single(data: Any, key: Key) -> Any:
            return self._one_by_one(data, key, keyed)

        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            given, made = upstream(keys), []
            requests: list[RegionRequest] = []
            owners: list[tuple[int, Key]] = []
            for number, key in enumerate(keys):
                try:
                    made.append(
                        place(given[number], lambda data, key: ask(data, key, requests), key)
                    )
                except Exception as error:
                    raise StageFailure(self.name, key.index) from error
                if len(requests) > len(owners):
                    owners.append((number, key))
            try:
                outcomes = take(requests)
            except Exception as error:  # whose it was is found one by one
                raise StageFailure(self.name, keys.indices[0]) from error
            for (number, key), failed in zip(owners, outcomes, strict=True):
                if not isinstance(failed, Exception):
                    continue
                try:
                    if not isinstance(failed, kernel.Unsupported):
                        raise failed
                    made[number] = place(given[number], single, key)
                except Exception as error:
                    raise StageFailure(self.name, key.index) from error
            return made

        return step

    def _functions(self) -> tuple[Callable[[Any], tuple[int, int, int]], TakeAll]:
        """What tells the size of a picture, and what takes parts of some."""
        if self.decode is None:
            return _array_size, _sequentially(kernel.resize)
        if not native.kernel_available():
            return partial.size, _sequentially(partial.region)
        whole = all(isinstance(one, Resize) for one in self.framing)
        return kernel.size, kernel.regions if whole else jpeg_index.regions

    def _draw(self, size: tuple[int, int, int], key: Key, keyed: list[Keyed]) -> tuple[Frame, bool]:
        """What is wanted of a picture of this size, drawn as the operations would one by one."""
        frame = Frame.of(size[0], size[1])
        first = 0 if self.decode is None else 1
        for number, operation in enumerate(self.framing, start=first):
            params: Any = None
            if operation.random:
                params = operation.draw(keyed[number].at(key), (*frame.size, 3))
            made = operation.frame(frame, params)
            if made is None:
                raise kernel.Unsupported(f"{operation.name} pads, or resizes a second time")
            frame = made
        if self.flip is None:
            return frame, False
        return frame, self.flip.draw(keyed[len(self.framing) + first].at(key), (*frame.size, 3))

    def _one_by_one(self, value: Any, key: Key, keyed: list[Keyed]) -> Any:
        for operation, drawn in zip(self.operations, keyed, strict=True):
            params = operation.draw(drawn.at(key), value.shape) if operation.random else None
            value = operation.apply(value, params)
        return value


def _sequentially(take: Callable[..., None]) -> TakeAll:
    def take_all(requests: Sequence[RegionRequest]) -> list[Exception | None]:
        failed: list[Exception | None] = []
        for request in requests:
            try:
                take(*request)
            except Exception as error:
                failed.append(error)
            else:
                failed.append(None)
        return failed

    return take_all


def fuse(stops: tuple[Stop, ...]) -> tuple[Stop, ...]:
    """Replace runs of maps that can be done in one step."""
    out: list[Stop] = []
    at = 0
    while at < len(stops):
        found = _run_at(stops[at:])
        out.append(stops[at] if found is None else found)
        at += 1 if found is None else len(found.operations)
    return tuple(out)


def _run_at(stops: tuple[Stop, ...]) -> Fused | None:
    """The longest run from here: what frames, then perhaps a flip, perhaps normalize.

    Above it stands decode; without it only the kernel can do the rest in one step.
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
        return None  # cutting alone costs next to nothing
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
    """Of an image that the kernel can resize: the others go one by one."""
    if (
        type(image) is not np.ndarray
        or image.dtype != np.uint8
        or image.ndim != 3
        or image.shape[2] != 3
        or not image.flags.c_contiguous
        or not image.size
        or max(image.shape) > kernel.LONGEST_SIDE
    ):
        raise kernel.Unsupported("only images of three channels")
    height, width, channels = image.shape
    return height, width, channels


Augment = RandAugment | AutoAugment | TrivialAugment


@dataclass(frozen=True)
class FusedAugment(Joined):
    """The last table of the one goes into the table of the other: the same bits, a pass less."""

    augment: Augment
    normalize: Normalize
    ordinal: int
    on: On = None

    @property
    def operations(self) -> list[Operation]:
        return [self.augment, self.normalize]

    @property
    def how(self) -> str:
        """What is gained, for people."""
        return "in one step: every level is looked up once for both"

    def step(self, site: Site) -> Step:
        keyed = Keyed(site.seed, f"map/{self.ordinal}")
        place = Field(self.name, self.on, self.augment.field).replace
        augment, normalize, rows = self.augment, self.normalize, site.rows
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
    """Replace each augmentation right above normalize."""
    out: list[Stop] = []
    for stop in stops:
        above: Any = out[-1] if out else None
        augment, normalize = (getattr(one, "function", None) for one in (above, stop))
        alike = getattr(above, "on", None) == getattr(stop, "on", None)
        if isinstance(augment, Augment) and isinstance(normalize, Normalize) and alike:
            out[-1] = FusedAugment(augment, normalize, above.ordinal, above.on)
        else:
            out.append(stop)
    return tuple(out)
