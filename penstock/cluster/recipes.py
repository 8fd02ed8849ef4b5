"""Recipes: how the node of another machine gets a pipeline that it is to run.

A recipe is pickled code, so nothing that comes over TCP may be one. A task for another machine only
names its recipe. That machine has the recipe because its own job has sent the same one to its node,
because it lies in a directory of the user's file system that both machines see, or because a
``Courier`` has brought it. It is used only if its content has the digest that the task names.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgpack

from penstock.engine.pools.wire import RELEASE
from penstock.errors import ClusterError, StoreError
from penstock.host.private_dir import check_own, own_directory, replacing

_log = logging.getLogger("penstock.node.cluster")

LARGEST_RECIPE = 256 << 20
"""Bytes of the largest recipe that is given to other machines. A pipeline over an array in memory
contains that array."""

FETCH_LIMIT = 20.0
"""Seconds that a courier may take to bring a recipe."""

FORGOTTEN = 7 * 86400.0
"""Seconds after which the recipe of a machine that was switched off is removed."""

_DIGEST_BYTES = 32
_ENDING = ".recipe"


class CourierLate(ClusterError):
    """A courier did not answer in time. It may do so when it is asked again."""


class Courier(Protocol):
    """Brings recipes to other machines on a way that may carry code, such as Ray with a token.

    All methods may be called in any thread. A courier that cannot do what is asked raises
    ClusterError, whose text tells the user what is missing; the recipe then goes another way.
    """

    name: str
    """For messages, such as ``"Ray"``."""

    def publish(self, digest: str, content: bytes) -> None:
        """Make a recipe available to every machine that asks for this digest."""

    def fetch(self, digest: str, *, timeout: float) -> bytes | None:
        """The recipe with this digest; ``None`` if no machine has published it.

        Takes at most ``timeout`` seconds. The caller checks that the content has the digest.
        """

    def withdraw(self, digest: str) -> None:
        """Forget a recipe that this machine has published: its job has ended."""


class RecipeName(NamedTuple):
    """What a task says about its recipe.

    ``identity``: fingerprint of what the pipeline prepares. Two jobs that prepare the same have the
    same identity, though their pickles may differ. ``digest``: of the content of the recipe.

    >>> RecipeName.parse(str(RecipeName("ab", "cd")))
    RecipeName(identity='ab', digest='cd')
    """

    identity: str
    digest: str

    @classmethod
    def parse(cls, text: str) -> RecipeName:
        """The name in a task. Raises ValueError."""
        identity, _, digest = text.partition(".")
        if not all(part.isalnum() and part.isascii() for part in (identity, digest)):
            raise ValueError(f"{text[:80]!r} does not name a recipe")
        return cls(identity, digest)

    def __str__(self) -> str:
        return f"{self.identity}.{self.digest}"


@dataclass(frozen=True, slots=True)
class RecipeContent:
    """A pickled recipe and what it takes to unpickle it.

    - ``path``: directories that its modules are imported from.
    - ``directory``: working directory of the job.
    - ``user_code``: it runs code that is not Penstock's own.
    - ``frame``: the recipe, packed.
    """

    path: tuple[str, ...]
    directory: str
    user_code: bool
    frame: bytes

    def pack(self) -> bytes:
        """The content of a recipe as bytes, whose digest names it."""
        fields = [RELEASE, list(self.path), self.directory, self.user_code, self.frame]
        packed: bytes = msgpack.packb(fields, use_bin_type=True, unicode_errors="surrogatepass")
        return packed

    @classmethod
    def unpack(cls, content: bytes) -> RecipeContent:
        """The reverse of ``pack``. Does not unpickle anything. Raises ClusterError."""
        try:
            release, path, directory, user_code, frame = msgpack.unpackb(
                content, unicode_errors="surrogatepass", max_bin_len=LARGEST_RECIPE
            )
        except (ValueError, TypeError, msgpack.UnpackException):
            raise ClusterError("the content of the recipe cannot be read") from None
        if release != RELEASE:
            raise ClusterError(f"the recipe is of Penstock {release}, and this is {RELEASE}")
        return cls(tuple(path), directory, user_code, frame)


def digest_of(content: bytes) -> str:
    """The digest that names a recipe.

    >>> len(digest_of(b""))
    64
    """
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


class RecipeDirectory:
    """A directory of recipes that only this user can open; other machines may see it too."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, content: bytes) -> str:
        """Write a recipe, and return its digest. Raises ClusterError."""
        digest = digest_of(content)
        try:
            own_directory(self.path)
            self._remove_forgotten()
            with replacing(self._file(digest)) as file:
                file.write(content)
        except (OSError, StoreError) as error:
            raise ClusterError(f"the recipe cannot be written to {self.path}: {error}") from None
        return digest

    def read(self, digest: str) -> bytes | None:
        """The recipe with this digest; ``None`` if it is not here. Raises ClusterError.

        A recipe is code: the directory and the file must belong to this user, and nobody else may
        be able to change them.
        """
        path = self._file(digest)
        try:
            check_own(self.path)
            # The file that is checked is the file that is read.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except (OSError, StoreError) as error:
            raise ClusterError(f"{path} cannot be read: {error}") from None
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_RECIPE:
                raise ClusterError(f"{path} is not a recipe: too large, or not a file")
            if found.st_uid != os.getuid():
                raise ClusterError(
                    f"{path} belongs to user {found.st_uid}, not to you (user {os.getuid()}): it "
                    "is not used. Remove it"
                )
            if found.st_mode & 0o022:
                raise ClusterError(
                    f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: other users can change "
                    "it, so it is not used. Remove it"
                )
            content = file.read(LARGEST_RECIPE)
        if digest_of(content) != digest:
            raise ClusterError(f"{path} has another content than its name says. Remove it")
        with suppress(OSError):  # a file that is in use is not a forgotten one
            os.utime(path)
        return content

    def remove(self, digest: str) -> None:
        """Remove a recipe, if it is here."""
        with suppress(OSError):
            self._file(digest).unlink()

    def _file(self, digest: str) -> Path:
        return self.path / f"{digest}{_ENDING}"

    def _remove_forgotten(self) -> None:
        """Remove the recipes of machines that ended without removing them."""
        oldest = time.time() - FORGOTTEN
        for file in self.path.glob(f"*{_ENDING}"):
            with suppress(OSError):
                if file.stat().st_mtime < oldest:
                    file.unlink()


