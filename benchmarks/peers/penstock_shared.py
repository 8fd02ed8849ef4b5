"""Penstock with ``share``: one node prepares for all jobs; batches are NumPy arrays."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.harness.measure import Make
from benchmarks.jobs.work import SharedPhotos

PAUSE = 0.02
"""Seconds per batch for ``stamped_one_by_one``."""


def photos(work: SharedPhotos) -> Make:
    import penstock.loader  # noqa: F401

    return lambda: _road(work).batch(work.batch).loader(kind="threads", share=work.share)


def stamped_photos(work: SharedPhotos) -> Make:
    """Photographs with the time at which each was ready."""
    import penstock.loader  # noqa: F401

    def make() -> Any:
        road = _road(work).map(stamped, random=False)
        return road.batch(work.batch).loader(kind="threads", share=work.share)

    return make


def stamped_one_by_one(work: SharedPhotos) -> Make:
    """Blank images of the same size, with a pause for the last image of each batch. Nothing else
    runs then, so the delay is that of a batch from the node to a job."""
    import penstock as ps
    import penstock.loader

    def make() -> Any:
        road = ps.from_dataset(Blank(work), random=False)
        road = road.map(stamped_after_pause, random=False)
        return road.batch(work.batch).loader(kind="threads", share=work.share, shuffle=False)

    return make


def _road(work: SharedPhotos) -> Any:
    import penstock as ps

    return (
        ps.from_folder(work.data)
        .map(ps.image.decode())
        .map(ps.image.random_resized_crop(work.side))
        .map(ps.image.random_flip())
    )


class Blank:
    """A dataset of black images. The label says whether an image is the last of its batch."""

    def __init__(self, work: SharedPhotos, batches: int = 64) -> None:
        self._side = work.side
        self._batch = work.batch
        self._length = batches * work.batch

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = np.zeros((self._side, self._side, 3), np.uint8)
        return image, int((index + 1) % self._batch == 0)


def stamped(sample: tuple[Any, int]) -> tuple[Any, int, int]:
    """Add the current time to a sample."""
    return (*sample, time.monotonic_ns())


def stamped_after_pause(sample: tuple[Any, int]) -> tuple[Any, int, int]:
    """Pause if the sample is the last of its batch, then add the current time."""
    if sample[1]:
        time.sleep(PAUSE)
    return stamped(sample)
