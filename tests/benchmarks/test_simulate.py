"""The benchmark ``simulate``: its tables agree with what can be computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main, parse
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
