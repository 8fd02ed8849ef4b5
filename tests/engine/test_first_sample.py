"""The sample that shows the layout of batches is prepared once, as the first row of its batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import penstock as ps
from penstock.engine.schedule import Schedule
from penstock.source.source import Source

SAMPLES = 10


class Logged(Source):
    """Samples with a text field, whose shape is not known beforehand. Logs every read."""

    threadsafe = True
    runs_user_code = True

    def __init__(self, log: Path, bad: int = -1) -> None:
        self.log = log
        self.bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def read(self, indices: Sequence[int]) -> list[Any]:
        with open(self.log, "a") as file:
            file.writelines(f"{index}\n" for index in indices)
        if self.bad in indices:
            raise ValueError("a bad sample")
        return [(np.full(3, index, np.uint8), f"sample {index}", index) for index in indices]

    def name(self, index: int) -> str:
        return f"sample {index}"

    def identity(self) -> str:
        return "logged"


def reads(log: Path) -> Counter[int]:
    return Counter(map(int, log.read_text().split()))


def check(batches: list[Any], expected: Sequence[int]) -> None:
    rows = [
        row
        for pixels, names, numbers in batches
        for row in zip(pixels, names, numbers, strict=True)
    ]
    assert [number for _, _, number in rows] == list(expected)
    for pixels, name, number in rows:
        assert (pixels.tolist(), name) == ([number] * 3, f"sample {number}")


@pytest.mark.parametrize(
    ("workers", "kind"), [(0, "auto"), (2, "threads"), (1, "processes"), (2, "crew")]
)
@pytest.mark.parametrize("cached", [True, False])
def test_every_sample_is_read_and_counted_once(
    tmp_path: Path,
    workers: int,
    kind: Literal["auto", "threads", "processes", "crew"],
    cached: bool,
) -> None:
    pipeline = ps.Pipeline(Logged(tmp_path / "log"))
    if cached:
        pipeline = pipeline.cache("1MB")
    with pipeline.batch(4).loader(workers=workers, kind=kind, shuffle=False) as loader:
        check([tuple(map(list, batch)) for batch in loader], range(SAMPLES))
        stats = loader.stats()
        assert stats.stages[0].samples == SAMPLES
        if cached:
            assert (stats.caches[0].hits, stats.caches[0].misses) == (0, SAMPLES)
            assert stats.caches[0].admitted == SAMPLES
            check([tuple(map(list, batch)) for batch in loader], range(SAMPLES))
            assert loader.stats().caches[0].hits == SAMPLES
    if cached:  # without a cache, the next epoch begins early
        assert reads(tmp_path / "log") == Counter(range(SAMPLES))


@pytest.mark.parametrize("bad", [0, 3])
def test_a_bad_sample_is_skipped_and_reported_once(tmp_path: Path, bad: int) -> None:
    pipeline = ps.Pipeline(Logged(tmp_path / "log", bad)).cache("1MB").batch(4)
    with pipeline.loader(workers=0, shuffle=False, on_error="skip") as loader:
        expected = [index for index in range(SAMPLES) if index != bad]
        check([tuple(map(list, batch)) for batch in loader], expected)
        assert [sample.index for sample in loader.stats().bad_samples] == [bad]
        assert loader.stats().caches[0].admitted == SAMPLES - 1


def test_a_loop_that_begins_again_after_the_first_sample_forgets_it(tmp_path: Path) -> None:
    pipeline = ps.Pipeline(Logged(tmp_path / "log")).cache("1MB").batch(4)
    with pipeline.loader(workers=0, shuffle=False) as loader:
        next(iter(loader))
        check([tuple(map(list, batch)) for batch in loader], range(SAMPLES))
        assert loader.stats().caches[0].admitted == SAMPLES


def test_batches_of_one_sample_are_complete(tmp_path: Path) -> None:
    pipeline = ps.Pipeline(Logged(tmp_path / "log")).batch(1)
    with pipeline.loader(workers=2, kind="threads", shuffle=False) as loader:
        check([tuple(map(list, batch)) for batch in loader], range(SAMPLES))


def test_rows_that_are_done_are_not_dealt() -> None:
    schedule = Schedule(1)
    schedule.open(0, 4, first=1)
    piece = schedule.take(0)
    assert piece is not None
    assert piece.first == 1
