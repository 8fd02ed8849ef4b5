"""The benchmark ``accuracy``: tiny runs, and what it reports if a training fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import penstock as ps
from benchmarks.__main__ import main, parse
from benchmarks.harness import measure, training
from benchmarks.harness.alone import AloneError, Watched
from benchmarks.reuse import accuracy
from benchmarks.reuse.roads import PlainShuffle

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.usefixtures("in_process")
def test_accuracy_counts_what_the_network_saw(
    cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [accuracy.SETTINGS[number] for number in (0, 2, 4)]
    monkeypatch.setitem(accuracy.SETS, "reuse", tuple(chosen))
    monkeypatch.setattr(accuracy, "RECIPE", training.Recipe(width=4))
    kept, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--samples", "32", "--epochs", "4", "--seeds", "1", "--batch", "8"]
    arguments += ["--workers", "1", "--rounds", "1", "--seconds", "0.01", "--warm-up", "0.01"]
    arguments += ["--json", str(kept), "--chart", str(drawn)]
    assert main(["accuracy", "--data", str(cifar), *arguments]) == 0
    said = capsys.readouterr().out
    assert "32 images of CIFAR-10, 4 epochs, batches of 8, 1 seeds" in said
    written = json.loads(kept.read_text())["data"]
    assert list(written) == [setting.title for setting in chosen]
    (standard,), (echoed,), (refurbished,) = (entry["runs"] for entry in written.values())
    assert {run["seen"] for run in (standard, echoed, refurbished)} == {128}
    assert (standard["fresh"], echoed["fresh"]) == (128, 64)
    # All of the first epoch, then half of each.
    assert refurbished["fresh"] == 32 + 3 * 16
    for entry in written.values():
        assert entry["rate"]["median"] > 0
        assert 0 <= entry["accuracy"]["mean"] <= 1
    labels = [text.text for text in ElementTree.parse(drawn).iter(f"{SVG}text")]
    assert all(setting.title in labels for setting in chosen)


@pytest.mark.usefixtures("in_process")
def test_a_failing_training_is_reported_and_the_others_go_on(
    cifar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any, work: Any, setting: accuracy.ReuseSetting, seed: int, **__: Any) -> Watched:
        if setting is accuracy.STANDARD:
            raise AloneError("out of memory")
        return Watched(accuracy.TrainingOutcome(0.5, 10, 20, 1.0, 0.0), 0)

    monkeypatch.setattr(accuracy, "run_alone", fail)
    lanes = [measure.Lane(one.title, True, why_not="no cv2") for one in accuracy.SETTINGS]
    monkeypatch.setattr(accuracy, "race", lambda *_, **__: lanes)
    options = parse(["accuracy", "--data", str(cifar), "--samples", "64", "--seeds", "2"])[1]
    made = accuracy.run(options)
    assert "accuracy: standard, seed 1: failed: out of memory" in made.wrong
    rows = {row[0]: row[1:4] for row in made.tables[0].rows}
    assert rows["standard"] == ("-", "-", "-")
    assert rows["refurbish, reuse 2"] == ("50.00%", "50.00% - 50.00%", "-")
    assert accuracy.figure(made.data).points == []


def test_the_split_and_the_shuffle_are_those_of_the_set() -> None:
    source = ps.from_dataset([b""] * 8)
    places = []
    for setting in accuracy.SETS["split"][1:3]:
        names = [stop.name for stop in setting.road(source, 4).stops]
        places.append(names[names.index("refurbish") :])
    assert places == [
        ["refurbish", "random_crop", "random_flip", "normalize"],
        ["refurbish", "random_flip", "normalize"],
    ]
    aware, plain = accuracy.SETS["shuffle"]
    assert aware.order is None
    assert isinstance(plain.order, PlainShuffle)
