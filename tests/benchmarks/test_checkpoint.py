"""The benchmark ``checkpoint``: every step is measured, and its files are removed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import checkpoint


def test_files_are_made_in_class_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "IN_FOLDER", 2)
    checkpoint.make_files(tmp_path, 5)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jpg"))
    assert found == [
        "000000/000000000.jpg",
        "000000/000000001.jpg",
        "000001/000000002.jpg",
        "000001/000000003.jpg",
        "000002/000000004.jpg",
    ]


def test_every_step_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    result = checkpoint.run(Namespace(files=30, data=tmp_path))
    steps = [row[0] for row in result.tables[0].rows]
    assert len(steps) == len(set(steps)) == 13
    assert "first batch with share=" in steps
    assert list(tmp_path.iterdir()) == []
