"""One run of several jobs: starts them, lets them begin together, and counts their samples."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.alone import ROOT, memory_of_tree
from benchmarks.harness.environments import process_environment
from benchmarks.harness.measure import Run
from benchmarks.harness.processes import end_node, wait_until
from benchmarks.harness.sameness import Look
from benchmarks.harness.workloads import image_files
from benchmarks.jobs.board import Board, JobState, Phase
from benchmarks.jobs.job import JobSpec, function_path
from benchmarks.jobs.work import JobSetup, SharedPhotos, count_jobs

END_TIMEOUT = 5.0
"""Seconds that jobs may take to end by themselves."""

MEMORY_LOOKS, MEMORY_INTERVAL = 4, 0.25
"""Number of memory measurements, and seconds between them. They follow the counted seconds while
the jobs go on, because measuring memory slows the jobs down."""

STALL_TIMEOUT = 60.0
"""Seconds after which a run that counts samples instead of seconds is given up."""

OUTPUT_TAIL = 4000
"""Characters of a failed process's output to keep."""


class JobsRunError(Exception):
    """A process failed or got stuck. ``printed``: the end of its output."""

    def __init__(self, message: str, printed: str = "") -> None:
        super().__init__(message)
        self.printed = printed


@dataclass(frozen=True)
class Timing:
    """How long samples are counted: for ``seconds``, or until all jobs together have ``samples``.

    ``patience``: seconds that jobs may take for one phase. ``checked``: samples to inspect.
    """

    seconds: float
    warm_up: float
    samples: int | None = None
    patience: float = 90.0
    checked: int = 512


@dataclass(frozen=True)
class Snapshot:
    """Counters of all processes at one moment. ``given``: samples of each job."""

    at: float
    given: tuple[int, ...]
    prepared: float
    cpu: float
    read: int


def run_jobs(
    setup: JobSetup, python: str, place: Path, work: SharedPhotos, jobs: int, timing: Timing
) -> Run:
    """Run ``jobs`` jobs with a setup. Files in the directory ``place`` stay for the next run.

    Measures ``rate``, samples per second of all jobs together; ``cpu`` and ``cpu_prepared``, CPU
    seconds of all processes per 1000 samples delivered and per 1000 samples prepared; ``read``,
    bytes read by all processes per epoch; ``memory``, PSS of all processes; ``frameworks``, PSS of
    the jobs after their imports, before they make a loader.
    """
    with tempfile.TemporaryDirectory(prefix="run-", dir=place) as files:
        group = _JobGroup(setup, python, Path(files), work, jobs, timing)
        try:
            return group.run()
        finally:
            group.end()


