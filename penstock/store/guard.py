"""Who has a store open, and whether what lies there can be trusted.

Every process that has a store open holds a shared lock on its guard file, and whoever holds the
exclusive lock is alone: it may repair the store, or declare it clean. A state file beside it says
what the store holds and how it was left. It is a file of its own, not a record in LMDB, because
it must tell the truth just when LMDB's pages may be lost.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = 2
"""Of the values and the records beside them. A store of another format is started anew."""

STATE = "state.json"
"""The file that says what a store holds, and how it was left."""

_GUARD = "guard"


def boot_id() -> str:
    """Which run of the machine this is: pages that were never synced survive within one only."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class State:
    """What a store holds, and how it was left."""

    identity: str
    boot: str
    clean: bool = False
    damaged: bool = False
    format: int = FORMAT


class Guard:
    """One process's hold on a store. Locks are released by the system when the process dies."""

    def __init__(self, place: Path) -> None:
        self.place = place
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(place / _GUARD, flags, 0o600)

    def alone(self) -> bool:
        """Take the exclusive lock, if nobody else has the store open."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def share(self) -> None:
        """Take the shared lock; waits for a process that repairs the store at this moment.

        The kernel may let somebody else in between the exclusive lock and the shared one, so
        the state has to be read again afterwards.
        """
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    @property
    def current(self) -> bool:
        """Whether the file locked is still the one that lies there."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.place / _GUARD))
        except FileNotFoundError:
            return False

    def holders(self) -> tuple[int, ...]:
        """The processes that have the store open, as far as the kernel tells who they are."""
        try:
            found, locks = os.fstat(self._fd), Path("/proc/locks").read_text()
        except OSError:
            return ()
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        held = [words for line in locks.splitlines() if (words := line.split())[1] == "FLOCK"]
        numbers = {int(words[4]) for words in held if words[5] == device}
        return tuple(sorted(number for number in numbers if number > 0))

    def read(self) -> State | None:
        """The state; ``None`` where there is none, ValueError where it cannot be read."""
        try:
            found = json.loads((self.place / STATE).read_bytes())
        except FileNotFoundError:
            return None
        try:
            return State(**found)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def write(self, state: State, *, durable: bool) -> None:
        """Replace the state in one step."""
        partial = self.place / f"{STATE}.{os.getpid()}"
        with open(partial, "w", opener=_private) as file:
            json.dump(asdict(state), file)
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

    def declare_damaged(self) -> None:
        """Have the next process that is alone with the store start it anew."""
        with suppress(OSError, ValueError):
            state = self.read()
            if self.current and state is not None and not state.damaged:
                damaged = State(state.identity, state.boot, damaged=True, format=state.format)
                self.write(damaged, durable=False)

    def leave(self, *, clean: bool) -> None:
        """Let go. Where ``clean``, the last process to leave says so in the state.

        Letting go before trying for the exclusive lock makes sure that of several processes
        leaving at once, each after its own sync, one gets it.
        """
        with suppress(OSError, ValueError):
            if clean:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                if self.alone() and self.current:
                    state = self.read()
                    if state is not None and not state.damaged:
                        left = State(state.identity, state.boot, clean=True, format=state.format)
                        self.write(left, durable=True)
        self.close()

    def close(self) -> None:
        """Let go, also of copies that a child, forked at the wrong moment, may have."""
        if self._fd >= 0:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """Close the file and no more: in a forked child the lock is the parent's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_store(place: Path) -> bool:
    return (place / STATE).exists()


def remove(place: Path, names: tuple[str, ...]) -> None:
    """Remove a store's own files and, if nothing else lies there, its directory."""
    with suppress(FileNotFoundError):
        # The guard goes first: who waits for its lock then sees that it waits for nothing.
        for path in (place / _GUARD, place / STATE, *(place / name for name in names)):
            path.unlink(missing_ok=True)
        for path in place.glob(f"{STATE}.*"):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        place.rmdir()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
