"""Grain's random-access datasets, read by threads, or by none as its guide says for data in memory.

The chain is that of Grain's ``Dataset`` tutorial: seed, shuffle, repeat, ``random_map`` with the
generator that Grain passes in, batch. Batching comes before the threads in the chain, so that the
threads do the copying. Grain's default buffer of 500 batches would be 19 GB of photographs; 8 is as
fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import ArrayDataset, Arrays, Photos, image_files
from benchmarks.peers.by_hand import ByHand

BUFFER = 8


def _import() -> Any:
    import logging

    # Grain warns, through absl, that there is no JAX to profile it.
    logging.getLogger("absl").setLevel(logging.ERROR)
    import grain

    return grain


def arrays(work: Arrays) -> Make:
    grain = _import()
    data = ArrayDataset(work)
    options = grain.ReadOptions(num_threads=work.workers, prefetch_buffer_size=BUFFER)
    return lambda: (
        grain.MapDataset.source(data).shuffle(seed=0).batch(work.batch).to_iter_dataset(options)
    )


def arrays_without_threads(work: Arrays) -> Make:
    grain = _import()
    data = ArrayDataset(work)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return lambda: (
        grain.MapDataset.source(data).shuffle(seed=0).batch(work.batch).to_iter_dataset(options)
    )


class _Image:
    """Turns a path and label into an image and label. Grain passes in the generator."""

    def __init__(self, work: Photos) -> None:
        self._image = ByHand(work)

    def __call__(self, entry: tuple[str, int], generator: Any) -> tuple[Any, int]:
        path, label = entry
        return self._image(Path(path).read_bytes(), generator), label


def photos(work: Photos) -> Make:
    """With threads. Measured: ``mp_prefetch`` with as many processes takes half as much CPU time
    again for float32, because arrays are copied between processes, and a tenth more for uint8."""
    import cv2  # noqa: F401
    import simplejpeg  # noqa: F401

    grain = _import()
    files = list(zip(*image_files(work.data), strict=True))
    image = _Image(work)
    options = grain.ReadOptions(num_threads=work.workers, prefetch_buffer_size=BUFFER)
    return lambda: (
        grain.MapDataset.source(files)
        .seed(0)
        .shuffle()
        .repeat()
        .random_map(image)
        .batch(work.batch, drop_remainder=True)
        .to_iter_dataset(options)
    )
