"""The fetcher's decisions, with a store in memory and no waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from penstock.source.objects import fetcher
from penstock.source.objects.client import ListedObject, ObjectFailure
from penstock.source.objects.fetcher import Fetching
from penstock.source.objects.policy import TRIES, Hedging
from penstock.source.objects.protocol import FetchFailure, WantedObject

Answer = Callable[[str, int], Awaitable[bytes]]
"""The content of an object, by its path and the number of the request for it, from 1."""

BUSY = ObjectFailure(FetchFailure("unreachable", "503 busy"), again=True)
GONE = ObjectFailure(FetchFailure("missing", "it does not exist"), again=False)


class Memory:
    """A store in memory. Counts requests, and how many are on their way at once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: Counter[str] = Counter()
        self.order: list[str] = []
        self.flying = self.most = 0

    async def get(self, wanted: WantedObject, begins: Callable[[], None]) -> bytes:
        self.asked[wanted.path] += 1
        self.order.append(wanted.path)
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            return await self._answer(wanted.path, self.asked[wanted.path])
        finally:
            self.flying -= 1

    async def put(self, file: str, path: str) -> None:
        raise NotImplementedError

    async def head(self, path: str) -> ListedObject:
        raise NotImplementedError

    def list(self, prefix: str) -> AsyncIterator[list[ListedObject]]:
        raise NotImplementedError


async def at_once(path: str, request: int) -> bytes:
    await asyncio.sleep(0)
    return path.encode()


def fetching(store: Memory, **options: Any) -> Fetching:
    made = Fetching(lambda root, settings: store, sleep=lambda _: asyncio.sleep(0), **options)
    made.open("s3://bucket", {})
    return made


def wanted(count: int, size: int = 10) -> list[WantedObject]:
    return [WantedObject(str(number), size=size) for number in range(count)]


async def take_all(found: Fetching, objects: list[WantedObject]) -> list[bytes]:
    return [await found.get("s3://bucket", one) for one in objects]


def test_announced_objects_are_fetched_once_in_order_within_the_budget() -> None:
    store = Memory(at_once)
    found = fetching(store, budget=50, requests=4)
    objects = wanted(30)

    async def run() -> list[bytes]:
        found.expect("s3://bucket", objects)
        for _ in range(100):
            await asyncio.sleep(0)
        assert found.bytes_held == 50  # nobody has taken anything
        return await take_all(found, objects)

    assert asyncio.run(run()) == [str(number).encode() for number in range(30)]
    assert store.order == [str(number) for number in range(30)]
    assert store.most <= 4
    assert found.bytes_held == 0


def test_the_fetcher_starts_without_numpy_which_would_take_longest() -> None:
    code = "import sys, penstock.source.objects.fetcher; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_two_readers_of_one_object_share_a_request() -> None:
    store = Memory(at_once)
    found = fetching(store)

    async def run() -> list[Any]:
        one = wanted(1)[0]
        return await asyncio.gather(*(found.get("s3://bucket", one) for _ in range(3)))

    assert asyncio.run(run()) == [b"0"] * 3
    assert store.asked == {"0": 1}


def test_requests_are_made_again_until_the_store_answers() -> None:
    async def third_time(path: str, request: int) -> bytes:
        if request < 3:
            raise BUSY
        return path.encode()

    found = fetching(Memory(third_time))
    assert asyncio.run(take_all(found, wanted(2))) == [b"0", b"1"]
    assert found.retries == 4


def test_a_store_that_is_really_gone_is_given_up_with_the_number_of_requests() -> None:
    async def never(path: str, request: int) -> bytes:
        raise BUSY

    store = Memory(never)
    with pytest.raises(ObjectFailure, match=f"503 busy .{TRIES} requests"):
        asyncio.run(take_all(fetching(store), wanted(1)))
    assert store.asked == {"0": TRIES}


def test_what_does_not_exist_is_not_asked_for_again() -> None:
    async def gone(path: str, request: int) -> bytes:
        raise GONE

    store = Memory(gone)
    with pytest.raises(ObjectFailure, match="does not exist"):
        asyncio.run(take_all(fetching(store), wanted(1)))
    assert store.asked == {"0": 1}


def test_a_late_request_is_made_a_second_time_and_the_first_answer_counts() -> None:
    late = "late"

    async def first_never(path: str, request: int) -> bytes:
        if path == late and request == 1:
            await asyncio.Event().wait()
        return path.encode()

    store = Memory(first_never)
    found = fetching(store)

    async def run() -> bytes:
        for one in wanted(2 * Hedging.FEWEST):
            await found.get("s3://bucket", one)
        return bytes(await found.get("s3://bucket", WantedObject(late)))

    assert asyncio.run(run()) == b"late"
    assert store.asked[late] == 2
    assert found.repeated >= 1  # a busy machine may make others late too
    assert store.flying == 0  # the first request was cancelled


def test_the_first_requests_are_made_again_too_when_it_is_known_what_late_is() -> None:
    async def first_never(path: str, request: int) -> bytes:
        if path == "0" and request == 1:
            await asyncio.Event().wait()
        return path.encode()

    store = Memory(first_never)
    found = fetching(store)

    async def run() -> list[bytes]:
        objects = wanted(2 * Hedging.FEWEST)  # all are on their way before any was answered
        return list(await asyncio.gather(*found.get_all("s3://bucket", objects)))

    assert asyncio.run(run()) == [str(n).encode() for n in range(2 * Hedging.FEWEST)]
    assert store.asked["0"] == 2
    assert found.retries == 0


