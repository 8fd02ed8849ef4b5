"""Opening a store: repair or empty it while no other process has it open, then share it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import StoreError
from penstock.host.private_dir import own_directory
from penstock.store import guard as guards
from penstock.store.guard import FORMAT, Guard, StoreState, boot_id

SAMPLES = b"samples"
"""The LMDB database of the samples. The main database holds the store's own records."""

PIECES = b"pieces"
"""The LMDB database of the pieces of tagged values, except the first piece of each."""

DATA = "data.mdb"
"""Name of the file in which LMDB keeps all databases."""

_LOCK = "lock.mdb"

# Each process needs an entry in the reader table for every thread that is reading.
_MAX_READERS = 2048
_READER = 64

# A file may end a little before the last page LMDB has allocated, if pages were allocated and
# freed in the same transaction. A file that is shorter than this was truncated.
_LOOSE_TAIL = 16 << 20


def load() -> ModuleType:
    """The ``lmdb`` module, imported on first use."""
    import lmdb

    module: ModuleType = lmdb
    return module


def open_lmdb(lmdb: ModuleType, place: Path, map_size: int, *, readonly: bool = False) -> Any:
    return lmdb.open(
        str(place),
        map_size=map_size,
        readonly=readonly,
        create=False,
        mode=0o600,
        # Samples are read whole and in random order: the bytes behind one are not needed next.
        readahead=False,
        # A full disk is then an error of a write. With a writable map it is a SIGBUS.
        writemap=False,
        # The guard's state makes up for it: unsynced pages are never trusted after a reboot.
        sync=False,
        meminit=False,
        max_readers=_MAX_READERS,
        max_dbs=2,
        # A spare transaction would have to be given up at every fork.
        max_spare_txns=0,
    )


def open_guard(place: Path, identity: str, map_size: int, *, persistent: bool) -> Guard:
    """Hold the shared lock on an intact store.

    If no other process has it open, it is created, repaired or emptied first, as necessary.
    """
    while True:
        own_directory(place)
        try:
            guard = Guard(place)
        except FileNotFoundError:
            continue  # another process has destroyed the store since the line above
        try:
            if guard.lock_alone() and guard.current:
                _prepare(guard, identity, map_size, persistent=persistent)
            guard.lock_shared()
            if guard.current and _is_usable(guard, identity):
                return guard
        except BaseException:
            guard.close()
            raise
        # Another process has closed or destroyed the store between the two locks.
        guard.close()


def _is_usable(guard: Guard, identity: str) -> bool:
    try:
        state = guard.read()
    except ValueError:
        state = StoreState(identity, boot_id(), format=-1)
    if state is None or state.clean or state.boot != boot_id():
        return False
    if state.format != FORMAT:
        raise StoreError(
            f"{guard.place} is in use by another version of Penstock. Wait until that has ended, "
            "or choose another place."
        )
    check_identity(guard.place, state.identity, identity)
    return True


def _prepare(guard: Guard, identity: str, map_size: int, *, persistent: bool) -> None:
    """Create the store, or empty it if it is damaged. No other process has it open."""
    place = guard.place
    lmdb = load()
    has_data = (place / DATA).exists()
    problem = ""
    try:
        state = guard.read()
    except ValueError:
        problem = "its state file cannot be read"
    else:
        if state is None and has_data:
            # Never remove files of another program: they may be a dataset.
            raise StoreError(
                f"{place} contains an LMDB database that was not made by Penstock. Choose another "
                "place."
            )
        if state is not None:
            if state.format == FORMAT:
                check_identity(place, state.identity, identity)
            problem = state_problem(state)
    if not problem and has_data:
        problem = _file_problem(lmdb, place, map_size)
    if problem:
        for name in (DATA, _LOCK):
            (place / name).unlink(missing_ok=True)
    guard.write(StoreState(identity, boot_id()), durable=persistent)
    _create(lmdb, place, map_size)
    if problem:
        warnings.warn(
            f"the store {place} was emptied: {problem}. The samples it held are prepared again.",
            RuntimeWarning,
            stacklevel=2,
        )


def check_identity(place: Path, found: str, identity: str) -> None:
    if found != identity:
        raise StoreError(
            f"{place} holds the data of {found!r}, not of {identity!r}: it was damaged, or copied "
            "there by hand. Remove it, or choose another place."
        )


def state_problem(state: StoreState) -> str:
    """Why the state forbids to use the content; empty if it does not."""
    if state.format != FORMAT:
        return f"it has format {state.format}, and this version of Penstock reads {FORMAT}"
    if state.damaged:
        return "its index was found damaged"
    if not state.clean and state.boot != boot_id():
        return "the machine went down while it was in use, and part of it may not be on disk"
    return ""


def _file_problem(lmdb: ModuleType, place: Path, map_size: int) -> str:
    """Why LMDB cannot read the file; empty if it can."""
    try:
        env = open_lmdb(lmdb, place, map_size)
        try:
            full, present = full_size(env), os.path.getsize(place / DATA)
        finally:
            env.close()
        problem = extend_file(place, full)
        return problem or _tree_problem(lmdb, place, map_size, walk=present < full)
    except (lmdb.DiskError, lmdb.MemoryError, lmdb.LockError):
        raise
    except lmdb.Error as error:
        return f"LMDB cannot open it ({error})"


def full_size(env: Any) -> int:
    """Bytes up to the end of the last allocated page; the file may end a little before it."""
    return int((env.info()["last_pgno"] + 1) * env.stat()["psize"])


def extend_file(place: Path, full: int) -> str:
    """Extend the file to its full size. If it was truncated, return that instead, as a text.

    Called while no other process has the store open: a writer would lose what it appends.
    """
    missing = full - os.path.getsize(place / DATA)
    if missing > _LOOSE_TAIL:
        return f"its file was truncated by {missing} bytes"
    if missing > 0:
        # Reading past the end of a mapped file kills the process; an empty page is only an error.
        os.truncate(place / DATA, full)
    return ""


def _tree_problem(lmdb: ModuleType, place: Path, map_size: int, *, walk: bool) -> str:
    env = open_lmdb(lmdb, place, map_size)
    try:
        for name in (SAMPLES, PIECES):
            try:
                database = env.open_db(name, integerkey=name == SAMPLES, create=False)
            except lmdb.NotFoundError:
                continue  # the process that made the store was killed before there were samples
            if not walk:
                continue
            with env.begin(db=database) as transaction:
                count = sum(1 for _ in transaction.cursor().iternext(keys=True, values=False))
                if count != transaction.stat(database)["entries"]:
                    return "its file was truncated"
        return ""
    finally:
        env.close()


def _create(lmdb: ModuleType, place: Path, map_size: int) -> None:
    """Create the missing files and databases, so that every later opening finds them."""
    # LMDB writes to its lock file through a map: on a full file system, a page of it that was
    # never written would kill the process that writes there first.
    fd = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, _READER * (_MAX_READERS + 8))
    finally:
        os.close(fd)
    env = open_lmdb(lmdb, place, map_size)
    try:
        env.open_db(SAMPLES, integerkey=True, create=True)
        env.open_db(PIECES, create=True)
    finally:
        env.close()


def remove(place: Path) -> None:
    """Remove the files of a store, if it is one."""
    if guards.is_store(place):
        guards.remove(place, (DATA, _LOCK))
