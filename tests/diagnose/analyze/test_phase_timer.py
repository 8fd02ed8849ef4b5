"""The timer ends a phase when its rate is exact, or when the time is up."""

from __future__ import annotations

import random

import pytest

from penstock.diagnose.analyze.phase_timer import PhaseTimer, rate_of


def stepped(timer: PhaseTimer, seconds: float, most: int = 1_000) -> PhaseTimer:
    now = 0.0
    while not timer.done and timer.seen < most:
        now += seconds
        timer.step(now)
    return timer


def test_equal_steps_are_exact_after_the_least_number_of_steps() -> None:
    timer = stepped(PhaseTimer("replay", 10, warm_up=3, seconds=60.0), 0.1)
    assert (timer.steps, timer.seen) == (16, 19)
    phase = timer.phase()
    assert phase.enough
    assert phase.rate.value == pytest.approx(100)
    assert phase.rate.low == pytest.approx(100)
    assert phase.seconds == pytest.approx(1.6)


def test_the_warm_up_is_not_counted() -> None:
    timer = PhaseTimer("cached", 1, warm_up=5, seconds=60.0)
    now = 0.0
    for number in range(40):
        now += 0.001 if number < 4 else 1.0  # these were queued already
        timer.step(now)
    assert timer.rate().value == pytest.approx(1.0)


def test_a_phase_ends_when_its_time_is_up() -> None:
    chance = random.Random(1)
    timer = PhaseTimer("cold", 1, warm_up=1, seconds=5.0)
    now = 0.0
    while not timer.done:
        now += chance.expovariate(10)
        timer.step(now)
    assert not timer.phase().enough
    assert 5.0 <= timer.phase().seconds < 6.0


def test_a_phase_has_two_steps_even_if_one_takes_longer_than_the_time() -> None:
    timer = stepped(PhaseTimer("cold", 1, warm_up=1, seconds=0.1), 1.0)
    assert timer.steps == 2


def test_the_interval_contains_the_true_rate_nearly_always() -> None:
    hits = 0
    for seed in range(200):
        chance = random.Random(seed)
        steps = [chance.gammavariate(4, 0.025) for _ in range(64)]
        rate = rate_of(steps, samples=1)
        hits += rate.low <= 10 <= rate.high
    assert 180 <= hits <= 200


def test_workers_that_finish_together_do_not_look_like_noise() -> None:
    # Four batches at once, then a pause: all periods are equal.
    steps = [0.0, 0.0, 0.0, 0.4] * 16
    assert rate_of(steps, 1, period=4).spread < 1e-9
    assert rate_of(steps, 1, period=1).value == pytest.approx(10)


def test_the_rate_of_no_steps_is_zero() -> None:
    assert rate_of([], 64).value == 0.0
    assert rate_of([0.5], 1).high == float("inf")