class _JobGroup:
    """The processes of one run."""

    def __init__(
        self,
        setup: JobSetup,
        python: str,
        files: Path,
        work: SharedPhotos,
        jobs: int,
        timing: Timing,
    ) -> None:
        self._setup = setup
        self._python = python
        self._files = files
        ports = free_ports(4) if setup.serve is not None else ()
        self._work = replace(work, jobs=jobs, ports=ports)
        self._jobs = jobs
        self._timing = timing
        self._samples = len(image_files(work.data)[0])
        # The last entry is for a process that serves the jobs.
        self._board = Board(files / "board", jobs + 1)
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> Run:
        jobs = range(self._jobs)
        for place in jobs:
            self._start(place)
        self._await_state(jobs, JobState.IMPORTED, "not all jobs had imported their modules")
        frameworks = sum(memory_of_tree(process.pid) for process in self._processes)
        if self._setup.serve is not None:
            self._start(self._jobs)
            self._await_state([self._jobs], JobState.RUNNING, "the serving process was not ready")
        self._board.phase = Phase.RUN
        self._await_state(jobs, JobState.RUNNING, "not all jobs had a batch")
        self._sleep(self._timing.warm_up)

        family = list(self._family())
        before = self._snapshot(family)
        while not self._over(before):
            self._sleep(0.02)
        after = self._snapshot(family)
        values = self._values(before, after)
        memory = max(self._memory() for _ in range(MEMORY_LOOKS))
        self._board.phase = Phase.INSPECT
        self._await_state(jobs, JobState.INSPECTED, "not all jobs had inspected their batches")
        answers = [json.loads(self._answer(place).read_text()) for place in jobs]
        values.update(memory=float(memory), frameworks=float(frameworks))
        values["first"] = max(answer["first"] for answer in answers)
        values.update(_delays(answers, before.at, after.at))
        look = answers[0]["look"]
        return Run(values, Look(**{**look, "shape": tuple(look["shape"])}))

    def _values(self, before: Snapshot, after: Snapshot) -> dict[str, float]:
        each = [now - then for now, then in zip(after.given, before.given, strict=True)]
        if not all(each):
            raise JobsRunError(f"{each.count(0)} of {count_jobs(self._jobs)} came to a stop")
        given, prepared = sum(each), after.prepared - before.prepared
        cpu, seconds = after.cpu - before.cpu, after.at - before.at
        epochs = given / self._jobs / self._samples
        return {
            "rate": given / seconds,
            "cpu": 1000 * cpu / given,
            "cpu_prepared": 1000 * cpu / max(prepared, 1.0),
            "prepared": prepared / given * self._jobs,
            "read": (after.read - before.read) / epochs,
        }

    # Processes.

    def _start(self, place: int) -> None:
        setup, serves = self._setup, place == self._jobs
        function = setup.serve if serves else setup.contestant.prepare
        if function is None:
            raise JobsRunError(f"{setup.title} has no function that serves jobs")
        spec = JobSpec(
            function_path(function),
            self._work.as_plain(),
            str(self._files / "board"),
            self._jobs + 1,
            place,
            str(self._answer(place)),
            serves=serves,
            stamped=setup.stamped,
            checked=0 if place else self._timing.checked,
        )
        with self._output(place).open("wb") as out:
            process = subprocess.Popen(
                [self._python, "-m", "benchmarks.jobs.job", json.dumps(asdict(spec))],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=ROOT,
                env=self._environment(),
            )
        self._processes.append(process)

    def _environment(self) -> Mapping[str, str]:
        node = {
            "PENSTOCK_RUNTIME_DIR": str(self._files / "node"),
            "PENSTOCK_NODE_WORKERS": str(self._work.workers),
            # ``end_node`` ends the node. If that fails, it ends by itself.
            "PENSTOCK_NODE_IDLE": "2",
        }
        own = dict(self._setup.contestant.environment)
        return process_environment(self._python, self._files, {**node, **own})

    def _output(self, place: int) -> Path:
        return self._files / f"output-{place}"

    def _answer(self, place: int) -> Path:
        return self._files / f"answer-{place}"

    def _await_state(self, places: Sequence[int], state: JobState, failure: str) -> None:
        try:
            wait_until(
                lambda: all(self._board.state(place) >= state for place in places),
                self._check,
                self._timing.patience,
                failure,
            )
        except TimeoutError as error:
            raise JobsRunError(str(error), self._outputs()) from None

    def _check(self) -> None:
        """Raise if a process has ended: none may before phase END."""
        for place, process in enumerate(self._processes):
            if process.poll() is not None:
                output = self._output(place).read_text(errors="replace").strip()
                lines = output.splitlines() or [f"ended with code {process.returncode}"]
                raise JobsRunError(lines[-1].strip(), output[-OUTPUT_TAIL:])

    def _outputs(self) -> str:
        places = range(len(self._processes))
        outputs = (self._output(place).read_text(errors="replace") for place in places)
        return "\n".join(output[-OUTPUT_TAIL // 4 :] for output in outputs if output)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self._check()

    def end(self) -> None:
        """End all processes, also after an error."""
        self._board.phase = Phase.END
        give_up = time.monotonic() + END_TIMEOUT
        for place, process in enumerate(self._processes):
            if place < self._jobs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, give_up - time.monotonic()))
            # A job's workers are in its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._setup.node:
            end_node(self._files / "node")

    # Counters and memory.

    def _over(self, before: Snapshot) -> bool:
        if self._timing.samples is not None:
            taken = sum(self._board.counts()[: self._jobs]) - sum(before.given)
            return taken >= self._timing.samples or time.monotonic() - before.at > STALL_TIMEOUT
        return time.monotonic() - before.at >= self._timing.seconds

    def _roots(self) -> list[int]:
        roots = [process.pid for process in self._processes]
        node = self._node()
        return roots if node is None else [*roots, int(node["pid"])]

    def _family(self) -> Iterator[psutil.Process]:
        """All processes. Listed before the measurement, because that takes time."""
        for pid in self._roots():
            root = psutil.Process(pid)
            yield root
            yield from root.children(recursive=True)

    def _memory(self) -> int:
        self._sleep(MEMORY_INTERVAL)
        return sum(memory_of_tree(pid) for pid in self._roots())

    def _snapshot(self, family: Sequence[psutil.Process]) -> Snapshot:
        at = time.monotonic()
        *given, served = self._board.counts()
        node = self._node()
        prepared = float(sum(given))
        if node is not None:
            batches = sum(group["prepared"] for group in node["groups"])
            # By the mean batch size, because the last batch of an epoch may be smaller.
            prepared = batches * self._samples / -(-self._samples // self._work.batch)
        elif self._setup.serve is not None:
            prepared = float(served)
        cpu, read = 0.0, 0
        for process in family:
            times = process.cpu_times()
            cpu += times.user + times.system + times.children_user + times.children_system
            read += process.io_counters().read_chars
        return Snapshot(at, tuple(given), prepared, cpu, read)

    def _node(self) -> dict[str, Any] | None:
        if not self._setup.node:
            return None
        from penstock.node.client import request_status
        from penstock.node.directory import NodeDirectory

        return request_status(NodeDirectory(self._files / "node"))


def free_ports(count: int) -> tuple[int, ...]:
    """TCP ports of this machine that are not in use."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            sock = held.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            ports.append(int(sock.getsockname()[1]))
    return tuple(ports)


def _delays(answers: Sequence[dict[str, Any]], since: float, until: float) -> dict[str, float]:
    """Median and 99th percentile of the seconds from a batch being ready to a job receiving it.

    Empty if the batches carry no times.
    """
    delays = [
        delay / 1e9
        for answer in answers
        for at, delay in answer["delays"]
        if since <= at / 1e9 <= until
    ]
    if not delays:
        return {}
    delays.sort()
    return {"delay": statistics.median(delays), "delay_99": delays[int(0.99 * (len(delays) - 1))]}
