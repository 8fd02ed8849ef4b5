"""A torch DataLoader under analysis: runs copies of it on samples that are warm or cold."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import fetch

from penstock import config
from penstock.diagnose.analyze.delayed_reads import DelayedReads
from penstock.diagnose.analyze.report import OperationTime, Setup
from penstock.diagnose.analyze.sample_files import (
    OpenedFiles,
    SampleFiles,
    characters_read,
    child_processes,
)
from penstock.diagnose.analyze.subject import BATCHES, StartEpoch, operation_times, relative_sizes
from penstock.diagnose.analyze.worker_watch import name_places
from penstock.diagnose.profile.measure import measure
from penstock.diagnose.profile.result import StageCost
from penstock.errors import PenstockError
from penstock.keyed import preserved_globals
from penstock.pipeline import from_dataset
from penstock.store.value import cost
from penstock.torch.dataloader import DataLoader as OwnLoader

LEAST_BATCHES = 3
"""Batches that are read in any case to find the files of samples."""


LEAST_BYTES = 256
"""Fewer bytes per sample in a few shared files are not what a dataset reads its samples from."""


class TorchSubject:
    """Makes loaders like the script's own, with other batches.

    ``iterate`` is torch's own ``__iter__``; ``opened`` records the files that the dataset opens.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        iterate: StartEpoch,
        opened: OpenedFiles,
        cache: int | None = None,
    ) -> None:
        self.notes: list[str] = []
        self._loader = loader
        self._iterate = iterate
        self._opened = opened
        self._cache = cache or 0
        self._chosen = False
        self._stream = isinstance(loader.dataset, IterableDataset)
        self._batches: list[Any] = []
        self._files: SampleFiles | None = None
        self._sample_bytes = 0.0
        self.sizes: tuple[float, ...] = ()
        self.prep_includes_reading = True

    @property
    def setup(self) -> Setup:
        loader = self._loader
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        workers = loader.num_workers
        return Setup(
            loader="torch.utils.data.DataLoader",
            samples=self._length(),
            batch=self._batch_size,
            workers=workers,
            kind="processes" if workers else "none",
            ahead=(loader.prefetch_factor or 2) * workers if workers else 0,
            piece=self._batch_size,
            cores=config.cores(),
            sample_bytes=self._sample_bytes,
            cache=self._cache,
            rank=torch.distributed.get_rank() if ranks else 0,
            world=torch.distributed.get_world_size() if ranks else 1,
            kept_bytes=cost(round(self._sample_bytes)) if self._sample_bytes else 0.0,
            persistent=loader.persistent_workers,
        )

    @property
    def _batch_size(self) -> int:
        if self._batches and isinstance(self._batches[0], list):
            return len(self._batches[0])
        return self._loader.batch_size or 1

    def _length(self) -> int:
        try:
            return len(self._loader.dataset)
        except (TypeError, NotImplementedError):
            return self._batch_size * BATCHES

    def choose_samples(self, seconds: float = math.inf) -> None:
        if self._chosen:
            return
        self._chosen = True
        if self._stream:
            self.notes.append(
                "an IterableDataset chooses its reads itself, so fetch and prep cannot be told "
                "apart: both count as prep."
            )
            return
        with self._untouched():
            batched = self._loader.batch_sampler is not None
            sampler = self._loader.batch_sampler if batched else self._loader.sampler
            drawn = itertools.islice(iter(sampler), BATCHES)
            self._batches = [list(keys) if batched else keys for keys in drawn]
        self._opened.on = True
        self._read_samples(seconds)
        self._opened.on = False

    def _read_samples(self, seconds: float) -> None:
        """Read the samples once, to find their files and the bytes read per sample."""
        batches = self._loader_like(self._batches, self._loader.num_workers)
        before = None
        count = 0
        until = time.perf_counter() + seconds
        for number in range(len(self._batches)):
            next(batches)
            count += 1
            if time.perf_counter() > until and number >= LEAST_BATCHES - 1:
                # Workers have begun the next ones, and have opened their files.
                begun = number + 1 + self.setup.ahead
                self._batches = self._batches[:begun]
                break
            if before is None:  # after the first batch, because imports read files too
                before, count = characters_read(child_processes()), 0
        after = characters_read(child_processes())
        batches.close()
        files = self._opened.files() or self._listed_files()
        samples = count * self._batch_size
        if files:
            self._files = SampleFiles(files, len(self._batches))
            sizes = self._files.sizes()
            # About as many files as samples: each sample is a file.
            file_each = len(files) >= len(self._batches) * self._batch_size / 2
            if file_each:
                self.sizes = relative_sizes(sizes)
            if file_each or before is None or after is None or not samples:
                self._sample_bytes = sum(sizes) / max(1, len(self._batches) * self._batch_size)
                return
        if before is not None and after is not None and samples:
            self._sample_bytes = max(0, after - before) / samples
            if self._sample_bytes < LEAST_BYTES:  # lock files and settings, not data
                self._files, self._sample_bytes, files = None, 0.0, []
        if not files:
            self.notes.append(
                "no files were found that the dataset reads, so its samples could not be dropped "
                "from memory: fetch counts as prep."
            )

    def _listed_files(self) -> list[str]:
        """Files of the samples from a list of paths of the dataset, such as torchvision's.

        The audit hook does not see files that C++ code opens.
        """
        for name in ("samples", "imgs", "images", "files", "paths"):
            listed = getattr(self._loader.dataset, name, None)
            if not isinstance(listed, (list, tuple)) or not listed:
                continue
            indices = [
                index
                for batch in self._batches
                for index in (batch if isinstance(batch, list) else [batch])
            ]
            try:
                items = [listed[index] for index in indices]
            except (TypeError, IndexError):
                continue
            paths = [item[0] if isinstance(item, (tuple, list)) else item for item in items]
            if all(isinstance(path, str) for path in paths):
                return paths
        return []

    # Other samples in place of the loader's own.

    def cached(self, workers: int | None = None, delays: Sequence[float] = ()) -> Iterator[Any]:
        with self._batch_timing(workers is None):
            return self._loader_like(
                itertools.cycle(self._batches),
                self._loader.num_workers if workers is None else workers,
                delays,
            )

    def cold(self) -> Iterator[Any] | None:
        if self._files is None:
            return None
        files = self._files
        # Keep the files warm that a cache of this size would hold.
        share = self.setup.cached_share(self._cache)
        if share:
            files = SampleFiles(files.paths[int(share * len(files.paths)) :], len(self._batches))
        files.drop_all()
        batches = self._loader_like(itertools.cycle(self._batches), self._loader.num_workers)

        def dropping() -> Iterator[Any]:
            try:
                for batch in batches:
                    yield batch
                    files.drop_next_part()
            finally:
                batches.close()
                files.close()

        return dropping()

    def with_refurbish(self) -> tuple[Iterator[Any], int] | None:
        return None

    def with_penstock(self) -> Iterator[Any] | None:
        loader = self._loader
        if self._stream or loader.batch_sampler is None:
            return None
        try:
            with self._untouched():
                own = OwnLoader(
                    loader.dataset,
                    batch_sampler=_FixedBatches(self._batches),
                    # The cost of one worker is wanted where the script has none.
                    num_workers=max(1, loader.num_workers),
                    collate_fn=loader.collate_fn,
                    worker_init_fn=loader.worker_init_fn,
                )
        except (PenstockError, TypeError, ValueError) as error:
            self.notes.append(f"Penstock's loader cannot replace this DataLoader: {error}")
            return None

        def batches() -> Iterator[Any]:
            try:
                while True:
                    yield from own
            finally:
                own.close()

        return batches()

    def reading(self, threads: int, *, cold: bool) -> Iterator[int] | None:
        return None if self._files is None else self._files.reading(threads, cold=cold)

    def _loader_like(
        self, batches: Any, workers: int, delays: Sequence[float] = ()
    ) -> _ClosableBatches:
        """The batches of a loader like the script's, with other batches of indices."""
        loader = self._loader
        dataset: Any = loader.dataset
        if delays:
            dataset = _DelayedDataset(dataset, DelayedReads(delays, self._batch_size))
        if self._stream:
            return _ClosableBatches(_endless(loader, self._iterate))
        given: dict[str, Any] = {
            "num_workers": workers,
            "collate_fn": loader.collate_fn,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout if workers else 0,
            "worker_init_fn": loader.worker_init_fn,
            # Its own generator: the analysis must not change the state of the script's.
            "generator": torch.Generator(),
        }
        if workers:
            given["prefetch_factor"] = loader.prefetch_factor
            given["multiprocessing_context"] = loader.multiprocessing_context
        which = "batch_sampler" if self._loader.batch_sampler is not None else "sampler"
        given[which] = _FixedBatches(batches)
        if which == "sampler":
            given["batch_size"] = None
        with preserved_globals():
            copied: DataLoader[Any] = DataLoader(dataset, **given)
            return _ClosableBatches(self._iterate(copied))

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Restore all generators that the script draws from afterwards."""
        own, of_sampler = self._loader.generator, getattr(self._loader.sampler, "generator", None)
        generators = [generator for generator in (own, of_sampler) if generator is not None]
        states = [generator.get_state() for generator in generators]
        with preserved_globals():
            try:
                yield
            finally:
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)

    # Measurements.

    @contextmanager
    def _batch_timing(self, on: bool) -> Iterator[None]:
        """Let workers that are started inside the block note the seconds of their batches."""
        kind = fetch._MapDatasetFetcher
        before = kind.fetch
        note = self._opened.note

        def timed(self: Any, given: Any) -> Any:
            name_places(note)
            started = time.perf_counter()
            batch = before(self, given)
            note("times", b"%.6f\n" % (time.perf_counter() - started))
            return batch

        if on:
            kind.fetch = timed
        try:
            yield
        finally:
            kind.fetch = before

    def operations(self) -> Sequence[OperationTime]:
        if self._stream:
            return ()
        try:
            with self._untouched():
                pipeline = from_dataset(self._loader.dataset).batch(self._batch_size)
                profile = measure(pipeline, samples=64, seconds=3.0)
        except Exception as error:  # a dataset may raise anything outside its loader
            self.notes.append(f"operations could not be timed one by one: {error}")
            return ()
        rows: list[StageCost] = []
        for row in profile.written:
            rows += row.parts or (row,)
        return operation_times(rows)

    def batch_times(self) -> Sequence[float]:
        return self._opened.times()

    def waiting_places(self) -> Mapping[str, int]:
        return self._opened.places()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


class _DelayedDataset:
    """Another dataset with delayed reads. All other attributes are those of that dataset."""

    def __init__(self, dataset: Any, delays: DelayedReads) -> None:
        self.__dict__.update(_dataset=dataset, _delays=delays)

    def __getitem__(self, index: Any) -> Any:
        self._delays.wait()
        return self._dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        get_items = getattr(self._dataset, "__getitems__", None)
        if get_items is None:
            return [self[index] for index in indices]
        self._delays.wait(len(indices))
        return get_items(indices)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class _FixedBatches:
    """A sampler with given batches of indices; an endless iterator makes one endless epoch."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class _ClosableBatches:
    """An iterator with ``close``, which ends its workers at once."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches: Iterator[Any] | None = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        return next(self._batches)

    def close(self) -> None:
        batches, self._batches = self._batches, None
        end = getattr(batches, "_shutdown_workers", None) or getattr(batches, "close", None)
        if end is not None:
            end()


def _endless(loader: Any, iterate: StartEpoch) -> Iterator[Any]:
    while True:
        yield from iterate(loader)
