"""The benchmark ``shards`` and the simulation of reservoirs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks import shards
from benchmarks.simulate import reservoir
from tests.support.jpegs import encode, picture


def test_every_kind_of_data_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(3):
            (tmp_path / label / f"{number}.jpg").write_bytes(encode(picture(40, 50, number)))
    result = shards.run(Namespace(data=tmp_path, batch=2, workers=1, rounds=1))
    table, packing = result.tables
    assert [row[0] for row in table.rows] == [
        "files",
        "tar",
        "files, resized first",
        "packed after resizing",
    ]
    assert [row[1] for row in packing.rows] == ["6", "6"]


def test_samples_travel_further_with_a_larger_window() -> None:
    small, large = (reservoir.travelled(window, 0) for window in (1, 16))
    assert 0.70 < small[0].mean() < 0.77  # of |x - 1| for exponential x: 2 / e
    assert 9 < large[0].mean() < 16
    assert small[1] < 10 < large[1]
