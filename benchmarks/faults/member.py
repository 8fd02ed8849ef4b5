"""The program of a member of a group: takes batches at its own pace and writes a log of them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.faults.verdict import BatchRecord
from benchmarks.faults.work import NumberedSamples, record_batch
from benchmarks.harness.processes import POLL_INTERVAL, die_with_parent

GROUP = "faults"

SAVED = "saved"
"""The line in a log after the last batch that the checkpoint covers."""


@dataclass(frozen=True)
class MemberPlan:
    """What a member does.

    It runs ``epochs`` epochs with a step of ``step`` seconds per batch, and ``slower`` times that
    from batch ``slow_from`` on. It leaves after batch ``leave_at``, writes a checkpoint after batch
    ``save_at``, and starts from the checkpoint ``resume``. Batches are numbered from its start.
    """

    samples: int
    batch: int
    kind: Literal["threads", "processes"]
    epochs: int
    step: float
    lag: Literal["detach", "wait"] = "detach"
    slow_from: int | None = None
    slower: float = 1.0
    leave_at: int | None = None
    save_at: int | None = None
    resume: str | None = None

    @property
    def work(self) -> NumberedSamples:
        return NumberedSamples(self.samples, self.batch, self.kind)


@dataclass(frozen=True)
class MemberFiles:
    """Paths of a member's files. The member waits until ``go`` exists."""

    place: Path
    name: str

    @property
    def go(self) -> Path:
        return self.place / f"{self.name}.go"

    @property
    def ready(self) -> Path:
        return self.place / f"{self.name}.ready"

    @property
    def log(self) -> Path:
        return self.place / f"{self.name}.log"

    @property
    def state(self) -> Path:
        return self.place / f"{self.name}.state"

    @property
    def output(self) -> Path:
        return self.place / f"{self.name}.output"


@dataclass(frozen=True)
class MemberLog:
    """Batches that a member received. ``saved``: how many of them its checkpoint covers."""

    batches: tuple[BatchRecord, ...]
    saved: int | None = None


def read_log(path: Path) -> MemberLog:
    """Read a member's log. The last line of a killed member may be incomplete and is skipped."""
    if not path.exists():
        return MemberLog(())
    received: list[BatchRecord] = []
    saved = None
    for line in path.read_text().split("\n")[:-1]:
        if line == SAVED:
            saved = len(received)
            continue
        at, epoch, indices, digest = json.loads(line)
        received.append(BatchRecord(at, epoch, tuple(indices), digest))
    return MemberLog(tuple(received), saved)


def count_batches(path: Path) -> int:
    """Number of batches in a log: faster than ``read_log``, for polling."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return 0
    return sum(line.startswith(b"[") for line in lines[:-1])


def run_member(plan: MemberPlan, files: MemberFiles) -> None:
    """Carry out a plan."""
    loader = plan.work.loader(share=GROUP, lag=plan.lag)
    files.ready.touch()
    while not files.go.exists():
        time.sleep(POLL_INTERVAL)
    if plan.resume is not None:
        loader.load_state_dict(json.loads(Path(plan.resume).read_text()))
    # Unbuffered: the log must be complete if this process is killed after any batch.
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for count, (epoch, batch) in enumerate(_batches(loader, plan.epochs), start=1):
        record = record_batch(time.monotonic(), epoch, batch)
        del batch
        os.write(log, (json.dumps(record) + "\n").encode())
        if count == plan.save_at:
            # Renamed when complete: this process may be killed as soon as the file exists.
            half = files.state.with_suffix(".half")
            half.write_text(json.dumps(loader.state_dict()))
            os.write(log, f"{SAVED}\n".encode())
            half.rename(files.state)
        if count == plan.leave_at:
            break
        slow = plan.slow_from is not None and count >= plan.slow_from
        time.sleep(plan.step * (plan.slower if slow else 1.0))
    loader.close()


def _batches(loader: Any, epochs: int) -> Iterator[tuple[int, Any]]:
    while loader.epoch < epochs:
        epoch = loader.epoch
        for batch in loader:
            yield epoch, batch
            del batch


if __name__ == "__main__":
    die_with_parent()
    spec = json.loads(sys.argv[1])
    run_member(MemberPlan(**spec["plan"]), MemberFiles(Path(spec["place"]), spec["name"]))
