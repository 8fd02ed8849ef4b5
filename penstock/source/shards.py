"""The shards of a data set, on disk or in a bucket: one contract for sources that read parts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.source.compressed import plain_file
from penstock.source.listing import Listing
from penstock.source.names import Names
from penstock.source.objects.address import is_url, local_path
from penstock.source.ranges import FilePart, FileRanges, LocalRanges, RangeReader
from penstock.source.shard_paths import ShardNames, shard_paths
from penstock.source.source import FetchedAhead, Source

if TYPE_CHECKING:
    from penstock.source.objects.protocol import StorageOptions

_THREADS = 8
"""Threads that load indexes: on a cold disk each of them mostly waits."""


class ShardParts(NamedTuple):
    """Parts of shards: for each the number of its shard, its offset and its size."""

    shards: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def rows(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.shards.tolist(), self.offsets.tolist(), self.sizes.tolist(), strict=True)


class Shards(Protocol):
    """The files of a sharded data set, by number. Sent to worker processes by pickle.

    ``paths``: paths or URLs, for names and errors. ``threads``: how many may look at shards at
    once when the source is made.
    """

    paths: list[str]
    threads: int

    def reader(self, number: int) -> RangeReader:
        """The way to one shard."""
        ...

    def read(self, parts: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """These parts (shard, offset, size), in this order. Raises SourceError."""
        ...

    def will_need(self, parts: ShardParts) -> None:
        """Say that these parts are read soon. May do nothing."""
        ...

    def making_index(self) -> Any:
        """A context in which one process alone looks at the shards for the first time."""
        ...

    @property
    def listing(self) -> Listing | None:
        """The files, if they are on this machine."""
        ...

    def versions(self) -> Any:
        """What identifies the contents of shards that have no listing."""
        ...

    def contents(self, parts: ShardParts) -> dict[str, Any]:
        """How the compiled kernel gets at contents: arguments for ``FileSamples``."""
        ...

    def ahead(self, source: ShardSource) -> FetchedAhead | None:
        """Fetches samples ahead of workers; ``None`` if the operating system does."""
        ...


class LocalShards:
    """Shards in files of this machine. Compressed ones are read from a copy that is made once."""

    threads = _THREADS

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        with ThreadPoolExecutor(min(_THREADS, len(self.paths))) as pool:
            self._plain = list(pool.map(plain_file, self.paths))

    def reader(self, number: int) -> RangeReader:
        return LocalRanges(self._plain[number])

    def read(self, parts: Sequence[tuple[int, int, int]]) -> list[bytes]:
        by_shard: dict[int, list[int]] = {}
        for place, part in enumerate(parts):
            by_shard.setdefault(part[0], []).append(place)
        out: list[bytes] = [b""] * len(parts)
        for shard, places in by_shard.items():
            contents = self.reader(shard).read([parts[place][1:] for place in places])
            for place, content in zip(places, contents, strict=True):
                out[place] = content
        return out

    def will_need(self, parts: ShardParts) -> None:
        by_shard: dict[int, list[FilePart]] = {}
        for shard, offset, size in parts.rows():
            by_shard.setdefault(shard, []).append((offset, size))
        for shard, ranges in by_shard.items():
            self.reader(shard).will_need(ranges)

    @contextmanager
    def making_index(self) -> Iterator[None]:
        yield

    @property
    def listing(self) -> Listing:
        return Listing(Names(self.paths))

    def versions(self) -> Any:
        return None

    def contents(self, parts: ShardParts) -> dict[str, Any]:
        return {"ranges": FileRanges(Listing(Names(self._plain)), *parts)}

    def ahead(self, source: ShardSource) -> FetchedAhead | None:
        return None


class ShardSource(Source):
    """A source whose samples are parts of shards. ``_files``: the shards."""

    _files: Shards

    def shard_parts(self, indices: NDArray[np.int64]) -> ShardParts:
        """The parts that are read for these samples, in their order."""
        raise NotImplementedError

    def units(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], int] | None:
        """For samples that are read together with others: the number of the unit of each.

        Also the bytes of units that were read last and are kept. ``None``: samples are read alone.
        """
        return None

    def _shown(self) -> str:
        paths = self._files.paths
        more = f" (and {len(paths) - 1} more files)" if len(paths) > 1 else ""
        return paths[0] + more

    def _relative_paths(self) -> list[str]:
        """The paths below their common folder: a data set may be moved as a whole."""
        paths = self._files.paths
        top = os.path.commonpath([os.path.dirname(path) for path in paths])
        return [os.path.relpath(path, top) for path in paths]

    @property
    def listing(self) -> Listing | None:
        return self._files.listing

    def identity(self) -> str:
        if self._files.listing is not None:
            return super().identity()
        return fingerprint((self.identify(None), self._files.versions()))

    @property
    def objects(self) -> FetchedAhead | None:
        return self._files.ahead(self)

    def will_need(self, indices: NDArray[np.int64]) -> None:
        self._files.will_need(self.shard_parts(indices))


def open_shards(
    names: ShardNames,
    suffixes: Sequence[str],
    kind: str,
    storage: StorageOptions | None = None,
    version: str | None = None,
    *,
    hidden: str = "",
) -> Shards:
    """The shards with these names: paths or URLs, folders, patterns. See ``shard_paths``."""
    given = local_names(names)
    urls = [name for name in given if is_url(name)]
    if not urls:
        refuse_storage(storage, version, names)
        return LocalShards(shard_paths(given, suffixes, kind, hidden=hidden))
    if len(urls) != len(given):
        local = next(name for name in given if not is_url(name))
        raise PipelineError(
            f"{urls[0]!r} is a URL and {str(local)!r} is a local path. Make one pipeline for each."
        )
    from penstock.source.objects.remote_shards import remote_shards

    return remote_shards([str(url) for url in urls], suffixes, kind, storage, version, hidden)


def local_names(names: ShardNames) -> list[str | os.PathLike[str]]:
    """The names as a list, with paths in place of ``file://`` URLs."""
    given = [names] if isinstance(names, (str, os.PathLike)) else list(names)
    return [(local_path(str(name)) if is_url(name) else None) or name for name in given]


def refuse_storage(
    storage: Mapping[str, str] | None, version: str | None, names: ShardNames
) -> None:
    """Refuse settings of a store for local files."""
    if storage is not None or version is not None:
        raise PipelineError(
            f"storage and version are for URLs, and {names!r} is local. Leave them out."
        )
