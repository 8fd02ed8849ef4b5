"""How a store is opened: made sound while nobody else has it open, or started anew."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import StoreError
from penstock.host.private_dir import own_directory
from penstock.store import guard as guards
from penstock.store.guard import FORMAT, Guard, State, boot_id

SAMPLES = b"samples"
"""The database of the samples; the main one holds the store's own records."""

PIECES = b"pieces"
"""The database of what comes after the first piece of a value that lies in several."""

DATA = "data.mdb"
"""What LMDB calls the file that holds everything."""

_LOCK = "lock.mdb"

# Each process needs a place in the reader table for every thread that reads at the moment.
_MAX_READERS = 2048
_READER = 64

# A file may end a little before the last page LMDB has given out, where pages were given out and
# freed again in one transaction. What lacks more than this was cut off.
_LOOSE_TAIL = 16 << 20


def load() -> ModuleType:
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
        # A sample is read whole and in shuffled order: what lies behind it is not wanted next.
        readahead=False,
        # A full disk is then an error from a write. With a writable map it is a SIGBUS.
        writemap=False,
        # The guard's state makes up for it: unsynced pages are never trusted after a reboot.
        sync=False,
        meminit=False,
        max_readers=_MAX_READERS,
        max_dbs=2,
        # A spare transaction would have to be given up at every fork.
        max_spare_txns=0,
    )


def enter(place: Path, identity: str, map_size: int, *, persistent: bool) -> Guard:
    """Hold a store that is sound and open for use, making it so where nobody else has it open."""
    while True:
        own_directory(place)
        try:
            guard = Guard(place)
        except FileNotFoundError:
            continue  # destroyed by another process since the line above
        try:
            if guard.alone() and guard.current:
                _prepare(guard, identity, map_size, persistent=persistent)
            guard.share()
            if guard.current and _is_open(guard, identity):
                return guard
        except BaseException:
            guard.close()
            raise
        # Somebody closed or destroyed the store between the two locks.
        guard.close()


def _is_open(guard: Guard, identity: str) -> bool:
    try:
        state = guard.read()
    except ValueError:
        state = State(identity, boot_id(), format=-1)
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
    """Make the store sound, or start it anew. Called while no other process has it open."""
    place = guard.place
    lmdb = load()
    has_data = (place / DATA).exists()
    wrong = ""
    try:
        state = guard.read()
    except ValueError:
        wrong = "its state cannot be read"
    else:
        if state is None and has_data:
            # Never remove what was not made here: it may be somebody's dataset.
            raise StoreError(
                f"{place} holds an LMDB database that is not a store of Penstock's. Choose "
                "another place."
            )
        if state is not None:
            if state.format == FORMAT:
                check_identity(place, state.identity, identity)
            wrong = mistrust(state)
    if not wrong and has_data:
        wrong = _unreadable(lmdb, place, map_size)
    if wrong:
        for name in (DATA, _LOCK):
            (place / name).unlink(missing_ok=True)
    guard.write(State(identity, boot_id()), durable=persistent)
    _make(lmdb, place, map_size)
    if wrong:
        warnings.warn(
            f"the store {place} is started anew, empty: {wrong}. What it held will be prepared "
            "again.",
            RuntimeWarning,
            stacklevel=2,
        )


def check_identity(place: Path, found: str, identity: str) -> None:
    if found != identity:
        raise StoreError(
            f"{place} holds the data of {found!r}, and is asked for that of "
            f"{identity!r}: it was damaged, or put there by hand. Remove it, or choose another "
            "place."
        )


def mistrust(state: State) -> str:
    """Why the content cannot be used, as the state tells it; nothing where it can."""
    if state.format != FORMAT:
        return f"it is of format {state.format}, and this version of Penstock has {FORMAT}"
    if state.damaged:
        return "its index was found damaged"
    if not state.clean and state.boot != boot_id():
        return "the machine went down while it was in use, and part of it may not be on disk"
    return ""


def _unreadable(lmdb: ModuleType, place: Path, map_size: int) -> str:
    """Why LMDB cannot read the file; nothing where it can."""
    try:
        env = open_lmdb(lmdb, place, map_size)
        try:
            whole, there = whole_size(env), os.path.getsize(place / DATA)
        finally:
            env.close()
        wrong = lengthen(place, whole)
        return wrong or _unreadable_tree(lmdb, place, map_size, walk=there < whole)
    except (lmdb.DiskError, lmdb.MemoryError, lmdb.LockError):
        raise
    except lmdb.Error as error:
        return f"LMDB cannot open it ({error})"


def whole_size(env: Any) -> int:
    """Bytes that the file has, or nearly: up to the end of the last page given out."""
    return int((env.info()["last_pgno"] + 1) * env.stat()["psize"])


def lengthen(place: Path, whole: int) -> str:
    """Let the file have its whole size; says why that would be wrong, where it would.

    Called while no other process has the store open: one that writes would lose what it adds.
    """
    missing = whole - os.path.getsize(place / DATA)
    if missing > _LOOSE_TAIL:
        return f"its file was cut short by {missing} bytes"
    if missing > 0:
        # Reading past the end of a file kills the process; an empty page is only an error.
        os.truncate(place / DATA, whole)
    return ""


def _unreadable_tree(lmdb: ModuleType, place: Path, map_size: int, *, walk: bool) -> str:
    env = open_lmdb(lmdb, place, map_size)
    try:
        for name in (SAMPLES, PIECES):
            try:
                database = env.open_db(name, integerkey=name == SAMPLES, create=False)
            except lmdb.NotFoundError:
                continue  # whoever made the store was killed before there were samples
            if not walk:
                continue
            with env.begin(db=database) as transaction:
                found = sum(1 for _ in transaction.cursor().iternext(keys=True, values=False))
                if found != transaction.stat(database)["entries"]:
                    return "its file was cut short"
        return ""
    finally:
        env.close()


def _make(lmdb: ModuleType, place: Path, map_size: int) -> None:
    """Create what is missing, so that every later opening finds all of it."""
    # LMDB writes to its lock file through a map: with no room left on the file system, a page
    # of it that was never written would kill the process that writes there first.
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
    if guards.is_store(place):
        guards.remove(place, (DATA, _LOCK))
