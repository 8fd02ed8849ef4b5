"""The supervisor of a soak: starts jobs, disturbs them, judges what they received, and watches for
hangs, growth and leftovers."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.faults.damage import DAMAGES
from benchmarks.faults.member import MemberPlan
from benchmarks.faults.process_table import (
    Footprint,
    kernel_stacks,
    kill_all,
    nodes_of,
    processes_of,
    request_stacks,
    shown,
    wait_for_none,
)
from benchmarks.faults.run import LEFT_LIMIT, STACK_SECONDS, SkippedFaultError
from benchmarks.faults.small_disk import SmallDisk
from benchmarks.faults.verdict import Verdict
from benchmarks.faults.work import NumberedSamples, References
from benchmarks.harness.processes import end_node
from benchmarks.soak.courses import BATCH, EPOCHS, SAMPLES, STORE, make_courses
from benchmarks.soak.flatness import Flatness, flatness
from benchmarks.soak.job import Job
from benchmarks.soak.metronome import Metronome
from benchmarks.soak.schedule import Disturbance, disturbances, job_choice

T = TypeVar("T")

POLL = 0.05
"""Seconds between two looks at the jobs."""

MEASURE_EVERY = 2.0
REPORT_EVERY = 60.0

NODE_IDLE = 30.0
"""Seconds that the node stays without jobs: longer than any time without a job that shares."""

RUNTIME_BYTES = 1 << 20
"""Size of the disk of the runtime directory, if it is to be filled."""

STAGING = 16 << 20

BOUNDS = {"resident": 64 << 20, "memfd": 2 * STAGING, "descriptors": 64}
"""Growth of the node and of the supervisor that is allowed over the second half of a soak. What a
node holds depends on the jobs of the moment, so it is never quite flat."""

KEPT_IN_RUNTIME = {"node.lock", "starting.lock", "node.log"}
"""Files that stay in the runtime directory for the next node."""


@dataclass(frozen=True)
class SoakSettings:
    """How long a soak runs (``events`` disturbances at most), with how many jobs at a time."""

    seconds: float
    seed: int
    jobs: int = 4
    workers: int = 2
    hang: float = 60.0
    events: int | None = None
    without: Collection[str] = ()


@dataclass
class SoakReport:
    """What a soak has seen. ``waits``: the longest wait of a job for a batch, in seconds of the
    metronome. ``defects``: everything that went wrong."""

    verdict: Verdict = field(default_factory=Verdict)
    batches: int = 0
    jobs: int = 0
    hung: int = 0
    longest_wait: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    growth: dict[str, dict[str, Flatness]] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)
    kept: str = ""


class Supervisor:
    """Runs one soak."""

    def __init__(self, settings: SoakSettings, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._print = report
        self.report = SoakReport()
        # Short: the path of the node's socket is limited.
        self._place = Path(tempfile.mkdtemp(prefix="soak-"))
        self._shm = Path(tempfile.mkdtemp(prefix="soak-", dir=_shm_parent()))
        self._runtime = self._place / "node"
        self._jobs_place, self._temporary = self._place / "jobs", self._place / "tmp"
        for directory in (self._jobs_place, self._temporary):
            directory.mkdir()
        self._references = References()
        self._jobs: list[Job] = []
        self._number = 0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._damage: str | None = None
        self._footprints: dict[str, list[Footprint]] = {}
        self._disk: SmallDisk | None = None

    def run(self) -> SoakReport:
        settings, report = self._settings, self.report
        without = set(settings.without)
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove_all)
            if "fill-disk" not in without:
                try:
                    self._disk = stack.enter_context(SmallDisk(self._runtime, RUNTIME_BYTES))
                except SkippedFaultError as reason:
                    report.skipped["fill-disk"] = str(reason)
                    without.add("fill-disk")
            self._courses = make_courses(self._place, without)
            self._without = without
            self._prepare_references()
            self._metronome = Metronome(self._place / "ticks")
            stack.callback(self._metronome.close)
            try:
                # Ctrl-C ends a soak early; it is judged all the same.
                with contextlib.suppress(KeyboardInterrupt):
                    self._soak(disturbances(settings.seed, settings.seconds, without))
                self._wind_down()
                self._sweep()
            finally:
                self._end_processes()
                self._check_leftovers()
                self._check_growth()
                self._keep_runtime_files()
        return report

    def _prepare_references(self) -> None:
        """Compute all references now: a supervisor that computes one later does not look."""
        for course in self._courses.values():
            for rank in range(course.world):
                ranks = {"rank": rank, "world": course.world} if course.world > 1 else {}
                self._references.of(course.work, EPOCHS, {**course.options, **ranks})

    def _soak(self, events: Sequence[Disturbance]) -> None:
        begun = time.monotonic()
        due = list(reversed(events[: self._settings.events]))
        next_measure, next_report = begun, begun + REPORT_EVERY
        while not self.report.hung:
            elapsed = time.monotonic() - begun
            if elapsed >= self._settings.seconds or (self._settings.events and not due):
                return
            self._look()
            while len(self._jobs) < self._settings.jobs:
                self._start_job()
            while self._later and self._later[0][0] <= time.monotonic():
                heapq.heappop(self._later)[2]()
            if due and due[-1].at <= elapsed:
                self._disturb(due.pop(), elapsed)
            if time.monotonic() >= next_measure:
                next_measure += MEASURE_EVERY
                self._measure()
            if time.monotonic() >= next_report:
                next_report += REPORT_EVERY
                self._print(f"{elapsed / 60:.0f} min: {self.summary()}")
            time.sleep(POLL)

    def summary(self) -> str:
        report = self.report
        return (
            f"{sum(report.counts.values())} events, {report.jobs} jobs and {report.batches:,} "
            f"batches judged, longest wait {report.longest_wait:.1f} s, defects: "
            f"{len(report.defects)}"
        )

    # Jobs.

    def _start_job(self) -> None:
        settings = self._settings
        choice = job_choice(settings.seed, self._number, list(self._courses), self._without)
        course = self._courses[choice.course]
        if self._damage is not None and not self._store_in_use():
            self._damage_store(self._damage)
            self._damage = None
        job = Job(
            f"job-{self._number}",
            choice.course,
            course.plan(choice.course, choice),
            self._jobs_place,
            self._environment(),
        )
        job.progress_at = self._metronome.now()
        self._number += 1
        self._jobs.append(job)
        self._note("join", job.name, f"{choice}")

    def _store_in_use(self) -> bool:
        # The node keeps the store of a group open for a while after its last job.
        return any(job.plan.work.stages == "disk" for job in self._jobs)

    def _look(self) -> None:
        """Judge jobs that have ended, and find those that hang."""
        for job in list(self._jobs):
            now = self._metronome.now()
            if job.has_ended:
                self._jobs.remove(job)
                self._judge(job)
                continue
            progress = job.log_bytes()
            if progress != job.progress or job.stopped:
                job.progress, job.progress_at = progress, now
            waited = now - job.progress_at
            self.report.longest_wait = max(self.report.longest_wait, waited)
            if waited > self._settings.hang:
                self._report_hang(job, waited)
                return

    def _judge(self, job: Job) -> None:
        found = job.judge(self._references)
        report = self.report
        report.verdict += found.verdict
        report.batches += found.batches
        report.jobs += 1
        report.defects += [f"{job.name} ({job.course}): {defect}" for defect in found.defects]
        self._note("end", job.name, f"{found}")
        if not found.defects:
            job.remove_files()

    def _report_hang(self, job: Job, waited: float) -> None:
        self.report.hung += 1
        pids = processes_of(self._runtime)
        request_stacks(pids)
        time.sleep(STACK_SECONDS)
        stacks = self._place / "stacks"
        stacks.write_text(kernel_stacks(pids))
        self.report.defects.append(
            f"{job.name} ({job.course}) got no batch for {waited:.0f} s. {stacks} says where all "
            f"processes wait, {job.files.output} and the node's log have Python stacks"
        )

    # Disturbances.

    def _disturb(self, event: Disturbance, elapsed: float) -> None:
        victim = self._act(event)
        self._note(event.kind, victim, f"at {elapsed:.1f} s for {event.seconds:.1f} s")

    def _act(self, event: Disturbance) -> str:
        """Carry out a disturbance. Returns whom it happened to."""
        kind = event.kind
        if kind == "fill-disk" and self._disk is not None:
            self._disk.fill()
            self._schedule(event.seconds, self._disk.free)
            return str(self._runtime)
        if kind == "damage-in-use":
            damage = _picked(list(DAMAGES), event.pick)
            self._damage_store(damage)
            return damage
        if kind == "damage-between":
            self._damage = _picked(list(DAMAGES), event.pick)
            return self._damage
        if kind == "kill-node":
            nodes = nodes_of(self._runtime)
            kill_all(nodes)
            return str(nodes)
        if kind in ("kill-worker", "stop-worker"):
            return self._hit_worker(event)
        jobs = [job for job in self._jobs if not job.stopped]
        if not jobs:
            return "nobody"
        job = _picked(jobs, event.pick)
        if kind == "leave":
            job.leave()
        elif kind == "interrupt":
            job.interrupt()
        elif kind == "kill":
            job.kill()
            # Some go on from their checkpoint, the others are not started again.
            if event.seconds < 2.0 and "resume" not in self._without and job.resume():
                return f"{job.name}, resumed"
        elif kind == "pause":
            job.stopped = True
            job.signal(signal.SIGSTOP)
            self._schedule(event.seconds, partial(self._continue, job))
        return job.name

    def _damage_store(self, damage: str) -> None:
        # A job may replace the files at the same moment.
        with contextlib.suppress(FileNotFoundError):
            DAMAGES[damage](self._place / STORE)

    def _hit_worker(self, event: Disturbance) -> str:
        parents = [job.pid for job in self._jobs if not job.stopped] + nodes_of(self._runtime)
        workers: list[psutil.Process] = []
        for parent in parents:
            with contextlib.suppress(psutil.NoSuchProcess):
                workers += psutil.Process(parent).children()
        if not workers:
            return "nobody"
        worker = _picked(workers, event.pick)
        with contextlib.suppress(psutil.NoSuchProcess):
            if event.kind == "kill-worker":
                worker.kill()
            else:
                worker.suspend()
                self._schedule(event.seconds, partial(_continue_worker, worker))
        return str(worker.pid)

    def _continue(self, job: Job) -> None:
        job.stopped = False
        job.progress_at = self._metronome.now()
        job.signal(signal.SIGCONT)

    def _schedule(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), action))

    def _note(self, kind: str, whom: str, what: str) -> None:
        if kind not in ("join", "end"):
            self.report.counts[kind] = self.report.counts.get(kind, 0) + 1
        self.report.events.append(
            {"time": time.monotonic(), "kind": kind, "whom": whom, "what": what}
        )

    # Watching.

    def _measure(self) -> None:
        node = nodes_of(self._runtime)
        watched = {"the supervisor": os.getpid()}
        if node:
            watched[f"node {node[0]}"] = node[0]
        for name, pid in watched.items():
            footprint = Footprint.of(pid)
            if footprint is not None:
                self._footprints.setdefault(name, []).append(footprint)

    def _check_growth(self) -> None:
        for name, footprints in self._footprints.items():
            for quantity, bound in BOUNDS.items():
                values = [getattr(footprint, quantity) for footprint in footprints]
                found = flatness(values, bound)
                if found is None:
                    continue
                self.report.growth.setdefault(name, {})[quantity] = found
                if found.grows:
                    self.report.defects.append(
                        f"{quantity} of {name} grew from {found.begin:,.0f} to {found.end:,.0f}"
                    )

    # The end.

    def _wind_down(self) -> None:
        """Let everybody leave, and judge them."""
        while self._later:
            heapq.heappop(self._later)[2]()
        for job in self._jobs:
            job.leave()
        self._wait_for_jobs()

    def _sweep(self) -> None:
        """Do what removes the files of killed processes: run one more job, and look at the status
        of all jobs."""
        from penstock.watch.live_directory import LIVE, LiveDirectory

        if self.report.hung:
            return
        work = NumberedSamples(SAMPLES, BATCH, "processes", stages="memory")
        plan = MemberPlan(work, 1, 0.0, group=None, options={"workers": 1})
        job = Job("sweep", "sweep", plan, self._jobs_place, self._environment())
        job.progress_at = self._metronome.now()
        self._jobs.append(job)
        self._wait_for_jobs()
        LiveDirectory(self._runtime / LIVE).snapshots()

    def _wait_for_jobs(self) -> None:
        while self._jobs and not self.report.hung:
            self._look()
            time.sleep(POLL)

    def _end_processes(self) -> None:
        for job in self._jobs:
            job.kill()
        # A node that hangs does not answer; it is then one of those that are left.
        with contextlib.suppress(Exception):
            end_node(self._runtime)
        left = wait_for_none(partial(processes_of, self._runtime), LEFT_LIMIT)
        if left:
            self.report.defects.append(f"processes were left: {shown(left)}")
            kill_all(left)

    def _check_leftovers(self) -> None:
        if self.report.hung:
            return  # all processes were killed, and no later job has cleaned up after them
        for place, allowed in (
            (self._runtime, KEPT_IN_RUNTIME),
            (self._temporary, set()),
            (self._shm, set()),
        ):
            left = [
                str(path)
                for path in place.rglob("*")
                if not path.is_dir() and path.name not in allowed
            ]
            if left:
                self.report.defects.append(f"files were left: {', '.join(sorted(left)[:10])}")

    def _keep_runtime_files(self) -> None:
        """Copy the node's log: its disk goes away with the soak."""
        if self.report.defects and self._disk is not None:
            self._disk.free()
            for path in self._runtime.glob("*.log"):
                shutil.copy(path, self._place)

    def _remove_all(self) -> None:
        """Remove all files, but keep those that explain a defect."""
        shutil.rmtree(self._shm, ignore_errors=True)
        if self.report.defects:
            self.report.kept = str(self._place)
        else:
            shutil.rmtree(self._place, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PENSTOCK_RUNTIME_DIR": str(self._runtime),
            "PENSTOCK_SHM_DIR": str(self._shm),
            "PENSTOCK_NODE_WORKERS": str(self._settings.workers),
            "PENSTOCK_NODE_STAGING": str(STAGING),
            "PENSTOCK_NODE_IDLE": str(NODE_IDLE),
            "TMPDIR": str(self._temporary),
        }


def as_data(report: SoakReport) -> dict[str, Any]:
    return asdict(report)


def _continue_worker(worker: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.resume()


def _picked(choices: Sequence[T], pick: float) -> T:
    return choices[int(pick * len(choices))]


def _shm_parent() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
