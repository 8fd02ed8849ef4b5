"""The pools and pipelines of the conformance tests; a new pool needs one line here."""

from __future__ import annotations

import atexit
import os
import signal
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import penstock as ps
from penstock.engine.pools.processes import ProcessPool
from penstock.loader import Loader
from penstock.order import Order
from penstock.pipeline import Pipeline
from penstock.stops.hold import keeps_samples
from tests.support.wavs import sound, wav


class Workers(NamedTuple):
    """A pool to run the contract on."""

    workers: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.workers}"


POOLS = [
    Workers(0, "auto"),
    Workers(1, "threads"),
    Workers(3, "threads"),
    Workers(1, "processes"),
    Workers(3, "processes"),
    Workers(6, "crew"),
]


def noise(value: Any, rng: np.random.Generator) -> Any:
    """A random map that takes its generator as an argument, so it can run in any pool."""
    return value + rng.random()


def pipelines() -> dict[str, Pipeline]:
    """Pipelines with every stop, for the test that a pool changes no bit."""
    numbers = np.arange(53, dtype=np.float64)
    pairs = [(np.full((2, 3), i, dtype=np.float32), i) for i in range(53)]
    clips = [
        {"audio": wav(sound(900 + 99 * i, 1 + i % 2), 8_000 + 8_000 * (i % 2))} for i in range(20)
    ]
    return {
        "scalars": ps.from_dataset(numbers).batch(8),
        "random map": ps.from_dataset(numbers).map(noise).batch(8),
        "two random maps": ps.from_dataset(numbers).map(noise).map(noise).batch(7),
        "pairs": ps.from_dataset(pairs).map(noise, on=0).batch(8),
        "cached": ps.from_dataset(pairs).cache(4096).map(noise, on=0).batch(8),
        "drop last": ps.from_dataset(numbers).map(noise).batch(8, drop_last=True),
        "text": ps.from_dataset([{"x": float(i), "name": f"n{i}"} for i in range(53)]).batch(8),
        "ragged": ps.from_dataset([np.arange(i % 5 + 1) for i in range(53)]).batch(8, pad=-1),
        "refurbished": ps.from_dataset(numbers).map(noise).refurbish(2).map(noise).batch(8),
        "echoed": ps.from_dataset(pairs).map(noise, on=0).echo(1.5).map(noise, on=0).batch(8),
        "echoed batches": ps.from_dataset(pairs).map(noise, on=0).batch(8).echo(2),
        "audio": ps.from_dataset(clips)
        .map(ps.audio.decode(rate=16_000, mono=True))
        .map(ps.audio.random_crop(1_600))
        .map(ps.audio.mel_spectrogram(16_000, mels=20))
        .map(ps.audio.spec_augment(time=3, freq=5))
        .batch(8),
        "packed": packed().map(noise, on=0).batch(8),
        "collate": ps.from_dataset(numbers).map(noise).batch(8, collate=sum_and_all),
    }


ORDERS: dict[str, Order] = {
    "reservoir": ps.Reservoir(window=12),
    "reservoir in lanes": ps.Reservoir(window=12, lanes=4),
    "reservoir with replacement": ps.Reservoir(window=12, replace=True),
}
"""Orders for ``packed``; a new one needs one line here."""


@lru_cache(maxsize=1)
def _shards() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="penstock-tests-")
    atexit.register(folder.cleanup)
    pairs = [(np.full((2, 3), i, dtype=np.float32), i) for i in range(53)]
    ps.from_dataset(pairs).pack(folder.name, per_shard=9, workers=0)
    return folder


def packed() -> Pipeline:
    """53 pairs of an array and its number, in six tar shards, which are removed at exit."""
    return ps.from_tar(_shards().name)


def sum_and_all(samples: list[Any]) -> Any:
    return {"sum": sum(samples), "all": np.array(samples), "ragged": [samples, "text"]}


def plain(batch: Any) -> Any:
    """A batch as plain values that compare bit by bit."""
    if isinstance(batch, np.ndarray):
        return (str(batch.dtype), batch.shape, batch.tobytes())
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [plain(value) for value in batch]
    return batch


def epochs(pipeline: Pipeline, count: int, **options: Any) -> list[list[Any]]:
    """All batches of ``count`` epochs."""
    with pipeline.loader(**options) as loader:
        return [[plain(batch) for batch in loader] for _ in range(count)]


def kill_worker(pool: ProcessPool, number: int) -> None:
    """Kill a worker process that has started, and wait until another one is started for it.

    Until a worker is forked, its process is that of the zygote, with which all workers end.
    """
    limit = time.monotonic() + 100
    while (worker := pool._workers.get(number)) is None or not worker.ready:
        assert time.monotonic() < limit
        time.sleep(0.002)
    restarts, pid = pool.restarts, worker.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while pool.restarts == restarts:
        assert time.monotonic() < limit
        time.sleep(0.002)


def store_of(loader: Loader) -> Any:
    """The store of the first stop that keeps samples."""
    stops = loader._assembly.keepers.road.stops
    return next(stop.store for stop in stops if keeps_samples(stop))


class WaitsForFile:
    """A map that keeps its worker busy, from sample ``first`` on, until a file exists."""

    def __init__(self, path: Path, first: int) -> None:
        self.path = path
        self.first = first

    def __call__(self, value: Any) -> Any:
        while np.ravel(value)[0] >= self.first and not self.path.exists():
            time.sleep(0.01)
        return value


class WaitsToLoad:
    """A map that returns the sample. A worker that starts while the file exists is not ready."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, value: Any) -> Any:
        return value

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        while self.path.exists():
            time.sleep(0.01)
