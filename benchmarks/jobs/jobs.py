"""Several jobs on one machine over the same photographs: prepared once for all, or by each job."""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.environments import interpreter
from benchmarks.harness.measure import Contestant, Lane, peer_names, progress, turns
from benchmarks.harness.photographs import BY_HAND, CHECKED, DALI_PLAIN, PIPELINE
from benchmarks.harness.race_table import Column, Versus, join_results, race_result
from benchmarks.harness.report import Result, Table
from benchmarks.harness.workloads import image_files
from benchmarks.jobs.run import JobsRunError, Timing, run_jobs
from benchmarks.jobs.work import JobSetup, SharedPhotos, count_jobs
from benchmarks.peers import penstock_pipeline, penstock_shared, tensorsocket_loader

JOBS = (1, 2, 4, 8)

RACED = 4
"""The number of jobs with a target for the rate: this many times the fastest contestant that does
not share, and at least the rate of TensorSocket."""

SAME_CPU, SAME_READ, MORE_MEMORY = 1.1, 1.05, 1.5
"""Limits as multiples of one job: CPU time per image prepared, bytes read per epoch (reading ahead
makes them vary), and memory besides the frameworks."""

DELAY = 2.0
"""Target for the median latency in milliseconds, from a batch being ready to a job receiving it."""

TRIES = 3
"""Attempts of a peer per round: one that got stuck may succeed the next time."""

SHARED = JobSetup(
    Contestant("Penstock, shared", penstock_shared.photos, PIPELINE.needs, ours=True), node=True
)
UNSHARED = JobSetup(
    Contestant("Penstock, not shared", penstock_pipeline.photos, PIPELINE.needs, ours=True)
)
TENSORSOCKET = JobSetup(
    Contestant(
        "TensorSocket",
        tensorsocket_loader.photos,
        ("tensorsocket", "torch", "simplejpeg", "cv2"),
        env="tensorsocket",
    ),
    serve=tensorsocket_loader.serve,
)
SETUPS = (JobSetup(BY_HAND), JobSetup(DALI_PLAIN), TENSORSOCKET, UNSHARED, SHARED)

IDLE_NODE = JobSetup(
    Contestant(
        "node at rest",
        penstock_shared.stamped_one_by_one,
        (),
        ours=True,
        # One worker, so that batches become ready in order: an early one would seem to be late.
        environment=(("PENSTOCK_NODE_WORKERS", "1"),),
    ),
    node=True,
    stamped=True,
)
BUSY_NODE = JobSetup(
    Contestant("node at work", penstock_shared.stamped_photos, PIPELINE.needs, ours=True),
    node=True,
    stamped=True,
)

RATE = Column("images/s, all jobs", "rate", "{:,.0f}")
CPU = Column("CPU s per 1000 delivered", "cpu", "{:.3g}")
CPU_PREPARED = Column("CPU s per 1000 prepared", "cpu_prepared", "{:.3g}")
MEMORY = Column("memory MB", "memory", "{:,.0f}", 1e-6)
FRAMEWORKS = Column("of that frameworks MB", "frameworks", "{:,.0f}", 1e-6)
OWN = Column("memory besides MB", "own", "{:,.0f}", 1e-6)
READ = Column("MB read for an epoch", "read", "{:,.1f}", 1e-6)
COLUMNS = (RATE, CPU, CPU_PREPARED, MEMORY, FRAMEWORKS, READ)


@dataclass(frozen=True)
class Among(Versus):
    """A ratio to the best of the peers in ``titles``."""

    titles: tuple[str, ...] = ()

    def ratios(self, lane: Lane, peers: Sequence[Lane]) -> list[float]:
        return super().ratios(lane, [peer for peer in peers if peer.title in self.titles])


@dataclass
class Entry:
    """A setup with a number of jobs. ``stuck``: errors of failed attempts."""

    setup: JobSetup
    jobs: int
    lane: Lane = field(init=False)
    stuck: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        who = self.setup.contestant
        by = interpreter(who.env, who.needs)
        self.lane = Lane(who.title, who.ours, why_not=by.why_not, env=who.env, python=by.python)

    def run(self, number: int, place: Path, work: SharedPhotos, timing: Timing) -> None:
        for _ in range(1 if self.lane.ours else TRIES):
            try:
                run = run_jobs(self.setup, self.lane.python, place, work, self.jobs, timing)
            except JobsRunError as error:
                progress(f"  {error}\n{error.printed}".rstrip())
                self.stuck.append(str(error))
                continue
            self.lane.runs[number] = run
            progress("  " + ", ".join(f"{key} {value:.4g}" for key, value in run.values.items()))
            return
        if self.lane.ours or not self.lane.runs:
            self.lane.fail(self.stuck[-1])

    def notes(self) -> list[str]:
        if not self.stuck or not self.lane.runs:
            return []
        times = "once" if len(self.stuck) == 1 else f"{len(self.stuck)} times"
        why = "; ".join(dict.fromkeys(self.stuck))
        return [f"jobs, {self.jobs}: {self.lane.title} got stuck {times}: {why}"]


