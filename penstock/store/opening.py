"""Opening a store: repair or empty it while no other process has it open, then share it."""

from __future__ import annotations

import os
import stat as modes
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import StoreError
from penstock.host.private_dir import own_directory
from penstock.store import guard as guards
from penstock.store.file_watch import FileWatch, StoreLost
from penstock.store.guard import FORMAT, FileRecord, Guard, StoreState, boot_id
from penstock.store.index_check import IndexDamage, check_index, full_size, last_transaction

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

_DATABASES = {SAMPLES: True, PIECES: False}

# How often to try again, if another process leaves or removes the store between two locks.
_TRIES = 100

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
    Raises StoreLost if it is damaged and other processes have it open, or if it may not be one of
    ours, StoreError if the place belongs to another user or content.
    """
    for _ in range(_TRIES):
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
    raise StoreLost("its state file was changed while other processes use it")


def _is_usable(guard: Guard, identity: str) -> bool:
    try:
        state = guard.read()
    except ValueError as error:
        raise StoreLost(f"its state file cannot be read while it is in use: {error}") from None
    if state is None or state.clean or state.boot != boot_id():
        return False
    if state.format != FORMAT:
        raise StoreLost("another version of Penstock uses it")
    if state.damaged:
        raise StoreLost("it was found damaged, and other processes still have it open")
    check_identity(guard.place, state.identity, identity)
    return True


def _prepare(guard: Guard, identity: str, map_size: int, *, persistent: bool) -> None:
    """Create the store, or empty it if it is damaged. No other process has it open."""
    place = guard.place
    lmdb = load()
    has_data = os.path.lexists(place / DATA)
    problem = ""
    try:
        state = guard.read()
    except ValueError as error:
        problem = f"its state file cannot be read ({error})"
    else:
        if state is None and has_data:
            if not guard.marked:
                # Never remove files of another program: they may be a dataset.
                raise StoreLost(
                    "it contains an LMDB database that Penstock does not recognise as its own",
                    "Choose another place, or remove the database if nobody needs it",
                )
            problem = "its state file is missing"
        if state is not None:
            if state.format == FORMAT:
                check_identity(place, state.identity, identity)
            problem = state_problem(state)
            if not problem and not has_data and guard.marked:
                problem = "its data file is missing"
    if not problem and has_data:
        problem = file_problem(guard)
    if problem:
        for name in (DATA, _LOCK, guards.STATE):
            guards.discard(place / name)
    elif not is_file(place / _LOCK):
        guards.discard(place / _LOCK)
    guard.write(StoreState(identity, boot_id()), durable=persistent)
    _create(lmdb, place, map_size)
    _record_files(guard)
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
        return "it was found damaged"
    if not state.clean and state.boot != boot_id():
        return "the machine went down while it was in use, and part of it may not be on disk"
    return ""


def file_problem(guard: Guard, *, trusting: bool = True) -> str:
    """Why LMDB must not open the data file; empty if it may. No other process has it open.

    ``trusting``: a file that has not changed since a user of the store last wrote to it needs no
    check. Otherwise its whole index is read: 60 us of CPU time a page, and about a page for 100
    large values (measured with 140,000 values of 100 and 5,000 bytes).
    """
    path = guard.place / DATA
    if not is_file(path):
        return "its data file is not a file"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return f"its data file cannot be opened ({error})"
    try:
        stat, record = os.fstat(fd), guard.read_record()
        if trusting and record is not None and _describes(record, stat):
            return ""
        _extend_file(fd)
        check_index(fd, _DATABASES)
    except IndexDamage as damage:
        return f"its index is damaged ({damage})"
    except OSError as error:
        return f"its data file cannot be read ({error})"
    finally:
        os.close(fd)
    return ""


def _describes(record: FileRecord, stat: os.stat_result) -> bool:
    found = (stat.st_size, stat.st_ctime_ns, stat.st_ino)
    return found == (record.nbytes, record.changed, record.data)


def is_file(path: Path) -> bool:
    """Whether there is a regular file, not a link."""
    try:
        return modes.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _extend_file(fd: int) -> None:
    """Extend the file to its full size. Raises IndexDamage if it was truncated.

    Another process may write to it at the same time: pages first, then the record of the full size.
    So the size is asked for after the record is read, and the file is never made shorter.
    """
    full = full_size(fd)
    present = os.fstat(fd).st_size
    if full - present > _LOOSE_TAIL:
        raise IndexDamage(f"its file was truncated by {full - present} bytes")
    if full > present:
        # Reading past the end of a mapped file kills the process; an empty page is only an error.
        os.posix_fallocate(fd, present, full - present)


def _record_files(guard: Guard) -> None:
    """Record how the files look that all users of the store are about to open."""
    data, lock = os.stat(guard.place / DATA), os.stat(guard.place / _LOCK)
    fd = os.open(guard.place / DATA, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        transaction = last_transaction(fd)
    finally:
        os.close(fd)
    guard.write_record(
        FileRecord(data.st_size, data.st_ctime_ns, transaction, data.st_ino, lock.st_ino)
    )


def watch_files(place: Path, guard: Guard) -> FileWatch:
    """Watch the files of a store that is about to be opened."""
    return FileWatch(place / DATA, place / _LOCK, guard, partial(check_index, databases=_DATABASES))


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
