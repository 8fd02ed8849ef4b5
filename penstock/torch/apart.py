"""Takes a torchvision ``ImageFolder`` apart into source, decode and maps.

Then a cache can stand on the raw bytes, where it is smallest, and operations that
``penstock.image`` has too run there, in threads. Classes are known by name: nothing here imports
torchvision.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock import image
from penstock.operation import Operation
from penstock.pipeline import Pipeline, from_files


class Apart(NamedTuple):
    """What an ImageFolder is made of: files, and maps as (function, field, random, name).

    The last ``folded`` of its ``steps`` transforms are one map.
    """

    source: Pipeline
    maps: list[tuple[Any, ...]]
    steps: int
    folded: int = 1

    def maps_of_last(self, steps: int) -> int:
        """How many maps the last ``steps`` transforms are."""
        return min(steps, 1 + max(0, steps - self.folded))


def take_apart(dataset: Any, native: bool) -> Apart | None:
    """The maps that do what this ImageFolder does, or ``None`` if it is not a plain one."""
    if not _plain_image_folder(dataset):
        return None
    samples = dataset.samples
    source = from_files([path for path, _ in samples], [label for _, label in samples])
    steps = compose(dataset.transform)
    if native and steps is not None:
        operations = translate(steps)
        if operations is not None:
            maps: list[tuple[Any, ...]] = [(image.decode(),), *((one,) for one in operations)]
            return Apart(source, maps, len(steps), len(steps) - len(operations) + 1)
    maps = [(open_image, 0, False, "decode"), *((step, 0) for step in steps or [])]
    return Apart(source, maps, len(steps or []))


def _plain_image_folder(dataset: Any) -> bool:
    kind = type(dataset)
    return (
        kind.__module__ == "torchvision.datasets.folder"
        and kind.__name__ == "ImageFolder"
        and getattr(dataset.loader, "__name__", "") == "default_loader"
        and dataset.target_transform is None
    )


def compose(transform: Any) -> list[Any] | None:
    """The transforms of a Compose, or the one that is there."""
    if transform is None:
        return []
    if type(transform).__name__ == "Compose" and _torchvision(transform):
        return list(transform.transforms)
    return [transform]


def open_image(data: bytes) -> Any:
    """Decode as torchvision's default loader does: to a PIL image in RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as opened:
        return opened.convert("RGB")


def translate(steps: list[Any]) -> list[Operation] | None:
    """The same transforms from ``penstock.image``, or ``None`` if one of them has no twin.

    They must end in a float tensor, as they do in training scripts: ToTensor (or ToImage and
    ToDtype), then perhaps Normalize.
    """
    steps = list(steps)
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    if steps and _is(steps[-1], "Normalize"):
        last = steps.pop()
        mean, std = tuple(map(float, last.mean)), tuple(map(float, last.std))
        if len(mean) != 3 or len(std) != 3:
            return None
    if steps and _is(steps[-1], "ToTensor"):
        steps.pop()
    elif len(steps) >= 2 and _is(steps[-2], "ToImage") and _scales_to_float32(steps[-1]):
        del steps[-2:]
    else:
        return None
    operations: list[Operation] = []
    for step in steps:
        twin = _TWINS.get(type(step).__name__) if _torchvision(step) else None
        try:
            operation = twin(step) if twin is not None else None
        except (AttributeError, TypeError, ValueError):
            operation = None
        if operation is None:
            return None
        operations.append(operation)
    return [*operations, image.normalize(mean, std)]


def _torchvision(step: Any) -> bool:
    return type(step).__module__.startswith("torchvision.transforms")


def _is(step: Any, name: str) -> bool:
    return type(step).__name__ == name and _torchvision(step)


def _scales_to_float32(step: Any) -> bool:
    return _is(step, "ToDtype") and str(step.dtype) == "torch.float32" and bool(step.scale)


def _bilinear(step: Any) -> bool:
    mode = getattr(step.interpolation, "value", step.interpolation)
    return mode in ("bilinear", 2) and getattr(step, "antialias", True) is not False


def _nearest(step: Any) -> bool:
    mode = getattr(step.interpolation, "value", step.interpolation)
    fill = step.fill
    return mode in ("nearest", 0) and fill in (None, 0, {}, [0, 0, 0])


def _square(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    sizes = tuple(int(n) for n in size)
    if len(sizes) == 1:
        return sizes[0], sizes[0]
    return sizes[0], sizes[1]


def _random_resized_crop(step: Any) -> Operation | None:
    if not _bilinear(step):
        return None
    return image.random_resized_crop(
        _square(step.size), scale=tuple(step.scale), ratio=tuple(step.ratio)
    )


def _resize(step: Any) -> Operation | None:
    if not _bilinear(step) or getattr(step, "max_size", None) is not None:
        return None
    size = step.size
    if not isinstance(size, int):
        size = int(size[0]) if len(size) == 1 else tuple(int(n) for n in size)
    return image.resize(size)


def _center_crop(step: Any) -> Operation | None:
    return image.center_crop(_square(step.size))


def _flip(step: Any) -> Operation | None:
    return image.random_flip(p=float(step.p))


def _rand_augment(step: Any) -> Operation | None:
    if not _nearest(step) or step.num_magnitude_bins != 31:
        return None
    return image.rand_augment(step.num_ops, step.magnitude)


def _trivial_augment(step: Any) -> Operation | None:
    return image.trivial_augment() if _nearest(step) and step.num_magnitude_bins == 31 else None


_TWINS: dict[str, Callable[[Any], Operation | None]] = {
    "RandomResizedCrop": _random_resized_crop,
    "Resize": _resize,
    "CenterCrop": _center_crop,
    "RandomHorizontalFlip": _flip,
    "RandAugment": _rand_augment,
    "TrivialAugmentWide": _trivial_augment,
}
