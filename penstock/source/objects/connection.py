"""The way to the fetcher: starts it, asks it for objects, starts it again if it died."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import penstock
from penstock.errors import PipelineError, SourceError, StoreError
from penstock.source.objects.protocol import (
    FRAME,
    FetchFailure,
    StorageOptions,
    WantedObject,
    decode,
    encode,
)

PATIENCE = 300.0
"""Seconds to wait for an answer. The fetcher gives up on an object after three minutes."""

STARTING = 60.0
"""Seconds that the fetcher may take to start, on a very busy machine."""

STARTS = 3
"""Times that the fetcher is started for one request before its death is reported."""

_ENDPOINTS = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ENDPOINT",
)
"""Variables that say where a store is."""

Answer = TypeVar("Answer")


class FetchStats(NamedTuple):
    """What the fetcher has done so far.

    ``retries``: requests after a failure. ``repeated``: second requests for objects that were late.
    ``bytes_held``: bytes that are on their way or were not taken yet.
    """

    requests: int
    retries: int
    repeated: int
    bytes: int
    bytes_held: int


class _Lost(Exception):
    """The connection ended: the fetcher has died."""


class _ThreadConnection:
    """The connection of one thread. It is closed when the thread ends."""

    def __init__(self, connection: socket.socket) -> None:
        self.pid = os.getpid()
        self.connection = connection
        # Not __del__: where this object is part of a reference cycle, the garbage collector may
        # finalize the socket first, which then warns that it was not closed.
        weakref.finalize(self, connection.close).atexit = False


class Fetcher:
    """Asks the fetcher for objects of one store. Safe to use from any thread, and after a fork.

    It is sent to worker processes by pickle, which then use the same fetcher.
    """

    def __init__(self, root: str, options: StorageOptions) -> None:
        self.root = root
        self._options = dict(options)
        self._name = _process_name()
        digest = hashlib.blake2b(repr(sorted(self._options.items())).encode(), digest_size=8)
        self._store = f"{root}#{digest.hexdigest()}"
        self._who = secrets.token_hex(8)
        self._mine = threading.local()
        # One connection for as long as this object lives: the fetcher stays while it is there.
        self._held: _ThreadConnection | None = None

    @property
    def place(self) -> str:
        """What tells this store from others of the same URL: settings that name an endpoint or an
        account, given or in variables of the environment. No secrets."""
        given = {name: os.environ[name] for name in _ENDPOINTS if name in os.environ}
        given |= {
            name: value
            for name, value in self._options.items()
            if any(word in name.lower() for word in ("endpoint", "account_name"))
        }
        return "\0".join([self.root, *(f"{name}={given[name]}" for name in sorted(given))])

    def __getstate__(self) -> dict[str, Any]:
        names = ("root", "_options", "_name", "_store", "_who")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._mine = threading.local()
        self._held = None

    def read(self, wanted: Sequence[WantedObject], *, partial: bool = False) -> list[Any]:
        """The contents of these objects as bytes-like objects, in order.

        Raises SourceError for one that cannot be had; with ``partial`` the list has a FetchFailure
        in its place.
        """
        rows = [list(one) for one in wanted]

        def receive(connection: socket.socket) -> list[Any]:
            contents: list[Any] = [None] * len(rows)
            _send(connection, ["get", self._store, rows])
            for _ in rows:
                header, payload = _receive(connection)
                if header[0] == "object":
                    contents[header[1]] = payload
                else:
                    contents[header[1]] = FetchFailure(header[2], header[3])
            return contents

        contents = self._ask(receive)
        if not partial:
            for one, content in zip(wanted, contents, strict=True):
                if isinstance(content, FetchFailure):
                    self._refuse(one.path, content)
        return contents

    def read_whole(self, path: str) -> bytes | None:
        """The content of a small object; ``None`` if it does not exist. Raises SourceError."""
        wanted = WantedObject(path)
        (found,) = self.read([wanted], partial=True)
        if isinstance(found, FetchFailure):
            if found.kind == "missing":
                return None
            self._refuse(path, found)
        content: bytes = found
        return content

    def upload(self, file: str, path: str) -> None:
        """Write a file of this machine to an object. Raises StoreError."""

        def send(connection: socket.socket) -> list[Any]:
            _send(connection, ["put", self._store, file, path])
            return _receive(connection)[0]

        header = self._ask(send)
        if header[0] == "failed":
            url = f"{self.root}/{path}"
            raise StoreError(
                f"{url} cannot be written: {header[3]}. Check the credentials of this environment "
                "and their permissions, and the network."
            )

    def expect(self, wanted: Iterable[WantedObject]) -> None:
        """Announce objects that will be read, in this order, after those announced before."""
        rows = [list(one) for one in wanted]
        self._ask(lambda connection: _send(connection, ["expect", self._store, rows, self._who]))

    def allow(self, nbytes: int) -> None:
        """Let the fetcher hold this number of bytes more than usual."""
        self._ask(lambda connection: _send(connection, ["allow", nbytes, self._who]))

    def forget(self) -> None:
        """What was announced by way of this object will not be read."""
        self._ask(lambda connection: _send(connection, ["forget", self._who]))

    def heads(self, paths: Sequence[str]) -> list[tuple[str, int, str]]:
        """Path, size and version of these objects."""
        return [one for page in self._pages(["head", self._store, list(paths)], 1) for one in page]

    def objects_below(self, prefix: str) -> Iterator[list[tuple[str, int, str]]]:
        """Path, size and version of all objects below a prefix, page by page."""
        return self._pages(["list", self._store, prefix], None)

    def stats(self) -> FetchStats:
        def receive(connection: socket.socket) -> FetchStats:
            _send(connection, ["stats"])
            return FetchStats(*_receive(connection)[0][1:])

        return self._ask(receive)

    def _pages(self, request: list[Any], count: int | None) -> Iterator[list[Any]]:
        for _ in range(STARTS):
            begun = False
            try:
                # A connection of its own: the caller may use this object between two pages.
                with closing(self._connected()) as connection:
                    _send(connection, request)
                    while count is None or count > 0:
                        header, _payload = _receive(connection)
                        if header[0] == "failed":
                            path = request[2] if request[0] == "list" else ""
                            self._refuse(path, FetchFailure(*header[2:]))
                        if header[0] != "page":
                            return
                        begun = True
                        yield [tuple(one) for one in header[1]]
                        count = None if count is None else count - 1
                return
            except (_Lost, ConnectionError):
                self._held = None
                if begun:
                    break
            except OSError as error:  # time out, or out of descriptors
                raise self._silent(error) from error
        raise SourceError(
            f"the process that lists {self.root} died. Look for its error message above, and "
            "try again."
        )

    def _ask(self, request: Callable[[socket.socket], Answer]) -> Answer:
        for _ in range(STARTS):
            try:
                return request(self._connection())
            except (_Lost, ConnectionError):
                self._mine.__dict__.clear()
                self._held = None
            except OSError as error:  # time out, or out of descriptors
                self._mine.__dict__.clear()
                raise self._silent(error) from error
        raise SourceError(
            f"the process that fetches from {self.root} died {STARTS} times. Look for its error "
            "message above. Memory may have run out: see dmesg."
        )

    def _silent(self, error: OSError) -> SourceError:
        return SourceError(
            f"the process that fetches from {self.root} does not answer: {error}. Check the "
            "network and the store; if descriptors have run out, raise their limit (ulimit -n)."
        )

    def _connection(self) -> socket.socket:
        """The connection of this thread."""
        link: _ThreadConnection | None = getattr(self._mine, "link", None)
        if link is None or link.pid != os.getpid():
            # After a fork the parent's connection must not be used: answers would be mixed up.
            link = self._mine.link = _ThreadConnection(self._connected())
        return link.connection

    def _connected(self) -> socket.socket:
        if self._held is None or self._held.pid != os.getpid():
            self._held = _ThreadConnection(_connect(self._name))
        connection = _connect(self._name)
        try:
            _send(connection, ["open", self._store, self._options])
            header, _ = _receive(connection)
            if header[0] == "failed":
                raise PipelineError(header[3])
        except BaseException:
            connection.close()
            raise
        return connection

    def _refuse(self, path: str, failure: FetchFailure) -> NoReturn:
        url = f"{self.root}/{path}" if path else self.root
        if failure.kind == "settings":
            raise PipelineError(failure.text)
        remedy = {
            "missing": "If it was removed after it was listed, put it back or list again.",
            "denied": "Check the credentials of this environment and their permissions; for a "
            'public bucket give storage={"skip_signature": "true"}.',
            "changed": "Make the pipeline again, so that the bucket is listed again.",
            "unreachable": "Check the network, the endpoint and the state of the store.",
        }[failure.kind]
        raise SourceError(f"{url} cannot be fetched: {failure.text}. {remedy}")


_names: dict[int, str] = {}


def _process_name() -> str:
    """The name of this process's fetcher. It has no place in the file system."""
    return _names.setdefault(os.getpid(), f"penstock-fetcher-{secrets.token_hex(16)}")


