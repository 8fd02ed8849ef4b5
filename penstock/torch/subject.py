"""A torch DataLoader under analysis: others like it are made, with data that is warm or cold."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import fetch

from penstock import config
from penstock.diagnose.analyze.delayed_reads import Late
from penstock.diagnose.analyze.opened import Opened
from penstock.diagnose.analyze.pagecache import characters_read
from penstock.diagnose.analyze.report import Operation, Setup
from penstock.diagnose.analyze.subject import (
    BATCHES,
    Files,
    children,
    operations_of,
    relative_sizes,
)
from penstock.diagnose.profile.measure import measure
from penstock.diagnose.profile.result import StageCost
from penstock.errors import PenstockError
from penstock.keyed import preserved_globals
from penstock.pipeline import from_dataset
from penstock.store.value import cost
from penstock.torch.dataloader import DataLoader as OwnLoader

Iterate = Callable[[Any], Iterator[Any]]


class TorchSubject:
    """``iterate`` is torch's own ``__iter__``, past what stands in its place in the script."""

    def __init__(
        self, loader: DataLoader[Any], iterate: Iterate, opened: Opened, cache: int | None = None
    ) -> None:
        self.notes: list[str] = []
        self._loader = loader
        self._iterate = iterate
        self._opened = opened
        self._cache = cache or 0
        self._stream = isinstance(loader.dataset, IterableDataset)
        self._batches: list[Any] = []
        self._files: Files | None = None
        self._sample_bytes = 0.0
        self.sizes: tuple[float, ...] = ()
        self.reads_to_prepare = True

    @property
    def setup(self) -> Setup:
        loader = self._loader
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        workers = loader.num_workers
        return Setup(
            loader="torch.utils.data.DataLoader",
            samples=self._length(),
            batch=self._size,
            workers=workers,
            kind="processes" if workers else "none",
            ahead=(loader.prefetch_factor or 2) * workers if workers else 0,
            piece=self._size,
            cores=config.cores(),
            sample_bytes=self._sample_bytes,
            cache=self._cache,
            rank=torch.distributed.get_rank() if ranks else 0,
            world=torch.distributed.get_world_size() if ranks else 1,
            kept_bytes=cost(round(self._sample_bytes)) if self._sample_bytes else 0.0,
        )

    @property
    def _size(self) -> int:
        if self._batches and isinstance(self._batches[0], list):
            return len(self._batches[0])
        return self._loader.batch_size or 1

    def _length(self) -> int:
        try:
            return len(self._loader.dataset)
        except (TypeError, NotImplementedError):
            return self._size * BATCHES

    def learn(self) -> None:
        if self._stream:
            self.notes.append(
                "an IterableDataset decides by itself what it reads, so fetch and prep cannot be "
                "told apart: both count as prep."
            )
            return
        with self._untouched():
            whole = self._loader.batch_sampler is not None
            sampler = self._loader.batch_sampler if whole else self._loader.sampler
            drawn = itertools.islice(iter(sampler), BATCHES)
            self._batches = [list(one) if whole else one for one in drawn]
        self._opened.on = True
        self._look_into()
        self._opened.on = False

    def _look_into(self) -> None:
        """Go through the samples once: which files they lie in, and how much is read."""
        batches = self._made(self._batches, self._loader.num_workers)
        before = None
        count = 0
        for _ in range(len(self._batches)):
            next(batches)
            count += 1
            if before is None:  # after the first, because imports read too
                before, count = characters_read(children()), 0
        after = characters_read(children())
        batches.close()
        files = self._opened.files() or self._listed()
        samples = count * self._size
        if files:
            self._files = Files(files, len(self._batches))
            sizes = self._files.sizes()
            each = sum(sizes) / max(1, len(self._batches) * self._size)
            one_by_one = len(files) >= len(self._batches) * self._size / 2
            if one_by_one:
                self.sizes = relative_sizes(sizes)
            if one_by_one or before is None or after is None or not samples:
                self._sample_bytes = each
                return
        if before is not None and after is not None and samples:
            self._sample_bytes = max(0, after - before) / samples
        if not files:
            self.notes.append(
                "the dataset opens no files that could be seen, so its data could not be made "
                "cold: fetch counts as prep."
            )

    def _listed(self) -> list[str]:
        """Paths that the dataset has in a list, as torchvision's do: C++ code opens its files
        where nobody sees it."""
        for name in ("samples", "imgs", "images", "files", "paths"):
            listed = getattr(self._loader.dataset, name, None)
            if not isinstance(listed, (list, tuple)) or not listed:
                continue
            flat = [i for one in self._batches for i in (one if isinstance(one, list) else [one])]
            try:
                found = [listed[i] for i in flat]
            except (TypeError, IndexError):
                continue
            paths = [one[0] if isinstance(one, (tuple, list)) else one for one in found]
            if all(isinstance(one, str) for one in paths):
                return paths
        return []

    # Data in place of data.

    def cached(self, workers: int | None = None, late: Sequence[float] = ()) -> Iterator[Any]:
        with self._timing(workers is None):
            return self._made(
                itertools.cycle(self._batches),
                self._loader.num_workers if workers is None else workers,
                late,
            )

    def cold(self) -> Iterator[Any] | None:
        if self._files is None:
            return None
        files = self._files
        # A cache of that size would have so much of them.
        held = self.setup.held(self._cache)
        if held:
            files = Files(files.paths[int(held * len(files.paths)) :], len(self._batches))
        files.drop_all()
        batches = self._made(itertools.cycle(self._batches), self._loader.num_workers)

        def dropping() -> Iterator[Any]:
            try:
                for batch in batches:
                    yield batch
                    files.drop_some()
            finally:
                batches.close()
                files.close()

        return dropping()

    def reused(self) -> tuple[Iterator[Any], int] | None:
        return None

    def replaced(self) -> Iterator[Any] | None:
        loader = self._loader
        if self._stream or loader.batch_sampler is None:
            return None
        try:
            with self._untouched():
                own = OwnLoader(
                    loader.dataset,
                    batch_sampler=_Again(self._batches),
                    num_workers=loader.num_workers or "auto",
                    collate_fn=loader.collate_fn,
                    worker_init_fn=loader.worker_init_fn,
                )
        except (PenstockError, TypeError, ValueError) as error:
            self.notes.append(f"Penstock's loader cannot take its place: {error}")
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

    def _made(self, batches: Any, workers: int, late: Sequence[float] = ()) -> _Batches:
        """A loader like the script's, with other batches; its batches, until it is closed."""
        loader = self._loader
        dataset: Any = loader.dataset
        if late:
            dataset = _Late(dataset, Late(late, self._size))
        if self._stream:
            return _Batches(_endless(loader, self._iterate))
        given: dict[str, Any] = {
            "num_workers": workers,
            "collate_fn": loader.collate_fn,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout if workers else 0,
            "worker_init_fn": loader.worker_init_fn,
            # One of its own: the script's must be where it was when the analysis is over.
            "generator": torch.Generator(),
        }
        if workers:
            given["prefetch_factor"] = loader.prefetch_factor
            given["multiprocessing_context"] = loader.multiprocessing_context
        which = "batch_sampler" if self._loader.batch_sampler is not None else "sampler"
        given[which] = _Again(batches)
        if which == "sampler":
            given["batch_size"] = None
        with preserved_globals():
            made: DataLoader[Any] = DataLoader(dataset, **given)
            return _Batches(self._iterate(made))

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Leave no trace in the generators that the script draws from."""
        found = [
            one
            for one in (self._loader.generator, getattr(self._loader.sampler, "generator", None))
            if one is not None
        ]
        states = [one.get_state() for one in found]
        with preserved_globals():
            try:
                yield
            finally:
                for one, state in zip(found, states, strict=True):
                    one.set_state(state)

    # What was seen.

    @contextmanager
    def _timing(self, on: bool) -> Iterator[None]:
        """Have the workers that are started here note how long their batches take."""
        kind = fetch._MapDatasetFetcher
        before = kind.fetch
        note = self._opened.note

        def timed(self: Any, given: Any) -> Any:
            started = time.perf_counter()
            found = before(self, given)
            note("times", b"%.6f\n" % (time.perf_counter() - started))
            return found

        if on:
            kind.fetch = timed
        try:
            yield
        finally:
            kind.fetch = before

    def operations(self) -> Sequence[Operation]:
        if self._stream:
            return ()
        try:
            with self._untouched():
                pipeline = from_dataset(self._loader.dataset).batch(self._size)
                profile = measure(pipeline, samples=64, seconds=3.0)
        except Exception as error:  # whatever a dataset may raise outside its loader
            self.notes.append(f"operations could not be timed one by one: {error}")
            return ()
        rows: list[StageCost] = []
        for row in profile.written:
            rows += row.parts or (row,)
        return operations_of(rows)

    def batch_times(self) -> Sequence[float]:
        return self._opened.times()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


class _Late:
    """Another dataset, whose samples come late. In all else it passes for that one."""

    def __init__(self, dataset: Any, late: Late) -> None:
        self.__dict__.update(_dataset=dataset, _late=late)

    def __getitem__(self, index: Any) -> Any:
        self._late.wait()
        return self._dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        together = getattr(self._dataset, "__getitems__", None)
        if together is None:
            return [self[index] for index in indices]
        self._late.wait(len(indices))
        return together(indices)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class _Again:
    """The same batches of indices for every epoch, or for one that has no end."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class _Batches:
    """An iterator that can be closed: its workers end then, not when it is collected."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._found: Iterator[Any] | None = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._found is None:
            raise StopIteration
        return next(self._found)

    def close(self) -> None:
        found, self._found = self._found, None
        end = getattr(found, "_shutdown_workers", None) or getattr(found, "close", None)
        if end is not None:
            end()


def _endless(loader: Any, iterate: Iterate) -> Iterator[Any]:
    while True:
        yield from iterate(loader)
