"""LitData: samples in binary chunks, read by a streaming dataset in PyTorch's workers.

As in its guide for ImageNet, chunks of 64 MB hold the bytes of the JPEGs, and a transform of the
dataset decodes them, here with the hand-written steps.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import Photos, image_files
from benchmarks.peers.by_hand import ByHand

CHUNK = "64MB"
"""The chunk size of LitData's examples."""


def convert(work: Photos) -> None:
    _import()
    from litdata import optimize

    files = list(zip(*image_files(work.data), strict=True))
    optimize(
        fn=_sample,
        inputs=files,
        output_dir=str(_place()),
        chunk_bytes=CHUNK,
        num_workers=work.workers,
    )


def _import() -> None:
    """Import torchvision before LitData does: see ``import_torchvision``."""
    from benchmarks.peers.torchvision_pil import import_torchvision

    import_torchvision()


def _sample(entry: tuple[str, int]) -> dict[str, Any]:
    path, label = entry
    return {"image": Path(path).read_bytes(), "label": label}


def _place() -> Path:
    return Path(tempfile.gettempdir()) / "chunks"


class _Image:
    """Turns a stored sample into an image and its label."""

    def __init__(self, work: Photos) -> None:
        self._image = ByHand(work)

    def __call__(self, sample: dict[str, Any]) -> tuple[Any, int]:
        return self._image(sample["image"], random), sample["label"]


def photos(work: Photos) -> Make:
    import cv2  # noqa: F401
    import simplejpeg  # noqa: F401

    _import()
    from litdata import StreamingDataLoader, StreamingDataset

    image = _Image(work)

    def make() -> Any:
        data = StreamingDataset(str(_place()), shuffle=True, drop_last=True, transform=image)
        return StreamingDataLoader(
            data, batch_size=work.batch, num_workers=work.workers, persistent_workers=True
        )

    return make
