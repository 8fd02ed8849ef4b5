"""What predictions are made of and held against: pipelines on a slow disk, and how fast they are.

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
from benchmarks.throttle import Disk, OnDisk
from penstock.diagnose.analyze.loader_subject import LoaderSubject
from penstock.diagnose.analyze.model import Change
from penstock.diagnose.analyze.phase_runner import PhaseRunner
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.pipeline import Pipeline

SIDE = 224
SLEEPERS = 64

FAST = 100e9
"""Bytes a second of a disk that is as good as none."""


@dataclass(frozen=True)
class Setting:
    """One way to run it: bytes a second, the share that is cached, seconds of a step.

    With ``sleep`` preparing is simulated too: it takes so many seconds for a photograph of the mean
    size, and no CPU.
    """

    data: str
    storage: float
    held: float
    step: float
    workers: int
    batch: int = 64
    augment: bool = False
    reuse: int = 1
    share: str | None = None
    sleep: float = 0.0

    def loader(self, storage: float | None = None) -> Any:
        """Its loader, and the disk that it reads from."""
        pipeline = ps.from_folder(self.data, extensions=(".jpg", ".jpeg"))
        disk = Disk(self.storage if storage is None else storage)
        pipeline = replace(pipeline, source=OnDisk(pipeline.source, disk))  # type: ignore[arg-type]
        if self.held:
            pipeline = pipeline.cache(int(self.held * self.nbytes()))
        if self.sleep:
            slow = Slow(self.sleep * len(pipeline.source) / self.nbytes())  # type: ignore[arg-type]
            return self._made(pipeline.map(slow, on=0, random=False)), disk
        pipeline = pipeline.map(ps.image.decode())
        if self.augment:
            pipeline = pipeline.map(ps.image.rand_augment(2, 9))
        if self.reuse > 1:
            pipeline = pipeline.refurbish(reuse=self.reuse)
        pipeline = pipeline.map(ps.image.random_resized_crop(SIDE)).map(ps.image.random_flip())
        return self._made(pipeline), disk

    def _made(self, pipeline: Pipeline) -> Any:
        return pipeline.batch(self.batch, drop_last=True).loader(
            workers=self.workers, kind="threads", seed=0, share=self.share
        )

    def nbytes(self) -> int:
        found = Path(self.data).rglob("*.jp*g")
        return sum(one.stat().st_size for one in found)

    def change(self, base: Setting) -> Change:
        """What it changes about another one."""
        return Change(
            cache=int(self.held * self.nbytes()),
            workers=self.workers,
            storage=self.storage,
            accelerator=base.step / self.step,
            reuse=self.reuse,
            # Those who sleep need no core of their own.
            cores=SLEEPERS if self.sleep else None,
        )


class Slow:
    """Takes its time over bytes, and makes a number of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, data: bytes) -> Any:
        time.sleep(self._seconds * len(data))
        return np.uint8(len(data) % 256)


class Telling:
    """What an analysis said it does, and when it began with that."""

    def __init__(self) -> None:
        self._said: list[tuple[float, str]] = []

    def __call__(self, what: str) -> None:
        self._said.append((time.perf_counter(), what))

    def during(self, word: str) -> tuple[float, float]:
        """From when to when it was at what this word stands in; all of it where that never came."""
        self("the end")
        spans = [(now, then) for (now, what), (then, _) in pairwise(self._said) if word in what]
        return spans[0] if spans else (self._said[0][0], self._said[-1][0])


def at_pace(report: AnalysisReport, prep: float, reuse: float) -> AnalysisReport:
    """The report as it would be where preparing takes longer by a factor; of kept samples, too."""
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


def analysed(base: Setting, seconds: float, told: Telling | None = None) -> AnalysisReport:
    """One analysis of a setting, in a loop like a training script's."""
    loader, _ = base.loader()
    runner = PhaseRunner(LoaderSubject(loader), seconds=seconds, on_progress=told)
    for batch in runner.run(endless(loader)):
        del batch
        time.sleep(base.step)
    loader.close()
    if runner.report is None:
        raise RuntimeError("the analysis has no report")
    return runner.report


def measured(setting: Setting, warm_up: float, seconds: float) -> float:
    """Samples a second of a real run."""
    # What is kept is put there before the clock starts, from a disk that does not hold it up.
    loader, disk = setting.loader(FAST)
    epochs = 1 + (setting.reuse > 1)
    for _ in range(epochs if setting.held or setting.reuse > 1 else 0):
        for batch in loader:
            del batch
    disk.rate = setting.storage
    found = timed(loader, setting.step, warm_up, seconds)
    loader.close()
    return found


def timed(loader: Any, step: float, warm_up: float, seconds: float) -> float:
    """Samples a second over whole epochs: a part of one has photographs of another mean size, and
    in every run the same."""
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
    while True:
        yield from loader


def shared(setting: Setting, jobs: int, warm_up: float, seconds: float) -> float:
    """Samples a second of a job among several that share one preparation: the median."""
    with tempfile.TemporaryDirectory() as place:
        environment = {
            **os.environ,
            "PENSTOCK_RUNTIME_DIR": place,
            "PENSTOCK_NODE_WORKERS": str(setting.workers),
        }
        told = json.dumps([asdict(replace(setting, share="jobs")), warm_up, seconds])
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.analyze_work", told],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(jobs)
        ]
        answers = [one.communicate()[0] for one in started]
    return median(float(answer) for answer in answers)


def _job(told: str) -> None:
    plain, warm_up, seconds = json.loads(told)
    setting = Setting(**plain)
    loader, _ = setting.loader()
    print(timed(loader, setting.step, warm_up, seconds))
    # Others may still be measuring: to leave would give them its part.
    until = time.perf_counter() + 2.0
    for batch in endless(loader):
        del batch
        time.sleep(setting.step)
        if time.perf_counter() > until:
            break
    loader.close()


if __name__ == "__main__":
    _job(sys.argv[1])
