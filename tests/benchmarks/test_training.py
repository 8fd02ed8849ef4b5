"""Benchmarks that train: their data, their clocks and their arithmetic, and tiny runs of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.__main__ import main, parse
from benchmarks.echo import echo
from benchmarks.echo import work as echo_work
from benchmarks.echo.table import figure, found
from benchmarks.echo.work import BASE, PLACES, Mark, Outcome, Setting, Work
from benchmarks.harness import measure, training
from benchmarks.harness.alone import Watched
from benchmarks.harness.throttle import Bucket, Stopwatch, Throttled
from benchmarks.reuse import accuracy
from penstock.source import DatasetSource

SVG = "{http://www.w3.org/2000/svg}"


def parquet(path: Path, count: int, **other: list[Any]) -> Path:
    """Images of ten classes, each a colour and some noise."""
    pa = pytest.importorskip("pyarrow")
    cv2 = pytest.importorskip("cv2")
    import pyarrow.parquet

    rng = np.random.default_rng(count)
    labels = rng.integers(0, 10, count)
    colours = np.random.default_rng(0).integers(0, 256, (10, 1, 1, 3))
    pixels = np.clip(colours[labels] + rng.integers(-20, 20, (count, 32, 32, 3)), 0, 255)
    images = [cv2.imencode(".png", image)[1].tobytes() for image in pixels.astype(np.uint8)]
    columns = {"image": images, "label": labels.astype(np.int32), **other}
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar")
    parquet(folder / "c-train.parquet", 96)
    parquet(folder / "c-test.parquet", 64)
    return folder


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no environment keeps the threads of torch from spinning while others work."""
    monkeypatch.setattr(training, "cores", lambda: 1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in this process: fresh ones would import torch again and again."""
    pytest.importorskip("torch")

    def run(function: Callable[..., Any], *args: Any, **_: Any) -> Watched:
        return Watched(function(*args), 0)

    for module in (accuracy, echo, measure):
        monkeypatch.setattr(module, "run_alone", run)


# Data.


def test_the_two_files_are_found_by_name_or_given(data: Path) -> None:
    train, test = data / "c-train.parquet", data / "c-test.parquet"
    assert training.find_files(data, None) == (train, test)
    assert training.find_files(test, train) == (test, train)
    for name in ("accuracy", "echo"):
        options = parse([name, "--data", str(train), str(test), "--seeds", "2"])[1]
        assert (options.data, options.test, options.seeds) == (train, test, 2)
    with pytest.raises(SystemExit, match="is one file: give the file of the test set too"):
        training.find_files(train, None)
    with pytest.raises(SystemExit, match=r"is a folder, but the file .* is given too"):
        training.find_files(data, test)


def test_a_folder_without_both_files_is_an_error_that_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "train-0.parquet").touch()
    (tmp_path / "train-1.parquet").touch()
    with pytest.raises(SystemExit, match=r"'train' .*has: train-0.parquet, train-1.parquet"):
        training.find_files(tmp_path, None)


def test_too_few_images_or_columns_are_an_error_before_anybody_trains(
    data: Path, tmp_path: Path
) -> None:
    train, test = training.find_files(data, None)
    training.check_files(train, test, 96, 8)
    for samples, batch, said in (
        (97, 8, "has 96 images, but at least 97"),
        (None, 100, "has 96 images, but at least 100"),
        (4, 8, "--samples 4 is less than one batch of 8"),
    ):
        with pytest.raises(SystemExit, match=said):
            training.check_files(train, test, samples, batch)
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"image": [b""]}), tmp_path / "x.parquet")
    with pytest.raises(SystemExit, match=r"x.parquet has no column label"):
        training.check_files(train, tmp_path / "x.parquet", None, 8)


def test_rows_are_bytes_and_classes_from_the_first_on(data: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    everything = training.read_rows(data / "c-test.parquet")
    assert len(everything) == 64
    assert training.read_rows(data / "c-test.parquet", 5) == everything[:5]
    structs = {"image": [{"bytes": b"abc", "path": None}], "label": [3]}
    pyarrow.parquet.write_table(pa.table(structs), tmp_path / "s.parquet")
    assert training.read_rows(tmp_path / "s.parquet") == [(b"abc", 3)]


# Learning.


def test_the_same_seed_and_batches_make_the_same_network(data: Path) -> None:
    pytest.importorskip("torch")
    images = training.read_images(data / "c-test.parquet")
    assert images.pixels.shape == (64, 32, 32, 3)

    def learned(seed: int, steps: int | None) -> tuple[float, list[float]]:
        trainer = training.Trainer(training.Recipe(width=4, rate=0.05), seed, steps)
        for first in range(0, 64, 8):
            trainer.step(images.pixels[first : first + 8], images.labels[first : first + 8])
        weights = [float(part.detach().sum()) for part in trainer._model.parameters()]
        return trainer.accuracy(images), weights

    for steps in (8, None):
        assert learned(1, steps) == learned(1, steps)
        assert learned(1, steps)[1] != learned(2, steps)[1]


def test_a_network_learns_classes_that_can_be_told_apart(data: Path) -> None:
    pytest.importorskip("torch")
    images = training.read_images(data / "c-test.parquet")
    trainer = training.Trainer(training.Recipe(width=8), 0, 60)
    for step in range(60):
        part = slice(step * 16 % 64, step * 16 % 64 + 16)
        trainer.step(images.pixels[part], images.labels[part])
    assert trainer.steps_taken == 60
    assert trainer.accuracy(images) > 0.9


# The slow source.


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_bucket_gives_its_rate_and_saves_no_more_than_its_burst() -> None:
    clock = Clock()
    bucket = Bucket(10.0, 5, clock, clock.sleep)
    for _ in range(20):
        bucket.take(1)
    assert clock.now == pytest.approx(102.0)
    clock.now += 50.0
    before = clock.now
    bucket.take(5)
    assert clock.now == before
    bucket.take(4)
    assert clock.now == pytest.approx(before + 0.4)


def test_no_token_falls_while_the_watch_is_stopped() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    bucket = Bucket(10.0, 100, watch, clock.sleep)
    clock.now += 1.0
    with watch.stopped():
        clock.now += 60.0
        assert watch() == pytest.approx(1.0)
    assert watch() == pytest.approx(1.0)
    bucket.take(10)
    assert watch() == pytest.approx(1.0)
    bucket.take(10)
    assert watch() == pytest.approx(2.0)


def test_every_sample_of_a_throttled_source_costs_a_token() -> None:
    clock = Clock()
    plain = DatasetSource(["a", "b", "c"])
    source = Throttled(plain, Bucket(2.0, 1, clock, clock.sleep))
    assert source.read([2, 0, 1, 1]) == ["c", "a", "b", "b"]
    assert clock.now == pytest.approx(102.0)
    assert (len(source), source.name(1)) == (3, plain.name(1))
    assert (source.identity(), source.fields()) == (plain.identity(), plain.fields())


# What echoing gained.


def outcome(seed: int, seconds: float, fresh: int, *, reached: bool = True) -> Outcome:
    marks = (Mark(seconds / 2, fresh // 2, fresh, 0.1), Mark(seconds, fresh, 2 * fresh, 0.6))
    return Outcome(seed, reached, marks, 0.01, 0.5)


WORK = Work(
    Path("a"), Path("b"), None, 8, 1, target=0.5, limit=60.0, recipe=training.Recipe(), rate=20.0
)


def test_times_are_compared_seed_by_seed_with_no_echo() -> None:
    outcomes = {
        BASE: [outcome(0, 40.0, 800), outcome(1, 20.0, 400), outcome(2, 9.0, 9, reached=False)],
        Setting(PLACES[0], 2): [outcome(1, 10.0, 300), outcome(2, 1.0, 1)],
        Setting(PLACES[2], 2): [outcome(0, 1.0, 70, reached=False)],
    }
    made = found(WORK, 100.0, 5.0, outcomes)
    rows = {row[0]: row[1:] for row in made.tables[0].rows}
    assert rows["no echo"][:4] == ("2 of 3", "30.0 (20.0 - 40.0)", "1.00", "600")
    assert rows["before augmentation, factor 2"][:3] == ("2 of 2", "5.5 (1.0 - 10.0)", "2.00")
    assert rows["before augmentation, factor 2"][4] == "75%"
    assert rows["after batch, factor 2"][:3] == ("0 of 1", "never", "-")
    # A sample was read in 1/20 s and cost 1/100 s below.
    assert rows["no echo"][6] == "5.0"
    assert made.notes[0].startswith("echo: best 2.00 times as fast, before augmentation, factor 2")
    assert "after batch, factor 2: 1 of 1 did not reach 50% in 60 s" in made.notes[-1]


def test_who_never_got_there_is_named_below_the_plot() -> None:
    outcomes = {
        BASE: [outcome(0, 40.0, 800)],
        Setting(PLACES[0], 2): [outcome(0, 10.0, 300)],
        Setting(PLACES[1], 2): [outcome(0, 60.0, 700, reached=False)],
    }
    drawn = figure(json.loads(json.dumps(found(WORK, 100.0, 5.0, outcomes).data)))
    assert [series.title for series in drawn.series] == ["before augmentation"]
    assert drawn.series[0].joined
    assert [(p.x.middle, p.y.middle) for p in drawn.points] == [(1.0, 40.0), (2.0, 10.0)]
    assert drawn.notes == ("after augmentation, factor 2: 1 of 1 never got there",)


def test_the_places_are_compared_where_their_factor_runs() -> None:
    assert [(s.place, s.factor) for s in echo_work.settings((1, 2, 4))] == [
        (PLACES[0], 1),
        (PLACES[0], 2),
        (PLACES[0], 4),
        (PLACES[1], 2),
        (PLACES[2], 2),
    ]
    assert echo_work.settings((3,)) == [BASE, Setting(PLACES[0], 3)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--chart", "out.gif"], "one of .svg, .png"),
        (["--target", "55"], "share between 0 and 1"),
        (["--limit", "0"], "number above 0"),
        (["--factors", "1,x"], "whole number of at least 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    given: list[str], said: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["echo", "--data", str(data), *given])
    assert said in capsys.readouterr().err


# Tiny runs.


@pytest.mark.usefixtures("here")
def test_accuracy_counts_what_the_network_saw(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [accuracy.SETTINGS[number] for number in (0, 2, 4)]
    monkeypatch.setattr(accuracy, "SETTINGS", tuple(chosen))
    monkeypatch.setattr(accuracy, "RECIPE", training.Recipe(width=4))
    kept, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--samples", "32", "--epochs", "4", "--seeds", "1", "--batch", "8"]
    arguments += ["--workers", "1", "--rounds", "1", "--seconds", "0.01", "--warm-up", "0.01"]
    arguments += ["--json", str(kept), "--chart", str(drawn)]
    assert main(["accuracy", "--data", str(data), *arguments]) == 0
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


@pytest.mark.usefixtures("here")
def test_a_training_that_fails_is_said_and_the_others_go_on(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.harness.alone import AloneError

    def fail(_: Any, work: Any, setting: accuracy.Setting, seed: int, **__: Any) -> Watched:
        if setting is accuracy.STANDARD:
            raise AloneError("out of memory")
        return Watched(accuracy.Trained(0.5, 10, 20, 1.0, 0.0), 0)

    monkeypatch.setattr(accuracy, "run_alone", fail)
    lanes = [measure.Lane(one.title, True, why_not="no cv2") for one in accuracy.SETTINGS]
    monkeypatch.setattr(accuracy, "race", lambda *_, **__: lanes)
    options = parse(["accuracy", "--data", str(data), "--samples", "64", "--seeds", "2"])[1]
    made = accuracy.run(options)
    assert "accuracy: standard, seed 1: failed: out of memory" in made.wrong
    rows = {row[0]: row[1:4] for row in made.tables[0].rows}
    assert rows["standard"] == ("-", "-", "-")
    assert rows["refurbish, reuse 2"] == ("50.00%", "50.00% - 50.00%", "-")
    assert accuracy.figure(made.data).points == []


@pytest.mark.usefixtures("here")
def test_echo_runs_to_its_target_and_counts_fresh_samples(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(echo_work, "EVERY", 4)
    monkeypatch.setattr(echo, "RECIPE", training.Recipe(width=4))
    kept, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--seconds", "0.05", "--batch", "8", "--factors", "1,2", "--ratio", "1.5"]
    arguments += ["--seeds", "1", "--target", "0.02", "--json", str(kept), "--chart", str(drawn)]
    assert main(["echo", "--data", str(data), *arguments]) == 0
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


@pytest.mark.usefixtures("here")
def test_a_target_that_is_never_reached_is_said_to_be(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(echo, "RECIPE", training.Recipe(width=4, rate=1e-6))
    options = ["--seconds", "0.05", "--batch", "8", "--factors", "1", "--seeds", "1"]
    options += ["--target", "0.99", "--limit", "0.2"]
    made = echo.run(parse(["echo", "--data", str(data), *options])[1])
    assert made.tables[0].rows[0][1:3] == ("0 of 1", "never")
    assert "no echo: 1 of 1 did not reach 99%" in made.notes[-1]
