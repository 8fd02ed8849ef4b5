"""Shards in a bucket or on a web server: their names, sizes and versions, and ranges of them."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock import config
from penstock.errors import PipelineError, SourceError
from penstock.fingerprint import fingerprint
from penstock.host.private_dir import locked, own_directory
from penstock.source.compressed import is_compressed
from penstock.source.objects.address import Address
from penstock.source.objects.connection import Fetcher
from penstock.source.objects.listing import list_objects, look_up_objects
from penstock.source.objects.protocol import FetchFailure, StorageOptions, WantedObject
from penstock.source.ranges import FilePart, RangeReader
from penstock.source.shard_paths import braces

if TYPE_CHECKING:
    from penstock.source.shards import ShardParts, ShardSource

_log = logging.getLogger("penstock.source")

_PATTERN = re.compile(r"[*?\[]")

_THREADS = 32
"""Threads that load indexes: each of them waits for the store."""

_BLOCK = 8 << 20
"""Bytes of an archive that are read at a time for its headers."""


class RemoteShards:
    """Shards of one store."""

    threads = _THREADS
    listing = None

    def __init__(
        self,
        fetcher: Fetcher,
        names: Sequence[str],
        sizes: NDArray[np.int64],
        etags: Sequence[str],
        version: str | None,
    ) -> None:
        self._fetcher = fetcher
        self._names = list(names)
        self._sizes = sizes
        self._etags = list(etags)
        self._version = version
        self.paths = [f"{fetcher.root}/{name}" for name in names]

    def reader(self, number: int) -> RangeReader:
        size, etag = self._sizes.item(number), self._etags[number]
        return RemoteRanges(self._fetcher, self._names[number], size, etag, self._version)

    def _wanted(self, shard: int, offset: int, size: int) -> WantedObject:
        whole, etag = self._sizes.item(shard), self._etags[shard]
        return WantedObject(self._names[shard], offset, offset + size, whole, etag)

    def read(self, parts: Sequence[tuple[int, int, int]]) -> list[bytes]:
        return self._read(parts, partial=False)

    def _read(self, parts: Iterable[tuple[int, int, int]], *, partial: bool) -> list[Any]:
        """The parts in one message. Nothing is asked for in place of an empty one."""
        rows = list(parts)
        wanted = [self._wanted(*row) for row in rows if row[2]]
        found = iter(self._fetcher.read(wanted, partial=partial) if wanted else ())
        return [next(found) if row[2] else b"" for row in rows]

    def will_need(self, parts: ShardParts) -> None:
        """Nothing: samples are fetched ahead in the order of batches, see ``ahead``."""

    @contextmanager
    def making_index(self) -> Iterator[None]:
        """Other processes on this machine wait, and then find the indexes that were kept."""
        directory = config.disk_dir() / "indexes"
        own_directory(directory)
        name = fingerprint(("shards", self._fetcher.root, self._names))
        with locked(directory / f"{name}.lock"):
            yield

    def versions(self) -> Any:
        return fingerprint(
            (self._fetcher.root, self._names, self._sizes, self._etags, self._version)
        )

    def contents(self, parts: ShardParts) -> dict[str, Any]:
        def read(indices: NDArray[np.int64]) -> list[Any]:
            chosen = type(parts)(*(column[indices] for column in parts))
            found = self._read(chosen.rows(), partial=True)
            return [None if isinstance(one, FetchFailure) else one for one in found]

        return {"read": read}

    def ahead(self, source: ShardSource) -> RemoteSamples:
        return RemoteSamples(self, source)

    def expect(self, parts: ShardParts) -> None:
        """Fetch these parts ahead, in this order."""
        self._fetcher.expect(self._wanted(*row) for row in parts.rows() if row[2])

    def allow(self, nbytes: int) -> None:
        self._fetcher.allow(nbytes)

    def forget(self) -> None:
        self._fetcher.forget()

    def stats(self) -> Any:
        """What the fetcher has done so far."""
        return self._fetcher.stats()


class RemoteSamples:
    """Fetches samples of remote shards ahead of the workers, in the order of the batches."""

    def __init__(self, shards: RemoteShards, source: ShardSource) -> None:
        self._shards, self._source = shards, source
        self._recent: OrderedDict[int, int] = OrderedDict()
        """Units that were announced last, with their sizes: workers still keep them."""

    def expect(self, indices: Iterable[int]) -> None:
        wanted = np.fromiter(indices, np.int64)
        units = self._source.units(wanted)
        if units is not None:
            wanted = self._not_kept(wanted, *units)
        self._shards.expect(self._source.shard_parts(wanted))

    def _not_kept(
        self, indices: NDArray[np.int64], units: NDArray[np.int64], keep: int
    ) -> NDArray[np.int64]:
        """One sample of each unit that workers do not keep by the time it is needed."""
        chosen = []
        for index, unit in zip(indices.tolist(), units.tolist(), strict=True):
            if unit in self._recent:
                self._recent.move_to_end(unit)
                continue
            chosen.append(index)
            self._recent[unit] = int(self._source.shard_parts(np.array([index])).sizes.sum())
            while len(self._recent) > 1 and sum(self._recent.values()) > keep:
                self._recent.popitem(last=False)
        return np.array(chosen, dtype=np.int64)

    def hold(self, samples: int) -> None:
        count = min(samples, len(self._source))
        some = np.linspace(0, len(self._source) - 1, min(count, 1024)).astype(np.int64)
        mean = int(self._source.shard_parts(some).sizes.sum()) / max(1, len(some))
        wanted, most = int(mean * count), config.memory() // 4
        if wanted > most:
            _log.warning(
                "penstock: the window of %s samples takes about %s, and at most %s are held (a "
                "quarter of the memory). The rest of it is fetched when it is needed, sample by "
                "sample. Give a smaller window: Reservoir(window=...).",
                f"{count:,}",
                config.show_size(wanted),
                config.show_size(most),
            )
        self._shards.allow(min(wanted, most))

    def forget(self) -> None:
        self._shards.forget()

    def stats(self) -> Any:
        return self._shards.stats()


class RemoteRanges:
    """Parts of one object."""

    far = True
    block = _BLOCK

    def __init__(
        self, fetcher: Fetcher, name: str, size: int, etag: str, version: str | None
    ) -> None:
        self._fetcher, self._name = fetcher, name
        self._size, self._etag, self._version = size, etag, version
        self.path = f"{fetcher.root}/{name}"

    def size(self) -> int:
        return self._size

    def about(self) -> str | None:
        version = self._etag or self._version
        return None if not version else f"{self.path}\0{self._size}\0{version}"

    def read(self, ranges: Sequence[FilePart]) -> list[bytes]:
        wanted = []
        for offset, size in ranges:
            if offset + size > self._size:
                raise SourceError(
                    f"{self.path} has {self._size:,} bytes, and bytes {offset:,} to "
                    f"{offset + size:,} are needed: it is cut off. Upload it again from its origin."
                )
            if size:
                end = offset + size
                wanted.append(WantedObject(self._name, offset, end, self._size, self._etag))
        found = iter(self._fetcher.read(wanted) if wanted else ())
        return [next(found) if size else b"" for _, size in ranges]

    def will_need(self, ranges: Sequence[FilePart]) -> None:
        """Nothing: readers ask for all parts at once."""

    def beside(self, path: str) -> bytes | None:
        return self._fetcher.read_whole(path.removeprefix(f"{self._fetcher.root}/"))


def remote_shards(
    urls: Sequence[str],
    suffixes: Sequence[str],
    kind: str,
    storage: StorageOptions | None,
    version: str | None,
    hidden: str,
) -> RemoteShards:
    """The shards with these URLs: objects, folders, patterns with ``*`` or ``{000..999}``."""
    root = Address.of(_plain_part(urls[0])).root
    fetcher = Fetcher(root, storage or {})
    named: list[str] = []
    found: dict[str, tuple[int, str]] = {}
    wanted: list[str] = []
    for url in (one for given in urls for one in braces(given)):
        address = Address.of(url)
        if address.root != root:
            raise PipelineError(
                f"the shards are in several stores, {root} and {address.root}. Make one pipeline "
                "for each store."
            )
        if address.path.endswith(tuple(suffixes)) and not _PATTERN.search(address.path):
            named.append(address.path)
            wanted.append(address.path)
            continue
        matches = _matching(address, fetcher, suffixes, kind, version, hidden)
        wanted += sorted(matches)
        found |= matches
    if named:
        objects = look_up_objects(root, named, fetcher, version)
        for place, name in enumerate(named):
            found[name] = (objects.sizes.item(place), objects.etags[place])
    packed = next((name for name in wanted if is_compressed(name)), None)
    if packed is not None:
        raise SourceError(
            f"{root}/{packed} is compressed, and parts of a compressed shard cannot be fetched. "
            "Upload the shards without compression (samples are mostly compressed themselves), or "
            "copy them to a disk."
        )
    sizes = np.array([found[name][0] for name in wanted], np.int64)
    return RemoteShards(fetcher, wanted, sizes, [found[name][1] for name in wanted], version)


def _plain_part(url: str) -> str:
    """The URL up to its first pattern: ``?`` would begin a query."""
    found = _PATTERN.search(url)
    return url if found is None else url[: found.start()]


def _matching(
    address: Address,
    fetcher: Fetcher,
    suffixes: Sequence[str],
    kind: str,
    version: str | None,
    hidden: str,
) -> dict[str, tuple[int, str]]:
    """Names, sizes and versions of the objects that a folder or a pattern stands for."""
    pattern = _PATTERN.search(address.path)
    folder = address.path
    if pattern is not None:
        folder = address.path[: pattern.start()].rpartition("/")[0]
    objects = list_objects(Address(address.root, folder), fetcher, version)
    above = f"{folder}/" if folder else ""
    matches = {}
    for place in range(len(objects)):
        name = objects.paths[place]
        if pattern is not None:
            fits = fnmatch.fnmatchcase(above + name, address.path)
        else:
            fits = name.endswith(tuple(suffixes)) and not any(
                part[:1] in hidden for part in name.split("/") if hidden
            )
        if fits:
            matches[above + name] = (objects.sizes.item(place), objects.etags[place])
    if not matches:
        raise SourceError(
            f"{address.url(address.path)} is not a {kind} file, not a folder that holds one, and "
            "not a pattern that matches one. Check the URL, and that the credentials of this "
            "environment may list it."
        )
    return matches


def folder_objects(folder: str, storage: StorageOptions | None) -> tuple[Fetcher, str]:
    """The fetcher for the store of a folder, and the URL of the folder without a slash."""
    address = Address.of(folder)
    return Fetcher(address.root, storage or {}), address.url(address.path).rstrip("/")


def named_shards(fetcher: Fetcher, names: Sequence[str], version: str | None) -> RemoteShards:
    """Shards whose names are known."""
    objects = look_up_objects(fetcher.root, names, fetcher, version)
    etags = [objects.etags[place] for place in range(len(objects))]
    return RemoteShards(fetcher, names, objects.sizes, etags, version)
