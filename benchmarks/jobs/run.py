"""One run of several jobs together: starts them, lets all begin at once, counts what all had."""

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
from benchmarks.harness.sameness import Look
from benchmarks.harness.workloads import image_files
from benchmarks.jobs.board import NAP, Board, Phase, Stand, wait_until
from benchmarks.jobs.job import Part, name_of
from benchmarks.jobs.work import SharedPhotos, Way, jobs_of

ENDING = 5.0
"""Seconds that jobs may take to end by themselves."""

LOOKS, BETWEEN = 4, 0.25
"""How often memory is looked at, and the seconds from one look to the next. Jobs go on meanwhile,
but nothing is counted: looking takes time from those who run."""

STOPPED = 60.0
"""Seconds after which a job that has not had so many samples never will."""

KEPT = 4000
"""Characters of what a failed process said that are worth showing."""


class JobsRunError(Exception):
    """A process failed, or got stuck; ``printed`` is the end of what it said."""

    def __init__(self, message: str, printed: str = "") -> None:
        super().__init__(message)
        self.printed = printed


@dataclass(frozen=True)
class Timing:
    """How long is counted: ``seconds``, or until all jobs together had ``samples``."""

    seconds: float
    warm_up: float
    samples: int | None = None
    patience: float = 90.0
    checked: int = 512


@dataclass(frozen=True)
class Reading:
    """How everything stood at a moment."""

    at: float
    given: tuple[int, ...]
    prepared: float
    cpu: float
    read: int


def run_jobs(
    way: Way, python: str, place: Path, work: SharedPhotos, jobs: int, timing: Timing
) -> Run:
    """Run so many jobs of this kind. What ``place`` has stays there for the next run.

    ``rate`` is samples a second of all jobs together; ``cpu`` and ``cpu_prepared`` are CPU seconds
    of all processes for 1000 samples that jobs had, and that were prepared; ``read`` bytes are
    those of all processes while each job had every sample once; ``memory`` is PSS of all processes,
    and ``frameworks`` that of the jobs when they had imported everything and nothing else.
    """
    with tempfile.TemporaryDirectory(prefix="run-", dir=place) as files:
        together = _Together(way, python, Path(files), work, jobs, timing)
        try:
            return together.run()
        finally:
            together.end()


