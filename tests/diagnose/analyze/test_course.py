"""Phases end when they are exact, or when the time is up."""

from __future__ import annotations

import random

import pytest

from penstock.diagnose.analyze.course import Course, rate_of


def stepped(course: Course, seconds: float, most: int = 1_000) -> Course:
    now = 0.0
    while not course.over and course.seen < most:
        now += seconds
        course.step(now)
    return course


def test_even_steps_are_exact_as_soon_as_there_are_enough() -> None:
    course = stepped(Course("replay", 10, warm_up=3, seconds=60.0), 0.1)
    assert (course.steps, course.seen) == (16, 19)
    phase = course.phase()
    assert phase.enough
    assert phase.rate.value == pytest.approx(100)
    assert phase.rate.low == pytest.approx(100)
    assert phase.seconds == pytest.approx(1.6)


def test_what_comes_first_is_not_counted() -> None:
    course = Course("cached", 1, warm_up=5, seconds=60.0)
    now = 0.0
    for number in range(40):
        now += 0.001 if number < 4 else 1.0  # out of a queue that was full
        course.step(now)
    assert course.rate().value == pytest.approx(1.0)


def test_the_time_is_up_after_a_while() -> None:
    chance = random.Random(1)
    course = Course("cold", 1, warm_up=1, seconds=5.0)
    now = 0.0
    while not course.over:
        now += chance.expovariate(10)
        course.step(now)
    assert not course.phase().enough
    assert 5.0 <= course.phase().seconds < 6.0


def test_two_steps_are_made_even_where_each_takes_longer_than_there_is_time() -> None:
    course = stepped(Course("cold", 1, warm_up=1, seconds=0.1), 1.0)
    assert course.steps == 2


def test_the_interval_holds_what_is_true_nearly_always() -> None:
    hits = 0
    for seed in range(200):
        chance = random.Random(seed)
        steps = [chance.gammavariate(4, 0.025) for _ in range(64)]
        rate = rate_of(steps, samples=1)
        hits += rate.low <= 10 <= rate.high
    assert 180 <= hits <= 200


def test_workers_that_finish_together_do_not_look_like_noise() -> None:
    # Four batches at once, then a pause: over a period all is even.
    steps = [0.0, 0.0, 0.0, 0.4] * 16
    assert rate_of(steps, 1, period=4).spread < 1e-9
    assert rate_of(steps, 1, period=1).value == pytest.approx(10)


def test_nothing_measured_is_no_rate() -> None:
    assert rate_of([], 64).value == 0.0
    assert rate_of([0.5], 1).high == float("inf")
