"""Members that leave give back workers and memory, and their arrays stay as they are."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import penstock as ps
from penstock.engine.build import Assembly, Recipe
from penstock.engine.feed import Ready
from penstock.engine.pools.choose import Choice
from penstock.engine.pools.pool import Desk
from penstock.engine.pools.runner import Outcome, Runner, Task, WorkerInfo
from penstock.engine.slots import Ring
from penstock.node.client import request_status
from penstock.node.directory import NodeDirectory
from penstock.node.service import Service
from penstock.node.staging import StagedBatch, StagingEngine, WorkerLimit
from penstock.options import Options
from penstock.order.plan import BatchKeys
from penstock.source.files import FilesSource
from penstock.stops.batch import stack
from tests.support.contract import WaitsForFile


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition becomes true. The limit only guards against hanging."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def held_back(kind: str, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ps.Pipeline:
    """A pipeline whose third and later batches are not done before ``file`` exists."""
    if kind == "processes":
        source = ps.from_dataset(np.arange(64.0), random=False, version="1")
        return source.map(WaitsForFile(file, first=8), random=False, version="1").batch(4)
    # Only Penstock's own code runs in threads of the node. This node is in our process.
    paths = [folder / f"{number:02}.npy" for number in range(64)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 3)
    read = FilesSource.read

    def waits(self: FilesSource, indices: Any) -> Any:
        while max(indices) >= 8 and not file.exists():
            time.sleep(0.01)
        return read(self, indices)

    monkeypatch.setattr(FilesSource, "read", waits)
    return ps.from_files([str(path) for path in paths]).batch(4)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_one_that_leaves_with_work_in_hand_blocks_nobody(
    service: Service, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        file = tmp_path / f"go on {number}"
        pipeline = held_back(kind, file, tmp_path, monkeypatch)
        with pipeline.loader(share=f"group {number}", shuffle=False) as loader:
            epoch = iter(loader)
            for _ in range(2):
                next(epoch)
            # The next batch is on its way to the workers.
            assert eventually(lambda: service.workers.busy > 0)
            (group,) = service.groups.values()
            assert group.assembly is not None
            assert group.assembly.choice.kind == kind
        if kind == "threads":
            file.touch()  # threads cannot be killed
        # The node ends the workers of a group without members in another thread.
        assert eventually(lambda: not service.groups and service.workers.busy == 0)


def shared_memory() -> int:
    """Bytes of the memory without a name that this process has open."""
    sizes = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:penstock"):
                found = os.stat(f"/proc/self/fd/{fd}")
                sizes[found.st_ino] = found.st_size
        except OSError:
            continue
    return sum(sizes.values())


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def large(rows: int = 4) -> ps.Pipeline:
    return ps.from_dataset(np.ones((64, 1 << 16))).batch(rows)


@pytest.mark.usefixtures("no_garbage_collection")
def test_the_memory_of_a_group_is_freed_when_its_last_member_leaves(service: Service) -> None:
    with ps.from_dataset(np.arange(8.0)).batch(2).loader(share="anchor") as anchor:
        next(iter(anchor))
        before = shared_memory()
        for number in range(3):
            with large().loader(share=f"trial {number}", seed=0) as loader:
                for batch in loader:
                    assert batch.shape == (4, 1 << 16)
                    break
                assert shared_memory() > before + batch.nbytes
            del batch, loader
            assert eventually(lambda: not service._closing and len(service.groups) == 1)
            assert eventually(lambda: shared_memory() < before + (1 << 20))


@pytest.mark.usefixtures("no_garbage_collection")
def test_batches_that_leavers_still_use_count_against_the_budget(service: Service) -> None:
    def budget() -> int:
        return service.groups["anchor"].state.budget

    with ps.from_dataset(np.arange(8.0)).batch(2).loader(share="anchor") as anchor:
        next(iter(anchor))
        with large().loader(share="trial", seed=0) as loader:
            kept = next(iter(loader))
        # While the node closes the group, all memory of the group counts.
        size = kept.nbytes
        assert eventually(lambda: service.lingering == size)
        assert eventually(lambda: len(service.groups) == 1 and budget() == service.staging - size)
        del kept, loader
        assert eventually(lambda: service.lingering == 0 and budget() == service.staging)
        # The connection of the leaver is closed with its last batch.
        assert eventually(lambda: len(service.peers) == 1)


def test_arrays_kept_after_leaving_do_not_change(node_directory: NodeDirectory) -> None:
    pipeline = ps.from_dataset(np.arange(64.0)).batch(4)
    with pipeline.loader(seed=0, share="a") as other:
        epoch = iter(other)
        next(epoch)
        with pipeline.loader(seed=0, share="a", join="start") as loader:
            kept = next(iter(loader))
            before = kept.tolist()
        for _ in range(3):
            for batch in other:
                assert len(batch) == 4
            assert kept.tolist() == before
        status = request_status(node_directory)
    assert status is not None
    assert [len(group["members"]) for group in status["groups"]] == [1]


class ManualPool:
    """A pool whose workers work when the test says so."""

    kind = "manual"
    divides_tasks = False
    restarts = 0
    starting = False

    def __init__(self, size: int, *, own_process: bool) -> None:
        self.size = size
        self.own_process = own_process
        self.desk: Desk | None = None
        self.tasks: list[Task] = []

    def start(self, desk: Desk) -> None:
        self.desk = desk

    def notify(self) -> None:
        pass

    def help(self) -> bool:
        return False

    def cancel(self, tasks: Collection[int]) -> None:
        pass

    def watch(self, limit: float | None) -> None:
        pass

    def outdated(self) -> bool:
        return False

    def runs_here(self) -> bool:
        return False

    def close(self, limit: float | None = None) -> set[int]:
        """Workers are killed, and report nothing. Threads finish their task first."""
        tasks, self.tasks = self.tasks, []
        if not self.own_process and self.desk is not None:
            for task in tasks:
                self.desk.done(task.id, self.outcome(task))
        return set()

    def outcome(self, task: Task) -> Outcome:
        return self.runner.run(task)

    runner: Runner


class Batches(Iterator[BatchKeys]):
    def __init__(self) -> None:
        self.number = 0

    def __next__(self) -> BatchKeys:
        self.number += 1
        return BatchKeys(0, self.number, np.arange(4), None)


class LeavingGroups(RuleBasedStateMachine):
    """Groups come, work, and leave with work in hand, with pools of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = WorkerLimit(2)
        self.engines: list[StagingEngine] = []

    @precondition(lambda self: len(self.engines) < 4)
    @rule(own_process=st.booleans())
    def join(self, own_process: bool) -> None:
        recipe = Recipe(ps.from_dataset(np.arange(8.0)).batch(4), Options(seed=0), stack)
        assembly = Assembly(recipe, Choice("threads", 2, ""))
        pool = ManualPool(2, own_process=own_process)
        pool.runner = Runner(assembly.work, WorkerInfo(0, 2, 0, process=False))
        ring = Ring(1 << 20, shared=True)
        engine = StagingEngine(
            assembly.work,
            pool,
            ring,
            assembly.meter,
            prefetch=2,
            layout=None,
            keepers=assembly.keepers,
            limit=self.limit,
            deliver=lambda ready: self.delivered(ring, ready),
        )
        engine.start(Batches())
        engine._next_finished()
        self.engines.append(engine)

    def delivered(self, ring: Ring, ready: Ready) -> None:
        assert isinstance(ready.value, StagedBatch)
        if ready.value.slot is not None:
            ring.release(ready.value.slot)

    def pool(self, engine: StagingEngine) -> ManualPool:
        assert isinstance(engine.pool, ManualPool)
        return engine.pool

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 3), worker=st.integers(0, 1))
    def take(self, which: int, worker: int) -> None:
        engine = self.engines[which % len(self.engines)]
        task = engine.take(worker)
        if task is not None:
            self.pool(engine).tasks.append(task)

    @precondition(lambda self: any(self.pool(engine).tasks for engine in self.engines))
    @rule(which=st.integers(0, 3), dies=st.booleans())
    def end_task(self, which: int, dies: bool) -> None:
        busy = [engine for engine in self.engines if self.pool(engine).tasks]
        engine = busy[which % len(busy)]
        pool = self.pool(engine)
        task = pool.tasks.pop(0)
        if dies and pool.own_process:
            engine.lost(task.id, guilty=False, reason="killed")
        else:
            engine.done(task.id, pool.outcome(task))

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 3))
    def leave(self, which: int) -> None:
        self.engines.pop(which % len(self.engines)).close()

    @invariant()
    def the_limit_counts_the_tasks_that_workers_have(self) -> None:
        busy = sum(
            len(self.pool(engine).tasks) * (0.5 if engine.pool.own_process else 1.0)
            for engine in self.engines
        )
        assert self.limit.busy == busy <= self.limit.size

    def teardown(self) -> None:
        """When the others have left, the last group gets all workers."""
        while len(self.engines) > 1:
            self.leave(0)
        for engine in self.engines:
            while self.pool(engine).tasks:
                self.end_task(0, False)
            task = engine.take(0)
            assert task is not None
            self.pool(engine).tasks.append(task)
            self.leave(0)
        assert self.limit.busy == 0


TestLeavingGroups = LeavingGroups.TestCase
TestLeavingGroups.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
