"""``Pulse``: reports are due by the clock, and never take a noticeable share of training time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.watch.publish import EVERY, LARGEST_SHARE, LIVELY, Pulse


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def report(pulse: Pulse, time: Time, took: float) -> float:
    """Make a report that takes ``took`` seconds; returns the seconds until the next is due."""
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


def test_slower_reports_are_rarer_but_at_most_two_seconds_apart() -> None:
    assert abs(report(Pulse(time := Time()), time, 0.0005) - 1.0) < 1e-6
    assert abs(report(Pulse(time := Time()), time, 0.010) - LIVELY) < 1e-6


@given(st.floats(0, 100))
def test_reports_never_exceed_their_share_of_the_time(took: float) -> None:
    time = Time()
    assert took <= LARGEST_SHARE * report(Pulse(time), time, took) * 1.001


def test_a_stopped_pulse_is_never_due_again() -> None:
    time = Time()
    pulse = Pulse(time)
    pulse.stop()
    time.now = 1e12
    assert not pulse.due()
    assert pulse.stopped
