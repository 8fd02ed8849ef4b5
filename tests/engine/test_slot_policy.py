"""Slots: a batch gets one with its first piece, and the loop returns slots for the next batches."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.pools.inline import InlinePool
from penstock.engine.pools.pool import Desk
from penstock.engine.pools.runner import InSlot, Runner, Task, Work, WorkerInfo
from penstock.errors import SlotError
from penstock.loader import Loader
from penstock.serialize import pack


class ByHand:
    """Workers that run only while the loop waits, so that tests do not depend on timing.

    On each call of ``help`` all free workers take a task; then the one that began first ends its
    task.
    """

    kind: ClassVar[str] = "processes"
    own_process: ClassVar[bool] = True
    divides_tasks: ClassVar[bool] = False
    restarts = 0
    starting = False

    def __init__(self, work: Work, size: int, seed: int, *_: object) -> None:
        self.size = size
        self.notifications = 0
        self.notifications_at_help: list[int] = []
        self._runners = [Runner(work, WorkerInfo(n, size, seed, process=True)) for n in range(size)]
        self._busy: dict[int, Task] = {}
        self._desk: Desk | None = None

    def start(self, desk: Desk) -> None:
        self._desk = desk

    def notify(self) -> None:
        self.notifications += 1

    def help(self) -> bool:
        assert self._desk is not None
        self.notifications_at_help.append(self.notifications)
        for worker in reversed(range(self.size)):
            task = None if worker in self._busy else self._desk.take(worker)
            if task is not None:
                self._busy[worker] = task
        if not self._busy:
            return False
        worker = self.first_to_end(sorted(self._busy, key=lambda worker: self._busy[worker].id))
        task = self._busy.pop(worker)
        outcome = self._runners[worker].run(task)
        if self.own_process and outcome.value is not None and task.slot is not None:
            packed = pack(outcome.value)
            packed.write_into(memoryview(task.slot.map))
            outcome.value = InSlot(packed.nbytes)
        self._desk.done(task.id, outcome)
        return True

    def first_to_end(self, workers: list[int]) -> int:
        return workers[0]

    def cancel(self, tasks: Collection[int]) -> None:
        pass

    def watch(self, limit: float | None) -> None:
        raise AssertionError("the loop waits, and no worker has a task")

    def outdated(self) -> bool:
        return False

    def runs_here(self) -> bool:
        return False

    def close(self, limit: float | None = None) -> set[int]:
        self._desk = None
        self._busy.clear()
        return set()


class Threads(ByHand):
    """The same workers in the role of threads; a seeded generator chooses which one ends first."""

    kind: ClassVar[str] = "threads"
    own_process: ClassVar[bool] = False
    chance: ClassVar[random.Random] = random.Random(0)

    def first_to_end(self, workers: list[int]) -> int:
        return self.chance.choice(workers)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker threads run by hand; every batch counts as large and has pieces of four samples."""
    monkeypatch.setattr("penstock.engine.pools.choose.ThreadPool", Threads)
    monkeypatch.setattr("penstock.engine.slot_policy.LARGE", 0)
    monkeypatch.setattr("penstock.engine.schedule.Schedule.piece_size", lambda self, rows: 4)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes run by hand."""
    monkeypatch.setattr("penstock.engine.pools.choose.ProcessPool", ByHand)


def engine_of(loader: Loader) -> Engine:
    assert isinstance(loader._feed, Engine)
    return loader._feed


def is_starved(engine: Engine) -> bool:
    return engine.starved


def test_a_batch_has_no_slot_before_a_worker_begins_it() -> None:
    with ps.from_dataset(np.zeros((64, 10))).batch(4).loader(workers=0) as loader:
        epoch = iter(loader)
        for _ in range(8):
            next(epoch)
        # The loop drops each batch before it asks for the next, so its slot is free in time.
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
def test_workers_that_found_no_slot_are_notified_when_one_is_free() -> None:
    pipeline = ps.from_dataset(np.arange(64.0)).batch(1)
    options: dict[str, Any] = {"workers": 3, "kind": "processes", "prefetch": 3, "memory": "1B"}
    with pipeline.loader(**options, shuffle=False) as loader:
        epoch = iter(loader)
        kept = [next(epoch)]
        # Three slots are the limit: one is kept, the others belong to batches 1 and 2.
        assert float(next(epoch)[0]) == 1.0
        pool = engine_of(loader).pool
        assert isinstance(pool, ByHand)
        kept.clear()
        before, calls = pool.notifications, len(pool.notifications_at_help)
        assert float(next(epoch)[0]) == 2.0
        assert pool.notifications_at_help[calls] > before
        assert [float(batch[0]) for batch in epoch] == [float(i) for i in range(3, 64)]


def numbers() -> Iterator[float]:
    return iter(map(float, range(9)))


@pytest.mark.usefixtures("by_hand")
def test_the_last_slot_never_goes_to_a_later_batch() -> None:
    # Workers of later batches take tasks first, there are fewer slots than workers, and the loop
    # keeps each batch until it has the next.
    pipeline = ps.from_dataset(numbers).batch(2)
    with pipeline.loader(workers=6, kind="processes", memory="1B") as loader:
        seen = []
        for batch in loader:
            seen += batch.tolist()
    assert sorted(seen) == sorted([float(i) for i in range(9)] * 6)


@pytest.mark.usefixtures("by_hand")
def test_ready_batches_are_handed_out_before_the_error_about_missing_slots() -> None:
    pipeline = ps.from_dataset(np.arange(64.0)).batch(1)
    options: dict[str, Any] = {"workers": 2, "kind": "processes", "prefetch": 4, "memory": "1B"}
    with pipeline.loader(**options, shuffle=False) as loader:
        kept: list[Any] = []
        with pytest.raises(SlotError, match="still holds 3 batches"):
            kept.extend(iter(loader))
        assert [float(batch[0]) for batch in kept] == [0.0, 1.0, 2.0]


SAMPLES = 200


def sample(index: int) -> tuple[Any, float, str]:
    return np.full(3, index), float(index), f"sample {index}"


def some_fail(index: int) -> tuple[Any, float, str]:
    if index % 7 == 3:
        raise ValueError("bad sample")
    return sample(index)


def one_has_another_type(index: int) -> tuple[Any, float, str]:
    image, *others = sample(index)
    return (image.astype(float) if index == 111 else image, *others)


def batches_of(loader: Loader) -> list[list[Any]]:
    return [[images.tolist(), numbers.tolist(), names] for images, numbers, names in loader]


def pipeline_of(make: Any, rows: int) -> ps.Pipeline:
    return ps.from_dataset(range(SAMPLES)).map(make, random=False).batch(rows)


@pytest.mark.usefixtures("threads")
def test_a_loop_that_waits_for_batches_has_two_large_slots() -> None:
    with pipeline_of(sample, 40).loader(workers=3, kind="threads", shuffle=False) as loader:
        for _epoch in range(3):
            for _batch in loader:
                assert len(engine_of(loader).ring) <= 2
        assert len(engine_of(loader).ring) == 2


@pytest.mark.usefixtures("threads")
def test_workers_prepare_early_rows_while_there_is_no_slot() -> None:
    with pipeline_of(sample, 40).loader(workers=2, kind="threads", shuffle=False) as loader:
        epoch = iter(loader)
        kept = [next(epoch), next(epoch)]
        engine = engine_of(loader)
        # The loop holds both slots, and no third one is made.
        early = [task for task in map(engine.take, [0, 1] * 20) if task is not None]
        assert len(engine.ring) == 2
        assert {(task.slot, task.first) for task in early} == {(None, 0)}
        batch = next(iter(engine._open_batches.values()))
        assert sum(part.rows for part in batch.early_rows.values()) == 20
        assert is_starved(engine)
        kept.clear()
        # The loop has returned the slots: the next piece gets one.
        task = engine.take(0)
        assert task is not None
        assert (task.slot is not None, task.first) == (True, 20)
        assert not is_starved(engine)
        # A worker without tasks does not keep trying.
        engine.starved = True
        engine.stop()
        assert engine.take(0) is None
        assert not is_starved(engine)


@pytest.mark.usefixtures("threads")
def test_a_loop_that_keeps_its_batches_has_a_slot_for_each() -> None:
    with pipeline_of(sample, 40).loader(workers=2, kind="threads", shuffle=False) as loader:
        kept = list(loader)
        assert len(engine_of(loader).ring) == 5
    assert [batch[1].tolist() for batch in kept] == np.arange(200.0).reshape(5, 40).tolist()


@given(
    st.sampled_from([sample, some_fail, one_has_another_type]),
    st.integers(1, 4),
    st.integers(9, 64),
    st.integers(0, 2**32),
    st.lists(st.integers(0, 3), max_size=20),
)
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.usefixtures("threads")
def test_early_rows_are_copied_to_their_places_in_the_batch(
    make: Any, workers: int, rows: int, chance: int, keeps: list[int]
) -> None:
    Threads.chance.seed(chance)
    options: dict[str, Any] = {"on_error": "skip", "seed": 3}
    with pipeline_of(make, rows).loader(workers=0, **options) as loader:
        expected = [batches_of(loader) for _ in range(2)]
    with pipeline_of(make, rows).loader(workers=workers, kind="threads", **options) as loader:
        # An epoch that is left in the middle with several batches kept leaves early rows behind.
        kept: list[Any] = []
        for batch, keep in zip(loader, keeps, strict=False):
            kept = [*kept, batch][-keep:] if keep else []
        loader.set_epoch(0)
        assert [batches_of(loader) for _ in range(2)] == expected
