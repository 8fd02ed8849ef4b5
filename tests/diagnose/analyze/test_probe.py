"""The phases, run on a loader and a loop whose time is made up: nothing here sleeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from penstock.diagnose.analyze.delayed_reads import FROM_STORAGE
from penstock.diagnose.analyze.probe import Probe
from penstock.diagnose.analyze.report import Operation, Report, Setup
from penstock.diagnose.analyze.worker_sweep import TURNS

BATCH = 8


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class MadeUp:
    """Hands out a batch each ``prep`` seconds, or later where it must be fetched."""

    sizes = (0.75, 1.25)
    reads_to_prepare = False

    def __init__(self, clock: Clock, prep: float, fetch: float) -> None:
        self.clock = clock
        self.prep, self.fetch = prep, fetch
        self.notes: list[str] = []
        self.closed: list[str] = []
        self.learnt = 0

    @property
    def setup(self) -> Setup:
        return Setup(
            "made up", 1_000, BATCH, 2, "threads", 2, BATCH, 2, 1_000.0 * bool(self.learnt)
        )

    def learn(self) -> None:
        self.learnt += 1

    def _every(self, name: str, seconds: float) -> Iterator[str]:
        ready = self.clock.now
        try:
            while True:
                ready = max(ready + seconds, self.clock.now)
                self.clock.now = max(self.clock.now, ready)
                yield name
        finally:
            self.closed.append(name)

    def cached(self, workers: int | None = None, late: Sequence[float] = ()) -> Iterator[Any]:
        slower = {None: 1.0, 1: 2.0, 2: 1.0, 4: 0.8}[workers]
        if late:
            return self._late(late, self.prep * slower)
        return self._every(f"cached {workers}", self.prep * slower)

    def _late(self, late: Sequence[float], seconds: float) -> Iterator[str]:
        """A worker that is a tenth of its wait slower after it."""
        try:
            for wait in itertools.cycle(late):
                self.clock.now += seconds
                self.clock.now += self.fetch if wait == FROM_STORAGE else BATCH * 1.1 * wait
                yield "late"
        finally:
            self.closed.append("late")

    def cold(self) -> Iterator[Any] | None:
        return self._every("cold", self.prep + self.fetch)

    def reused(self) -> tuple[Iterator[Any], int] | None:
        def batches() -> Iterator[str]:
            number = 0
            while True:
                self.clock.now += self.prep * (1.0 if number < 6 else 0.25)
                number += 1
                yield "reused"

        return batches(), 6

    def replaced(self) -> Iterator[Any] | None:
        return self._every("replaced", self.prep / 4)

    def reading(self, threads: int, *, cold: bool) -> Iterator[int] | None:
        def reads() -> Iterator[int]:
            while True:
                self.clock.now += (0.01 if cold else 0.001) / threads
                yield 1_000

        return reads()

    def operations(self) -> Sequence[Operation]:
        return [Operation("decode", "map", 1.0, 1.0)]

    def batch_times(self) -> Sequence[float]:
        return [0.1, 0.2]

    def close(self) -> None:
        self.closed.append("all")


def analysed(
    clock: Clock, subject: MadeUp, step: float, work: float = 0.0
) -> tuple[Report, list[str]]:
    """``work`` is the part of the time in which a core is used."""

    def cpu() -> float:
        return work * clock.now

    probe = Probe(subject, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=cpu)
    own = subject._every("own", subject.prep)
    seen = []
    for batch in probe.run(own):
        seen.append(batch)
        clock.now += step
    assert probe.report is not None
    return probe.report, seen


def test_each_rate_is_that_of_what_was_put_in_place() -> None:
    clock = Clock()
    # Made up so that a step and what is waited for add up: nothing is prepared meanwhile.
    report, _ = analysed(clock, MadeUp(clock, prep=1e-6, fetch=0.0), step=0.02)
    assert report.rate("replay") == pytest.approx(BATCH / 0.02)
    assert report.rate("cached") == pytest.approx(BATCH / 0.02)
    assert report.costs.compute == pytest.approx(0.02 / BATCH)
    assert report.costs.storage == pytest.approx(4 * 1_000 / 0.01)
    assert report.costs.cache == pytest.approx(2 * 1_000 / 0.001)
    assert report.costs.latency == pytest.approx(0.01)
    assert report.costs.sizes == (0.75, 1.25)


def test_what_waiting_costs_besides_is_measured_by_how_long_it_is() -> None:
    clock = Clock()
    report, _ = analysed(clock, MadeUp(clock, prep=0.04, fetch=BATCH * 0.015), step=0.02, work=0.4)
    waits, lost = zip(*report.costs.after_wait, strict=True)
    # Of the 10 ms that reading a sample takes, a worker waits 6.
    assert waits == pytest.approx([0.002, 0.006])  # not beyond the longest
    assert lost == pytest.approx([0.0002, 0.0006])
    # 15 ms that a fetch takes are more than it waits and loses by that: more than reading takes.
    assert report.costs.reading >= 1.25 * 0.004


def test_slower_preparation_and_slower_fetching_show_where_they_belong() -> None:
    clock = Clock()
    report, _ = analysed(clock, MadeUp(clock, prep=0.04, fetch=0.06), step=0.02)
    assert report.rate("replay") == pytest.approx(BATCH / 0.02)
    assert report.rate("cached") == pytest.approx(BATCH / 0.04, rel=0.5)
    assert report.rate("prep") == pytest.approx(BATCH / 0.04)
    assert report.rate("cold") == pytest.approx(BATCH / 0.10, rel=0.2)
    assert report.costs.prep == pytest.approx(0.08 / BATCH)
    assert report.costs.scaling == {1: 1.0, 2: pytest.approx(2.0), 4: pytest.approx(2.5)}
    assert report.costs.reuse_miss == pytest.approx(0.08 / BATCH)
    assert report.costs.reuse_hit == pytest.approx(0.02 / BATCH)
    assert report.costs.penstock == pytest.approx(0.02 / BATCH)


def test_the_loop_is_given_its_own_batches_first_and_then_the_others() -> None:
    clock = Clock()
    subject = MadeUp(clock, prep=0.01, fetch=0.01)
    report, seen = analysed(clock, subject, step=0.02)
    order = list(dict.fromkeys(seen))
    # What is replayed is a cached batch.
    assert order == ["own", "cached None", "cold"]
    assert [one.name for one in report.phases][:5] == [
        "as it is",
        "cached",
        "prep",
        "replay",
        "cold",
    ]
    assert subject.learnt == 1


def test_everything_that_was_begun_is_ended() -> None:
    clock = Clock()
    subject = MadeUp(clock, prep=0.01, fetch=0.01)
    analysed(clock, subject, step=0.0)
    assert subject.closed == [
        "own",
        "cached None",
        "cold",
        *("cached 1", "cached 2", "cached 4") * TURNS,
        "late",
        "replaced",
        "all",
    ]


def test_a_loop_that_is_left_ends_what_was_begun() -> None:
    clock = Clock()
    subject = MadeUp(clock, prep=0.01, fetch=0.01)
    probe = Probe(subject, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0)
    batches = probe.run(subject._every("own", 0.01))
    while next(batches) == "own":
        pass
    batches.close()
    assert probe.report is None
    assert subject.closed == ["own", "cached None"]


def test_waits_and_steps_are_told_apart() -> None:
    clock = Clock()
    report, _ = analysed(clock, MadeUp(clock, prep=0.05, fetch=0.0), step=0.02)
    replayed = [one for one in report.waits if one.phase == "replay"][2:]
    assert all(one.wait == pytest.approx(0.0) for one in replayed)
    assert all(one.step == pytest.approx(0.02) for one in replayed)
    cached = [one for one in report.waits if one.phase == "cached"][3:]
    assert all(one.wait == pytest.approx(0.03) for one in cached)


def test_a_loader_with_an_end_is_analysed_as_far_as_it_goes() -> None:
    clock = Clock()
    subject = MadeUp(clock, prep=0.01, fetch=0.01)
    probe = Probe(subject, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0)
    for _ in probe.run(iter(["own"] * 3)):
        clock.now += 0.02
    assert probe.report is not None
    assert probe.report.rate("as it is") == 0.0
    assert probe.report.rate("replay") == pytest.approx(BATCH / 0.02)


class Behind:
    """An accelerator that is told what to do at once, and takes its time to do it."""

    name = "behind"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free = 0.0

    def told(self, seconds: float) -> None:
        self.free = max(self.free, self.clock.now) + seconds

    def sync(self) -> None:
        self.clock.now = max(self.clock.now, self.free)

    def to_device(self, batch: Any) -> Any:
        return batch

    def again(self, batch: Any) -> Any:
        return batch

    def copying(self, batch: Any) -> float:
        return 0.004

    def agree(self, over: bool) -> bool:
        return over


def test_an_accelerator_that_is_behind_is_waited_for() -> None:
    clock = Clock()
    device = Behind(clock)
    subject = MadeUp(clock, prep=1e-4, fetch=0.0)
    probe = Probe(subject, device, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0)
    for _ in probe.run(subject._every("own", 1e-4)):
        device.told(0.05)
        clock.now += 0.001  # the loop itself goes on at once
    assert probe.report is not None
    assert probe.report.rate("replay") == pytest.approx(BATCH / 0.05, rel=0.1)
    assert probe.report.costs.copy == pytest.approx(0.004 / BATCH)
    assert probe.report.setup.accelerator == "behind"
