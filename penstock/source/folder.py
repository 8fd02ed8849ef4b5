"""A source whose samples are the files of a folder, with sub-folders as classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.operation import ArraySpec, BytesSpec, Spec
from penstock.source.files import read_files
from penstock.source.listing import Listing, unreadable
from penstock.source.names import Names
from penstock.source.source import FileSamples, Numbers, Source

IMAGE_EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)


ListFolder = Callable[[str], tuple[list[str], list[str]]]
"""Lists a folder, by its path below the root: the names of its files and of its sub-folders."""


class Folder(Source):
    """The files of a folder, on this machine or in a bucket.

    With class folders a sample is ``(bytes, label)``; classes, labels and the order of the files
    are those of torchvision's ImageFolder. Without them a sample is the file's ``bytes``, and all
    files of the tree are used. ``classes="auto"`` takes sub-folders as classes if the folder itself
    holds no file with one of the extensions. ``extensions=None`` uses every file that is not
    hidden.
    """

    threadsafe: ClassVar[bool] = True
    runs_user_code: ClassVar[bool] = False

    root: str
    classes: list[str] | None

    def _scan(
        self,
        look: ListFolder,
        classes: Literal["auto"] | bool,
        extensions: str | Sequence[str] | None,
    ) -> None:
        """Find classes and files below the root."""
        if classes != "auto" and not isinstance(classes, bool):
            raise PipelineError(f'classes is {classes!r}; give "auto", True or False.')
        self._extensions = _extensions(extensions)

        def wanted(folder: str) -> tuple[list[str], list[str]]:
            names, folders = look(folder)
            return self._wanted(names), folders

        names, folders = wanted("")
        if classes == "auto":
            classes = bool(folders) and not names
        if classes and not folders:
            raise SourceError(
                f"{self.root} has no sub-folders to use as classes. Give the folder that holds one "
                "folder for each class, or classes=False."
            )
        self.classes = sorted(folders) if classes else None
        self._scan_classes(wanted)

    def origin(self) -> str:
        return self.root if "://" in self.root else os.path.abspath(self.root)

    @property
    def class_to_idx(self) -> dict[str, int] | None:
        if self.classes is None:
            return None
        return {name: label for label, name in enumerate(self.classes)}

    def _scan_classes(self, look: ListFolder) -> None:
        folders: list[str] = []
        labels: list[int] = []
        counts: list[int] = []
        empty: list[str] = []

        def names() -> Iterator[list[str]]:
            for label, top in enumerate([""] if self.classes is None else self.classes):
                before = len(counts)
                for folder, files in sorted(_walk(top, look)):
                    folders.append(folder)
                    labels.append(label)
                    counts.append(len(files))
                    yield files
                if len(counts) == before:
                    empty.append(top)

        self._names = Names(chain.from_iterable(names()))
        self._folders = Names(folders)
        self._labels = np.array(labels, dtype=np.int64)
        self._ends = np.cumsum(counts, dtype=np.int64)
        if empty:
            self._refuse_empty(empty)

    def _refuse_empty(self, empty: list[str]) -> None:
        wanted = "files" if self._extensions is None else f"{', '.join(self._extensions)} files"
        remedy = 'name other file types with extensions=(".xyz", ...), or use all with None'
        if self.classes is None or len(empty) == len(self.classes):
            raise SourceError(f"{self.root} holds no {wanted}. Check the path, or {remedy}.")
        shown = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise SourceError(
            f"In {self.root}, class {shown} holds no {wanted}. Remove folders that are not classes "
            f"(their labels would shift all others), or {remedy}."
        )

    def _wanted(self, names: list[str]) -> list[str]:
        wanted = self._extensions
        if wanted is None:
            return [name for name in names if not name.startswith(".")]
        return [name for name in names if name.endswith(wanted) or name.lower().endswith(wanted)]

    def __len__(self) -> int:
        return len(self._names)

    def _with_labels(self, contents: list[bytes], indices: Sequence[int]) -> list[Any]:
        """Samples with these contents."""
        if self.classes is None:
            return contents
        paths = self._paths
        labels = [self._labels.item(paths.place(index)) for index in indices]
        return list(zip(contents, labels, strict=True))

    def name(self, index: int) -> str:
        return self._paths.path(index)

    @property
    def _paths(self) -> Listing:
        return Listing(self._names, self.root, self._folders, self._ends)

    @property
    def _numbers(self) -> dict[str | int, Numbers]:
        """The fields of a sample beside its content."""

        def labels(indices: NDArray[np.int64]) -> NDArray[Any]:
            found: NDArray[Any] = self._labels[self._ends.searchsorted(indices, side="right")]
            return found

        return {} if self.classes is None else {1: labels}

    @property
    def _content_field(self) -> int | None:
        return None if self.classes is None else 0

    def identify(self, stats: NDArray[np.int64] | None) -> str:
        return fingerprint(
            ("folder", self.classes, self._folders, self._ends, self._names, self._labels, stats)
        )

    def fields(self) -> dict[str | int, Spec] | Spec:
        if self.classes is None:
            return BytesSpec()
        return {0: BytesSpec(), 1: ArraySpec.of((), np.int64)}


class FolderSource(Folder):
    """The files of a folder on this machine."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        classes: Literal["auto"] | bool = "auto",
        extensions: str | Sequence[str] | None = IMAGE_EXTENSIONS,
    ) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        if not os.path.isdir(self.root):
            what = "is a file, not a folder" if os.path.exists(self.root) else "does not exist"
            raise SourceError(f"The folder {self.root} {what}. Check the path.")
        self._scan(self._list, classes, extensions)

    def _list(self, folder: str) -> tuple[list[str], list[str]]:
        folder = os.path.join(self.root, folder)
        names: list[str] = []
        folders: list[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if not entry.is_dir():
                        names.append(entry.name)
                    elif not (entry.is_symlink() and _points_upwards(entry.path)):
                        folders.append(entry.name)
        except OSError as error:
            raise unreadable(folder, error) from error
        return names, folders

    def read(self, indices: Sequence[int]) -> list[Any]:
        paths = self._paths
        return self._with_labels(read_files([paths.path(index) for index in indices]), indices)

    @property
    def listing(self) -> Listing:
        return self._paths

    def file_samples(self) -> FileSamples | None:
        return FileSamples(self.listing, self._content_field, self._numbers)


def _walk(top: str, look: ListFolder) -> Iterator[tuple[str, list[str]]]:
    """Each folder that holds files, relative to the root, with its sorted file names."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        names, folders = look(folder)
        waiting.extend(os.path.join(folder, name) for name in folders)
        if names:
            yield folder, sorted(names)


def _extensions(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    found = tuple(text.lower() for text in ([given] if isinstance(given, str) else given))
    if not found:
        raise PipelineError("extensions is empty; name some, or give None to use every file.")
    return found


def _points_upwards(link: str) -> bool:
    """Whether a link points to a folder that contains it, which would make the walk endless."""
    folder = os.path.realpath(os.path.dirname(link))
    target = os.path.realpath(link)
    return os.path.commonpath([folder, target]) == target
