"""The data of the ranks: files that are not decoded, on a simulated disk that counts its reads."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import penstock as ps
from benchmarks.faults.verdict import BatchRecord, Reference
from benchmarks.faults.work import record_batch
from benchmarks.harness.throttle import Disk, OnDisk
from penstock.source.files import FilesSource
from penstock.store.plain import pack_sample
from penstock.store.value import cost

SEED = 0

FAST = 100e9
"""Bytes per second of a disk that is never the bottleneck."""

PREFETCH = 4
"""Batches that a loader prepares ahead."""


class Ledger:
    """A file that the processes of one host and the benchmark map: the rate of the host's disk in
    bytes per second, and how often each sample was read from it."""

    def __init__(self, path: Path, samples: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * (1 + samples)))
            np.memmap(path, np.float64, "r+", shape=(1,))[0] = FAST
        self._rate = np.memmap(path, np.float64, "r+", shape=(1,))
        self._reads = np.memmap(path, np.int64, "r+", offset=8, shape=(samples,))
        self._lock = threading.Lock()

    @property
    def rate(self) -> float:
        return float(self._rate[0])

    @rate.setter
    def rate(self, rate: float) -> None:
        self._rate[0] = rate

    def count(self, indices: Sequence[int]) -> None:
        """Count a read of each of these samples."""
        with self._lock:
            np.add.at(self._reads, list(indices), 1)

    def reads(self) -> NDArray[np.int64]:
        """How often each sample was read so far."""
        return np.array(self._reads)


class CutFiles(FilesSource):
    """Files of which only the first ``size`` bytes count, padded with zeros to that size, as
    arrays: samples of one size fill a cache to the last byte. Labels are their numbers."""

    def __init__(self, paths: Sequence[str], size: int) -> None:
        super().__init__(paths, list(range(len(paths))))
        self._size = size

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [(self._cut(data), np.int64(label)) for data, label in super().read(indices)]

    def _cut(self, data: bytes) -> NDArray[np.uint8]:
        cut = np.zeros(self._size, np.uint8)
        some = np.frombuffer(data, np.uint8)[: self._size]
        cut[: len(some)] = some
        return cut

    def identity(self) -> str:
        return f"{super().identity()} cut {self._size}"

    def file_samples(self) -> None:
        return None

    def fields(self) -> None:
        return None


class HostDisk(OnDisk):
    """The disk of a host. Its rate and the count of its reads are in a ledger."""

    runs_user_code: ClassVar[bool] = False

    def __init__(self, source: CutFiles, ledger: str) -> None:
        super().__init__(source, Disk(FAST))
        self._path = ledger
        self._ledger = Ledger(Path(ledger), len(source))

    def __reduce__(self) -> tuple[type[HostDisk], tuple[Any, str]]:
        return HostDisk, (self._source, self._path)

    def read(self, indices: Sequence[int]) -> list[Any]:
        self._ledger.count(indices)
        self.disk.rate = self._ledger.rate
        return super().read(indices)


@dataclass(frozen=True)
class CutPhotos:
    """The first ``items`` JPEG files below ``data``, cut to ``size`` bytes, in batches of
    ``batch``. Each host may cache ``share`` of all samples, in memory or on its disk (``where``);
    0 leaves the cache out."""

    data: str
    items: int
    size: int
    batch: int
    share: float
    where: str = "memory"

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return self.items * self.size

    @property
    def budget(self) -> int:
        """Bytes of a host's cache: room for ``share`` of the samples."""
        packed = pack_sample((np.zeros(self.size, np.uint8), np.int64(0)))
        return round(self.share * self.items) * cost(len(packed.tobytes()))

    def batches(self, world: int) -> int:
        """Batches of a rank in an epoch."""
        return math.ceil(math.ceil(self.items / world) / self.batch)

    def loader(self, ledger: str = "", **options: Any) -> Any:
        """A loader over these files. ``ledger``: that of the host's disk; none: no disk."""
        source: Any = CutFiles(jpeg_files(self.data)[: self.items], self.size)
        pipeline = ps.Pipeline(HostDisk(source, ledger) if ledger else source)
        if self.share:
            pipeline = pipeline.cache(self.budget, where=self.where)
        return pipeline.batch(self.batch).loader(
            seed=SEED, kind="threads", prefetch=PREFETCH, **options
        )

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)


def jpeg_files(folder: str) -> list[str]:
    """The JPEG files below a folder, sorted."""
    found = Path(folder).rglob("*")
    return sorted(str(path) for path in found if path.suffix.lower() in (".jpg", ".jpeg"))


def reference(work: CutPhotos, rank: int, world: int, epochs: int) -> Reference:
    """The batches of the same loader alone, without a cache or a cluster."""
    known = _reference(replace(work, share=0.0, where="memory"), rank, world, epochs)
    return {epoch: known[epoch] for epoch in range(epochs)}


@lru_cache(maxsize=64)
def _reference(work: CutPhotos, rank: int, world: int, epochs: int) -> dict[int, list[BatchRecord]]:
    with work.loader(rank=rank, world=world, workers=1) as loader:
        return {
            epoch: [record_batch(0.0, epoch, batch) for batch in loader] for epoch in range(epochs)
        }
