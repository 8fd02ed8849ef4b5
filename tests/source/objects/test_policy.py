"""When requests are repeated, and which objects are fetched next."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.source.objects.policy import (
    LONGEST,
    TRIES,
    Hedging,
    Window,
    pause_before,
)


@given(st.floats(0, 1, exclude_max=True))
def test_pauses_grow_and_end_within_the_limits(chance: float) -> None:
    elapsed, pauses = 0.0, list[float]()
    while (pause := pause_before(len(pauses) + 1, elapsed, chance)) is not None:
        pauses.append(pause)
        elapsed += pause
    assert 0 < len(pauses) < TRIES
    assert elapsed <= LONGEST
    assert pauses == sorted(pauses)


def test_a_store_that_is_slow_as_a_whole_is_not_asked_twice_for_everything() -> None:
    hedging = Hedging()
    for _ in range(1000):
        hedging.record(0.1)
    allowed = sum(hedging.may_repeat() for _ in range(1000))
    assert allowed == 50


def test_a_late_request_is_judged_by_recent_ones() -> None:
    hedging = Hedging()
    for _ in range(Hedging.RECENT):
        hedging.record(0.05)
    before = hedging.delay()
    for _ in range(Hedging.RECENT):
        hedging.record(0.5)
    assert (before, hedging.delay()) == (0.1, 1.0)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(50, 120),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_a_window_fetches_all_in_order_within_its_budget(
    sizes: list[int], budget: int, requests: int, random: object
) -> None:
    window = Window(budget, requests)
    window.expect(enumerate(sizes))
    started: list[int] = []
    flying: list[int] = []
    while len(started) < len(sizes) or flying:
        while (number := window.start()) is not None:
            started.append(number)
            flying.append(number)
        assert len(flying) <= requests
        assert window.bytes_held <= budget or len(flying) == 1
        taken = flying.pop(random.randrange(len(flying)))  # type: ignore[attr-defined]
        window.arrived(taken, now=0.0)
        window.taken(taken)
    assert started == list(range(len(sizes)))
    assert window.bytes_held == 0


def test_what_is_demanded_is_fetched_at_once_and_only_once() -> None:
    window = Window(budget=10, requests=1)
    window.expect([(1, 10), (2, 10)])
    assert window.start() == 1
    assert window.demand(2, 10)  # although there is no room
    assert not window.demand(2, 10)
    assert not window.demand(1, 10)
    window.taken(1)
    window.taken(2)
    assert window.start() is None
    assert window.bytes_held == 0


class Link:
    """A virtual link: each request begins to arrive after ``latency``, and all share ``rate``."""

    def __init__(self, latency: float, rate: float) -> None:
        self._latency, self._rate = latency, rate
        self.now = self._free = 0.0
        self._coming: deque[tuple[float, int]] = deque()
        self.waits: list[float] = []
        """Seconds of each request."""

    def run(self, window: Window, size: int, until: float) -> int:
        """Fetch what the window allows. Returns the bytes that have arrived by ``until``."""
        total = 0
        while True:
            while (number := window.start()) is not None:
                self._coming.append((self.now, number))
            asked, number = self._coming.popleft()
            self._free = max(asked + self._latency, self._free) + size / self._rate
            if self._free > until:
                return total
            self.now = self._free
            self.waits.append(self.now - asked)
            total += size
            window.arrived(number, self.now)
            window.taken(number)


def endless_window(size: int, *, requests: int = 10**6) -> Window:
    window = Window(budget=10**15, requests=requests, first=8_000_000)
    window.expect((number, size) for number in range(100_000))
    return window


@pytest.mark.parametrize("latency", [0.001, 0.02, 0.1])
@pytest.mark.parametrize("rate", [10e6, 100e6, 1e9])
@pytest.mark.parametrize("size", [100_000, 2_000_000])
def test_the_link_is_busy_and_requests_hardly_wait_for_each_other(
    latency: float, rate: float, size: int
) -> None:
    link, window = Link(latency, rate), endless_window(size)
    seconds = 25 * max(latency, 8_000_000 / rate)
    assert link.run(window, size, seconds) >= 0.7 * rate * seconds  # the start is slower
    # Not longer than twice what the latency needs, or than 8 MB take.
    alone = latency + size / rate
    least = max(alone, 8_000_000 / rate)
    assert sorted(link.waits)[len(link.waits) // 2] <= 2.5 * least
    assert max(link.waits) <= 5 * least


def test_a_loader_that_begins_has_few_bytes_on_their_way() -> None:
    link, window = Link(0.1, 1e9), endless_window(1_000_000)
    link.run(window, 1_000_000, until=5.0)
    assert window.bytes_held > 80_000_000
    window.restart()
    link.run(window, 1_000_000, until=5.2)
    assert window.bytes_held <= 16_000_000


def test_ranges_join_a_request_at_the_start_only_if_they_are_needed_now() -> None:
    window = Window(budget=1000, requests=10, first=100)
    window.expect((number, 60) for number in range(4))
    assert window.start() == 0
    assert not window.join(1, 60, 0)
    assert window.join(1, 60, 0, now=True)
    assert window.start() is None
    window.arrived(0, now=0.0)
    assert window.start() == 2
    assert not window.join(3, 60, 2)
    assert window.join(3, 40, 2)
