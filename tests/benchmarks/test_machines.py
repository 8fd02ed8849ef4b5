"""The benchmark ``machines``: every transport delivers all values."""

from __future__ import annotations

import shutil
from argparse import Namespace

import pytest

from benchmarks import machines


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_every_transport_delivers_all_values() -> None:
    result = machines.run(Namespace(values=3, size=1000, requests=2))
    assert result.wrong == ()
    assert [row[0] for row in result.tables[0].rows] == list(machines.CASES)
    assert all(len(times) == 2 for times in result.data.values())
