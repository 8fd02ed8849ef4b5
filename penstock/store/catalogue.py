"""The catalogue of everything kept on disk and in memory: find, measure, verify, collect, remove.

Finding stores ``deep``, and verifying them, is for a process that has none of them open: LMDB must
not open the same store twice.
"""

from __future__ import annotations

import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock import config
from penstock.errors import StoreError
from penstock.host.private_dir import check_own
from penstock.store import guard as guards
from penstock.store import opening
from penstock.store.environment import SampleTable
from penstock.store.guard import Guard
from penstock.store.ledger import KeptRecord, Ledger, Provenance
from penstock.store.opening import DATA, PIECES, SAMPLES
from penstock.store.retention import NEVER, Candidate, Policy, choose
from penstock.store.rundir import stale
from penstock.store.value import pack_key, read_header, unpack_key

_log = logging.getLogger("penstock.store")

STORES = ("cache", "refurbish")
"""The kinds of kept things that are stores of samples. The others are plain files."""

_VALUES_PER_TRANSACTION = 64
"""Values verified in one transaction. While it lasts, writers cannot reuse the pages it sees."""

ProgressCallback = Callable[[int, int], None]
"""Called with the number of values verified so far, and their total."""


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A kept thing in the catalogue: a store, or files. ``samples`` is ``None`` if they cannot be
    counted; of files it is their number.

    ``users``: the processes that have it open, as far as they are known. ``void``: why its content
    will not be used again; empty if it will. ``record``: its entry in the ledger; ``None`` if it is
    not there. The fields are those of ``penstock store list --json``.
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
    record: KeptRecord | None = None

    @property
    def pinned(self) -> bool:
        return self.record is not None and self.record.pinned

    @property
    def is_store(self) -> bool:
        """Whether it is a store of samples, not plain files."""
        return self.record is None or self.record.made.kind in STORES

    @property
    def candidate(self) -> Candidate:
        """What a policy needs to know of it."""
        made = None if self.record is None else self.record.made
        return Candidate(
            str(self.place) if made is None else made.key,
            self.kind,
            self.identity,
            "" if made is None else made.line,
            self.nbytes,
            # The time of a store without a record is not known; its last use is.
            self.last_use if self.record is None else self.record.created,
            self.last_use,
            0 if self.record is None else self.record.opened,
            self.in_use,
            self.pinned,
            None if made is None else made.expires,
        )


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


def on_disk(places: Iterable[Path] | None = None, *, deep: bool = True) -> list[StoreInfo]:
    """What is kept in these directories; by default everything in the ledger and in the directory
    of disk stores.

    ``deep``: stores are opened to count their samples.
    """
    ledger = Ledger()
    records = ledger.records()
    stores = {
        os.path.realpath(record.made.place): record
        for record in records.values()
        if record.made.kind in STORES
    }
    if places is None:
        roots = [config.disk_dir() / "stores", *map(Path, stores)]
    else:
        roots = list(places)
    found: dict[str, StoreInfo] = {}
    for root in roots:
        for place in _stores_in(root):
            name = os.path.realpath(place)
            if name not in found and (info := _look(place, deep=deep)):
                found[name] = _with_record(info, stores.get(name))
    if places is None:
        _forget_missing(ledger, records)
    within = None if places is None else [Path(os.path.realpath(place)) for place in roots]
    files = [
        _look_at_files(ledger, key, record)
        for key, record in records.items()
        if record.made.kind not in STORES and _is_within(record.made, within)
    ]
    return [*found.values(), *(info for info in files if info is not None)]


def _with_record(info: StoreInfo, record: KeptRecord | None) -> StoreInfo:
    if record is None or record.made.identity != info.identity:
        return info
    last_use = max(info.last_use, record.last_use)
    return replace(info, record=record, kind=record.made.kind, last_use=last_use)


def _is_within(made: Provenance, roots: list[Path] | None) -> bool:
    place = Path(os.path.realpath(made.place))
    return roots is None or any(place.is_relative_to(root) for root in roots)


def _forget_missing(ledger: Ledger, records: dict[str, KeptRecord]) -> None:
    """Forget things that somebody has removed by hand. A pin is a wish, so it is remembered."""
    for key, record in records.items():
        if not record.pinned and not any(map(os.path.lexists, record.made.paths)):
            ledger.forget(key)
            with suppress(OSError), ledger.alone(key) as (alone, _):
                if alone:
                    ledger.drop_lock(key)


