"""The benchmark ``loop``: every loader is measured, and only in the thread of the loop."""

from __future__ import annotations

import time
from argparse import Namespace

import pytest

from benchmarks import loop
from penstock.engine.feed import Queue


def test_it_waits_until_the_batch_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([Queue(), Queue(1, 1), Queue(1, 1, ready=True)])
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    loop.wait_until_ready(lambda: next(found), 0.25)
    assert len(slept) == 3
    assert slept[-1] == 0.25


def test_a_batch_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PATIENCE", -1.0)
    with pytest.raises(TimeoutError, match="no batch was ready"):
        loop.wait_until_ready(Queue, 0.0)


def test_a_batch_costs_the_time_of_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 2.0, 2.25])
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    assert loop.costs([1, 2, 3], lambda: Queue(ready=True), 2, 0.0) == [0.5, 0.25]


def test_every_loader_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "NAP", 0.0)
    monkeypatch.setattr(loop, "SETTLE", 0.0)
    kept = [case for case in loop.CASES if case.make in (loop._threads, loop._drop_in)]
    monkeypatch.setattr(
        loop, "run_alone", lambda call, *args, timeout: Namespace(value=call(*args))
    )
    monkeypatch.setattr(loop, "CASES", (kept[0], kept[-1]))
    result = loop.run(Namespace(batch=4, workers=1, batches=2, side=8, rounds=1))
    assert result.wrong == ()
    assert [row[0] for row in result.tables[0].rows] == [kept[0].title, kept[-1].title]
    assert all(len(measured) == 2 for measured in result.data.values())
