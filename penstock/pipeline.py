"""The chain users write: checked as it is built, compiled to a road. Read this first.

A pipeline is a road and a mechanism is a stop on it. Pipelines never change: every method returns
a new one, so a common beginning can serve several ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import PipelineError
from penstock.operation import Operation
from penstock.options import Options
from penstock.order import Order
from penstock.source import (
    DatasetSource,
    FilesSource,
    FolderSource,
    ParquetSource,
    StreamSource,
)
from penstock.source.folder import IMAGE_EXTENSIONS
from penstock.source.source import Source
from penstock.stops.batch import Batch, Collate, Pad
from penstock.stops.cache import make_cache
from penstock.stops.echo import Echo, make_echo
from penstock.stops.field import On
from penstock.stops.map import Map, make_map, name_of
from penstock.stops.refurbish import make_refurbish
from penstock.stops.road import Road
from penstock.stops.stop import Fields, Stop
from penstock.store.encoding import DEFAULT as DEFAULT_ENCODING

if TYPE_CHECKING:
    from penstock.diagnose.profile import Profile
    from penstock.diversity import Diversity
    from penstock.loader import Loader

Path = str | PathLike[str]


@dataclass(frozen=True, repr=False)
class Pipeline:
    """A source and the stops below it.

    >>> import numpy as np
    >>> import penstock as ps
    >>> train = ps.from_dataset(np.arange(10.0)).map(lambda x: x * 2, random=False).batch(4)
    >>> [batch.tolist() for batch in train.loader(workers=0, shuffle=False)]
    [[0.0, 2.0, 4.0, 6.0], [8.0, 10.0, 12.0, 14.0], [16.0, 18.0]]
    """

    source: Source
    stops: tuple[Stop, ...] = ()
    batching: Batch | None = None
    echoed: Echo | None = None
    """The echo below ``batch``, of whole batches."""

    def map(
        self,
        function: Operation | Callable[..., Any],
        *,
        on: On = None,
        random: bool | None = None,
        version: str | None = None,
        name: str | None = None,
    ) -> Pipeline:
        """Apply an operation, or any callable, to every sample.

        Penstock's operations know their field: the first of a tuple, ``"image"`` or ``"audio"`` of
        a dict. Any other callable gets the whole sample unless ``on`` names a field. One that does
        not say ``random=False`` is taken as random; if it has a parameter ``rng`` it is given a
        NumPy generator there, and if not it runs where the global generators can be seeded for it.
        ``version`` stands for its code where that cannot be fingerprinted.

        >>> import numpy as np
        >>> import penstock as ps
        >>> noise = lambda x, rng: x + rng.random()
        >>> p = ps.from_dataset(np.zeros(3)).map(noise).batch(3)
        >>> a, b = (next(iter(p.loader(workers=w, seed=7))) for w in (0, 2))
        >>> bool((a == b).all())
        True
        """
        self._open("map()")
        ordinal = sum(isinstance(stop, Map) for stop in self.stops)
        stop = make_map(function, on=on, random=random, version=version, name=name, ordinal=ordinal)
        return self._with(stop)

    def cache(self, budget: int | str, *, where: Path = "memory") -> Pipeline:
        """Keep what comes from above until ``budget`` is full; never evict.

        ``where`` is ``"memory"`` (gone with the loader), ``"disk"`` (kept, and taken up again by
        the next run of the same pipeline on the same data) or a directory.
        """
        self._open("cache()")
        self._indexed("cache()")
        return self._with(make_cache(budget, str(where)))

    def refurbish(
        self,
        reuse: int | Literal["auto"] = "auto",
        *,
        size: int | str | None = None,
        where: Path = "memory",
        encode: str = DEFAULT_ENCODING,
    ) -> Pipeline:
        """Keep what comes from above and use it ``reuse`` times; what is below is always fresh.

        Everything above is the partial augmentation, done for one sample in ``reuse``; everything
        below is the final one. Every epoch renews its share of the samples, and every batch has
        its share of those. ``size`` bounds what is kept; what finds no room is always fresh.
        ``where`` is ``"memory"``, ``"disk"`` or a directory, as in ``cache``; ``encode`` is how
        samples are kept: ``"raw"``, or smaller and slower. ``"auto"`` measures, chooses the place
        and the number, and prints why.

        >>> import numpy as np
        >>> import penstock as ps
        >>> noise = lambda x, rng: x + rng.random()
        >>> p = ps.from_dataset(np.zeros(6)).map(noise).refurbish(reuse=2).map(noise).batch(3)
        >>> with p.loader(workers=0) as loader:
        ...     for epoch in range(3):
        ...         batches = list(loader)
        ...     stats = loader.stats().refurbish
        >>> stats.fresh, stats.reused
        (12, 6)
        """
        self._open("refurbish()")
        self._indexed("refurbish()")
        return self._with(make_refurbish(reuse, size, str(where), encode))

    def echo(
        self, factor: float | Literal["auto"] = "auto", *, window: int | None = None
    ) -> Pipeline:
        """Use everything that comes from above ``factor`` times.

        Above a random map, below it, or below ``batch`` are the three kinds of data echoing.
        Copies are spread over ``window`` samples, below ``batch`` over ``window`` batches. Of a
        factor such as 1.5 the fraction is dealt by chance. ``"auto"`` follows the measured ratio
        of the times above and below it, epoch by epoch.

        >>> import numpy as np
        >>> import penstock as ps
        >>> p = ps.from_dataset(np.arange(4)).echo(2, window=1).batch(4)
        >>> [batch.tolist() for batch in p.loader(workers=0, shuffle=False)]
        [[0, 0, 1, 1], [2, 2, 3, 3]]
        >>> q = ps.from_dataset(np.arange(4)).batch(2).echo(2, window=1)
        >>> [batch.tolist() for batch in q.loader(workers=0, shuffle=False)]
        [[0, 1], [0, 1], [2, 3], [2, 3]]
        """
        self._indexed("echo()")
        if self.batching is None:
            return self._with(make_echo(factor, window, of="samples"))
        below = (*self.stops, *((self.echoed,) if self.echoed is not None else ()))
        echo = make_echo(factor, window, of="batches")
        echo.check_above(below, self._random_source)
        return replace(self, echoed=echo)

    def batch(
        self,
        size: int,
        *,
        drop_last: bool = False,
        collate: Collate | None = None,
        pad: float | None = None,
        version: str | None = None,
    ) -> Pipeline:
        """Make batches of ``size`` samples.

        Samples of one shape are stacked in place. ``pad`` fills samples of different sizes up
        with that value; ``collate`` is given the list of samples and returns the batch.
        """
        self._open("batch()")
        if pad is not None and collate is not None:
            raise PipelineError("batch() got both pad and collate; give one of them.")
        how = Pad(pad) if pad is not None else collate
        return replace(self, batching=Batch(size, drop_last, how, version))

    def loader(
        self,
        *,
        workers: int | Literal["auto"] = "auto",
        kind: Literal["auto", "threads", "processes"] = "auto",
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        rank: int = 0,
        world: int = 1,
        tail: Literal["pad", "drop"] = "pad",
        prefetch: int | None = None,
        on_error: Literal["raise", "skip", "substitute"] = "raise",
        timeout: float | None = None,
        memory: int | str | None = None,
        share: str | None = None,
        lag: Literal["detach", "wait"] = "detach",
        join: Literal["live", "start"] = "live",
        metrics_port: int | None = None,
    ) -> Loader:
        """Something to iterate: an epoch of NumPy batches each time.

        ``workers="auto"`` chooses kind and number, and ``repr`` says what and why. ``seed`` fixes
        everything random. ``rank`` and ``world`` give this process its part of every epoch.
        ``timeout`` is how many seconds a worker may take over a few samples before it is taken
        for hung; ``memory`` bounds the shared memory that batches may take.

        ``share`` names a group of jobs on this machine that have their batches prepared once for
        all, in a background process. A job that falls behind by more than there is room for is
        served by preparing again; with ``lag="wait"`` the others wait for it. One that joins while
        the others are in the middle of an epoch begins where they are, and takes what it missed at
        the end; with ``join="start"`` it begins with the first, so that the sequence of its
        batches does not depend on when it was started. ``metrics_port`` serves Prometheus.
        """
        from penstock.loader import Loader

        options = Options(
            workers=workers,
            kind=kind,
            seed=seed,
            shuffle=shuffle,
            order=order,
            rank=rank,
            world=world,
            tail=tail,
            prefetch=prefetch,
            on_error=on_error,
            timeout=timeout,
            memory=memory,
            share=share,
            lag=lag,
            join=join,
            metrics_port=metrics_port,
        )
        return Loader(self, options)

    @property
    def fields(self) -> Fields:
        """What is known of a sample at the end of the road before any is read."""
        fields = self.source.fields()
        for stop in self.stops:
            fields = stop.output(fields)
        return fields

    def road(self, seed: int) -> Road:
        """Compile it."""
        return Road(self.source, fused(self.stops), seed)

    def explain(self) -> str:
        """The road as it will run: what is done in one step, and why some is not.

        >>> import numpy as np
        >>> import penstock as ps
        >>> print(ps.from_dataset(np.arange(3)).map(np.sqrt, random=False).batch(2).explain())
        source      DatasetSource
        sqrt
        batch       2 samples, stacked in place
        """
        lines = [f"{'source':<11} {type(self.source).__name__}"]
        for stop in fused(self.stops):
            lines.append(f"{stop.name:<11} {stop.note}".rstrip())
        if self.batching is not None:
            how = "stacked in place"
            if self.batching.collate is not None:
                how = f"by {name_of(self.batching.collate)}"
            lines.append(f"{'batch':<11} {self.batching.size} samples, {how}")
        if self.echoed is not None:
            lines.append(f"{'echo':<11} {self.echoed.note}")
        return "\n".join(lines)

    def profile(
        self, data: Any = None, *, samples: int = 256, seconds: float = 10.0, seed: int = 0
    ) -> Profile:
        """What each stop and operation costs, and what fusing them saves. ``print`` it.

        It runs up to ``samples`` samples, for about ``seconds``, in this thread alone. ``data`` is
        read in place of the pipeline's own source: a folder, a list of files, a dataset or another
        pipeline.

        >>> import numpy as np
        >>> import penstock as ps
        >>> p = ps.from_dataset(np.ones((64, 3))).map(np.sqrt, random=False).batch(4).profile()
        >>> [row.name for row in p.rows], p.samples
        (['source', 'sqrt', 'batch'], 64)
        """
        from penstock.diagnose.profile.measure import measure

        return measure(self, data, samples=samples, seconds=seconds, seed=seed)

    def diversity(self, epochs: int = 90, *, shape: tuple[int, ...] | None = None) -> Diversity:
        """What reuse costs in different samples, for every place of refurbish(). ``print`` it.

        ``shape`` is that of a decoded sample where the pipeline does not know it; without it images
        are taken for photographs of 375 x 500.

        >>> import penstock as ps
        >>> p = ps.from_files(["a.jpg"]).map(ps.image.decode())
        >>> p = p.map(ps.image.rand_augment()).map(ps.image.random_flip())
        >>> [(row.below, row.share) for row in p.diversity().rows if row.reuse == 2]
        [('rand_augment', 0.758...), ('random_flip', 0.510...)]
        """
        from penstock.diversity.report import diversity

        return diversity(self, epochs, shape)

    def __repr__(self) -> str:
        lines = [repr(self.source) if type(self.source).__repr__ is not object.__repr__ else ""]
        lines[0] = lines[0] or type(self.source).__name__
        for stop in self.stops:
            lines.append(stop.written)
        if self.batching is not None:
            lines.append(f".batch({self.batching.size})")
        if self.echoed is not None:
            lines.append(self.echoed.written)
        return "\n  ".join(lines)

    @property
    def _random_source(self) -> bool:
        return bool(getattr(self.source, "random", False))

    def _indexed(self, what: str) -> None:
        if not self.source.indexed:
            raise PipelineError(
                f"{what} on a stream: its samples have no index to know them by. It works on "
                "sources with random access.",
                code="iterable-dataset",
            )

    def _open(self, what: str) -> None:
        if self.batching is not None:
            raise PipelineError(
                f"{what} stands below batch(), and works on samples. Put it above batch(), or "
                "do it to the whole batch in batch(..., collate=...)."
            )

    def _with(self, stop: Stop) -> Pipeline:
        stop.check_above(self.stops, self._random_source)
        made = replace(self, stops=(*self.stops, stop))
        _ = made.fields  # an operation that cannot follow another says so now
        return made


def from_folder(
    path: Path,
    *,
    classes: bool | Literal["auto"] = "auto",
    extensions: Sequence[str] | None = IMAGE_EXTENSIONS,
) -> Pipeline:
    """Files below a folder: ``(bytes, label)`` where its sub-folders are classes, else ``bytes``.

    ``extensions`` is which files count: those of images unless you say otherwise, and all of them
    with ``None``.
    """
    return Pipeline(FolderSource(path, classes=classes, extensions=extensions))


def from_files(paths: Sequence[Path], labels: Sequence[Any] | None = None) -> Pipeline:
    """A list of files: ``bytes``, or ``(bytes, label)`` with labels."""
    return Pipeline(FilesSource(paths, labels))


def from_parquet(paths: Path | Sequence[Path], *, columns: Sequence[str] | None = None) -> Pipeline:
    """Rows of Parquet files as dicts of their columns."""
    return Pipeline(ParquetSource(paths, columns))


def from_dataset(
    dataset: Any,
    *,
    random: bool | None = None,
    version: str | None = None,
) -> Pipeline:
    """Any object with ``__len__`` and ``__getitem__``, or one that can only be iterated.

    A function that makes an iterator is read as a stream too.

    A dataset that augments in ``__getitem__`` is random; unless you say ``random=False`` it is
    taken to be, and the global generators are seeded for every sample.
    """
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return Pipeline(DatasetSource(dataset, version=version, random=random))
    if hasattr(dataset, "__iter__") or (callable(dataset) and not isinstance(dataset, type)):
        return Pipeline(StreamSource(dataset, version=version))
    return Pipeline(DatasetSource(dataset, version=version))


def fused(stops: tuple[Stop, ...]) -> tuple[Stop, ...]:
    """The stops, with image operations joined where one step for several of them is faster."""
    modules = {type(getattr(stop, "function", None)).__module__ for stop in stops}
    if not any(module.startswith("penstock.image.") for module in modules):
        return stops  # nothing to fuse, and no need to import the image operations
    from penstock.image.fused import fuse, fuse_augment

    return fuse_augment(fuse(stops))
