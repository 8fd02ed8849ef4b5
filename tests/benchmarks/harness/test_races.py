"""Races: statistics, tables, the check for equal work, courses and fresh processes."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from benchmarks.harness.alone import AloneError, memory_of_tree, run_alone
from benchmarks.harness.courses import Starts, Throughput
from benchmarks.harness.measure import (
    Contestant,
    Conversion,
    Lane,
    Make,
    Run,
    Spread,
    peer_names,
    race,
    ratios,
    select,
    turns,
)
from benchmarks.harness.race_table import RATE, Versus, join_results, race_result
from benchmarks.harness.report import Result, Table, show, write_json
from benchmarks.harness.sameness import Look, difference, first_leaf, look
from benchmarks.peers.by_hand import random_box

LOOK = Look((2,), "float32", 0.5, 0.25)


def batches_of_two(work: int) -> Make:
    """A contestant with ``work`` batches per epoch."""
    return lambda: [np.full((2, 3), float(number), np.float32) for number in range(work)]


def lane(title: str, rates: dict[int, float], *, ours: bool = False, seen: Look = LOOK) -> Lane:
    return Lane(title, ours, {number: Run({"rate": rate}, seen) for number, rate in rates.items()})


def shown(what: Result) -> str:
    text = io.StringIO()
    show(what, Console(file=text, width=160))
    return text.getvalue()


def test_penstock_runs_whichever_peers_are_selected() -> None:
    contestants = (
        Contestant("a", batches_of_two, (), env="torch"),
        Contestant("b", batches_of_two, (), env="grain"),
        Contestant("c", batches_of_two, (), env="torch"),
        Contestant("mine", batches_of_two, (), ours=True),
    )
    assert peer_names(contestants) == ("torch", "grain")
    assert [one.title for one in select(contestants, ("torch",))] == ["a", "c", "mine"]
    assert [one.title for one in select(contestants, ())] == ["mine"]


# Statistics.


def test_every_round_begins_with_the_next_contestant() -> None:
    assert [order for _, order in turns(3, 4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_a_spread_is_median_least_and_most() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)
    with pytest.raises(ValueError, match="at least one value"):
        Spread.of([])


def test_ratios_are_taken_round_by_round_to_the_best_peer_of_that_round() -> None:
    mine = lane("mine", {0: 10.0, 1: 30.0, 2: 8.0}, ours=True)
    peers = [lane("a", {0: 5.0, 1: 10.0}), lane("b", {0: 2.0, 1: 20.0})]
    # Round 2 has no peer, and so no ratio. A ratio of medians would differ.
    assert ratios(mine, peers, "rate", max) == [2.0, 1.5]
    assert ratios(mine, peers, "rate", min) == [5.0, 3.0]


def test_a_target_is_reached_from_its_value_on() -> None:
    more, less = Versus("r", "rate", True, 2.0), Versus("f", "first", False, 1.0)
    assert (more.reached(2.0), more.reached(1.99)) == (True, False)
    assert (less.reached(1.0), less.reached(1.01)) == (True, False)
    assert Versus("r", "rate", True).reached(0.0)
    own = Versus("r", "rate", True, 2.0, {"slow": 1.0})
    assert (own.reached(1.5, "slow"), own.reached(1.5, "fast")) == (True, False)


def test_a_memory_of_zero_gives_no_ratio() -> None:
    assert ratios(lane("mine", {0: 1.0}), [lane("peer", {0: 0.0})], "rate", min) == []


# Tables.


def test_a_race_shows_medians_extremes_ratio_and_verdict() -> None:
    lanes = [lane("peer", {0: 100.0, 1: 200.0}), lane("mine", {0: 300.0, 1: 400.0}, ours=True)]
    text = shown(race_result("r", "title", lanes, (RATE,), (Versus("ratio", "rate", True, 2.0),)))
    assert "150" in text
    assert "100 - 200" in text
    assert "2.00 - 3.00" in text
    assert "r: mine: ratio 2.50, target at least 2: reached" in text


def test_a_missed_target_is_reported() -> None:
    lanes = [lane("peer", {0: 100.0}), lane("mine", {0: 120.0}, ours=True)]
    made = race_result("r", "t", lanes, (RATE,), (Versus("ratio", "rate", True, 1.3),))
    assert made.notes == ("r: mine: ratio 1.20, target at least 1.3: MISSED",)


def test_a_peer_that_is_not_installed_stays_in_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    contestants = (
        Contestant("absent", batches_of_two, ("no_such_package_anywhere",)),
        Contestant("mine", batches_of_two, (), ours=True),
    )
    # With no rounds, no process is started.
    lanes = race("r", contestants, 3, Starts(2), rounds=0, timeout=1)
    assert lanes[0].why_not == "not installed: no_such_package_anywhere"
    made = race_result("r", "t", lanes, (RATE,), ())
    assert "not installed: no_such_package_anywhere" in shown(made)
    assert made.wrong == ()


def test_contestants_of_penstock_can_be_compared_with_each_other() -> None:
    lanes = [lane("one", {0: 100.0}, ours=True), lane("two", {0: 180.0}, ours=True)]
    versus = (Versus("rate / one", "rate", True, 1.85),)
    made = race_result("r", "t", lanes, (RATE,), versus, beside=("one",))
    assert made.notes == ("r: two: rate / one 1.80, target at least 1.85: MISSED",)
    assert made.tables[0].rows == (("one", "100", ""), ("two", "180", "1.80"))


def test_the_cost_of_conversion_is_reported() -> None:
    slow = lane("peer", {0: 100.0})
    slow.conversion = Conversion(seconds=3.25, bytes=54_000_000)
    made = race_result("r", "t", [slow], (RATE,), ())
    assert made.notes == (
        "r: peer: converting the data took 3.2 s and 54.0 MB, not counted in the race",
    )
    assert made.data["r"]["peer"]["conversion"] == {"seconds": 3.25, "bytes": 54_000_000}


def test_a_row_that_does_not_fit_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match="2 cells, the table 1 columns"):
        Table("t", ("a",), (("1", "2"),))


def test_json_carries_the_machine_the_command_and_every_round(tmp_path: Path) -> None:
    parts = [race_result(n, n, [lane("peer", {0: 100.0})], (RATE,), ()) for n in ("x", "y")]
    path = tmp_path / "out.json"
    write_json(path, "overhead", {"rounds": 1, "data": tmp_path}, join_results(parts))
    read = json.loads(path.read_text())
    assert read["benchmark"] == "overhead"
    assert "-m benchmarks" in read["command"]
    assert read["machine"]["cores"] >= 1
    assert read["machine"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert read["machine"]["packages"]["numpy"] == np.__version__
    assert read["data"]["y"]["peer"]["rounds"]["0"]["values"]["rate"] == 100.0
    assert [table["title"] for table in read["tables"]] == ["x", "y"]


# The same work.


def test_a_look_has_shape_dtype_mean_and_deviation_of_the_batches() -> None:
    batches = iter([(np.array([[0, 2], [4, 6]], np.uint8), [0, 1]), (np.zeros((2, 2)), [0, 1])])
    seen = look(batches, samples=2)
    assert (seen.shape, seen.dtype, seen.mean) == ((2,), "uint8", 3.0)
    assert seen.deviation == pytest.approx(5**0.5)
    assert len(list(batches)) == 1


def test_the_first_leaf_is_found_below_lists_tuples_and_dicts() -> None:
    array = np.zeros(3)
    for batch in (array, [array, 1], (array, 1), {"image": array, "label": 1}, [{"a": (array,)}]):
        assert first_leaf(batch) is array


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (LOOK, True),
        (Look((2,), "float32", 0.52, 0.26), True),
        (Look((2,), "float32", 0.53, 0.25), False),
        (Look((2,), "float32", 0.5, 0.30), False),
        (Look((2,), "uint8", 0.5, 0.25), False),
        (Look((3,), "float32", 0.5, 0.25), False),
    ],
)
def test_work_is_the_same_within_the_tolerance_only(other: Look, same: bool) -> None:
    assert (difference(LOOK, other) is None) is same
    lanes = [lane("one", {0: 1.0}), lane("two", {0: 1.0}, seen=other)]
    wrong = race_result("r", "t", lanes, (RATE,), ()).wrong
    assert (wrong == ()) is same
    if not same:
        assert "two does other work" in wrong[0]


def test_boxes_of_the_hand_written_peer_lie_inside_the_image() -> None:
    for rows, columns in ((375, 500), (500, 375), (40, 900), (900, 40)):
        for _ in range(200):
            top, left, height, width = random_box(rows, columns, random)
            assert min(top, left) >= 0
            assert min(height, width) > 0
            assert top + height <= rows
            assert left + width <= columns


# Courses and processes.


def test_throughput_goes_round_epochs_until_it_has_its_samples() -> None:
    run = Throughput(seconds=0.0, checked=4, samples=50)(batches_of_two, 3)
    assert set(run.values) == {"rate", "cpu", "first"}
    assert run.values["rate"] > 0
    assert (run.look.shape, run.look.dtype) == ((3,), "float32")


def test_starts_times_two_epochs_of_one_loader() -> None:
    class Counted:
        epochs = 0

        def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
            self.epochs += 1
            return iter([np.zeros((2, 1))] * 3)

    loader = Counted()
    run = Starts(checked=2)(lambda work: lambda: loader, None)
    assert loader.epochs == 2
    assert set(run.values) == {"first", "epoch", "second"}
    assert run.values["first"] <= run.values["epoch"]


def test_a_function_runs_in_a_fresh_process() -> None:
    watched = run_alone(sum, [1, 2, 3], timeout=60)
    assert watched.value == 6
    assert memory_of_tree(psutil.Process().pid) > 1_000_000


def test_an_error_in_the_process_is_raised_with_its_output() -> None:
    with pytest.raises(AloneError, match="ValueError: invalid literal") as caught:
        run_alone(int, "x", timeout=60)
    assert "Traceback" in caught.value.printed
