"""A source whose samples are a list of files, and the reading of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock import native
from penstock.errors import PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.operation import ArraySpec, BytesSpec, Spec
from penstock.source.listing import Listing, unreadable
from penstock.source.names import Names
from penstock.source.source import FileSamples, Source

FEWEST_IN_FOLDER = 2
"""Files that follow each other in one folder, on average, so that keeping folders saves memory. In
a shuffled list nearly every file is in another folder than the one before it."""


class FilesSource(Source):
    """A list of files. A sample is the file's bytes; with labels, ``(bytes, label)``."""

    threadsafe: ClassVar[bool] = True
    runs_user_code: ClassVar[bool] = False

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        labels: Sequence[Any] | NDArray[Any] | None = None,
    ) -> None:
        if isinstance(paths, (str, os.PathLike)):
            raise PipelineError(
                f"paths is {str(paths)!r}, one path; give a list of files. "
                "For all files of a folder, give the folder to from_folder."
            )
        self._listing = _listing(paths)
        if not len(self):
            raise SourceError("The list of files is empty; give at least one path.")
        if labels is not None and len(labels) != len(self):
            raise PipelineError(
                f"There are {len(self)} files and {len(labels)} labels; "
                "give one label for each file."
            )
        self._labels = None if labels is None else compact_labels(labels)

    def __len__(self) -> int:
        return len(self._listing)

    def read(self, indices: Sequence[int]) -> list[Any]:
        contents = read_files([self._listing.path(index) for index in indices])
        if self._labels is None:
            return contents
        return [(data, self._label(index)) for data, index in zip(contents, indices, strict=True)]

    def _label(self, index: int) -> Any:
        labels = self._labels
        return labels.item(index) if isinstance(labels, np.ndarray) else labels[index]  # type: ignore[index]

    def name(self, index: int) -> str:
        return self._listing.path(index)

    @property
    def listing(self) -> Listing:
        return self._listing

    def file_samples(self) -> FileSamples | None:
        labels = self._labels
        if labels is None:
            return FileSamples(self.listing, None)
        if not isinstance(labels, np.ndarray):
            return None
        return FileSamples(self.listing, 0, {1: labels.take})

    def identify(self, stats: NDArray[np.int64] | None) -> str:
        return fingerprint(("files", *self._listing.parts, stats, self._labels))

    def fields(self) -> dict[str | int, Spec] | Spec:
        if self._labels is None:
            return BytesSpec()
        known = isinstance(self._labels, np.ndarray)
        return {0: BytesSpec(), 1: ArraySpec.of((), self._labels.dtype) if known else None}  # type: ignore[union-attr]


def _listing(paths: Iterable[str | os.PathLike[str]]) -> Listing:
    """The absolute paths. Files of one folder that follow each other share its path."""
    folders: list[str] = []
    counts: list[int] = []

    def names() -> Iterator[str]:
        given = last = None
        for path in paths:
            folder, _, name = os.fspath(path).rpartition("/")
            unusual = name in ("", ".", "..")
            if folder != given or unusual:  # otherwise it is the folder again
                given = None if unusual else folder
                folder, _, name = os.path.abspath(path).rpartition("/")
                if folder != last:
                    folders.append(folder[1:])
                    counts.append(0)
                    last = folder
            counts[-1] += 1
            yield name

    packed = Names(names())
    listing = Listing(packed, "/", Names(folders), np.cumsum(counts, dtype=np.int64))
    if FEWEST_IN_FOLDER * len(folders) <= len(listing):
        return listing
    return Listing(Names(listing.path(index) for index in range(len(listing))))


def compact_labels(labels: Sequence[Any] | NDArray[Any]) -> NDArray[Any] | list[Any]:
    """Labels as an array if they are plain numbers, which they nearly always are."""
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iuf":
        return labels.astype(np.float64 if labels.dtype.kind == "f" else np.int64)
    kinds = set(map(type, labels))
    if kinds == {int}:
        try:
            return np.array(labels, dtype=np.int64)
        except OverflowError:
            return list(labels)
    return np.array(labels, dtype=np.float64) if kinds == {float} else list(labels)


@lru_cache(maxsize=1)
def _reader() -> Callable[[tuple[str, ...]], list[Any]]:
    """The function that reads files: the compiled kernel's, or the one in Python.

    The kernel releases the GIL once, not for every system call: with two threads a file of 110 KB
    takes 0.06 ms instead of 0.13, most of which is waiting for the GIL.
    """
    compiled = native.kernel()
    return _read_each if compiled is None else getattr(compiled, "read_files", _read_each)


def read_files(paths: Sequence[str]) -> list[bytes]:
    """The contents of files, in order."""
    contents = _reader()(tuple(paths))
    for path, content in zip(paths, contents, strict=True):
        if isinstance(content, OSError):
            raise unreadable(path, content) from content
    return contents


def _read_each(paths: tuple[str, ...]) -> list[Any]:
    contents: list[Any] = []
    for path in paths:
        try:
            contents.append(_read(path))
        except OSError as error:
            contents.append(error)
    return contents


def _read(path: str) -> bytes:
    """The content of a file, without ``open``, whose layers cost as much as a small file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        data = os.read(file, size + 1)
        if len(data) == size:
            return data
        # A file too large for one read, one that grows, or one that does not know its size.
        parts = [data]
        while parts[-1]:
            parts.append(os.read(file, 1 << 24))
        return b"".join(parts)
    finally:
        os.close(file)
