"""A job with ``cluster=`` whose samples take a while; prints its batches, and who prepared them.

Arguments: number of samples, seconds that a sample takes, and a folder. The job writes the file
"helped" there when another machine has prepared samples for it. It ends one epoch after the file
"go on" is there, so that it does not matter how fast the machine is.
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
    batches = []
    with pipeline(samples, seconds).loader(seed=1, cluster="auto") as loader:
        while not (place / "go on").exists():
            batches.append(digests(loader))
            if any(machine["tiny_batches"] for machine in helpers().values()):
                (place / "helped").touch()
        batches.append(digests(loader))
        found = helpers()
    print(json.dumps({"batches": batches, "helpers": found}))


if __name__ == "__main__":
    main()
