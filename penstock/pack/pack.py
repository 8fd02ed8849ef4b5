"""Packs the samples of a pipeline into tar shards: in parallel, resumable, atomic by shard."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock import config
from penstock.errors import PipelineError, SourceError, StoreError
from penstock.fingerprint import fingerprint
from penstock.host.text import many, span
from penstock.loader import Loader
from penstock.options import Options, is_whole
from penstock.pack.members import Form, Members
from penstock.pack.shard_writer import write_shard
from penstock.pipeline import Pipeline
from penstock.source.manifest import Manifest, read_manifest
from penstock.source.objects.protocol import StorageOptions
from penstock.source.packed_folder import PackedFolder, folder_at
from penstock.source.tar import KEY, TarSource
from penstock.source.tar_index import split_name
from penstock.stops.road import draws_globally

SHARD_BYTES = 256_000_000
"""The size of shards if the user gives none: large enough that opening one costs nothing beside
reading it, small enough that a lost one is soon made again."""

_TOGETHER = 8
"""Samples that a worker prepares and sends at a time. The first ones also give the mean size."""

_READ_BACK = 64
"""Packed samples that are read to measure what an epoch costs now."""

PackProgress = Callable[[int, int], None]
"""Called with the number of samples packed so far, and their total."""


@dataclass(frozen=True)
class PackReport:
    """What ``pack`` did, and when it pays.

    - ``shards``, ``samples``, ``nbytes``: of the folder; ``written``, ``packed``: the shards and
      samples of this run.
    - ``seconds``: wall time; ``cost``: seconds that workers and the writer were busy.
    - ``before``, ``after``: busy seconds per sample of the stages that were packed, and of reading
      a packed sample, both as measured in this run; ``None`` if nothing was packed.
    """

    folder: str
    samples: int
    shards: int
    written: int
    packed: int
    nbytes: int
    seconds: float
    cost: float
    before: float | None
    after: float | None

    @property
    def pays_after(self) -> float | None:
        """Epochs after which packing has saved what it cost; ``None`` if it never does."""
        if self.before is None or self.after is None or self.before <= self.after:
            return None
        return self.cost / ((self.before - self.after) * self.packed)

    def __str__(self) -> str:
        size = config.show_size(self.nbytes)
        lines = [
            f"{self.folder}: {many(self.samples, 'sample')} in {many(self.shards, 'shard')}, {size}"
        ]
        if not self.written:
            return lines[0] + "\nnothing to do: everything was packed before"
        lines.append(
            f"{many(self.written, 'shard')} written in {span(self.seconds)}; workers and writer "
            f"were busy for {span(self.cost)}"
        )
        if self.before is not None and self.after is not None:
            lines.append(
                f"a sample cost {1e3 * self.before:.2f} ms, and costs {1e3 * self.after:.2f} ms "
                "packed (read from the page cache)"
            )
            epochs = self.pays_after
            lines.append(
                "packing does not pay by processor time; it may by sequential reading"
                if epochs is None
                else f"it pays after {epochs:.1f} epochs"
            )
        return "\n".join(lines)


def pack(
    pipeline: Pipeline,
    to: str | os.PathLike[str],
    *,
    per_shard: int | Literal["auto"] = "auto",
    workers: int | Literal["auto"] = "auto",
    on_progress: PackProgress | None = None,
    storage: StorageOptions | None = None,
) -> PackReport:
    """Write the samples of a pipeline as tar shards. See ``Pipeline.pack``."""
    if per_shard != "auto" and (not is_whole(per_shard) or per_shard < 1):
        raise PipelineError(
            f'per_shard is {per_shard!r}; give a number of samples, 1 or more, or "auto".'
        )
    prefix = deterministic_prefix(pipeline)
    folder = folder_at(to, storage)
    with _locked(folder):
        return _Packing(prefix, folder, storage, per_shard, workers, on_progress).run()


def deterministic_prefix(pipeline: Pipeline) -> Pipeline:
    """The pipeline without ``batch`` and caches. Raises PipelineError if a stage is random."""
    if not pipeline.source.indexed:
        raise PipelineError(
            "pack() of a stream: samples of a stream have no index, so packing could not go on "
            "after an interruption. Use a source with random access."
        )
    if draws_globally(pipeline.source):
        raise PipelineError(
            "pack() of a dataset that may be random: each sample would be packed with one random "
            "outcome, for ever. Give from_dataset(..., random=False) if it draws no random numbers."
        )
    for stop in (*pipeline.stops, *([pipeline.echoed] if pipeline.echoed else [])):
        if stop.random or stop.global_random or stop.renews or stop.repeats:
            what = "is random" if stop.random or stop.global_random else "repeats samples"
            raise PipelineError(
                f"pack() stands below {stop.name}, which {what}: each sample would be packed with "
                "one outcome, for ever. Pack the stages above it, and put it below "
                "from_tar(...) of the packed data. If it is your own function and not random, "
                "give map(..., random=False)."
            )
    kept = tuple(stop for stop in pipeline.stops if not stop.transparent)
    return replace(pipeline, stops=kept, batching=None, echoed=None)


@contextmanager
def _locked(folder: PackedFolder) -> Iterator[None]:
    """Make the folder, and keep other processes of this machine from packing into it."""
    try:
        file = os.open(folder.lock_file(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StoreError(
            f"{folder.shown} cannot be written to: {error}. Give another folder."
        ) from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                f"Another process is packing into {folder.shown}. Wait for it, or give another "
                "folder."
            ) from error
        yield
    finally:
        os.close(file)


@dataclass(frozen=True)
class _Listed:
    """The samples that are still to be packed, in order."""

    samples: NDArray[np.int64]

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return self.samples


class _Packing:
    """One run of ``pack``."""

    def __init__(
        self,
        prefix: Pipeline,
        folder: PackedFolder,
        storage: StorageOptions | None,
        per_shard: int | Literal["auto"],
        workers: int | Literal["auto"],
        on_progress: PackProgress | None,
    ) -> None:
        self._prefix, self._folder, self._storage = prefix, folder, storage
        self._workers, self._on_progress = workers, on_progress
        self._count = len(prefix.source)
        made_of = fingerprint((prefix.source.identity(), [s.fingerprint() for s in prefix.stops]))
        self._manifest = self._begin(made_of, per_shard)
        self._form = Form(self._manifest.form, self._manifest.fields)
        self._writing = 0.0

    def _begin(self, made_of: str, per_shard: int | Literal["auto"]) -> Manifest:
        """The manifest of the folder, or a new one."""
        old = read_manifest(self._folder)
        if old is None:
            lines = repr(self._prefix).splitlines()
            made_by = [line.strip() for line in lines]
            size = 0 if per_shard == "auto" else per_shard
            return Manifest(made_of, made_by, _versions(), self._count, size)
        if old.fingerprint != made_of:
            raise StoreError(
                f"{self._folder.shown} holds the samples of another pipeline or of other data "
                f"(made by {' '.join(old.made_by)}). Give another folder, or remove this one first."
            )
        if per_shard not in ("auto", old.per_shard):
            raise StoreError(
                f"{self._folder.shown} has shards of {old.per_shard} samples, and per_shard is "
                f"{per_shard}. Leave per_shard out, or give another folder."
            )
        sizes = self._folder.sizes([shard.name for shard in old.shards])
        old.shards = [
            shard for shard, size in zip(old.shards, sizes, strict=True) if size == shard.nbytes
        ]
        return old

    def run(self) -> PackReport:
        started = time.perf_counter()
        manifest, written, busy = self._manifest, 0, 0.0
        missing = self._missing()
        if len(missing):
            with self._loader(missing) as loader:
                samples = self._samples(loader, missing)
                if not manifest.per_shard:
                    samples = self._choose_size(samples)
                for number in self._shards_of(missing):
                    self._write(number, samples)
                    written += 1
                busy = loader.stats().pool.busy
        cost = busy + self._writing
        return PackReport(
            self._folder.shown,
            self._count,
            len(manifest.shards),
            written,
            len(missing),
            sum(shard.nbytes for shard in manifest.shards),
            time.perf_counter() - started,
            cost,
            busy / len(missing) if len(missing) else None,
            self._read_back() if written else None,
        )

    def _missing(self) -> NDArray[np.int64]:
        there = np.zeros(self._count, dtype=bool)
        for shard in self._manifest.shards:
            there[shard.first : shard.first + shard.samples] = True
        return np.flatnonzero(~there).astype(np.int64)

    def _shards_of(self, missing: NDArray[np.int64]) -> list[int]:
        numbers: list[int] = np.unique(missing // self._manifest.per_shard).tolist()
        return numbers

    def _loader(self, missing: NDArray[np.int64]) -> Loader:
        road = self._prefix.road(0)
        quick = road.source.threadsafe and all(stop.threadsafe for stop in road.stops)
        options = Options(
            workers=self._workers,
            kind="threads" if quick and self._workers != 0 else "auto",
            order=_Listed(missing),
        )
        return Loader(self._prefix.batch(_TOGETHER, collate=list), options)

    def _samples(self, loader: Loader, missing: NDArray[np.int64]) -> Iterator[tuple[str, Members]]:
        """Keys and members of the missing samples, in order."""
        names, number = self._prefix.source.name, 0
        for batch in loader:
            for sample in batch:
                index = int(missing[number])
                number += 1
                yield key_of(sample, index), self._form.members(sample, names(index))
                if self._on_progress is not None:
                    done = self._count - len(missing) + number
                    self._on_progress(done, self._count)

    def _choose_size(self, samples: Iterator[tuple[str, Members]]) -> Iterator[tuple[str, Members]]:
        """Choose the number of samples in a shard by the size of the first ones."""
        first = list(islice(samples, _TOGETHER))
        nbytes = sum(len(content) for _, members in first for content in members.values())
        mean = max(1, nbytes // len(first))
        self._manifest.per_shard = max(1, min(self._count, SHARD_BYTES // mean))

        def joined() -> Iterator[tuple[str, Members]]:
            yield from first
            yield from samples

        return joined()

    def _write(self, number: int, samples: Iterator[tuple[str, Members]]) -> None:
        manifest = self._manifest
        first = number * manifest.per_shard
        count = min(manifest.per_shard, self._count - first)
        prepared = 0.0

        def timed() -> Iterator[tuple[str, Members]]:
            nonlocal prepared
            for _ in range(count):
                started = time.perf_counter()
                sample = next(samples)
                prepared += time.perf_counter() - started
                yield sample

        started = time.perf_counter()
        name = f"shard-{number:06d}.tar"
        path = f"{self._folder.shown}/{name}"
        try:
            shard = write_shard(self._folder, name, first, timed())
            if shard.samples != count:
                raise StoreError(
                    f"{path} got {shard.samples} samples for {count}: two neighbours have the same "
                    f"{KEY}. Leave {KEY} out with a map above."
                )
            manifest.form, manifest.fields = self._form.kind, self._form.fields
            manifest.shards = sorted([*manifest.shards, shard], key=lambda one: one.first)
            manifest.write(self._folder)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written: {error.strerror or error}. Make room, or give another "
                "folder; finished shards are kept, and packing goes on from there."
            ) from error
        self._writing += time.perf_counter() - started - prepared

    def _read_back(self) -> float:
        """Seconds to read a packed sample, in order, in this thread."""
        source = TarSource(self._folder.shown, storage=self._storage)
        count = min(_READ_BACK, len(source))
        source.read([0])
        started = time.perf_counter()
        for first in range(0, count, _TOGETHER):
            source.read(range(first, min(first + _TOGETHER, count)))
        return (time.perf_counter() - started) / count


def key_of(sample: Any, index: int) -> str:
    """The name of a packed sample: that which it had in a tar shard, or its number."""
    key = sample.get(KEY) if isinstance(sample, dict) else None
    if isinstance(key, str) and split_name(f"{key}.x") == (key, "x") and not key.split()[1:]:
        return key
    return f"{index:09d}"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("penstock", "numpy"):
        versions[package] = importlib.metadata.version(package)
    return versions


# ----------------------------------------------------------------------------------------- check


@dataclass(frozen=True)
class PackCheck:
    """The result of ``check``: how many shards and bytes were read, and what is wrong."""

    shards: int
    nbytes: int
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        if not self.wrong:
            size = config.show_size(self.nbytes)
            return f"{many(self.shards, 'shard')} ({size}) as they were written"
        return "\n".join(self.wrong)


def check(
    folder: str | os.PathLike[str],
    on_progress: PackProgress | None = None,
    storage: StorageOptions | None = None,
) -> PackCheck:
    """Compare the shards of a packed folder with their checksums."""
    place = folder_at(folder, storage)
    manifest = read_manifest(place)
    if manifest is None:
        raise SourceError(
            f"{place.shown} has no pack.json: it is not a folder that pack() has written."
        )
    wrong: list[str] = []
    with ThreadPoolExecutor(config.cores()) as pool:
        found = pool.map(lambda shard: place.digest(shard.name), manifest.shards)
        for number, (shard, digest) in enumerate(zip(manifest.shards, found, strict=True), 1):
            if digest is None:
                wrong.append(f"{shard.name} is missing or cannot be read; pack again to write it")
            elif digest != shard.sha256:
                wrong.append(f"{shard.name} is damaged; remove it, and pack again to write it")
            if on_progress is not None:
                on_progress(number, len(manifest.shards))
    if not manifest.complete:
        done = sum(shard.samples for shard in manifest.shards)
        wrong.append(f"only {done:,} of {manifest.samples:,} samples are packed; pack again")
    nbytes = sum(shard.nbytes for shard in manifest.shards)
    return PackCheck(len(manifest.shards), nbytes, tuple(wrong))


def until(pipeline: Pipeline, stage: str) -> Pipeline:
    """The pipeline up to this stage. Raises PipelineError if it has none of that name."""
    names: Sequence[str] = [stop.name for stop in pipeline.stops]
    if stage == "source":
        return replace(pipeline, stops=(), batching=None, echoed=None)
    if stage not in names:
        raise PipelineError(
            f"the pipeline has no stage {stage!r}. Its stages: {', '.join(['source', *names])}."
        )
    last = len(names) - names[::-1].index(stage)
    return replace(pipeline, stops=pipeline.stops[:last], batching=None, echoed=None)