def test_a_late_answer_is_noticed_while_all_others_take_long_to_arrive() -> None:
    """They share a link: each begins at once, and arrives when all do."""
    loaded = asyncio.Event()

    class Shared(Memory):
        async def get(self, wanted: WantedObject, begins: Callable[[], None]) -> bytes:
            self.asked[wanted.path] += 1
            if wanted.path == "late" and self.asked[wanted.path] == 1:
                await asyncio.Event().wait()
            begins()
            if wanted.path == "late":
                loaded.set()
            await loaded.wait()
            return wanted.path.encode()

    store = Shared(at_once)
    found = fetching(store)
    before = [WantedObject(str(number)) for number in range(2 * Hedging.FEWEST)]

    async def run() -> list[bytes]:
        hedging, _ = found.hedging("s3://bucket")
        for _ in range(Hedging.FEWEST - 1):  # so that one may be made a second time
            hedging.record(0.0)
        objects = [*before, WantedObject("late")]
        return list(await asyncio.gather(*found.get_all("s3://bucket", objects)))

    assert asyncio.run(run())[-1] == b"late"
    assert store.asked["late"] == 2


def test_both_requests_may_be_answered_at_one_moment() -> None:
    complaints: list[Any] = []

    async def run() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about))
        both = asyncio.Event()

        async def answered(path: str, request: int) -> bytes:
            if path == "late":
                if request == 2:
                    asyncio.get_running_loop().call_soon(both.set)
                await both.wait()
            return path.encode()

        found = fetching(Memory(answered))
        for one in wanted(2 * Hedging.FEWEST):
            await found.get("s3://bucket", one)
        content = await found.get("s3://bucket", WantedObject("late"))
        await asyncio.sleep(0)
        return bytes(content)

    assert asyncio.run(run()) == b"late"
    assert complaints == []


def test_a_request_that_is_never_answered_is_given_up_and_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def first_never(path: str, request: int) -> bytes:
        if request == 1:
            await asyncio.Event().wait()
        return path.encode()

    monkeypatch.setattr(fetcher, "LATEST", 0.01)
    store = Memory(first_never)
    found = fetching(store)
    assert asyncio.run(take_all(found, wanted(1))) == [b"0"]
    assert found.retries >= 1
    assert store.flying == 0  # the first request was cancelled


def test_an_unexpected_error_reaches_the_reader() -> None:
    async def broken(path: str, request: int) -> bytes:
        raise KeyError("etag")

    with pytest.raises(ObjectFailure, match="KeyError: 'etag'"):
        asyncio.run(take_all(fetching(Memory(broken)), wanted(1)))


def test_a_fetcher_that_ends_with_requests_on_their_way_reports_no_errors() -> None:
    async def never(path: str, request: int) -> bytes:
        await asyncio.Event().wait()
        return b""

    found = fetching(Memory(never))
    errors: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: errors.append(about))
        found.expect("s3://bucket", wanted(3))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert errors == []


def test_what_is_not_needed_any_more_is_dropped() -> None:
    store = Memory(at_once)
    found = fetching(store, budget=1000, requests=100)

    async def run() -> None:
        found.expect("s3://bucket", wanted(20))
        for _ in range(100):
            await asyncio.sleep(0)
        assert found.bytes_held == 200
        found.forget()
        assert found.bytes_held == 0
        assert await found.get("s3://bucket", wanted(1)[0]) == b"0"

    asyncio.run(run())
    assert store.asked["0"] == 2


def test_what_one_loader_has_announced_another_one_does_not_drop() -> None:
    found = fetching(Memory(at_once), budget=1000, requests=100)

    async def run() -> None:
        found.expect("s3://bucket", wanted(20), "train")
        for _ in range(100):
            await asyncio.sleep(0)
        found.forget("valid")
        assert found.bytes_held == 200
        found.forget("train")
        assert found.bytes_held == 0

    asyncio.run(run())


def test_a_loader_goes_on_fetching_ahead_after_another_one_took_its_room() -> None:
    store = Memory(at_once)
    found = fetching(store, budget=1000, requests=8)
    train, valid = wanted(600), [WantedObject(f"valid {n}", size=10) for n in range(50)]

    async def settled() -> None:
        while store.flying:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)

    async def read(objects: list[WantedObject]) -> None:
        for first in range(0, len(objects), 10):
            await asyncio.gather(*found.get_all("s3://bucket", objects[first : first + 10]))
            await settled()

    async def run() -> None:
        found.expect("s3://bucket", train, "train")
        await read(train[:100])
        found.expect("s3://bucket", valid, "valid")
        await read(valid)
        await read(train[100:])

    asyncio.run(run())
    # What was dropped for the other loader is fetched again, and nothing else.
    assert sum(store.asked.values()) <= len(train) + 2 * len(valid)
    assert found.bytes_held == 0


def test_what_waits_for_room_is_forgotten_too() -> None:
    store = Memory(at_once)
    found = fetching(store, budget=50, requests=100)

    async def run() -> None:
        found.expect("s3://bucket", wanted(20), "train")
        for _ in range(100):
            await asyncio.sleep(0)
        found.forget("train")
        for _ in range(100):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert found.bytes_held == 0
    assert len(store.asked) == 5


def test_a_store_is_known_by_its_settings_too() -> None:
    asked: list[tuple[str, str]] = []
    stores = {"a": Memory(at_once), "b": Memory(at_once)}

    def client(root: str, options: Any) -> Memory:
        asked.append((root, options["endpoint"]))
        return stores[options["endpoint"]]

    found = Fetching(client)
    for name in ("a", "b", "a"):
        found.open(f"s3://bucket#{name}", {"endpoint": name})
    asyncio.run(found.get("s3://bucket#a", wanted(1)[0]))
    assert asked == [("s3://bucket", "a"), ("s3://bucket", "b")]
    assert (stores["a"].asked, stores["b"].asked) == ({"0": 1}, {})
