"""Sources, orders and batchings whose every combination is tested; a new one needs one line here.

Each pipeline delivers numbers: the whole part says which sample it is, the rest is random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.pipeline import Pipeline
from tests.support.mds import write_mds

N = 26
"""Samples of each source: not a multiple of any batch size, number of ranks or shard."""

SEED = 3
PER_SHARD = 5
SHARDS = [PER_SHARD] * (N // PER_SHARD) + [N % PER_SHARD]
WEIGHTS = np.where(np.arange(N) < 5, 9.0, 1.0)
LABELS = np.arange(N) % 7 // 3


class Numbers:
    """A dataset of the user."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> float:
        return float(index)


def numbers() -> Iterator[float]:
    """A stream of the user."""
    return iter(map(float, range(N)))


def number_of(sample: Any) -> float:
    """The number of a sample of any source below: its text, its column, or the sample itself."""
    if isinstance(sample, Mapping):
        sample = sample["x"] if "x" in sample else sample["tokens"][0] / 2
    if isinstance(sample, tuple):
        sample = sample[0]
    return float(sample)


def jitter(value: Any, rng: np.random.Generator) -> Any:
    """A random map that leaves the whole part, also if it runs twice."""
    return value + rng.random() / 4


def write_data(folder: Path) -> None:
    """The files that the sources read."""
    for number in range(N):
        path = folder / "train" / "classes" / f"c{number // 9}" / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number))
    table = pa.table({"x": np.arange(N, dtype=np.float64)})
    pq.write_table(table, folder / "train" / "rows.parquet", row_group_size=PER_SHARD)
    samples = [{"x": str(number).encode()} for number in range(N)]
    write_mds(folder / "train" / "mds", {"x": "str"}, samples, PER_SHARD)
    texts = ps.from_files(sorted((folder / "train" / "classes").rglob("*.txt")))
    texts.pack(folder / "train" / "tar", per_shard=PER_SHARD, workers=0)


@dataclass(frozen=True)
class SourceRow:
    """A source. ``make``: its pipeline, from the folder of ``write_data`` and where a server of
    objects has it. ``shards``: whether it knows its shards. ``orders``: those to test it with; by
    default all. Loaders of a bucket take ten times as long to make as others."""

    make: Callable[[Path, str, Mapping[str, str]], Pipeline]
    shards: bool = False
    orders: tuple[str, ...] = ()

    def pipeline(self, folder: Path, url: str, storage: Mapping[str, str]) -> Pipeline:
        return self.make(folder / "train", url, storage).map(number_of, random=False)


SOURCES = {
    "array": SourceRow(lambda *_: ps.from_dataset(np.arange(float(N)))),
    "list": SourceRow(lambda *_: ps.from_dataset([{"x": float(i)} for i in range(N)])),
    "dataset": SourceRow(lambda *_: ps.from_dataset(Numbers(), random=False)),
    "folder": SourceRow(lambda path, *_: ps.from_folder(path / "classes", extensions=None)),
    "files": SourceRow(
        lambda path, *_: ps.from_files(sorted((path / "classes").rglob("*.txt")), list(range(N)))
    ),
    "tar": SourceRow(lambda path, *_: ps.from_tar(path / "tar"), shards=True),
    "mds": SourceRow(lambda path, *_: ps.from_mds(path / "mds"), shards=True),
    "parquet": SourceRow(lambda path, *_: ps.from_parquet(path / "rows.parquet"), shards=True),
    "arrow": SourceRow(
        lambda path, *_: ps.from_arrow(
            pa.Table.from_batches(
                pq.read_table(path / "rows.parquet").combine_chunks().to_batches(PER_SHARD)
            )
        ),
        shards=True,
    ),
    "packed rows": SourceRow(
        lambda *_: ps.pack_sequences(
            ps.from_dataset([np.arange(9 * i, min(2 * N, 9 * i + 9)) for i in range(6)]),
            2,
            by=[9] * 5 + [7],
            seed=None,
        )
    ),
    "bucket": SourceRow(
        lambda _, url, storage: ps.from_folder(
            f"{url}/classes", extensions=None, storage=storage, version="1"
        ),
        orders=("shuffled", "refurbished"),
    ),
    "tar in a bucket": SourceRow(
        lambda _, url, storage: ps.from_tar(f"{url}/tar", storage=storage, version="1"),
        shards=True,
        orders=("reservoir", "mix"),
    ),
}


@dataclass(frozen=True)
class OrderRow:
    """An order, or a stage that decides how often samples come.

    ``make``: the order of the loader. ``stages``: what is added to the pipeline. ``counts``: how
    often each sample comes in an epoch; by default once. ``times``: the least and the most if that
    is not exact, with ``total`` for the epoch. ``options``: of the loader. ``needs_shards``: the
    source must have them. ``group``: how many deliveries belong together. ``warns``: the warning
    with several ranks.
    """

    make: Callable[[], Any] = lambda: None
    stages: Callable[[Pipeline], Pipeline] = lambda pipeline: pipeline.map(jitter)
    counts: Callable[[Any, int], Counter[int]] = lambda order, epoch: Counter(range(N))
    times: tuple[int, int] | None = None
    total: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_shards: bool = False
    group: int = 1
    echo: bool = False
    warns: str = ""

    def allowed(self, order: Any, epoch: int) -> tuple[Counter[int], Counter[int]]:
        """The least and the most that each sample comes in an epoch, without padding."""
        if self.times is None:
            counts = self.counts(order, epoch)
            return counts, counts
        least, most = self.times
        samples = range(N) if self.total is None else (*range(N), *range(100, 110))
        return Counter(dict.fromkeys(samples, least)), Counter(dict.fromkeys(samples, most))


