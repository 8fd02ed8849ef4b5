"""Reading parts of files: the one contract through which sources read shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SourceError
from penstock.source.listing import Listing, unreadable

FilePart = tuple[int, int]
"""Offset and size of a part of a file, in bytes."""

GAP = 4096
"""Bytes between two parts that are read along with them: a page costs less than another request."""


class RangeReader(Protocol):
    """Reads parts of one shard, wherever it is. May be used by several threads at once.

    ``path`` names the shard in errors. ``read`` returns the parts in the order of the request; it
    raises SourceError if the shard ends before one of them. ``size`` is that of the shard.
    ``block``: bytes to read at a time where much of the shard is read in sequence. ``far``: a
    request costs so much that what is learnt of the shard is kept on this machine.
    """

    path: str
    block: int
    far: bool

    def size(self) -> int: ...

    def about(self) -> str | None:
        """What changes if the shard does: its path, size and version; ``None`` if unknown."""
        ...

    def beside(self, path: str) -> bytes | None:
        """The content of a small file with this path; ``None`` if there is none."""
        ...

    def read(self, ranges: Sequence[FilePart]) -> list[bytes]: ...

    def will_need(self, ranges: Sequence[FilePart]) -> None:
        """Say that these parts are read soon. May do nothing."""
        ...


class LocalRanges:
    """Parts of a file of this machine.

    The file is opened for each request: a data set may have more shards than a process may have
    open files, and opening one costs less than a hundredth of decoding an image.
    """

    block = GAP
    far = False

    def __init__(self, path: str) -> None:
        self.path = path

    def about(self) -> str | None:
        try:
            stats = os.stat(self.path)
        except OSError:
            return None
        return f"{os.path.realpath(self.path)}\0{stats.st_size}\0{stats.st_mtime_ns}"

    def beside(self, path: str) -> bytes | None:
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError:
            return None

    def size(self) -> int:
        try:
            return os.stat(self.path).st_size
        except OSError as error:
            raise unreadable(self.path, error) from error

    def read(self, ranges: Sequence[FilePart]) -> list[bytes]:
        parts: list[bytes] = [b""] * len(ranges)
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(self.path, error) from error
        try:
            for start, end, places in joined(ranges):
                block = self._read(file, start, end - start)
                for place in places:
                    offset, size = ranges[place]
                    parts[place] = block[offset - start : offset - start + size]
        finally:
            os.close(file)
        return parts

    def _read(self, file: int, offset: int, size: int) -> bytes:
        blocks: list[bytes] = []
        at, left = offset, size
        while left:
            try:
                block = os.pread(file, left, at)
            except OSError as error:
                raise SourceError(
                    f"{self.path} cannot be read at byte {at}: {error.strerror or error}."
                ) from error
            if not block:
                raise SourceError(
                    f"{self.path} ends before byte {at + left}, up to which a sample reaches: the "
                    "file was cut off or replaced after the source was made. Copy it again, and "
                    "make the source again."
                )
            blocks.append(block)
            at += len(block)
            left -= len(block)
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def will_need(self, ranges: Sequence[FilePart]) -> None:
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # reported by the read itself
        try:
            for start, end, _ in joined(ranges):
                os.posix_fadvise(file, start, end - start, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass
        finally:
            os.close(file)


def joined(ranges: Sequence[FilePart], gap: int = GAP) -> list[tuple[int, int, list[int]]]:
    """The ranges as few large ones: (start, end, places of the requests in it).

    >>> joined([(100, 50), (0, 10), (9_000, 1)], gap=100)
    [(0, 150, [1, 0]), (9000, 9001, [2])]
    """
    blocks: list[tuple[int, int, list[int]]] = []
    for place in sorted(range(len(ranges)), key=lambda place: ranges[place][0]):
        offset, size = ranges[place]
        if blocks and offset <= blocks[-1][1] + gap:
            start, end, places = blocks[-1]
            places.append(place)
            blocks[-1] = (start, max(end, offset + size), places)
        else:
            blocks.append((offset, offset + size, [place]))
    return blocks


class FileRanges:
    """Samples that are parts of files: for each sample the number of its file, offset and size."""

    def __init__(
        self,
        listing: Listing,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> None:
        self._listing = listing
        self._files, self._offsets, self._sizes = files, offsets, sizes

    def place(self, index: int) -> tuple[str, FilePart]:
        """The path of the file of a sample, and its part of it."""
        path = self._listing.path(int(self._files[index]))
        return path, (int(self._offsets[index]), int(self._sizes[index]))

    def kernel_paths(self) -> Any:
        """The parts for the compiled kernel, which reads them without Python."""
        return self._listing.kernel_paths(
            *(np.ascontiguousarray(a) for a in (self._files, self._offsets, self._sizes))
        )

    def pick(self, indices: NDArray[np.int64]) -> FileRanges:
        """These samples alone, with new numbers from 0 on."""
        columns = (self._files, self._offsets, self._sizes)
        return FileRanges(self._listing, *(column[indices] for column in columns))
