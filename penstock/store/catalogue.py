"""What stores there are, on disk and in memory: found, weighed, proved and removed.

It is for a process that has none of them open itself: LMDB breaks when one is opened twice.
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
from penstock.store.guard import Guard
from penstock.store.opening import DATA, PIECES, SAMPLES
from penstock.store.rundir import stale
from penstock.store.samples import Samples
from penstock.store.value import head, pack_key, unpack_key

_TOGETHER = 64
"""Values that are proved in one transaction: while it lasts, whoever writes cannot use the pages
again that it looks at."""

Told = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """A store as it lies there. ``samples`` is ``None`` where they cannot be counted.

    ``users`` are the processes that have it open, as far as that can be known. ``void`` says why
    what it holds will not be used again; it is empty where it will.
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
    """What a process that is dead has left in memory."""

    place: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class Proof:
    """How many values were read, and how many of them are not what was written.

    ``wrong`` says what is the matter with the store as a whole, if anything is.
    """

    values: int
    damaged: int
    wrong: str = ""

    @property
    def sound(self) -> bool:
        return not self.damaged and not self.wrong


def on_disk(places: Iterable[Path] | None = None) -> list[Kept]:
    """The stores in these directories; by default in the one for disk stores."""
    roots = [config.disk_dir() / "stores"] if places is None else places
    return [found for root in roots for place in _stores_in(root) if (found := _look(place))]


def in_memory() -> tuple[list[Kept], list[Leftover]]:
    """The stores of living processes, and what dead ones have left."""
    parent = config.memory_dir()
    dead = dict(stale(parent))
    left = [Leftover(path, nbytes) for path, nbytes in dead.items()]
    alive = [path for path in sorted(parent.glob("run-*")) if path not in dead]
    stores = [
        found for run in alive for place in _stores_in(run) if (found := _look(place, owner=run))
    ]
    return stores, left


def verify(kept: Kept, told: Told | None = None) -> Proof:
    """Read every value and check its proof. ``told`` hears how many of how many are done.

    It does not hinder processes that use the store meanwhile. Where the index turns out to be
    damaged, the store is started anew by whoever next opens it.
    """
    if kept.void:
        return Proof(0, 0, kept.void)
    values = damaged = 0
    wrong = ""
    lmdb = opening.load()
    try:
        wrong = _lengthened(kept.place)
        if wrong:
            return Proof(0, 0, wrong)
        with _opened(kept.place) as reader:
            total = reader.count()
            for found, bad in reader.prove():
                values, damaged = values + found, damaged + bad
                if told is not None:
                    told(values, max(values, total))
        if values < total and not kept.in_use:
            wrong = f"{total - values} of its {total} values are not in its index"
    except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError) as error:
        wrong = f"its index is damaged ({error})"
    except (FileNotFoundError, lmdb.Error) as error:
        # One that is not there, or was removed meanwhile, has nothing that could be damaged.
        if (kept.place / DATA).exists():
            raise StoreError(f"the store {kept.place} cannot be read: {error}.") from error
    if wrong:
        _declare_damaged(kept.place)
    return Proof(values, damaged, wrong)


def remove(place: Path) -> bool:
    """Remove a store; false, and nothing is done, where a living process has it open."""
    if not guards.is_store(place):
        raise StoreError(f"{place} is not a store of Penstock's. Remove it by hand, if you wish.")
    try:
        guard = Guard(place)
    except FileNotFoundError:
        return True  # somebody else has just removed it
    try:
        if not guard.alone():
            return False
        opening.remove(place)
        return True
    finally:
        guard.close()


def _stores_in(root: Path) -> list[Path]:
    """The directory itself, or those in it, that are stores of this user's."""
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


