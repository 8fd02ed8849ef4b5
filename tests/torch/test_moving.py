"""Worker threads that hold the GIL beside a training loop move to a crew; no batch changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from penstock.engine import build
from penstock.engine.pools.gil_watch import GilWatch
from penstock.operation import ArraySpec, Operation
from penstock.pipeline import Pipeline
from penstock.source import Source
from tests.support.contract import epochs, plain

assert torch  # a training loop may run in this process


class Numbers(Source):
    threadsafe: ClassVar[bool] = True

    def __len__(self) -> int:
        return 60

    def read(self, indices: Any) -> list[Any]:
        return [np.full(3, index, np.float64) for index in indices]

    def fields(self) -> Any:
        return ArraySpec.of((3,), np.float64)

    def identity(self) -> str:
        return "numbers"


@dataclass(frozen=True)
class Noise(Operation):
    random: ClassVar[bool] = True

    def output(self, spec: Any) -> Any:
        return spec

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> float:
        return rng.random()

    def apply(self, value: Any, params: Any) -> Any:
        return value + params


def pipeline() -> Pipeline:
    return Pipeline(Numbers()).map(Noise()).batch(4)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes every look find the GIL held for this share of the time."""

    def find(share: float) -> None:
        monkeypatch.setattr(build, "GilWatch", lambda: GilWatch(lambda: share))

    return find


def test_threads_that_hold_the_gil_become_a_crew(watch: Callable[[float], None]) -> None:
    watch(0.5)
    expected = epochs(pipeline(), 3, workers=0, seed=4)
    with pipeline().loader(workers=2, seed=4) as loader:
        assert ", 2 threads (" in repr(loader)
        found = [[plain(batch) for batch in loader] for _ in range(3)]
        assert found == expected
        assert loader.choice.kind == "crew"
        assert "held the GIL for 50% of the time" in repr(loader)
        assert loader.stats().samples == 180
        assert not any(t.name.startswith("penstock-0") for t in threading.enumerate())


def test_a_checkpoint_after_the_move_resumes_exactly(watch: Callable[[float], None]) -> None:
    watch(0.5)
    expected = epochs(pipeline(), 2, workers=0, seed=4)
    with pipeline().loader(workers=2, seed=4) as loader:
        epoch = iter(loader)
        for _ in range(11):
            next(epoch)
        assert loader.choice.kind == "crew"
        state = loader.state_dict()
    with pipeline().loader(workers=0, seed=4) as again:
        again.load_state_dict(state)
        assert [plain(batch) for batch in again] == expected[0][11:]


def test_threads_that_leave_the_gil_alone_stay(watch: Callable[[float], None]) -> None:
    watch(0.05)
    with pipeline().loader(workers=2) as loader:
        for _ in range(3):
            list(loader)
        assert loader.choice.kind == "threads"


def test_threads_that_were_asked_for_stay(watch: Callable[[float], None]) -> None:
    watch(0.9)
    with pipeline().loader(workers=2, kind="threads") as loader:
        for _ in range(2):
            list(loader)
        assert loader.choice.kind == "threads"


@dataclass(frozen=True)
class Unpicklable(Noise):
    def __reduce__(self) -> Any:
        raise TypeError("no")


def test_a_pipeline_that_cannot_be_pickled_stays(watch: Callable[[float], None]) -> None:
    watch(0.9)
    with Pipeline(Numbers()).map(Unpicklable()).batch(4).loader(workers=2) as loader:
        assert len(list(loader)) == 15
        assert loader.choice.kind == "threads"


def test_a_single_look_does_not_decide() -> None:
    shares = iter([0.9, 0.0, 0.05, 0.0, 0.6])
    looks = GilWatch(lambda: next(shares))
    assert [looks.after(batch) for batch in range(100)] == [None] * 100
    assert looks.over
