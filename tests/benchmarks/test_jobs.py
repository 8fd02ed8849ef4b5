"""The benchmark ``jobs``: counters, tables and notes, and real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.__main__ import main, parse
from benchmarks.harness.chart import panels
from benchmarks.harness.measure import Lane, Run
from benchmarks.harness.photographs import BY_HAND
from benchmarks.harness.processes import wait_until
from benchmarks.harness.sameness import Look
from benchmarks.jobs import jobs
from benchmarks.jobs import run as jobs_run
from benchmarks.jobs.board import Board, JobState, Phase
from benchmarks.jobs.job import function_path, import_function
from benchmarks.jobs.jobs import (
    BUSY_NODE,
    IDLE_NODE,
    SHARED,
    TENSORSOCKET,
    UNSHARED,
    Entry,
    delays,
    scaling,
)
from benchmarks.jobs.run import JobsRunError, Snapshot, Timing, free_ports, run_jobs
from benchmarks.jobs.work import JobSetup, SharedPhotos

LOOK = Look((2,), "uint8", 100.0, 50.0)


def work(place: Path, **other: Any) -> SharedPhotos:
    return SharedPhotos(place, "uint8", 4, 2, side=16, **other)


def photographs(place: Path, count: int = 12) -> Path:
    simplejpeg = pytest.importorskip("simplejpeg")
    pytest.importorskip("cv2")
    draws = np.random.default_rng(0)
    for number in range(count):
        folder = place / "ab"[number * 2 // count]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (48, 64, 3)).astype(np.uint8)
        (folder / f"{number:03}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels))
    return place


def entry(setup: JobSetup, number: int, **values: float) -> Entry:
    made = Entry(setup, number)
    made.lane = Lane(setup.title, setup.contestant.ours, {0: Run(values, LOOK)})
    return made


# The board.


def test_all_processes_see_the_same_board(tmp_path: Path) -> None:
    mine, theirs = (Board(tmp_path / "board", 3) for _ in range(2))
    theirs.add(1, 64)
    theirs.add(1, 36)
    theirs.set_state(2, JobState.RUNNING)
    mine.phase = Phase.INSPECT
    assert mine.counts() == [0, 100, 0]
    assert mine.state(2) is JobState.RUNNING
    assert theirs.phase is Phase.INSPECT


def test_a_wait_that_times_out_names_what_has_not_happened() -> None:
    with pytest.raises(TimeoutError, match="no batch after 0 s"):
        wait_until(lambda: False, lambda: None, 0.0, "no batch")


def test_a_function_is_imported_by_its_path() -> None:
    for setup in jobs.SETUPS:
        assert import_function(function_path(setup.contestant.prepare)) is setup.contestant.prepare


def test_a_workload_survives_json() -> None:
    made = SharedPhotos(Path("a/b"), "uint8", 4, 2, jobs=3, ports=(1, 2))
    assert SharedPhotos.from_plain(json.loads(json.dumps(made.as_plain()))) == made


def test_free_ports_are_different_ones() -> None:
    assert len(set(free_ports(4))) == 4


# Counters.


def values(setup: JobSetup, number: int, before: Snapshot, after: Snapshot, tmp_path: Path) -> Any:
    (tmp_path / "a").mkdir(exist_ok=True)
    for name in range(100):
        (tmp_path / "a" / f"{name}.jpg").touch()
    files = tmp_path / "files"
    files.mkdir(exist_ok=True)
    made = jobs_run._JobGroup(setup, sys.executable, files, work(tmp_path), number, Timing(1, 0))
    return made._values(before, after)


def test_samples_delivered_and_samples_prepared_are_counted_separately(tmp_path: Path) -> None:
    before = Snapshot(10.0, (0, 50), 25.0, 1.0, 1000)
    after = Snapshot(14.0, (200, 250), 225.0, 3.0, 5000)
    assert values(SHARED, 2, before, after, tmp_path) == {
        "rate": 100.0,
        "cpu": 5.0,
        "cpu_prepared": 10.0,
        "prepared": 1.0,
        # Each job had 200 samples: two epochs of the 100 files.
        "read": 2000.0,
    }


def test_a_job_that_came_to_a_stop_makes_a_run_invalid(tmp_path: Path) -> None:
    before, after = Snapshot(0.0, (0, 5), 0, 0, 0), Snapshot(1.0, (9, 5), 9, 1, 1)
    with pytest.raises(JobsRunError, match="1 of 2 jobs came to a stop"):
        values(SHARED, 2, before, after, tmp_path)


# Tables and notes.


def test_more_jobs_are_compared_with_one() -> None:
    usual = {"rate": 1.0, "memory": 100e6, "frameworks": 20e6, "cpu_prepared": 1.0, "read": 50e6}
    more = {**usual, "memory": 290e6, "frameworks": 160e6, "cpu_prepared": 1.2, "read": 51e6}
    lanes = {1: entry(SHARED, 1, **usual).lane, 8: entry(SHARED, 8, **more).lane}
    found = scaling(lanes)
    assert found.notes == (
        "jobs, scaling: 8 jobs: CPU / 1 job 1.20, target at most 1.1: MISSED",
        "jobs, scaling: 8 jobs: read / 1 job 1.02, target at most 1.05: reached",
        # 130 MB besides the frameworks, against 80 MB for one job.
        "jobs, scaling: 8 jobs: memory / 1 job 1.62, target at most 1.5: MISSED",
    )
    assert found.wrong == ()


def test_the_rate_is_compared_with_shared_and_unshared_peers() -> None:
    usual = {"cpu": 1.0, "cpu_prepared": 1.0, "memory": 1.0, "frameworks": 1.0, "read": 1.0}
    rates = {JobSetup(BY_HAND): 800.0, TENSORSOCKET: 3000.0, UNSHARED: 1500.0, SHARED: 6000.0}
    four = [entry(setup, 4, rate=rate, **usual) for setup, rate in rates.items()]
    found = jobs._race(4, four, work(Path("nowhere")))
    assert found.notes == (
        "jobs, 4: Penstock, shared: rate / best that does not share 7.50, target at least 4: "
        "reached",
        "jobs, 4: Penstock, shared: rate / TensorSocket 2.00, target at least 1: reached",
    )
    (panel,) = panels(found.data)
    assert panel.bars[0].title == SHARED.title
    two = [entry(setup, 2, rate=rate, **usual) for setup, rate in rates.items()]
    assert jobs._race(2, two, work(Path("nowhere"))).notes == ()


def test_the_target_for_latency_applies_to_an_idle_node() -> None:
    found = delays(
        [
            entry(IDLE_NODE, 1, delay=0.0015, delay_99=0.004),
            entry(IDLE_NODE, 8, delay=0.0025, delay_99=0.004),
            entry(BUSY_NODE, 8, delay=0.0050, delay_99=0.009),
        ]
    )
    assert found.notes == (
        "jobs, latency: node at rest, 1 job: median 1.50 ms, target below 2: reached",
        "jobs, latency: node at rest, 8 jobs: median 2.50 ms, target below 2: MISSED",
    )
    assert found.tables[0].rows[2] == ("node at work, 8 jobs", "5.00", "9.00")


def test_a_peer_that_gets_stuck_is_tried_again_and_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries: list[int] = []

    def run(*_: Any) -> Run:
        tries.append(1)
        if len(tries) < 3:
            raise JobsRunError("2 of 2 jobs came to a stop")
        return Run({"rate": 1.0}, LOOK)

    monkeypatch.setattr(jobs, "run_jobs", run)
    made = Entry(TENSORSOCKET, 2)
    made.run(0, tmp_path, work(tmp_path), Timing(1, 0))
    assert made.lane.runs[0].values == {"rate": 1.0}
    assert made.notes() == ["jobs, 2: TensorSocket got stuck 2 times: 2 of 2 jobs came to a stop"]


def test_penstock_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*_: Any) -> Run:
        raise JobsRunError("no batch")

    monkeypatch.setattr(jobs, "run_jobs", run)
    made = Entry(SHARED, 2)
    made.run(0, tmp_path, work(tmp_path), Timing(1, 0))
    assert (made.lane.why_not, len(made.stuck)) == ("failed: no batch", 1)


def test_a_peer_that_is_not_installed_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = SimpleNamespace(python="", why_not="not installed: run scripts/bench-setup dali")
    monkeypatch.setattr(jobs, "interpreter", lambda *_: missing)
    found = jobs._race(2, [Entry(jobs.SETUPS[1], 2)], work(Path("nowhere")))
    assert "run scripts/bench-setup dali" in found.tables[0].rows[0][0]
    assert found.wrong == ()


def test_a_folder_without_photographs_is_refused_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(SystemExit, match="has no JPEG files in class folders"):
        main(["jobs", "--data", str(tmp_path)])


# Real processes.


def test_a_failing_job_is_reported_and_the_others_are_ended(tmp_path: Path) -> None:
    data = photographs(tmp_path / "data")
    for path in data.rglob("*.jpg"):
        path.write_bytes(b"no photograph")
    with pytest.raises(JobsRunError) as failed:
        run_jobs(UNSHARED, sys.executable, tmp_path, work(data), 2, Timing(0.1, 0.1, patience=30))
    assert ".jpg" in failed.value.printed
    assert [pid for pid in psutil.pids() if _is_job(pid, tmp_path)] == []


def _is_job(pid: int, place: Path) -> bool:
    try:
        return any(str(place) in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def test_the_benchmark_runs_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CHECKED", 16)
    monkeypatch.setattr(jobs_run, "MEMORY_INTERVAL", 0.01)
    data = photographs(tmp_path / "data")
    kept, drawn = tmp_path / "found.json", tmp_path / "found.svg"
    short = ["--rounds", "1", "--seconds", "0.2", "--warm-up", "0.05", "--batch", "4"]
    files = ["--json", str(kept), "--chart", str(drawn)]
    ended = main(["jobs", "--data", str(data), "--peers", "none", "--jobs", "2", *short, *files])
    shown = capsys.readouterr().out
    assert ended == 0, shown
    written = json.loads(kept.read_text())
    raced = written["data"]["jobs, 2"]
    assert list(raced) == [UNSHARED.title, SHARED.title]
    seen = raced[SHARED.title]["rounds"]["0"]
    assert (seen["look"]["shape"], seen["look"]["dtype"]) == ([224, 224, 3], "uint8")
    assert seen["values"]["rate"] > 0
    assert seen["values"]["memory"] > seen["values"]["frameworks"] > 0
    assert list(written["data"]["jobs, latency"]) == [
        "node at rest, 2 jobs",
        "node at work, 2 jobs",
    ]
    assert "jobs, 2" in drawn.read_text()
    assert parse(["jobs", "--data", str(data)])[1].jobs == [1, 2, 4, 8]
