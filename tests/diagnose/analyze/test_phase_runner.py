"""The phases, run on a simulated loader and training loop: no test here sleeps."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import pytest

from penstock.diagnose.analyze import phase_runner
from penstock.diagnose.analyze.delayed_reads import FROM_STORAGE
from penstock.diagnose.analyze.judge import result_of
from penstock.diagnose.analyze.machine import MachineWatch
from penstock.diagnose.analyze.phase_runner import ROUNDS, PhaseRunner, slow_start
from penstock.diagnose.analyze.report import AnalysisReport, OperationTime, Setup
from penstock.diagnose.analyze.result import LEAST_STEPS
from penstock.diagnose.analyze.worker_sweep import TURNS
from penstock.diagnose.analyze.worker_watch import WorkerWatch
from tests.support.reports import SETUP

BATCH = 8


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SimulatedSubject:
    """Hands out a batch every ``prep`` seconds, ``fetch`` seconds later if it is cold."""

    sizes: tuple[float, ...] = (0.75, 1.25)
    prep_includes_reading = False

    def __init__(self, clock: Clock, prep: float, fetch: float) -> None:
        self.clock = clock
        self.prep, self.fetch = prep, fetch
        self.notes: list[str] = []
        self.closed: list[str] = []
        self.chosen = 0

    @property
    def setup(self) -> Setup:
        return Setup(
            "simulated", 1_000, BATCH, 2, "threads", 2, BATCH, 2, 1_000.0 * bool(self.chosen)
        )

    def choose_samples(self, seconds: float = math.inf) -> None:
        self.chosen += 1

    def _every(self, name: str, seconds: float) -> Iterator[str]:
        ready = self.clock.now
        try:
            while True:
                ready = max(ready + seconds, self.clock.now)
                self.clock.now = max(self.clock.now, ready)
                yield name
        finally:
            self.closed.append(name)

    def cached(self, workers: int | None = None, delays: Sequence[float] = ()) -> Iterator[Any]:
        slower = {None: 1.0, 1: 2.0, 2: 1.0, 4: 0.8}[workers]
        if delays:
            return self._delayed(delays, self.prep * slower)
        return self._every(f"cached {workers}", self.prep * slower)

    def _delayed(self, delays: Sequence[float], seconds: float) -> Iterator[str]:
        """A worker that loses a tenth of each wait after it."""
        try:
            for wait in itertools.cycle(delays):
                self.clock.now += seconds
                self.clock.now += self.fetch if wait == FROM_STORAGE else BATCH * 1.1 * wait
                yield "delayed"
        finally:
            self.closed.append("delayed")

    def cold(self) -> Iterator[Any] | None:
        return self._every("cold", self.prep + self.fetch)

    def with_refurbish(self) -> tuple[Iterator[Any], int] | None:
        def batches() -> Iterator[str]:
            number = 0
            while True:
                self.clock.now += self.prep * (1.0 if number < 6 else 0.25)
                number += 1
                yield "refurbished"

        return batches(), 6

    def with_penstock(self) -> Iterator[Any] | None:
        return self._every("penstock", self.prep / 4)

    def reading(self, threads: int, *, cold: bool) -> Iterator[int] | None:
        def reads() -> Iterator[int]:
            while True:
                self.clock.now += (0.01 if cold else 0.001) / threads
                yield 1_000

        return reads()

    def operations(self) -> Sequence[OperationTime]:
        return [OperationTime("decode", "map", 1.0, 1.0)]

    def batch_times(self) -> Sequence[float]:
        return [0.1, 0.2]

    def waiting_places(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self.closed.append("all")


def analysed(
    clock: Clock, subject: SimulatedSubject, step: float, work: float = 0.0
) -> tuple[AnalysisReport, list[str]]:
    """The report, and the batches of the loop; ``work`` is the share of CPU time."""

    def cpu() -> float:
        return work * clock.now

    runner = PhaseRunner(subject, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=cpu)
    own = subject._every("own", subject.prep)
    seen = []
    for batch in runner.run(own):
        seen.append(batch)
        clock.now += step
    assert runner.report is not None
    return runner.report, seen


def test_each_phase_has_the_rate_of_its_batches() -> None:
    clock = Clock()
    # In this simulation a step and the wait for its batch add up: nothing is prepared meanwhile.
    report, _ = analysed(clock, SimulatedSubject(clock, prep=1e-4, fetch=0.0), step=0.02)
    assert report.rate("replay") == pytest.approx(BATCH / 0.02)
    assert report.rate("cached") == pytest.approx(BATCH / 0.02)
    assert report.costs.compute == pytest.approx(0.02 / BATCH)
    assert report.costs.storage == pytest.approx(4 * 1_000 / 0.01)
    assert report.costs.cache == pytest.approx(2 * 1_000 / 0.001)
    assert report.costs.latency == pytest.approx(0.01)
    assert report.costs.sizes == (0.75, 1.25)


def test_losses_after_waits_are_measured_by_length_of_the_wait() -> None:
    clock = Clock()
    report, _ = analysed(
        clock, SimulatedSubject(clock, prep=0.04, fetch=BATCH * 0.015), step=0.02, work=0.4
    )
    waits, lost = zip(*report.costs.after_wait, strict=True)
    # Reading a sample takes 10 ms; a worker waits for 6 of them.
    # Three times the wait would exceed the longest delay.
    assert waits == pytest.approx([0.002, 0.006])
    assert lost == pytest.approx([0.0002, 0.0006])
    # A fetch takes 15 ms, more than the wait and its loss explain: reading gets its upper limit.
    assert report.costs.reading >= 1.25 * 0.004


def test_slow_preparation_and_slow_fetching_show_in_their_phases() -> None:
    clock = Clock()
    report, _ = analysed(clock, SimulatedSubject(clock, prep=0.04, fetch=0.06), step=0.02)
    assert report.rate("replay") == pytest.approx(BATCH / 0.02)
    assert report.rate("cached") == pytest.approx(BATCH / 0.04, rel=0.5)
    assert report.rate("prep") == pytest.approx(BATCH / 0.04)
    assert report.rate("cold") == pytest.approx(BATCH / 0.10, rel=0.2)
    assert report.costs.prep == pytest.approx(0.08 / BATCH)
    assert report.costs.scaling == {1: 1.0, 2: pytest.approx(2.0), 4: pytest.approx(2.5)}
    assert report.costs.reuse_miss == pytest.approx(0.08 / BATCH)
    assert report.costs.reuse_hit == pytest.approx(0.02 / BATCH)
    assert report.costs.penstock == pytest.approx(0.02 / BATCH)


class WithoutGain(SimulatedSubject):
    """Penstock's loader is as fast as the script's, and both are uneven."""

    def _uneven(self, seconds: float) -> Iterator[str]:
        random_ = random.Random(1)
        while True:
            self.clock.now += seconds * random_.uniform(0.2, 1.8)
            yield "batch"

    def cached(self, workers: int | None = None, delays: Sequence[float] = ()) -> Iterator[Any]:
        if workers is None and not delays:
            return self._uneven(self.prep)
        return super().cached(workers, delays)

    def with_penstock(self) -> Iterator[Any] | None:
        return self._uneven(1.2 * self.prep)


def test_a_difference_to_penstock_within_the_intervals_is_none() -> None:
    clock = Clock()
    report, _ = analysed(clock, WithoutGain(clock, prep=0.5, fetch=0.0), step=0.02)
    assert report.costs.penstock == report.costs.prep


def test_the_loop_gets_its_own_batches_first_and_then_those_of_the_phases() -> None:
    clock = Clock()
    subject = SimulatedSubject(clock, prep=0.01, fetch=0.01)
    report, seen = analysed(clock, subject, step=0.02)
    order = list(dict.fromkeys(seen))
    # The replayed batch is a cached one.
    assert order == ["own", "cached None", "cold"]
    assert [phase.name for phase in report.phases][:5] == [
        "as it is",
        "replay",
        "cached",
        "cold",
        "prep",
    ]
    assert {phase.turns for phase in report.phases[:4]} == {ROUNDS}
    assert subject.chosen == 1


def test_all_iterators_are_closed() -> None:
    clock = Clock()
    subject = SimulatedSubject(clock, prep=0.01, fetch=0.01)
    analysed(clock, subject, step=0.0)
    assert subject.closed == [
        "own",
        "cold",
        "cached None",
        *("cached 1", "cached 2", "cached 4") * TURNS,
        "delayed",
        "penstock",
        "all",
    ]


def test_leaving_the_loop_closes_the_iterators() -> None:
    clock = Clock()
    subject = SimulatedSubject(clock, prep=0.01, fetch=0.01)
    runner = PhaseRunner(subject, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0)
    batches = runner.run(subject._every("own", 0.01))
    while next(batches) == "own":
        pass
    cast(Generator[Any], batches).close()
    assert runner.report is None
    assert subject.closed == ["own", "cached None"]


def test_waits_and_steps_are_measured_separately() -> None:
    clock = Clock()
    report, _ = analysed(clock, SimulatedSubject(clock, prep=0.05, fetch=0.0), step=0.02)
    replayed = [wait for wait in report.waits if wait.phase == "replay"][2:]
    assert all(wait.wait == pytest.approx(0.0) for wait in replayed)
    # The first batch of a turn comes after the batches of another phase.
    assert {round(wait.step, 6) for wait in replayed} == {0.0, 0.02}
    cached = report.phase("cached")
    assert cached is not None
    assert cached.wait is not None
    assert cached.step is not None
    assert cached.wait.value == pytest.approx(0.03)
    assert cached.step.value == pytest.approx(0.02)


def test_a_loader_with_few_batches_is_analysed_too() -> None:
    clock = Clock()
    subject = SimulatedSubject(clock, prep=0.01, fetch=0.01)
    runner = PhaseRunner(subject, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0)
    for _ in runner.run(iter(["own"] * 3)):
        clock.now += 0.02
    assert runner.report is not None
    assert runner.report.rate("as it is") == 0.0
    assert runner.report.rate("replay") == pytest.approx(BATCH / 0.02)


class AsynchronousDevice:
    """An accelerator that queues work at once, and finishes it later."""

    name = "asynchronous"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free = 0.0

    def queue(self, seconds: float) -> None:
        self.free = max(self.free, self.clock.now) + seconds

    def sync(self) -> None:
        self.clock.now = max(self.clock.now, self.free)

    def to_device(self, batch: Any) -> Any:
        return batch

    def replayed(self, batch: Any) -> Any:
        return batch

    def copy_seconds(self, batch: Any) -> float:
        return 0.004

    def agree(self, done: bool) -> bool:
        return done


def test_a_phase_waits_for_an_asynchronous_accelerator() -> None:
    clock = Clock()
    device = AsynchronousDevice(clock)
    subject = SimulatedSubject(clock, prep=1e-4, fetch=0.0)
    runner = PhaseRunner(
        subject, device, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0
    )
    for _ in runner.run(subject._every("own", 1e-4)):
        device.queue(0.05)
        clock.now += 0.001  # the loop does not wait for the device
    assert runner.report is not None
    assert runner.report.rate("replay") == pytest.approx(BATCH / 0.05, rel=0.1)
    assert runner.report.costs.copy == pytest.approx(0.004 / BATCH)
    assert runner.report.setup.accelerator == "asynchronous"


def test_a_quick_analysis_of_an_uneven_loop_ends() -> None:
    clock = Clock()
    subject = SimulatedSubject(clock, prep=1e-4, fetch=0.0)
    chance = random.Random(0)
    runner = PhaseRunner(subject, seconds=1.0, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0)
    for _ in runner.run(subject._every("own", 1e-4)):
        clock.now += chance.choice((0.001, 0.4))
        assert clock.now < 1_000
    assert runner.report is not None
    # Nothing is left out, however little time there was.
    assert {phase.name for phase in runner.report.phases} == {
        "as it is",
        "replay",
        "cached",
        "cold",
        "prep",
        "storage",
        "cache",
    }


@pytest.mark.parametrize("step", [0.005, 0.05, 0.5, 2.0])
def test_the_time_is_kept(step: float) -> None:
    clock = Clock()
    subject = SimulatedSubject(clock, prep=0.01, fetch=0.01)
    runner = PhaseRunner(subject, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0)
    began, chance = clock.now, random.Random(0)
    for _ in runner.run(subject._every("own", 0.01)):
        clock.now += step * chance.uniform(0.5, 1.5)
    assert runner.report is not None
    assert clock.now - began < 1.2 * 60
    own, replay = (runner.report.phase(name) for name in ("as it is", "replay"))
    assert own is not None
    assert replay is not None
    assert min(own.steps, replay.steps) >= LEAST_STEPS


def test_an_analysis_that_is_stopped_reports_what_it_has() -> None:
    clock = Clock()
    subject = SimulatedSubject(clock, prep=0.01, fetch=0.01)
    runner = PhaseRunner(subject, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0)
    batches = runner.run(subject._every("own", 0.01))
    for _ in itertools.islice(batches, 200):
        clock.now += 0.02
    runner.stop("it was interrupted after 200 steps")
    report = runner.report
    assert report is not None
    assert report.interrupted == "it was interrupted after 200 steps"
    assert report.rate("as it is")
    assert subject.closed[-1] == "all"
    # It can be printed, and predicts nothing.
    assert str(report)
    result = result_of(report)
    assert result.interrupted == report.interrupted
    assert not result.trust.numbers


@pytest.mark.parametrize(
    ("changed", "advised"),
    [
        ({"workers": 2}, True),
        ({"workers": 2, "persistent": True}, False),
        ({"workers": 0, "kind": "none"}, False),
        ({"workers": 2, "loader": "penstock.Loader"}, False),
    ],
)
def test_persistent_workers_are_advised_only_where_they_are_not_set(
    changed: dict[str, Any], advised: bool
) -> None:
    setup = replace(SETUP, **{"loader": "torch.utils.data.DataLoader", **changed})
    (note,) = slow_start(setup, wait=1.5, epoch=10.0)
    assert "a wait of 1.50 s, before 10.00 s of steps" in note
    assert ("persistent_workers" in note) is advised
    assert list(slow_start(setup, wait=0.4, epoch=10.0)) == []


def test_phases_go_on_while_a_wait_may_be_nothing_or_a_bottleneck() -> None:
    def turns(wait: float) -> int:
        clock, chance = Clock(), random.Random(3)
        subject = SimulatedSubject(clock, prep=1e-4, fetch=0.0)

        def own() -> Iterator[str]:
            while True:
                clock.now += wait + chance.choice((-0.008, 0.008))
                yield "own"

        runner = PhaseRunner(subject, seconds=60.0, clock=clock, sleep=clock.sleep, cpu=lambda: 0.0)
        for _ in runner.run(own()):
            clock.now += 0.5
        assert runner.report is not None
        return next(phase.turns for phase in runner.report.phases if phase.name == "as it is")

    assert turns(0.026) > turns(0.080)


def test_what_a_loader_cannot_do_is_not_noted_as_left_out() -> None:
    # Printed for a loader of torch: not measured, because the time was up: refurbish.
    class Torch(SimulatedSubject):
        @property
        def setup(self) -> Setup:
            return replace(super().setup, loader="torch.utils.data.DataLoader")

    clock = Clock()
    report, _ = analysed(clock, Torch(clock, prep=5.0, fetch=0.0), step=0.02)
    (left_out,) = [note for note in report.notes if "because the time was up" in note]
    assert "Penstock's loader" in left_out
    assert "refurbish" not in left_out


@pytest.mark.parametrize(("kind", "watched"), [("processes", True), ("crew", False)])
def test_workers_are_watched_only_where_their_threads_can_be_told_apart(
    kind: Literal["processes", "crew"], watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Printed for a crew whose workers slept all the time: idle 93 %. One that computed: lock 48 %.
    class Workers(SimulatedSubject):
        @property
        def setup(self) -> Setup:
            return replace(super().setup, kind=kind)

    made: list[Any] = []

    class Watch(WorkerWatch):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(phase_runner, "WorkerWatch", Watch)
    clock = Clock()
    subject = Workers(clock, prep=0.01, fetch=0.0)
    runner = PhaseRunner(
        subject,
        seconds=60.0,
        clock=clock,
        sleep=clock.sleep,
        cpu=lambda: 0.0,
        machine=MachineWatch(),
    )
    for _ in runner.run(subject._every("own", 0.01)):
        clock.now += 0.02
    assert runner.report is not None
    assert bool(made) is watched
