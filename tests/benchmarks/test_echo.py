"""The benchmark ``echo``: its arithmetic, its table and plot, and tiny runs."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main, parse
from benchmarks.echo import echo
from benchmarks.echo import work as echo_work
from benchmarks.echo.echo import figure, make_result
from benchmarks.echo.work import BASE, PLACES, EchoOutcome, EchoSetting, EchoWork, Mark
from benchmarks.harness import training

SVG = "{http://www.w3.org/2000/svg}"

# Results.


def outcome(seed: int, seconds: float, fresh: int, *, reached: bool = True) -> EchoOutcome:
    marks = (Mark(seconds / 2, fresh // 2, fresh, 0.1), Mark(seconds, fresh, 2 * fresh, 0.6))
    return EchoOutcome(seed, reached, marks, 0.01, 0.5)


WORK = EchoWork(
    Path("a"), Path("b"), None, 8, 1, target=0.5, limit=60.0, recipe=training.Recipe(), rate=20.0
)


def test_times_are_compared_seed_by_seed_with_no_echo() -> None:
    outcomes = {
        BASE: [outcome(0, 40.0, 800), outcome(1, 20.0, 400), outcome(2, 9.0, 9, reached=False)],
        EchoSetting(PLACES[0], 2): [outcome(1, 10.0, 300), outcome(2, 1.0, 1)],
        EchoSetting(PLACES[2], 2): [outcome(0, 1.0, 70, reached=False)],
    }
    made = make_result(WORK, 100.0, 5.0, outcomes)
    rows = {row[0]: row[1:] for row in made.tables[0].rows}
    assert rows["no echo"][:4] == ("2 of 3", "30.0 (20.0 - 40.0)", "1.00", "600")
    assert rows["before augmentation, factor 2"][:3] == ("2 of 2", "5.5 (1.0 - 10.0)", "2.00")
    assert rows["before augmentation, factor 2"][4] == "75%"
    assert rows["after batch, factor 2"][:3] == ("0 of 1", "never", "-")
    # A sample was read in 1/20 s and cost 1/100 s below.
    assert rows["no echo"][6] == "5.0"
    assert made.notes[0].startswith("echo: best speed-up 2.00 times, before augmentation, factor 2")
    assert "after batch, factor 2: 1 of 1 runs did not reach 50% in 60 s" in made.notes[-1]


def test_runs_that_miss_the_target_are_named_below_the_plot() -> None:
    outcomes = {
        BASE: [outcome(0, 40.0, 800)],
        EchoSetting(PLACES[0], 2): [outcome(0, 10.0, 300)],
        EchoSetting(PLACES[1], 2): [outcome(0, 60.0, 700, reached=False)],
    }
    drawn = figure(json.loads(json.dumps(make_result(WORK, 100.0, 5.0, outcomes).data)))
    assert [series.title for series in drawn.series] == ["before augmentation"]
    assert drawn.series[0].joined
    assert [(p.x.middle, p.y.middle) for p in drawn.points] == [(1.0, 40.0), (2.0, 10.0)]
    assert drawn.notes == ("after augmentation, factor 2: 1 of 1 runs did not reach the target",)


def test_the_places_are_compared_with_one_factor() -> None:
    assert [(s.place, s.factor) for s in echo_work.settings((1, 2, 4))] == [
        (PLACES[0], 1),
        (PLACES[0], 2),
        (PLACES[0], 4),
        (PLACES[1], 2),
        (PLACES[2], 2),
    ]
    assert echo_work.settings((3,)) == [BASE, EchoSetting(PLACES[0], 3)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--chart", "out.gif"], "one of .svg, .png"),
        (["--target", "55"], "share between 0 and 1"),
        (["--limit", "0"], "number above 0"),
        (["--factors", "1,x"], "whole number of at least 1"),
    ],
)
def test_invalid_arguments_are_refused(
    given: list[str], said: str, cifar: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["echo", "--data", str(cifar), *given])
    assert said in capsys.readouterr().err


# Tiny runs.


@pytest.mark.usefixtures("in_process")
def test_echo_runs_to_its_target_and_counts_fresh_samples(
    cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(echo_work, "EVERY", 4)
    monkeypatch.setattr(echo, "RECIPE", training.Recipe(width=4))
    kept, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--seconds", "0.05", "--batch", "8", "--factors", "1,2", "--ratio", "1.5"]
    arguments += ["--seeds", "1", "--target", "0.02", "--json", str(kept), "--chart", str(drawn)]
    assert main(["echo", "--data", str(cifar), *arguments]) == 0
    assert "before augmentation, factor 2" in capsys.readouterr().out
    written = json.loads(kept.read_text())["data"]
    assert written["upstream"] == pytest.approx(written["downstream"] / 1.5)
    assert len(written["settings"]) == 4
    for entry in written["settings"].values():
        (run,) = entry["runs"]
        end = run["marks"][-1]
        assert run["reached"]
        assert end["seen"] % 8 == 0
        assert end["seen"] / entry["factor"] <= end["fresh"] <= end["seen"]
        # Nothing is read faster than the bucket gives it.
        assert end["fresh"] <= written["upstream"] * end["seconds"] + 8
    assert ElementTree.parse(drawn).getroot().tag == f"{SVG}svg"


@pytest.mark.usefixtures("in_process")
def test_a_target_that_is_never_reached_is_reported(
    cifar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(echo, "RECIPE", training.Recipe(width=4, rate=1e-6))
    options = ["--seconds", "0.05", "--batch", "8", "--factors", "1", "--seeds", "1"]
    options += ["--target", "0.99", "--limit", "0.2"]
    made = echo.run(parse(["echo", "--data", str(cifar), *options])[1])
    assert made.tables[0].rows[0][1:3] == ("0 of 1", "never")
    assert "no echo: 1 of 1 runs did not reach 99%" in made.notes[-1]


@pytest.mark.usefixtures("in_process")
def test_the_error_at_the_end_of_equally_many_fresh_samples(
    cifar: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--fresh", "32", "--factors", "1,4", "--seeds", "1", "--batches", "4,8"]
    options = parse(["echo", "--data", str(cifar), *given, "--windows", "1,2"])[1]
    options.recipe = training.Recipe(width=4)
    made = echo.run(options)
    assert not made.wrong
    rows = [(row[0], row[1], row[5]) for row in made.tables[0].rows]
    assert rows == [
        (title, batch, seen)
        for batch in ("4", "8")
        for title, seen in (
            ("no echo", "32"),
            ("before augmentation, factor 4, window of 1 batches", "128"),
            ("before augmentation, factor 4, window of 2 batches", "128"),
        )
    ]
    for entry in made.data["ends"]:
        (end,) = entry["runs"]
        assert end["fresh"] <= 32 + 2 * entry["batch"]
