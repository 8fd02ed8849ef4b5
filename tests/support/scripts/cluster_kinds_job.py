"""A job with ``cluster=`` that runs pipelines of several kinds, one after the other.

Arguments: folder, rank of two. Prints the batches of each pipeline as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import penstock as ps

SAMPLES, EPOCHS = 24, 2


class Logged:
    """Numbers. Every read is a line in a log."""

    def __init__(self, log: Path, first: int) -> None:
        self.log = log
        self.first = first

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        if not 0 <= index < SAMPLES:
            raise IndexError(index)
        with open(self.log, "a") as file:
            file.write(f"{self.first + index}\n")
        return float(self.first + index)


def pipelines(place: Path) -> dict[str, ps.Pipeline]:
    """By kind. The reads of each are in the file of this name."""

    def numbers(kind: str, first: int = 0) -> ps.Pipeline:
        data = Logged(place / kind, first)
        return ps.from_dataset(data, version=f"{kind} {first}", random=False)

    two = {"first": (numbers("mix"), 0.5), "second": (numbers("mix", SAMPLES), 0.5)}
    lengths = [1 + index % 5 for index in range(SAMPLES)]
    return {
        "mix": ps.mix(two).cache("1MB").batch(4),
        "echo": numbers("echo").cache("1MB").echo(2).batch(4),
        "lengths": numbers("lengths").cache("1MB").batch(tokens=12, by=lengths),
    }


def wait_for_other(place: Path, rank: int, name: str) -> None:
    (place / f"{name} {rank}").touch()
    while not (place / f"{name} {1 - rank}").exists():
        time.sleep(0.005)


def main(place: Path, rank: int) -> None:
    found: dict[str, Any] = {}
    for kind, pipeline in pipelines(place).items():
        with pipeline.loader(rank=rank, world=2, seed=1, cluster="auto") as loader:
            batches = []
            for epoch in range(EPOCHS):
                # One that runs ahead could make two batches wait for each other.
                wait_for_other(place, rank, f"{kind} {epoch}")
                batches.append([batch.tolist() for batch in loader])
            found[kind] = batches
            wait_for_other(place, rank, f"{kind} end")
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
