"""Faults of a job without a node: bad samples, killed processes, damaged stores, low limits."""

from __future__ import annotations

import signal
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.faults.damage import DAMAGES
from benchmarks.faults.fault import Event, Fault
from benchmarks.faults.process_table import kill_all, processes_of, shown, wait_for_none
from benchmarks.faults.run import LEFT_LIMIT, FaultRun
from benchmarks.faults.work import NumberedSamples

WORKERS = {"workers": 2}

SKIP = {**WORKERS, "on_error": "skip", "timeout": 6.0, "shuffle": False}

KEPT_SAMPLES = 320
SAMPLE_BYTES = 8192
"""Size of a sample in the disk cache, without its record."""

FEW = 40
"""Samples that fit into a small cache."""

HELD = 600
LIMITS = (1024, 256)

MORE_KILLS = 4
"""Kills of workers that start, beyond the number of workers."""


def _crash(run: FaultRun, options: Namespace) -> Event:
    return _bad_sample(run, "crash")


def _hang(run: FaultRun, options: Namespace) -> Event:
    return _bad_sample(run, "hang")


def _bad_sample(run: FaultRun, trouble: Literal["crash", "hang"]) -> Event:
    return Event(defects=tuple(bad_sample_defects(run, trouble, SKIP, shared=False)))


def bad_sample_defects(
    run: FaultRun, trouble: Literal["crash", "hang"], options: dict[str, Any], *, shared: bool
) -> list[str]:
    """Run a job with a bad first sample, then one with a bad sample in the middle."""
    defects: list[str] = []
    for bad in (0, 33):
        work = NumberedSamples(64, 4, "processes", trouble=trouble, bad=bad)
        name = f"bad-{bad}"
        group = name if shared else None
        run.start_and_go(name, work=work, group=group, epochs=1, options=options)
        # The second job runs even if the first one fails.
        defects += run.defects_of_end(name)
    return defects


def _kill_parent_of_busy(run: FaultRun, options: Namespace) -> Event:
    mark = run.place / "mark"
    work = NumberedSamples(4000, 4, "processes", cost=0.01, trouble="gil", bad=40, mark=str(mark))
    run.start_and_go("busy", work=work, group=None, epochs=1, options=WORKERS)
    run.wait("busy", mark.exists, "no worker had reached the sample")
    return _kill_parent(run, "busy")


def _kill_parent_of_stopped(run: FaultRun, options: Namespace) -> Event:
    work = NumberedSamples(4000, 4, "processes", cost=0.02)
    run.start_and_go("stopped", work=work, group=None, epochs=1, options=WORKERS)
    run.wait("stopped", lambda: bool(run.children("stopped")), "there were no workers")
    run.wait_for_batches("stopped", 3)
    for worker in run.children("stopped"):
        worker.suspend()
    return _kill_parent(run, "stopped")


def _kill_parent(run: FaultRun, name: str) -> Event:
    run.send(name, signal.SIGKILL)
    run.wait_for_end(name)
    left = wait_for_none(partial(processes_of, run.runtime), LEFT_LIMIT)
    found = shown(left)
    kill_all(left)
    if not left:
        return Event()
    return Event(defects=(f"{len(left)} workers lived {LEFT_LIMIT:g} s after their job: {found}",))


def _store(place: Path, budget: int = 1 << 30) -> NumberedSamples:
    return NumberedSamples(KEPT_SAMPLES, 8, stages="disk", place=str(place), budget=budget)


def _damage_between(run: FaultRun, options: Namespace) -> Event:
    defects = []
    for name, damage in DAMAGES.items():
        place = run.place / f"store-{name}"
        work = _store(place)
        run.start_and_go(f"{name}-first", work=work, group=None, epochs=2, options=WORKERS)
        run.wait_for_end(f"{name}-first")
        damage(place)
        run.start_and_go(f"{name}-second", work=work, group=None, epochs=2, options=WORKERS)
        defects += run.defects_of_end(f"{name}-second")
    return Event(defects=tuple(defects))


