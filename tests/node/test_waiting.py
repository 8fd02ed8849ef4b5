"""A member that waits for long says what it waits for, with or without a timeout."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import WorkerError
from penstock.node.directory import NodeDirectory
from penstock.node.group import Group
from penstock.node.member import NodeFeed
from penstock.node.patience import ANSWER, SILENT, Patience
from penstock.node.service import Service
from tests.node.test_leaving import eventually
from tests.support.contract import WaitsForFile


@given(st.lists(st.floats(0.0, 100.0), max_size=20))
def test_each_thing_is_due_once_and_in_order(pauses: list[float]) -> None:
    patience, now, seen = Patience("a batch", 0.0), 0.0, []
    for pause in pauses:
        now += pause
        while (due := patience.due(now)) is not None:
            seen.append(due)
        left = patience.seconds(now)
        assert left is None or left > 0.0
    assert seen == ["ask", "unanswered"][: len(seen)]
    assert bool(seen) == (now >= SILENT)


def test_an_answer_ends_the_wait_for_it() -> None:
    patience = Patience("a batch", 0.0)
    assert patience.due(SILENT) == "ask"
    assert patience.answered(SILENT)
    assert not patience.answered(SILENT)
    assert patience.due(SILENT + ANSWER) is None
    assert patience.seconds(SILENT + ANSWER) is None


@given(st.floats(0.1, 200.0), st.integers(1, 30))
def test_a_node_that_answers_is_waited_for_whatever_the_timeout(
    timeout: float, answers: int
) -> None:
    patience, now, said = Patience("a batch", 0.0, timeout), 0.0, 0
    for _ in range(answers):
        left = patience.seconds(now)
        assert left is not None
        assert left <= timeout + 1e-6
        now += left + 1e-6
        assert patience.due(now) == "ask"
        said += patience.answered(now)
    assert said == (now >= SILENT)


@given(st.floats(0.1, 200.0))
def test_a_node_that_does_not_answer_is_an_error_with_a_timeout(timeout: float) -> None:
    patience = Patience("a batch", 0.0, timeout)
    asked = min(timeout, SILENT) + 1e-6
    assert patience.due(asked) == "ask"
    limit = asked + max(ANSWER, timeout)
    assert patience.due(limit - 1e-3) is None
    assert patience.due(limit) == "timeout"


def test_a_batch_that_comes_puts_the_question_off() -> None:
    patience = Patience("a batch", 0.0, timeout=6.0)
    patience.heard(5.0)
    assert patience.due(10.9) is None
    assert patience.due(11.0) == "ask"
    patience.heard(11.5)
    assert patience.due(11.0 + ANSWER) == "ask"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Members ask at once."""
    monkeypatch.setattr("penstock.node.patience.SILENT", 0.0)
    caplog.set_level(logging.WARNING, "penstock.share")


def held_back(file: Path) -> ps.Pipeline:
    source = ps.from_dataset(np.arange(16.0), random=False, version="1")
    return source.map(WaitsForFile(file, first=4), random=False, version="1").batch(4)


def test_a_member_says_which_samples_keep_workers_busy(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture, request: Any
) -> None:
    file = tmp_path / "go on"
    with held_back(file).loader(share="a", shuffle=False) as loader:
        epoch = iter(loader)
        next(epoch)
        group = service.groups["a"]
        assert eventually(lambda: group._engine is not None and group._engine.load > 0)
        request.getfixturevalue("impatient")
        rest: list[Any] = []
        job = threading.Thread(target=lambda: rest.extend(epoch))
        job.start()
        assert eventually(lambda: "busy, longest" in caplog.text)
        file.touch()
        job.join()
        assert len(rest) == 3
    first = next(text for text in caplog.messages if "busy, longest" in text)
    assert first.startswith("share='a' has waited for batch 1 of epoch 0")
    assert "on samples [4" in first
    assert "penstock status" in first
    assert str(service.directory.log) in first
    # Once for each wait.
    assert len([text for text in caplog.messages if "batch 1 of epoch 0" in text]) == 1


