"""The folder that ``pack`` writes into: on disk or in a bucket, one contract."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock import config
from penstock.errors import SourceError, StoreError
from penstock.fingerprint import fingerprint
from penstock.host.private_dir import own_directory
from penstock.source.objects.address import Address, is_url, local_path
from penstock.source.objects.protocol import StorageOptions, WantedObject

if TYPE_CHECKING:
    from penstock.source.objects.connection import Fetcher


class PackedFolder(Protocol):
    """Files of one folder, each of which is there whole or not at all.

    ``shown``: its name. ``path``: where it is on this machine; ``None`` if it is in a bucket.
    """

    shown: str

    @property
    def path(self) -> Path | None: ...

    def read(self, name: str) -> bytes | None:
        """The content of a small file; ``None`` if there is none."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, in one step. Raises OSError or StoreError."""
        ...

    def writing(self, name: str) -> Any:
        """A context: a path to write a large file to. At its end it is there under its name."""
        ...

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """The sizes of files; ``None`` where there is none."""
        ...

    def names(self) -> Container[str]:
        """The files of the folder."""
        ...

    def lock_file(self) -> Path:
        """A file of this machine that only one process at a time locks. Makes the folder."""
        ...

    def digest(self, name: str) -> str | None:
        """The SHA-256 of a file; ``None`` if it cannot be read."""
        ...


class LocalFolder:
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = str(path)

    def read(self, name: str) -> bytes | None:
        path = self._at(name)
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error}.") from error

    def put(self, name: str, content: bytes) -> None:
        """Write a file under a temporary name, flush it to disk, and rename it."""
        with self.writing(name) as part, open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        part = self.path / f".{name}.part"
        try:
            yield part
            os.replace(part, self._at(name))
            sync_folder(self.path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        return [path.stat().st_size if path.exists() else None for path in map(self._at, names)]

    def _at(self, name: str) -> Path:
        return self.path / name

    def names(self) -> Container[str]:
        return set(os.listdir(self.path))

    def lock_file(self) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path / ".pack.lock"

    def digest(self, name: str) -> str | None:
        digest = hashlib.sha256()
        try:
            with open(self.path / name, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError:
            return None
        return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush the names of a folder to disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class RemoteFolder:
    """A folder of a bucket. Files are written to temporary ones here, and then uploaded.

    Stores show an object when all of it has arrived, so an upload is one step.
    """

    path: Path | None = None

    PART = 8 << 20
    """Bytes that are read at a time for a checksum."""

    def __init__(self, fetcher: Fetcher, path: str) -> None:
        self._fetcher = fetcher
        self._above = f"{path}/" if path else ""
        self.shown = f"{fetcher.root}/{path}".rstrip("/")

    def read(self, name: str) -> bytes | None:
        return self._fetcher.read_whole(self._above + name)

    def put(self, name: str, content: bytes) -> None:
        with self.writing(name) as part:
            part.write_bytes(content)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        # A file without a name: a process that is killed leaves none behind.
        with tempfile.TemporaryFile() as file:
            part = Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
            yield part
            self._fetcher.upload(str(part), self._above + name)

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        found = {path: size for page in self._below() for path, size, _ in page}
        return [found.get(self._above + name) for name in names]

    def _below(self) -> Iterator[list[tuple[str, int, str]]]:
        return self._fetcher.objects_below(self._above.rstrip("/"))

    def names(self) -> Container[str]:
        start = len(self._above)
        return {path[start:] for page in self._below() for path, _, _ in page}

    def lock_file(self) -> Path:
        directory = config.disk_dir() / "indexes"
        own_directory(directory)
        return directory / f"{fingerprint(('pack', self.shown))}.lock"

    def digest(self, name: str) -> str | None:
        path, digest = self._above + name, hashlib.sha256()
        try:
            ((_, size, etag),) = self._fetcher.heads([path])
            for first in range(0, size, self.PART):
                last = min(first + self.PART, size)
                wanted = WantedObject(path, first, last, size, etag)
                digest.update(self._fetcher.read([wanted])[0])
        except SourceError:
            return None
        return digest.hexdigest()


def folder_at(
    folder: str | os.PathLike[str], storage: StorageOptions | None = None
) -> PackedFolder:
    """The folder with this path or URL."""
    path = local_path(str(folder)) if is_url(folder) else None
    if is_url(folder) and path is None:
        from penstock.source.objects.connection import Fetcher

        address = Address.of(str(folder))
        return RemoteFolder(Fetcher(address.root, storage or {}), address.path)
    if storage is not None:
        raise StoreError(f"storage is for URLs, and {str(folder)!r} is local. Leave it out.")
    return LocalFolder(Path(path or folder).expanduser().absolute())
