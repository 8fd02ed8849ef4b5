"""What running loaders publish: the truth, while they run, and never at training's cost."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
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
from penstock.watch.live import loaders
from penstock.watch.place import LivePlace
from penstock.watch.sheet import Sheet, read


def numbers(**options: Any) -> Loader:
    pipeline = ps.from_dataset(np.arange(40.0)).cache("1MB").batch(4)
    return pipeline.loader(seed=0, workers=0, **options)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report at every batch."""
    monkeypatch.setattr("penstock.watch.pulse.Pulse.due", lambda self: not self.stopped)


@pytest.mark.usefixtures("hurry")
def test_a_loader_says_where_it_stands(live: LivePlace) -> None:
    with numbers() as loader:
        epoch = iter(loader)
        for _ in range(3):
            next(epoch)
        (found,) = loaders()
        assert found.pid == os.getpid()
        assert found.waiting is None
        assert "python" in found.command
        assert (found.standing.epoch, found.standing.batch, found.standing.batches) == (0, 3, 10)
        assert found.standing.name == repr(loader)
        assert (found.stats.samples, found.stats.batches) == (12, 3)
        assert found.stats.caches[0].misses >= 12
        assert found.standing.slots >= 1
        mode = [os.stat(one).st_mode & 0o777 for one in (live.path, *live.path.iterdir())]
        assert mode == [0o700, 0o600]
        # Anybody may read it as JSON.
        (file,) = live.path.iterdir()
        assert json.loads(file.read_text())["snapshot"]["pid"] == os.getpid()
    assert not live.path.exists()


@pytest.mark.usefixtures("hurry")
def test_every_loader_has_its_own(live: LivePlace) -> None:
    with numbers() as one, numbers(rank=1, world=2) as other:
        next(iter(one))
        next(iter(other))
        assert [found.standing.rank for found in loaders()] == [0, 1]
        one.close()
        assert [found.standing.rank for found in loaders()] == [1]


@pytest.mark.usefixtures("hurry")
def test_a_loader_that_is_let_go_takes_its_report_along(live: LivePlace) -> None:
    loader = numbers()
    next(iter(loader))
    assert len(loaders()) == 1
    del loader
    gc.collect()
    assert loaders() == []


def test_a_loop_that_has_to_wait_says_so_before_it_does(live: LivePlace) -> None:
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
            (found,) = loaders()
            assert found.waiting is not None
            assert found.stats.batches == 0
        finally:
            go_on.set()
            training.join()
        # Said at once, though the half second is not over: the step may take minutes.
        (found,) = loaders()
        assert found.waiting is None
        assert found.stats.batches == len(taken) == 1


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
def test_a_loop_that_is_over_waits_for_nothing(pipeline: ps.Pipeline, live: LivePlace) -> None:
    with pipeline.loader(workers=0, seed=0) as loader:
        with suppress(SampleError):
            list(loader)
        (found,) = loaders()
        assert found.waiting is None


