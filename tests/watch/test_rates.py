"""Rates between two snapshots, and the history of a loader."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.stats import CacheStats, PoolStats, StageStats
from penstock.watch.rates import between, rates
from penstock.watch.snapshot import from_json, to_json
from penstock.watch.view import KEPT, ChartPoint, History, LoaderHistory
from tests.support.snapshots import FULL, STATS, snapshot

LATER = replace(
    STATS,
    samples=1_400,
    batches=14,
    bytes_read=100_000,
    elapsed=12.0,
    wait=3.0,
    stages=(StageStats("source", 700, 3.2), StageStats("decode", 1_400, 9.6)),
    caches=(CacheStats(700, 700, 700, 35_000_000, 40_000_000, False),),
    pool=PoolStats("threads", 2, 13.0, 0.54, 0),
)


def test_rates_count_only_the_time_between_two_snapshots() -> None:
    found = between(STATS, LATER)
    assert found.seconds == 2.0
    assert found.samples_per_second == 200.0
    assert found.batches_per_second == 2.0
    assert found.bytes_read_per_second == 10_000.0
    assert found.stall == 0.25
    assert found.utilisation == 0.25
    assert found.hits == (0.75,)
    source, decode = found.stops
    assert (source.name, source.samples_per_second) == ("source", 50.0)
    assert abs((source.seconds_per_sample or 0) - 0.002) < 1e-9
    assert abs((decode.seconds_per_sample or 0) - 0.0015) < 1e-9
    assert abs(source.share - 0.25) < 1e-9
    assert abs(decode.share - 0.75) < 1e-9


def test_without_an_earlier_snapshot_rates_count_from_the_first_batch() -> None:
    found = between(None, STATS)
    assert (found.seconds, found.samples_per_second, found.stall) == (10.0, 100.0, 0.25)
    assert found.hits == (0.4,)


def test_a_wait_that_goes_on_counts_up_to_now() -> None:
    before = snapshot(written=1_000.0)
    after = snapshot(LATER, written=1_002.0, waiting=1_002.0)
    found = rates(before, after, now=1_004.0)
    assert found.seconds == 4.0
    assert found.stall == 2.5 / 4.0
    assert found.samples_per_second == 100.0


def test_a_stop_that_no_sample_passed_has_no_cost() -> None:
    found = between(STATS, replace(STATS, elapsed=11.0))
    assert [stop.seconds_per_sample for stop in found.stops] == [None, None]
    assert [stop.share for stop in found.stops] == [0.0, 0.0]
    assert found.hits == (None,)
    assert found.samples_per_second == 0.0


def test_a_loader_whose_counters_restarted_is_treated_as_new() -> None:
    assert between(LATER, STATS) == between(None, STATS)
    other = replace(LATER, stages=(StageStats("source", 1, 1.0),))
    assert between(STATS, other) == between(None, other)
    assert between(STATS, replace(LATER, caches=())).hits == ()


times = st.floats(0, 1e6)
counts = st.integers(0, 10**9)


@given(times, times, counts, counts, times)
def test_shares_lie_between_0_and_1_for_any_counts(
    elapsed: float, wait: float, hits: int, misses: int, still: float
) -> None:
    odd = replace(
        STATS, elapsed=elapsed, wait=wait, caches=(CacheStats(hits, misses, 0, 0, 0, False),)
    )
    for found in (between(None, odd, still), between(STATS, odd, still), between(odd, STATS)):
        assert 0 <= found.stall <= 1
        assert 0 <= found.utilisation <= 1
        assert found.samples_per_second >= 0
        assert all(share is None or 0 <= share <= 1 for share in found.hits)
        assert all(0 <= stop.share <= 1 for stop in found.stops)


# History.


def test_a_history_compares_the_last_two_different_snapshots() -> None:
    history = History()
    history.add([snapshot(written=1_000.0)], now=1_000.1)
    history.add([snapshot(LATER, written=1_002.0)], now=1_002.1)
    (loader,) = history.add([snapshot(LATER, written=1_002.0)], now=1_003.1)
    assert loader.now.samples_per_second == 200.0
    assert loader.overall.samples_per_second == 1_400 / 12
    assert list(loader.points) == [ChartPoint(1_002.1, 0.25, 200.0)]


def test_the_chart_of_a_waiting_loop_shows_the_growing_stall() -> None:
    history = History()
    history.add([snapshot(written=1_000.0)], now=1_000.0)
    stuck = snapshot(LATER, written=1_002.0, waiting=1_002.0)
    for now in (1_002.0, 1_003.0, 1_010.0):
        (loader,) = history.add([stuck], now)
    assert [round(point.stall, 2) for point in loader.points] == [0.25, 0.5, 0.85]


def test_ended_loaders_are_forgotten_and_reused_process_numbers_told_apart() -> None:
    history = History()
    one, two = snapshot(), snapshot(number=1)
    again = snapshot(started=100)  # another process that reuses the number
    assert len(history.add([one, two], 1.0)) == 2
    (loader,) = history.add([again], 2.0)
    assert loader.before is None
    assert len(history.loaders) == 1


def test_chart_points_older_than_five_minutes_are_dropped() -> None:
    loader = LoaderHistory(snapshot())
    for second in range(1_000):
        stats = replace(STATS, elapsed=10.0 + second, samples=1_000 + second)
        loader.add(snapshot(stats, written=2_000.0 + second), 2_000.0 + second)
    assert len(loader.points) == KEPT + 1
    assert loader.points[0].time == 2_999.0 - KEPT


def test_a_snapshot_survives_a_round_trip_through_json() -> None:
    for original in (snapshot(), snapshot(FULL, waiting=17.5, number=3)):
        assert from_json(to_json(original)) == original
    for wrong in ("", "{}", "[1]", "null", '{"version": 999}', '{"version": 1, "pid": 2}'):
        assert from_json(wrong) is None
