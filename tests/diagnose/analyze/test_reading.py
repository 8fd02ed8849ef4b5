"""The speed of storage, estimated from readers that wait and from readers that are busy."""

from __future__ import annotations

from itertools import cycle

import pytest

from penstock.diagnose.analyze.phase_timer import PhaseTimer
from penstock.diagnose.analyze.reading import MOST_FASTER, ReadSpeed, storage_speed, time_reads
from penstock.diagnose.analyze.report import Phase, Rate

PHASE = Phase("storage", Rate(100.0, 90.0, 110.0), 64, 0.64)


def reads(rate: float, share: float) -> ReadSpeed:
    """Readers of ``rate`` bytes per second that use ``share`` of a core."""
    return ReadSpeed(PHASE, rate, share / rate)


def test_readers_that_wait_show_the_speed_storage_speed() -> None:
    # A single reader seems to get more: storage reads ahead while the reader is busy.
    assert storage_speed(reads(30e6, 0.1), 33e6) == 30e6


def test_with_busy_readers_a_single_reader_shows_the_speed_storage_speed() -> None:
    assert storage_speed(reads(300e6, 1.1), 900e6) == 900e6


def test_the_speed_is_at_least_that_of_many_readers() -> None:
    assert storage_speed(reads(300e6, 1.1), 100e6) == 300e6


def test_the_speed_is_limited_if_readers_never_wait() -> None:
    assert storage_speed(reads(300e6, 1.0), 1e15) == MOST_FASTER * 300e6


def test_samples_bytes_and_cpu_time_are_counted_separately() -> None:
    # Every read returns 200 bytes, two samples of 100, in 10 ms, 4 ms of them CPU time.
    now = iter(range(10_000))
    cpu = cycle([0.0, 0.4])
    timer = PhaseTimer("storage", 1, 2, 1.0, min_steps=64)
    found = time_reads(cycle([200]), timer, 100.0, lambda: next(now) / 100, lambda: next(cpu))
    assert found.bytes_per_second == pytest.approx(20_000.0)
    assert found.phase.rate.value == pytest.approx(200.0)
    assert found.cpu_per_byte == pytest.approx(0.4 / (200 * timer.seen))
