"""The last stop of a road writes straight into the batch, which changes no sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import penstock as ps
from penstock.operation import ArraySpec, Operation, Spec, fits
from tests.support.contract import POOLS, Workers

FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Spread(Operation):
    """Makes three copies of a number, in the row if it gets one; ``bad`` numbers fail."""

    bad: tuple[int, ...] = ()
    rows: ClassVar[list[bool]] = []

    def output(self, spec: Spec) -> Spec:
        return ArraySpec((3,), FLOAT32)

    def apply(self, value: Any, params: Any) -> Any:
        return self.apply_to(value, params, None)

    def apply_to(self, value: Any, params: Any, out: NDArray[Any] | None) -> Any:
        if int(value) in self.bad:
            if out is not None:
                out[:] = -1  # a batch must not show the row that a failed sample wrote
            raise ValueError("bad")
        self.rows.append(fits(out, (3,), FLOAT32))
        result = out if out is not None else np.empty(3, np.float32)
        result[:] = value
        return result


@pytest.fixture(autouse=True)
def no_recorded_rows() -> None:
    Spread.rows.clear()


def numbers(make: Callable[[int], Any] = float, count: int = 40) -> Any:
    return ps.from_dataset([make(i) for i in range(count)], random=False)


def images(pipeline: Any, **options: Any) -> list[float]:
    """One number for each sample of all batches; checks that its three copies are equal."""
    found: list[float] = []
    with pipeline.batch(8).loader(shuffle=False, **options) as loader:
        for batch in loader:
            leaf = batch
            while not isinstance(leaf, np.ndarray):
                leaf = leaf["image"] if isinstance(leaf, dict) else leaf[0]
            assert leaf.dtype == FLOAT32
            assert (leaf == leaf[:, :1]).all()
            found += leaf[:, 0].tolist()
    return found


@pytest.mark.parametrize("make", [float, lambda i: (float(i), i), lambda i: {"image": i, "y": i}])
def test_a_last_operation_writes_into_its_row(make: Callable[[int], Any]) -> None:
    assert images(numbers(make).map(Spread()), workers=0) == list(range(40))
    # The first sample shows the layout of batches, so it is copied into its row.
    assert Spread.rows == [False] + [True] * 39


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_rows_hold_the_same_in_every_pool(pool: Workers) -> None:
    pipeline = numbers(lambda i: (float(i), i)).map(Spread())
    assert images(pipeline, **pool._asdict()) == list(range(40))


def test_an_operation_that_is_not_last_gets_no_row() -> None:
    pipeline = numbers().map(Spread()).map(lambda x: x + 1, random=False)
    assert images(pipeline, workers=0) == list(range(1, 41))
    assert not any(Spread.rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_shift_rows_and_lose_nothing(workers: int) -> None:
    bad = (0, 3, 4, 5, 17, 39)
    pipeline = numbers(count=40).map(Spread(bad))
    kept = [float(i) for i in range(40) if i not in bad]
    assert images(pipeline, workers=workers, on_error="skip") == kept


def test_substitutes_have_the_rows_of_the_bad_samples() -> None:
    bad = (1, 2, 20)
    found = images(numbers().map(Spread(bad)), workers=0, on_error="substitute")
    assert [x for i, x in enumerate(found) if i not in bad] == [
        float(i) for i in range(40) if i not in bad
    ]
    assert all(found[i] not in bad for i in bad)


def test_two_epochs_in_the_same_slots_do_not_mix() -> None:
    with numbers().map(Spread()).batch(8).loader(workers=2, seed=1) as loader:
        for _ in range(3):
            seen = np.concatenate([batch[:, 0].copy() for batch in loader])
            assert sorted(seen.tolist()) == [float(i) for i in range(40)]
