"""The pipeline that users write: checked as it is built, compiled to a road. Read this first.

A pipeline is a source and the stops below it. Pipelines are immutable: every method returns a new
pipeline, so several pipelines can share their first stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.operation import Operation
from penstock.options import Kind, Options
from penstock.order import Budget, Order
from penstock.order.budget import TooLong
from penstock.source import (
    DatasetSource,
    FilesSource,
    FolderSource,
    StreamSource,
    is_stream,
)
from penstock.source.folder import IMAGE_EXTENSIONS
from penstock.source.objects.address import is_url, local_path
from penstock.source.source import Source
from penstock.stops.batch import Batch, Collate, Pad
from penstock.stops.echo import Echo, make_echo, make_stream_echo
from penstock.stops.field import On
from penstock.stops.map import Map, make_map, name_of
from penstock.stops.road import Road, draws_globally
from penstock.stops.stop import Fields, Stop
from penstock.store.encoding import DEFAULT as DEFAULT_ENCODING

if TYPE_CHECKING:
    from penstock.diagnose.profile import Profile
    from penstock.diversity import Diversity
    from penstock.loader import Loader
    from penstock.pack.pack import PackReport

Path = str | PathLike[str]

By = Sequence[float] | NDArray[Any] | str | int | Callable[[Any], float]
"""The lengths of samples: one for each sample, or a field or a function of a sample."""


@dataclass(frozen=True, repr=False)
class Pipeline:
    """A source and the stages below it; made by ``from_folder``, ``from_dataset`` and others.

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
    """The echo below ``batch``, which repeats whole batches."""

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

        Penstock's operations find their field themselves: the first of a tuple, ``"image"`` or
        ``"audio"`` of a dict. Any other callable gets the whole sample unless ``on`` names a field.
        A callable is taken as random unless you give ``random=False``. If it has a parameter
        ``rng``, it gets a NumPy generator there; if not, the global generators are seeded for
        every sample, which takes worker processes or ``workers=0``. ``version`` identifies code
        that cannot be fingerprinted.

        >>> import numpy as np
        >>> import penstock as ps
        >>> noise = lambda x, rng: x + rng.random()
        >>> p = ps.from_dataset(np.zeros(3)).map(noise).batch(3)
        >>> a, b = (next(iter(p.loader(workers=w, seed=7))) for w in (0, 2))
        >>> bool((a == b).all())
        True
        """
        self._check_above_batch("map()")
        ordinal = sum(isinstance(stop, Map) for stop in self.stops)
        stop = make_map(function, on=on, random=random, version=version, name=name, ordinal=ordinal)
        return self._with(stop)

    def cache(self, budget: int | str, *, where: Path = "memory") -> Pipeline:
        """Keep the samples from above until ``budget`` is full; never evict.

        ``where`` is ``"memory"`` (freed with the loader), ``"disk"`` (kept, and used again by the
        next run of the same pipeline on the same data) or a directory.
        """
        self._check_above_batch("cache()")
        self._check_indexed("cache()")
        from penstock.stops.cache import make_cache

        return self._with(make_cache(budget, str(where)))

    def refurbish(
        self,
        reuse: int | Literal["auto"] = "auto",
        *,
        size: int | str | None = None,
        where: Path = "memory",
        encode: str = DEFAULT_ENCODING,
    ) -> Pipeline:
        """Keep the samples from above and use each ``reuse`` times; maps below run every time.

        The maps above are the partial augmentation: in an epoch they run for one sample in
        ``reuse``. The maps below are the final augmentation. Every epoch renews its share of the
        samples, and every batch has its share of the renewed ones. ``size`` bounds the memory of
        kept samples; samples that find no room are always fresh. ``where`` is ``"memory"``,
        ``"disk"`` or a directory, as in ``cache``. ``encode`` is how samples are kept: ``"raw"``,
        or an encoding that is smaller and slower. ``"auto"`` measures, chooses the position and
        the number, and logs why.

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
        self._check_above_batch("refurbish()")
        self._check_indexed("refurbish()")
        from penstock.stops.refurbish import make_refurbish

        return self._with(make_refurbish(reuse, size, str(where), encode))

    def echo(
        self, factor: float | Literal["auto"] = "auto", *, window: int | None = None
    ) -> Pipeline:
        """Use every sample from above ``factor`` times; below ``batch``, every batch.

        Above a random map, below it, or below ``batch`` are the three kinds of data echoing.
        Copies are spread over ``window`` samples, by default over 32 batches and at most 8192
        samples; below ``batch`` over ``window`` batches, by default 4. With a
        factor of 1.5, half of the samples, chosen at random, are used once more. ``"auto"`` follows
        the measured ratio of the times above and below the echo, epoch by epoch.

        >>> import numpy as np
        >>> import penstock as ps
        >>> p = ps.from_dataset(np.arange(4)).echo(2, window=1).batch(4)
        >>> [batch.tolist() for batch in p.loader(workers=0, shuffle=False)]
        [[0, 0, 1, 1], [2, 2, 3, 3]]
        >>> q = ps.from_dataset(np.arange(4)).batch(2).echo(2, window=1)
        >>> [batch.tolist() for batch in q.loader(workers=0, shuffle=False)]
        [[0, 1], [0, 1], [2, 3], [2, 3]]
        """
        if not self.source.indexed and self.batching is None:
            return self._with(make_stream_echo(factor, window))
        if not self.source.indexed:
            raise PipelineError(
                "echo() below batch() on a stream: copies of batches are spread over an epoch, and "
                "the length of a stream is not known. Put echo() above batch().",
                code="iterable-dataset",
            )
        if self.batching is None:
            return self._with(make_echo(factor, window, of="samples"))
        above = (*self.stops, *((self.echoed,) if self.echoed is not None else ()))
        echo = make_echo(factor, window, of="batches")
        echo.check_above(above, draws_globally(self.source))
        return replace(self, echoed=echo)

    def batch(
        self,
        size: int | None = None,
        *,
        tokens: float | None = None,
        by: By | None = None,
        window: int | None = None,
        too_long: TooLong = "raise",
        drop_last: bool = False,
        collate: Collate | None = None,
        pad: float | None = None,
        lengths: bool = False,
        version: str | None = None,
    ) -> Pipeline:
        """Make batches of ``size`` samples, or of samples whose lengths add up to ``tokens``.

        Samples of one shape are stacked in place. ``pad`` is the value with which samples of
        different sizes are padded; with ``lengths=True`` the batch also has their lengths.
        ``collate`` gets the list of samples and returns the batch; ``version`` identifies its code
        if that cannot be fingerprinted.

        ``by`` makes batches of samples of similar length: an array with the length of each sample,
        the name of a field (a number, or something with a length), or a function of a sample. A
        field or function is evaluated for all samples when ``batch`` is called, and the result is
        kept on disk. ``tokens`` bounds the sum of the lengths of a batch, counted with padding if
        ``pad`` is given; ``size`` may bound the number of samples too. ``window`` is the number of
        samples that are sorted together, by default those of 64 batches. ``too_long`` says what
        happens to a sample longer than ``tokens``: ``"raise"``, ``"drop"`` or ``"alone"``.

        >>> import numpy as np
        >>> import penstock as ps
        >>> texts = [np.ones(n) for n in (5, 1, 4, 2, 5, 1)]
        >>> p = ps.from_dataset(texts).batch(tokens=10, by=len, pad=0)
        >>> [batch.shape for batch in p.loader(workers=0, shuffle=False)]
        [(3, 2), (2, 5), (1, 5)]
        """
        self._check_above_batch("batch()")
        if pad is not None and collate is not None:
            raise PipelineError(
                f"batch() got pad={pad!r} and a collate function: both make the batch. Give only "
                "one of them."
            )
        if lengths and pad is None:
            raise PipelineError(
                "batch() got lengths=True without pad: it is for padded batches. Give pad=0, or "
                "return the lengths from your collate function."
            )
        how = Pad(pad, lengths) if pad is not None else collate
        if by is None:
            if tokens is not None or window is not None or too_long != "raise" or size is None:
                raise PipelineError(
                    "batch() got "
                    + ("tokens, window or too_long without by" if size else "no size")
                    + ". Give the number of samples in a batch, or tokens= and by=, the lengths "
                    "of the samples: an array, the name of a field or a function."
                )
            return self._batched(Batch(size, drop_last, how, version))
        self._check_indexed("batch(by=...)")
        if drop_last:
            raise PipelineError(
                "batch() got drop_last and by: batches of a budget have different sizes, and none "
                "of them is incomplete. Leave drop_last out."
            )
        from penstock.combine.lengths import lengths_by

        found = lengths_by(self, by)
        budget = Budget(found, tokens, size, pad is not None, window, too_long)
        if len(budget.lengths) != len(self.source):
            raise PipelineError(
                f"batch() got {len(budget.lengths)} lengths in by, but the source has "
                f"{len(self.source)} samples. Give one length for each sample."
            )
        budget.check(self.source.name)
        return self._batched(Batch(budget.expected_rows, False, how, version, budget))

    def _batched(self, batching: Batch) -> Pipeline:
        stops = tuple(stop.for_batches(batching.size) for stop in self.stops)
        return replace(self, stops=stops, batching=batching)

    def loader(
        self,
        *,
        workers: int | Literal["auto"] = "auto",
        kind: Kind = "auto",
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        rank: int = 0,
        world: int = 1,
        tail: Literal["pad", "drop"] = "pad",
        prefetch: int | None = None,
        tiny_batch: int | Literal["auto"] = "auto",
        on_error: Literal["raise", "skip", "substitute"] = "raise",
        timeout: float | None = None,
        memory: int | str | None = None,
        share: str | None = None,
        lag: Literal["detach", "wait"] = "detach",
        join: Literal["live", "start"] = "live",
        cluster: str | None = None,
        metrics_port: int | None = None,
    ) -> Loader:
        """A loader of this pipeline: each ``for`` loop over it is one epoch of NumPy batches.

        ``workers="auto"`` chooses the kind and number of workers; the ``repr`` of the loader shows
        them and the reason. ``seed`` fixes everything random. ``rank`` and ``world`` give this
        process its part of every epoch. ``timeout`` is the number of seconds after which a worker
        that is busy with a few samples counts as hung. ``memory`` bounds the memory of batches.
        ``tiny_batch`` is the number of samples that a worker gets at a time, by default chosen by
        their cost; it changes no batch.

        ``share`` names a group of jobs on this machine. A background process prepares their batches
        once for all of them. For a job that falls behind by more batches than there is room for,
        batches are prepared again; with ``lag="wait"`` the other jobs wait for it. A job that joins
        while the others are in the middle of an epoch begins where they are, and gets the batches
        it missed at the end; with ``join="start"`` it begins with the first batch, so that the
        order of its batches does not depend on when it was started.

        ``cluster`` joins the caches of several machines into one: ``"auto"``, or the addresses of
        machines. ``metrics_port`` is the port of a Prometheus endpoint.
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
            tiny_batch=tiny_batch,
            on_error=on_error,
            timeout=timeout,
            memory=memory,
            share=share,
            lag=lag,
            join=join,
            cluster=cluster,
            metrics_port=metrics_port,
        )
        return Loader(self, options)

    def pack(
        self,
        to: Path,
        *,
        per_shard: int | Literal["auto"] = "auto",
        workers: int | Literal["auto"] = "auto",
        on_progress: Callable[[int, int], None] | None = None,
        storage: Mapping[str, str] | None = None,
    ) -> PackReport:
        """Write all samples as tar shards into the folder ``to``, which ``from_tar`` reads.

        ``to`` may be the URL of a folder in a bucket. ``storage``: see ``from_folder``.

        No stage may be random. WebDataset and DALI read the shards, too. Finished shards are kept
        when packing is interrupted: call it again to go on. ``per_shard`` is the number of samples
        in a shard, by default as many as make 256 MB. ``on_progress`` is called with the numbers of
        packed and of all samples. ``print`` the report: it says after how many epochs packing pays.

        >>> import tempfile
        >>> import numpy as np
        >>> import penstock as ps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = ps.from_dataset(np.arange(6.0)).pack(folder, per_shard=4)
        ...     packed = ps.from_tar(folder)
        ...     [float(x) for x in packed.source.read(range(6))], report.shards
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 2)
        """
        from penstock.pack.pack import pack

        return pack(
            self,
            to,
            per_shard=per_shard,
            workers=workers,
            on_progress=on_progress,
            storage=storage,
        )

    @property
    def fields(self) -> Fields:
        """The fields of a sample below the last stage, as far as known before one is read."""
        fields = self.source.fields()
        for stop in self.stops:
            fields = stop.output(fields)
        return fields

    def road(self, seed: int) -> Road:
        """The source and the stops as they run, with image operations joined."""
        return Road(self.source, fused(self.stops), seed)

    def explain(self) -> str:
        """The pipeline as it runs: which operations run as one step, and why others do not.

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
            lines.append(f"{'batch':<11} {self.batching.described}, {how}")
        if self.echoed is not None:
            lines.append(f"{'echo':<11} {self.echoed.note}")
        return "\n".join(lines)

    def profile(
        self, data: Any = None, *, samples: int = 256, seconds: float = 10.0, seed: int = 0
    ) -> Profile:
        """Measure the cost of each stage and operation, and the gain of fusing them. ``print`` it.

        It prepares up to ``samples`` samples, for about ``seconds``, in this thread only. ``data``
        replaces the source of the pipeline: a folder, a list of files, a dataset or another
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
        """How many different samples are left with reuse, for each position of ``refurbish``.

        ``print`` it. ``shape``: the shape of a decoded sample, if the pipeline does not know it;
        the default for images is a photograph of 375 x 500.

        >>> import penstock as ps
        >>> p = ps.from_files(["a.jpg"]).map(ps.image.decode())
        >>> p = p.map(ps.image.rand_augment()).map(ps.image.random_flip())
        >>> [(row.below, row.share) for row in p.diversity().rows if row.reuse == 2]
        [('rand_augment', 0.758...), ('random_flip', 0.510...)]
        """
        from penstock.diversity.report import diversity

        return diversity(self, epochs, shape)

    def __repr__(self) -> str:
        has_repr = type(self.source).__repr__ is not object.__repr__
        lines = [(repr(self.source) if has_repr else "") or type(self.source).__name__]
        for stop in self.stops:
            lines.append(stop.as_call)
        if self.batching is not None:
            batch = self.batching
            by = f"tokens={batch.budget.limit}, by=..." if batch.budget else str(batch.size)
            lines.append(f".batch({by})")
        if self.echoed is not None:
            lines.append(self.echoed.as_call)
        return "\n  ".join(lines)

    def _check_indexed(self, call: str) -> None:
        """Raise PipelineError for ``call`` on a stream."""
        if not self.source.indexed:
            raise PipelineError(
                f"{call} on a stream: samples of a stream have no index, by which {call} would "
                "find them again. Use a source with random access: a dataset with __len__ and "
                "__getitem__, files, a folder or Parquet.",
                code="iterable-dataset",
            )

    def _check_above_batch(self, call: str) -> None:
        """Raise PipelineError for ``call`` below ``batch``."""
        if self.batching is not None:
            raise PipelineError(
                f"{call} stands below batch(), but works on single samples. Put it above batch(), "
                "or change whole batches with batch(..., collate=...)."
            )

    def _with(self, stop: Stop) -> Pipeline:
        """This pipeline with one more stop. Raises PipelineError if it may not stand there."""
        stop.check_above(self.stops, draws_globally(self.source))
        longer = replace(self, stops=(*self.stops, stop))
        _ = longer.fields  # raises PipelineError if an operation does not fit the one above it
        return longer


def batching_of(pipeline: Pipeline) -> Batch:
    """The batch stop of a pipeline. Raises PipelineError if it has none."""
    if pipeline.batching is None:
        raise PipelineError(
            "the pipeline has no batch(), and a loader delivers batches. End the pipeline with "
            "batch(size)."
        )
    return pipeline.batching


def from_folder(
    path: Path,
    *,
    classes: bool | Literal["auto"] = "auto",
    extensions: Sequence[str] | None = IMAGE_EXTENSIONS,
    storage: Mapping[str, str] | None = None,
    version: str | None = None,
) -> Pipeline:
    """Files below a folder: ``(bytes, label)`` if its sub-folders are classes, else ``bytes``.

    ``extensions``: the extensions of the files to read, by default those of images; ``None`` for
    all files.

    ``path`` may be the URL of a folder in a bucket: ``s3://bucket/train``. ``storage``: settings of
    the store that the environment does not give, such as ``endpoint`` or ``region``. ``version``: a
    name of yours for the state of the bucket: it is then listed once, and the listing is kept.
    """
    if is_url(path):
        local = local_path(str(path))
        if local is None:
            from penstock.source.remote import RemoteFolderSource

            return Pipeline(RemoteFolderSource(str(path), classes, extensions, storage, version))
        path = local
    if storage is not None or version is not None:
        raise PipelineError(
            f"storage and version are for URLs, and {str(path)!r} is a local folder. Leave them "
            "out."
        )
    return Pipeline(FolderSource(path, classes=classes, extensions=extensions))


def from_files(
    paths: Sequence[Path],
    labels: Sequence[Any] | None = None,
    *,
    storage: Mapping[str, str] | None = None,
) -> Pipeline:
    """A list of files: ``bytes``, or ``(bytes, label)`` with ``labels``.

    ``paths`` may be URLs of objects in one store. ``storage``: see ``from_folder``.
    """
    if not isinstance(paths, (str, PathLike)):
        paths = [(is_url(path) and local_path(str(path))) or path for path in paths]
        remote = [path for path in paths if is_url(path)]
        if remote:
            from penstock.source.remote import RemoteFilesSource

            if len(remote) != len(paths):
                local = next(path for path in paths if not is_url(path))
                raise PipelineError(
                    f"{str(remote[0])!r} is a URL and {str(local)!r} is a local path. Make one "
                    "pipeline for each."
                )
            return Pipeline(RemoteFilesSource([str(path) for path in remote], labels, storage))
    if storage is not None:
        raise PipelineError("storage is for URLs, and all paths are local. Leave it out.")
    return Pipeline(FilesSource(paths, labels))


def from_parquet(
    paths: Path | Sequence[Path],
    *,
    columns: Sequence[str] | None = None,
    storage: Mapping[str, str] | None = None,
    version: str | None = None,
) -> Pipeline:
    """Rows of Parquet files as dicts of their columns.

    ``paths`` is a file, a folder, a pattern, a URL of one of these, or a list. ``storage``,
    ``version``: see ``from_folder``.
    """
    from penstock.source.parquet import ParquetSource

    return Pipeline(ParquetSource(paths, columns, storage, version))


def from_arrow(
    data: Any, *, columns: Sequence[str] | None = None, version: str | None = None
) -> Pipeline:
    """Rows of a ``pyarrow.Table`` or a Hugging Face dataset as dicts of their columns.

    Values are those of ``from_parquet``: images are the bytes of their files, for
    ``ps.image.decode``, and the compiled kernel reads them where they lie. ``version`` identifies a
    table for disk caches; without it all its bytes are hashed for them.

    >>> import pyarrow as pa
    >>> import penstock as ps
    >>> table = pa.table({"text": ["a", "b"], "label": [0, 1]})
    >>> ps.from_arrow(table).source.read([1])
    [{'text': 'b', 'label': 1}]
    """
    from penstock.source.arrow import ArrowSource

    return Pipeline(ArrowSource(data, columns, version))


def from_tar(
    paths: Path | Sequence[Path],
    *,
    fields: str | Sequence[str] | Mapping[str, str] | None = None,
    decoders: Mapping[str, Callable[[bytes], Any] | None] | Literal["auto"] | None = "auto",
    storage: Mapping[str, str] | None = None,
    version: str | None = None,
) -> Pipeline:
    """Samples of tar shards, as WebDataset writes them: members with one name are one sample.

    ``paths`` is a file, a folder, a pattern (``"train-{000..146}.tar"``, ``"train-*.tar"``), or a
    list of these. ``fields`` says which extensions make up a sample: ``("jpg;png", "cls")`` for a
    tuple, ``{"image": "jpg;png", "label": "cls"}`` for a dict, ``"jpg"`` for its bytes alone; by
    default a dict of all. Whole numbers (cls), text (txt), json and npy are decoded; ``decoders``
    adds functions of bytes by extension, and ``decoders=None`` leaves all contents as bytes.

    All of these may be URLs: ``"s3://bucket/train-{000..146}.tar"``. ``storage``, ``version``: see
    ``from_folder``.
    """
    from penstock.source.tar import TarSource

    return Pipeline(TarSource(paths, fields, decoders, storage, version))


def from_mds(
    folder: Path,
    *,
    columns: Sequence[str] | None = None,
    storage: Mapping[str, str] | None = None,
    version: str | None = None,
) -> Pipeline:
    """Samples of MosaicML Streaming's shards (MDS) as dicts of their columns.

    ``folder`` holds ``index.json``; it may be a URL. JPEG and PNG columns are bytes, for
    ``ps.image.decode``. ``storage``, ``version``: see ``from_folder``.
    """
    from penstock.source.mds import MdsSource

    return Pipeline(MdsSource(folder, columns, storage, version))


def from_dataset(
    dataset: Any,
    *,
    random: bool | None = None,
    version: str | None = None,
) -> Pipeline:
    """Any object with ``__len__`` and ``__getitem__``, or a stream, which can only be iterated.

    A function that returns an iterator is a stream too.

    A dataset that augments samples in ``__getitem__`` is random: the global generators are seeded
    for every sample. A dataset of your own is taken as random unless you give ``random=False``;
    lists and arrays are not. ``version`` identifies data that cannot be fingerprinted.
    """
    if is_stream(dataset):
        return Pipeline(StreamSource(dataset, version=version))
    return Pipeline(DatasetSource(dataset, version=version, random=random))


def fused(stops: tuple[Stop, ...]) -> tuple[Stop, ...]:
    """The stops, with image operations joined if one step for several of them is faster."""
    modules = {type(getattr(stop, "function", None)).__module__ for stop in stops}
    if not any(module.startswith("penstock.image.") for module in modules):
        return stops  # nothing to fuse, so the image operations need not be imported
    from penstock.image.fused import fuse, fuse_augment

    return fuse_augment(fuse(stops))
