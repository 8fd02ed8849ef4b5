"""A runtime directory of each test's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.watch.place import LivePlace


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePlace]:
    """Where the loaders of this test publish how they are; nothing of it may be left."""
    # A node may be started there, and a path to a socket is short.
    path = Path(f"/tmp/penstock-watch-{os.getpid()}-{tmp_path.name[-30:]}")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(path))
    monkeypatch.delenv("PENSTOCK_LIVE", raising=False)
    found = LivePlace()
    yield found
    left = sorted(one.name for one in found.path.glob("*")) if found.path.exists() else []
    shutil.rmtree(path, ignore_errors=True)
    assert left == []
