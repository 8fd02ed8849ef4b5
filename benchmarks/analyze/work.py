"""Scenarios of the benchmark: pipelines on a simulated disk, analysed and measured.

The accelerator is simulated: a step sleeps for a stated time and uses no CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import penstock as ps
from benchmarks.harness.throttle import Disk, OnDisk
from penstock.diagnose.analyze.loader_subject import LoaderSubject
from penstock.diagnose.analyze.model import Change
from penstock.diagnose.analyze.phase_runner import PhaseRunner
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.pipeline import Pipeline

SIDE = 224
SLEEPING_CORES = 64

FAST = 100e9
"""Bytes per second of a disk that is never the bottleneck."""


@dataclass(frozen=True)
class Scenario:
    """A pipeline and its conditions: ``storage`` in bytes per second, the share of the data that is
    ``cached``, seconds of a ``step``.

    With ``sleep``, preparation is simulated too: it sleeps that many seconds for a photograph of
    mean size, and uses no CPU.
    """

    data: str
    storage: float
    cached: float
    step: float
    workers: int
    batch: int = 64
    augment: bool = False
    reuse: int = 1
    share: str | None = None
    sleep: float = 0.0

    def loader(self, storage: float | None = None) -> Any:
        """The loader, and its disk. ``storage`` overrides the rate of the disk."""
        pipeline = ps.from_folder(self.data, extensions=(".jpg", ".jpeg"))
        disk = Disk(self.storage if storage is None else storage)
        pipeline = replace(pipeline, source=OnDisk(pipeline.source, disk))
        if self.cached:
            pipeline = pipeline.cache(int(self.cached * self.nbytes()))
        if self.sleep:
            slow = SlowDecode(self.sleep * len(pipeline.source) / self.nbytes())
            return self._batched(pipeline.map(slow, on=0, random=False)), disk
        pipeline = pipeline.map(ps.image.decode())
        if self.augment:
            pipeline = pipeline.map(ps.image.rand_augment(2, 9))
        if self.reuse > 1:
            pipeline = pipeline.refurbish(reuse=self.reuse)
        pipeline = pipeline.map(ps.image.random_resized_crop(SIDE)).map(ps.image.random_flip())
        return self._batched(pipeline), disk

    def _batched(self, pipeline: Pipeline) -> Any:
        return pipeline.batch(self.batch, drop_last=True).loader(
            workers=self.workers, kind="threads", seed=0, share=self.share
        )

    def nbytes(self) -> int:
        """Total size of the photographs."""
        return sum(path.stat().st_size for path in Path(self.data).rglob("*.jp*g"))

    def change(self, base: Scenario) -> Change:
        """The change from the scenario ``base`` to this one, for the model."""
        return Change(
            cache=int(self.cached * self.nbytes()),
            workers=self.workers,
            storage=self.storage,
            accelerator=base.step / self.step,
            reuse=self.reuse,
            # Workers that sleep need no core.
            cores=SLEEPING_CORES if self.sleep else None,
        )


class SlowDecode:
    """Sleeps ``seconds`` per byte, and returns a number."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, data: bytes) -> Any:
        time.sleep(self._seconds * len(data))
        return np.uint8(len(data) % 256)


class PhaseLog:
    """Records when an analysis began each of its phases."""

    def __init__(self) -> None:
        self._begun: list[tuple[float, str]] = []

    def __call__(self, what: str) -> None:
        self._begun.append((time.perf_counter(), what))

    def during(self, word: str) -> tuple[float, float]:
        """Start and end of the first phase whose name contains ``word``, else of the whole
        analysis."""
        self("the end")
        spans = [(now, then) for (now, what), (then, _) in pairwise(self._begun) if word in what]
        return spans[0] if spans else (self._begun[0][0], self._begun[-1][0])


def scale_costs(report: AnalysisReport, prep: float, reuse: float) -> AnalysisReport:
    """The report with costs of preparation scaled by ``prep``, and costs of reuse by ``reuse``."""
    costs = report.costs
    return replace(
        report,
        costs=replace(
            costs,
            prep=costs.prep * prep,
            reading=costs.reading * prep,
            reuse_miss=costs.reuse_miss and costs.reuse_miss * reuse,
            reuse_hit=costs.reuse_hit and costs.reuse_hit * reuse,
        ),
    )


def run_analysis(base: Scenario, seconds: float, phases: PhaseLog | None = None) -> AnalysisReport:
    """Analyse a scenario in a loop like that of a training script."""
    loader, _ = base.loader()
    runner = PhaseRunner(LoaderSubject(loader), seconds=seconds, on_progress=phases)
    for batch in runner.run(endless(loader)):
        del batch
        time.sleep(base.step)
    loader.close()
    if runner.report is None:
        raise RuntimeError("the analysis ended without a report")
    return runner.report


def measure_rate(scenario: Scenario, warm_up: float, seconds: float) -> float:
    """Samples per second of a real run."""
    # Fill caches before the measurement, from a fast disk.
    loader, disk = scenario.loader(FAST)
    epochs = 1 + (scenario.reuse > 1)
    for _ in range(epochs if scenario.cached or scenario.reuse > 1 else 0):
        for batch in loader:
            del batch
    disk.rate = scenario.storage
    rate = time_epochs(loader, scenario.step, warm_up, seconds)
    loader.close()
    return rate


def time_epochs(loader: Any, step: float, warm_up: float, seconds: float) -> float:
    """Samples per second over whole epochs. Part of an epoch would be biased: its photographs have
    another mean size, and every run would begin with the same ones."""
    start = end = time.perf_counter()
    samples = 0
    counting = False
    epoch = len(loader)
    for number, (images, _) in enumerate(endless(loader), start=1):
        count = len(images)
        del images
        time.sleep(step)
        end = time.perf_counter()
        samples += count if counting else 0
        if number % epoch:
            continue
        if counting and end - start >= seconds:
            break
        if not counting and end - start > warm_up:
            start, counting = end, True
    return samples / (end - start)


def endless(loader: Any) -> Iterator[Any]:
    """Yield the batches of all epochs, without end."""
    while True:
        yield from loader


def measure_shared_rate(scenario: Scenario, jobs: int, warm_up: float, seconds: float) -> float:
    """Samples per second of one of several jobs that share: the median of the jobs."""
    with tempfile.TemporaryDirectory() as place:
        environment = {
            **os.environ,
            "PENSTOCK_RUNTIME_DIR": place,
            "PENSTOCK_NODE_WORKERS": str(scenario.workers),
        }
        argument = json.dumps([asdict(replace(scenario, share="jobs")), warm_up, seconds])
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.analyze.work", argument],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(jobs)
        ]
        answers = [process.communicate()[0] for process in processes]
    return median(float(answer) for answer in answers)


def _job(argument: str) -> None:
    """The program of one of several jobs that share: prints its samples per second."""
    plain, warm_up, seconds = json.loads(argument)
    scenario = Scenario(**plain)
    loader, _ = scenario.loader()
    print(time_epochs(loader, scenario.step, warm_up, seconds))
    # The other jobs may still be measuring, and would speed up if this one left.
    until = time.perf_counter() + 2.0
    for batch in endless(loader):
        del batch
        time.sleep(scenario.step)
        if time.perf_counter() > until:
            break
    loader.close()


if __name__ == "__main__":
    _job(sys.argv[1])
