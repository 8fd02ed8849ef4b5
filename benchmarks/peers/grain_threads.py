"""Grain's random-access datasets, read by threads, or by none as its guide says for data in memory.

Batches are made above the threads in the first form, so that these share the copying. The buffer
of Grain's default, 500 batches, would be 19 GB of photographs; 8 is as fast.
"""

from __future__ import annotations

from typing import Any

from benchmarks.measure import Make
from benchmarks.workloads import ArrayDataset, Arrays

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
