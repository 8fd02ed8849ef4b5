"""Slow sources: the token bucket, the stopwatch and the simulated disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.harness.throttle import Bucket, Disk, OnDisk, Stopwatch, Throttled
from penstock.source import DatasetSource
from penstock.source.source import Source


class Clock:
    """A clock that advances only by ``sleep``."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_bucket_gives_its_rate_and_saves_no_more_than_its_burst() -> None:
    clock = Clock()
    bucket = Bucket(10.0, 5, clock, clock.sleep)
    for _ in range(20):
        bucket.take(1)
    assert clock.now == pytest.approx(102.0)
    clock.now += 50.0
    before = clock.now
    bucket.take(5)
    assert clock.now == before
    bucket.take(4)
    assert clock.now == pytest.approx(before + 0.4)


def test_a_bucket_gains_no_tokens_while_its_clock_is_stopped() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    bucket = Bucket(10.0, 100, watch, clock.sleep)
    clock.now += 1.0
    with watch.stopped():
        clock.now += 60.0
        assert watch() == pytest.approx(1.0)
    assert watch() == pytest.approx(1.0)
    bucket.take(10)
    assert watch() == pytest.approx(1.0)
    bucket.take(10)
    assert watch() == pytest.approx(2.0)


def test_every_sample_of_a_throttled_source_costs_a_token() -> None:
    clock = Clock()
    plain = DatasetSource(["a", "b", "c"])
    source = Throttled(plain, Bucket(2.0, 1, clock, clock.sleep))
    assert source.read([2, 0, 1, 1]) == ["c", "a", "b", "b"]
    assert clock.now == pytest.approx(102.0)
    assert (len(source), source.name(1)) == (3, plain.name(1))
    assert (source.identity(), source.fields()) == (plain.identity(), plain.fields())


class Bytes(Source):
    """Samples of 1,000 bytes."""

    def __len__(self) -> int:
        return 8

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [bytes(1_000) for _ in indices]


def test_a_disk_serves_one_reader_after_the_other() -> None:
    sleeps: list[float] = []
    disk = Disk(100_000, lambda: 100.0, sleeps.append)
    for _ in range(3):
        disk.serve(1_000)
    # The clock stands still: all three ask at once, and each waits for those before it.
    assert sleeps == pytest.approx([0.01, 0.02, 0.03])


def test_a_slow_disk_delays_every_sample_by_its_size() -> None:
    clock = Clock()
    source = OnDisk(Bytes(), Disk(100_000, clock, clock.sleep))
    assert [len(sample) for sample in source.read([0, 1, 5])] == [1_000] * 3
    assert clock.now == pytest.approx(100.03)
    assert source.name(3) == "sample 3"
