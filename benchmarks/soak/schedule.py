"""The schedule of a soak: which disturbances happen when, and which jobs run.

Pure functions of the seed, so that a soak can be repeated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

DISTURBANCES = (
    "leave",
    "interrupt",
    "kill",
    "pause",
    "kill-worker",
    "stop-worker",
    "kill-node",
    "fill-disk",
    "damage-in-use",
    "damage-between",
)
"""What happens to a job, a worker, the node or a disk."""

TRAITS = ("resume", "hold", "ranks", "crash", "hang")
"""What some jobs do: resume after a kill, keep batches, be one of two ranks, meet a bad sample."""

KINDS = (*DISTURBANCES, *TRAITS)

PAUSE = 2.5
"""Mean seconds between two disturbances."""

SHORTEST_PAUSE = 0.5
"""Seconds. Two kills of workers in a row could hit the same sample, which is then bad."""

NODE_PAUSE = 20.0
"""Fewest seconds between two kills of the node. A job gives up after 8 nodes in a row that died
before they gave it a batch, and a sample that hangs takes 4 timeouts of 6 s to be found."""

HOLD = 24
"""Batches that a job with the trait "hold" keeps."""

_EVENTS, _JOBS = 1, 2
"""The random streams of a seed."""


@dataclass(frozen=True)
class Disturbance:
    """Something that happens ``at`` a time after the start, and lasts ``seconds``.

    ``pick``, from 0 to 1, chooses whom it happens to among those who are alive then.
    """

    at: float
    kind: str
    pick: float
    seconds: float


@dataclass(frozen=True)
class JobChoice:
    """What the job with a number does: the name of its course, and its traits."""

    course: str
    shared: bool
    hold: int
    rank: int
    step: float


def disturbances(seed: int, seconds: float, without: Collection[str] = ()) -> list[Disturbance]:
    """The disturbances of a soak.

    The node is killed in the first half only, because its memory is followed over the second half.
    """
    rng = np.random.default_rng([seed, _EVENTS])
    kinds = [kind for kind in DISTURBANCES if kind not in without]
    found: list[Disturbance] = []
    at, node_killed = 0.0, float("-inf")
    while kinds:
        at += SHORTEST_PAUSE + rng.exponential(PAUSE - SHORTEST_PAUSE)
        if at >= seconds:
            break
        kind = kinds[rng.integers(len(kinds))]
        pick, lasts = float(rng.random()), float(rng.uniform(0.5, 4.0))
        if kind == "kill-node":
            if at >= seconds / 2 or at < node_killed + NODE_PAUSE:
                continue
            node_killed = at
        found.append(Disturbance(at, kind, pick, lasts))
    return found


def job_choice(
    seed: int, number: int, courses: Sequence[str], without: Collection[str] = ()
) -> JobChoice:
    """The job with this number, of those that a soak starts one after the other."""
    rng = np.random.default_rng([seed, _JOBS, number])
    course = courses[int(rng.integers(len(courses)))]
    holds = rng.random() < 0.2 and "hold" not in without
    return JobChoice(
        course,
        shared=bool(rng.random() < 0.7),
        hold=HOLD if holds else 0,
        rank=int(rng.integers(2)),
        step=float(rng.uniform(0.005, 0.04)),
    )
