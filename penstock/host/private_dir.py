"""Directories that only this user can open; files in them that appear complete or not at all."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from penstock.errors import StoreError

_TRIES = 100


def own_directory(path: Path) -> None:
    """Create the directory if it is missing; refuse it if other users can read or change it.

    Every user may create files on the memory file system. A directory that another user has
    created there first would let that user feed data into a training run.
    """
    try:
        for _ in range(_TRIES - 1):
            # The last process that used it may remove it at any moment.
            with suppress(FileNotFoundError, FileExistsError):
                return _make(path)
        _make(path)
    except (FileNotFoundError, FileExistsError, NotADirectoryError):
        raise StoreError(
            f"{path} cannot be created: there is a file in its place. Remove it, or choose another "
            "place."
        ) from None
    except PermissionError as error:
        raise StoreError(
            f"{path} cannot be created: {error}. Choose a place where you have write permission."
        ) from None


def _make(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(path)


def check_own(path: Path) -> None:
    """Raise StoreError if the directory belongs to, or is open to, other users."""
    stats = path.lstat()
    if not stat.S_ISDIR(stats.st_mode):
        raise StoreError(
            f"{path} is a symbolic link or a file, not a directory. Name the directory itself."
        )
    if stats.st_uid != os.getuid():
        raise StoreError(
            f"{path} belongs to user {stats.st_uid}, not to you (user {os.getuid()}): its content "
            "cannot be trusted. Choose another place, or have it removed."
        )
    if stats.st_mode & 0o077:
        raise StoreError(
            f"{path} has mode {stat.S_IMODE(stats.st_mode):04o}: other users can open it. Run "
            f"chmod 700 {path}, or choose another place."
        )


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, of mode 0600, that takes the place of ``path`` once it is complete.

    Other processes find the old file or the new one, never a part of it.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            yield file
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process is in this context with the same file, which is created."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
