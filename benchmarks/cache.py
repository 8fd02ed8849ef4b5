"""Penstock's cache compared with an LRU cache of the same size: hits, and bytes read.

Without workers nothing is prepared ahead, so the counts are exact and the same on every machine.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from benchmarks.harness.workloads import image_files

SHARES = (25, 50, 75, 100)
EPOCHS = 3
SEED = 0

HEADS = (
    "budget",
    "epoch",
    "Penstock hits",
    "read MB",
    "LRU hits",
    "LRU read MB",
    "least possible MB",
)


@dataclass(frozen=True)
class Epoch:
    """Cache hits of one epoch, and bytes read from the source."""

    hits: int
    read: int


class Lru:
    """A simulated least-recently-used cache, as an operating system's page cache."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._used = 0

    def epoch(self, keys: Iterable[int], sizes: Sequence[int]) -> Epoch:
        """Read the keys in order."""
        hits = read = 0
        for key in keys:
            if key in self._sizes:
                self._sizes.move_to_end(key)
                hits += 1
                continue
            read += sizes[key]
            self._put(key, sizes[key])
        return Epoch(hits, read)

    def _put(self, key: int, size: int) -> None:
        if size > self._budget:
            return
        while self._used + size > self._budget:
            self._used -= self._sizes.popitem(last=False)[1]
        self._sizes[key] = size
        self._used += size


def run(options: Namespace) -> Result:
    sizes = [Path(path).stat().st_size for path in image_files(options.data)[0]]
    total = sum(sizes)
    rows: list[tuple[str, ...]] = []
    data: dict[str, object] = {"samples": len(sizes), "bytes": total}
    for share in SHARES:
        progress(f"cache: {share} % of {total / 1e6:.1f} MB")
        budget = total * share // 100
        ours = _penstock(options.data, budget, options.batch, len(sizes))
        lru = Lru(budget)
        theirs = [lru.epoch(_order(len(sizes), epoch), sizes) for epoch in range(EPOCHS)]
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
            least = total if number == 1 else total - budget
            rows.append(
                (
                    f"{share} %" if number == 1 else "",
                    str(number),
                    f"{mine.hits / len(sizes):.1%}",
                    f"{mine.read / 1e6:.1f}",
                    f"{other.hits / len(sizes):.1%}",
                    f"{other.read / 1e6:.1f}",
                    f"{least / 1e6:.1f}",
                )
            )
        data[f"{share}%"] = {
            "budget": budget,
            "penstock": [asdict(epoch) for epoch in ours],
            "lru": [asdict(epoch) for epoch in theirs],
        }
    title = f"cache: {len(sizes)} photographs, {total / 1e6:.1f} MB, shuffled every epoch"
    return Result((Table(title, HEADS, tuple(rows)),), data=data)


def _penstock(folder: Path, budget: int, batch: int, samples: int) -> list[Epoch]:
    import penstock as ps

    epochs = []
    hits = read = 0
    pipeline = ps.from_folder(folder, extensions=(".jpg", ".jpeg")).cache(budget).batch(batch)
    with pipeline.loader(workers=0, seed=SEED) as loader:
        for _ in range(EPOCHS):
            taken = sum(len(labels) for _, labels in loader)
            if taken != samples:
                raise RuntimeError(f"an epoch delivered {taken} samples instead of {samples}")
            stats = loader.stats()
            epochs.append(Epoch(stats.caches[0].hits - hits, stats.bytes_read - read))
            hits, read = stats.caches[0].hits, stats.bytes_read
    return epochs


def _order(samples: int, epoch: int) -> list[int]:
    """The keys of an epoch in the order of the loader."""
    from penstock.order import Shuffled

    return [int(key) for key in Shuffled().indices(samples, SEED, epoch)]


BENCHMARK = Benchmark(
    "cache",
    "cache hits and bytes read per epoch, compared with an LRU cache of the same size",
    run,
    needs_data=True,
)
