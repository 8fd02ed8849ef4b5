"""FFCV: data in its own file, compiled pipelines, threads.

Fields and pipelines are those of FFCV's ImageNet example, which writes JPEGs of quality 90 with at
most 500 pixels per side. As its performance guide advises for data that fit into memory, the
operating system does the caching. All images are written as JPEGs, so that the loader has to decode
like the others. The example writes half of them as raw pixels: that is ``convert_half_raw``.

Float images have channels last in memory, FFCV's default, although their shape has channels
first.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import MEAN, STD, Photos, image_files

LONGEST = 500
QUALITY = 90


def convert(work: Photos) -> None:
    _write(work, write_mode="jpg")


def convert_half_raw(work: Photos) -> None:
    _write(work, write_mode="proportion", compress_probability=0.5)


def _write(work: Photos, **how: Any) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    image = RGBImageField(max_resolution=LONGEST, jpeg_quality=QUALITY, **how)
    fields = {"image": image, "label": IntField()}
    writer = DatasetWriter(str(_file()), fields, num_workers=work.workers)
    writer.from_indexed_dataset(_Pixels(work))


def _file() -> Path:
    return Path(tempfile.gettempdir()) / "photos.beton"


class _Pixels:
    """Photographs and labels, for FFCV's writer."""

    def __init__(self, work: Photos) -> None:
        self._paths, self._labels = image_files(work.data)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        with Image.open(self._paths[index]) as image:
            return np.array(image.convert("RGB")), self._labels[index]


def photos(work: Photos) -> Make:
    if work.augment:
        raise NotImplementedError("FFCV has no RandAugment, and its pipelines are compiled")
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import (
        NormalizeImage,
        RandomHorizontalFlip,
        Squeeze,
        ToTensor,
        ToTorchImage,
    )

    def make() -> Any:
        image: list[Any] = [
            RandomResizedCropRGBImageDecoder((work.side, work.side)),
            RandomHorizontalFlip(),
        ]
        if work.form == "float32":
            mean, deviation = 255 * np.array(MEAN), 255 * np.array(STD)
            image += [NormalizeImage(mean, deviation, np.float32), ToTensor(), ToTorchImage()]
        else:
            image += [ToTensor()]
        return Loader(
            str(_file()),
            batch_size=work.batch,
            num_workers=work.workers,
            order=OrderOption.RANDOM,
            os_cache=True,
            drop_last=True,
            pipelines={"image": image, "label": [IntDecoder(), ToTensor(), Squeeze()]},
        )

    return make