def test_reports_are_as_rare_as_the_clock_says(
    live: LivePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    written: list[float] = []

    def make(loader: Loader) -> publish.Publisher:
        return publisher(loader, clock=lambda: now[0])

    publisher = publish.Publisher
    write = Sheet.write

    def count(self: Sheet, text: str) -> bool:
        written.append(now[0])
        return write(self, text)

    monkeypatch.setattr("penstock.loader.Publisher", make)
    monkeypatch.setattr(Sheet, "write", count)
    pipeline = ps.from_dataset(np.arange(2_000.0)).batch(2)
    with pipeline.loader(workers=0, seed=0) as loader:
        for _ in loader:
            now[0] += 0.01
    # Ten seconds, and the end. A loop without workers waits for each batch: two reports a time.
    assert len(written) == 41
    assert sorted({round(b - a, 6) for a, b in zip(written, written[2:], strict=False)}) == [0.5]


def test_nothing_is_published_where_that_is_not_wanted(
    live: LivePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LIVE", "0")
    with numbers() as loader:
        assert len(list(loader)) == 10
        assert not live.path.parent.exists()


# Places where nothing can be written.


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def open_to_others(live: LivePlace, _: pytest.MonkeyPatch) -> None:
    live.path.parent.mkdir()
    live.path.parent.chmod(0o755)


def full(_: LivePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", refuse)


def read_only(_: LivePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sheet, "__init__", refuse)


def no_directory(live: LivePlace, _: pytest.MonkeyPatch) -> None:
    live.path.parent.write_text("in the way")


def broken(_: LivePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "stats", lambda self: 1 / 0)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("spoil", [open_to_others, full, read_only, no_directory, broken])
def test_training_goes_on_where_nothing_can_be_published(
    spoil: Callable[[LivePlace, pytest.MonkeyPatch], None],
    live: LivePlace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with numbers() as plain:
        wanted = [batch.tolist() for batch in plain]
    live.path.parent.rmdir()
    spoil(live, monkeypatch)
    with numbers() as loader:
        assert [batch.tolist() for batch in loader] == wanted
        assert loaders() == []
        assert not live.path.exists() or list(live.path.iterdir()) == []
    if live.path.parent.is_file():
        live.path.parent.unlink()


@pytest.mark.usefixtures("hurry")
def test_a_report_that_somebody_removed_is_there_again(live: LivePlace) -> None:
    with numbers() as loader:
        epoch = iter(loader)
        next(epoch)
        (file,) = live.path.iterdir()
        file.unlink()
        live.path.rmdir()
        for _ in range(2):
            next(epoch)
        (found,) = loaders()
        assert found.stats.batches == 3


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
def test_a_process_that_ends_leaves_nothing(
    how: str, live: LivePlace, job: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = job(how)
    assert [found.pid for found in loaders()] == [process.pid]
    process.communicate("\n", timeout=60)
    assert not live.path.exists()


def test_what_a_killed_process_left_is_removed_by_whoever_looks(
    live: LivePlace, job: Callable[[str], subprocess.Popen[str]]
) -> None:
    one, other = job("end"), job("end")
    one.send_signal(signal.SIGKILL)
    # Not asked for its exit code yet, it has still a number; but it is dead.
    while started(one.pid) is not None:
        pass
    assert [found.pid for found in loaders()] == [other.pid]
    assert [file.name.split("-")[0] for file in live.path.iterdir()] == [str(other.pid)]
    one.wait()
    other.communicate("\n", timeout=60)


def test_what_a_killed_process_left_is_removed_by_the_next_loader(
    live: LivePlace, job: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = job("end")
    process.kill()
    process.wait()
    with numbers() as loader:
        next(iter(loader))
        assert [file.name.split("-")[0] for file in live.path.iterdir()] == [str(os.getpid())]


@pytest.mark.usefixtures("hurry")
def test_a_process_that_has_the_number_of_a_dead_one_is_not_taken_for_it(live: LivePlace) -> None:
    with numbers() as loader:
        next(iter(loader))
        (file,) = live.path.iterdir()
        (found,) = loaders()
        assert alive(found.pid, found.started)
        assert not alive(found.pid, (found.started or 0) - 1)
        body = json.loads(read(file) or b"")
        body["started"] -= 1
        other = Sheet(live.path / f"{os.getpid()}-99.json")
        other.write(json.dumps(body))
        assert loaders() == [found]
        assert not other.path.exists()
        other.close()


def test_what_is_not_a_report_is_left_alone_or_belongs_to_the_dead(live: LivePlace) -> None:
    live.make()
    for name in ("notes.txt", f"{os.getpid()}-5.json", "4194305-0.json"):
        (live.path / name).write_text("{")
    assert loaders() == []
    assert sorted(one.name for one in live.path.iterdir()) == [f"{os.getpid()}-5.json", "notes.txt"]
    for file in list(live.path.iterdir()):
        file.unlink()


@pytest.mark.usefixtures("hurry")
def test_a_fork_takes_nothing_of_its_parents_away(live: LivePlace) -> None:
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
        assert len(loaders()) == 1


# The file.


def test_a_reader_never_sees_two_reports_at_once(tmp_path: Path) -> None:
    sheet = Sheet(tmp_path / "1-0.json")
    texts = [json.dumps({"at": [number] * (1 + 40 * (number % 50))}) for number in range(500)]
    done = threading.Event()

    def write() -> None:
        for text in texts * 3:
            sheet.write(text)
        done.set()

    sheet.write(texts[0])
    writing = threading.Thread(target=write)
    writing.start()
    seen = 0
    while not done.is_set():
        body = read(sheet.path)
        if body is not None:
            assert len(set(json.loads(body)["at"])) == 1
            seen += 1
    writing.join()
    assert seen > 0
    assert read(sheet.path) == texts[-1].encode()
    sheet.close()
    assert read(sheet.path) is None


def test_nothing_is_left_of_a_longer_report(tmp_path: Path) -> None:
    sheet = Sheet(tmp_path / "1-0.json")
    sheet.write(json.dumps({"name": "x" * 1_000}))
    sheet.write('{"name": "short"}')
    assert read(sheet.path) == b'{"name": "short"}'
    assert json.loads(sheet.path.read_text())["snapshot"] == {"name": "short"}
    sheet.close()


def test_half_a_report_is_none(tmp_path: Path) -> None:
    sheet = Sheet(tmp_path / "1-0.json")
    assert sheet.write('{"a": "long enough"}')
    whole = sheet.path.read_bytes()
    for cut in range(len(whole)):
        sheet.path.write_bytes(whole[:cut] + b"x" * (len(whole) - cut))
        assert read(sheet.path) is None
    sheet.close()
    assert not sheet.path.exists()
