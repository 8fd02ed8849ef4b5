"""Directories that only this user can open."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from penstock.errors import StoreError

_TRIES = 100


def own_directory(path: Path) -> None:
    """Make the directory where it is missing; refuse it where others could read or change it.

    Stores on the memory file system lie in a place where anybody may create files: a directory
    somebody else has put there first would let them feed data into a training run.
    """
    try:
        for _ in range(_TRIES - 1):
            # Another process that was the last to need it may remove it at any moment.
            with suppress(FileNotFoundError, FileExistsError):
                return _make(path)
        _make(path)
    except (FileNotFoundError, FileExistsError, NotADirectoryError):
        raise StoreError(
            f"{path} cannot be a store: a file stands in its way. Remove it, or choose another "
            "place."
        ) from None
    except PermissionError as error:
        raise StoreError(
            f"{path} cannot be created: {error}. Choose a place that you may write to."
        ) from None


def _make(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(path)


def check_own(path: Path) -> None:
    """Refuse a directory that is not this user's alone."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise StoreError(
            f"{path} is a symbolic link, and a store does not follow one. Name the directory it "
            "points to."
        )
    if found.st_uid != os.getuid():
        raise StoreError(
            f"{path} belongs to user {found.st_uid}, not to you (user {os.getuid()}): what lies "
            "there cannot be trusted. Choose another place, or have it removed."
        )
    if found.st_mode & 0o077:
        raise StoreError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: other users can open it. Run "
            f"chmod 700 {path}, or choose another place."
        )
