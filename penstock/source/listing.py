"""The files of a source, in order, and their sizes and modification times."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import config, native
from penstock.errors import SourceError
from penstock.host.mounts import any_on_network
from penstock.source.names import Names

_log = logging.getLogger("penstock.source")

FileStats = NDArray[np.int64]
"""Size and modification time in nanoseconds of each file; -1 and the negative errno if it has
none."""

SAMPLE = 1024
"""Files in a sample. If 1 % of all files change, a sample misses that in 1 of 29,000 cases."""

SLICE = 4096
"""Files in one request: about 4 ms on a local file system."""

REPORT_EVERY = 10.0
"""Seconds between messages while a caller waits."""

_NETWORK_THREADS = 32
"""On a network file system each request only waits."""
_LOCAL_THREADS = 4


class Listing:
    """Files in order: names, or names in folders.

    ``folders`` are relative to ``root``; ``ends`` has the index after the last file of each. If
    they are left out, the names are paths.

    >>> listing = Listing(Names(["a.jpg", "b.jpg"]), "/data", Names(["cat"]), np.array([2]))
    >>> len(listing), listing.path(1)
    (2, '/data/cat/b.jpg')
    """

    def __init__(
        self,
        names: Names,
        root: str = "",
        folders: Names | None = None,
        ends: NDArray[np.int64] | None = None,
    ) -> None:
        self._names = names
        self._root = root
        self._folders = Names([""]) if folders is None else folders
        self._ends = np.array([len(names)]) if ends is None else ends

    def __len__(self) -> int:
        return len(self._names)

    @property
    def parts(self) -> tuple[Names, Names, NDArray[np.int64]]:
        """Names, folders and ends: what makes this listing differ from others below its root."""
        return self._names, self._folders, self._ends

    def place(self, index: int) -> int:
        """The number of the folder of a file."""
        return int(self._ends.searchsorted(index, side="right"))

    def path(self, index: int) -> str:
        return os.path.join(self._folder(self.place(index)), self._names[index])

    def _folder(self, place: int) -> str:
        return os.path.join(self._root, self._folders[place])

    def kernel_paths(self, *ranges: NDArray[np.int64]) -> Any:
        """The paths for the compiled kernel, which reads files without Python.

        ``ranges``: for samples that are parts of these files, the number of the file, the offset
        and the size of each.
        """
        names, folders, ends = self._names, self._folders, self._ends
        root = os.fsencode(self._root)
        if not self._root:  # the names are paths
            folders, ends = Names([]), np.empty(0, np.int64)
        return native.kernel().Paths(
            root.rstrip(b"/"), folders.text, folders.ends, ends, names.text, names.ends, *ranges
        )

    def sample(self) -> list[int]:
        """At most ``SAMPLE`` indices that depend on the number of files only.

        The files are cut into equal parts, and a hash chooses one file of each.
        """
        count = len(self)
        if count <= SAMPLE:
            return list(range(count))
        chosen = []
        for part in range(SAMPLE):
            start, stop = part * count // SAMPLE, (part + 1) * count // SAMPLE
            chosen.append(start + (part * 0x9E3779B97F4A7C15 >> 16) % (stop - start))
        return chosen

    @cached_property
    def on_network(self) -> bool:
        """Whether files of the sample are on a network file system."""
        return any_on_network(self.path(index) for index in self.sample())

    def stats(self, first: int, last: int) -> FileStats:
        """The stats of the files from ``first`` to before ``last``."""
        stats = np.empty((last - first, 2), dtype=np.int64)
        stat = _stat_names()
        index = first
        while index < last:
            place = self.place(index)
            stop = min(last, self._ends.item(place))
            folder = os.fsencode(self._folder(place))
            out = stats[index - first : stop - first]
            stat(folder, self._names.text, self._names.ends, index, out)
            index = stop
        return stats

    def sample_stats(self) -> FileStats:
        """The stats of the files of the sample."""

        def look(index: int) -> FileStats:
            return self.stats(index, index + 1)

        if not self.on_network:
            return np.concatenate([look(index) for index in self.sample()])
        with ThreadPoolExecutor(_NETWORK_THREADS) as pool:
            return np.concatenate(list(pool.map(look, self.sample())))

    def slices(self) -> Iterator[FileStats]:
        """The stats of all files, slice by slice."""
        for first in range(0, len(self), SLICE):
            yield self.stats(first, min(first + SLICE, len(self)))

    def all_stats(self, clock: Callable[[], float] = time.monotonic) -> FileStats:
        """The stats of all files, for a caller who waits. Raises SourceError for a missing file."""
        count = len(self)
        threads = self._threads()
        stats = np.empty((count, 2), dtype=np.int64)
        # Small slices on a network, so that a list of a thousand files uses all threads too.
        step = max(1, min(SLICE, -(-count // threads)))

        def look(first: int) -> int:
            last = min(first + step, count)
            stats[first:last] = self.stats(first, last)
            return last

        reported = clock()
        with ThreadPoolExecutor(threads) as pool:
            for done in pool.map(look, range(0, count, step)):
                if clock() - reported >= REPORT_EVERY:
                    reported = clock()
                    _log.warning(
                        "penstock: reading the sizes and times of %s files: %.0f %%",
                        f"{count:,}",
                        100 * done / count,
                    )
        self._refuse_missing(stats)
        return stats

    def _threads(self) -> int:
        if self.on_network:
            return _NETWORK_THREADS
        # Without the kernel more threads would only compete for the GIL.
        return 1 if _stat_names() is _stat_each else min(_LOCAL_THREADS, config.cores())

    def _refuse_missing(self, stats: FileStats) -> None:
        missing = np.flatnonzero(stats[:, 0] < 0)
        if len(missing):
            index = int(missing[0])
            number = -stats.item(index, 1)
            error = OSError(number, os.strerror(number))
            raise unreadable(self.path(index), error) from error


@lru_cache(maxsize=1)
def _stat_names() -> Callable[..., Any]:
    """The function that asks for sizes and times: the compiled kernel's, or the one in Python.

    The kernel releases the GIL once for a slice. In Python it is released for every file, and a
    thread in the background waits for it as often, up to 5 ms if the training loop is busy.
    """
    compiled = native.kernel()
    return _stat_each if compiled is None else getattr(compiled, "stat_files", _stat_each)


def _stat_each(
    folder: bytes, text: NDArray[np.uint8], ends: NDArray[np.int64], first: int, out: FileStats
) -> None:
    """Fill ``out`` with the stats of the names from ``first`` on."""
    start = ends.item(first - 1) if first else 0
    for row in range(len(out)):
        end = ends.item(first + row)
        path = os.path.join(folder, text[start:end].tobytes())
        start = end
        try:
            stat = os.stat(path)
            out[row] = stat.st_size, stat.st_mtime_ns
        except OSError as error:
            out[row] = -1, -(error.errno or 1)
        except ValueError:  # a zero byte in the name
            out[row] = -1, -errno.EINVAL


def unreadable(path: str, error: OSError) -> SourceError:
    """The error to raise for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return SourceError(
            f"{path} does not exist. If it was removed after the source was made, put it back or "
            "make the source again."
        )
    remedy = ""
    if isinstance(error, PermissionError):
        remedy = " Give this user permission to read it, or leave it out."
    return SourceError(f"{path} cannot be read: {error.strerror or error}.{remedy}")
