"""The ledger: what is kept on disk, what made it, who used it, and how much time it saved.

It is a directory with one small file for each kept thing. A file is replaced in one step, under a
lock that all processes share, so neither a crash nor a second process leaves half a record. The
ledger is for people and for the collector only: training goes on without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import pwd
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from penstock import config
from penstock.errors import PenstockError, StoreError
from penstock.host.private_dir import own_directory, replacing
from penstock.store.guard import holders_of
from penstock.store.retention import Policy

_log = logging.getLogger("penstock.store")

T = TypeVar("T")

USES_KEPT = 10
"""Uses that a record lists; all are counted."""

MOST_HELD = 64
"""Things that a process holds one by one, each with an open file. After these, it holds all."""

_EVERYTHING = "everything"
"""The name of the lock on all things."""

_LARGEST = 64 << 20
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a kept thing is, and what made it.

    - ``kind``: ``"cache"``, ``"refurbish"``, ``"packed"``, ``"listing"``, ``"index"``,
      ``"lengths"`` or ``"decompressed"``.
    - ``identity``: a fingerprint of everything that made it.
    - ``place``: its directory; ``files``: their names, if it is not all of the directory.
    - ``origin``: where the data is that it was made from; ``data``: the identity of that data.
    - ``made_by``: the pipeline as text, line by line; ``versions``: of the packages that ran.
    - ``line``: equal for things of which a newer one replaces an older one.
    - ``parents``: the identities of other kept things from which it was made.
    - ``expires``: when it is of no use any more, in seconds since 1970; ``None``: never.
    """

    kind: str
    identity: str
    place: str
    files: tuple[str, ...] = ()
    origin: str = ""
    data: str = ""
    made_by: tuple[str, ...] = ()
    line: str = ""
    parents: tuple[str, ...] = ()
    expires: float | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name of its record."""
        about = f"{self.kind}\0{self.place}\0{self.identity}"
        return hashlib.blake2b(os.fsencode(about), digest_size=16).hexdigest()

    def completed(self, old: Provenance) -> Provenance:
        """This provenance, with what only an earlier user of the thing knew."""
        return replace(
            self,
            origin=self.origin or old.origin,
            data=self.data or old.data,
            versions=self.versions or old.versions,
        )

    @property
    def paths(self) -> list[Path]:
        """Its files, if they are named; otherwise its directory."""
        return [Path(self.place, name) for name in self.files] or [Path(self.place)]


@dataclass(frozen=True, slots=True)
class KeptUse:
    """One use of a kept thing by a process. ``ended``: ``None`` while it lasts, and if the process
    was killed."""

    user: str
    host: str
    pid: int
    program: str
    began: float
    ended: float | None = None
    hits: int = 0
    saved: float = 0.0


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """A kept thing in the ledger.

    - ``cost``: seconds that making it took; for samples, seconds of workers for one of them.
    - ``hits``: how often it gave a sample, or a whole listing or index; ``saved``: seconds that
      this took less than making it again. Seconds of workers, not of the clock.
    - ``opened``: number of uses; ``uses``: the last of them.
    """

    made: Provenance
    created: float
    cost: float = 0.0
    pinned: bool = False
    opened: int = 0
    hits: int = 0
    saved: float = 0.0
    uses: tuple[KeptUse, ...] = ()

    @property
    def last_use(self) -> float:
        times = [self.created, *(use.began for use in self.uses)]
        return max([*times, *(use.ended for use in self.uses if use.ended is not None)])

    def used(self, use: KeptUse) -> KeptRecord:
        """The record with one more use."""
        return replace(self, opened=self.opened + 1, uses=(*self.uses, use)[-USES_KEPT:])

    def ended(self, use: KeptUse, hits: int, saved: float, cost: float, now: float) -> KeptRecord:
        """The record after a use. ``cost``: 0 if this use has not measured it."""
        done = replace(use, ended=now, hits=hits, saved=saved)
        return replace(
            self,
            cost=cost or self.cost,
            hits=self.hits + hits,
            saved=self.saved + saved,
            uses=tuple(done if one == use else one for one in self.uses),
        )

    def text(self) -> str:
        return json.dumps({"version": _VERSION, **asdict(self)})

    @classmethod
    def parse(cls, text: bytes) -> KeptRecord:
        """The record in the bytes of a file. Raises ValueError."""
        try:
            state = json.loads(text)
            if state.pop("version") != _VERSION:
                raise ValueError("another version of Penstock has written it")
            made = _known(Provenance, state.pop("made"))
            for name in ("files", "made_by", "parents"):
                made[name] = tuple(made[name])
            uses = tuple(KeptUse(**_known(KeptUse, use)) for use in state.pop("uses"))
            return cls(Provenance(**made), uses=uses, **_known(cls, state))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it is not a record ({error})") from None


def _known(kind: type, state: dict[str, Any]) -> dict[str, Any]:
    """The entries of a dict that are fields of a class: a later version may have more."""
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in state.items() if name in names}


class Ledger:
    """The records of one directory of kept things. All methods are safe with several processes."""

    def __init__(self, root: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.root = config.disk_dir() / "ledger" if root is None else root
        self._clock = clock

    # Use.

    def begin(self, made: Provenance) -> KeptUse | None:
        """Note that this process uses a thing, and make its record if there is none.

        ``None`` if the ledger cannot be written to.
        """
        use = KeptUse(_user(), socket.gethostname(), os.getpid(), _program(), self._clock())

        def begun(old: KeptRecord | None) -> KeptRecord:
            if old is None:
                made_now = replace(made, versions=made.versions or versions())
                old = KeptRecord(made_now, self._clock())
            else:
                old = replace(old, made=made.completed(old.made))
            return old.used(use)

        return use if self._change(made.key, begun) else None

    def end(self, key: str, use: KeptUse, hits: int, saved: float, cost: float = 0.0) -> None:
        """Note the end of a use."""

        def ended(old: KeptRecord | None) -> KeptRecord | None:
            return None if old is None else old.ended(use, hits, saved, cost, self._clock())

        self._change(key, ended)

    def note(self, made: Provenance, seconds: float) -> None:
        """Note that this process has made a thing, or has used it, in this many seconds."""
        use = self.begin(made)
        if use is None:
            return

        def noted(old: KeptRecord | None) -> KeptRecord | None:
            if old is None:
                return None
            if old.opened == 1:
                return old.ended(use, 0, 0.0, seconds, self._clock())
            return old.ended(use, 1, max(0.0, old.cost - seconds), 0.0, self._clock())

        self._change(made.key, noted)

    def use(self, made: Provenance) -> None:
        """Note, once, that this process uses a thing. What that saves is not known."""
        known = self.record(made.key)
        me = (socket.gethostname(), os.getpid())
        if known is None or me not in [(use.host, use.pid) for use in known.uses]:
            self.begin(made)

    def pin(self, key: str, pinned: bool) -> None:
        """Keep a thing from being collected, or no longer."""
        changed = self._change(key, lambda old: old and replace(old, pinned=pinned))
        if not changed:
            raise StoreError(f"{self.root} cannot be written to, so nothing was pinned.")

    # Records.

    def records(self) -> dict[str, KeptRecord]:
        """All records that can be read, by key."""
        found: dict[str, KeptRecord] = {}
        with suppress(OSError):
            for path in sorted(self.root.glob("*.json")):
                if (record := _read_record(path)) is not None:
                    found[path.stem] = record
        return found

    def record(self, key: str) -> KeptRecord | None:
        """One record; ``None`` if there is none."""
        return _read_record(self.root / f"{key}.json")

    def forget(self, key: str) -> None:
        """Remove a record."""
        with suppress(OSError, PenstockError), self._locked():
            (self.root / f"{key}.json").unlink(missing_ok=True)

    def policy(self) -> Policy:
        """The policy that ``set_policy`` has set, or the default."""
        try:
            return Policy(**json.loads((self.root / "policy").read_text()))
        except FileNotFoundError:
            return Policy()
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(
                f"{self.root / 'policy'} cannot be read ({error}). Set it again with "
                "`penstock store policy`, or remove the file."
            ) from None

    def set_policy(self, policy: Policy) -> None:
        try:
            with self._locked(), replacing(self.root / "policy") as file:
                file.write(json.dumps(asdict(policy)).encode())
        except OSError as error:
            raise StoreError(f"the policy cannot be written to {self.root}: {error}.") from None

    # Locks.

    def hold(self, key: str) -> None:
        """Keep the files of a thing from being removed while this process lives.

        Call it before looking whether they exist.
        """
        with suppress(OSError, PenstockError):
            own_directory(self.root)
            # A data set may have more shards than a process may have open files.
            name = key if key in _held or len(_held) < MOST_HELD else _EVERYTHING
            while name not in _held or not _is_named(_held[name], self._lock_file(name)):
                file = self._open_lock(name)
                unneeded: int | None = file
                try:
                    fcntl.flock(file, fcntl.LOCK_SH)
                    # The collector removes the lock file together with the thing.
                    if _is_named(file, self._lock_file(name)):
                        unneeded = _held.pop(name, None)
                        _held[name] = file
                finally:
                    if unneeded is not None:
                        os.close(unneeded)

    @contextmanager
    def alone(self, key: str) -> Iterator[tuple[bool, tuple[int, ...]]]:
        """Whether no process holds a thing; otherwise the processes that do, if they are known.

        If none does, none can hold it before the end of the block.
        """
        files: list[int] = []
        try:
            for name in (key, _EVERYTHING):
                files.append(self._open_lock(name))
                try:
                    fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield False, holders_of(files[-1])
                    return
            yield _is_named(files[0], self._lock_file(key)), ()
        finally:
            for file in files:
                os.close(file)

    def drop_lock(self, key: str) -> None:
        """Remove the lock file of a thing that was removed. The caller is ``alone`` with it."""
        self._lock_file(key).unlink(missing_ok=True)

    def _lock_file(self, key: str) -> Path:
        return self.root / f"{key}.lock"

    def _open_lock(self, key: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._lock_file(key), flags, 0o600)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock for changes. The system releases it when a process dies."""
        own_directory(self.root)
        file = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _change(self, key: str, change: Callable[[KeptRecord | None], KeptRecord | None]) -> bool:
        """Replace a record. A ledger that cannot be written to costs nothing but the record."""
        path = self.root / f"{key}.json"
        try:
            with self._locked():
                new = change(_read_record(path))
                if new is not None:
                    with replacing(path) as file:
                        file.write(new.text().encode())
        except (OSError, PenstockError) as error:
            _warn_once(
                f"penstock: {self.root} cannot be written to, so `penstock store` does not "
                f"know what this process keeps: {error}"
            )
            return False
        return new is not None


