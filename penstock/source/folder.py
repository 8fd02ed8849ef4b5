"""Samples that are files in a folder, with sub-folders as classes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from penstock.errors import PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.operation import ArraySpec, BytesSpec, Spec
from penstock.source.files import read_files, stat_files, unreadable
from penstock.source.names import Names
from penstock.source.source import Source

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


class FolderSource(Source):
    """The files of a folder.

    With class folders a sample is ``(bytes, label)``; classes, labels and the order of the files
    are those of torchvision's ImageFolder. Without them it is the file's ``bytes``, and the files
    are those of the whole tree. ``classes="auto"`` takes sub-folders as classes if no file that
    counts lies beside them. ``extensions=None`` takes every file that is not hidden.
    """

    threadsafe: ClassVar[bool] = True
    runs_user_code: ClassVar[bool] = False

    def __init__(
        self,
        root: str | os.PathLike[str],
        classes: Literal["auto"] | bool = "auto",
        extensions: str | Sequence[str] | None = IMAGE_EXTENSIONS,
    ) -> None:
        if classes != "auto" and not isinstance(classes, bool):
            raise PipelineError(f'classes is {classes!r}; give "auto", True or False.')
        self.root = os.path.abspath(os.path.expanduser(root))
        self._extensions = _extensions(extensions)
        if not os.path.isdir(self.root):
            what = "is a file, not a folder" if os.path.exists(self.root) else "is not there"
            raise SourceError(f"The folder {self.root} {what}. Check the path.")
        names, folders = self._list(self.root)
        if classes == "auto":
            classes = bool(folders) and not names
        if classes and not folders:
            raise SourceError(
                f"{self.root} has no sub-folders to be classes. Give the folder that holds one "
                "folder for each class, or classes=False."
            )
        self.classes: list[str] | None = sorted(folders) if classes else None
        self._scan()

    @property
    def class_to_idx(self) -> dict[str, int] | None:
        if self.classes is None:
            return None
        return {name: label for label, name in enumerate(self.classes)}

    def _scan(self) -> None:
        folders: list[str] = []
        labels: list[int] = []
        counts: list[int] = []
        empty: list[str] = []

        def names() -> Iterator[str]:
            for label, top in enumerate([""] if self.classes is None else self.classes):
                before = len(counts)
                for folder, found in sorted(self._walk(top)):
                    folders.append(folder)
                    labels.append(label)
                    counts.append(len(found))
                    yield from found
                if len(counts) == before:
                    empty.append(top)

        self._names = Names(names())
        self._folders = Names(folders)
        self._labels = np.array(labels, dtype=np.int64)
        self._ends = np.cumsum(counts, dtype=np.int64)
        if empty:
            self._complain(empty)

    def _complain(self, empty: list[str]) -> None:
        wanted = "files" if self._extensions is None else f"{', '.join(self._extensions)} files"
        remedy = 'name other file types with extensions=(".xyz", ...), or take all with None'
        if self.classes is None or len(empty) == len(self.classes):
            raise SourceError(f"{self.root} holds no {wanted}. Check the path, or {remedy}.")
        shown = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise SourceError(
            f"In {self.root}, class {shown} holds no {wanted}. Remove what is not a class "
            f"(its label would shift all others), or {remedy}."
        )

    def _wanted(self, name: str) -> bool:
        if self._extensions is None:
            return not name.startswith(".")
        return name.lower().endswith(self._extensions)

    def _list(self, folder: str) -> tuple[list[str], list[str]]:
        """The files that count and the sub-folders, by name."""
        names: list[str] = []
        folders: list[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir():
                        if not (entry.is_symlink() and _leads_up(entry.path)):
                            folders.append(entry.name)
                    elif self._wanted(entry.name):
                        names.append(entry.name)
        except OSError as error:
            raise unreadable(folder, error) from error
        return names, folders

    def _walk(self, top: str) -> Iterator[tuple[str, list[str]]]:
        """Each folder that holds files, relative to the root, with its files in order."""
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            names, folders = self._list(os.path.join(self.root, folder))
            waiting.extend(os.path.join(folder, name) for name in folders)
            if names:
                yield folder, sorted(names)

    def __len__(self) -> int:
        return len(self._names)

    def _path(self, index: int) -> tuple[str, int]:
        """Where a sample is, and which class it is of."""
        name = self._names[index]
        place = int(self._ends.searchsorted(index, side="right"))
        return os.path.join(self.root, self._folders[place], name), self._labels.item(place)

    def read(self, indices: Sequence[int]) -> list[Any]:
        places = [self._path(index) for index in indices]
        found = read_files([path for path, _ in places])
        if self.classes is None:
            return found
        return [(data, label) for data, (_, label) in zip(found, places, strict=True)]

    def name(self, index: int) -> str:
        return self._path(index)[0]

    def identity(self) -> str:
        stats = stat_files(len(self), self.name)
        return fingerprint(
            ("folder", self.classes, self._folders, self._ends, self._names, self._labels, stats)
        )

    def fields(self) -> dict[str | int, Spec] | Spec:
        if self.classes is None:
            return BytesSpec()
        return {0: BytesSpec(), 1: ArraySpec.of((), np.int64)}


def _extensions(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    found = tuple(text.lower() for text in ([given] if isinstance(given, str) else given))
    if not found:
        raise PipelineError("extensions is empty; name some, or give None to take every file.")
    return found


def _leads_up(link: str) -> bool:
    """Whether a link leads to a folder it lies in, which would make the walk endless."""
    here = os.path.realpath(os.path.dirname(link))
    there = os.path.realpath(link)
    return os.path.commonpath([here, there]) == there
