"""The benchmark ``files``: nested folders of links, every step measured, nothing left."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import files


def test_files_are_links_in_nested_class_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "IN_FOLDER", 2)
    monkeypatch.setattr(files, "FOLDERS_IN_CLASS", 2)
    files.make_files(tmp_path, 7)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jpg"))
    assert found == [
        "00000/0/000000000.jpg",
        "00000/0/000000001.jpg",
        "00000/1/000000002.jpg",
        "00000/1/000000003.jpg",
        "00001/0/000000004.jpg",
        "00001/0/000000005.jpg",
        "00001/1/000000006.jpg",
    ]
    assert [(tmp_path / name).stat().st_nlink for name in found] == [2, 2, 2, 2, 2, 2, 1]


def test_a_step_that_a_loader_lacks_is_an_empty_cell() -> None:
    row = files.cells({"create": 1.5, "memory": 2e6, "state_dict": 0.001})
    assert [cell for cell in row if cell] == ["1.50", "2.00", "1.00"]
    assert len(row) == len(files.COLUMNS)


def test_every_step_is_measured_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = files.Entry("a peer", files.dali, ("no_such_module",))
    monkeypatch.setattr(files, "ENTRIES", (files.ENTRIES[0], missing))
    result = files.run(Namespace(files=200, scratch=tmp_path, workers=1))
    assert result.wrong == ()
    assert result.notes == ("files: a peer: not installed: no_such_module",)
    assert [row[1] for row in result.tables[0].rows] == ["20", "200"]
    assert list(tmp_path.iterdir()) == []