class Recipes:
    """The recipes that this machine has, and the ways on which it gives them to others.

    Safe to call from any thread.
    """

    def __init__(self, directory: Path, couriers: Iterable[Courier] = ()) -> None:
        self.directory = RecipeDirectory(directory)
        self._lock = threading.Lock()
        self._couriers: list[Courier] = list(couriers)
        self._own: dict[str, bytes] = {}
        """By identity: recipes that jobs of this machine have sent."""
        self._published: dict[str, _Published] = {}
        """By digest."""

    @property
    def ways(self) -> int:
        """Changes when there is another way to give recipes to machines."""
        return len(self._couriers)

    def add_courier(self, courier: Courier) -> None:
        """Use one more way from now on, also for the recipes that were published before."""
        with self._lock:
            self._couriers.append(courier)
            published = [(digest, entry.content) for digest, entry in self._published.items()]
        for digest, content in published:
            with suppress(ClusterError):
                courier.publish(digest, content)

    def publish(self, identity: str, content: RecipeContent) -> RecipeName:
        """Give a recipe of this machine's own job to the others. Raises ClusterError.

        It is enough if one way works.
        """
        packed = content.pack()
        if len(packed) > LARGEST_RECIPE:
            raise ClusterError(
                f"the pipeline has {len(packed) >> 20} MB of data in itself, and at most "
                f"{LARGEST_RECIPE >> 20} MB are given to other machines. Read the samples from "
                "files that all machines see"
            )
        digest = digest_of(packed)
        with self._lock:
            entry = self._published.setdefault(digest, _Published(packed))
            entry.users += 1
            couriers = list(self._couriers)
            if entry.users > 1:
                return RecipeName(identity, digest)
        faults = []
        try:
            self.directory.write(packed)
        except ClusterError as error:
            faults.append(str(error))
        for courier in couriers:
            try:
                courier.publish(digest, packed)
            except ClusterError as error:
                faults.append(f"{courier.name}: {error}")
        if len(faults) > len(couriers):
            self.withdraw(digest)
            raise ClusterError("; ".join(faults))
        for fault in faults:
            _log.warning("a recipe goes another way: %s", fault)
        return RecipeName(identity, digest)

    def withdraw(self, digest: str) -> None:
        """One user of a published recipe has ended."""
        with self._lock:
            entry = self._published.get(digest)
            if entry is None:
                return
            entry.users -= 1
            if entry.users:
                return
            del self._published[digest]
            couriers = list(self._couriers)
        self.directory.remove(digest)
        for courier in couriers:
            with suppress(ClusterError):
                courier.withdraw(digest)

    def renew(self, digest: str) -> bool:
        """Write a published recipe again if its file is gone. Returns whether it was.

        Another machine whose job has ended may have removed the file of both.
        """
        with self._lock:
            entry = self._published.get(digest)
        if entry is None:
            return False
        try:
            if self.directory.read(digest) is None:
                self.directory.write(entry.content)
                return True
        except ClusterError as error:
            _log.warning("a recipe cannot be written again: %s", error)
        return False

    def add_own(self, identity: str, content: RecipeContent) -> None:
        """A job of this machine has sent a recipe to its node."""
        if len(content.frame) <= LARGEST_RECIPE:
            with self._lock:
                self._own[identity] = content.pack()

    def remove_own(self, identity: str) -> None:
        with self._lock:
            self._own.pop(identity, None)

    def find(self, name: RecipeName) -> RecipeContent:
        """The recipe of this name. Raises ClusterError, whose text says how it could be had.

        Raises CourierLate if asking again may help.
        """
        with self._lock:
            own, couriers = self._own.get(name.identity), list(self._couriers)
        if own is not None:
            return RecipeContent.unpack(own)
        tried, late = [], False
        try:
            content = self.directory.read(name.digest)
            if content is not None:
                return RecipeContent.unpack(content)
        except ClusterError as error:
            tried.append(str(error))
        for courier in couriers:
            try:
                content = courier.fetch(name.digest, timeout=FETCH_LIMIT)
            except ClusterError as error:
                tried.append(f"{courier.name}: {error}")
                late |= isinstance(error, CourierLate)
                continue
            if content is not None and digest_of(content) == name.digest:
                return RecipeContent.unpack(content)
            tried.append(f"{courier.name} does not have it")
        missing = _missing(self.directory.path, tried)
        raise CourierLate(missing) if late else ClusterError(missing)


