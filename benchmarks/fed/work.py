"""The work of the race: which samples the trainers on all hosts take, and how they log them."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["decoded", "cached"]
KINDS: tuple[Kind, ...] = ("decoded", "cached")


@dataclass(frozen=True)
class FedWork:
    """What the trainers of all hosts do together.

    ``kind``: ``"decoded"`` photographs, cropped to 224 x 224, in uint8, from files that the page
    cache has; or ``"cached"``, the first ``size`` bytes of each file, from memory after the first
    epoch. There are ``samples`` samples: the files are repeated. ``workers``: of each host.
    ``cache``: the budget of Penstock's cache on each host.
    """

    data: str
    kind: Kind
    samples: int
    size: int
    batch: int
    epochs: int
    workers: int
    world: int
    cache: str = "4GB"

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FedWork:
        return cls(**json.loads(text))

    def paths(self) -> list[str]:
        """The file of each sample. A sample's label is its number."""
        files = sorted(str(path) for path in Path(self.data).rglob("*.jpg"))
        return [files[number % len(files)] for number in range(self.samples)]


class TakenBatch(NamedTuple):
    """A batch in the log of a trainer: when it was taken, and the numbers of its samples."""

    at: float
    numbers: list[int]


class TrainerLog:
    """Writes the log of one trainer. It is complete after every batch."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def taken(self, images: Any, numbers: Iterable[Any]) -> None:
        # Every page of the batch is read, as a training step would.
        images.reshape(-1)[::4096].max()
        line = json.dumps([time.monotonic(), [int(number) for number in numbers]]) + "\n"
        os.write(self._file, line.encode())


def read_log(path: Path) -> list[TakenBatch]:
    """The batches in a log. A last line that is not complete is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [TakenBatch(*json.loads(line)) for line in lines]


@dataclass(frozen=True)
class FedOutcome:
    """One run. ``rate``: samples per second while all trainers are busy. ``lost`` and
    ``repeated``: samples that came too seldom or too often over all epochs."""

    rate: float
    first: float
    lost: int
    repeated: int


def judge(work: FedWork, started: float, logs: Sequence[Sequence[TakenBatch]]) -> FedOutcome:
    """The outcome of a run from the logs of all trainers.

    The rate is measured while all trainers are busy: from the end of the first epoch of the last of
    them until the first of them ends. It is 0 if there is no such time.
    """
    times = Counter(number for log in logs for batch in log for number in batch.numbers)
    lost = sum(max(0, work.epochs - times[number]) for number in range(work.samples))
    repeated = sum(max(0, count - work.epochs) for count in times.values())
    if not all(logs):
        return FedOutcome(0.0, 0.0, lost, repeated)
    since = max(log[len(log) // work.epochs].at for log in logs)
    until = min(log[-1].at for log in logs)
    taken = [batch for log in logs for batch in log if since < batch.at <= until]
    samples = sum(len(batch.numbers) for batch in taken)
    rate = samples / (until - since) if until > since else 0.0
    return FedOutcome(rate, min(log[0].at for log in logs) - started, lost, repeated)
