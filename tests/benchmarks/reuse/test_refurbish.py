"""The benchmark ``refurbish``: contestants, whole cycles, targets, and a short run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main, parse
from benchmarks.harness.chart import panels
from benchmarks.harness.measure import Lane, Run
from benchmarks.harness.sameness import Look
from benchmarks.reuse import courses as reuse_courses
from benchmarks.reuse import refurbish
from benchmarks.reuse.courses import WARM_UP, BatchTimes, Cycles, run_at_pace
from benchmarks.reuse.roads import (
    SEED,
    SIMPLIFIED,
    STANDARD,
    ReferenceCount,
    ReuseWorkload,
    all_contestants,
    as_built,
    counted,
    echo,
    reference_count,
    refurbished,
)
from penstock.order import Shuffled

LOOK = Look((2,), "uint8", 100.0, 50.0)


def photographs(place: Path, count: int) -> Path:
    """Write photographs of noise in two classes of equal size."""
    simplejpeg = pytest.importorskip("simplejpeg")
    for module in ("cv2", "lmdb"):
        pytest.importorskip(module)
    draws = np.random.default_rng(0)
    for number in range(count):
        folder = place / "ab"[number * 2 // count]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (48, 64, 3)).astype(np.uint8)
        (folder / f"{number:03}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels))
    return place


class Clock:
    """A clock that advances only by ``sleep``."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Prepared:
    """A loader of 3 batches of 2 samples. A batch takes ``seconds(epoch)``; even epochs are new."""

    def __init__(self, clock: Clock, seconds: Callable[[int], float]) -> None:
        self.clock, self.seconds = clock, seconds
        self.epochs = self.fresh = 0
        self.closed = False

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        epoch, self.epochs = self.epochs, self.epochs + 1
        for _ in range(3):
            self.clock.sleep(self.seconds(epoch))
            self.fresh += 0 if epoch % 2 else 2
            yield np.zeros((2, 2), np.uint8)

    def stats(self) -> Any:
        return SimpleNamespace(refurbish=SimpleNamespace(fresh=self.fresh), echo=None)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reuse_courses, "time", made)
    return made


def work(reuse: tuple[int, ...] = (2,), **other: Any) -> ReuseWorkload:
    return ReuseWorkload(
        **{"data": Path("nowhere"), "samples": 6, "batch": 2, "workers": 2, **other}, reuse=reuse
    )


# Contestants.


def test_a_cycle_has_room_for_every_factor() -> None:
    assert [work(reuse).cycle for reuse in ((2,), (3,), (2, 3), (4, 6))] == [2, 3, 6, 12]


def test_each_contestant_runs_once_per_factor() -> None:
    titles = [one.title for one in all_contestants((2, 3))]
    assert titles[:2] == [STANDARD.title, SIMPLIFIED.title]
    assert titles[2:] == [
        make(number).title for number in (2, 3) for make in (echo, reference_count, as_built)
    ]
    assert len(set(titles)) == 8


