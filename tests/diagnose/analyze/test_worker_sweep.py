"""The worker sweep and delayed reads, with a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, cast

import pytest

from penstock.diagnose.analyze.delayed_reads import FROM_STORAGE, DelayedReads, wait_losses
from penstock.diagnose.analyze.subject import Subject
from penstock.diagnose.analyze.worker_sweep import TURNS, sweep_workers, worker_counts
from tests.support.reports import SETUP

OURS: dict[str, Any] = {
    "loader": "penstock.Loader",
    "kind": "threads",
    "workers": 2,
    "cores": 4,
    "batch": 10,
    "ahead": 3,
}


class SimulatedLoader:
    """A loader whose batches take ``seconds`` with one worker, and less with several.

    In the ten seconds number ``slow`` something else runs on the machine: batches take three times
    as long.
    """

    def __init__(self, seconds: float, slow: int | None = None) -> None:
        self.setup = replace(SETUP, **OURS)
        self.now = 0.0
        self.handed = 0
        self.open = 0
        self._seconds = seconds
        self._slow = slow

    def clock(self) -> float:
        return self.now

    def cached(self, workers: int | None = None, delays: Sequence[float] = ()) -> Iterator[Any]:
        assert workers is not None
        assert not self.open, "workers of another turn still run"
        self.open += 1
        try:
            while True:
                slow = self._slow is not None and self.now // 10 == self._slow
                self.now += self._seconds / workers * (3 if slow else 1)
                self.handed += 1
                yield None
        finally:
            self.open -= 1


def sweep(loader: SimulatedLoader, seconds: float = 9.0) -> dict[int, float]:
    subject = cast(Subject, loader)
    return sweep_workers(subject, worker_counts(loader.setup), seconds, loader.clock)


def test_the_sweep_covers_one_worker_the_present_number_and_the_cores() -> None:
    loader = SimulatedLoader(0.1)
    assert worker_counts(loader.setup) == [1, 2, 4, 8]
    assert worker_counts(replace(loader.setup, kind="processes", cores=64)) == [1, 2, 8]
    assert worker_counts(replace(loader.setup, workers=0)) == []


def test_the_sweep_measures_the_rate_of_each_number_of_workers() -> None:
    loader = SimulatedLoader(0.1)
    assert sweep(loader) == pytest.approx({1: 100, 2: 200, 4: 400, 8: 800})
    assert loader.open == 0


def test_a_disturbance_of_a_few_turns_does_not_change_the_rates() -> None:
    loader = SimulatedLoader(0.1, slow=1)
    assert sweep(loader) == pytest.approx({1: 100, 2: 200, 4: 400, 8: 800})


def test_a_slow_loader_gets_a_single_turn() -> None:
    loader = SimulatedLoader(10.0)
    assert sweep(loader)[1] == pytest.approx(1.0)
    # One turn of each number: the prefetched batches, and then at least two batches.
    assert loader.handed == (4 + 2) + (4 + 2) + (4 + 4) + (4 + 8)
    assert TURNS > 1


def test_torch_prefetches_per_worker_and_penstock_does_not() -> None:
    theirs = replace(SETUP, loader="torch.utils.data.DataLoader", workers=4, ahead=12)
    assert [theirs.ahead_with(number) for number in (1, 4, 8)] == [3, 12, 24]
    assert replace(theirs, workers=0, ahead=0).ahead_with(3) == 6
    ours = replace(SETUP, loader="penstock.Loader", workers=4, ahead=12)
    assert ours.ahead_with(8) == 12


def test_all_samples_of_a_batch_have_the_same_delay() -> None:
    reads = DelayedReads((0.0, FROM_STORAGE, 0.0), batch=2)
    fetched = [reads.wait() for _ in range(8)]
    assert fetched == [False, False, True, True, False, False, False, False]
    assert DelayedReads((FROM_STORAGE,), batch=2).wait(5)


class SimulatedWorker:
    """Takes a millisecond per sample, and loses ``more`` of each wait after it."""

    def __init__(self, more: float = 0.25) -> None:
        self.now = 0.0
        self.delays: Sequence[float] = ()
        self._more = 1 + more

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> float:
        return self.now

    def batches(self, delays: Sequence[float]) -> Iterator[Any]:
        self.delays = delays
        for wait in cycle(delays):
            self.now += 10 * (1e-3 + (5e-3 if wait == FROM_STORAGE else self._more * wait))
            yield None


def measured(
    wait: float, *, fetches: bool, seconds: float, more: float = 0.25
) -> tuple[Any, Any, SimulatedWorker]:
    worker = SimulatedWorker(more)
    lost, fetched = wait_losses(
        worker.batches,
        wait,
        batch=10,
        fetches=fetches,
        seconds=seconds,
        clock=worker.clock,
        sleep=worker.sleep,
    )
    return lost, fetched, worker


def test_a_later_wake_up_after_a_longer_wait_is_a_loss() -> None:
    class Drowsy(SimulatedWorker):
        """A worker whose sleeps take a tenth longer."""

        def sleep(self, seconds: float) -> None:
            super().sleep(1.1 * seconds)

    worker = Drowsy(more=0.2)
    lost, _ = wait_losses(
        worker.batches,
        3e-3,
        batch=10,
        fetches=False,
        seconds=3.0,
        clock=worker.clock,
        sleep=worker.sleep,
    )
    # A fifth of each wait, without the wake-up after 3 ms, which is a tenth of them.
    assert [loss for _, loss in lost] == pytest.approx([0.0, 0.3e-3, 1.5e-3])


def test_the_loss_after_a_wait_does_not_include_the_wait() -> None:
    lost, fetched, _ = measured(2e-3, fetches=True, seconds=3.0)
    assert [value for pair in lost for value in pair] == pytest.approx(
        [2e-3 / 3, 0.5e-3 / 3, 2e-3, 0.5e-3, 6e-3, 1.5e-3]
    )
    assert fetched == pytest.approx(5e-3)
    assert measured(2e-3, fetches=False, seconds=3.0)[1] is None


def test_implausible_losses_are_limited() -> None:
    lost, _, _ = measured(2e-3, fetches=True, seconds=3.0, more=2.0)
    assert lost[1] == pytest.approx((2e-3, 0.6e-3))
    lost, _, _ = measured(2e-3, fetches=True, seconds=3.0, more=-0.1)
    assert [loss for _, loss in lost] == [0.0, 0.0, 0.0]


def test_delays_are_neither_too_short_nor_too_long() -> None:
    assert measured(1e-6, fetches=True, seconds=3.0)[2].delays == (0.0, 1e-4, FROM_STORAGE)
    assert measured(1.0, fetches=True, seconds=3.0)[2].delays == (0.0, 1e-2, FROM_STORAGE)
    # Ten samples with a delay of 6 ms take longer than the time.
    assert measured(2e-3, fetches=True, seconds=0.05)[2].delays == pytest.approx(
        (0.0, 2e-3 / 3, 2e-3, FROM_STORAGE)
    )


def test_without_time_nothing_is_measured() -> None:
    lost, fetched, worker = measured(2e-3, fetches=False, seconds=1e-3)
    assert (lost, fetched, worker.delays) == ((), None, ())
