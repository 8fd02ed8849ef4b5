"""``penstock top``: its text, on terminals and in pipes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import cli
from penstock.stats import PoolStats
from penstock.watch.live_directory import LiveDirectory
from penstock.watch.rendering import bar, lines_of
from penstock.watch.snapshot import from_json, to_json
from penstock.watch.view import LoaderHistory, View
from tests.support.snapshots import FULL, STANDING, STATS, snapshot


def history(**more: Any) -> LoaderHistory:
    loader = LoaderHistory(snapshot(**more))
    loader.add(loader.last, 1_000.5)
    return loader


def test_a_loader_is_shown_with_all_it_counts() -> None:
    shown = lines_of([history(stats=FULL)])
    assert shown == [
        "process 4711, loader 0: python train.py",
        "  <Loader of 5,000 samples>",
        "  at         epoch 3, batch 12 of 50",
        "  stall      █████░░░░░░░░░░░░░░░ 25% now, 25% since the first batch",
        "  speed      100 samples/s, 1.0 batches/s, 8.0 KB/s read",
        "  queue      3 batches ready, 1 in preparation; 5 slots in use, 2.0 MB",
        "  workers    2 threads, busy 60% of the time",
        "  prepared   600 samples here, 300 by helper-1, 100 by helper-2",
        "  cache      40% hits now; 600 samples, 30.0 MB of 40.0 MB",
        "  device     cuda:0, 25% of the samples (25 of 100 tiny-batches); t = -2; spatial; "
        "3.0 MB over the bus, buffers 400.0 KB",
        "  refurbish  700 reused, 300 fresh; 4.0 MB kept",
        "  echo       1,000 samples delivered from 500 prepared, factor 2",
        "  mix        web: 750 samples in this epoch (75.0% by weight), 1.50 passes",
        "             code: 250 samples in this epoch (25.0% by weight), 0.50 passes",
        "  bad        2 samples, 1 task run again",
        "             cat/7.jpg (index 7) in decode: not a JPEG",
        '             dog/"9" .jpg (index 9) in decode: cut short',
        "  stage   samples/s  ms/sample  share of work",
        "  source         60      5.000  ██░░░░░░░░ 25%",
        "  decode        100      9.000  ████████░░ 75%",
    ]


def test_a_sample_that_is_bad_in_every_epoch_is_named_once() -> None:
    again = replace(FULL, bad=40, bad_samples=FULL.bad_samples * 20)
    shown = lines_of([history(stats=again)])
    assert "  bad        40 samples, 1 task run again" in shown
    assert sum("cat/7.jpg" in line for line in shown) == 1
    assert len(snapshot(again).as_dict()["stats"]["bad_samples"]) == 2


def test_a_member_of_a_group_shows_no_workers_and_no_stages() -> None:
    member = replace(
        STATS, stages=(), caches=(), pool=PoolStats("node", 0, 0.0, 0.0, 0), elapsed=0.0
    )
    standing = replace(STANDING, share="search-1", rank=1, world=4, batches=None, slot_bytes=0)
    shown = lines_of([history(stats=member, standing=standing)])
    assert "  at     epoch 3, batch 12, rank 1 of 4, shares search-1" in shown
    assert not [line for line in shown if "workers" in line or "stage" in line]


def test_machines_are_named_only_if_they_have_prepared_samples() -> None:
    assert not [line for line in lines_of([history()]) if line.strip().startswith("prepared")]
    assert from_json(to_json(snapshot(FULL))) == snapshot(FULL)


def test_a_waiting_loop_and_a_busy_loop_are_told_apart() -> None:
    waiting = history(waiting=1_000.0)
    waiting.add(waiting.last, 1_012.0)
    busy = history(number=1)
    busy.add(busy.last, 1_100.0)
    shown = "\n".join(lines_of([waiting, busy]))
    assert "; waiting for a batch for 12 s" in shown
    assert "; no batch taken for 1 min 40 s" in shown


def test_bars_can_be_drawn_in_ascii() -> None:
    assert [bar(share, 4, ascii_only=True) for share in (-1, 0, 0.5, 1, 7)] == [
        "....",
        "....",
        "##..",
        "####",
        "####",
    ]
    assert all(line.isascii() for line in lines_of([history(stats=FULL)], ascii_only=True))


# The command.


def in_pipe(*words: str, **settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "top", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "100", **settings},
    )


@pytest.fixture
def training(live: LiveDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[ps.Loader]:
    """A loader that is iterated by a thread during the test, and reports on every batch."""
    monkeypatch.setattr("penstock.watch.publish.Pulse.due", lambda self: not self.stopped)
    begun, end = threading.Event(), threading.Event()
    with ps.from_dataset(np.arange(400.0)).batch(4).loader(workers=0, seed=0) as loader:

        def train() -> None:
            while True:
                for _ in loader:
                    begun.set()
                    if end.wait(0.01):
                        return

        thread = threading.Thread(target=train)
        thread.start()
        try:
            assert begun.wait(60)
            yield loader
        finally:
            end.set()
            thread.join()


def test_without_loaders_top_says_so(
    live: LiveDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", "--once"]) == 0
    assert capsys.readouterr().out == "No loader is running.\n"
    assert cli.main(["top", "--once", "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert (view["loaders"], view["node"]) == ([], None)


def test_a_directory_in_which_loaders_cannot_publish_is_named(
    live: LiveDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    live.path.parent.mkdir()
    live.path.parent.chmod(0o755)
    assert cli.main(["top", "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("No loader is running. Loaders cannot publish their status: ")
    assert f"chmod 700 {live.path.parent}" in shown


def test_once_shows_current_rates(
    training: ps.Loader, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep_until_the_next_report(_: float) -> None:
        # A batch is counted before it is reported, so only the second one is surely preceded by
        # a report.
        batches = training.stats().batches + 2
        while training.stats().batches < batches:
            time.sleep(0.001)

    clock = SimpleNamespace(sleep=sleep_until_the_next_report)
    monkeypatch.setattr("penstock.commands.top.time", clock)
    assert cli.main(["top", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"process {os.getpid()}, loader ")
    assert any(line.startswith("  source ") for line in lines)
    assert cli.main(["top", "--once", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["loaders"]
    assert 0 < found["rates"]["seconds"] < found["overall"]["seconds"]
    assert found["rates"]["samples_per_second"] > 0


@pytest.mark.usefixtures("training")
def test_in_a_pipe_every_refresh_is_printed_until_ctrl_c() -> None:
    with in_pipe("--interval", "0.1") as watching:
        assert watching.stdout is not None
        seen = 0
        while seen < 3:
            line = watching.stdout.readline()
            assert line
            assert "\x1b" not in line
            seen += line.startswith(f"process {os.getpid()}")
        watching.send_signal(signal.SIGINT)
        _, complaints = watching.communicate(timeout=60)
    assert (watching.returncode, complaints) == (0, "")


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize(("terminal", "redrawn"), [("dumb", False), ("xterm", True)])
def test_a_terminal_is_redrawn_if_it_can_be(terminal: str, redrawn: bool) -> None:
    ours, theirs = pty.openpty()
    seen = bytearray()
    enough, gone = threading.Event(), threading.Event()

    def read() -> None:
        with suppress(OSError):  # the other end has been closed
            while not gone.is_set():
                seen.extend(os.read(ours, 65536))
                if seen.count(b"since the first batch") >= 3:
                    enough.set()

    reading = threading.Thread(target=read)
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "top", "--interval", "0.1"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": terminal, "COLUMNS": "100", "LINES": "50"},
    ) as watching:
        os.close(theirs)
        reading.start()
        was_enough = enough.wait(60)
        watching.send_signal(signal.SIGINT)
        _, complaints = watching.communicate(timeout=60)
    gone.set()
    reading.join()
    os.close(ours)
    assert was_enough
    assert (watching.returncode, complaints) == (0, b"")
    assert (b"\x1b[" in seen) is redrawn


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_an_invalid_interval_is_a_usage_error(seconds: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", f"--interval={seconds}"])
    assert ended.value.code == 2


# The node.


def test_the_node_is_shown_below_the_loaders(
    live: LiveDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "0.3")
    from penstock.node.client import request_end
    from penstock.node.directory import NodeDirectory

    pipeline = ps.from_dataset(np.arange(64.0)).batch(8)
    try:
        with pipeline.loader(seed=0, share="search-1") as loader:
            epoch = iter(loader)
            for _ in range(3):
                next(epoch)
            view = View()
            view.look()
            shown = view.lines()
            (found,) = view.loaders
            assert found.last.standing.share == "search-1"
            assert view.as_dict()["node"]["groups"][0]["name"] == "search-1"
        assert any(line.startswith("node    process ") for line in shown)
        assert any(line.startswith("search-1: 1 member") for line in shown)
    finally:
        request_end(NodeDirectory())


def test_a_node_that_does_not_answer_does_not_end_the_view(
    live: LiveDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.errors import WorkerError
    from penstock.node import client

    def hang(**_: Any) -> None:
        raise WorkerError("it hangs")

    monkeypatch.setattr(client, "request_status", hang)
    view = View()
    view.look()
    assert view.lines() == ["No loader is running."]
    monkeypatch.setattr(client, "request_status", lambda **_: {"release": "9.9", "pid": 77})
    view.look()
    assert view.lines()[-1] == "node    process 77, of Penstock 9.9"
