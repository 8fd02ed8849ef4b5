"""Operations of ``penstock.image`` in place of torchvision's transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock import image
from penstock.operation import Operation
from penstock.torch.image_folder import is_transform


def translate(transforms: Sequence[Any]) -> list[Operation] | None:
    """A decode and equivalent operations; ``None`` if a transform has no equivalent.

    The transforms must end in a float tensor, as they do in training scripts: ToTensor (or ToImage
    and ToDtype), then optionally Normalize. These become one operation, the last one returned.
    """
    transforms = list(transforms)
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    if transforms and is_transform(transforms[-1], "Normalize"):
        normalize = transforms.pop()
        mean, std = _levels(normalize.mean), _levels(normalize.std)
        if len(mean) != 3 or len(std) != 3:
            return None
    if transforms and is_transform(transforms[-1], "ToTensor"):
        transforms.pop()
    elif (
        len(transforms) >= 2
        and is_transform(transforms[-2], "ToImage")
        and _scales_to_float32(transforms[-1])
    ):
        del transforms[-2:]
    else:
        return None
    operations: list[Operation] = []
    for transform in transforms:
        equivalent = _EQUIVALENTS.get(type(transform).__name__)
        if equivalent is None or not is_transform(transform):
            return None
        try:
            operation = equivalent(transform)
        except (AttributeError, TypeError, ValueError):  # unknown version, or unusual arguments
            return None
        if operation is None:
            return None
        operations.append(operation)
    return [image.decode(), *operations, image.normalize(mean, std)]


def _scales_to_float32(transform: Any) -> bool:
    return (
        is_transform(transform, "ToDtype")
        and str(transform.dtype) == "torch.float32"
        and bool(transform.scale)
    )


def _interpolation(transform: Any) -> Any:
    return getattr(transform.interpolation, "value", transform.interpolation)


def _is_bilinear(transform: Any) -> bool:
    antialias = getattr(transform, "antialias", True)
    return _interpolation(transform) in ("bilinear", 2) and antialias is not False


def _is_nearest_on_black(transform: Any) -> bool:
    fill = transform.fill
    return _interpolation(transform) in ("nearest", 0) and fill in (None, 0, {}, [0, 0, 0])


def _height_and_width(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    sizes = tuple(int(n) for n in size)
    return sizes[0], sizes[0] if len(sizes) == 1 else sizes[1]


def _random_resized_crop(transform: Any) -> Operation | None:
    if not _is_bilinear(transform):
        return None
    size = _height_and_width(transform.size)
    scale, ratio = tuple(transform.scale), tuple(transform.ratio)
    return image.random_resized_crop(size, scale=scale, ratio=ratio)


def _resize(transform: Any) -> Operation | None:
    if not _is_bilinear(transform) or getattr(transform, "max_size", None) is not None:
        return None
    size = transform.size
    if not isinstance(size, int):
        size = int(size[0]) if len(size) == 1 else tuple(int(n) for n in size)
    return image.resize(size)


def _center_crop(transform: Any) -> Operation | None:
    return image.center_crop(_height_and_width(transform.size))


def _random_flip(transform: Any) -> Operation | None:
    return image.random_flip(p=float(transform.p))


def _rand_augment(transform: Any) -> Operation | None:
    if not _is_nearest_on_black(transform) or transform.num_magnitude_bins != 31:
        return None
    return image.rand_augment(transform.num_ops, transform.magnitude)


def _trivial_augment(transform: Any) -> Operation | None:
    if not _is_nearest_on_black(transform) or transform.num_magnitude_bins != 31:
        return None
    return image.trivial_augment()


_EQUIVALENTS: dict[str, Callable[[Any], Operation | None]] = {
    "RandomResizedCrop": _random_resized_crop,
    "Resize": _resize,
    "CenterCrop": _center_crop,
    "RandomHorizontalFlip": _random_flip,
    "RandAugment": _rand_augment,
    "TrivialAugmentWide": _trivial_augment,
}


def _levels(given: Any) -> tuple[float, ...]:
    """The levels of all channels: a list, an array, a tensor, or one number for all channels."""
    levels = np.asarray(given, float)
    return tuple(levels.ravel().tolist()) if levels.ndim else (levels.item(),) * 3
