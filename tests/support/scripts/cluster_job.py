"""A job with ``cluster=``: prints its batches and where its node found the samples, as JSON.

Arguments: folder of files, rank of two, epochs, folder in which the two jobs wait for each other,
number of epochs after which they wait until the file "go on" is there, place of the cache, seed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps

REUSE = 2


class Files:
    """The files of a folder. Every read is a line in a log beside the folder."""

    def __init__(self, folder: Path) -> None:
        self.log = folder.with_name("reads")
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        note(self.log, index)
        return self.paths[index].read_bytes(), index


class Augment:
    """The first bytes of a file, and a random number. Every call is a line in a log."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self, sample: Any) -> Any:
        content, number = sample
        drawn = np.random.random()
        note(self.log, f"{number} {drawn}")
        return np.frombuffer(content[:4], np.uint8), number, drawn


def jitter(sample: Any) -> Any:
    pixels, number, drawn = sample
    return pixels, number, drawn, np.random.random()


def note(log: Path, line: object) -> None:
    with open(log, "a") as file:
        file.write(f"{line}\n")


def pipeline(folder: Path, where: str = "memory") -> ps.Pipeline:
    source = ps.from_dataset(Files(folder), random=False, version="1").cache("100MB", where=where)
    augment = Augment(folder.with_name("prepared"))
    kept = source.map(augment, random=True, version="1").refurbish(reuse=REUSE)
    return kept.map(jitter, random=True).batch(8)


def meet(place: Path, rank: int, what: str) -> None:
    """Wait until the other job has come to the same point."""
    (place / f"{what}-{rank}").touch()
    while not (place / f"{what}-{1 - rank}").exists():
        time.sleep(0.01)


def main() -> None:
    folder, rank, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    place, pause_after = Path(sys.argv[4]), int(sys.argv[5])
    where, seed = sys.argv[6], int(sys.argv[7])
    from penstock.node.client import request_status

    def machines() -> list[Any]:
        status = request_status()
        return [] if status is None or not status["cluster"] else status["cluster"]["machines"]

    batches = []
    road = pipeline(folder, where)
    with road.loader(rank=rank, world=2, seed=seed, cluster="auto") as loader:
        for _ in range(epochs):
            epoch = []
            for content, numbers, *drawn in loader:
                assert content[:, 0].tolist() == numbers.tolist()
                epoch.append([numbers.tolist(), *(column.tolist() for column in drawn)])
            batches.append(epoch)
            # A machine may be known before its room is, and nothing is asked of it then.
            while len([one for one in machines() if one["cache_bytes"]]) < 2:
                time.sleep(0.01)
            meet(place, rank, f"epoch {len(batches)}")
            if len(batches) == pause_after:
                while not (place / "go on").exists():
                    time.sleep(0.01)
        meet(place, rank, "end")
        status = request_status()
    assert status is not None
    caches = {
        "refurbish" if cache["versions"] else "cache": cache
        for cache in status["cluster"]["caches"]
    }
    print(json.dumps({"batches": batches, "node": status["pid"], **caches}))


if __name__ == "__main__":
    main()
