"""Loading a pipeline on trial: a process that is killed from outside is replaced, a bad one not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.pools.restarts import MOST_KILLED, FailedStarts
from penstock.engine.slots import shared_file
from penstock.errors import WorkerError
from penstock.node import trial
from penstock.node.directory import NodeDirectory
from penstock.node.member import NodeFeed
from penstock.node.trial import TrialError, load_on_trial
from penstock.serialize import pack


def load(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], closing_after: int = 100
) -> list[float]:
    """Load with processes that end with these codes. Returns the pauses between them."""
    pauses: list[float] = []
    left = list(codes)

    def load_once(*_: Any) -> tuple[int, bytes]:
        code = left.pop(0)
        return code, b"" if code else trial._LOADED

    monkeypatch.setattr(trial, "_load_once", load_once)

    def closing() -> bool:
        return len(codes) - len(left) >= closing_after

    load_on_trial(-1, [], "/", closing, sleep=pauses.append)
    return pauses


def test_a_process_killed_from_outside_is_replaced_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load(monkeypatch, [-signal.SIGKILL] * 4 + [0]) == [0.0, 0.1, 0.2, 0.4]


def test_a_process_that_is_killed_again_and_again_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TrialError, match="killed by SIGKILL"):
        load(monkeypatch, [-signal.SIGKILL] * MOST_KILLED)


@pytest.mark.parametrize("code", [-signal.SIGSEGV, -signal.SIGABRT, 3])
def test_a_process_that_ends_by_itself_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with pytest.raises(TrialError, match="cannot be loaded"):
        load(monkeypatch, [code, 0])


def test_a_pipeline_is_not_loaded_if_its_group_is_closed_during_the_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TrialError, match="closed before its pipeline was loaded"):
        load(monkeypatch, [-signal.SIGKILL, 0], closing_after=1)


class EndsItsProcess:
    """Unpickling it ends the process without an error."""

    def __reduce__(self) -> Any:
        return os._exit, (0,)


def test_a_process_that_ends_before_it_has_loaded_the_pipeline_is_an_error() -> None:
    packed = pack(EndsItsProcess())
    fd = shared_file(packed.nbytes)
    try:
        os.pwrite(fd, packed.tobytes(), 0)
        with pytest.raises(TrialError, match="cannot be loaded"):
            load_on_trial(fd, list(sys.path), "/", lambda: False)
    finally:
        os.close(fd)


def test_a_member_outlives_several_nodes_in_a_row_but_not_any_number(
    tmp_path: Path,
) -> None:
    pauses: list[float] = []
    feed = NodeFeed.__new__(NodeFeed)
    feed._directory = NodeDirectory(tmp_path)
    feed._deaths = FailedStarts()
    for _ in range(MOST_KILLED - 1):
        feed._count_death(pauses.append)
    assert pauses == sorted(pauses)
    with pytest.raises(WorkerError, match=rf"died {MOST_KILLED} times before it could prepare"):
        feed._count_death(pauses.append)
