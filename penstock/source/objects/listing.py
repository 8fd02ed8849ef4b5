"""Lists the objects below a URL, once for all processes that ask at about the same time."""

from __future__ import annotations

import logging
import os
import time
import zipfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock import config
from penstock.fingerprint import fingerprint
from penstock.host.private_dir import locked, own_directory
from penstock.source.listing import REPORT_EVERY
from penstock.source.names import Names
from penstock.source.objects.address import Address
from penstock.source.objects.connection import Fetcher
from penstock.source.shard_paths import common_folder
from penstock.store.ledger import Ledger, Provenance

_log = logging.getLogger("penstock.source")

FRESH = 60.0
"""Seconds for which a listing serves other processes: the ranks of a job, and the jobs of a search,
start within that time. A bucket has no version by which an older listing could be trusted."""


HEADS = 4096
"""Objects whose sizes are asked for in one message."""


@dataclass(frozen=True)
class ObjectList:
    """Objects below a prefix, in the order of their paths, which are relative to the prefix."""

    paths: Names
    sizes: NDArray[np.int64]
    etags: Names

    def __len__(self) -> int:
        return len(self.paths)


def list_objects(address: Address, fetcher: Fetcher, version: str | None) -> ObjectList:
    """The objects below an address.

    ``version``: names the state of the bucket. Its listing is made once and kept. Without it a
    listing is used again for ``FRESH`` seconds only.
    """
    name = fingerprint(("listing", fetcher.place, address.path, version))
    url = address.url(address.path).rstrip("/")
    return _kept(name, url, version, lambda: _listed(address, fetcher))


def look_up_objects(
    root: str, paths: Sequence[str], fetcher: Fetcher, version: str | None
) -> ObjectList:
    """Sizes and versions of objects with known paths, in this order. See ``list_objects``."""
    name = fingerprint(("objects", fetcher.place, list(paths), version))
    url = f"{root}/{common_folder(paths)}".rstrip("/")
    return _kept(name, url, version, lambda: look_up(paths, fetcher))


def _kept(name: str, url: str, version: str | None, make: Callable[[], ObjectList]) -> ObjectList:
    directory = config.disk_dir() / "listings"
    own_directory(directory)
    kept = directory / f"{name}.npz"
    # One process asks; the others wait and then find the result.
    started = time.perf_counter()
    with locked(directory / f"{name}.lock"):
        found, age = _load(kept, None if version is not None else FRESH)
        if found is None:
            found = make()
            _save(kept, found)
    made = Provenance(
        kind="listing",
        identity=name,
        place=str(directory),
        files=(kept.name, f"{name}.lock"),
        origin=url,
        data=version or "",
        made_by=(f"a listing of {url}, {len(found):,} objects",),
        expires=None if version is not None else time.time() - age + FRESH,
    )
    Ledger().note(made, time.perf_counter() - started)
    return found


def look_up(paths: Sequence[str], fetcher: Fetcher) -> ObjectList:
    """Sizes and versions of objects with known paths, as they are now."""
    rows: list[tuple[str, int, str]] = []
    for first in range(0, len(paths), HEADS):
        rows += fetcher.heads(paths[first : first + HEADS])
    return ObjectList(
        Names(paths),
        np.fromiter((size for _, size, _ in rows), np.int64, len(rows)),
        Names(etag for _, _, etag in rows),
    )


def _listed(address: Address, fetcher: Fetcher) -> ObjectList:
    rows: list[tuple[str, int, str]] = []
    start = len(address.path) + 1 if address.path else 0
    reported = time.monotonic()
    for page in fetcher.objects_below(address.path):
        rows += [one for one in page if len(one[0]) > start]
        if time.monotonic() - reported >= REPORT_EVERY:
            reported = time.monotonic()
            _log.warning("penstock: listing %s: %s objects", address.url(""), f"{len(rows):,}")
    rows.sort()
    rows = _without_markers(rows)
    return ObjectList(
        Names(path[start:] for path, _, _ in rows),
        np.fromiter((size for _, size, _ in rows), np.int64, len(rows)),
        Names(etag for _, _, etag in rows),
    )


def _without_markers(rows: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Leave out the empty objects that some tools store in place of folders.

    >>> _without_markers([("a", 0, ""), ("a-b", 0, ""), ("a/c", 5, "")])
    [('a-b', 0, ''), ('a/c', 5, '')]
    """
    paths = [path for path, _, _ in rows]

    def marks_a_folder(path: str) -> bool:
        place = bisect_left(paths, f"{path}/")
        return place < len(paths) and paths[place].startswith(f"{path}/")

    return [one for one in rows if one[1] or not (one[0].endswith("/") or marks_a_folder(one[0]))]


def _save(kept: Path, found: ObjectList) -> None:
    """Keep a listing. Without room for it, it is listed again next time."""
    made = kept.with_suffix(f".{os.getpid()}.new")
    try:
        with made.open("wb") as file:
            np.savez(
                file,
                paths=found.paths.text,
                path_ends=found.paths.ends,
                sizes=found.sizes,
                etags=found.etags.text,
                etag_ends=found.etags.ends,
            )
        made.replace(kept)
    except OSError as error:
        _log.warning("penstock: the listing cannot be kept in %s: %s", kept.parent, error)
        with suppress(OSError):
            made.unlink()


def _load(kept: Path, longest: float | None) -> tuple[ObjectList | None, float]:
    """A kept listing and its age in seconds; ``None`` and 0 if there is none to use."""
    try:
        age = time.time() - kept.stat().st_mtime
        if longest is not None and not 0 <= age <= longest:
            return None, 0.0
        with kept.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = ObjectList(
                Names.packed(arrays["paths"], arrays["path_ends"]),
                arrays["sizes"],
                Names.packed(arrays["etags"], arrays["etag_ends"]),
            )
    except FileNotFoundError:
        return None, 0.0
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None, 0.0  # damaged: list again
    _log.info("penstock: using a listing of %s objects made %.0f s ago", len(found), age)
    return found, age


class ObjectTree:
    """Objects as a tree of folders, as ``FolderSource`` walks it."""

    def __init__(self, objects: ObjectList) -> None:
        self._files: dict[str, list[str]] = {}
        self._folders: set[str] = {""}
        self._children: dict[str, list[str]] = {}
        self.places: dict[str, int] = {}
        for place in range(len(objects)):
            path = objects.paths[place]
            self.places[path] = place
            folder, _, name = path.rpartition("/")
            self._files.setdefault(folder, []).append(name)
            self._add_folder(folder)

    def _add_folder(self, folder: str) -> None:
        while folder not in self._folders:
            self._folders.add(folder)
            folder, _, name = folder.rpartition("/")
            self._children.setdefault(folder, []).append(name)

    def list(self, folder: str) -> tuple[list[str], list[str]]:
        """The names of the files and of the sub-folders of a folder."""
        return self._files.get(folder, []), self._children.get(folder, [])
