"""The benchmark ``simulate``: its tables agree with what can be computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main, parse
from benchmarks.simulate.fusionflow import FRESH, Case, largest_mini_batches, period
from benchmarks.simulate.placement import measure_membership, measure_owners


def test_owners_are_balanced_and_a_leave_moves_one_share() -> None:
    row = measure_owners(8, 8_000, 1000)
    assert row["samples, most to mean"] == 1.0
    assert row["moved by a leave"] == 1 / 8
    assert row["moved by a join"] == 0.0
    assert row["table bytes"] == 16_000
    assert 0.08 < row["by score: moved by a join"] < 0.15


def test_the_head_gets_a_message_from_each_machine_every_second() -> None:
    row = measure_membership(12)
    # From 11 machines, and the answers of the other 4 seeds.
    assert row["messages/s at the head"] == pytest.approx(15.0, abs=0.5)
    assert row["killed, reported"] < row["killed, silent"]


def test_several_batches_at_once_need_fewer_requests(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = ["--machines", "4,16", "--indices", "5000", "--batch", "8", "--json", str(file)]
    assert main(["simulate", "placement", *options]) == 0
    rows = json.loads(file.read_text())["data"]["requests"]
    per_batch = {
        (row["machines"], row["batches at once"]): row["requests per batch"] for row in rows
    }
    assert len(per_batch) == 8
    # A batch of 8 has samples of nearly 8 of 16 machines, and of at most 3 of 4.
    assert 5.5 < per_batch[16, 1] < 8.0
    assert 2.0 < per_batch[4, 1] <= 3.0
    # Many batches have samples of all others: a request for each.
    assert per_batch[16, 64] == 15 / 64
    assert per_batch[4, 16] == 3 / 16


def test_a_cluster_of_one_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["simulate", "--machines", "8,1"])
    assert "at least 2 machines" in capsys.readouterr().err


def test_cpu_alone_takes_the_time_of_its_workers_and_a_device_adds_its_speed() -> None:
    alone = period(Case(prep=16.0, step=0.01, speed=0.0))
    together = period(Case(prep=16.0, step=0.01, speed=4.0))
    # 16 divided by 4 workers, and by 4 workers with a device as fast as 4 more. The cost of the
    # mini-batches that count differs from the mean.
    assert alone == pytest.approx(4.0, rel=0.05)
    assert together == pytest.approx(2.0, rel=0.05)
    assert period(Case(prep=1.0, step=3.0, speed=4.0)) == pytest.approx(3.0, rel=0.05)
    # A third of the samples is prepared anew, and of the others only what is fresh each time.
    refurbished = period(Case(prep=16.0, step=0.01, speed=0.0, reuse=3))
    assert refurbished == pytest.approx(4.0 * (1 / 3 + 2 / 3 * FRESH), rel=0.05)


def test_the_memory_condition_gives_the_largest_mini_batches() -> None:
    found = largest_mini_batches()
    assert found["own memory"] == 480
    assert found["own memory"] < found["shared pool, spatial"] <= found["shared pool, temporal"]


def test_fusionflow_prints_the_paper_beside_the_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    assert main(["simulate", "fusionflow", "--chart", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "29.7 %" in said
    assert "Fitted: the device is" in said
    assert plot.read_text().startswith("<svg")
