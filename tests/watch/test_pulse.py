"""When a loader reports: by the clock, and never so often that training would feel it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.watch.pulse import EVERY, LIVELY, MOST, Pulse


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def report(pulse: Pulse, time: Time, took: float) -> float:
    """Make a report, and say how long it then is until the next."""
    pulse.begin()
    began = time.now
    time.now += took
    pulse.end()
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        time.now = began + middle
        low, high = (low, middle) if pulse.due() else (middle, high)
    return high


def test_the_first_report_is_due_at_once() -> None:
    assert Pulse(Time()).due()


def test_a_quick_report_is_made_every_half_second() -> None:
    time = Time()
    pulse = Pulse(time)
    pulse.begin()
    time.now += 0.0002
    pulse.end()
    time.now = 100.0 + EVERY - 0.001
    assert not pulse.due()
    time.now = 100.0 + EVERY
    assert pulse.due()


def test_slower_reports_are_rarer_but_a_view_remains_lively() -> None:
    assert abs(report(Pulse(time := Time()), time, 0.0005) - 1.0) < 1e-6
    assert abs(report(Pulse(time := Time()), time, 0.010) - LIVELY) < 1e-6


@given(st.floats(0, 100))
def test_reports_never_take_more_than_their_part(took: float) -> None:
    time = Time()
    assert took <= MOST * report(Pulse(time), time, took) * 1.001


def test_one_that_was_stopped_is_never_due_again() -> None:
    time = Time()
    pulse = Pulse(time)
    pulse.stop()
    time.now = 1e12
    assert not pulse.due()
    assert pulse.stopped
