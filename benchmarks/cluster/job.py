"""The program of one rank: takes batches, writes a log of them, and stops at gates."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.work import CutPhotos
from benchmarks.faults.work import record_batch
from benchmarks.harness.processes import POLL_INTERVAL, die_with_parent


@dataclass(frozen=True)
class RankPlan:
    """What a rank does: ``epochs`` epochs, with a step of ``step`` seconds after each batch from
    batch ``step_from`` on.

    ``cluster``: whether its loader has ``cluster="auto"``. After as many batches as each of
    ``gates`` says it waits for the benchmark.
    """

    work: CutPhotos
    world: int
    epochs: int
    step: float
    cluster: bool
    step_from: int = 0
    gates: tuple[int, ...] = ()

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankPlan:
        plain = json.loads(text)
        plain.update(work=CutPhotos(**plain["work"]), gates=tuple(plain["gates"]))
        return cls(**plain)


@dataclass(frozen=True)
class RankFiles:
    """Paths of the files of a rank's host."""

    place: Path

    @property
    def runtime(self) -> Path:
        """The runtime directory of its node."""
        return self.place / "node"

    @property
    def cache(self) -> Path:
        """The directory of its caches on disk."""
        return self.place / "cache"

    @property
    def ledger(self) -> Path:
        return self.place / "ledger"

    @property
    def log(self) -> Path:
        return self.place / "log"

    @property
    def output(self) -> Path:
        return self.place / "output"

    def reached(self, gate: int) -> Path:
        """Exists when the rank has reached a gate."""
        return self.place / f"reached-{gate}"

    def opened(self, gate: int) -> Path:
        """Exists when the rank may pass a gate."""
        return self.place / f"opened-{gate}"


def run_rank(plan: RankPlan, rank: int, files: RankFiles) -> None:
    cluster = {"cluster": "auto"} if plan.cluster else {"workers": 2}
    loader = plan.work.loader(str(files.ledger), rank=rank, world=plan.world, **cluster)
    # Unbuffered: the log must be complete if this process is killed after any batch.
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with loader:
        for count, (epoch, batch) in enumerate(_batches(loader, plan.epochs), start=1):
            record = record_batch(time.monotonic(), epoch, batch)
            del batch
            os.write(log, (json.dumps(record) + "\n").encode())
            if count > plan.step_from:
                time.sleep(plan.step)
            if count in plan.gates:
                _wait_at(count, files)


def _batches(loader: Any, epochs: int) -> Iterator[tuple[int, Any]]:
    while loader.epoch < epochs:
        epoch = loader.epoch
        for batch in loader:
            yield epoch, batch
            del batch


def _wait_at(gate: int, files: RankFiles) -> None:
    files.reached(gate).touch()
    while not files.opened(gate).exists():
        time.sleep(POLL_INTERVAL)


if __name__ == "__main__":
    die_with_parent()
    run_rank(RankPlan.from_json(sys.argv[1]), int(sys.argv[2]), RankFiles(Path(sys.argv[3])))
