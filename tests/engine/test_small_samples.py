"""Small samples: tensors that are written together, and the bytes that are counted for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.pools.runner import LayoutChanged, Runner, Work, WorkerInfo
from penstock.engine.slots import Layout
from penstock.keyed import Keys
from penstock.source.dataset import DatasetSource
from penstock.stops.road import Road

COLUMN = torch.arange(12.0).reshape(4, 3)


def rows_of(samples: list[Any]) -> tuple[list[Any], int]:
    """The columns that a worker has written for these samples, and the bytes it has counted."""
    work = Work(
        Road(DatasetSource(samples, random=False), (), 0), None, list, "raise", len(samples)
    )
    layout = Layout.of(samples[0], len(samples))
    assert layout is not None
    columns = layout.new_columns(len(samples))
    runner = Runner(work, WorkerInfo(0, 1, 0, process=True))
    runner._recent.append((1e-6, 0.0))  # so that they run as one group
    report = runner.rows(Keys(0, list(range(len(samples)))), columns, layout, 0)
    return [None if column is None else column.tolist() for column in columns], report.tally[2]


@pytest.mark.parametrize(
    ("samples", "values", "nbytes"),
    [
        (list(COLUMN), [COLUMN.tolist()], 48),
        (list(COLUMN.T), [COLUMN.T.tolist()], 48),
        (list(COLUMN[:, 0]), [COLUMN[:, 0].tolist()], 16),
        ([(row, 1) for row in COLUMN], [COLUMN.tolist(), [1] * 4], 48),
        (list(np.arange(4, dtype=np.float32)), [[0.0, 1.0, 2.0, 3.0]], 16),
        ([b"a", b"bcd"], [None], 4),
        ([(b"a", np.int16(3)), (b"bcd", np.int16(4))], [None, [3, 4]], 8),
        ([1.0, 2.0], [[1.0, 2.0]], 0),
    ],
)
def test_rows_have_the_values_of_samples_and_their_bytes_are_counted(
    samples: list[Any], values: list[Any], nbytes: int
) -> None:
    assert rows_of(samples) == (values, nbytes)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(4),
        torch.zeros(3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(3), requires_grad=False),
        torch.zeros(3, device="meta"),
        "text",
    ],
)
def test_tensors_that_are_not_all_alike_are_not_stacked(other: Any) -> None:
    with pytest.raises(LayoutChanged):
        rows_of([torch.ones(3), other])