def _damage_in_use(run: FaultRun, options: Namespace) -> Event:
    defects = []
    for name, damage in DAMAGES.items():
        place = run.place / f"store-{name}"
        work = _store(place)
        run.start_and_go(name, work=work, group=None, epochs=3, options=WORKERS)
        run.wait_for_batches(name, work.batches + work.batches // 3)
        damage(place)
        defects += run.defects_of_end(name)
        # What the damaged store serves to the next run counts as well.
        run.start_and_go(f"{name}-next", work=work, group=None, epochs=1, options=WORKERS)
        defects += run.defects_of_end(f"{name}-next")
    return Event(defects=tuple(defects))


def _grow_cache(run: FaultRun, options: Namespace) -> Event:
    place = run.place / "store"
    small = _store(place, FEW * SAMPLE_BYTES)
    for name, work in (("small", small), ("large", _store(place))):
        run.start_and_go(name, work=work, group=None, epochs=2, options=WORKERS)
        run.wait_for_end(name)
    first, second = run.outcomes("large")
    hits = second.hits - first.hits
    if hits == KEPT_SAMPLES:
        return Event()
    return Event(defects=(f"{hits} cache hits in the second epoch instead of {KEPT_SAMPLES}",))


def _hold(run: FaultRun, options: Namespace) -> Event:
    defects = []
    work = NumberedSamples(8 * HELD, 8, "processes")
    for limit in LIMITS:
        name = f"limit-{limit}"
        run.start_and_go(
            name,
            work=work,
            group=None,
            epochs=1,
            step=0.0,
            options=WORKERS,
            hold=HELD,
            descriptors=limit,
        )
        defects += run.defects_of_end(name)
    return Event(defects=tuple(defects))


def _kill_starting_workers(run: FaultRun, options: Namespace) -> Event:
    work = NumberedSamples(800, 4, "processes", cost=0.002)
    killed: set[int] = set()

    def kill_new_workers() -> bool:
        for worker in run.children("job"):
            if worker.pid not in killed and len(killed) < WORKERS["workers"] + MORE_KILLS:
                try:
                    worker.kill()
                except psutil.NoSuchProcess:
                    continue
                killed.add(worker.pid)
        return len(killed) == WORKERS["workers"] + MORE_KILLS or run.has_ended("job")

    run.start_and_go("job", work=work, group=None, epochs=1, options=WORKERS)
    run.wait("job", kill_new_workers, "there were too few workers to kill")
    return Event()


JOB_FAULTS = (
    Fault(
        "crash",
        "a sample crashes its worker, first and in the middle",
        "exactly this sample is skipped and listed",
        _crash,
    ),
    Fault(
        "hang",
        "a sample hangs, first and in the middle",
        "exactly this sample is skipped and listed",
        _hang,
    ),
    Fault(
        "orphans",
        "a job is killed with -9 while a worker holds the GIL in C",
        f"no worker is left after {LEFT_LIMIT:g} s",
        _kill_parent_of_busy,
    ),
    Fault(
        "stopped-orphans",
        "a job is killed with -9 while its workers are stopped",
        f"no worker is left after {LEFT_LIMIT:g} s",
        _kill_parent_of_stopped,
    ),
    Fault(
        "store-between",
        "a disk cache is damaged between two runs",
        "damaged samples are prepared again",
        _damage_between,
    ),
    Fault(
        "store-in-use",
        "a disk cache is damaged while it is in use",
        "damaged samples are prepared again",
        _damage_in_use,
    ),
    Fault(
        "cache-grows",
        "a full disk cache gets a larger budget",
        "the second epoch finds every sample",
        _grow_cache,
    ),
    Fault(
        "held",
        f"a loop keeps {HELD} batches, with {LIMITS[0]:,} and with {LIMITS[1]} descriptors",
        "all batches arrive, and stay as they are",
        _hold,
    ),
    Fault(
        "worker-starts",
        f"workers are killed with -9 while they start, workers + {MORE_KILLS} times",
        "new workers replace them",
        _kill_starting_workers,
    ),
)