@pytest.mark.parametrize("samples", [4, 16, 48])
def test_files_of_all_classes_make_an_epoch_of_any_length(tmp_path: Path, samples: int) -> None:
    photographs(tmp_path, 16)
    made = work(data=tmp_path, samples=samples).files().batch(4)
    labels = np.concatenate([batch[1] for batch in made.loader(workers=0, shuffle=False)])
    assert labels.tolist() == [0] * (samples // 2) + [1] * (samples // 2)


def test_by_counting_all_samples_are_renewed_in_one_epoch() -> None:
    counting = ReferenceCount(n=5, reuse=3, kept=5, seed=0)
    assert [counting.fresh(epoch) for epoch in range(7)] == [5, 0, 0, 5, 0, 0, 5]
    assert [counting.is_fresh(2, epoch) for epoch in range(4)] == [True, False, False, True]
    for epoch in range(7):
        found = [counting.generation(index, epoch) for index in range(5)]
        assert found == [epoch // 3] * 5
        assert counting.generations(np.arange(5), epoch).tolist() == found


def test_the_number_of_fresh_samples_follows_the_eviction(tmp_path: Path) -> None:
    small = work(data=photographs(tmp_path, 8), samples=16, batch=4, workers=0, side=16)

    def anew(loader: Any) -> list[int]:
        found = [0]
        for _ in range(6):
            list(loader)
            found.append(reuse_courses.fresh_samples(loader))
        loader.close()
        return [after - before for before, after in pairwise(found)]

    assert anew(counted(small, 3)()) == [16, 0, 0, 16, 0, 0]
    assert anew(refurbished(small, 2)()) == [16, 8, 8, 8, 8, 8]
    assert anew(STANDARD.prepare(small)()) == [16] * 6
    assert anew(echo(2).prepare(small)()) == [16] * 6


def test_by_counting_the_order_is_a_plain_shuffle(tmp_path: Path) -> None:
    small = work(data=photographs(tmp_path, 16), samples=16, batch=4, workers=0, side=16)
    for make, plain in ((counted, True), (refurbished, False)):
        loader: Any = make(small, 2)()
        for epoch in range(3):
            labels = np.concatenate([batch[1] for batch in loader])
            same = np.array_equal(labels, Shuffled().indices(16, SEED, epoch) // 8)
            assert same is plain
        loader.close()


# Courses.


@pytest.mark.parametrize(("samples", "cycles"), [(1, 1), (12, 1), (13, 2), (25, 3)])
def test_throughput_takes_whole_cycles_after_the_warm_up(
    samples: int, cycles: int, clock: Clock
) -> None:
    # Epochs take 1 and 3 seconds a batch, in turn.
    loader = Prepared(clock, lambda epoch: 3.0 if epoch % 2 else 1.0)
    run = Cycles(seconds=0.0, samples=samples)(lambda work: lambda: loader, work())
    assert loader.epochs == WARM_UP + 2 * cycles
    assert loader.closed
    assert run.values["rate"] == pytest.approx(6 / (3 * (1 + 3) / 2))
    assert run.values["fresh"] == 0.5


def test_throughput_goes_on_until_its_seconds_are_over(clock: Clock) -> None:
    loader = Prepared(clock, lambda epoch: 1.0)
    Cycles(seconds=6.5)(lambda work: lambda: loader, work())
    assert loader.epochs == WARM_UP + 4


def test_batch_times_vary_by_their_deviation_over_their_mean(clock: Clock) -> None:
    seen = []
    loader = Prepared(clock, lambda epoch: 3.0 if epoch % 2 else 1.0)

    def prepare(given: ReuseWorkload) -> Any:
        seen.append(given.workers)
        return lambda: loader

    run = BatchTimes()(prepare, work())
    assert run.values == {"variation": 0.5, "median": 2.0, "slowest": 3.0}
    assert seen == [0]
    assert loader.epochs == WARM_UP + 2


def test_the_accelerator_takes_as_long_as_the_pacemaker(clock: Clock) -> None:
    made: list[Prepared] = []

    def prepare(seconds: Callable[[int], float]) -> Any:
        def make() -> Prepared:
            made.append(Prepared(clock, seconds))
            return made[-1]

        return lambda work: make

    level, uneven = prepare(lambda epoch: 2.0), prepare(lambda epoch: 0.0 if epoch % 2 else 6.0)
    first, second = run_at_pace(level, [uneven, level], work())
    # Nothing is prepared ahead here, so a batch takes its own time and the accelerator's.
    assert first.values == {"rate": 12 / 30, "busy": 12 / 30, "pace": 2.0}
    assert second.values == {"rate": 12 / 24, "busy": 0.5, "pace": 2.0}
    assert [loader.epochs for loader in made] == [WARM_UP + 2] * 3
    assert all(loader.closed for loader in made)
    # Three times as fast as the mean of the uneven one, which is 3 seconds.
    (faster,) = run_at_pace(uneven, [level], work(), 3.0)
    assert faster.values == {"rate": 12 / 18, "busy": 6 / 18, "pace": 1.0}


# What it says.


def raced(monkeypatch: pytest.MonkeyPatch, values: Callable[[str], dict[str, float]]) -> None:
    """Put this in place of running them."""

    def race(_: str, contestants: Any, *__: Any, **___: Any) -> list[Lane]:
        dark = Look((2,), "uint8", 80.0, 50.0)
        return [
            Lane(one.title, True, {0: Run(values(one.title), dark if one is SIMPLIFIED else LOOK)})
            for one in contestants
        ]

    monkeypatch.setattr(refurbish, "race", race)


def options(tmp_path: Path, *more: str) -> Any:
    return parse(["refurbish", "--data", str(tmp_path), "--rounds", "1", *more])[1]


def test_targets_are_reported_as_reached_or_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = {STANDARD.title: 100.0, as_built(2).title: 150.0, as_built(3).title: 189.0}
    shares = {one.title: 1.0 for one in (STANDARD, SIMPLIFIED)}
    for number in (2, 3):
        for make in (echo, reference_count, as_built):
            shares[make(number).title] = 1 / number
    usual = {"cpu": 1.0, "memory": 1e6}
    raced(
        monkeypatch,
        lambda title: {"rate": rates.get(title, 120.0), "fresh": shares[title], **usual},
    )
    found = refurbish._throughput(work((2, 3), data=tmp_path), options(tmp_path))
    assert found.notes == (
        "refurbish, as fast as it goes: refurbish, 2 times: rate / standard 1.50, "
        "target at least 1.5: reached",
        "refurbish, as fast as it goes: refurbish, 3 times: rate / standard 1.89, "
        "target at least 1.9: MISSED",
    )
    assert found.wrong == ()
    assert [row[0] for row in found.tables[0].rows] == list(shares)
    (panel,) = panels(found.data)
    assert {bar.title for bar in panel.bars if bar.ours} == {as_built(2).title, as_built(3).title}


def test_a_wrong_share_of_fresh_samples_makes_the_result_invalid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usual = {"rate": 1.0, "cpu": 1.0, "memory": 1e6}
    shares = {as_built(2).title: 0.6, reference_count(2).title: 0.505}
    raced(monkeypatch, lambda title: {"fresh": shares.get(title, 0.5), **usual})
    found = refurbish._throughput(work(data=tmp_path, samples=600), options(tmp_path))
    assert found.wrong == (
        "refurbish, as fast as it goes: refurbish, 2 times: 60.0% of the samples were fresh, "
        "but 50.0% are expected",
    )


def test_a_folder_without_photographs_is_refused_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(SystemExit, match="has no JPEG files in class folders"):
        main(["refurbish", "--data", str(tmp_path)])


def test_a_chart_of_another_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(tmp_path, "--chart", "out.gif")
    assert "one of .svg, .png" in capsys.readouterr().err


def test_the_benchmark_runs_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = photographs(tmp_path / "data", 12)
    kept, drawn = tmp_path / "found.json", tmp_path / "found.svg"
    short = ["--rounds", "1", "--samples", "1", "--batch", "8", "--photographs", "20"]
    files = ["--json", str(kept), "--chart", str(drawn)]
    ended = main(["refurbish", "--data", str(data), "--reuse", "2", *short, *files])
    said = capsys.readouterr().out
    assert ended == 0, said
    assert "as fast as it goes: cycles of 2 epochs of 16 samples, batches of 8, 2 workers" in said
    assert "refurbish: 12 photographs; decode and RandAugment" in said
    assert "The accelerator is simulated" in said
    assert said.count("target at least 1.5") == 1
    assert said.count("target at least 1.2") == 1
    written = json.loads(kept.read_text())
    rates = written["data"]["refurbish, as fast as it goes"]
    assert list(rates) == [one.title for one in all_contestants((2,))]
    # The other shares vary in so short an epoch, because some batches are prepared ahead.
    assert rates[STANDARD.title]["rounds"]["0"]["values"]["fresh"] == 1.0
    look = rates[as_built(2).title]["rounds"]["0"]["look"]
    assert (look["shape"], look["dtype"]) == ([224, 224, 3], "uint8")
    both = written["data"]["refurbish, 2 times, beside an accelerator"]
    assert list(both) == [reference_count(2).title, as_built(2).title]
    assert len({lane["rounds"]["0"]["values"]["pace"] for lane in both.values()}) == 1
    times = written["data"]["refurbish, batch by batch"]["contestants"]
    assert list(times) == [STANDARD.title, *both]
    assert all(lane["rounds"]["0"]["values"]["variation"] > 0 for lane in times.values())
    assert [table["title"].split(":")[0] for table in written["tables"]] == list(written["data"])
    assert drawn.read_text().count('class="head"') == 2


def test_rates_beside_accelerators_of_several_speeds(tmp_path: Path) -> None:
    data = photographs(tmp_path / "data", 12)
    short = ["--rounds", "1", "--batch", "8", "--photographs", "8", "--reuse", "2"]
    given = parse(["refurbish", "--data", str(data), *short, "--ratios", "2", "4"])[1]
    found = refurbish.run(given).data
    assert list(found) == [
        f"refurbish, accelerator {ratio} times as fast as preparation" for ratio in (2, 4)
    ]
    for lanes in found.values():
        assert list(lanes) == [STANDARD.title, as_built(2).title]
        assert len({lane["rounds"][0]["values"]["pace"] for lane in lanes.values()}) == 1
