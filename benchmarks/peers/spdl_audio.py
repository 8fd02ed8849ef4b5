"""SPDL: its pipeline and its reader for WAV files. SciPy does the rest, because SPDL has no audio
transforms.

The chain is that of SPDL's guide: a source of paths, ``pipe`` with one task per worker,
``aggregate``, ``pipe`` to stack, and a sink. ``spdl.io.load_audio`` (FFmpeg) decodes files that are
not WAV, mixes them to mono and resamples them.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.audio.recordings import Recordings, sound_files
from benchmarks.harness.measure import Make
from benchmarks.peers.by_hand_audio import Features, resampled


def recordings(work: Recordings) -> Make:
    import scipy.fft
    import scipy.signal  # noqa: F401
    import spdl.io  # noqa: F401
    from spdl.pipeline import PipelineBuilder

    files = list(zip(*sound_files(work.data), strict=True))
    load = _Load(work)

    def make() -> Any:
        return _Batches(
            PipelineBuilder()
            .add_source(_endless(files))
            .pipe(load, concurrency=work.workers)
            .aggregate(work.batch, drop_last=True)
            .pipe(_stacked)
            .add_sink(2)
            .build(num_threads=work.workers)
        )

    return make


def recordings_in_processes(work: Recordings) -> Make:
    """Whole batches in worker processes, as SPDL's guide advises for functions that hold the GIL.

    One call per clip would cost more than the clip itself.
    """
    import spdl.io  # noqa: F401
    from spdl.pipeline import PipelineBuilder

    files = list(zip(*sound_files(work.data), strict=True))
    load = _LoadBatch(work)

    def make() -> Any:
        processes = ProcessPoolExecutor(work.workers, multiprocessing.get_context("spawn"))
        pipeline = (
            PipelineBuilder()
            .add_source(_endless(files))
            .aggregate(work.batch, drop_last=True)
            .pipe(load, executor=processes, concurrency=work.workers)
            .add_sink(2)
            .build(num_threads=1)
        )
        return _Batches(pipeline, processes)

    return make


def _endless(files: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    order = list(files)
    while True:
        random.shuffle(order)
        yield from order


class _Load:
    """Turns a path and label into a spectrogram and label."""

    def __init__(self, work: Recordings) -> None:
        self._work = work
        self._features = Features(work)

    def __call__(self, entry: tuple[str, int]) -> tuple[Any, int]:
        path, label = entry
        data = Path(path).read_bytes()
        sound = self._wav(data) if data.startswith(b"RIFF") else self._decoded(data)
        return self._features(sound, random), label

    def _wav(self, data: bytes) -> Any:
        import spdl.io

        rate = spdl.io.parse_wav(data).sample_rate
        numbers = np.asarray(spdl.io.load_wav(data))
        if numbers.dtype == np.int16:
            numbers = numbers.astype(np.float32) * np.float32(2**-15)
        elif numbers.dtype != np.float32:
            return self._decoded(data)
        sound = numbers[:, 0] if numbers.shape[1] == 1 else numbers.mean(axis=1)
        return resampled(sound, rate, self._work)

    def _decoded(self, data: bytes) -> Any:
        import spdl.io

        wanted = spdl.io.get_audio_filter_desc(sample_rate=self._work.rate, num_channels=1)
        return spdl.io.to_numpy(spdl.io.load_audio(data, filter_desc=wanted))[0]


class _LoadBatch:
    """Turns paths and labels into a batch."""

    def __init__(self, work: Recordings) -> None:
        self._load = _Load(work)

    def __call__(self, entries: list[tuple[str, int]]) -> tuple[Any, Any]:
        return _stacked([self._load(entry) for entry in entries])


def _stacked(samples: list[tuple[Any, int]]) -> tuple[Any, Any]:
    sounds, labels = zip(*samples, strict=True)
    return np.stack(sounds), np.array(labels)


class _Batches:
    """A pipeline as a loader. ``close`` ends its worker processes."""

    def __init__(self, pipeline: Any, processes: ProcessPoolExecutor | None = None) -> None:
        self._pipeline = pipeline
        self._processes = processes

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        with self._pipeline.auto_stop():
            yield from self._pipeline

    def close(self) -> None:
        if self._processes is not None:
            self._processes.shutdown(cancel_futures=True)
