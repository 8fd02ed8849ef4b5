"""Real analyses of loaders with a known bottleneck: the verdict names it.

Preparation and steps sleep, and storage is a throttled device, so the bottleneck is the same on any
machine whose sleeps end in time. On a very busy one they do not, and the times of the test are not
those that it states: then the analysis is repeated, and so is one whose report is wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from penstock.diagnose.analyze.loader_subject import LoaderSubject
from penstock.diagnose.analyze.model import predict
from penstock.diagnose.analyze.phase_runner import PhaseRunner
from penstock.diagnose.analyze.report import AnalysisReport, OperationTime
from penstock.diagnose.analyze.stalls import stalls_of
from penstock.errors import ReportError
from penstock.loader import Loader
from penstock.pipeline import Pipeline, from_dataset, from_folder
from penstock.source.source import Source
from penstock.store.value import cost

BATCH = 4


class SlowStorage(Source):
    """Samples of 1,000 bytes from storage that serves one after the other."""

    threadsafe: ClassVar[bool] = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._free = 0.0
        self.reads = 0

    def __len__(self) -> int:
        return 200

    def read(self, indices: Sequence[int]) -> list[Any]:
        with self._lock:
            self.reads += len(indices)
            self._free = max(self._free, time.perf_counter()) + self._seconds * len(indices)
            due = self._free
        time.sleep(max(0.0, due - time.perf_counter()))
        return [np.full(1_000, index % 256, np.uint8) for index in indices]

    def identity(self) -> str:
        return f"slow storage {self._seconds}"


def loader_of(fetch: float, prep: float, workers: int = 2) -> Loader:
    def slow(sample: Any) -> Any:
        time.sleep(prep)
        return sample

    pipeline = Pipeline(SlowStorage(fetch)).map(slow, random=False).batch(BATCH)
    return pipeline.loader(workers=workers, kind="threads", seed=0)


class Delays:
    """How much longer than asked for the sleeps of a thread take, while an analysis runs."""

    NAP, MOST = 1e-3, 1e-3
    """Seconds of a sleep, and the longest delay that is still in time."""

    def __init__(self) -> None:
        self._naps = self._late = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ending.is_set():
            started = time.perf_counter()
            time.sleep(self.NAP)
            self._naps += 1
            self._late += time.perf_counter() - started - self.NAP > self.MOST

    def __enter__(self) -> Delays:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    @property
    def in_time(self) -> bool:
        """Whether at most a fiftieth of the sleeps was late, or too few to tell."""
        return self._late <= max(20, self._naps // 50)


class TooBusy(Exception):
    """The sleeps of this machine do not end in time."""


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def analysed(loader: Loader, step: float, seconds: float = 1.8, **options: Any) -> AnalysisReport:
    runner = PhaseRunner(LoaderSubject(loader, **options), seconds=seconds)
    with loader:
        for _ in runner.run(endless(loader)):
            time.sleep(step)
    assert runner.report is not None
    return runner.report


class Quick(LoaderSubject):
    """Leaves out timing the operations one by one, of which these tests ask nothing."""

    def operations(self) -> Sequence[OperationTime]:
        return ()


def analysed_in_time(loader: Loader, step: float, **options: Any) -> AnalysisReport | None:
    """The report; ``None`` as soon as the machine turns out to be too busy for the sleeps."""

    def pace(seconds: float) -> None:
        if not delays.in_time:
            raise TooBusy
        time.sleep(seconds)

    runner = PhaseRunner(Quick(loader, **options), seconds=1.8, sleep=pace)
    with suppress(TooBusy), loader, Delays() as delays:
        for _ in runner.run(endless(loader)):
            pace(step)
        return runner.report if delays.in_time else None
    return None


MS = 1e-3


ATTEMPTS = 10


def check_report(
    check: Callable[[AnalysisReport], None], fetch: float, prep: float, step: float, **options: Any
) -> None:
    """Check the report of an analysis whose sleeps ended in time. Skips the test if there is none.

    A report that fails is made again: on a busy machine more than sleeps may be late. That of a
    wrong analysis fails every time.
    """
    failure: AssertionError | None = None
    for _ in range(ATTEMPTS):
        report = analysed_in_time(loader_of(fetch, prep), step, **options)
        if report is None:
            continue
        try:
            return check(report)
        except AssertionError as error:
            failure = error
    if failure is not None:
        raise failure
    pytest.skip("the machine is too busy: sleeps of 1 ms take more than 2 ms")


@pytest.mark.parametrize(
    ("fetch", "prep", "step", "bound"),
    [
        (6 * MS, 0.5 * MS, 100 * MS, "compute"),  # storage is slow, the accelerator slower
        (2 * MS, 24 * MS, 4 * MS, "prep"),  # both are slow, preparation is slower
        (16 * MS, 10 * MS, 4 * MS, "fetch"),
    ],
)
def test_the_verdict_names_the_bottleneck(
    fetch: float, prep: float, step: float, bound: str
) -> None:
    def check(report: AnalysisReport) -> None:
        assert stalls_of(report).bound == bound
        assert predict(report).bound == bound
        assert report.costs.storage / 1_000 == pytest.approx(1 / fetch, rel=0.4)
        # The model, with inputs measured separately, predicts the speed of all parts together.
        cold = report.rate("cold")
        assert cold is not None
        assert predict(report).speed == pytest.approx(cold, rel=0.4)

    check_report(check, fetch, prep, step)


def test_the_cold_phase_assumes_the_given_cache() -> None:
    budget = 150 * cost(1_000)

    def check(report: AnalysisReport) -> None:
        assert report.setup.cache == budget
        cached = report.rate("cold")
        assert cached is not None
        # The cache holds three of four samples. Without it storage allows 100 samples a second.
        assert cached > 2 * 100

    check_report(check, 10 * MS, 0.5 * MS, 4 * MS, cache=budget)


def test_an_analysis_does_not_change_the_batches_of_the_loader(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.bin").write_bytes(bytes([number]) * 100)

    def made() -> Loader:
        pipeline = from_folder(tmp_path, extensions=None).map(_first, random=False).batch(BATCH)
        return pipeline.loader(workers=2, kind="threads", seed=3)

    with made() as loader:
        expected = [batch.tolist() for batch in loader]
    with made() as loader:
        runner = PhaseRunner(LoaderSubject(loader), seconds=0.5)
        for _ in runner.run(iter(())):
            pass
        assert [batch.tolist() for batch in loader] == expected
    assert runner.report is not None
    assert runner.report.setup.sample_bytes == 100


def _first(sample: bytes) -> Any:
    return np.uint8(sample[0])


def test_a_stream_cannot_be_analysed() -> None:
    loader = from_dataset(lambda: iter(range(10))).batch(2).loader(workers=0)
    with loader, pytest.raises(ReportError, match="a stream can be read only once"):
        LoaderSubject(loader)


def test_no_thread_is_left_running() -> None:
    before = threading.active_count()
    analysed(loader_of(0.1 * MS, 0.1 * MS), 1 * MS, seconds=0.5)
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
