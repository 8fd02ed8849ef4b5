"""torchvision's ImageFolder, taken apart into files, a decode and one map for each transform.

Then a cache can hold the encoded files, which are small, and transforms that ``penstock.image``
also has run there, in threads. Classes are recognised by name: this module imports neither torch
nor torchvision.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.operation import Operation
from penstock.pipeline import Pipeline
from penstock.source import FilesSource
from penstock.stops.field import On


class MapArguments(NamedTuple):
    """The arguments of one ``Pipeline.map``."""

    function: Operation | Callable[..., Any]
    on: On = None
    random: bool | None = None
    name: str | None = None


class ImageFolderParts(NamedTuple):
    """An ImageFolder as a source of files, and the maps that do the same as the dataset.

    ``transforms``: how many transforms the dataset has. The last ``merged`` of them are one map.
    """

    source: Pipeline
    maps: list[MapArguments]
    transforms: int
    merged: int = 1

    def maps_of_last(self, transforms: int) -> int:
        """How many of the maps stand for the last ``transforms`` transforms."""
        return min(transforms, 1 + max(0, transforms - self.merged))


def take_apart(dataset: Any, native: bool) -> ImageFolderParts | None:
    """The parts of a plain ImageFolder; ``None`` for any other dataset."""
    if not _is_plain_image_folder(dataset):
        return None
    samples = dataset.samples
    # A generator: the source keeps names and folders, and the dataset keeps its own paths.
    source = Pipeline(FilesSource((path for path, _ in samples), [label for _, label in samples]))
    transforms = list_transforms(dataset.transform)
    operations = None
    if native:
        from penstock.torch.translate import translate

        operations = translate(transforms)
    if operations is not None:
        maps = [MapArguments(operation) for operation in operations]
        merged = len(transforms) - len(operations) + 2
        return ImageFolderParts(source, maps, len(transforms), merged)
    maps = [
        MapArguments(open_image, 0, False, "decode"),
        *(MapArguments(transform, 0) for transform in transforms),
    ]
    return ImageFolderParts(source, maps, len(transforms))


def _is_plain_image_folder(dataset: Any) -> bool:
    kind = type(dataset)
    return (
        kind.__module__ == "torchvision.datasets.folder"
        and kind.__name__ == "ImageFolder"
        and getattr(dataset.loader, "__name__", "") == "default_loader"
        and dataset.target_transform is None
    )


def list_transforms(transform: Any) -> list[Any]:
    """The transforms of a Compose, or the one transform as a list; empty for ``None``."""
    if transform is None:
        return []
    if is_transform(transform, "Compose"):
        return list(transform.transforms)
    return [transform]


def open_image(data: bytes) -> Any:
    """Decode as torchvision's default loader does: to a PIL image in RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as opened:
        return opened.convert("RGB")


def is_transform(transform: Any, name: str | None = None) -> bool:
    """Whether this is a transform of torchvision, of this name if one is given."""
    kind = type(transform)
    return kind.__module__.startswith("torchvision.transforms") and name in (None, kind.__name__)
