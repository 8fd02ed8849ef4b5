"""A loader of Penstock's own under analysis: its pipeline runs on data that is cached, or cold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from penstock import config
from penstock.diagnose.analyze.chosen import Chosen, files_of, nbytes_of
from penstock.diagnose.analyze.delayed_reads import FROM_STORAGE, Late
from penstock.diagnose.analyze.report import Operation, Setup
from penstock.diagnose.analyze.subject import BATCHES, Files, operations_of, relative_sizes
from penstock.diagnose.profile.measure import measure
from penstock.diversity.auto import placed, settle
from penstock.engine.build import Recipe, layout_of
from penstock.engine.pools.choose import PoolKind
from penstock.engine.schedule import ahead, piece_of
from penstock.errors import PenstockError, ReportError
from penstock.loader import Loader
from penstock.order.shuffle import shuffled
from penstock.pipeline import Pipeline
from penstock.source.source import Source
from penstock.source.stream import StreamSource
from penstock.stops.batch import stack
from penstock.stops.cache import Cache
from penstock.store.value import cost

ROOM = 1 << 30
"""Bytes of them that are kept in memory at most."""

ALWAYS_KEPT = 1 << 20
"""A reuse so large that in one analysis nothing is renewed."""


class LoaderSubject:
    """Makes other loaders of the same pipeline, with ``Chosen`` samples as their source.

    ``iterate`` begins an epoch, past whatever stands in the way of the loader's own.
    """

    def __init__(
        self,
        loader: Loader,
        cache: int | None = None,
        iterate: Callable[[Loader], Iterator[Any]] = iter,
    ) -> None:
        source = loader.pipeline.source
        if isinstance(source, StreamSource):
            raise ReportError(
                "a stream has no samples that could be read again, so its data cannot be replaced. "
                "Give it __len__ and __getitem__ to have it analysed."
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
        self.reads_to_prepare = False
        self._files: Files | None = None
        self._piece = self._batch
        batching = loader.pipeline.batching
        alone = batching is None or batching.collate is not None
        self._together = 1 if alone else self._pipeline.road(loader.options.seed).together
        self._times: list[float] = []
        choice = loader.choice
        if choice.kind == "node":  # its workers are the machine's
            choice = Recipe(loader.pipeline, replace(loader.options, share=None), stack).choice()
        self._workers = choice.workers
        self._kind: PoolKind = choice.kind

    @property
    def setup(self) -> Setup:
        options, workers = self._loader.options, self._workers
        return Setup(
            loader="penstock.Loader",
            samples=len(self._source),
            batch=self._batch,
            workers=workers,
            kind=self._kind if workers else "none",
            ahead=options.prefetch or ahead(self._batch_bytes()),
            piece=self._piece,
            cores=config.cores(),
            sample_bytes=self._sample_bytes,
            cache=self._cache,
            rank=options.rank,
            world=options.world,
            kept_bytes=self._kept_bytes,
            together=self._together,
        )

    def _batch_bytes(self) -> int:
        layout = layout_of(self._loader.pipeline.fields, self._batch)
        return 0 if layout is None else layout.nbytes

    def learn(self) -> None:
        samples = len(self._source)
        places = np.arange(min(samples, BATCHES * self._batch), dtype=np.int64)
        found = shuffled(samples, self._loader.options.seed, 0, places).tolist()
        room = min(ROOM, config.memory() // 8)
        sizes: list[int] = []
        for index in found:
            try:
                (sample,) = self._source.read([index])
            except Exception as error:  # a bad sample is for the loader to report
                self.notes.append(f"sample {index} could not be read: {error}")
                continue
            sizes.append(nbytes_of(sample))
            self._indices.append(index)
            self._kept[index] = sample
            if sum(sizes) > room and len(self._indices) % self._batch == 0:
                break
        if not self._indices:
            raise ReportError(f"no sample could be read: {self.notes[-1] if self.notes else ''}")
        self._sample_bytes = fmean(sizes)
        self._kept_bytes = fmean(map(cost, sizes))
        self.sizes = relative_sizes(sizes)
        paths = files_of(self._source, self._indices)
        if paths:
            self._files = Files(paths, max(1, len(self._indices) // self._batch))

    # Data in place of data.

    def cached(self, workers: int | None = None, late: Sequence[float] = ()) -> Iterator[Any]:
        if late:
            return self._late(workers, late)
        return self._batches(self._over(self._kept), workers, timed=workers is None)

    def _late(self, workers: int | None, late: Sequence[float]) -> Iterator[Any]:
        kept = self._kept
        alike = _alike(sorted(kept, key=lambda one: nbytes_of(kept[one])), self._batch)
        source = Chosen(self._source, alike, kept, Late(late, self._batch))
        pipeline = replace(self._pipeline, source=source)
        each = self._drop_some if FROM_STORAGE in late else None
        yield from self._batches(pipeline, workers, each=each, shuffle=False)

    def cold(self) -> Iterator[Any] | None:
        share = int(self.setup.held(self._cache) * len(self._indices))
        kept = {index: self._kept[index] for index in self._indices[:share]}
        if self._files is None:
            self.notes.append(
                "samples of this source are not files of their own, so they could not be dropped "
                "from memory: fetch was measured as it is."
            )
        else:
            self._files.drop_all()
        return self._batches(self._over(kept), None, each=self._drop_some)

    def reused(self) -> tuple[Iterator[Any], int] | None:
        if any(stop.keeps for stop in self._pipeline.stops):
            return None
        shared = self._kind == "processes"
        try:
            written = replace(self._over(self._kept), batching=None).refurbish("auto")
            _, chosen = settle(written, self._loader.options.seed, shared=shared, quiet=True)
            if chosen is None or chosen["place"] is None:
                return None
            pipeline = placed(written, {**chosen, "reuse": ALWAYS_KEPT})
        except PenstockError:
            return None
        pipeline = replace(pipeline, batching=self._pipeline.batching)
        return self._batches(pipeline, None), len(self._indices) // self._batch

    def replaced(self) -> Iterator[Any] | None:
        return None

    def reading(self, threads: int, *, cold: bool) -> Iterator[int] | None:
        if cold and self._files is not None:
            self._files.drop_all()
        kept = {} if cold else self._kept
        source = Chosen(self._source, self._indices, kept)
        return source.reading(threads)

    def _over(self, kept: dict[int, Any]) -> Pipeline:
        return replace(self._pipeline, source=Chosen(self._source, self._indices, kept))

    def _drop_some(self) -> None:
        if self._files is not None:
            self._files.drop_some()

    def _batches(
        self,
        pipeline: Pipeline,
        workers: int | None,
        *,
        timed: bool = False,
        each: Callable[[], None] | None = None,
        shuffle: bool = True,
    ) -> Iterator[Any]:
        options = replace(
            self._loader.options,
            workers=self._workers if workers is None else workers,
            kind=self._kind if self._kind in ("threads", "processes") else "auto",
            order=None,
            shuffle=shuffle,
            rank=0,
            world=1,
            share=None,
        )
        loader = self._loader.remade(pipeline, options)
        try:
            while True:
                for batch in self._iterate(loader):
                    yield batch
                    if each is not None:
                        each()
                self._look(loader, timed)
        finally:
            self._look(loader, timed)
            loader.close()

    def _look(self, loader: Loader, timed: bool) -> None:
        stats = loader.stats()
        if timed and stats.batches:
            self._times = loader.batch_times()
            cost = stats.pool.busy / max(1, stats.samples)
            self._piece = piece_of(self._batch, cost)

    # What was seen.

    def operations(self) -> Sequence[Operation]:
        try:
            profile = measure(self._over(self._kept), samples=128, seconds=3.0)
        except PenstockError as error:
            self.notes.append(f"operations could not be timed one by one: {error}")
            return ()
        return operations_of([row for row in profile.fused if row.kind != "source"])

    def batch_times(self) -> Sequence[float]:
        return self._times

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
        self._kept.clear()


def _without_cache(pipeline: Pipeline) -> tuple[Pipeline, int]:
    """The pipeline without a cache of what is read, and that cache's budget."""
    stops = pipeline.stops
    if stops and isinstance(stops[0], Cache):
        bare = replace(pipeline, stops=stops[1:])
        return bare, stops[0].budget
    return pipeline, 0


def _alike(by_size: Sequence[int], batch: int) -> list[int]:
    """The samples one batch after the other, of which each has small and large ones alike.

    Where they do not fill the last batch, some are left out, evenly.

    >>> _alike([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    [1, 4, 6, 9, 2, 3, 7, 8]
    """
    batches = max(1, len(by_size) // batch)
    total = batches * batch
    some = [by_size[(2 * at + 1) * len(by_size) // (2 * total)] for at in range(total)]
    rows = [some[at : at + batches] for at in range(0, total, batches)]
    # Every other row backwards, so that no batch gets the largest of each.
    turned = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rows)]
    return [one for column in zip(*turned, strict=True) for one in column]
