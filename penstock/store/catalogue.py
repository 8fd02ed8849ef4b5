"""The catalogue of stores on disk and in memory: find, measure, verify and remove them.

It is for a process that has none of them open: LMDB must not open the same store twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock import config
from penstock.errors import StoreError
from penstock.host.private_dir import check_own
from penstock.store import guard as guards
from penstock.store import opening
from penstock.store.environment import SampleTable
from penstock.store.guard import Guard
from penstock.store.opening import DATA, PIECES, SAMPLES
from penstock.store.rundir import stale
from penstock.store.value import pack_key, read_header, unpack_key

_VALUES_PER_TRANSACTION = 64
"""Values verified in one transaction. While it lasts, writers cannot reuse the pages it sees."""

ProgressCallback = Callable[[int, int], None]
"""Called with the number of values verified so far, and their total."""


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A store in the catalogue. ``samples`` is ``None`` if they cannot be counted.

    ``users``: the processes that have it open, as far as they are known. ``void``: why its content
    will not be used again; empty if it will. The fields are those of ``penstock store list
    --json``.
    """

    place: Path
    where: Literal["disk", "memory"]
    identity: str
    kind: str
    samples: int | None
    nbytes: int
    last_use: float
    in_use: bool
    users: tuple[int, ...] = ()
    void: str = ""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory in memory that a dead process has left behind."""

    place: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of ``verify``: how many values were read, and how many of them are damaged.

    ``wrong`` says what is wrong with the store as a whole; empty if nothing is.
    """

    values: int
    damaged: int
    wrong: str = ""

    @property
    def sound(self) -> bool:
        return not self.damaged and not self.wrong


def on_disk(places: Iterable[Path] | None = None) -> list[StoreInfo]:
    """The stores in these directories; by default in the directory of disk stores."""
    roots = [config.disk_dir() / "stores"] if places is None else places
    return [info for root in roots for place in _stores_in(root) if (info := _look(place))]


def in_memory() -> tuple[list[StoreInfo], list[Leftover]]:
    """The memory stores of running processes, and the leftovers of dead ones."""
    parent = config.memory_dir()
    dead = dict(stale(parent))
    leftovers = [Leftover(path, nbytes) for path, nbytes in dead.items()]
    alive = [path for path in sorted(parent.glob("run-*")) if path not in dead]
    stores = [
        info for run in alive for place in _stores_in(run) if (info := _look(place, owner=run))
    ]
    return stores, leftovers


def verify(store: StoreInfo, progress: ProgressCallback | None = None) -> Proof:
    """Read every value and compare it with its checksum.

    Other processes can use the store meanwhile. If its index turns out to be damaged, the next
    process that opens the store alone empties it.
    """
    if store.void:
        return Proof(0, 0, store.void)
    values = damaged = 0
    wrong = ""
    lmdb = opening.load()
    try:
        wrong = _problem(store.place, trusting=False)
        if wrong:
            _declare_damaged(store.place)
            return Proof(0, 0, wrong)
        with _opened(store.place) as reader:
            total = reader.count()
            for read, bad in reader.prove():
                values, damaged = values + read, damaged + bad
                if progress is not None:
                    progress(values, max(values, total))
        if values < total and not store.in_use:
            wrong = f"{total - values} of its {total} values are missing from its index"
    except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError) as error:
        wrong = f"its index is damaged ({error})"
    except (OSError, lmdb.Error) as error:
        # A store that is gone, or was removed meanwhile, holds nothing that could be damaged.
        if (store.place / DATA).exists():
            raise StoreError(f"the store {store.place} cannot be read: {error}.") from error
    if wrong:
        _declare_damaged(store.place)
    return Proof(values, damaged, wrong)


def remove(place: Path) -> bool:
    """Remove a store. If a running process has it open, remove nothing and return false."""
    if not guards.is_store(place):
        raise StoreError(f"{place} is not a store of Penstock. Remove it by hand if you want to.")
    try:
        guard = Guard(place)
    except FileNotFoundError:
        return True  # another process has just removed it
    try:
        if not guard.lock_alone():
            return False
        opening.remove(place)
        return True
    finally:
        guard.close()


def _stores_in(root: Path) -> list[Path]:
    """The stores of this user: the directory itself and the directories in it."""
    try:
        candidates = [root, *sorted(root.iterdir())]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise StoreError(f"{root} cannot be read: {error}. Name another place.") from None
    return [place for place in candidates if guards.is_store(place) and _is_own(place)]


def _is_own(place: Path) -> bool:
    try:
        check_own(place)
    except (StoreError, FileNotFoundError):
        return False
    return True