def _look(place: Path, owner: Path | None = None) -> Kept | None:
    """What there is to say of a store; ``None`` if it was removed just now."""
    try:
        guard = Guard(place)
    except FileNotFoundError:
        return None
    try:
        in_use = not guard.alone() or owner is not None
        users = guard.holders() if in_use else ()
        try:
            state = guard.read()
        except ValueError:
            identity, void = "", "its state cannot be read"
        else:
            if state is None:
                return None
            identity, void = state.identity, opening.mistrust(state)
    finally:
        guard.close()
    samples, kind = (None, "") if void else _content(place, in_use=in_use, memory=owner is not None)
    return Kept(
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
    """How many samples there are, and what for, as far as the first of them tells."""
    if not (place / DATA).exists():
        return 0, ""  # whoever made the store was killed before there were samples
    try:
        if not in_use and _lacks(place):
            return None, ""
        with _opened(place) as reader:
            tagged = reader.tagged()
            if tagged is None:
                return reader.count(), ""
            reused = "refurbish or echo" if memory else "refurbish"
            return reader.count(), reused if tagged else "cache"
    except (FileNotFoundError, opening.load().Error):
        return None, ""


class _Reader:
    """A store that is only looked at.

    The guard's lock is not held: whoever opens or leaves the store meanwhile could not be alone
    with it. LMDB's own table of readers protects what is read.
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
        """Whether its values have tags; ``None`` where there are none, or the first is damaged."""
        if self._samples is None:
            return None
        with self._env.begin(db=self._samples, buffers=True) as transaction:
            with transaction.cursor() as cursor:
                first = head(cursor.value()) if cursor.first() else None
            return None if first is None else first.tag is not None

    def prove(self) -> Iterator[tuple[int, int]]:
        """Read all values, some at a time: how many there were, and how many are damaged."""
        last: int | None = None
        while self._samples is not None:
            with self._begin() as transaction:
                keys = _keys_after(transaction, last)
                samples = Samples(transaction, self._pieces)
                damaged = sum(not samples.get(key)[1] for key in keys)
            if not keys:
                return
            last = keys[-1]
            yield len(keys), damaged

    def _begin(self) -> Any:
        try:
            return self._env.begin(db=self._samples, buffers=True)
        except opening.load().MapResizedError:
            # Another process has grown the store past this process's map.
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
    # A map of size 0 is as large as the one that the store was last written through.
    return opening.open_lmdb(opening.load(), place, 0, readonly=True)


def _whole_size(place: Path) -> int:
    env = _open(place)
    try:
        return opening.whole_size(env)
    finally:
        env.close()


def _lacks(place: Path) -> bool:
    """Whether the file ends before its last page: reading there would kill the process.

    Whoever has the store open has seen to that.
    """
    return _whole_size(place) > os.path.getsize(place / DATA)


def _keys_after(transaction: Any, last: int | None) -> list[int]:
    with transaction.cursor() as cursor:
        if last is None:
            more = cursor.first()
        else:
            more = cursor.set_range(pack_key(last))
            if more and unpack_key(cursor.key()) == last:
                more = cursor.next()
        keys: list[int] = []
        while more and len(keys) < _TOGETHER:
            keys.append(unpack_key(cursor.key()))
            more = cursor.next()
        return keys


def _lengthened(place: Path) -> str:
    """Make sure that the file can be read to its end, unless somebody else has done so."""
    guard = Guard(place)
    try:
        return opening.lengthen(place, _whole_size(place)) if guard.alone() else ""
    finally:
        guard.close()


def _declare_damaged(place: Path) -> None:
    with suppress(FileNotFoundError):
        guard = Guard(place)
        try:
            guard.declare_damaged()
        finally:
            guard.close()


def _occupied(place: Path) -> int:
    return sum(found.st_blocks * 512 for found in _files(place).values())


def _changed(place: Path) -> float:
    """When it was last opened, left or written to. LMDB's lock file changes by looking alone."""
    files = _files(place)
    return max((files[name].st_mtime for name in (guards.STATE, DATA) if name in files), default=0)


def _files(place: Path) -> dict[str, os.stat_result]:
    found: dict[str, os.stat_result] = {}
    with suppress(FileNotFoundError), os.scandir(place) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    found[entry.name] = entry.stat()
    return found