class StoreUse:
    """The use of one store by one loader or node, for the ledger.

    ``number``: which of the pipeline's stops that keep samples has it; ``place``: of that stop on
    the road.
    """

    def __init__(self, made: Provenance, number: int, place: int) -> None:
        self.made = made
        self._number, self._place = number, place
        self._use: KeptUse | None = None
        self._hits = self._above = self._passed = 0
        self._above_seconds = self._own_seconds = 0.0

    def begin(self) -> None:
        if self._use is None:
            self._use = Ledger().begin(self.made)

    def count(self, tally: Sequence[Any]) -> None:
        """Count a batch; ``tally``: as ``Tally.as_list`` returns it."""
        samples, seconds, hits = tally[0], tally[1], tally[3]
        # Stage 0 is the source, so the stage above a stop has the number of its place.
        self._above += samples[self._place]
        self._above_seconds += seconds[self._place]
        self._passed += samples[self._place + 1]
        self._own_seconds += seconds[self._place + 1] - seconds[self._place]
        self._hits += hits[self._number]

    def end(self) -> None:
        """Write down what the use has saved. If every sample was a hit, the cost of a sample is
        known from an earlier use."""
        use, self._use = self._use, None
        if use is None:
            return
        ledger = Ledger()
        cost = self._above_seconds / self._above if self._above else 0.0
        known = ledger.record(self.made.key)
        each = cost or (0.0 if known is None else known.cost)
        own = self._own_seconds / self._passed if self._passed else 0.0
        ledger.end(self.made.key, use, self._hits, self._hits * max(0.0, each - own), cost)


_held: dict[str, int] = {}
_warned: set[str] = set()


def versions() -> dict[str, str]:
    """The versions of the packages that decide how samples look."""
    found = {"python": platform.python_version()}
    for package in ("penstock", "numpy"):
        found[package] = importlib.metadata.version(package)
    return found


def _read_record(path: Path) -> KeptRecord | None:
    try:
        if path.stat().st_size > _LARGEST:
            return None
        return KeptRecord.parse(path.read_bytes())
    except (OSError, ValueError):
        return None


def _is_named(file: int, path: Path) -> bool:
    """Whether an open file still exists under its name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError:
        return False


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a user without an entry, as in some containers
        return str(os.getuid())


def _program() -> str:
    """The script of this process. Its arguments may hold secrets, so they are left out."""
    script = sys.argv[0] if sys.argv else ""
    return os.path.abspath(script) if script and script != "-c" else "python"


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning("%s", message)
