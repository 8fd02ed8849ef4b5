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
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

from penstock.source.objects.client import ObjectClient, ObjectFailure, connect
from penstock.source.objects.policy import Hedging, Neighbours, Window, pause_before
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

GAP, LONGEST = 16 << 10, 2 << 20
"""Ranges of one object with at most ``GAP`` bytes between them become one request of at most
``LONGEST`` bytes. At 1 GB/s the gap takes 16 us, and a request 2 ms: little beside any latency."""

GUESS = 128 << 10
"""Bytes of an object of unknown size, until some were fetched."""

UNMEASURED = 0.1
"""Seconds between two looks at a request while too few were measured to know when one is late."""

LATEST = 60.0
"""Seconds after which a request that was not answered counts as failed."""

ObjectKey = tuple[str, WantedObject]
"""A store and an object of it."""


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
        self.sleep = sleep
        self.clock = clock
        self._clients: dict[str, ObjectClient] = {}
        self._budget = budget
        self._window = Window(budget, requests)
        self._ranges = Neighbours(GAP, LONGEST)
        self._hedging: dict[str, tuple[Hedging, Hedging]] = {}
        """By store: when whole answers are late, and when their beginnings are."""
        self._numbers: dict[ObjectKey, int] = {}
        self._keys: dict[int, ObjectKey] = {}
        self._contents: dict[int, asyncio.Future[Any]] = {}
        self._requests: dict[int, asyncio.Future[Any]] = {}
        """The request of each object that is on its way. Several ranges may share one."""
        self._announced: dict[int, str] = {}
        """Who has announced each object, and nobody has taken it yet."""
        self._more: dict[str, int] = {}
        self._readers: Counter[int] = Counter()
        """How many wait for each object."""
        self._next = 0
        self._mean = float(GUESS)
        self.requests = 0
        self.retries = 0
        self.bytes = 0

    def open(self, store: str, options: StorageOptions) -> None:
        """Make the client of a store, which is known by this name from now on.

        The name begins with the URL of the store. Stores of one URL with other settings, such as
        buckets of one name at two endpoints, have ``#`` and a text of their own after it.
        """
        if store not in self._clients:
            self._clients[store] = self._make(store.partition("#")[0], options)
            self._hedging[store] = (Hedging(), Hedging())

    def client(self, store: str) -> ObjectClient:
        """The client of a store that was opened."""
        return self._clients[store]

    @property
    def repeated(self) -> int:
        """Requests that were late and made a second time."""
        return sum(whole.repeated for whole, _ in self._hedging.values())

    @property
    def bytes_held(self) -> int:
        return self._window.bytes_held

    def expect(self, store: str, wanted: list[WantedObject], who: str = "") -> None:
        """These objects will be needed, in this order. ``who`` says so."""
        numbers = [self._number((store, one)) for one in wanted]
        for number in numbers:
            self._announced.setdefault(number, who)
        self._window.expect(zip(numbers, map(self._size, wanted), strict=True))
        self._fill()

    def allow(self, more: int, who: str = "") -> None:
        """Hold this number of bytes more than usual: a window of samples stays for long."""
        self._more[who] = more
        self._window.allow(self._budget + max(self._more.values()))
        self._fill()

    def forget(self, who: str = "") -> None:
        """What ``who`` has announced is not needed any more, except where somebody waits for it."""
        for number in [one for one, by in self._announced.items() if by == who]:
            if number not in self._readers:
                self._drop(number)
        self._window.restart()
        self._fill()

    def _drop(self, number: int) -> None:
        content, request = self._contents.pop(number, None), self._requests.get(number)
        if content is not None:
            content.cancel()
        self._end(number)
        if request is not None and request not in self._requests.values():
            request.cancel()

    async def get(self, store: str, wanted: WantedObject) -> Any:
        """An object, fetched ahead or now. Raises ObjectFailure."""
        return await self.get_all(store, [wanted])[0]

    def get_all(self, store: str, wanted: Sequence[WantedObject]) -> list[asyncio.Future[Any]]:
        """Objects, fetched ahead or now. Ranges of one object side by side are fetched together."""
        numbers = [self._number((store, one)) for one in wanted]
        needed = dict(zip(numbers, map(self._size, wanted), strict=True))
        late = any(map(self._window.waits, needed))
        for number, size in needed.items():
            if self._window.demand(number, size):
                self._begin(self._with_neighbours(number, needed))
        if late:
            self._make_room(needed)
        return [self._reader(number) for number in numbers]

    def _make_room(self, needed: Collection[int]) -> None:
        """Drop what seems not to be needed any more, for what is.

        That is so if an object is needed that still waits for room: all before it were fetched.
        Other objects that are needed now take room for a moment only. Where a loader had to make
        room for another one, dropping for each of these would drop what is needed next, for ever.
        """
        for number in self._window.surplus():
            content = self._contents.get(number)
            wanted = number in needed or number in self._readers
            if not wanted and content is not None and content.done():
                self._drop(number)

    def _reader(self, number: int) -> asyncio.Future[Any]:
        """A content for somebody who waits for it. It is dropped when it was handed over."""
        self._readers[number] += 1
        waiting = asyncio.shield(self._contents[number])

        def taken(done: asyncio.Future[Any]) -> None:
            if not done.cancelled():
                done.exception()  # else asyncio logs it, if the reader has gone meanwhile
            self._readers[number] -= 1
            if not self._readers[number]:
                del self._readers[number]
            self._contents.pop(number, None)
            self._end(number)
            self._fill()

        waiting.add_done_callback(taken)
        return waiting

    def _size(self, wanted: WantedObject) -> int:
        return int(self._mean) if wanted.length == UNKNOWN else wanted.length

    def _number(self, key: ObjectKey) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._next
            self._keys[number] = key
            self._next += 1
            store, wanted = key
            if wanted.start != UNKNOWN:
                self._ranges.add(number, (store, wanted.path), wanted.start, wanted.end)
        return number

    def _end(self, number: int) -> None:
        self._window.taken(number)
        self._ranges.remove(number)
        self._requests.pop(number, None)
        self._announced.pop(number, None)
        key = self._keys.pop(number, None)
        if key is not None:
            self._numbers.pop(key, None)

    def _fill(self) -> None:
        while (number := self._window.start()) is not None:
            self._begin(self._with_neighbours(number, {}))

    def _with_neighbours(self, number: int, needed: dict[int, int]) -> list[int]:
        """An object, and the ranges beside it that are fetched with it."""
        together = [number]
        for other in self._ranges.beside(number):
            size = self._size(self._keys[other][1])
            if not self._window.join(other, size, number, now=other in needed):
                break
            together.append(other)
        for one in together:
            self._ranges.remove(one)
        return together

    def _begin(self, numbers: list[int]) -> None:
        """Make the request for these objects: one, or ranges of one object side by side."""
        store, wanted = self._keys[numbers[0]]
        ranges = [self._keys[number][1] for number in numbers]
        if len(numbers) > 1:
            start, end = min(one.start for one in ranges), max(one.end for one in ranges)
            wanted = wanted._replace(start=start, end=end)
        request = _Request(self, store, wanted).answer
        contents = [asyncio.get_running_loop().create_future() for _ in numbers]
        for number, content in zip(numbers, contents, strict=True):
            self._contents[number] = content
            self._requests[number] = request

        def arrived(done: asyncio.Future[Any]) -> None:
            for number in numbers:
                if self._requests.get(number) is done:
                    del self._requests[number]
            _hand_over(done, wanted, ranges, contents)
            self._window.arrived(numbers[0], self.clock())
            self._fill()

        request.add_done_callback(arrived)

    async def put(self, store: str, file: str, path: str) -> None:
        """Write a file of this machine to an object. Raises ObjectFailure."""
        started, attempt = self.clock(), 0
        while True:
            attempt += 1
            try:
                return await self._clients[store].put(file, path)
            except ObjectFailure as error:
                await self.sleep(self.pause(error, attempt, started))

    def pause(self, error: ObjectFailure, attempt: int, started: float) -> float:
        """Seconds to wait before a request is made again. Raises the failure if it is not."""
        if not error.again:
            raise error
        elapsed = self.clock() - started
        pause = pause_before(attempt, elapsed, random.random())
        if pause is None:
            kind, text = error.failure
            tried = f"{text} ({attempt} requests in {elapsed:.0f} s)"
            raise ObjectFailure(FetchFailure(kind, tried), again=False) from error
        self.retries += 1
        return pause

    def hedging(self, store: str) -> tuple[Hedging, Hedging]:
        return self._hedging[store]

    def received(self, content: Any) -> None:
        """Count the answer to a request."""
        self.bytes += len(content)
        self._mean += (len(content) - self._mean) / 64


