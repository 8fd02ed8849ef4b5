"""Slow tests run first, so that no worker is left alone with one at the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import conftest
from tests.support import ROOT


def test_files_that_are_named_as_slow_exist() -> None:
    assert [name for name in conftest.SLOW if not (ROOT / name).is_file()] == []


def test_slow_tests_come_first_and_others_keep_their_order() -> None:
    slow = f"{conftest.SLOW[1]}::test_a"
    items: Any = [SimpleNamespace(nodeid=name) for name in ("tests/b.py::b", slow, "tests/a.py::a")]
    conftest.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [slow, "tests/b.py::b", "tests/a.py::a"]
