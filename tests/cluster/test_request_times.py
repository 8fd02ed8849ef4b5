"""Times of requests: counted by machine, with failures, and read as quantiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.cluster.request_times import BOUNDS, RequestStats, RequestTimes, quantile
from penstock.cluster.transport import PeerSlow
from tests.support.fabric import VirtualClock


def test_a_request_is_timed_until_its_first_answer() -> None:
    clock = VirtualClock()
    times = RequestTimes(clock)

    def answers() -> Iterator[str]:
        clock.advance(0.03)
        yield "first"
        clock.advance(9.0)
        yield "second"

    assert list(times.timed("b", answers())) == ["first", "second"]
    found = times.of("b")
    assert (found.requests, found.failed) == (1, 0)
    assert found.seconds == pytest.approx(0.03)
    assert [bound for bound, count in zip(BOUNDS, found.times, strict=False) if count] == [0.05]
    assert times.of("c") == RequestStats()


def test_a_failed_request_is_counted_and_raised() -> None:
    times = RequestTimes(VirtualClock())

    def answers() -> Iterator[str]:
        for answer in ("",):
            if answer == "":
                raise PeerSlow("b did not answer")
            yield answer

    with pytest.raises(PeerSlow):
        list(times.timed("b", answers()))
    assert (times.of("b").requests, times.of("b").failed) == (0, 1)


def test_a_copy_does_not_change_with_later_requests() -> None:
    clock = VirtualClock()
    times = RequestTimes(clock)
    list(times.timed("b", iter("x")))
    before = times.of("b")
    list(times.timed("b", iter("x")))
    assert (before.requests, times.of("b").requests) == (1, 2)


def test_quantiles_lie_within_their_interval() -> None:
    counts = [0] * (len(BOUNDS) + 1)
    counts[2], counts[-1] = 90, 10
    median = quantile(counts, 0.5)
    assert median is not None
    assert 0.002 < median <= 0.005
    assert quantile(counts, 0.95) == BOUNDS[-1]
