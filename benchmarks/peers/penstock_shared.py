"""Penstock with ``share``: one node prepares for all jobs; batches are NumPy arrays."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.harness.measure import Make
from benchmarks.jobs.work import SharedPhotos

PAUSE = 0.02
"""Seconds that a batch takes where batches are to come one by one."""


def photos(work: SharedPhotos) -> Make:
    import penstock.loader  # noqa: F401

    return lambda: _road(work).batch(work.batch).loader(kind="threads", share=work.share)


def stamped_photos(work: SharedPhotos) -> Make:
    """The same, and with each photograph the moment at which it was ready."""
    import penstock.loader  # noqa: F401

    def make() -> Any:
        road = _road(work).map(stamped, random=False)
        return road.batch(work.batch).loader(kind="threads", share=work.share)

    return make


def stamped_one_by_one(work: SharedPhotos) -> Make:
    """Images as large as those, of which the last in a batch takes its time. Nobody else does
    anything: what is left is the way of a batch from the node to a job."""
    import penstock as ps
    import penstock.loader

    def make() -> Any:
        road = ps.from_dataset(Blank(work), random=False)
        road = road.map(stamped_in_time, random=False)
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
    """Images without a picture, and whether each is the last of its batch."""

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
    return (*sample, time.monotonic_ns())


def stamped_in_time(sample: tuple[Any, int]) -> tuple[Any, int, int]:
    if sample[1]:
        time.sleep(PAUSE)
    return stamped(sample)
