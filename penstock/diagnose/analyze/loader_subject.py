"""A Penstock loader under analysis: its pipeline runs on samples that are cached, or cold."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import config
from penstock.diagnose.analyze.delayed_reads import FROM_STORAGE, DelayedReads
from penstock.diagnose.analyze.reading import by_threads
from penstock.diagnose.analyze.report import OperationTime, Setup
from penstock.diagnose.analyze.sample_files import SampleFiles
from penstock.diagnose.analyze.subject import BATCHES, StartEpoch, operation_times, relative_sizes
from penstock.diagnose.profile.measure import measure
from penstock.diversity.auto import placed, settle
from penstock.engine.build import Recipe, layout_of
from penstock.engine.pools.choose import PoolKind
from penstock.engine.pools.native_road import native_road
from penstock.engine.schedule import batches_ahead, piece_size
from penstock.errors import PenstockError, ReportError
from penstock.loader import Loader
from penstock.operation import Spec
from penstock.order.shuffle import shuffled
from penstock.pipeline import Pipeline
from penstock.source.dataset import DatasetSource
from penstock.source.listing import Listing
from penstock.source.names import Names
from penstock.source.source import FileSamples, Source
from penstock.source.stream import StreamSource
from penstock.stops.batch import stack
from penstock.stops.cache import Cache
from penstock.store.value import cost

MOST_KEPT_BYTES = 1 << 30
"""Most bytes of chosen samples that are kept in memory."""

ALWAYS_KEPT = 1 << 20
"""A reuse so large that no sample is renewed during one analysis."""

READ_TOGETHER = 64
"""Samples in memory that a thread takes at a time when only reading is measured."""


class ChosenSamples(Source):
    """A source of the samples at ``indices`` of another source.

    Samples in ``kept`` are in memory already; ``delays`` delays them. The others are read.
    """

    def __init__(
        self,
        source: Source,
        indices: Sequence[int],
        kept: dict[int, Any],
        delays: DelayedReads | None = None,
    ) -> None:
        self._source = source
        self._indices = list(indices)
        self._kept = kept
        self._delays = delays
        self.threadsafe = source.threadsafe  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: Sequence[int]) -> list[Any]:
        from_storage = self._delays is not None and self._delays.wait(len(indices))
        wanted = [self._indices[at] for at in indices]
        missing = [index for index in wanted if from_storage or index not in self._kept]
        read = dict(zip(missing, self._source.read(missing), strict=True)) if missing else {}
        return [read[index] if index in read else self._kept[index] for index in wanted]

    def name(self, index: int) -> str:
        return self._source.name(self._indices[index])

    def identity(self) -> str:
        return f"{self._source.identity()} {self._indices}"

    def fields(self) -> dict[str | int, Spec] | Spec:
        return self._source.fields()

    def file_samples(self) -> FileSamples | None:
        files, indices = self._source.file_samples(), np.array(self._indices, dtype=np.int64)
        if files is None or self._delays is not None:
            return None
        listing = files.listing
        kept = ((at, self._kept.get(index)) for at, index in enumerate(self._indices))
        return replace(
            files,
            listing=listing and Listing(Names(listing.path(index) for index in self._indices)),
            others={name: partial(_at, numbers, indices) for name, numbers in files.others.items()},
            ranges=files.ranges and files.ranges.pick(indices),
            read=None if files.read is None else partial(_at, files.read, indices),
            contents={at: files.content(sample) for at, sample in kept if sample is not None},
        )

    def reading(self, threads: int) -> Iterator[int]:
        """Read all samples with ``threads`` threads, endlessly; yield the bytes of each read."""

        # Taking a sample from memory costs less than handing it to a thread, so take several.
        size = READ_TOGETHER if self._kept else 1

        def read_some(first: int) -> int:
            samples = self.read(range(first, min(first + size, len(self))))
            return sum(nbytes_of(sample) for sample in samples)

        return by_threads(read_some, cycle(range(0, len(self), size)), threads)


def _at(
    values: Callable[[NDArray[np.int64]], Any],
    indices: NDArray[np.int64],
    places: NDArray[np.int64],
) -> Any:
    return values(indices[places])


def nbytes_of(sample: Any) -> int:
    """Bytes of a sample; values of an unknown kind count as 0."""
    if isinstance(sample, (bytes, bytearray, memoryview)):
        return len(sample)
    if isinstance(sample, np.ndarray):
        return int(sample.nbytes)
    if isinstance(sample, (tuple, list)):
        return sum(nbytes_of(value) for value in sample)
    if isinstance(sample, dict):
        return sum(nbytes_of(value) for value in sample.values())
    nbytes = getattr(sample, "nbytes", 0)
    return int(nbytes) if isinstance(nbytes, int) else 0


def _files_of(source: Source, indices: Sequence[int]) -> list[str]:
    """The files of the samples whose names are paths of files."""
    names = [source.name(index) for index in indices]
    return [name for name in names if os.path.isabs(name) and os.path.isfile(name)]


class LoaderSubject:
    """Makes other loaders of the same pipeline, with ``ChosenSamples`` as their source.

    ``iterate`` begins an epoch of a loader.

    A dataset that runs code of the user reads and prepares its samples in one call. So it runs in
    every phase, and its time counts as prep, as for a loader of torch. Only a cache above it keeps
    what it returns; then its calls count as fetching.
    """

    def __init__(
        self,
        loader: Loader,
        cache: int | None = None,
        iterate: StartEpoch = iter,
    ) -> None:
        source = loader.pipeline.source
        if isinstance(source, StreamSource):
            raise ReportError(
                "the source of this loader is a stream. An analysis reads the same samples several "
                "times, and a stream can be read only once. Use a dataset with __len__ and "
                "__getitem__ to analyse it."
            )
        self.notes: list[str] = []
        self._loader = loader
        self._iterate = iterate
        self._source: Source = source
        self._pipeline, budget = _without_cache(loader.pipeline)
        self._cache = budget if cache is None else cache
        self._batch = loader.pipeline.batching.size if loader.pipeline.batching else 1
        self._indices: list[int] = []
        self._kept: dict[int, Any] = {}
        self._sample_bytes = self._kept_bytes = 0.0
        self.sizes: tuple[float, ...] = ()
        self._runs_dataset = (
            isinstance(source, DatasetSource) and source.runs_user_code and not self._cache
        )
        self.prep_includes_reading = self._runs_dataset
        self._files: SampleFiles | None = None
        self._piece = self._batch
        batching = loader.pipeline.batching
        one_by_one = batching is None or batching.collate is not None
        self._together = (
            1 if one_by_one else self._pipeline.road(loader.options.seed).preferred_group
        )
        self._times: list[float] = []
        choice = loader.choice
        if choice.kind == "node":  # the node's workers serve all jobs: choose as without a node
            alone = loader.options.without_share()
            choice = Recipe(loader.pipeline, alone, stack).choice()
        self._workers = choice.workers
        self._kind: PoolKind = choice.kind
        road = self._pipeline.road(loader.options.seed)
        # The workers of such a road share each batch, sample by sample.
        self._divided = choice.kind == "threads" and (
            native_road(road, stacked=not one_by_one) is not None
        )
        if self._divided:
            self._piece = self._together = 1

    @property
    def setup(self) -> Setup:
        options, workers = self._loader.options, self._workers
        return Setup(
            loader="penstock.Loader",
            samples=len(self._source),
            batch=self._batch,
            workers=workers,
            kind=self._kind if workers else "none",
            ahead=options.prefetch or batches_ahead(self._batch_bytes()),
            piece=self._piece,
            cores=config.cores(),
            sample_bytes=self._sample_bytes,
            cache=self._cache,
            rank=options.rank,
            world=options.world,
            kept_bytes=self._kept_bytes,
            together=self._together,
            batch_bytes=0 if options.prefetch else self._batch_bytes(),
        )

    def _batch_bytes(self) -> int:
        layout = layout_of(self._loader.pipeline.fields, self._batch)
        return 0 if layout is None else layout.nbytes

    def choose_samples(self, seconds: float = math.inf) -> None:
        if self._indices:
            return
        until = time.perf_counter() + seconds
        samples = len(self._source)
        places = np.arange(min(samples, BATCHES * self._batch), dtype=np.int64)
        chosen = shuffled(samples, self._loader.options.seed, 0, places).tolist()
        budget = min(MOST_KEPT_BYTES, config.memory() // 8)
        sizes: list[int] = []
        for index in chosen:
            try:
                (sample,) = self._source.read([index])
            except Exception as error:  # the loader itself reports bad samples
                self.notes.append(f"sample {index} could not be read: {error}")
                continue
            self._indices.append(index)
            if not self._runs_dataset:
                sizes.append(nbytes_of(sample))
                self._kept[index] = sample
            enough = sum(sizes) > budget or time.perf_counter() > until
            if enough and len(self._indices) % self._batch == 0:
                break
        if not self._indices:
            raise ReportError(
                f"none of the {len(chosen)} samples chosen for the analysis could be read. "
                f"The last error: {self.notes[-1] if self.notes else 'the source is empty'}"
            )
        paths = _files_of(self._source, self._indices)
        if paths:
            self._files = SampleFiles(paths, max(1, len(self._indices) // self._batch))
            sizes = sizes or list(self._files.sizes())
        if not sizes:
            self.notes.append(
                "the dataset reads its samples by code of its own, and no files of them are known: "
                "fetch counts as prep."
            )
            return
        self._sample_bytes = fmean(sizes)
        self._kept_bytes = fmean(map(cost, sizes))
        self.sizes = relative_sizes(sizes)

    # Other samples in place of the loader's own.

    def cached(self, workers: int | None = None, delays: Sequence[float] = ()) -> Iterator[Any]:
        if delays:
            return self._delayed(workers, delays)
        return self._batches(self._pipeline_over(self._kept), workers, timed=workers is None)

    def _delayed(self, workers: int | None, delays: Sequence[float]) -> Iterator[Any]:
        kept = self._kept
        by_size = sorted(kept, key=lambda index: nbytes_of(kept[index])) or self._indices
        indices = _equal_batches(by_size, self._batch)
        source = ChosenSamples(self._source, indices, kept, DelayedReads(delays, self._batch))
        pipeline = replace(self._pipeline, source=source)
        after_batch = self._drop_next_part if FROM_STORAGE in delays else None
        yield from self._batches(pipeline, workers, after_batch=after_batch, shuffle=False)

    def cold(self) -> Iterator[Any] | None:
        if self._runs_dataset and self._files is None:
            return None
        count = int(self.setup.cached_share(self._cache) * len(self._indices))
        cached = self._indices[:count]
        kept = {index: self._kept[index] for index in cached if index in self._kept}
        if self._files is None:
            self.notes.append(
                "samples of this source are not separate files, so they could not be dropped from "
                "memory before the cold phase: fetch may have been measured on warm data."
            )
        else:
            self._files.drop_all()
        return self._batches(self._pipeline_over(kept), None, after_batch=self._drop_next_part)

    def with_refurbish(self) -> tuple[Iterator[Any], int] | None:
        if any(stop.keeps for stop in self._pipeline.stops):
            return None
        shared = self._kind in ("processes", "crew")
        try:
            written = replace(self._pipeline_over(self._kept), batching=None).refurbish("auto")
            _, chosen = settle(written, self._loader.options.seed, shared=shared, quiet=True)
            if chosen is None or chosen["place"] is None:
                return None
            pipeline = placed(written, {**chosen, "reuse": ALWAYS_KEPT})
        except PenstockError:
            return None
        pipeline = replace(pipeline, batching=self._pipeline.batching)
        return self._batches(pipeline, None), len(self._indices) // self._batch

    def with_penstock(self) -> Iterator[Any] | None:
        return None

    def reading(self, threads: int, *, cold: bool) -> Iterator[int] | None:
        if self._runs_dataset:
            return None if self._files is None else self._files.reading(threads, cold=cold)
        if cold and self._files is not None:
            self._files.drop_all()
        kept = {} if cold else self._kept
        source = ChosenSamples(self._source, self._indices, kept)
        return source.reading(threads)

    def _pipeline_over(self, kept: dict[int, Any]) -> Pipeline:
        """The pipeline with the chosen samples as its source, those in ``kept`` from memory."""
        return replace(self._pipeline, source=ChosenSamples(self._source, self._indices, kept))

    def _drop_next_part(self) -> None:
        if self._files is not None:
            self._files.drop_next_part()

    def _batches(
        self,
        pipeline: Pipeline,
        workers: int | None,
        *,
        timed: bool = False,
        after_batch: Callable[[], None] | None = None,
        shuffle: bool = True,
    ) -> Iterator[Any]:
        options = replace(
            self._loader.options.without_share(),
            workers=self._workers if workers is None else workers,
            kind=self._kind if self._kind in ("threads", "processes", "crew") else "auto",
            order=None,
            shuffle=shuffle,
            rank=0,
            world=1,
        )
        loader = self._loader.remade(pipeline, options)
        try:
            while True:
                for batch in self._iterate(loader):
                    yield batch
                    if after_batch is not None:
                        after_batch()
                self._record_times(loader, timed)
        finally:
            self._record_times(loader, timed)
            loader.close()

    def _record_times(self, loader: Loader, timed: bool) -> None:
        stats = loader.stats()
        if timed and stats.batches:
            self._times = loader.batch_times()
            cost = stats.pool.busy / max(1, stats.samples)
            self._piece = 1 if self._divided else piece_size(self._batch, cost)

    # Measurements.

    def operations(self) -> Sequence[OperationTime]:
        try:
            profile = measure(self._pipeline_over(self._kept), samples=128, seconds=3.0)
        except PenstockError as error:
            self.notes.append(f"operations could not be timed one by one: {error}")
            return ()
        rows = [row for row in profile.fused if row.kind != "source" or self._runs_dataset]
        return operation_times(rows)

    def batch_times(self) -> Sequence[float]:
        return self._times

    def waiting_places(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
        self._kept.clear()


def _without_cache(pipeline: Pipeline) -> tuple[Pipeline, int]:
    """The pipeline without its cache of raw samples, and the budget of that cache."""
    stops = pipeline.stops
    if stops and isinstance(stops[0], Cache):
        bare = replace(pipeline, stops=stops[1:])
        return bare, stops[0].budget
    return pipeline, 0


def _equal_batches(by_size: Sequence[int], batch: int) -> list[int]:
    """Order samples, given by ascending size, so that all batches are about equally large.

    If they do not fill the last batch, some are left out, evenly.

    >>> _equal_batches([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    [1, 4, 6, 9, 2, 3, 7, 8]
    """
    batches = max(1, len(by_size) // batch)
    total = batches * batch
    some = [by_size[(2 * at + 1) * len(by_size) // (2 * total)] for at in range(total)]
    rows = [some[at : at + batches] for at in range(0, total, batches)]
    # Reverse every other row, so that no batch gets the largest sample of each row.
    turned = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rows)]
    return [index for column in zip(*turned, strict=True) for index in column]
