"""How many samples a worker runs at a time, on a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from penstock.engine.pools.runner import Runner, Work, WorkerInfo
from penstock.engine.slots import Layout
from penstock.keyed import Keys
from penstock.source.source import Source
from penstock.stops.batch import stack
from penstock.stops.road import Road
from penstock.stops.stop import Step, StepContext, Stop, Upstream


class Time:
    now = 0.0


class Numbers(Source):
    """A source that takes ``seconds`` to read a sample."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.group_sizes: list[int] = []

    def __len__(self) -> int:
        return 64

    def read(self, indices: Sequence[int]) -> list[Any]:
        self.group_sizes.append(len(indices))
        Time.now += self.seconds * len(indices)
        return [float(index) for index in indices]


@dataclass(frozen=True)
class Slow(Stop):
    """A stop that takes ``seconds`` to prepare a sample, and prefers four at a time."""

    seconds: float
    preferred_group: ClassVar[int] = 4

    @property
    def name(self) -> str:
        return "slow"

    def step(self, context: StepContext) -> Step:
        def step(keys: Keys, upstream: Upstream) -> list[Any]:
            samples = upstream(keys)
            Time.now += self.seconds * len(samples)
            return samples

        return step


@pytest.mark.parametrize(
    ("read", "prepare", "trial", "groups"),
    [
        (0.0, 1e-3, [8, 2], [4, 4, 2]),
        (0.4e-3, 1e-3, [8, 2], [4, 4, 2]),
        (0.0, 0.1e-3, [10], [10]),
        (1.1e-3, 1e-3, [1] * 10, [1] * 10),
    ],
    ids=["slow to prepare", "some reading", "quick", "slow to read"],
)
def test_samples_run_in_groups_unless_they_wait_for_storage(
    read: float, prepare: float, trial: list[int], groups: list[int]
) -> None:
    source = Numbers(read)
    work = Work(Road(source, (Slow(prepare),), 0), None, stack, "raise", 10)
    runner = Runner(work, WorkerInfo(0, 1, 0, process=False), clock=lambda: Time.now)
    layout, column = Layout.of(0.0, 10), np.empty(10)
    assert layout is not None
    made = []
    for first in (0, 10, 20):
        source.group_sizes.clear()
        runner.rows(Keys(0, list(range(first, first + 10))), [column], layout, 0)
        assert column.tolist() == list(range(first, first + 10))
        made.append(list(source.group_sizes))
    # The cost of a sample is known after the first ten. The second ten are a trial in groups of
    # eight, and no more: decoded photographs of a group are in memory at the same time.
    assert made[1:] == [trial, groups]