def run(options: Namespace) -> Result:
    if not image_files(options.data)[0]:
        raise SystemExit(f"{options.data} has no JPEG files in class folders")
    work = SharedPhotos(options.data, "uint8", options.batch, options.workers)
    timing = Timing(options.seconds, options.warm_up, options.samples, checked=CHECKED)
    numbers = sorted(set(options.jobs))
    setups = [
        setup for setup in SETUPS if setup.contestant.ours or setup.contestant.env in options.peers
    ]
    raced = [Entry(setup, jobs) for jobs in numbers for setup in setups]
    ends = sorted({numbers[0], numbers[-1]})
    timed = [Entry(setup, jobs) for setup in (IDLE_NODE, BUSY_NODE) for jobs in ends]
    take_turns([*raced, *timed], work, timing, options.rounds)
    tables = [
        _race(jobs, [entry for entry in raced if entry.jobs == jobs], work) for jobs in numbers
    ]
    ours = {entry.jobs: entry.lane for entry in raced if entry.setup is SHARED}
    return join_results([*tables, scaling(ours), delays(timed)])


def take_turns(entries: Sequence[Entry], work: SharedPhotos, timing: Timing, rounds: int) -> None:
    """Run every entry once a round, in turns, so that a disturbance affects all of them."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as place:
        for number, order in turns(len(entries), rounds):
            for entry in (entries[turn] for turn in order):
                if not entry.lane.why_not:
                    of = f"jobs: round {number + 1} of {rounds}"
                    progress(f"{of}: {entry.lane.title}, {entry.jobs}")
                    entry.run(number, Path(place), work, timing)


def _race(jobs: int, entries: Sequence[Entry], work: SharedPhotos) -> Result:
    name = f"jobs, {jobs}"
    title = (
        f"{name}: crop to {work.side}, flip, uint8 HWC, batches of {work.batch}, "
        f"{work.workers} workers for each loader or node"
    )
    alone = tuple(entry.lane.title for entry in entries if not entry.setup.shares)
    target = {SHARED.title: float(RACED)} if jobs == RACED else {}
    equal = {SHARED.title: 1.0} if jobs == RACED else {}
    versus = (
        Among("rate / best that does not share", "rate", True, own=target, titles=alone),
        Among(
            f"rate / {TENSORSOCKET.title}", "rate", True, own=equal, titles=(TENSORSOCKET.title,)
        ),
    )
    result = race_result(name, title, [entry.lane for entry in entries], COLUMNS, versus)
    return replace(result, notes=(*result.notes, *(n for entry in entries for n in entry.notes())))


def scaling(ours: dict[int, Lane]) -> Result:
    """Compare the costs of more jobs with those of the fewest, for jobs that share."""
    lanes = [
        replace(lane, title=count_jobs(jobs), runs=_besides_frameworks(lane))
        for jobs, lane in ours.items()
    ]
    first, last = lanes[0].title, lanes[-1].title
    versus = (
        Versus(f"CPU / {first}", "cpu_prepared", False, SAME_CPU),
        Versus(f"read / {first}", "read", False, SAME_READ),
        Versus(f"memory / {first}", "own", False, own={last: MORE_MEMORY}),
    )
    title = f"jobs, scaling: {SHARED.title}; memory is that of the node and all jobs"
    columns = (RATE, CPU_PREPARED, READ, MEMORY, FRAMEWORKS, OWN)
    return race_result("jobs, scaling", title, lanes, columns, versus, beside=(first,))


def _besides_frameworks(lane: Lane) -> dict[int, Any]:
    runs = {}
    for number, run in lane.runs.items():
        own = run.values["memory"] - run.values["frameworks"]
        runs[number] = replace(run, values={**run.values, "own": own})
    return runs


def delays(entries: Iterable[Entry]) -> Result:
    """Latency from a batch being ready in the node to a job receiving it."""
    rows: list[tuple[str, ...]] = []
    notes, wrong, data = [], [], {}
    for entry in entries:
        lane, name = entry.lane, f"{entry.lane.title}, {count_jobs(entry.jobs)}"
        if not lane.runs:
            rows.append((f"{name}\n{lane.why_not}", "", ""))
            wrong.append(f"jobs, latency: {name} {lane.why_not}")
            continue
        middle, late = (lane.spread(key) for key in ("delay", "delay_99"))
        rows.append((name, _ms(middle.median), _ms(late.median)))
        data[name] = {
            key: [run.values[key] for run in lane.runs.values()] for key in ("delay", "delay_99")
        }
        if entry.setup is IDLE_NODE:
            reached = "reached" if 1e3 * middle.median < DELAY else "MISSED"
            notes.append(
                f"jobs, latency: {name}: median {_ms(middle.median)} ms, "
                f"target below {DELAY:g}: {reached}"
            )
    title = (
        "jobs, latency: from a batch's last sample being ready in the node to a job receiving it"
    )
    heads = ("node", "median ms", "99th percentile ms")
    return Result(
        (Table(title, heads, tuple(rows)),), tuple(notes), tuple(wrong), {"jobs, latency": data}
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--jobs",
        type=count,
        nargs="+",
        default=list(JOBS),
        metavar="JOBS",
        help="numbers of jobs that run together (1 2 4 8)",
    )


BENCHMARK = Benchmark(
    "jobs",
    "several jobs over the same JPEG folders: prepared once for all, or by each job",
    run,
    _arguments,
    needs_data=True,
    peers=peer_names(setup.contestant for setup in SETUPS),
)
