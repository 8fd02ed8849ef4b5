"""A small object server that speaks enough of S3 to read and write, with latency and faults.

It serves the files of a folder as the objects of one bucket, and keeps objects that are put into
it. Only for loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000

PIECE = 256 << 10
"""Bytes of an answer that take their turn on a limited link at a time: others come in between."""


@dataclass
class Conditions:
    """How the server answers. May be changed while it runs.

    - ``latency``: seconds before each answer; ``slow_share`` of them take ``slow_latency`` instead.
    - ``bandwidth``: bytes a second for all connections together; 0: no limit.
    - ``fault``: called with the path of each GET and PUT; returns a fault or ``None``.
    """

    latency: float = 0.0
    slow_share: float = 0.0
    slow_latency: float = 0.0
    bandwidth: float = 0.0
    fault: Callable[[str], str | None] = field(default=lambda path: None)


FAULTS = ("error", "limit", "reset", "truncate", "stall")
"""500, 503, connection reset, body cut short, no answer."""


class ObjectServer:
    """Serves a folder as bucket ``bucket`` on a free port, from a thread of its own."""

    bucket = "bucket"

    def __init__(self, root: Path, conditions: Conditions | None = None, seed: int = 0) -> None:
        self.root = root
        self.conditions = conditions or Conditions()
        self.requests: list[str] = []
        self.port = 0
        self._random = random.Random(seed)
        self._free_at = 0.0
        self._listed: list[tuple[str, Path]] | None = None
        self._etags: dict[tuple[str, int, int, int], str] = {}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="object-server", daemon=True)

    def __enter__(self) -> ObjectServer:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage(self) -> dict[str, str]:
        """The settings with which a client reads from it."""
        return {
            "endpoint": self.endpoint,
            "region": "local",
            "access_key_id": "key",
            "secret_access_key": "secret",
        }

    def url(self, path: str = "") -> str:
        return f"s3://{self.bucket}/{path}".rstrip("/")

    def gets(self) -> list[str]:
        """The paths of the objects that were asked for."""
        return [line.partition(" ")[2] for line in list(self.requests) if line.startswith("GET /")]

    def warm(self) -> None:
        """Work out the versions of all objects now. Otherwise the first request for each does."""
        for file in self.root.rglob("*"):
            if file.is_file():
                self._etag(file)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        # asyncio complains of connections that are cancelled before they have begun.
        self._loop.set_exception_handler(lambda loop, about: None)
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                method, target, _ = first.split(" ")
                headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(method, target, headers, body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the server ends
        finally:
            writer.close()

    def file_of(self, key: str) -> Path:
        """The file with the content of an object."""
        return self.root / key

    def _etag(self, file: Path) -> str:
        """The version of an object, which is worked out once: shards are large."""
        stat = file.stat()
        key = (str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        found = self._etags.get(key)
        if found is None:
            found = self._etags[key] = etag(file.read_bytes())
        return found

    def _write(self, file: Path, content: bytes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.part")
        part.write_bytes(content)
        part.replace(file)

    async def _answer(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes,
        writer: asyncio.StreamWriter,
    ) -> bool:
        parts = urlsplit(target)
        path = unquote(parts.path).lstrip("/")
        query = parse_qs(parts.query)
        self.requests.append(f"{method} /{path}" if "list-type" not in query else f"LIST {path}")
        now = self.conditions
        slow = self._random.random() < now.slow_share
        if now.latency or slow:
            await asyncio.sleep(now.slow_latency if slow else now.latency)
        if "list-type" in query:
            return await self._send(writer, 200, self.listing(query).encode(), {})
        fault = now.fault(path) if method in ("GET", "PUT") else None
        if fault == "stall":
            await asyncio.sleep(3600)
        if fault == "reset":
            writer.transport.abort()
            return False
        if fault in ("error", "limit"):
            code = 500 if fault == "error" else 503
            return await self._send(writer, code, b"<Error><Code>Busy</Code></Error>", {})
        file = self.file_of(path.removeprefix(f"{self.bucket}/"))
        if method == "PUT":
            self._write(file, body)
            return await self._send(writer, 200, b"", {"ETag": self._etag(file)})
        try:
            stat = file.stat()
            tags = {"ETag": self._etag(file), "Last-Modified": _date(stat.st_mtime)}
        except OSError:
            return await self._send(writer, 404, b"<Error><Code>NoSuchKey</Code></Error>", {})
        status, first, last = 200, 0, stat.st_size - 1
        if "range" in headers:
            start, _, end = headers["range"].removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(end) if end else last, last)
            tags["Content-Range"] = f"bytes {first}-{last}/{stat.st_size}"
            status = 206
        if method == "HEAD":
            return await self._send(writer, 200, b"", tags, length=stat.st_size)
        with open(file, "rb") as opened:
            content = os.pread(opened.fileno(), last - first + 1, first)
        if fault == "truncate":
            await self._send(writer, status, content[: len(content) // 2], tags, len(content))
            writer.transport.close()
            return False
        return await self._send(writer, status, content, tags)

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        content: bytes,
        headers: dict[str, str],
        length: int | None = None,
    ) -> bool:
        lines = [f"HTTP/1.1 {status} .", f"Content-Length: {length or len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        bandwidth = self.conditions.bandwidth
        if not bandwidth or not content:
            writer.write(head + content)
            await writer.drain()
            return True
        writer.write(head)
        view = memoryview(content)
        for first in range(0, len(content), PIECE):
            # All connections share the link: each piece of an answer takes its turn.
            piece = view[first : first + PIECE]
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + len(piece) / bandwidth
            await asyncio.sleep(self._free_at - now)
            writer.write(piece)
            await writer.drain()
        return True

    def listing(self, query: dict[str, list[str]]) -> str:
        """A page of ListObjectsV2."""
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        if not after or self._listed is None:  # once for all pages
            self._listed = sorted(
                (str(file.relative_to(self.root)), file)
                for file in self.root.rglob("*")
                if file.is_file()
            )
        files = self._listed[bisect_right(self._listed, after, key=itemgetter(0)) :]
        found = [one for one in files if one[0].startswith(prefix)]
        page, rest = found[:PAGE], len(found) > PAGE
        rows = [(key, file.stat().st_size, self._etag(file)) for key, file in page]
        return self._page(rows, page[-1][0] if rest else "", quoted="encoding-type" in query)

    def _page(self, rows: list[tuple[str, int, str]], after: str, *, quoted: bool) -> str:
        """A page of keys, sizes and versions. ``after``: where the next page begins, if any."""
        contents = "".join(
            f"<Contents><Key>{escape(quote(key) if quoted else key)}</Key>"
            f"<Size>{size}</Size><ETag>{escape(tag)}</ETag>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size, tag in rows
        )
        more = f"<NextContinuationToken>{escape(after)}</NextContinuationToken>" if after else ""
        return (
            '<?xml version="1.0"?><ListBucketResult>'
            f"<Name>{self.bucket}</Name><IsTruncated>{str(bool(after)).lower()}</IsTruncated>"
            f"{more}{contents}</ListBucketResult>"
        )


def etag(content: bytes) -> str:
    """The version that S3 gives an object: the MD5 of its content."""
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def _date(seconds: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds")
    parser.add_argument("--slow-share", type=float, default=0.0)
    parser.add_argument("--slow-latency", type=float, default=0.0, help="seconds")
    parser.add_argument("--bandwidth", type=float, default=0.0, help="bytes a second")
    given = parser.parse_args()
    conditions = Conditions(given.latency, given.slow_share, given.slow_latency, given.bandwidth)
    with ObjectServer(given.root, conditions) as server:
        server.warm()
        print(server.endpoint, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
