"""SPDL: a pipeline of stages that run in threads.

As in SPDL's image loading example, paths are grouped first, and one thread prepares a whole batch.
The stage is a user function that releases the GIL, as SPDL's guide advises. Measured for one image:
decoding, cropping and resizing takes 3.0 ms of CPU time with ``spdl.io`` (FFmpeg), and 1.6 ms with
the hand-written steps.
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
"""Batches buffered for the consumer."""


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
    """All epochs without end, each shuffled differently."""
    while True:
        random.shuffle(files)
        yield from files


class _Batches:
    """A pipeline as a loader. It stops when the iterator is closed."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[Any]:
        with self._pipeline.auto_stop():
            yield from self._pipeline.get_iterator()
