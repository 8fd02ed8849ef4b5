"""Publishing: reports are true, disappear with their loader, and never disturb training."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import SampleError
from penstock.host.process import alive, started
from penstock.loader import Loader
from penstock.watch import publish
from penstock.watch.live_directory import LiveDirectory, ReportFile, read_report
from penstock.watch.snapshot import Snapshot


def numbers(**options: Any) -> Loader:
    pipeline = ps.from_dataset(np.arange(40.0)).cache("1MB").batch(4)
    return pipeline.loader(seed=0, workers=0, **options)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report at every batch."""
    monkeypatch.setattr("penstock.watch.publish.Pulse.due", lambda self: not self.stopped)


@pytest.mark.usefixtures("hurry")
def test_a_loader_publishes_its_position_and_statistics(live: LiveDirectory) -> None:
    with numbers() as loader:
        epoch = iter(loader)
        for _ in range(3):
            next(epoch)
        (snapshot,) = live.snapshots()
        assert snapshot.pid == os.getpid()
        assert snapshot.waiting is None
        assert "python" in snapshot.command
        assert (snapshot.standing.epoch, snapshot.standing.batch, snapshot.standing.batches) == (
            0,
            3,
            10,
        )
        assert snapshot.standing.name == repr(loader)
        assert (snapshot.stats.samples, snapshot.stats.batches) == (12, 3)
        assert snapshot.stats.caches[0].misses >= 12
        assert snapshot.standing.slots >= 1
        mode = [os.stat(path).st_mode & 0o777 for path in (live.path, *live.path.iterdir())]
        assert mode == [0o700, 0o600]
        # The file is plain JSON.
        (file,) = live.path.iterdir()
        assert json.loads(file.read_text())["snapshot"]["pid"] == os.getpid()
    assert not live.path.exists()


@pytest.mark.usefixtures("hurry")
def test_every_loader_has_its_own_report(live: LiveDirectory) -> None:
    with numbers() as one, numbers(rank=1, world=2) as other:
        next(iter(one))
        next(iter(other))
        assert [snapshot.standing.rank for snapshot in live.snapshots()] == [0, 1]
        one.close()
        assert [snapshot.standing.rank for snapshot in live.snapshots()] == [1]


@pytest.mark.usefixtures("hurry")
def test_a_collected_loader_removes_its_report(live: LiveDirectory) -> None:
    loader = numbers()
    next(iter(loader))
    assert len(live.snapshots()) == 1
    del loader
    gc.collect()
    assert live.snapshots() == []


