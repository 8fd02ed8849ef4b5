"""Training runs on a cache that is damaged between runs and between epochs. Run as a program.

Arguments: directory, kind of workers, seed, rounds. Prints "right" after each round.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps

SAMPLES = 40
IN_USE = ("data.mdb", "state.json", "guard")
"""Not the file of locks: whoever waits for a lock that was overwritten may wait for ever."""
AT_REST = (*IN_USE, "lock.mdb")


def sample(value: Any) -> Any:
    # Small ones share pages, large ones have pages to themselves.
    return np.full(30 if value % 2 else 9_000, value, np.uint8), int(value)


def flip(path: Path, rng: random.Random) -> None:
    with open(path, "r+b") as file:
        nbytes = os.path.getsize(path)
        for _ in range(rng.choice((1, 30, 300)) if nbytes else 0):
            file.seek(rng.randrange(nbytes))
            file.write(bytes([rng.randrange(256)]))


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice((0, 1, 4096, rng.randrange(os.path.getsize(path) + 1))))


def zero(path: Path, rng: random.Random) -> None:
    nbytes = os.path.getsize(path)
    start = rng.choice((0, rng.randrange(nbytes + 1)))
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(bytes(rng.randrange(nbytes - start + 1)))


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def overwrite(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.choice((0, 100, 10_000, 200_000))))


def replace(path: Path, rng: random.Random) -> None:
    other = path.with_name("other")
    other.write_bytes(rng.randbytes(10_000))
    other.replace(path)


def directory(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def restore(path: Path, rng: random.Random) -> None:
    """An older copy of the same file, written over it."""
    old = path.parent.parent.parent / f"old {path.name}"
    if old.exists():
        path.write_bytes(old.read_bytes())


DAMAGE: list[Callable[[Path, random.Random], None]] = [
    flip,
    flip,
    truncate,
    zero,
    delete,
    overwrite,
    replace,
    directory,
    restore,
]


def damage(place: Path, rng: random.Random, names: tuple[str, ...]) -> str:
    path = place / rng.choice(names)
    if not path.is_file():
        return "nothing"
    change = rng.choice(DAMAGE)
    wait_for_next_tick(path)
    change(path, rng)
    return f"{change.__name__} {path.name}"


def wait_for_next_tick(path: Path) -> None:
    """Return when a change of the file is certain to have another time than its last one."""
    other = path.parent.parent.parent / "clock"
    while True:
        other.write_bytes(b"")
        if other.stat().st_ctime_ns > path.stat().st_ctime_ns:
            return


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(root: Path, kind: Any, seed: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    # A worker that publishes the status of the loader reads the cache, at any time.
    os.environ["PENSTOCK_LIVE"] = "0"
    rng = random.Random(seed)
    pipeline = (
        ps.from_dataset(np.arange(SAMPLES), random=False, version="1")
        .map(sample, random=False, version="1")
        .cache("1MB", where=str(root / "kept"))
        .batch(4, collate=list)
    )
    for number in range(rounds):
        done: list[str] = []
        with pipeline.loader(seed=number, workers=2, kind=kind) as loader:
            for epoch in range(3):
                seen = [(int(row[0][0]), len(row[0]), row[1]) for batch in loader for row in batch]
                expected = [(i, 30 if i % 2 else 9_000, i) for i in range(SAMPLES)]
                assert sorted(seen) == expected, (number, epoch, done)
                (place,) = (root / "kept").iterdir()
                if epoch == 0 and rng.random() < 0.3 and (place / "data.mdb").is_file():
                    shutil.copy(place / "data.mdb", root / "old data.mdb")
                if epoch < 2 and rng.random() < 0.7:
                    # Between two accesses: no check can help against damage during one.
                    while loader.queue().unfinished:
                        time.sleep(0.01)
                    loader.stats()  # waits for the worker that still admits samples
                    done.append("in use: " + damage(place, rng, IN_USE))
                    report(done[-1])
        while rng.random() < 0.6:
            report("at rest: " + damage(place, rng, AT_REST))
        report("right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
