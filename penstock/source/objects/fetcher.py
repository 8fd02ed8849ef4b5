"""The fetcher: a process that fetches objects ahead of the need for them, from few threads.

``python -m penstock.source.objects.fetcher NAME`` listens on the abstract Unix socket NAME, for
processes of its own user. It ends when nobody has been connected for ``LINGER`` seconds.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.source.objects.client import ObjectClient, ObjectFailure, connect
from penstock.source.objects.policy import Hedging, Window, pause_before
from penstock.source.objects.protocol import (
    FRAME,
    LONGEST_HEADER,
    UNKNOWN,
    FetchFailure,
    StorageOptions,
    WantedObject,
    decode,
    encode,
)

LINGER = 0.6
"""Seconds without a connection after which the fetcher ends."""

BUDGET = 256 << 20
"""Bytes that are fetched ahead. At 1 GB/s they are a quarter of a second: more than the latency of
an object store."""

REQUESTS = 384
"""Requests on their way at once: 3,800 objects a second with a latency of 100 ms."""

GUESS = 128 << 10
"""Bytes of an object of unknown size, until some were fetched."""

LATEST = 60.0
"""Seconds after which a request that was not answered counts as failed."""

ObjectKey = tuple[str, WantedObject]


class Fetching:
    """Fetches objects of several stores, each once, for whoever asks first.

    ``clients`` makes the client of a store. ``sleep`` waits before a request is made again.
    """

    def __init__(
        self,
        clients: Callable[[str, StorageOptions], ObjectClient] = connect,
        *,
        budget: int = BUDGET,
        requests: int = REQUESTS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._make = clients
        self._sleep = sleep
        self._clock = clock
        self._clients: dict[str, ObjectClient] = {}
        self._options: dict[str, StorageOptions] = {}
        self._window = Window(budget, requests)
        self._hedging: dict[str, Hedging] = {}
        self._numbers: dict[ObjectKey, int] = {}
        self._keys: dict[int, ObjectKey] = {}
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._next = 0
        self._mean = float(GUESS)
        self.requests = 0
        self.retries = 0
        self.bytes = 0

    def open(self, root: str, options: StorageOptions) -> None:
        """Use these settings for a store from now on."""
        if self._options.get(root) != options:
            self._clients[root] = self._make(root, options)
            self._options[root] = options
            self._hedging.setdefault(root, Hedging())

    def client(self, root: str) -> ObjectClient:
        """The client of a store that was opened."""
        return self._clients[root]

    @property
    def repeated(self) -> int:
        """Requests that were late and made a second time."""
        return sum(hedging.repeated for hedging in self._hedging.values())

    @property
    def bytes_held(self) -> int:
        return self._window.bytes_held

    def expect(self, root: str, wanted: list[WantedObject]) -> None:
        """These objects will be needed, in this order."""
        self._window.expect((self._number((root, one)), self._size(one)) for one in wanted)
        self._fill()

    def forget(self) -> None:
        """What was announced is not needed any more."""
        for number in self._window.forget():
            task = self._tasks.pop(number, None)
            if task is not None:
                task.cancel()
            self._end(number)

    async def get(self, root: str, wanted: WantedObject) -> Any:
        """An object, fetched ahead or now. Raises ObjectFailure."""
        number = self._number((root, wanted))
        if self._window.demand(number, self._size(wanted)):
            self._begin(number)
        task = self._tasks[number]
        try:
            return await asyncio.shield(task)
        finally:
            self._tasks.pop(number, None)
            self._end(number)
            self._fill()

    def _size(self, wanted: WantedObject) -> int:
        return int(self._mean) if wanted.length == UNKNOWN else wanted.length

    def _number(self, key: ObjectKey) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._next
            self._keys[number] = key
            self._next += 1
        return number

    def _end(self, number: int) -> None:
        self._window.taken(number)
        key = self._keys.pop(number, None)
        if key is not None:
            self._numbers.pop(key, None)

    def _fill(self) -> None:
        while (number := self._window.start()) is not None:
            self._begin(number)

    def _begin(self, number: int) -> None:
        root, wanted = self._keys[number]
        task = asyncio.ensure_future(self._fetch(root, wanted))
        self._tasks[number] = task

        def arrived(done: asyncio.Task[Any]) -> None:
            if not done.cancelled():
                # asyncio logs the failure of a task unless somebody has looked at it. An object
                # that is fetched ahead may never be asked for.
                done.exception()
            self._window.arrived(number)
            self._fill()

        task.add_done_callback(arrived)

    async def _fetch(self, root: str, wanted: WantedObject) -> Any:
        started, attempt = self._clock(), 0
        while True:
            attempt += 1
            try:
                content = await self._hedged(root, wanted)
                self.bytes += len(content)
                self._mean += (len(content) - self._mean) / 64
                return content
            except ObjectFailure as error:
                if not error.again:
                    raise
                pause = pause_before(attempt, self._clock() - started, random.random())
                if pause is None:
                    kind, text = error.failure
                    tried = f"{text} ({attempt} requests in {self._clock() - started:.0f} s)"
                    raise ObjectFailure(FetchFailure(kind, tried), again=False) from error
                self.retries += 1
                await self._sleep(pause)

    async def _hedged(self, root: str, wanted: WantedObject) -> Any:
        """One request, or two if the first is late. The first good answer counts."""
        hedging = self._hedging[root]
        first = asyncio.ensure_future(self._once(root, wanted))
        running = {first}
        try:
            await asyncio.wait(running, timeout=hedging.delay())
            if not first.done() and hedging.may_repeat():
                running = {first, asyncio.ensure_future(self._once(root, wanted))}
            failure: ObjectFailure | None = None
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        return task.result()
                    except ObjectFailure as error:
                        failure = error
            assert failure is not None
            raise failure
        finally:
            for task in running:
                task.cancel()

    async def _once(self, root: str, wanted: WantedObject) -> Any:
        self.requests += 1
        started = self._clock()
        try:
            content = await asyncio.wait_for(self._clients[root].get(wanted), LATEST)
        except asyncio.TimeoutError:
            failure = FetchFailure("unreachable", f"no answer within {LATEST:.0f} s")
            raise ObjectFailure(failure, again=True) from None
        self._hedging[root].record(self._clock() - started)
        return content


class Server:
    """Serves the processes of this user over a Unix socket."""

    def __init__(self, fetching: Fetching) -> None:
        self._fetching = fetching
        self._connections: set[asyncio.Task[None]] = set()
        self._last = time.monotonic()

    async def run(self, listener: socket.socket) -> None:
        """Serve until nobody has been connected for ``LINGER`` seconds."""
        server = await asyncio.start_unix_server(self._serve, sock=listener)
        async with server:
            while self._connections or time.monotonic() - self._last < LINGER:
                await asyncio.sleep(LINGER / 4)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        answers: set[asyncio.Task[None]] = set()
        writing = asyncio.Lock()
        try:
            if peer_user(writer.get_extra_info("socket")) != os.getuid():
                return
            while True:
                length, extra = FRAME.unpack(await reader.readexactly(FRAME.size))
                if length > LONGEST_HEADER or extra:
                    return
                header = decode(await reader.readexactly(length))
                answer = asyncio.ensure_future(self._answer(header, writer, writing))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return
        finally:
            for answer in answers:
                answer.cancel()
            writer.close()
            self._connections.discard(task)
            self._last = time.monotonic()

    async def _answer(
        self, header: list[Any], writer: asyncio.StreamWriter, writing: asyncio.Lock
    ) -> None:
        async def send(reply: list[Any], payload: Any = b"") -> None:
            async with writing:
                writer.write(encode(reply, len(payload)))
                if len(payload):
                    writer.write(memoryview(payload))
                await writer.drain()

        kind, *arguments = header
        try:
            if kind == "open":
                self._fetching.open(*arguments)
                await send(["opened"])
            elif kind == "expect":
                root, rows = arguments
                self._fetching.expect(root, [WantedObject(*row) for row in rows])
            elif kind == "forget":
                self._fetching.forget()
            elif kind == "get":
                root, rows = arguments
                await self._send_objects(root, rows, send)
            elif kind == "head":
                root, paths = arguments
                await self._send_heads(root, paths, send)
            elif kind == "list":
                root, prefix = arguments
                async for page in self._fetching.client(root).list(prefix):
                    await send(["page", [list(one) for one in page]])
                await send(["end"])
            elif kind == "stats":
                found = self._fetching
                await send(
                    ["stats", found.requests, found.retries, found.repeated, found.bytes,
                     found.bytes_held]
                )  # fmt: skip
        except ObjectFailure as error:
            await send(["failed", 0, *error.failure])
        except ConnectionError:
            writer.close()

    async def _send_objects(self, root: str, rows: list[Any], send: Any) -> None:
        """The objects as they arrive, each with its number in the request."""

        async def one(number: int, row: Any) -> None:
            try:
                content = await self._fetching.get(root, WantedObject(*row))
            except ObjectFailure as error:
                await send(["failed", number, *error.failure])
            else:
                await send(["object", number], content)

        await asyncio.gather(*(one(number, row) for number, row in enumerate(rows)))

    async def _send_heads(self, root: str, paths: list[str], send: Any) -> None:
        client, limit = self._fetching.client(root), asyncio.Semaphore(REQUESTS)

        async def one(path: str) -> list[Any]:
            async with limit:
                return list(await client.head(path))

        await send(["page", await asyncio.gather(*map(one, paths))])


def peer_user(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    layout = struct.Struct("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    return int(layout.unpack(found)[1])


def main(name: str) -> int:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return 0  # another process has started the fetcher at the same moment
    asyncio.run(Server(Fetching()).run(listener))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