class _Request:
    """A request for an object: made a second time if it is late, and again if it fails.

    ``answer`` has its content in the end. There is one task for each request to the store and no
    other: thousands of objects a second go through here.
    """

    def __init__(self, fetching: Fetching, store: str, wanted: WantedObject) -> None:
        self._loop = asyncio.get_running_loop()
        self._fetching, self._store, self._wanted = fetching, store, wanted
        self._hedging, self._beginnings = fetching.hedging(store)
        self._begun = False
        """An answer has begun. Many that share the link take long in all, but begin in time."""
        self._running: set[asyncio.Task[Any]] = set()
        """Requests to the store that were not answered yet, or the pause before the next one."""
        self._timer: asyncio.TimerHandle | None = None
        self._attempt = 0
        self._first = fetching.clock()
        self.answer: asyncio.Future[Any] = self._loop.create_future()
        self.answer.add_done_callback(self._ended)
        self._begin()

    def _begin(self) -> None:
        self._attempt += 1
        self._begun = False
        self._watch(0.0)
        self._ask()

    def _watch(self, waited: float) -> None:
        """Look again when the request is late. The first requests begin before that is known."""
        delay = None if self._begun else self._beginnings.delay()
        if delay is None:
            delay = self._hedging.delay()
        if delay is None:
            delay = waited + UNMEASURED
        if delay >= LATEST:
            self._timer = self._loop.call_later(LATEST - waited, self._expired)
        elif delay > waited:
            self._timer = self._loop.call_later(delay - waited, self._watch, delay)
        else:
            self._late(waited)

    def _ask(self) -> None:
        self._fetching.requests += 1
        asked = self._fetching.clock()
        begins = partial(self._begins, asked)
        task = self._loop.create_task(self._fetching.client(self._store).get(self._wanted, begins))
        self._running.add(task)
        task.add_done_callback(partial(self._answered, asked))

    def _begins(self, asked: float) -> None:
        self._begun = True
        self._beginnings.record(self._fetching.clock() - asked)

    def _late(self, waited: float) -> None:
        self._timer = self._loop.call_later(LATEST - waited, self._expired)
        answered = any(task.done() for task in self._running)
        if not answered and self._hedging.may_repeat():
            self._ask()

    def _expired(self) -> None:
        running, self._running = self._running, set()
        for task in running:
            task.cancel()
        failure = FetchFailure("unreachable", f"no answer within {LATEST:.0f} s")
        self._failed(ObjectFailure(failure, again=True))

    def _answered(self, asked: float, task: asyncio.Task[Any]) -> None:
        if task.cancelled():  # given up, or the fetcher ends
            return
        error = task.exception()
        if task not in self._running or self.answer.done():  # given up, or both at one moment
            return
        self._running.discard(task)
        if error is not None:
            if not self._running:  # the other one may still succeed
                self._failed(error)
            return
        self._hedging.record(self._fetching.clock() - asked)
        content = task.result()
        self._fetching.received(content)
        self.answer.set_result(content)

    def _failed(self, error: BaseException) -> None:
        self._stop_timer()
        if not isinstance(error, ObjectFailure):
            text = f"{type(error).__name__}: {error}"
            error = ObjectFailure(FetchFailure("unreachable", text), again=False)
        try:
            pause = self._fetching.pause(error, self._attempt, self._first)
        except ObjectFailure as final:
            self.answer.set_exception(final)
            return
        self._running.add(self._loop.create_task(self._again(pause)))

    async def _again(self, pause: float) -> None:
        await self._fetching.sleep(pause)
        self._running.clear()
        self._begin()

    def _ended(self, answer: asyncio.Future[Any]) -> None:
        """The answer is there, or nobody needs it any more."""
        self._stop_timer()
        running, self._running = self._running, set()
        for task in running:
            task.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _hand_over(
    request: asyncio.Future[Any],
    wanted: WantedObject,
    ranges: list[WantedObject],
    contents: list[asyncio.Future[Any]],
) -> None:
    """Divide the answer to a request between the ranges that it is for."""
    error = None if request.cancelled() else request.exception()
    for one, content in zip(ranges, contents, strict=True):
        if content.done():  # nobody needs it any more
            continue
        if request.cancelled():
            content.cancel()
        elif error is not None:
            content.set_exception(error)
            # asyncio logs the failure unless somebody has looked at it. An object that is fetched
            # ahead may never be asked for.
            content.exception()
        elif len(ranges) == 1:
            content.set_result(request.result())
        else:
            # A copy: a view would keep the whole answer in memory until its last range is taken.
            view = memoryview(request.result())
            first = one.start - wanted.start
            content.set_result(bytes(view[first : first + one.length]))


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
                store, rows, who = arguments
                self._fetching.expect(store, [WantedObject(*row) for row in rows], who)
            elif kind == "forget":
                self._fetching.forget(*arguments)
            elif kind == "allow":
                self._fetching.allow(*arguments)
            elif kind == "get":
                store, rows = arguments
                await self._send_objects(store, rows, send)
            elif kind == "head":
                store, paths = arguments
                await self._send_heads(store, paths, send)
            elif kind == "list":
                store, prefix = arguments
                async for page in self._fetching.client(store).list(prefix):
                    await send(["page", [list(one) for one in page]])
                await send(["end"])
            elif kind == "put":
                store, file, path = arguments
                await self._fetching.put(store, file, path)
                await send(["written"])
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

    async def _send_objects(self, store: str, rows: list[Any], send: Any) -> None:
        """The objects as they arrive, each with its number in the request."""

        found = self._fetching.get_all(store, [WantedObject(*row) for row in rows])
        arrived: asyncio.Queue[tuple[int, asyncio.Future[Any]]] = asyncio.Queue()
        for number, fetched in enumerate(found):
            fetched.add_done_callback(partial(_put, arrived, number))
        try:
            for _ in found:
                number, fetched = await arrived.get()
                try:
                    content = fetched.result()
                except ObjectFailure as error:
                    await send(["failed", number, *error.failure])
                else:
                    await send(["object", number], content)
        finally:
            for fetched in found:
                fetched.cancel()

    async def _send_heads(self, store: str, paths: list[str], send: Any) -> None:
        client, limit = self._fetching.client(store), asyncio.Semaphore(REQUESTS)

        async def one(path: str) -> list[Any]:
            async with limit:
                try:
                    return list(await client.head(path))
                except ObjectFailure as error:
                    kind, text = error.failure
                    named = FetchFailure(kind, f"{path}: {text}")
                    raise ObjectFailure(named, again=error.again) from error

        await send(["page", await asyncio.gather(*map(one, paths))])


def _put(
    arrived: asyncio.Queue[tuple[int, asyncio.Future[Any]]],
    number: int,
    fetched: asyncio.Future[Any],
) -> None:
    if not fetched.cancelled():
        arrived.put_nowait((number, fetched))


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
