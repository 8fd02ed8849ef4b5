"""A batch whose layout changes is prepared again as a whole, while old pieces of it still run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.pools.runner import LayoutChanged, Runner, Work, WorkerInfo
from penstock.engine.slots import Layout
from penstock.keyed import Keys


def wait_for(file: Path) -> None:
    """Wait until the other worker has come there. If the file's piece waits behind this one, for
    the same worker, it never would: then the test says nothing, but it does not fail."""
    limit = time.monotonic() + 20
    while not file.exists() and time.monotonic() < limit:
        time.sleep(0.01)


class ChangesLayout:
    """Sample 9 has another type. Sample 15 is held back until it is prepared for a second time."""

    def __init__(self, place: Path) -> None:
        self._first, self._again = place / "first", place / "again"

    def __call__(self, value: Any) -> Any:
        number = int(value)
        if number == 15:
            try:
                self._first.touch(exist_ok=False)
            except FileExistsError:
                self._again.touch()
            else:
                wait_for(self._again)
                # Now the batch is being packed; this piece is to write its row after that. If it
                # writes too early, the test says nothing, but it does not fail.
                time.sleep(0.3)
        if number == 9:
            wait_for(self._first)
        return np.full(1024, number, np.float64 if number == 9 else np.float32)


def test_an_old_piece_does_not_write_into_a_batch_that_is_prepared_again(tmp_path: Path) -> None:
    pipeline = (
        ps.from_dataset(list(range(16)), random=False)
        .map(ChangesLayout(tmp_path), random=False, version="1")
        .batch(8)
    )
    two: Any = {"workers": 2, "kind": "processes", "tiny_batch": 2}
    with pipeline.loader(**two, shuffle=False) as loader:
        rows = [row for batch in loader for row in batch]
    assert [set(row.tolist()) for row in rows] == [{float(number)} for number in range(16)]


def test_batches_whose_shapes_change_all_the_time_are_prepared_once() -> None:
    calls: list[int] = []

    def ragged(number: int) -> Any:
        calls.append(number)
        return np.full(3 + number % 5, number)

    pipeline = ps.from_dataset(np.arange(60)).map(ragged, random=False).batch(1)
    with pipeline.loader(workers=0, shuffle=False) as loader:
        assert [batch[0].tolist() for batch in loader] == [[i] * (3 + i % 5) for i in range(60)]
        first = len(calls)
        assert len(list(loader)) == 60
    assert first < 70  # until that is noticed, some are prepared twice
    assert len(calls) == first + 60


def test_samples_that_lie_in_rows_are_not_kept_for_the_next_task() -> None:
    # By then another batch may have the memory of these rows.
    images = [(np.full((4, 4, 3), number, np.uint8), 1.5 if number else 1) for number in range(2)]
    pipeline = ps.from_dataset(images).map(ps.image.random_flip(), on=0).batch(2)
    work = Work(pipeline.road(0), None, list, "raise", 2)
    runner = Runner(work, WorkerInfo(0, 1, 0, process=True))
    runner._recent.append((1e-6, 0.0))  # so that they run as one group
    layout = Layout.of(images[0], 2)
    assert layout is not None
    columns, keys = layout.new_columns(2), Keys(0, [0, 1])
    with pytest.raises(LayoutChanged):
        runner.rows(keys, columns, layout, 0)
    for column in columns:
        if column is not None:
            column[:] = 99
    batch, _ = runner.whole(keys)
    assert [(image.max(), label) for image, label in batch] == [(0, 1), (1, 1.5)]
