"""Compressed shards: decompressed once, into a private directory, because they must be read at
random."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import logging
import lzma
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock import config
from penstock.errors import MissingExtraError, SourceError
from penstock.host.private_dir import own_directory, replacing
from penstock.source.listing import unreadable
from penstock.store.ledger import Ledger, Provenance

_log = logging.getLogger("penstock.source")


def _open_zstd(path: str) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError.of("a shard compressed with zstd", "zstandard", "shards") from error
    return zstandard.open(path, "rb")


_OPENERS: dict[str, Callable[[str], Any]] = {
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
    ".zstd": _open_zstd,
}


def is_compressed(path: str) -> bool:
    """Whether a file with this name has to be decompressed before it is read at random."""
    return os.path.splitext(path)[1] in _OPENERS


def plain_file(path: str) -> str:
    """The path of a file without compression: itself, or a copy that is made once.

    The copy is in the private directory of caches, under the path, size and modification time of
    the file.
    """
    opener = _OPENERS.get(os.path.splitext(path)[1])
    if opener is None:
        return path
    try:
        stats = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    about = f"{os.path.realpath(path)}\0{stats.st_size}\0{stats.st_mtime_ns}"
    name = hashlib.blake2b(os.fsencode(about), digest_size=16).hexdigest()
    place = config.disk_dir() / "decompressed" / name
    made = Provenance(
        kind="decompressed",
        identity=name,
        place=str(place.parent),
        files=(name,),
        origin=path,
        made_by=(f"a decompressed copy of {path}",),
        line=f"decompressed {os.path.realpath(path)}",
    )
    ledger, started = Ledger(), time.perf_counter()
    ledger.hold(made.key)
    if not place.exists():
        _log.warning("penstock: %s is decompressed to %s, once", path, place)
        _decompress(path, place, opener)
    ledger.note(made, time.perf_counter() - started)
    return str(place)


def _decompress(path: str, place: Path, opener: Callable[[str], Any]) -> None:
    own_directory(place.parent)
    try:
        with replacing(place) as file, opener(path) as packed:
            shutil.copyfileobj(packed, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except MissingExtraError:
        raise
    except Exception as error:
        raise SourceError(
            f"{path} cannot be decompressed to {place.parent}: {error}. If it is damaged, copy it "
            "again; if the disk is full, name another with PENSTOCK_CACHE_DIR."
        ) from error