class _Together:
    def __init__(
        self,
        way: Way,
        python: str,
        files: Path,
        work: SharedPhotos,
        jobs: int,
        timing: Timing,
    ) -> None:
        self._way = way
        self._python = python
        self._files = files
        ports = free_ports(4) if way.serve is not None else ()
        self._work = replace(work, jobs=jobs, ports=ports)
        self._jobs = jobs
        self._timing = timing
        self._samples = len(image_files(work.data)[0])
        # The last place is that of a process that serves the others.
        self._board = Board(files / "board", jobs + 1)
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> Run:
        jobs = range(self._jobs)
        for place in jobs:
            self._start(place)
        self._are(jobs, Stand.IMPORTED, "not all jobs had imported what they need")
        frameworks = sum(memory_of_tree(process.pid) for process in self._processes)
        if self._way.serve is not None:
            self._start(self._jobs)
            self._are([self._jobs], Stand.RUNNING, "nobody could be served")
        self._board.phase = Phase.RUN
        self._are(jobs, Stand.RUNNING, "not all jobs had a batch")
        self._sleep(self._timing.warm_up)

        family = list(self._family())
        before = self._reading(family)
        while not self._over(before):
            self._sleep(0.02)
        after = self._reading(family)
        values = self._values(before, after)
        memory = max(self._memory() for _ in range(LOOKS))
        self._board.phase = Phase.LOOK
        self._are(jobs, Stand.LOOKED, "not all jobs could be looked at")
        answers = [json.loads(self._answer(place).read_text()) for place in jobs]
        values.update(memory=float(memory), frameworks=float(frameworks))
        values["first"] = max(answer["first"] for answer in answers)
        values.update(_delays(answers, before.at, after.at))
        look = answers[0]["look"]
        return Run(values, Look(**{**look, "shape": tuple(look["shape"])}))

    def _values(self, before: Reading, after: Reading) -> dict[str, float]:
        each = [now - then for now, then in zip(after.given, before.given, strict=True)]
        if not all(each):
            raise JobsRunError(f"{each.count(0)} of {jobs_of(self._jobs)} came to a stop")
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
        way, serves = self._way, place == self._jobs
        function = way.serve if serves else way.contestant.prepare
        if function is None:
            raise JobsRunError(f"{way.title} has nobody who serves")
        part = Part(
            name_of(function),
            self._work.as_plain(),
            str(self._files / "board"),
            self._jobs + 1,
            place,
            str(self._answer(place)),
            serves=serves,
            stamped=way.stamped,
            checked=0 if place else self._timing.checked,
        )
        with self._said(place).open("wb") as out:
            process = subprocess.Popen(
                [self._python, "-m", "benchmarks.jobs.job", json.dumps(asdict(part))],
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
            # Ended from here; should that fail, it ends by itself.
            "PENSTOCK_NODE_IDLE": "2",
        }
        own = dict(self._way.contestant.environment)
        return process_environment(self._python, self._files, {**node, **own})

    def _said(self, place: int) -> Path:
        return self._files / f"said-{place}"

    def _answer(self, place: int) -> Path:
        return self._files / f"answer-{place}"

    def _are(self, places: Sequence[int], stand: Stand, what: str) -> None:
        try:
            wait_until(
                lambda: all(self._board.stand(place) >= stand for place in places),
                self._check,
                self._timing.patience,
                what,
            )
        except TimeoutError as error:
            raise JobsRunError(str(error), self._last_words()) from None

    def _check(self) -> None:
        """Nobody may end before it is told to."""
        for place, process in enumerate(self._processes):
            if process.poll() is not None:
                said = self._said(place).read_text(errors="replace").strip()
                last = said.splitlines()[-1] if said else f"ended with code {process.returncode}"
                raise JobsRunError(last.strip(), said[-KEPT:])

    def _last_words(self) -> str:
        said = (self._said(place).read_text(errors="replace") for place in range(self._jobs + 1))
        return "\n".join(words[-KEPT // 4 :] for words in said if words)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self._check()

    def end(self) -> None:
        """End everybody, whatever became of the run."""
        self._board.phase = Phase.END
        give_up = time.monotonic() + ENDING
        for place, process in enumerate(self._processes):
            if place < self._jobs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, give_up - time.monotonic()))
            # Workers of a job are in its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._way.node:
            end_node(self._files / "node")

    # Looking.

    def _over(self, before: Reading) -> bool:
        if self._timing.samples is not None:
            had = sum(self._board.counts()[: self._jobs]) - sum(before.given)
            return had >= self._timing.samples or time.monotonic() - before.at > STOPPED
        return time.monotonic() - before.at >= self._timing.seconds

    def _roots(self) -> list[int]:
        roots = [process.pid for process in self._processes]
        node = self._node()
        return roots if node is None else [*roots, int(node["pid"])]

    def _family(self) -> Iterator[psutil.Process]:
        """All processes, looked up before time counts: to find them takes some."""
        for pid in self._roots():
            root = psutil.Process(pid)
            yield root
            yield from root.children(recursive=True)

    def _memory(self) -> int:
        self._sleep(BETWEEN)
        return sum(memory_of_tree(pid) for pid in self._roots())

    def _reading(self, family: Sequence[psutil.Process]) -> Reading:
        at = time.monotonic()
        *given, served = self._board.counts()
        node = self._node()
        prepared = float(sum(given))
        if node is not None:
            batches = sum(group["prepared"] for group in node["groups"])
            # On average: the last batch of an epoch may have fewer samples.
            prepared = batches * self._samples / -(-self._samples // self._work.batch)
        elif self._way.serve is not None:
            prepared = float(served)
        cpu, read = 0.0, 0
        for process in family:
            times = process.cpu_times()
            cpu += times.user + times.system + times.children_user + times.children_system
            read += process.io_counters().read_chars
        return Reading(at, tuple(given), prepared, cpu, read)

    def _node(self) -> dict[str, Any] | None:
        if not self._way.node:
            return None
        from penstock.node.look import look
        from penstock.node.place import Place

        return look(Place(self._files / "node"))


def end_node(directory: Path) -> None:
    """End the node of this directory, and wait until it is gone."""
    from penstock.node.look import stop
    from penstock.node.place import Place

    found = None
    with contextlib.suppress(OSError):
        found = stop(Place(directory))
    if found is None:
        return
    # It is nobody's child, so it may stay a zombie for as long as the system likes.
    give_up = time.monotonic() + ENDING
    with contextlib.suppress(psutil.NoSuchProcess):
        node = psutil.Process(int(found["pid"]))
        while node.status() != psutil.STATUS_ZOMBIE and time.monotonic() < give_up:
            time.sleep(NAP)


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as held:
        found = []
        for _ in range(count):
            sock = held.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            found.append(int(sock.getsockname()[1]))
    return tuple(found)


def _delays(answers: Sequence[dict[str, Any]], since: float, until: float) -> dict[str, float]:
    """Seconds from a batch that is ready to a batch that a job has, where batches say when."""
    found = [
        delay / 1e9
        for answer in answers
        for at, delay in answer["delays"]
        if since <= at / 1e9 <= until
    ]
    if not found:
        return {}
    found.sort()
    return {"delay": statistics.median(found), "delay_99": found[int(0.99 * (len(found) - 1))]}