@pytest.mark.usefixtures("impatient")
def test_a_member_says_that_it_waits_for_another_with_lag_wait(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.staging = 4 * 32
    pipeline = ps.from_dataset(np.arange(64.0)).batch(4)
    with (
        pipeline.loader(share="a", shuffle=False, lag="wait") as slow,
        pipeline.loader(share="a", shuffle=False) as fast,
    ):
        slow_epoch, fast_epoch = iter(slow), iter(fast)
        next(slow_epoch)
        received: list[Any] = []
        job = threading.Thread(target=lambda: received.extend(b.tolist() for b in fast_epoch))
        job.start()
        assert eventually(lambda: "(lag='wait') has taken its batches" in caplog.text)
        assert len(list(slow_epoch)) == 15
        job.join()
    assert len(received) == 16


@pytest.mark.usefixtures("impatient")
def test_a_node_that_does_not_answer_is_reported(
    node_directory: NodeDirectory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.node.patience.ANSWER", 0.0)
    monkeypatch.setattr("penstock.node.member.ANSWER", 0.0)
    node_directory.create()
    hanging = node_directory.listen()
    received: list[Any] = []

    def run() -> None:
        with ps.from_dataset(np.arange(8.0)).batch(4).loader(share="a") as loader:
            received.extend(loader)

    job = threading.Thread(target=run)
    job.start()
    assert eventually(lambda: "no answer within" in caplog.text)
    assert "share='a' has waited for the node to let it join" in caplog.text
    # The job starts another node when this one has gone.
    node_directory.socket.unlink()
    hanging.close()
    job.join()
    assert len(received) == 2


@pytest.mark.usefixtures("impatient")
def test_a_process_that_hangs_while_it_starts_a_node_is_reported(
    node_directory: NodeDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[Any] = []

    def run() -> None:
        with ps.from_dataset(np.arange(8.0)).batch(4).loader(share="a") as loader:
            received.extend(loader)

    job = threading.Thread(target=run)
    with node_directory.starting():
        job.start()
        assert eventually(lambda: "to connect to a node" in caplog.text)
    job.join()
    assert len(received) == 2


def test_with_a_timeout_a_node_that_does_not_answer_is_an_error(
    node_directory: NodeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.node.patience.ANSWER", 0.0)
    node_directory.create()
    with node_directory.listen():
        loader = ps.from_dataset(np.arange(8.0)).batch(4).loader(share="a", timeout=0.1)
        with loader, pytest.raises(WorkerError, match=r"does not answer.*timeout=0.1.*node\.log"):
            next(iter(loader))
        node_directory.socket.unlink()


def test_a_long_wait_is_no_error_with_a_timeout_if_the_node_answers(
    service: Service, tmp_path: Path
) -> None:
    """The node kills a worker that takes longer; the second worker may take as long again."""
    file = tmp_path / "go on"
    asked = threading.Event()
    group_doing = Group.doing

    def doing(self: Group, peer: Any) -> str:
        asked.set()
        return group_doing(self, peer)

    patched = pytest.MonkeyPatch()
    patched.setattr(Group, "doing", doing)
    try:
        with held_back(file).loader(share="a", shuffle=False) as loader:
            epoch = iter(loader)
            next(epoch)
            feed = loader._feed
            assert isinstance(feed, NodeFeed)
            feed._timeout = 0.05  # of this member only: the workers of the node may take longer
            rest: list[Any] = []
            job = threading.Thread(target=lambda: rest.extend(epoch))
            job.start()
            assert asked.wait(60)
            file.touch()
            job.join()
    finally:
        patched.undo()
    assert len(rest) == 3


@pytest.mark.parametrize("when", ["asked", "waiting"])
def test_a_new_node_need_not_answer_what_the_last_one_was_asked(when: str) -> None:
    class Gone:
        """The connection to a node that has died."""

        wire: ClassVar[Any] = type("DeadWire", (), {"receive": lambda self: None})()

    feed, now = NodeFeed.__new__(NodeFeed), 6.0
    before, after = Gone(), Gone()
    stub: Any = feed
    stub._connection, stub._clock = before, lambda: now
    stub._connected = lambda: stub._connection

    def reconnect() -> None:
        stub._connection = after

    stub._reconnect = reconnect
    stub._wait = lambda connection, patience: reconnect() if when == "asked" else None
    patience = Patience("a batch", 0.0, timeout=6.0)
    assert patience.due(now) == "ask"
    feed._receive(patience)
    assert stub._connection is after
    assert patience.due(now + 6.0) == "ask"
