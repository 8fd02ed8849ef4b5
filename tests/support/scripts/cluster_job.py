"""A job with ``cluster=``: prints its batches and where its node found the samples, as JSON.

Arguments: folder of files, rank of two, epochs, folder in which the two jobs wait for each other,
number of epochs after which they wait until the file "go on" is there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps


def first_bytes(sample: Any) -> Any:
    content, number = sample
    return np.frombuffer(content[:4], np.uint8), number


def pipeline(folder: Path) -> ps.Pipeline:
    files = sorted(str(path) for path in folder.iterdir())
    source = ps.from_files(files, list(range(len(files))))
    return source.cache("100MB").map(first_bytes, random=False).batch(8)


def meet(place: Path, rank: int, what: str) -> None:
    """Wait until the other job has come to the same point."""
    (place / f"{what}-{rank}").touch()
    while not (place / f"{what}-{1 - rank}").exists():
        time.sleep(0.01)


def main() -> None:
    folder, rank, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    place, pause_after = Path(sys.argv[4]), int(sys.argv[5])
    from penstock.node.client import request_status

    def machines() -> list[Any]:
        status = request_status()
        return [] if status is None or not status["cluster"] else status["cluster"]["machines"]

    batches = []
    with pipeline(folder).loader(rank=rank, world=2, seed=1, cluster="auto") as loader:
        for _ in range(epochs):
            epoch = []
            for content, numbers in loader:
                assert content[:, 0].tolist() == numbers.tolist()
                epoch.append(numbers.tolist())
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
    [cache] = status["cluster"]["caches"]
    print(json.dumps({"batches": batches, "node": status["pid"], **cache}))


if __name__ == "__main__":
    main()
