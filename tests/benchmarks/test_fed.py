"""The benchmark ``fed``: the judgement of logs, and what each contestant is given to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.fed.fed import PEERS, PENSTOCK
from benchmarks.fed.work import FedWork, TakenBatch, TrainerLog, judge, read_log

WORK = FedWork("data", "decoded", samples=20, size=10, batch=5, epochs=2, workers=1, world=2)


def logs_of(*epochs: list[list[int]]) -> list[list[TakenBatch]]:
    """Batches of all epochs, one a second, taken by two trainers in turn."""
    logs: list[list[TakenBatch]] = [[], []]
    for at, numbers in enumerate(batch for epoch in epochs for batch in epoch):
        logs[at % 2].append(TakenBatch(10.0 + at, numbers))
    return logs


WHOLE = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]


def test_the_rate_is_measured_while_all_trainers_are_busy() -> None:
    outcome = judge(WORK, 8.0, logs_of(WHOLE, WHOLE))
    # The last first epoch ends with a batch at 15 s, the first trainer with one at 16 s.
    assert (outcome.rate, outcome.first) == (5 / 1, 2.0)
    assert (outcome.lost, outcome.repeated) == (0, 0)


def test_lost_and_repeated_samples_are_counted() -> None:
    lost = judge(WORK, 0.0, logs_of(WHOLE, WHOLE[:3]))
    assert (lost.lost, lost.repeated) == (5, 0)
    repeated = judge(WORK, 0.0, logs_of(WHOLE, [*WHOLE, [7, 7]]))
    assert (repeated.lost, repeated.repeated) == (0, 2)


def test_trainers_that_are_never_busy_together_have_no_rate() -> None:
    first, second = logs_of(WHOLE, WHOLE)
    late = [batch._replace(at=batch.at + 100.0) for batch in second]
    assert judge(WORK, 8.0, [first, late]).rate == 0.0


def test_a_run_without_batches_has_no_rate() -> None:
    outcome = judge(WORK, 0.0, [[], []])
    assert (outcome.rate, outcome.lost) == (0.0, 40)


def test_a_log_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    log = TrainerLog(tmp_path / "log")
    log.taken(np.zeros((2, 3)), np.array([4, 7]))
    with (tmp_path / "log").open("a") as file:
        file.write("[1.0, [3")
    assert [batch.numbers for batch in read_log(tmp_path / "log")] == [[4, 7]]
    assert read_log(tmp_path / "none") == []


def test_files_are_repeated_for_more_samples(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.jpg", "note.txt"):
        (tmp_path / name).touch()
    work = FedWork(str(tmp_path), "cached", 5, 1, 1, 1, 1, 1)
    assert [Path(path).name for path in work.paths()] == ["a.jpg", "b.jpg"] * 2 + ["a.jpg"]
    assert FedWork.from_json(work.as_json()) == work


@pytest.mark.parametrize("feeder", [PENSTOCK, *PEERS.values()])
def test_every_contestant_decodes(feeder: object) -> None:
    assert "decoded" in feeder.kinds  # type: ignore[attr-defined]
