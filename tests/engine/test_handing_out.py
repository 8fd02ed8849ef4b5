"""What the thread of the training loop does for a batch: nothing for each of its pieces."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.open_batch import OpenBatch, Summary
from penstock.engine.pools.runner import TaskReport
from penstock.engine.schedule import Piece, Schedule
from penstock.order.plan import BatchKeys

ROWS = 64


def counted_calls(monkeypatch: pytest.MonkeyPatch, piece: int) -> list[int]:
    """Python calls of each hand-out of a loader whose tasks have ``piece`` samples."""
    calls: list[int] = []
    hand_out = Engine._hand_out

    def counted(self: Engine, batch: OpenBatch) -> Any:
        count = 0

        def count_call(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            return hand_out(self, batch)
        finally:
            sys.setprofile(None)
            calls.append(count)

    monkeypatch.setattr(Engine, "_hand_out", counted)
    monkeypatch.setattr(Schedule, "piece_size", lambda self, rows: min(piece, rows))
    data = [(np.full(3, n), f"sample {n}") for n in range(4 * ROWS)]
    with (
        ps.from_dataset(data, random=False).batch(ROWS).loader(kind="threads", workers=2) as loader
    ):
        assert sum(len(names) for _, names in loader) == len(data)
        assert loader.stats().stages[0].samples == len(data)
    return calls


def test_handing_out_costs_the_same_for_any_number_of_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = counted_calls(monkeypatch, 1)
    monkeypatch.undo()
    few = counted_calls(monkeypatch, ROWS)
    assert many == few


def finished(*reports: tuple[int, TaskReport]) -> OpenBatch:
    batch = OpenBatch(BatchKeys(0, 0, np.arange(8), None), "whole")
    for first, report in reports:
        batch.add_report(Piece(first, "rows", 0, first, report.rows), report)
    batch.finish()
    return batch


def test_reports_are_added_up_in_the_order_of_rows() -> None:
    second = TaskReport(2, 2, 0.5, [[2], [0.25], 7, [0], [2], 1], [(0, 5, 9)], objects={1: ["c"]})
    first = TaskReport(
        4, 4, 0.25, [[4], [0.5], 3, [1], [3], 0], [(0, 2, 8)], objects={1: ["a", "b"]}
    )
    batch = finished((4, second), (0, first))
    assert batch.complete
    assert batch.summary == Summary(
        6,
        6,
        0.75,
        [[6], [0.75], 10, [1], [5], 1],
        [(0, 2, 8), (0, 5, 9)],
        {1: ["a", "b", "c"]},
    )
    assert batch.offers() == [(0, 2, 8), (0, 5, 9)]


def test_bad_samples_of_a_finished_batch_are_listed_once() -> None:
    batch = finished((0, TaskReport(1, bad=[(3, "three", "source", "broken")])))
    assert [(bad.index, bad.name, bad.stage, bad.error) for bad in batch.bad] == [
        (3, "three", "source", "broken")
    ]


def test_keys_of_a_probe_are_few() -> None:
    planned = BatchKeys(2, 0, np.arange(500), np.ones(500, np.int64))
    probe = OpenBatch(planned, "probe")
    assert probe.rows == len(probe.keys) == len(probe.keys.replicas or ()) == 64
    assert OpenBatch(planned, "rows").rows == 500