class ByClass:
    """Every class equally often."""

    def indices(self, n: int, seed: int, epoch: int) -> Any:
        generator = np.random.default_rng((seed, epoch))
        parts = [generator.choice(np.flatnonzero(k == LABELS), 12) for k in range(3)]
        return generator.permutation(np.concatenate(parts))

    def length(self, n: int) -> int:
        return 36


class Curriculum:
    """More samples from epoch to epoch."""

    def indices(self, n: int, seed: int, epoch: int) -> Any:
        return np.random.default_rng((seed, epoch)).permutation(n - 7 + 5 * epoch % 8)


class Late:
    """Asked for only after the epoch before has ended."""

    ahead = False

    def indices(self, n: int, seed: int, epoch: int) -> Any:
        return np.random.default_rng((seed, epoch)).permutation(n)


def _listed(order: Any, epoch: int) -> Counter[int]:
    return Counter(order.indices(N, SEED, epoch).tolist())


def _in_shards(order: Any, epoch: int) -> Counter[int]:
    return _listed(order.over(np.array(SHARDS), "source"), epoch)


def _mixed(pipeline: Pipeline) -> Pipeline:
    other = ps.from_dataset(np.arange(100.0, 110.0))
    return ps.mix({"a": (pipeline, 3), "b": (other, 1)}, samples=32).map(jitter)


ORDERS = {
    "shuffled": OrderRow(),
    "sequential": OrderRow(options={"shuffle": False}),
    "weighted": OrderRow(lambda: ps.Weighted(WEIGHTS, samples=30), counts=_listed),
    "weighted without replacement": OrderRow(
        lambda: ps.Weighted(WEIGHTS, samples=19, replacement=False), counts=_listed
    ),
    "class-balanced": OrderRow(ByClass, counts=_listed),
    "curriculum": OrderRow(Curriculum, counts=_listed),
    "late": OrderRow(Late),
    "reservoir": OrderRow(lambda: ps.Reservoir(window=7), needs_shards=True),
    "reservoir in lanes": OrderRow(
        lambda: ps.Reservoir(window=8, lanes=2), counts=_in_shards, needs_shards=True
    ),
    "reservoir with replacement": OrderRow(
        lambda: ps.Reservoir(window=7, replace=True), counts=_in_shards, needs_shards=True
    ),
    "reservoir of given shards": OrderRow(lambda: ps.Reservoir(window=7, shards=SHARDS)),
    "mix": OrderRow(stages=_mixed, times=(0, 2), total=32),
    "cached": OrderRow(stages=lambda p: p.cache("1MB").map(jitter)),
    "refurbished": OrderRow(
        stages=lambda p: p.map(jitter).refurbish(2).map(jitter),
        # Ranks of one process here, which do not share what they keep.
        warns="with . ranks a sample seldom comes back",
    ),
    "echoed": OrderRow(
        stages=lambda p: p.echo(2).map(jitter),
        counts=lambda order, epoch: Counter(dict.fromkeys(range(N), 2)),
        group=2,
        echo=True,
    ),
    "echoed by a fraction": OrderRow(
        stages=lambda p: p.map(jitter).echo(1.5), times=(1, 2), group=2, echo=True
    ),
}


@dataclass(frozen=True)
class BatchingRow:
    """A batching. ``make``: adds it to a pipeline of ``samples`` numbers. ``most``: the most
    samples in a batch if batches that are not full are left out. ``copies``: deliveries of each
    batch. ``by_length``: batches are made by length."""

    make: Callable[[Pipeline, int], Pipeline]
    drops: int = 0
    copies: int = 1
    by_length: bool = False


def _lengths(samples: int) -> list[int]:
    return [1 + 5 * i % 7 for i in range(samples)]


def ragged(value: float) -> Any:
    return np.full(int(value) % 3 + 1, value)


BATCHINGS = {
    "count": BatchingRow(lambda p, _: p.batch(4)),
    "drop_last": BatchingRow(lambda p, _: p.batch(4, drop_last=True), drops=4),
    "one batch": BatchingRow(lambda p, _: p.batch(1000)),
    "pad": BatchingRow(lambda p, _: p.map(ragged, random=False).batch(5, pad=-1, lengths=True)),
    "collate": BatchingRow(lambda p, _: p.batch(3, collate=list)),
    "by length": BatchingRow(lambda p, n: p.batch(4, by=_lengths(n)), by_length=True),
    "tokens": BatchingRow(lambda p, n: p.batch(tokens=12, by=_lengths(n)), by_length=True),
    "tokens, padded": BatchingRow(
        lambda p, n: p.map(ragged, random=False).batch(
            6, tokens=20, by=_lengths(n), pad=-1, window=13
        ),
        by_length=True,
    ),
    "echoed batches": BatchingRow(lambda p, _: p.batch(4).echo(2), copies=2),
}


def values(batch: Any) -> list[float]:
    """The numbers of the samples of a batch."""
    if isinstance(batch, tuple):
        batch = batch[0]
    if isinstance(batch, list):
        return batch
    found: list[float] = (batch[:, 0] if batch.ndim == 2 else batch).tolist()
    return found
