"""Run directories: the directory of a process on the memory file system, removed when it ends.

The owner holds a lock for its lifetime, and the system releases it when the owner dies, also when
it is killed. A run directory whose lock can be taken is the leftover of a dead process. Directories
are created, checked and removed only under a lock on their parent, so a directory that is being
created is never taken for a leftover.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from penstock import config
from penstock.errors import StoreError
from penstock.host.private_dir import check_own, own_directory

_LOCK = "lock"
_PREFIX = "run-"
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class RunDir:
    """A directory on the memory file system that exists as long as this process.

    It is created when ``path`` is first read; leftovers of dead processes are removed then. A
    forked child that reads ``path`` gets a directory of its own.
    """

    _all: ClassVar[weakref.WeakSet[RunDir]] = weakref.WeakSet()
    _shared: ClassVar[RunDir]

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._fd = -1
        self._remover: weakref.finalize[Any, RunDir] | None = None
        RunDir._all.add(self)

    @classmethod
    def current(cls) -> RunDir:
        """The run directory that all of this process shares."""
        return cls._shared

    @property
    def path(self) -> Path:
        with self._lock:
            if self._path is None:
                self._path = self._create(self._parent or config.memory_dir())
            return self._path

    def close(self) -> None:
        """Remove the directory with its content, and the parent if it is empty then."""
        with self._lock:
            if self._remover is not None:
                self._remover()
            self._forget()

    def _create(self, parent: Path) -> Path:
        try:
            return self._make(parent)
        except OSError as error:
            raise StoreError(
                f"cannot create a run directory in {parent}: {error}. Free some space there, or "
                "set PENSTOCK_SHM_DIR to another place."
            ) from error

    def _make(self, parent: Path) -> Path:
        with _locked(parent, create=True):
            _collect(parent)
            path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
            path.mkdir(mode=0o700)
            self._fd = os.open(path / _LOCK, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            self._remover = weakref.finalize(self, _remove, parent, path, self._fd, os.getpid())
        return path

    def _forget(self) -> None:
        self._path, self._fd, self._remover = None, -1, None

    def _after_fork(self) -> None:
        # The child's copy of the descriptor would hold the lock, and so keep the directory, as
        # long as the child lives.
        if self._fd >= 0:
            os.close(self._fd)
        if self._remover is not None:
            self._remover.detach()
        self._lock = threading.Lock()
        self._forget()

    @classmethod
    def _after_any_fork(cls) -> None:
        for run in list(cls._all):
            run._after_fork()


RunDir._shared = RunDir()
os.register_at_fork(after_in_child=RunDir._after_any_fork)


def stale(parent: Path | None = None) -> list[tuple[Path, int]]:
    """Run directories whose owner is dead, with the bytes each occupies. Nothing is removed."""
    parent = parent or config.memory_dir()
    with _locked(parent) as exists:
        return [(path, _occupied(path)) for path in _abandoned(parent)] if exists else []


def collect_stale(parent: Path | None = None) -> list[Path]:
    """Remove the run directories whose owner is dead; return those that were removed."""
    parent = parent or config.memory_dir()
    with _locked(parent) as exists:
        removed = _collect(parent) if exists else []
        if removed:
            with suppress(OSError):
                parent.rmdir()
    return removed


def _collect(parent: Path) -> list[Path]:
    removed = _abandoned(parent)
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return [path for path in removed if not path.exists()]


def _remove(parent: Path, path: Path, fd: int, owner: int) -> None:
    if os.getpid() != owner:
        return
    with _locked(parent):
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)
        with suppress(OSError):
            parent.rmdir()


@contextmanager
def _locked(parent: Path, *, create: bool = False) -> Iterator[bool]:
    """Hold the lock on the parent directory; yield false if it does not exist."""
    fd = _lock(parent, create=create)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            _unlock(fd)


def _lock(parent: Path, *, create: bool) -> int | None:
    while True:
        if create:
            own_directory(parent)
        try:
            fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            if create:
                continue  # the last process to leave removed it since the line above
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), os.stat(parent)):
                check_own(parent)
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            _unlock(fd)
            raise
        _unlock(fd)  # the parent was removed while this process waited for the lock


def _unlock(fd: int) -> None:
    # Closing alone would leave the lock held by a child that was forked meanwhile.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _abandoned(parent: Path) -> list[Path]:
    """The run directories that no process holds. The caller holds the parent's lock."""
    return sorted(path for path in parent.glob(f"{_PREFIX}*") if path.is_dir() and not _held(path))


def _held(path: Path) -> bool:
    try:
        fd = os.open(path / _LOCK, _FLAGS)
    except FileNotFoundError:
        return False  # its owner was killed before it created the lock file
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _occupied(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
