"""A job of a search with ``share=`` and ``cluster=``: prints its batches and its group, as JSON.

Arguments: folder in which the two jobs wait for each other, number of the machine, epochs, number
of batches after which they wait until the file "go on" is there.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps

SAMPLES, BATCH = 160, 8


def noisy(value: Any, rng: np.random.Generator) -> Any:
    time.sleep(0.0005)
    return np.full(500, value) + rng.random(500), f"sample {int(value)}"


def pipeline() -> ps.Pipeline:
    return ps.from_dataset(np.arange(float(SAMPLES))).map(noisy).batch(BATCH)


def record(batch: Any) -> list[Any]:
    values, texts = batch
    digest = hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8).hexdigest()
    return [digest, list(texts)]


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main() -> None:
    place, number, epochs, pause_after = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    from penstock.node.client import request_status

    def group() -> Any:
        status = request_status()
        return None if status is None or not status["groups"] else status["groups"][0]

    batches: list[Any] = []
    with pipeline().loader(seed=3, share="search", cluster="auto", join="start") as loader:
        for _ in range(epochs):
            for batch in loader:
                batches.append(record(batch))
                del batch
                if len(batches) == pause_after:
                    while len((group() or {}).get("span", {}).get("machines", [])) < 2:
                        time.sleep(0.01)
                    (place / f"paused-{number}").touch()
                    wait_for(place / "go on")
        (place / f"end-{number}").touch()
        wait_for(place / f"end-{1 - number}")
        # A batch may still be on its way. What one job sees as received before this line, the other
        # one sees as sent after it.
        at_end = group()
        (place / f"seen-{number}").touch()
        wait_for(place / f"seen-{1 - number}")
        status = request_status()
    assert status is not None
    found = {"batches": batches, "node": status["pid"], "group": status["groups"][0]}
    print(json.dumps({**found, "at_end": at_end}))


if __name__ == "__main__":
    main()
