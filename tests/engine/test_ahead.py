"""``Ahead``: batches are converted in a background thread, in order, a little before their turn."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock.engine.ahead import Ahead, _Conversion
from penstock.engine.feed import Ready
from penstock.order.plan import BatchKeys
from penstock.stats import Meter

METER = Meter((), 0, clock=lambda: 0.0)


def batch(number: int, value: Any = None) -> Ready:
    keys = BatchKeys(0, number, np.zeros(1, np.int64), None)
    return Ready(keys, number if value is None else value, 1, 8)


class Feed:
    """A feed of prepared answers. ``taken``: how many were taken."""

    def __init__(self, *answers: Ready | Exception | None) -> None:
        self._answers = answers
        self.taken = 0

    def take(self) -> Ready | None:
        self.taken += 1
        answer = self._answers[self.taken - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ready(self) -> bool:
        return self.taken < len(self._answers)


class Converting:
    """Work that is done at once."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def convert(self, value: Any, keys: BatchKeys) -> Any:
        return self._convert(value)

    def close(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def hand_out(self, converted: Any) -> Any:
        return converted


@pytest.fixture
def made() -> Iterator[Callable[..., Ahead]]:
    ends: list[Callable[[], None]] = []

    def make(convert: Callable[[Any], Any], depth: int = 2) -> Ahead:
        ahead = Ahead(lambda: Converting(convert), depth)
        ends.append(ahead.close)
        return ahead

    yield make
    for end in ends:
        end()


def value(ready: Ready | None) -> Any:
    return None if ready is None else ready.value


def test_batches_come_converted_and_in_order(made: Callable[..., Ahead]) -> None:
    feed, ahead = Feed(*map(batch, range(5)), None), made(lambda number: number * 10)
    found = [value(ahead.next(feed.take, feed.ready, None, METER)) for _ in range(6)]
    assert found == [0, 10, 20, 30, 40, None]
    assert feed.taken == 6


def test_two_batches_are_taken_ahead_and_no_more(made: Callable[..., Ahead]) -> None:
    feed, ahead = Feed(*map(batch, range(9))), made(str)
    ahead.next(feed.take, feed.ready, None, METER)
    assert (feed.taken, len(ahead)) == (3, 2)
    ahead.next(feed.take, feed.ready, None, METER)
    assert (feed.taken, len(ahead)) == (4, 2)


@pytest.mark.parametrize(
    ("most_ahead", "feeds", "taken"), [(None, None, 2), (0, 0, 0), (1, 1, 0), (2, 1, 1), (6, 4, 2)]
)
def test_batches_taken_ahead_count_among_those_that_may_be_dealt(
    most_ahead: int | None, feeds: int | None, taken: int, made: Callable[..., Ahead]
) -> None:
    feed, ahead = Feed(*map(batch, range(9))), made(str)
    assert ahead.leave_of(most_ahead) == feeds
    for number in range(3):
        assert value(ahead.next(feed.take, feed.ready, None, METER)) == str(number)
        assert (feed.taken, len(ahead)) == (number + 1 + taken, taken)


def test_a_batch_that_is_not_ready_is_not_waited_for(made: Callable[..., Ahead]) -> None:
    feed, ahead = Feed(*map(batch, range(9))), made(str)
    ahead.next(feed.take, lambda: feed.taken < 2, None, METER)
    assert (feed.taken, len(ahead)) == (2, 1)


def test_no_batch_of_the_next_epoch_is_taken(made: Callable[..., Ahead]) -> None:
    feed, ahead = Feed(*map(batch, range(9))), made(str)
    ahead.next(feed.take, feed.ready, 2, METER)
    assert (feed.taken, len(ahead)) == (2, 1)
    ahead.next(feed.take, feed.ready, 1, METER)
    assert (feed.taken, len(ahead)) == (2, 0)


def test_conversion_runs_in_one_other_thread(made: Callable[..., Ahead]) -> None:
    threads: list[threading.Thread] = []
    feed, ahead = (
        Feed(*map(batch, range(4))),
        made(lambda number: threads.append(threading.current_thread())),
    )
    for _ in range(4):
        ahead.next(feed.take, feed.ready, None, METER)
    assert len(threads) == 4
    assert len(set(threads)) == 1
    assert threading.current_thread() not in threads
    ahead.close()
    assert not threads[0].is_alive()


def test_an_error_of_the_feed_is_raised_in_its_place(made: Callable[..., Ahead]) -> None:
    feed, ahead = Feed(batch(0), batch(1), ValueError("sample 7"), batch(3)), made(str)
    assert value(ahead.next(feed.take, feed.ready, None, METER)) == "0"
    assert value(ahead.next(feed.take, feed.ready, None, METER)) == "1"
    assert feed.taken == 3  # nothing is taken after an error
    with pytest.raises(ValueError, match="sample 7"):
        ahead.next(feed.take, feed.ready, None, METER)


def test_an_error_of_the_conversion_is_raised_for_its_batch(made: Callable[..., Ahead]) -> None:
    def convert(number: int) -> int:
        if number == 1:
            raise MemoryError("no pinned memory")
        return number

    feed, ahead = Feed(*map(batch, range(3))), made(convert)
    assert value(ahead.next(feed.take, feed.ready, None, METER)) == 0
    with pytest.raises(MemoryError, match="no pinned memory"):
        ahead.next(feed.take, feed.ready, None, METER)


def test_what_is_cleared_is_not_handed_out(made: Callable[..., Ahead]) -> None:
    feed, ahead = Feed(*map(batch, range(9))), made(str)
    ahead.next(feed.take, feed.ready, None, METER)
    ahead.clear()
    assert len(ahead) == 0
    assert value(ahead.next(feed.take, feed.ready, None, METER)) == "3"


def test_batches_without_rows_are_passed_on(made: Callable[..., Ahead]) -> None:
    ended = batch(1)._replace(value=None, rows=0, ended=True)
    feed, ahead = Feed(batch(0), ended, None), made(str)
    assert value(ahead.next(feed.take, feed.ready, None, METER)) == "0"
    assert ahead.next(feed.take, feed.ready, None, METER) == ended
    assert ahead.next(feed.take, feed.ready, None, METER) is None


def test_the_memory_of_a_batch_is_free_once_it_is_converted(made: Callable[..., Ahead]) -> None:
    source = np.zeros(3)
    gone = weakref.ref(source)
    feed, ahead = Feed(batch(0), batch(1, source)), made(np.copy)
    feed_answers = feed._answers
    ahead.next(feed.take, feed.ready, None, METER)
    feed._answers = feed_answers[:1]
    del source, feed_answers
    assert ahead._line.batches[0].value is not None
    ahead._line.batches[0].value.wait()
    # The thread drops its last reference a moment after it has set the result.
    ahead.close()
    gc.collect()
    assert gone() is None


def test_the_wait_for_the_background_thread_is_counted(made: Callable[..., Ahead]) -> None:
    times = iter([0.0, 2.5])
    meter = Meter((), 0, clock=lambda: next(times))
    feed, ahead = Feed(batch(0)), made(str)
    ahead.next(feed.take, feed.ready, None, meter)
    assert meter._sums.wait == 2.5


class ReadyFeed(Feed):
    """A feed that the background thread may ask. ``ready_up_to``: so many batches are ready."""

    def __init__(self, *answers: Ready | Exception | None) -> None:
        super().__init__(*answers)
        self.ready_up_to = len(answers)
        self.threads: set[threading.Thread] = set()

    def take_ready(self) -> Ready | None:
        if self.taken >= self.ready_up_to:
            return None
        self.threads.add(threading.current_thread())
        return self.take()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


def following(ahead: Ahead, feed: ReadyFeed, left: int | None = None) -> Any:
    """The next batch, taken as a loader takes it."""
    ready = ahead.take_ready(left)
    return value(ahead.next(feed.take, feed.ready, left, METER) if ready is None else ready)


def test_the_background_thread_takes_batches_that_are_ready(made: Callable[..., Ahead]) -> None:
    feed, ahead = ReadyFeed(*map(batch, range(6))), made(str)
    ahead.take_from(feed.take_ready)
    found = []
    for number in range(6):
        found.append(following(ahead, feed, 6 - number))
        wait_for(lambda number=number: feed.taken == min(6, number + 3))  # type: ignore[misc]
    assert found == list("012345")
    assert len(feed.threads) == 1
    assert threading.current_thread() not in feed.threads


def test_the_background_thread_takes_nothing_of_the_next_epoch(made: Callable[..., Ahead]) -> None:
    feed, ahead = ReadyFeed(*map(batch, range(9))), made(str)
    ahead.take_from(feed.take_ready)
    assert [following(ahead, feed, left) for left in (3, 2, 1)] == list("012")
    ahead.close()  # the thread has done all that it was told
    assert feed.taken == 3


def test_the_loop_waits_for_a_batch_that_is_not_ready(made: Callable[..., Ahead]) -> None:
    feed, ahead = ReadyFeed(*map(batch, range(5))), made(str)
    feed.ready_up_to = 0
    ahead.take_from(feed.take_ready)
    assert [following(ahead, feed) for _ in range(5)] == list("01234")
    assert feed.threads == set()


def test_an_error_in_the_background_is_raised_in_its_place(made: Callable[..., Ahead]) -> None:
    feed = ReadyFeed(batch(0), batch(1), OSError("too many files"), batch(3))
    ahead = made(str, depth=4)
    ahead.take_from(feed.take_ready)
    assert following(ahead, feed) == "0"
    wait_for(lambda: len(ahead) == 2)
    assert following(ahead, feed) == "1"
    with pytest.raises(OSError, match="too many files"):
        following(ahead, feed)
    assert feed.taken == 3  # nothing is taken after an error


def test_nothing_is_taken_after_an_error_that_the_loop_has_got(made: Callable[..., Ahead]) -> None:
    going, feed = threading.Event(), ReadyFeed(batch(0), batch(1), OSError("too many"), batch(3))

    def convert(number: int) -> str:
        assert number != 9 or going.wait(60)
        return str(number)

    ahead = made(convert, depth=4)
    ahead.take_from(feed.take_ready)
    assert following(ahead, feed) == "0"
    wait_for(lambda: len(ahead) == 2)
    # The background thread is held up before it looks for more batches.
    ahead._work.put(_Conversion(9, batch(9).batch_keys))
    assert following(ahead, feed) == "1"
    with pytest.raises(OSError, match="too many"):
        following(ahead, feed)
    going.set()
    last = _Conversion(10, batch(10).batch_keys)
    ahead._work.put(last)
    last.wait()  # the background thread has looked
    assert feed.taken == 3


def test_a_new_feed_gets_nothing_of_the_one_before(made: Callable[..., Ahead]) -> None:
    old, feed = ReadyFeed(*map(batch, range(9))), ReadyFeed(*map(batch, range(20, 29)))
    ahead = made(str)
    ahead.take_from(old.take_ready)
    assert following(ahead, old) == "0"
    ahead.take_from(None)
    taken = old.taken
    ahead.take_from(feed.take_ready)
    assert [following(ahead, feed) for _ in range(4)] == ["20", "21", "22", "23"]
    assert old.taken == taken
