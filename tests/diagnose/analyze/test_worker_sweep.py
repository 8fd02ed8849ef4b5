"""Other numbers of workers, and samples that come late: in turns, on a clock that is made up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from penstock.diagnose.analyze.delayed_reads import FROM_STORAGE, Late, losses
from penstock.diagnose.analyze.worker_sweep import TURNS, rates_of, worth_trying
from tests.support.reports import SETUP

OURS: dict[str, Any] = {
    "loader": "penstock.Loader",
    "kind": "threads",
    "workers": 2,
    "cores": 4,
    "batch": 10,
    "ahead": 3,
}


class Crowd:
    """Batches that take so many seconds with one worker, less with several; ``slow`` says in which
    turn of a number something else runs on the machine, so that they take three times as long."""

    def __init__(self, seconds: float, slow: int | None = None) -> None:
        self.setup = replace(SETUP, **OURS)
        self.now = 0.0
        self.handed = 0
        self.open = 0
        self._seconds = seconds
        self._slow = slow

    def clock(self) -> float:
        return self.now

    def cached(self, workers: int | None = None, late: Sequence[float] = ()) -> Iterator[Any]:
        assert workers is not None
        assert not self.open, "others work beside it"
        self.open += 1
        try:
            while True:
                slow = self._slow is not None and self.now // 10 == self._slow
                self.now += self._seconds / workers * (3 if slow else 1)
                self.handed += 1
                yield None
        finally:
            self.open -= 1


def rates(crowd: Crowd, seconds: float = 9.0) -> dict[int, float]:
    return rates_of(crowd, worth_trying(crowd.setup), seconds, crowd.clock)  # type: ignore[arg-type]


def test_all_numbers_that_tell_something_are_tried() -> None:
    crowd = Crowd(0.1)
    assert worth_trying(crowd.setup) == [1, 2, 4, 8]
    assert worth_trying(replace(crowd.setup, kind="processes", cores=64)) == [1, 2, 8]
    assert worth_trying(replace(crowd.setup, workers=0)) == []


def test_rates_are_those_of_each_number_of_workers() -> None:
    crowd = Crowd(0.1)
    assert rates(crowd) == pytest.approx({1: 100, 2: 200, 4: 400, 8: 800})
    assert crowd.open == 0


def test_what_disturbs_a_few_turns_does_not_show() -> None:
    assert rates(Crowd(0.1, slow=1)) == pytest.approx({1: 100, 2: 200, 4: 400, 8: 800})


def test_slow_batches_do_not_make_it_longer_than_it_may_take() -> None:
    crowd = Crowd(10.0)
    assert rates(crowd)[1] == pytest.approx(1.0)
    # One turn of each: those that were there, and then two batches at least.
    assert crowd.handed == (4 + 2) + (4 + 2) + (4 + 4) + (4 + 8)
    assert TURNS > 1


def test_torchs_workers_have_some_batches_ahead_each() -> None:
    theirs = replace(SETUP, loader="torch.utils.data.DataLoader", workers=4, ahead=12)
    assert [theirs.ahead_with(number) for number in (1, 4, 8)] == [3, 12, 24]
    assert replace(theirs, workers=0, ahead=0).ahead_with(3) == 6
    ours = replace(SETUP, loader="penstock.Loader", workers=4, ahead=12)
    assert ours.ahead_with(8) == 12


def test_a_reader_is_kept_waiting_batch_by_batch() -> None:
    late = Late((0.0, FROM_STORAGE, 0.0), batch=2)
    assert [late.wait() for _ in range(8)] == [False, False, True, True, False, False, False, False]
    assert Late((FROM_STORAGE,), batch=2).wait(5)


class Worker:
    """Takes a millisecond for a sample, and a quarter of its wait more after one, or ``more``."""

    def __init__(self, more: float = 0.25) -> None:
        self.now = 0.0
        self.turns: Sequence[float] = ()
        self._more = 1 + more

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> float:
        return self.now

    def batches(self, turns: Sequence[float]) -> Iterator[Any]:
        self.turns = turns
        for wait in cycle(turns):
            self.now += 10 * (1e-3 + (5e-3 if wait == FROM_STORAGE else self._more * wait))
            yield None


def found(
    wait: float, *, fetches: bool, seconds: float, more: float = 0.25
) -> tuple[Any, Any, Worker]:
    worker = Worker(more)
    lost, fetched = losses(
        worker.batches,
        wait,
        batch=10,
        fetches=fetches,
        seconds=seconds,
        clock=worker.clock,
        sleep=worker.sleep,
    )
    return lost, fetched, worker


def test_to_be_woken_later_after_a_longer_wait_is_a_loss() -> None:
    class Drowsy(Worker):
        """It oversleeps by a tenth."""

        def sleep(self, seconds: float) -> None:
            super().sleep(1.1 * seconds)

    worker = Drowsy(more=0.2)
    lost, _ = losses(
        worker.batches,
        3e-3,
        batch=10,
        fetches=False,
        seconds=3.0,
        clock=worker.clock,
        sleep=worker.sleep,
    )
    # A fifth of each wait, of which the tenth of 3 ms is known already.
    assert [one for _, one in lost] == pytest.approx([0.0, 0.3e-3, 1.5e-3])


def test_what_waiting_costs_is_told_apart_from_the_wait() -> None:
    lost, fetched, _ = found(2e-3, fetches=True, seconds=3.0)
    assert [one for pair in lost for one in pair] == pytest.approx(
        [2e-3 / 3, 0.5e-3 / 3, 2e-3, 0.5e-3, 6e-3, 1.5e-3]
    )
    assert fetched == pytest.approx(5e-3)
    assert found(2e-3, fetches=False, seconds=3.0)[1] is None


def test_what_cannot_come_of_waiting_is_noise() -> None:
    lost, _, _ = found(2e-3, fetches=True, seconds=3.0, more=2.0)
    assert lost[1] == pytest.approx((2e-3, 0.6e-3))
    lost, _, _ = found(2e-3, fetches=True, seconds=3.0, more=-0.1)
    assert [one for _, one in lost] == [0.0, 0.0, 0.0]


def test_waits_are_neither_too_short_nor_too_long() -> None:
    assert found(1e-6, fetches=True, seconds=3.0)[2].turns == (0.0, 1e-4, FROM_STORAGE)
    assert found(1.0, fetches=True, seconds=3.0)[2].turns == (0.0, 1e-2, FROM_STORAGE)
    # Ten samples of 6 ms each are more than there is time for.
    assert found(2e-3, fetches=True, seconds=0.05)[2].turns == pytest.approx(
        (0.0, 2e-3 / 3, 2e-3, FROM_STORAGE)
    )


def test_where_there_is_no_time_nothing_is_measured() -> None:
    lost, fetched, worker = found(2e-3, fetches=False, seconds=1e-3)
    assert (lost, fetched, worker.turns) == ((), None, ())
