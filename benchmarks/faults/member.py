"""The program of a member of a group: takes batches at its own pace and writes a log of them."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.verdict import BatchRecord
from benchmarks.faults.work import NumberedSamples, digest_of, record_batch
from benchmarks.harness.processes import POLL_INTERVAL, die_with_parent

GROUP = "faults"


@dataclass(frozen=True)
class MemberPlan:
    """What a member does.

    It runs ``epochs`` epochs with a step of ``step`` seconds per batch, and ``slower`` times that
    from batch ``slow_from`` on. It leaves after batch ``leave_at``, writes a checkpoint after batch
    ``save_at`` and every ``save_every`` batches, and starts from the checkpoint ``resume``. Batches
    are numbered from its start. It keeps the last ``hold`` batches, and may have ``descriptors``
    files open. Without a ``group`` it shares with nobody. ``options`` are those of its loader.
    """

    work: NumberedSamples
    epochs: int
    step: float
    group: str | None = GROUP
    options: Mapping[str, Any] = field(default_factory=dict)
    slow_from: int | None = None
    slower: float = 1.0
    leave_at: int | None = None
    save_at: int | None = None
    save_every: int | None = None
    resume: str | None = None
    hold: int = 0
    descriptors: int | None = None

    @classmethod
    def from_dict(cls, spec: dict[str, Any]) -> MemberPlan:
        return cls(**{**spec, "work": NumberedSamples(**spec["work"])})

    def saves_at(self, count: int) -> bool:
        """Whether the member writes a checkpoint after its batch number ``count``."""
        return count == self.save_at or bool(self.save_every and count % self.save_every == 0)


@dataclass(frozen=True)
class MemberFiles:
    """Paths of a member's files. The member waits until ``go`` exists, and leaves when ``leave``
    does. ``outcome`` has a line for each epoch."""

    place: Path
    name: str

    @property
    def go(self) -> Path:
        return self.place / f"{self.name}.go"

    @property
    def ready(self) -> Path:
        return self.place / f"{self.name}.ready"

    @property
    def leave(self) -> Path:
        return self.place / f"{self.name}.leave"

    @property
    def outcome(self) -> Path:
        return self.place / f"{self.name}.outcome"

    @property
    def log(self) -> Path:
        return self.place / f"{self.name}.log"

    @property
    def state(self) -> Path:
        return self.place / f"{self.name}.state"

    @property
    def output(self) -> Path:
        return self.place / f"{self.name}.output"


def read_log(path: Path) -> tuple[BatchRecord, ...]:
    """The batches that a member received. The last line of a killed member may be incomplete and
    is skipped."""
    if not path.exists():
        return ()
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return tuple(
        BatchRecord(at, epoch, tuple(indices), digest) for at, epoch, indices, digest in lines
    )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a member: the state of its loader after ``batches`` batches of its log."""

    batches: int
    state: dict[str, Any]

    def write(self, path: Path) -> None:
        # Renamed when complete: this process may be killed as soon as the file exists.
        half = path.with_suffix(".half")
        half.write_text(json.dumps(asdict(self)))
        half.rename(path)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        return cls(**json.loads(path.read_text()))


def count_batches(path: Path) -> int:
    """Number of batches in a log: faster than ``read_log``, for polling."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return 0
    return sum(line.startswith(b"[") for line in lines[:-1])


@dataclass(frozen=True)
class EpochOutcome:
    """What the statistics of a loader said at the end of an epoch: bad samples, and cache hits,
    both since the loader was made."""

    epoch: int
    bad: tuple[int, ...]
    hits: int


def read_outcomes(path: Path) -> list[EpochOutcome]:
    """The outcomes of the epochs that a member has completed."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return [EpochOutcome(epoch, tuple(bad), hits) for epoch, bad, hits in lines]


def run_member(plan: MemberPlan, files: MemberFiles) -> None:
    """Carry out a plan."""
    if plan.descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (plan.descriptors, plan.descriptors))
    shared = {} if plan.group is None else {"share": plan.group}
    loader = plan.work.loader(**shared, **plan.options)
    files.ready.touch()
    while not files.go.exists():
        time.sleep(POLL_INTERVAL)
    if plan.resume is not None:
        loader.load_state_dict(Checkpoint.read(Path(plan.resume)).state)
    held: deque[tuple[str, Any]] = deque(maxlen=plan.hold)
    # Closed also on an error and on Ctrl-C, as a training would do.
    with closing(loader):
        _take_batches(loader, plan, files, held)
    for digest, batch in held:
        if digest_of(batch) != digest:
            raise RuntimeError("a batch has changed while this process kept it")


def _take_batches(
    loader: Any, plan: MemberPlan, files: MemberFiles, held: deque[tuple[str, Any]]
) -> None:
    # Unbuffered: the log must be complete if this process is killed after any batch.
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for count, (epoch, batch) in enumerate(_batches(loader, plan.epochs, files), start=1):
        record = record_batch(time.monotonic(), epoch, batch)
        held.append((record.digest, batch))
        del batch
        os.write(log, (json.dumps(record) + "\n").encode())
        if plan.saves_at(count):
            Checkpoint(count, loader.state_dict()).write(files.state)
        if count == plan.leave_at or files.leave.exists():
            break
        slow = plan.slow_from is not None and count >= plan.slow_from
        time.sleep(plan.step * (plan.slower if slow else 1.0))


def _batches(loader: Any, epochs: int, files: MemberFiles) -> Iterator[tuple[int, Any]]:
    while loader.epoch < epochs:
        epoch = loader.epoch
        for batch in loader:
            yield epoch, batch
            del batch
        stats = loader.stats()
        bad = sorted({sample.index for sample in stats.bad_samples})
        hits = sum(cache.hits for cache in stats.caches)
        with files.outcome.open("a") as out:
            out.write(json.dumps([epoch, bad, hits]) + "\n")


if __name__ == "__main__":
    die_with_parent()
    # A member that hangs is asked where it is.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    spec = json.loads(sys.argv[1])
    run_member(MemberPlan.from_dict(spec["plan"]), MemberFiles(Path(spec["place"]), spec["name"]))