def _look_at_files(ledger: Ledger, key: str, record: KeptRecord) -> StoreInfo | None:
    """The entry of a thing that is plain files; ``None`` if they are gone."""
    sizes = [size for path in record.made.paths if (size := _size_of(path)) is not None]
    if not sizes:
        return None
    try:
        with ledger.alone(key) as (alone, users):
            pass
    except OSError:
        alone, users = True, ()
    made = record.made
    place = made.paths[0] if len(made.paths) == 1 else Path(made.place)
    return StoreInfo(
        place=place,
        where="disk",
        identity=made.identity,
        kind=made.kind,
        samples=len(sizes),
        nbytes=sum(sizes),
        last_use=record.last_use,
        in_use=not alone,
        users=users,
        record=record,
    )


def _size_of(path: Path) -> int | None:
    """Bytes on disk of a file, or of the files in a directory; ``None`` if there is none."""
    try:
        stat = path.lstat()
    except OSError:
        return None
    return _occupied(path) if path.is_dir() else stat.st_blocks * 512


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
    if not store.is_store and store.record is not None:
        return _verify_files(store.record, progress)
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


def _verify_files(record: KeptRecord, progress: ProgressCallback | None) -> Proof:
    """Read the files. Listings and indexes are archives with checksums; others have only a size."""
    paths, damaged = record.made.paths, 0
    for number, path in enumerate(paths, start=1):
        try:
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    damaged += archive.testzip() is not None
            elif record.made.kind in ("listing", "index") and path.exists():
                damaged += 1
        except (OSError, zipfile.BadZipFile):
            damaged += 1
        if progress is not None:
            progress(number, len(paths))
    return Proof(len(paths), damaged)


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


def discard(info: StoreInfo) -> bool:
    """Remove a kept thing and its record; false, and nothing is removed, if it is in use.

    Packed shards are never removed: they are files that somebody has asked for by name.
    """
    record, ledger = info.record, Ledger()
    if info.kind in NEVER or info.where == "memory":
        return False
    if info.is_store:
        # Another process that collects at the same time may have removed it.
        if guards.is_store(info.place) and not remove(info.place):
            return False
    elif record is not None:
        with ledger.alone(record.made.key) as (alone, _):
            if not alone:
                return False
            for path in record.made.paths:
                path.unlink(missing_ok=True)
            ledger.drop_lock(record.made.key)
    if record is not None:
        ledger.forget(record.made.key)
    return True


@dataclass(frozen=True, slots=True)
class Removal:
    """A thing that a policy removes, and why. ``done``: it was removed."""

    info: StoreInfo
    reason: str
    done: bool


def collect(policy: Policy, now: float, *, dry: bool = False) -> list[Removal]:
    """Remove what the policy chooses. ``dry``: only say what that is.

    A thing that is opened between the choice and its removal stays: removing needs its lock.
    """
    kept = {info.candidate.key: info for info in on_disk(deep=False)}
    chosen = choose([info.candidate for info in kept.values()], policy, now)
    removals = []
    for candidate, reason in chosen:
        info = kept[candidate.key]
        removals.append(Removal(info, reason, not dry and discard(info)))
    return removals


def collect_by_policy() -> None:
    """Carry out the policy of this user, as every process does that opens a store on disk."""
    try:
        removals = collect(Ledger().policy(), time.time())
    except (OSError, StoreError) as error:
        _log.warning("penstock: kept data cannot be collected: %s", error)
        return
    for removal in removals:
        if removal.done:
            _log.warning(
                "penstock: removed %s (%s, %s): %s",
                removal.info.place,
                removal.info.kind or "store",
                config.show_size(removal.info.nbytes),
                removal.reason,
            )


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


def _look(place: Path, owner: Path | None = None, *, deep: bool = True) -> StoreInfo | None:
    """The entry of a store; ``None`` if it was removed just now.

    ``owner`` is the run directory of a store in memory. ``deep``: its samples are counted.
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
    samples, kind = None, ""
    if deep and not void:
        samples, kind = _content(place, in_use=in_use, memory=owner is not None)
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
