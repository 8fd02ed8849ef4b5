"""SPDL: a pipeline of stages that run in threads.

As in SPDL's image loading example, paths are put together first, and a batch is the work of one
thread. The stage is a function of one's own, which SPDL's guide says to choose by whether it gives
up the GIL. Measured for one image: decoding, cropping and resizing takes 3.0 ms of CPU time with
``spdl.io``, which has FFmpeg do it, and 1.6 ms by hand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import Photos, image_files
from benchmarks.peers.by_hand import ByHand

AHEAD = 2
"""Batches that wait to be taken."""


def photos(work: Photos) -> Make:
    import cv2  # noqa: F401
    import simplejpeg  # noqa: F401
    from spdl.pipeline import PipelineBuilder

    files = list(zip(*image_files(work.data), strict=True))
    image = ByHand(work)

    def batch(entries: Sequence[tuple[str, int]]) -> tuple[Any, Any]:
        images = np.empty((len(entries), *image.shape), image.dtype)
        for place, (path, _) in zip(images, entries, strict=True):
            image(Path(path).read_bytes(), random, into=place)
        return images, np.array([label for _, label in entries])

    def make() -> Any:
        return _Batches(
            PipelineBuilder()
            .add_source(_shuffled(files))
            .aggregate(work.batch)
            .pipe(batch, concurrency=work.workers)
            .add_sink(AHEAD)
            .build(num_threads=work.workers)
        )

    return make


def _shuffled(files: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Epoch after epoch, each in an order of its own."""
    while True:
        random.shuffle(files)
        yield from files


class _Batches:
    """A pipeline that stops when nobody asks for more."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[Any]:
        with self._pipeline.auto_stop():
            yield from self._pipeline.get_iterator()
