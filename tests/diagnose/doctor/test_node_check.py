"""The check of the directory in which a node has its socket."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.diagnose.doctor.checks import check
from penstock.diagnose.doctor.facts import Facts, find_node_fault
from penstock.diagnose.doctor.report import Level


def test_a_sound_node_directory_is_not_reported(
    sound: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a socket's path must be short
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", f"{short}/n")
        assert find_node_fault() == ""
    assert not [finding for finding in check(sound) if finding.name == "node"]


def test_a_directory_where_no_node_can_start_is_warned_about(sound: Facts) -> None:
    facts = replace(sound, no_node="/some/where cannot be written to.")
    (finding,) = (finding for finding in check(facts) if finding.name == "node")
    assert finding.level is Level.WARNING
    assert finding.why == "/some/where cannot be written to."
    assert [fix.command for fix in finding.remedies] == [
        "export PENSTOCK_RUNTIME_DIR=/short/path/of/your/own"
    ]


def test_a_path_too_long_for_a_socket_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", "/tmp/" + "x" * 200)
    assert "too long for a socket" in find_node_fault()


def test_a_directory_open_to_other_users_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", "/tmp")
    assert "/tmp" in find_node_fault()


def test_a_directory_that_cannot_be_made_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    place = tmp_path / "file" / "n"
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(place))
    monkeypatch.setattr("penstock.node.directory._LONGEST", 1000)
    assert find_node_fault() == f"{place} cannot be written to."