def _connect(name: str) -> socket.socket:
    """A connection to the fetcher with this name, which is started if it is not there."""
    process: subprocess.Popen[bytes] | None = None
    limit = time.monotonic() + STARTING
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{name}")
            # Not settimeout(), with which recv() could not wait for all bytes at once.
            limit_of_wait = struct.pack("ll", int(PATIENCE), 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit_of_wait)
            return connection
        except ConnectionRefusedError:
            connection.close()
        if process is None or (process.poll() == 0 and time.monotonic() < limit):
            # It has ended by itself: nobody had connected for a while, or another one was first.
            process = _start(name)
        elif process.poll() not in (None, 0) or time.monotonic() > limit:
            raise SourceError(
                "the process that fetches objects does not start (exit code "
                f"{process.poll()}). Look for its error message above."
            )
        time.sleep(0.02)


def _start(name: str) -> subprocess.Popen[bytes]:
    above = str(Path(penstock.__file__).parents[1])
    inherited = os.environ.get("PYTHONPATH")
    path = above if not inherited else f"{above}{os.pathsep}{inherited}"
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.source.objects.fetcher", name],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the training script
    )
    # It ends some time after its last user; without this it would then stay as a zombie.
    threading.Thread(target=process.wait, name="penstock-fetcher", daemon=True).start()
    return process


def _send(connection: socket.socket, header: list[Any]) -> None:
    connection.sendall(encode(header))


def _receive(connection: socket.socket) -> tuple[list[Any], bytes]:
    length, extra = FRAME.unpack(_exactly(connection, FRAME.size))
    header = decode(_exactly(connection, length))
    return header, _exactly(connection, extra) if extra else b""


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = connection.recv(count, socket.MSG_WAITALL)
    while len(content) < count:  # interrupted by a signal, or the end
        more = connection.recv(count - len(content), socket.MSG_WAITALL)
        if not more:
            raise _Lost
        content += more
    return content
