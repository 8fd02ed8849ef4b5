"""When requests are repeated, and which objects are fetched next."""

from __future__ import annotations

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
        window.arrived(taken)
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


def test_few_bytes_are_on_their_way_at_the_start_and_twice_as_many_each_round_trip() -> None:
    window = Window(budget=10_000, requests=1000, first=100)
    window.expect((number, 10) for number in range(500))
    rounds = []
    while flying := list(iter(window.start, None)):
        rounds.append(len(flying))
        if len(rounds) == 5:
            window.restart()  # another loader begins
        for number in flying:
            window.arrived(number)
            window.taken(number)
    assert rounds == [10, 20, 40, 80, 160, 170, 20]
    assert window.bytes_held == 0


def test_ranges_join_a_request_at_the_start_only_if_they_are_needed_now() -> None:
    window = Window(budget=1000, requests=10, first=100)
    window.expect((number, 60) for number in range(4))
    assert window.start() == 0
    assert not window.join(1, 60, 0)
    assert window.join(1, 60, 0, now=True)
    assert window.start() is None
    window.arrived(0)
    assert window.start() == 2
    assert window.join(3, 60, 2)