def eventually(live: LiveDirectory, wanted: Callable[[Snapshot], bool]) -> Snapshot:
    """The only report, when it is as wanted."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        for snapshot in live.snapshots():
            if wanted(snapshot):
                return snapshot
        time.sleep(0.01)
    raise AssertionError(f"there is no such report: {live.snapshots()}")


def test_a_loop_that_waits_long_for_its_first_batch_reports_it(live: LiveDirectory) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow(value: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return value

    pipeline = ps.from_dataset(np.arange(8.0)).map(slow, random=False).batch(4)
    with pipeline.loader(workers=1, kind="threads", seed=0) as loader:
        taken: list[Any] = []
        training = threading.Thread(target=lambda: taken.append(next(iter(loader))))
        training.start()
        try:
            assert reached.wait(60)
            waiting = eventually(live, lambda snapshot: snapshot.waiting is not None)
            assert waiting.stats.batches == 0
        finally:
            go_on.set()
            training.join()
        # Reported at once, although half a second has not passed: the step may take minutes.
        (snapshot,) = live.snapshots()
        assert snapshot.waiting is None
        assert snapshot.stats.batches == len(taken) == 1


def test_the_loop_makes_no_report_while_it_waits_for_its_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first report loads modules, which takes 10 ms.
    monkeypatch.setattr("penstock.engine.engine.WATCH_EVERY", 1e6)  # no wait is a long one
    asked: list[Loader] = []
    monkeypatch.setattr(publish.Publisher, "asked", lambda _, loader: asked.append(loader))
    pipeline = ps.from_dataset(np.arange(40.0)).batch(4)
    with pipeline.loader(workers=1, kind="threads", seed=0) as loader:
        assert len(next(iter(loader))) == 4
        assert asked == []


def stream() -> Iterator[float]:
    return iter(np.arange(8.0))


def failing(value: Any) -> Any:
    raise ValueError("as wanted")


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize(
    "pipeline",
    [
        ps.from_dataset(np.arange(8.0)).batch(4),
        ps.from_dataset(stream).batch(4),
        ps.from_dataset(np.arange(8.0)).map(failing, random=False).batch(4),
    ],
    ids=["dataset", "stream", "error"],
)
def test_an_ended_loop_is_not_reported_as_waiting(
    pipeline: ps.Pipeline, live: LiveDirectory
) -> None:
    with pipeline.loader(workers=0, seed=0) as loader:
        with suppress(SampleError):
            list(loader)
        (snapshot,) = live.snapshots()
        assert snapshot.waiting is None


def test_reports_are_half_a_second_apart(
    live: LiveDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    written: list[float] = []

    def make(loader: Loader) -> publish.Publisher:
        return publisher(loader, clock=lambda: now[0])

    publisher = publish.Publisher
    write = ReportFile.write

    def count(self: ReportFile, text: str) -> bool:
        written.append(now[0])
        return write(self, text)

    monkeypatch.setattr("penstock.loader.Publisher", make)
    monkeypatch.setattr(ReportFile, "write", count)
    pipeline = ps.from_dataset(np.arange(2_000.0)).batch(2)
    with pipeline.loader(workers=0, seed=0) as loader:
        for _ in loader:
            now[0] += 0.01
    # Ten seconds, and the end of the epoch. A loop without workers waits for each batch, so there
    # are two reports each time, but only one of the first batch.
    assert len(written) == 40
    later = written[1:]
    assert sorted({round(b - a, 6) for a, b in zip(later, later[2:], strict=False)}) == [0.5]


def test_publishing_can_be_switched_off(
    live: LiveDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LIVE", "0")
    with numbers() as loader:
        assert len(list(loader)) == 10
        assert not live.path.parent.exists()


# Directories in which nothing can be written.


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def open_to_others(live: LiveDirectory, _: pytest.MonkeyPatch) -> None:
    live.path.parent.mkdir()
    live.path.parent.chmod(0o755)


def full(_: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", refuse)


def read_only(_: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReportFile, "__init__", refuse)


def no_directory(live: LiveDirectory, _: pytest.MonkeyPatch) -> None:
    live.path.parent.write_text("in the way")


def broken(_: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "stats", lambda self: 1 / 0)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("spoil", [open_to_others, full, read_only, no_directory, broken])
def test_training_goes_on_if_nothing_can_be_published(
    spoil: Callable[[LiveDirectory, pytest.MonkeyPatch], None],
    live: LiveDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with numbers() as plain:
        wanted = [batch.tolist() for batch in plain]
    live.path.parent.rmdir()
    spoil(live, monkeypatch)
    with numbers() as loader:
        assert [batch.tolist() for batch in loader] == wanted
        assert live.snapshots() == []
        assert not live.path.exists() or list(live.path.iterdir()) == []
    if live.path.parent.is_file():
        live.path.parent.unlink()


@pytest.mark.usefixtures("hurry")
def test_a_deleted_report_is_written_again(live: LiveDirectory) -> None:
    with numbers() as loader:
        epoch = iter(loader)
        next(epoch)
        (file,) = live.path.iterdir()
        file.unlink()
        live.path.rmdir()
        for _ in range(2):
            next(epoch)
        (snapshot,) = live.snapshots()
        assert snapshot.stats.batches == 3


# Processes that end.

JOB = """
import os, sys
import numpy as np
import penstock as ps

loader = ps.from_dataset(np.arange(40.0)).batch(4).loader(workers=0, seed=0)
epoch = iter(loader)
next(epoch)
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[1] == "raise":
    raise RuntimeError("as wanted")
