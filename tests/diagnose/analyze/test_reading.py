"""What readers show of storage, and what they show of themselves."""

from __future__ import annotations

from itertools import cycle

import pytest

from penstock.diagnose.analyze.course import Course
from penstock.diagnose.analyze.reading import MOST_FASTER, Reads, of_storage, timed
from penstock.diagnose.analyze.report import Phase, Rate

PHASE = Phase("storage", Rate(100.0, 90.0, 110.0), 64, 0.64)


def reads(rate: float, share: float) -> Reads:
    """Readers who bring so many bytes a second, and need this part of a core for it."""
    return Reads(PHASE, rate, share / rate)


def test_readers_who_wait_show_what_storage_gives() -> None:
    # One alone got more while it waited: storage went on while it was busy with what it had.
    assert of_storage(reads(30e6, 0.1), 33e6) == 30e6


def test_busy_readers_show_themselves_and_one_who_waits_shows_storage() -> None:
    assert of_storage(reads(300e6, 1.1), 900e6) == 900e6


def test_many_readers_get_no_less_than_was_seen() -> None:
    assert of_storage(reads(300e6, 1.1), 100e6) == 300e6


def test_where_nothing_is_waited_for_storage_is_fast_but_not_without_end() -> None:
    assert of_storage(reads(300e6, 1.0), 1e15) == MOST_FASTER * 300e6


def test_samples_bytes_and_cpu_are_counted_apart() -> None:
    # Every read brings 200 bytes, two samples of 100, in 10 ms of which 4 are worked.
    now = iter(range(10_000))
    worked = cycle([0.0, 0.4])
    course = Course("storage", 1, 2, 1.0, least=64)
    found = timed(cycle([200]), course, 100.0, lambda: next(now) / 100, lambda: next(worked))
    assert found.rate == pytest.approx(20_000.0)
    assert found.phase.rate.value == pytest.approx(200.0)
    assert found.worked == pytest.approx(0.4 / (200 * course.seen))
