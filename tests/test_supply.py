"""Slots: a batch has one from its first piece on, and the loop gives them back just before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import penstock as ps
from penstock.engine import Engine
from penstock.errors import SlotError
from penstock.loader import Loader
from penstock.packing import pack
from penstock.pools.inline import InlinePool
from penstock.pools.pool import Desk, InSlot, Task, run
from penstock.pools.runner import Runner, Work, WorkerInfo


class ByHand:
    """Workers that move only while the loop waits: all take what they can, then one ends."""

    kind: ClassVar[str] = "processes"
    own_process: ClassVar[bool] = True
    restarts = 0

    def __init__(self, work: Work, size: int, seed: int, *_: object) -> None:
        self.size = size
        self.notices = 0
        self.noticed: list[int] = []
        self._runners = [Runner(work, WorkerInfo(n, size, seed, process=True)) for n in range(size)]
        self._busy: dict[int, Task] = {}
        self._desk: Desk | None = None

    def start(self, desk: Desk) -> None:
        self._desk = desk

    def notify(self) -> None:
        self.notices += 1

    def help(self) -> bool:
        assert self._desk is not None
        self.noticed.append(self.notices)
        for worker in reversed(range(self.size)):
            task = None if worker in self._busy else self._desk.take(worker)
            if task is not None:
                self._busy[worker] = task
        if not self._busy:
            return False
        worker = min(self._busy, key=lambda worker: self._busy[worker].id)
        task = self._busy.pop(worker)
        outcome = run(self._runners[worker], task)
        if outcome.value is not None and task.slot is not None:
            packed = pack(outcome.value)
            packed.write_into(memoryview(task.slot.map))
            outcome.value = InSlot(packed.nbytes)
        self._desk.done(task.id, outcome)
        return True

    def watch(self, limit: float | None) -> None:
        raise AssertionError("the loop waits for workers that have nothing to do")

    def outdated(self) -> bool:
        return False

    def close(self) -> None:
        self._desk = None
        self._busy.clear()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pools.make.ProcessPool", ByHand)


def engine_of(loader: Loader) -> Engine:
    assert loader._engine is not None
    return loader._engine


def test_a_batch_that_nobody_has_begun_has_no_slot() -> None:
    with ps.from_dataset(np.zeros((64, 10))).batch(4).loader(workers=0) as loader:
        epoch = iter(loader)
        for _ in range(8):
            next(epoch)
        # The loop drops each before it asks for the next: its slot is there again in time.
        assert isinstance(engine_of(loader).pool, InlinePool)
        assert len(engine_of(loader).ring) == 1
        for _batch in epoch:
            assert len(engine_of(loader).ring) <= 2


@pytest.mark.usefixtures("by_hand")
def test_workers_begin_the_next_batch_in_the_slot_that_came_back() -> None:
    pipeline = ps.from_dataset(np.arange(64.0)).batch(1)
    with pipeline.loader(workers=1, kind="processes", prefetch=4, shuffle=False) as loader:
        epoch = iter(loader)
        assert [float(next(epoch)[0]) for _ in range(60)] == [float(i) for i in range(60)]
        assert len(engine_of(loader).ring) == 1


@pytest.mark.usefixtures("by_hand")
def test_a_worker_that_found_no_slot_is_told_to_look_again() -> None:
    pipeline = ps.from_dataset(np.arange(64.0)).batch(1)
    options: dict[str, Any] = {"workers": 3, "kind": "processes", "prefetch": 3, "memory": "1B"}
    with pipeline.loader(**options, shuffle=False) as loader:
        epoch = iter(loader)
        kept = [next(epoch)]
        # Three slots are all there may be: one is kept, the others are those of batches 1 and 2.
        assert float(next(epoch)[0]) == 1.0
        pool = engine_of(loader).pool
        assert isinstance(pool, ByHand)
        kept.clear()
        before, asked = pool.notices, len(pool.noticed)
        assert float(next(epoch)[0]) == 2.0
        assert pool.noticed[asked] > before
        assert [float(batch[0]) for batch in epoch] == [float(i) for i in range(3, 64)]


def numbers() -> Iterator[float]:
    return iter(map(float, range(9)))


@pytest.mark.usefixtures("by_hand")
def test_the_last_slot_is_never_that_of_a_later_batch() -> None:
    # The workers of later batches ask first, there are fewer slots than workers, and the loop
    # keeps each batch until it has the next.
    pipeline = ps.from_dataset(numbers).batch(2)
    with pipeline.loader(workers=6, kind="processes", memory="1B") as loader:
        seen = []
        for batch in loader:
            seen += batch.tolist()
    assert sorted(seen) == sorted([float(i) for i in range(9)] * 6)


@pytest.mark.usefixtures("by_hand")
def test_without_a_slot_what_is_ready_is_handed_out_before_the_error() -> None:
    pipeline = ps.from_dataset(np.arange(64.0)).batch(1)
    options: dict[str, Any] = {"workers": 2, "kind": "processes", "prefetch": 4, "memory": "1B"}
    with pipeline.loader(**options, shuffle=False) as loader:
        kept: list[Any] = []
        with pytest.raises(SlotError, match="still holds 3 batches"):
            kept.extend(iter(loader))
        assert [float(batch[0]) for batch in kept] == [0.0, 1.0, 2.0]
