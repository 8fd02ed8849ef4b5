"""The guard of a store: which processes have it open, and whether its content can be trusted.

Every process that has a store open holds a shared lock on its guard file. The holder of the
exclusive lock is alone with the store: it may repair it, or mark it as closed cleanly. The state
file records what the store holds and how it was left. It is a file of its own, not a record in
LMDB, because it must be right precisely when LMDB's pages may be lost. The guard file itself
records how LMDB's files looked after the last change by one of its users, and whether one of them
has found the store damaged.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat as modes
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

FORMAT = 3
"""Format of the values and of the records next to them. A store of another format is emptied."""

STATE = "state.json"
"""Name of the state file."""

_GUARD = "guard"

_MARK = b"penstock"
_RECORD = struct.Struct("<8sQQQQQ")
_LARGEST_STATE = 1 << 16


class FileRecord(NamedTuple):
    """How LMDB's files look: size and time of change of the data file, LMDB's number of its last
    transaction, and the inodes of both files.

    The time of change (``ctime``) cannot be set by a program, so no tool hides a change.
    """

    nbytes: int
    changed: int
    transaction: int
    data: int
    lock: int


def boot_id() -> str:
    """Identifies the current boot of the machine: unsynced pages do not survive a reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class StoreState:
    """The content of the state file: what a store holds, and how it was left."""

    identity: str
    boot: str
    clean: bool = False
    damaged: bool = False
    format: int = FORMAT

    @classmethod
    def parse(cls, text: bytes) -> StoreState:
        """The state in the bytes of a state file. Raises ValueError."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        if isinstance(found := fields.get("format"), int) and found != FORMAT:
            # Another version may have other fields.
            return cls(str(fields.get("identity", "")), str(fields.get("boot", "")), format=found)
        checksum = fields.pop("checksum", None)
        try:
            state = cls(**fields)
        except TypeError as error:
            raise ValueError(str(error)) from None
        if checksum != state.checksum:
            raise ValueError("its checksum is wrong")
        return state

    def text(self) -> str:
        """The state as the text of a state file."""
        return json.dumps({**asdict(self), "checksum": self.checksum})

    @property
    def checksum(self) -> str:
        """Tells a damaged state file from one of another store."""
        return xxhash.xxh3_64_hexdigest(json.dumps(asdict(self), sort_keys=True).encode())


class Guard:
    """The lock of one process on a store. The system releases it when the process dies."""

    def __init__(self, place: Path) -> None:
        self.place = place
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(place / _GUARD, flags, 0o600)
        except IsADirectoryError:
            discard(place / _GUARD)
            self._fd = os.open(place / _GUARD, flags, 0o600)

    def lock_alone(self) -> bool:
        """Try to take the exclusive lock; false if another process has the store open."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lock_shared(self) -> None:
        """Take the shared lock; wait while another process repairs the store.

        The kernel may let another process in between the exclusive lock and the shared one, so
        the state has to be read again afterwards.
        """
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    @property
    def current(self) -> bool:
        """Whether the locked file still exists under its name."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.place / _GUARD))
        except FileNotFoundError:
            return False

    def holders(self) -> tuple[int, ...]:
        """The processes that have the store open, as far as the kernel lists them."""
        return holders_of(self._fd)

    def read(self) -> StoreState | None:
        """The state; ``None`` if there is no state file, ValueError if it cannot be parsed."""
        try:
            text = _read_file(self.place / STATE)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(str(error)) from None
        return StoreState.parse(text)

    def write(self, state: StoreState, *, durable: bool) -> None:
        """Replace the state atomically. ``durable``: it is on disk when this returns."""
        os.pwrite(self._fd, bytes([state.damaged]), _RECORD.size)
        partial = self.place / f"{STATE}.{os.getpid()}"
        with open(partial, "w", opener=_private) as file:
            file.write(state.text())
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, self.place / STATE)
        if durable:
            directory = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def read_record(self) -> FileRecord | None:
        """How LMDB's files looked after the last change; ``None`` if that is not known."""
        packed = os.pread(self._fd, _RECORD.size, 0)
        if len(packed) < _RECORD.size or not packed.startswith(_MARK):
            return None
        return FileRecord(*_RECORD.unpack(packed)[1:])

    def write_record(self, record: FileRecord) -> None:
        os.pwrite(self._fd, _RECORD.pack(_MARK, *record), 0)

    @property
    def marked(self) -> bool:
        """Whether a store of Penstock was made here before."""
        return os.pread(self._fd, len(_MARK), 0) == _MARK

    @property
    def declared_damaged(self) -> bool:
        """Whether a user of the store has found it damaged. Takes a microsecond."""
        return os.pread(self._fd, 1, _RECORD.size) == b"\1"

    def declare_damaged(self) -> None:
        """Have all users give the store up, and the next one that is alone with it empty it."""
        with suppress(OSError, ValueError):
            state = self.read()
            if self.current and state is not None and not state.damaged:
                damaged = StoreState(state.identity, state.boot, damaged=True, format=state.format)
                self.write(damaged, durable=False)

    def leave(self, *, clean: bool) -> None:
        """Release the lock. With ``clean``, the last process to leave records that in the state.

        The lock is released before the exclusive one is tried: of several processes that leave at
        once, each after its own sync, one is then sure to get it.
        """
        with suppress(OSError, ValueError):
            if clean:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                if self.lock_alone() and self.current:
                    state = self.read()
                    if state is not None and not state.damaged:
                        left = StoreState(
                            state.identity, state.boot, clean=True, format=state.format
                        )
                        self.write(left, durable=True)
        self.close()

    def close(self) -> None:
        """Release the lock, also for a child that was forked while the file was open."""
        if self._fd >= 0:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """Close the file without releasing the lock: in a forked child it is the parent's lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def holders_of(fd: int) -> tuple[int, ...]:
    """The processes that hold a lock on an open file, as far as the kernel lists them."""
    try:
        stat, locks = os.fstat(fd), Path("/proc/locks").read_text()
    except OSError:
        return ()
    device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    held = [words for line in locks.splitlines() if (words := line.split())[1] == "FLOCK"]
    pids = {int(words[4]) for words in held if words[5] == device}
    return tuple(sorted(pid for pid in pids if pid > 0))


def is_store(place: Path) -> bool:
    return os.path.lexists(place / STATE)


def discard(path: Path) -> None:
    """Remove a file of a store, or an empty directory in its place."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        path.rmdir()


def remove(place: Path, names: tuple[str, ...]) -> None:
    """Remove the files of a store and, if nothing else is in it, its directory."""
    with suppress(FileNotFoundError):
        # The guard goes first: a process that waits for its lock then sees that it is gone.
        for path in (place / _GUARD, place / STATE, *(place / name for name in names)):
            discard(path)
        for path in place.glob(f"{STATE}.*"):
            discard(path)
    with suppress(OSError):
        place.rmdir()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _read_file(path: Path) -> bytes:
    """The content of a small file. A pipe in its place must not block, nor a link mislead."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not modes.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("it is not a file")
        return os.read(fd, _LARGEST_STATE)
    finally:
        os.close(fd)
