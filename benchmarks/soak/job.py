"""A job of a soak: one process after the other, each resumed from the checkpoint of the last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.faults.member import (
    Checkpoint,
    EpochOutcome,
    MemberFiles,
    MemberPlan,
    read_log,
    read_outcomes,
)
from benchmarks.faults.verdict import BatchRecord, Verdict, judge
from benchmarks.faults.work import References
from benchmarks.harness.alone import ROOT


@dataclass(frozen=True)
class JobVerdict:
    """The verdict on a job's batches, and ``defects`` that it does not count."""

    verdict: Verdict
    batches: int
    defects: tuple[str, ...] = ()


class Job:
    """The processes of one job. ``course``: the name of its pipeline."""

    def __init__(
        self,
        name: str,
        course: str,
        plan: MemberPlan,
        place: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.course = course
        self.plan = plan
        self.progress = 0
        """Bytes of log: grows with every batch."""
        self.progress_at = 0.0
        self.stopped = False
        self._place = place
        self._environment = environment
        self._all: list[MemberFiles] = []
        self._cut = False
        self._start(plan)

    def _start(self, plan: MemberPlan) -> None:
        files = MemberFiles(self._place, f"{self.name}-{len(self._all)}")
        files.go.touch()
        spec = {"plan": asdict(plan), "place": str(self._place), "name": files.name}
        with files.output.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.faults.member", json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env=self._environment,
                # Ctrl-C reaches a job and its workers, which are a group of processes.
                start_new_session=True,
            )
        self._all.append(files)
        self._cut = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def files(self) -> MemberFiles:
        """The files of the current process."""
        return self._all[-1]

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def log_bytes(self) -> int:
        return sum(files.log.stat().st_size for files in self._all if files.log.exists())

    # Disturbances.

    def leave(self) -> None:
        self._cut = True
        self.files.leave.touch()

    def interrupt(self) -> None:
        self._cut = True
        if not self.has_ended:
            os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        self._cut = True
        self._process.kill()
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def resume(self) -> bool:
        """Start again from the last checkpoint; false if there is none."""
        saved = [files.state for files in self._all if files.state.exists()]
        if not saved:
            return False
        self._start(replace(self.plan, resume=str(saved[-1])))
        return True

    # The verdict.

    def received(self) -> list[BatchRecord]:
        """All batches: of processes before the last only those that a checkpoint covers."""
        *before, last = self._all
        covered = [
            batch
            for files in before
            if files.state.exists()
            for batch in read_log(files.log)[: Checkpoint.read(files.state).batches]
        ]
        return [*covered, *read_log(last.log)]

    def judge(self, references: References) -> JobVerdict:
        """Judge a job that has ended."""
        received, defects = self.received(), []
        code = self._process.poll()
        if code != 0 and not self._cut:
            output = self.files.output.read_text(errors="replace").strip()
            defects.append(f"ended with {code}; it wrote: {output[-2000:]}")
        ended = code == 0 and not self._cut
        reference = references.of(self.plan.work, self.plan.epochs, self.plan.options)
        verdict = judge(received, reference, ended=ended)
        if not verdict.good:
            defects.append(str(verdict))
        outcomes = read_outcomes(self.files.outcome)
        resumed = len(self._all) > 1
        defects += bad_defects(outcomes, self.plan.work.bad_samples, resumed=resumed)
        return JobVerdict(verdict, len(received), tuple(defects))

    def remove_files(self) -> None:
        for files in self._all:
            for path in self._place.glob(f"{files.name}.*"):
                path.unlink(missing_ok=True)


def bad_defects(
    outcomes: Sequence[EpochOutcome], expected: set[int], *, resumed: bool
) -> list[str]:
    """Whether a process listed other bad samples than it should. ``outcomes``: its epochs.

    A process that resumed may have met the bad samples of its first epoch before.
    """
    if not outcomes:
        return []
    listed, whole = set(outcomes[-1].bad), len(outcomes) > int(resumed)
    if listed == expected or (not whole and listed < expected):
        return []
    return [f"listed the bad samples {sorted(listed)} instead of {sorted(expected)}"]