def _look(place: Path, owner: Path | None = None) -> StoreInfo | None:
    """The entry of a store; ``None`` if it was removed just now.

    ``owner`` is the run directory of a store in memory.
    """
    try:
        guard = Guard(place)
    except OSError:
        return None
    try:
        in_use = not guard.lock_alone() or owner is not None
        users = guard.holders() if in_use else ()
        try:
            state = guard.read()
        except ValueError as error:
            identity, void = "", f"its state file cannot be read ({error})"
        else:
            if state is None:
                return None
            identity, void = state.identity, opening.state_problem(state)
    finally:
        guard.close()
    samples, kind = (None, "") if void else _content(place, in_use=in_use, memory=owner is not None)
    return StoreInfo(
        place=place,
        where="disk" if owner is None else "memory",
        identity=identity or place.name,
        kind=kind,
        samples=samples,
        nbytes=_occupied(place),
        last_use=_changed(place),
        in_use=in_use,
        users=users,
        void=void,
    )


def _content(place: Path, *, in_use: bool, memory: bool) -> tuple[int | None, str]:
    """The number of samples, and the stages that the first of them shows the store is for."""
    if not (place / DATA).exists():
        return 0, ""  # the process that made the store was killed before there were samples
    try:
        if _problem(place, trusting=True):
            return None, ""
        with _opened(place) as reader:
            tagged = reader.tagged()
            if tagged is None:
                return reader.count(), ""
            reused = "refurbish or echo" if memory else "refurbish"
            return reader.count(), reused if tagged else "cache"
    except (OSError, opening.load().Error):
        return None, ""


class _Reader:
    """A store opened for reading only.

    It does not hold the guard's lock: that would keep processes that open or leave the store from
    taking the exclusive lock. LMDB's own reader table protects the pages that are read.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        lmdb = opening.load()
        self._samples = self._pieces = None
        with suppress(lmdb.NotFoundError):
            self._samples = env.open_db(SAMPLES, integerkey=True, create=False)
            self._pieces = env.open_db(PIECES, create=False)

    def count(self) -> int:
        if self._samples is None:
            return 0
        with self._env.begin() as transaction:
            return int(transaction.stat(self._samples)["entries"])

    def tagged(self) -> bool | None:
        """Whether the first value has a tag; ``None`` if there is none, or it is damaged."""
        if self._samples is None:
            return None
        with self._env.begin(db=self._samples, buffers=True) as transaction:
            with transaction.cursor() as cursor:
                header = read_header(cursor.value()) if cursor.first() else None
            return None if header is None else header.tag is not None

    def prove(self) -> Iterator[tuple[int, int]]:
        """Read all values in groups: yield the size of each group, and how many are damaged."""
        last: int | None = None
        while self._samples is not None:
            with self._begin() as transaction:
                keys = _keys_after(transaction, last)
                table = SampleTable(transaction, self._pieces)
                damaged = sum(not table.get(key)[1] for key in keys)
            if not keys:
                return
            last = keys[-1]
            yield len(keys), damaged

    def _begin(self) -> Any:
        try:
            return self._env.begin(db=self._samples, buffers=True)
        except opening.load().MapResizedError:
            # Another process has grown the store beyond this process's map.
            self._env.set_mapsize(0)
            return self._env.begin(db=self._samples, buffers=True)


@contextmanager
def _opened(place: Path) -> Iterator[_Reader]:
    env = _open(place)
    try:
        yield _Reader(env)
    finally:
        env.close()


def _open(place: Path) -> Any:
    # A map of size 0 means the size that the last writer used.
    return opening.open_lmdb(opening.load(), place, 0, readonly=True)


def _keys_after(transaction: Any, last: int | None) -> list[int]:
    with transaction.cursor() as cursor:
        if last is None:
            more = cursor.first()
        else:
            more = cursor.set_range(pack_key(last))
            if more and unpack_key(cursor.key()) == last:
                more = cursor.next()
        keys: list[int] = []
        while more and len(keys) < _VALUES_PER_TRANSACTION:
            keys.append(unpack_key(cursor.key()))
            more = cursor.next()
        return keys


def _problem(place: Path, *, trusting: bool) -> str:
    """Why LMDB must not map the data file; empty if it may.

    ``trusting``: the index of a file that did not change since its last use is not checked.
    """
    if not os.path.lexists(place / DATA):
        return ""
    guard = Guard(place)
    try:
        if guard.lock_alone():
            return opening.file_problem(guard, trusting=trusting)
    finally:
        guard.close()
    # A process that has it open checks it before every transaction.
    return "" if opening.is_file(place / DATA) else "its data file is not a file"


def _declare_damaged(place: Path) -> None:
    with suppress(FileNotFoundError):
        guard = Guard(place)
        try:
            guard.declare_damaged()
        finally:
            guard.close()


def _occupied(place: Path) -> int:
    return sum(stat.st_blocks * 512 for stat in _files(place).values())


def _changed(place: Path) -> float:
    """When the store was last opened, left or written to. Reading changes only LMDB's lock file,
    which does not count."""
    files = _files(place)
    return max((files[name].st_mtime for name in (guards.STATE, DATA) if name in files), default=0)


def _files(place: Path) -> dict[str, os.stat_result]:
    files: dict[str, os.stat_result] = {}
    with suppress(FileNotFoundError), os.scandir(place) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    files[entry.name] = entry.stat()
    return files