"""


@pytest.fixture
def job() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", JOB, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", ["end", "raise"])
def test_an_ended_process_leaves_no_report(
    how: str, live: LiveDirectory, job: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = job(how)
    assert [snapshot.pid for snapshot in live.snapshots()] == [process.pid]
    process.communicate("\n", timeout=60)
    assert not live.path.exists()


def test_the_report_of_a_killed_process_is_removed_by_the_next_reader(
    live: LiveDirectory, job: Callable[[str], subprocess.Popen[str]]
) -> None:
    one, other = job("end"), job("end")
    one.send_signal(signal.SIGKILL)
    # Its exit code has not been read yet, so its number is still taken; but it is dead.
    while started(one.pid) is not None:
        pass
    assert [snapshot.pid for snapshot in live.snapshots()] == [other.pid]
    assert [file.name.split("-")[0] for file in live.path.iterdir()] == [str(other.pid)]
    one.wait()
    other.communicate("\n", timeout=60)


def test_the_report_of_a_killed_process_is_removed_by_the_next_loader(
    live: LiveDirectory, job: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = job("end")
    process.kill()
    process.wait()
    with numbers() as loader:
        next(iter(loader))
        assert [file.name.split("-")[0] for file in live.path.iterdir()] == [str(os.getpid())]


@pytest.mark.usefixtures("hurry")
def test_a_reused_process_number_is_not_taken_for_the_dead_process(live: LiveDirectory) -> None:
    with numbers() as loader:
        next(iter(loader))
        (file,) = live.path.iterdir()
        (snapshot,) = live.snapshots()
        assert alive(snapshot.pid, snapshot.started)
        assert not alive(snapshot.pid, (snapshot.started or 0) - 1)
        body = json.loads(read_report(file) or b"")
        body["started"] -= 1
        other = ReportFile(live.path / f"{os.getpid()}-99.json")
        other.write(json.dumps(body))
        assert live.snapshots() == [snapshot]
        assert not other.path.exists()
        other.close()


def test_foreign_files_stay_and_malformed_reports_of_the_dead_are_removed(
    live: LiveDirectory,
) -> None:
    live.create()
    for name in ("notes.txt", f"{os.getpid()}-5.json", "4194305-0.json"):
        (live.path / name).write_text("{")
    assert live.snapshots() == []
    assert sorted(file.name for file in live.path.iterdir()) == [
        f"{os.getpid()}-5.json",
        "notes.txt",
    ]
    for file in list(live.path.iterdir()):
        file.unlink()


@pytest.mark.usefixtures("hurry")
def test_a_fork_does_not_remove_the_report_of_its_parent(live: LiveDirectory) -> None:
    with numbers() as loader:
        next(iter(loader))
        child = os.fork()
        if child == 0:
            try:
                loader.close()
                del loader
                gc.collect()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(live.snapshots()) == 1


# The report file.


def test_a_reader_never_sees_a_mixture_of_two_reports(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "1-0.json")
    texts = [json.dumps({"at": [number] * (1 + 40 * (number % 50))}) for number in range(500)]
    enough = threading.Event()

    def write() -> None:
        while not enough.is_set():
            for text in texts:
                report.write(text)

    report.write(texts[0])
    writing = threading.Thread(target=write)
    writing.start()
    seen = 0
    try:
        while seen < 500:
            body = read_report(report.path)
            if body is not None:
                assert len(set(json.loads(body)["at"])) == 1
                seen += 1
    finally:
        enough.set()
        writing.join()
    assert read_report(report.path) == texts[-1].encode()
    report.close()
    assert read_report(report.path) is None


def test_a_shorter_report_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "1-0.json")
    report.write(json.dumps({"name": "x" * 1_000}))
    report.write('{"name": "short"}')
    assert read_report(report.path) == b'{"name": "short"}'
    assert json.loads(report.path.read_text())["snapshot"] == {"name": "short"}
    report.close()


def test_a_half_written_report_is_not_read(tmp_path: Path) -> None:
    report = ReportFile(tmp_path / "1-0.json")
    assert report.write('{"a": "long enough"}')
    whole = report.path.read_bytes()
    for cut in range(len(whole)):
        report.path.write_bytes(whole[:cut] + b"x" * (len(whole) - cut))
        assert read_report(report.path) is None
    report.close()
    assert not report.path.exists()
