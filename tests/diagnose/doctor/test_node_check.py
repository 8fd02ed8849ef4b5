from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.diagnose.doctor.checks import check
from penstock.diagnose.doctor.facts import Facts, look_at_node
from penstock.diagnose.doctor.finding import Level


def test_a_sound_place_for_a_node_is_not_mentioned(
    sound: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", "/tmp/x")
    assert look_at_node() == ""
    assert not [finding for finding in check(sound) if finding.name == "node"]


def test_a_place_in_which_no_node_could_start_is_warned_about(sound: Facts) -> None:
    facts = replace(sound, no_node="/some/where cannot be written to.")
    (finding,) = (one for one in check(facts) if one.name == "node")
    assert finding.level is Level.WARNING
    assert finding.why == "/some/where cannot be written to."
    assert [one.command for one in finding.remedies] == [
        "export PENSTOCK_RUNTIME_DIR=/short/path/of/your/own"
    ]


def test_a_path_too_long_for_a_socket_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", "/tmp/" + "x" * 200)
    assert "too long for a socket" in look_at_node()


def test_a_place_that_others_can_open_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", "/tmp")
    assert "/tmp" in look_at_node()


def test_a_place_that_cannot_be_made_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    place = tmp_path / "file" / "n"
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(place))
    monkeypatch.setattr("penstock.node.place._LONGEST", 1000)
    assert look_at_node() == f"{place} cannot be written to."
