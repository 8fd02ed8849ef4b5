"""A separate runtime directory for each test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.watch.live_directory import LiveDirectory


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveDirectory]:
    """The directory in which the loaders of this test publish. The test must leave it empty."""
    # A node may be started there, and the path of a Unix socket must be short.
    path = Path(f"/tmp/penstock-watch-{os.getpid()}-{tmp_path.name[-30:]}")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(path))
    monkeypatch.delenv("PENSTOCK_LIVE", raising=False)
    directory = LiveDirectory()
    yield directory
    exists = directory.path.exists()
    left = sorted(file.name for file in directory.path.glob("*")) if exists else []
    shutil.rmtree(path, ignore_errors=True)
    assert left == []
