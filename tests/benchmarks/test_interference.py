"""The benchmark ``interference``: pace, cores, and the comparison with peers."""

from __future__ import annotations

import pytest

from benchmarks.harness.measure import Lane, Run
from benchmarks.harness.sameness import Look
from benchmarks.interference.interference import (
    ALONE,
    BESIDE,
    Batches,
    best_peer,
    too_slow,
)
from benchmarks.interference.loop import Paced, run_delay, split_cores


def lane(title: str, step: float, *, ours: bool) -> Lane:
    return Lane(title, ours, runs={0: Run({"step": step}, Look((), "", 0.0, 0.0))})


def test_batches_are_due_at_the_rate() -> None:
    pace = Paced(rate=100.0, now=5.0)
    assert pace.due(5.0)
    pace.taken(50, 5.0)
    assert not pace.due(5.4)
    assert pace.due(5.5)


def test_a_late_batch_does_not_make_the_next_ones_come_early() -> None:
    pace = Paced(rate=100.0, now=0.0)
    pace.taken(50, 3.0)
    assert not pace.due(2.9)
    assert pace.due(3.0)
    pace.taken(50, 3.0)
    assert not pace.due(3.4)


def test_the_loop_has_a_core_to_itself() -> None:
    assert split_cores({4, 2, 7}) == ({2}, {4, 7})
    with pytest.raises(SystemExit, match="at least 2 cores"):
        split_cores({3})


def test_the_best_of_penstock_is_compared_with_the_best_peer() -> None:
    lanes = [
        lane(ALONE.title, 1.0, ours=True),
        lane(BESIDE, 1.0, ours=True),
        lane("threads", 6.0, ours=True),
        lane("processes", 3.0, ours=True),
        lane("peer", 2.0, ours=False),
        lane("slow peer", 9.0, ours=False),
    ]
    assert best_peer("x", lanes) == ["x: processes: the step takes 1.50 times that beside peer"]
    assert best_peer("x", lanes[:4]) == []


def test_the_loop_alone_gets_batches_of_the_right_size() -> None:
    batches = iter(Batches(3))
    assert [len(next(batches)) for _ in range(2)] == [3, 3]


def test_a_contestant_that_does_not_keep_up_is_named() -> None:
    slow = lane("slow", 1.0, ours=False)
    slow.runs[0].values["rate"] = 300.0
    quick = lane("quick", 1.0, ours=False)
    quick.runs[0].values["rate"] = 690.0
    (line,) = too_slow("x", [slow, quick], 700.0)
    assert line.startswith("x: slow: gave 300 samples a second, not 700")


def test_time_of_other_processes_is_known_to_the_kernel() -> None:
    before = run_delay()
    assert 0.0 <= before <= run_delay()
