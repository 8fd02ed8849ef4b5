"""Closing waits for worker threads; one that hangs is left behind with its memory."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.pools import threads
from penstock.engine.pools.runner import Work
from penstock.engine.pools.threads import ThreadPool
from penstock.errors import WorkerError
from penstock.operation import Operation


class Gate(Operation):
    """Waits, on one sample, until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def output(self, spec: Any) -> Any:
        return spec

    def apply(self, value: Any, params: Any) -> Any:
        if value[0] == 9:
            self.reached.set()
            self.opened.wait()
        return value


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


class Waiting(logging.Handler):
    """Sets an event when a message is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged = threading.Event()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        self.logged.set()


@pytest.fixture
def log() -> Iterator[Waiting]:
    handler = Waiting()
    logger = logging.getLogger("penstock.workers")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def started(gate: Gate, **options: Any) -> ps.Loader:
    data = [np.full(4, index, dtype=np.float64) for index in range(16)]
    pipeline = ps.from_dataset(data, random=False).map(gate).batch(4)
    return pipeline.loader(workers=2, kind="threads", shuffle=False, **options)


def test_close_returns_only_after_every_thread_has_ended(
    gate: Gate, log: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "LOG_AFTER", 0.01)
    loader = started(gate)
    assert next(iter(loader))[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert gate.reached.wait(60)
    closing = threading.Thread(target=loader.close)
    closing.start()
    assert log.logged.wait(60)
    assert "close() waits for thread" in log.text
    assert "sample" in log.text
    assert closing.is_alive()
    gate.opened.set()
    closing.join(60)
    assert not closing.is_alive()
    assert [one.name for one in threading.enumerate() if one.name.startswith("penstock-")] == []


def test_a_thread_that_hangs_is_left_behind_with_the_slot_it_writes_to(
    gate: Gate, log: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = threading.Event()
    clock = functools.partial(ThreadPool, clock=lambda: 1000.0 if late.is_set() else 0.0)
    monkeypatch.setattr("penstock.engine.pools.choose.ThreadPool", clock)
    loader = started(gate, timeout=60)
    epoch = iter(loader)
    for _ in range(2):
        next(epoch)
    engine = loader._feed
    assert isinstance(engine, Engine)
    assert gate.reached.wait(60)
    while len(engine._tasks) > 1:  # the other thread is still at a task that ends
        time.sleep(0.01)
    late.set()
    with pytest.raises(WorkerError, match="has been working on sample"):
        next(epoch)
    held = {id(batch.slot) for batch, _ in engine._tasks.values() if batch.slot is not None}
    assert held
    loader.close()
    assert "is left running" in log.text
    assert held.isdisjoint({id(slot) for slot in engine.ring._slots.values()})
    gate.opened.set()
    for thread in threading.enumerate():
        if thread.name.startswith("penstock-"):
            thread.join(60)
            assert not thread.is_alive()


class OpensGate(Waiting):
    """Lets the thread go on, and waits until it has ended its task, while a message is logged."""

    def __init__(self, gate: Gate, running: Callable[[], int]) -> None:
        super().__init__()
        self.gate = gate
        self.running = running

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.gate.opened.set()
        while self.running():
            time.sleep(0.01)


def test_a_thread_that_goes_on_while_it_is_left_behind_does_no_harm(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = threading.Event()
    pools: list[ThreadPool] = []

    def make(work: Work, size: int, seed: int) -> ThreadPool:
        pools.append(ThreadPool(work, size, seed, lambda: 1000.0 if late.is_set() else 0.0))
        return pools[-1]

    monkeypatch.setattr("penstock.engine.pools.choose.ThreadPool", make)
    loader = started(gate, timeout=60)
    next(iter(loader))
    (pool,) = pools
    current = pool._current
    logger = logging.getLogger("penstock.workers")
    handler = OpensGate(gate, lambda: len(current))
    logger.addHandler(handler)
    try:
        assert gate.reached.wait(60)
        while len(current) > 1:
            time.sleep(0.01)
        late.set()
        loader.close()
    finally:
        logger.removeHandler(handler)
    assert "is left running" in handler.text


class Owner:
    """Holds a loader in a reference cycle, so that only the garbage collector frees it."""

    def __init__(self, loader: ps.Loader) -> None:
        self.loader = loader
        self.cycle = self


def test_a_forgotten_loader_that_is_collected_in_its_own_worker_is_closed(gate: Gate) -> None:
    collected = threading.Event()
    gc.disable()
    try:
        owner = Owner(started(gate))
        next(iter(owner.loader))
        meter = owner.loader._meter
        worked = meter.worked

        def collecting(seconds: float) -> None:
            worked(seconds)
            if gate.opened.is_set():
                gc.collect()  # in a worker, which holds the lock of the engine
                collected.set()

        meter.worked = collecting  # type: ignore[method-assign]
        freed = weakref.ref(owner.loader)
        assert gate.reached.wait(60)
        del owner
        gate.opened.set()
        assert collected.wait(60)
    finally:
        gc.enable()
    assert freed() is None


def test_user_code_that_exits_in_a_thread_is_an_error_and_no_hang() -> None:
    def leave(value: Any) -> Any:
        if value == 9:
            raise SystemExit("3 samples are missing")
        return value

    pipeline = ps.from_dataset(np.arange(16), random=False).map(leave, random=False).batch(4)
    with (
        pipeline.loader(workers=2, kind="threads", shuffle=False) as loader,
        pytest.raises(WorkerError, match=r"raised SystemExit\(3 samples are missing\)"),
    ):
        list(loader)
