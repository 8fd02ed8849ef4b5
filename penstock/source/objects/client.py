"""Requests to object stores: obstore for the schemes it knows, fsspec for all others.

This is the only importer of obstore and fsspec. Only the fetcher's process imports it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.source.objects.address import Address
from penstock.source.objects.protocol import UNKNOWN, FetchFailure, StorageOptions, WantedObject

PAGE = 1000
"""Objects in one page of a listing, as stores have it."""

_FSSPEC_THREADS = 64
"""Requests at once to a store that only fsspec knows."""


class ListedObject(NamedTuple):
    """An object in a listing."""

    path: str
    size: int
    etag: str


class ObjectFailure(Exception):
    """A request failed. ``again``: another one may succeed."""

    def __init__(self, failure: FetchFailure, *, again: bool) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.again = again


class ObjectClient(Protocol):
    """Requests to one store. Raises ObjectFailure."""

    async def get(self, wanted: WantedObject, begins: Callable[[], None]) -> Any:
        """The bytes of an object or of a range of it, as a buffer.

        ``begins`` is called when the answer begins, if that is known.
        """

    async def head(self, path: str) -> ListedObject:
        """Size and version of one object."""

    async def put(self, file: str, path: str) -> None:
        """Write a file of this machine to an object, in one step."""

    def list(self, prefix: str) -> AsyncIterator[list[ListedObject]]:
        """All objects whose path begins with ``prefix/``, page by page."""


def connect(root: str, options: StorageOptions) -> ObjectClient:
    """A client for the store with this URL. Raises ObjectFailure if it cannot be made."""
    address = Address(root, "")
    try:
        return _Obstore(address, options) if address.known else _Fsspec(address, options)
    except ImportError as error:
        text = f'{root} needs {error.name}: pip install "penstock[cloud]"'
        if not address.known:
            text = (
                f"{root} needs fsspec and its package for {address.scheme}: {error}. "
                'pip install "penstock[cloud]" and that package.'
            )
        raise ObjectFailure(FetchFailure("settings", text), again=False) from error
    except Exception as error:
        text = f"{root} cannot be used: {_short(error)}. Check the URL and storage=."
        raise ObjectFailure(FetchFailure("settings", text), again=False) from error


class _Obstore:
    def __init__(self, address: Address, options: StorageOptions) -> None:
        self._obstore = import_module("obstore")
        self._exceptions = import_module("obstore.exceptions")
        # Requests are repeated by the fetcher, which can also hedge them and check their answers.
        self._store = import_module("obstore.store").from_url(
            address.root,
            config=dict(options) or None,
            client_options={
                "allow_http": True,
                "connect_timeout": "10s",
                "timeout": "60s",
                "pool_idle_timeout": "60s",
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
            **_credentials(address.scheme, options),
        )
        self._listable = address.scheme not in ("http", "https")
        self._root = address.root

    async def get(self, wanted: WantedObject, begins: Callable[[], None]) -> Any:
        options: Any = None
        if wanted.start != UNKNOWN:
            options = {"range": (wanted.start, wanted.end)}
        try:
            result = await self._obstore.get_async(self._store, wanted.path, options=options)
            begins()
            meta = result.meta
            check_version(wanted, int(meta["size"]), meta["e_tag"] or "")
            content = await result.bytes_async()
        except ObjectFailure:
            raise
        except Exception as error:
            raise self._failure(error) from error
        check_length(wanted, len(content), int(meta["size"]))
        return content

    async def head(self, path: str) -> ListedObject:
        try:
            meta = await self._obstore.head_async(self._store, path)
        except Exception as error:
            raise self._failure(error) from error
        return ListedObject(path, int(meta["size"]), meta["e_tag"] or "")

    async def put(self, file: str, path: str) -> None:
        try:
            await self._obstore.put_async(self._store, path, Path(file))
        except Exception as error:
            raise self._failure(error) from error

    async def list(self, prefix: str) -> AsyncIterator[list[ListedObject]]:
        if not self._listable:
            text = (
                f"{self._root} is a web server, which cannot list its files. Give from_files a "
                "list of URLs, or from_folder the URL of a bucket."
            )
            raise ObjectFailure(FetchFailure("settings", text), again=False)
        stream = self._obstore.list(self._store, prefix or None, chunk_size=PAGE)
        try:
            async for page in stream:
                yield [ListedObject(one["path"], one["size"], one["e_tag"] or "") for one in page]
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> ObjectFailure:
        if isinstance(error, FileNotFoundError):
            return ObjectFailure(FetchFailure("missing", "it does not exist"), again=False)
        denied = (
            self._exceptions.PermissionDeniedError,
            self._exceptions.UnauthenticatedError,
        )
        if isinstance(error, denied):
            return ObjectFailure(FetchFailure("denied", _short(error)), again=False)
        return ObjectFailure(FetchFailure("unreachable", _short(error)), again=True)


def _credentials(scheme: str, options: StorageOptions) -> dict[str, Any]:
    """boto3's chain of credentials (profiles, SSO), where neither variables nor options give any.

    obstore itself knows variables, web identities and instance metadata.
    """
    given = any("key" in name.lower() or "skip_signature" in name.lower() for name in options)
    if scheme not in ("s3", "s3a") or given or "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    try:
        session = import_module("boto3").Session()
        provider = import_module("obstore.auth.boto3").Boto3CredentialProvider
    except ImportError:
        return {}
    return {} if session.get_credentials() is None else {"credential_provider": provider(session)}


class _Fsspec:
    def __init__(self, address: Address, options: StorageOptions) -> None:
        self._files = import_module("fsspec").filesystem(address.scheme, **dict(options))
        self._root = address.root
        self._limit = asyncio.Semaphore(_FSSPEC_THREADS)

    def _url(self, path: str) -> str:
        return f"{self._root}/{path}"

    async def get(self, wanted: WantedObject, begins: Callable[[], None]) -> Any:
        start = None if wanted.start == UNKNOWN else wanted.start
        end = None if wanted.start == UNKNOWN else wanted.end
        content = await self._call(
            lambda: self._files.cat_file(self._url(wanted.path), start=start, end=end)
        )
        check_length(wanted, len(content), wanted.size)
        return content

    async def head(self, path: str) -> ListedObject:
        return _found(path, await self._call(lambda: self._files.info(self._url(path))))

    async def put(self, file: str, path: str) -> None:
        await self._call(lambda: self._files.put_file(file, self._url(path)))

    async def list(self, prefix: str) -> AsyncIterator[list[ListedObject]]:
        top = self._url(prefix)
        found = await self._call(lambda: self._files.find(top, detail=True))
        inside = self._files._strip_protocol(self._root).strip("/")
        page = []
        for path, info in found.items():
            relative = path.strip("/").removeprefix(inside).strip("/")
            page.append(_found(relative, info))
            if len(page) == PAGE:
                yield page
                page = []
        if page:
            yield page

    async def _call(self, function: Any) -> Any:
        try:
            async with self._limit:
                return await asyncio.to_thread(function)
        except FileNotFoundError as error:
            raise ObjectFailure(
                FetchFailure("missing", "it does not exist"), again=False
            ) from error
        except PermissionError as error:
            raise ObjectFailure(FetchFailure("denied", _short(error)), again=False) from error
        except Exception as error:
            raise ObjectFailure(FetchFailure("unreachable", _short(error)), again=True) from error


def _found(path: str, info: Any) -> ListedObject:
    version = info.get("ETag") or info.get("etag") or info.get("mtime") or ""
    return ListedObject(path, int(info.get("size") or 0), str(version))


def check_version(wanted: WantedObject, size: int, etag: str) -> None:
    """Refuse an object that is not the one that was listed."""
    resized = wanted.size != UNKNOWN and size != wanted.size
    if resized or (wanted.etag and etag and etag != wanted.etag):
        found = f"{size} bytes, version {etag or 'unknown'}"
        listed = f"{wanted.size} bytes, version {wanted.etag or 'unknown'}"
        text = f"it was changed: it has {found}; when it was listed it had {listed}"
        raise ObjectFailure(FetchFailure("changed", text), again=False)


def check_length(wanted: WantedObject, length: int, size: int) -> None:
    """Refuse an answer that was cut short."""
    expected = size if wanted.start == UNKNOWN else wanted.end - wanted.start
    if expected not in (UNKNOWN, length):
        text = f"the answer has {length} bytes instead of {expected}"
        raise ObjectFailure(FetchFailure("unreachable", text), again=True)


def _short(error: BaseException) -> str:
    """The first line of an error that says something: obstore adds a dump of its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:500]
