"""A job with ``cluster=`` whose samples take a while; prints its batches, and who prepared them.

Arguments: number of samples, seconds that a sample takes, a folder, and "cached" for a pipeline
with a cache. The job writes the file "helped" there when another machine has prepared samples for
it; with a cache, samples take no more time from then on. It ends one epoch after the file "go on"
is there, so that it does not matter how fast the machine is.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps


class Slow:
    """A random map that takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, value: Any, rng: np.random.Generator) -> Any:
        time.sleep(self.seconds)
        return value + rng.random(3)


class SlowUntilHelped(Slow):
    """Takes no time any more when the other machine helps."""

    def __init__(self, seconds: float, place: Path) -> None:
        super().__init__(seconds)
        self.place = place

    def __call__(self, value: Any, rng: np.random.Generator) -> Any:
        if (self.place / "helped").exists():
            self.seconds = 0.0
        return super().__call__(value, rng)


class LoggedNumbers:
    """Numbers. Every read is a line in a log."""

    def __init__(self, samples: int, log: Path) -> None:
        self.samples = samples
        self.log = log

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> float:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        return float(index)


def cached_pipeline(samples: int, seconds: float, place: Path) -> ps.Pipeline:
    numbers = ps.from_dataset(LoggedNumbers(samples, place / "reads"), random=False)
    return numbers.cache("1MB").map(SlowUntilHelped(seconds, place)).batch(16)


def pipeline(samples: int, seconds: float) -> ps.Pipeline:
    numbers = np.arange(samples, dtype=np.float64)
    return ps.from_dataset(numbers).map(Slow(seconds)).batch(16)


def digests(loader: Any) -> list[str]:
    return [batch.tobytes().hex() for batch in loader]


def helpers() -> dict[str, Any]:
    """What other machines have prepared for the group of this job."""
    from penstock.node.client import request_status

    status = request_status()
    groups = [] if status is None else status["groups"]
    found: dict[str, Any] = groups[0]["remote"]["machines"] if groups else {}
    return found


def main() -> None:
    samples, seconds, place = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    batches: list[list[str]] = []
    made = pipeline(samples, seconds)
    if sys.argv[4:] == ["cached"]:
        made = cached_pipeline(samples, seconds, place)
    with made.loader(seed=1, cluster="auto") as loader:
        while not (place / "go on").exists():
            batches.append([])
            for batch in loader:
                batches[-1] += digests([batch])
                if any(machine["tiny_batches"] for machine in helpers().values()):
                    (place / "helped").touch()
        batches.append(digests(loader))
        found = helpers()
        stats = loader.stats()
    elsewhere = {machine.name: machine.samples for machine in stats.machines}
    print(json.dumps({"batches": batches, "helpers": found, "elsewhere": elsewhere}))


if __name__ == "__main__":
    main()