class Publication:
    """The pipeline of one pool, which is published when another machine first needs it."""

    def __init__(self, recipes: Recipes, identity: str, content: RecipeContent) -> None:
        self._recipes = recipes
        self._identity = identity
        self._content = content
        self._lock = threading.Lock()
        self._name: RecipeName | None = None

    @property
    def ways(self) -> int:
        """See ``Recipes.ways``."""
        return self._recipes.ways

    def publish(self) -> str:
        """Publish it, if that was not done yet, and return its name. Raises ClusterError."""
        with self._lock:
            if self._name is None:
                self._name = self._recipes.publish(self._identity, self._content)
            return str(self._name)

    def missing(self) -> bool:
        """A machine cannot get it. Returns whether it was gone, and is here again."""
        with self._lock:
            return self._name is not None and self._recipes.renew(self._name.digest)

    def withdraw(self) -> None:
        """No machine needs it any more."""
        with self._lock:
            name, self._name = self._name, None
        if name is not None:
            self._recipes.withdraw(name.digest)


@dataclass(slots=True)
class _Published:
    """A recipe that other machines may use, and how many pools of this machine published it."""

    content: bytes
    users: int = 0


def _missing(directory: Path, tried: Sequence[str]) -> str:
    also = f" ({'; '.join(tried)})" if tried else ""
    return (
        f"this machine does not have the pipeline{also}. Pipelines are code and are not sent over "
        f"the network: put {directory} on a file system that both machines see (the variable "
        "PENSTOCK_CLUSTER_RECIPES names another directory), or start the nodes with Ray"
    )
