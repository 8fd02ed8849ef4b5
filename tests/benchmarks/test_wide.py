"""The benchmark ``wide``: the kernel that sleeps, and what is computed from its runs."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.wide.sleeping_kernel import SleepingKernel, SleepLog, TimedKernel
from benchmarks.wide.wide import WideRun, make_result


class FakeKernel:
    """Records calls; ``size`` is a function that the simulation leaves as it is."""

    def __init__(self) -> None:
        self.read: list[tuple[str, ...]] = []
        self.naps: list[float] = []

    def nap(self, seconds: float) -> None:
        self.naps.append(seconds)

    def size(self, data: bytes) -> tuple[int, int, int]:
        return len(data), 1, 3

    def read_files(self, paths: tuple[str, ...]) -> list[bytes]:
        self.read.append(paths)
        return [path.encode() for path in paths]

    def regions(self, requests: tuple[Any, ...]) -> list[None]:
        return [None] * len(requests)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps that were asked for; none of them takes time."""
    asked: list[float] = []
    monkeypatch.setattr("benchmarks.wide.sleeping_kernel.sleep", asked.append)
    return asked


def test_a_sleeping_kernel_sleeps_for_each_item_and_reads_each_file_once(naps: list[float]) -> None:
    real = FakeKernel()
    kernel = SleepingKernel(real, {"read_files": 2.0, "regions": 5.0})
    assert kernel.read_files(("a", "b")) == [b"a", b"b"]
    assert kernel.read_files(("b", "c")) == [b"b", b"c"]
    assert kernel.regions(((1,), (2,), (3,))) == [None, None, None]
    assert naps == [4.0, 4.0, 15.0]
    assert real.read == [("a", "b"), ("c",)]
    total = kernel.log.total()
    assert (total.calls, total.seconds) == (3, 23.0)
    assert real.naps == [7.0]  # a sample in the queue: both


def test_a_sleeping_kernel_runs_short_functions_and_refuses_untimed_ones(naps: list[float]) -> None:
    kernel = SleepingKernel(FakeKernel(), {})
    assert kernel.size(b"12345") == (5, 1, 3)
    with pytest.raises(NotImplementedError, match="calls augment"):
        kernel.augment(None)
    assert naps == []


def test_costs_are_seconds_of_cpu_per_item(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 16.0, 20.0, 24.0])
    monkeypatch.setattr("benchmarks.wide.sleeping_kernel.thread_time", lambda: next(clock))
    kernel = TimedKernel(FakeKernel())
    kernel.regions(((1,), (2,), (3,)))
    kernel.regions(((1,), (2,)))
    assert kernel.costs() == {"regions": 2.0}


def test_a_real_sleep_is_counted_by_its_thread() -> None:
    log = SleepLog()
    started = time.perf_counter()
    log.sleep(0.002)
    assert time.perf_counter() - started >= 0.002
    assert (log.total().calls, log.total().seconds) == (1, 0.002)


def test_goals_are_compared_with_the_median_share() -> None:
    runs = {"uint8": {32: [WideRun(80.0, 100.0, 5e-6, 1e-6), WideRun(90.0, 100.0, 7e-6, 1e-6)]}}
    result = make_result(runs, {"uint8": {"regions": 1e-3}}, (), rounds=2)
    ((workers, rate, ideal, share, goal, cpu, loop),) = result.tables[0].rows
    assert (workers, rate, ideal) == ("32", "85", "100")
    assert share == "0.85 (0.80 to 0.90)"
    assert goal == "0.85: reached"
    assert (cpu, loop) == ("6.0", "1.0")
    assert "regions 1000 us" in result.notes[0]
