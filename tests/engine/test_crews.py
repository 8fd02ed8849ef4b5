"""Crews: worker processes with several threads each."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.pools.choose import CREW_FROM, choose
from penstock.engine.pools.processes import (
    CREW_THREADS,
    ProcessPool,
    _WorkerHandle,
    crew_sizes,
)
from penstock.engine.pools.runner import Task
from penstock.errors import DeadlySampleError, PipelineError
from penstock.keyed import Keys
from penstock.loader import Loader
from penstock.pipeline import Pipeline
from penstock.stops.batch import Collate
from tests.support.contract import epochs, kill_worker, noise, plain
from tests.support.hostile import deadly, hanging


def pool_of(loader: Loader) -> ProcessPool:
    assert isinstance(loader._feed, Engine)
    assert isinstance(loader._feed.pool, ProcessPool)
    return loader._feed.pool


@pytest.mark.parametrize("workers", range(1, 40))
def test_a_crew_has_as_many_threads_as_workers_in_few_processes(workers: int) -> None:
    sizes = crew_sizes(workers)
    assert sum(sizes) == workers
    assert len(sizes) == -(-workers // CREW_THREADS)
    assert max(sizes) - min(sizes) <= 1


def where(value: float, threads: int, place: Path) -> tuple[int, int]:
    """The process and thread. A thread waits in its first task until all threads have one."""
    (place / f"{os.getpid()}-{threading.get_ident()}").touch()
    give_up = time.monotonic() + 60
    # The first sample is prepared alone, to learn the layout.
    while value and len(os.listdir(place)) < threads and time.monotonic() < give_up:
        time.sleep(0.002)
    return os.getpid(), threading.get_ident()


def test_tasks_run_in_all_threads_of_all_processes(tmp_path: Path) -> None:
    all_six = partial(where, threads=6, place=tmp_path)
    pipeline = ps.from_dataset(np.arange(200.0)).map(all_six, random=False).batch(20)
    with pipeline.loader(workers=6, kind="crew", tiny_batch=1, shuffle=False) as loader:
        seen = {
            (int(process), int(thread))
            for processes, threads in loader
            for process, thread in zip(processes, threads, strict=True)
        }
        assert len(pool_of(loader)._workers) == 2
        assert "a crew of 6 threads in 2 processes" in repr(loader)
        assert "6 threads of a crew" in repr(loader.stats())
    assert len({process for process, _ in seen}) == 2
    assert len(seen) == 6
    assert os.getpid() not in {process for process, _ in seen}


def slow(value: Any) -> Any:
    time.sleep(0.002)
    return value


def test_a_killed_process_of_a_crew_loses_no_sample() -> None:
    pipeline = ps.from_dataset(np.arange(300.0)).map(slow, random=False).map(noise).batch(16)
    (expected,) = epochs(pipeline, 1, workers=0, seed=4)
    with pipeline.loader(workers=6, kind="crew", seed=4, tiny_batch=2) as loader:
        seen = []
        for number, batch in enumerate(loader):
            seen.append(plain(batch))
            if number in (2, 9):
                kill_worker(pool_of(loader), number % 2)
        stats = loader.stats()
    assert seen == expected
    assert stats.pool.restarts == 2
    assert (stats.samples, stats.bad) == (300, 0)


@pytest.mark.parametrize("collate", [None, np.stack], ids=["stacked", "collate"])
def test_of_the_samples_that_ran_beside_a_deadly_one_none_is_blamed(collate: Any) -> None:
    # The process dies twice with the tasks of all its threads, of which one is the reason.
    here = os.getpid()
    pipeline = ps.from_dataset(np.arange(48.0)).map(slow, random=False)
    pipeline = pipeline.map(partial(deadly, home=here), random=False).batch(8, collate=collate)
    skip: Any = {"shuffle": False, "on_error": "skip", "tiny_batch": 1}
    with pipeline.loader(workers=3, kind="crew", **skip) as loader:
        seen = np.concatenate(list(loader)).tolist()
        bad = loader.stats().bad_samples
    assert seen == list(map(float, range(1, 48)))
    assert [(sample.index, sample.error) for sample in bad] == [(0, "killed by SIGSEGV")]


def test_a_deadly_sample_of_a_crew_is_named() -> None:
    pipeline = ps.from_dataset(np.arange(48.0)).map(slow, random=False)
    pipeline = pipeline.map(partial(deadly, home=os.getpid()), random=False).batch(8)
    with (
        pipeline.loader(workers=6, kind="crew", shuffle=False) as loader,
        pytest.raises(DeadlySampleError, match="SIGSEGV") as caught,
    ):
        list(loader)
    assert caught.value.index == 0


def test_a_sample_that_hangs_is_found_among_those_of_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that only goes on when the sample hangs: no other sample can exceed the timeout.
    pool = partial(ProcessPool, clock=lambda: 20.0 * len(os.listdir(tmp_path)))
    monkeypatch.setattr("penstock.engine.pools.choose.ProcessPool", pool)
    pipeline = ps.from_dataset(np.arange(16.0))
    hang = partial(hanging, home=os.getpid(), announced=tmp_path)
    pipeline = pipeline.map(hang, random=False).batch(4)
    options: Any = {"shuffle": False, "on_error": "skip", "timeout": 10.0, "tiny_batch": 1}
    with pipeline.loader(workers=3, kind="crew", **options) as loader:
        seen = np.concatenate(list(loader)).tolist()
        bad = loader.stats().bad_samples
    assert seen == list(map(float, range(1, 16)))
    assert [(sample.index, sample.error) for sample in bad] == [(0, "no answer for 10 s")]


def exits(value: float) -> float:
    if value == 3:
        raise SystemExit(7)
    return value


def test_code_that_exits_ends_the_process_and_not_only_its_thread() -> None:
    pipeline = ps.from_dataset(np.arange(8.0)).map(exits, random=False).batch(4)
    with (
        pipeline.loader(workers=2, kind="crew", shuffle=False) as loader,
        pytest.raises(DeadlySampleError, match="ended with exit code") as caught,
    ):
        list(loader)
    assert caught.value.index == 3


def old_style(value: float) -> float:
    return value + float(np.random.random())


@pytest.mark.parametrize("kind", ["threads", "crew"])
def test_what_draws_globally_is_refused_with_the_remedies(kind: Any) -> None:
    pipeline = ps.from_dataset(np.arange(8.0)).map(old_style).batch(4)
    with pytest.raises(PipelineError, match=rf'kind="{kind}", but old_style .*random=False.*rng'):
        pipeline.loader(workers=2, kind=kind)


@pytest.mark.parametrize("kind", ["threads", "crew"])
def test_a_stream_is_refused_with_the_remedy(kind: Any) -> None:
    pipeline = ps.from_dataset(lambda: iter(range(8))).batch(4)
    with pytest.raises(PipelineError, match=rf'kind="{kind}" with a stream.*kind="processes"'):
        pipeline.loader(workers=2, kind=kind)


@pytest.mark.parametrize("threads", [1, 3])
def test_only_the_tasks_that_threads_work_on_are_timed_and_blamed(threads: int) -> None:
    nothing: Any = None
    worker = _WorkerHandle(0, nothing, nothing, 0.0, 0, threads)
    for number in range(6):
        worker.add(Task(number, "rows", Keys(0, [number]), 0, None, None, ()), now=1.0)
    assert [(task.id, since) for task, since in worker.at_work()] == [
        (number, 1.0) for number in range(threads)
    ]
    worker.settle(0, now=9.0)
    # The clock of the next one starts when a thread is free for it.
    assert [(task.id, since) for task, since in worker.at_work()] == [
        *((number, 1.0) for number in range(1, threads)),
        (threads, 9.0),
    ]


def test_a_task_that_killed_a_crew_waits_until_the_process_is_free() -> None:
    pipeline = ps.from_dataset(np.arange(4.0)).batch(2)
    with pipeline.loader(workers=3, kind="crew") as loader:
        next(iter(loader))
        pool = pool_of(loader)
        nothing: Any = None
        worker = _WorkerHandle(0, nothing, nothing, 0.0, 0, 3)
        worker.ready = True
        sent: list[Task] = []
        tasks = [
            Task(number, "rows", Keys(0, [number]), 0, None, None, (), struck=number == 1)
            for number in range(2)
        ]
        for task in tasks:
            assert worker.takes_tasks(1)
            pool._assign(worker, task, sent)
        assert sent == tasks[:1]
        assert not worker.takes_tasks(2)
        # It is not being worked on, so it would not be blamed for what the other one does.
        assert [task.id for task, _ in worker.at_work()] == [0]


# The choice.


def chosen(pipeline: Pipeline, workers: int, *, training: bool, gil: bool = True) -> str:
    collate: Collate | None = None
    road = pipeline.road(0)
    return choose(road, collate, workers, "auto", 4, gil, beside_training=training).kind


def test_a_crew_is_chosen_where_many_threads_would_compete_with_a_training_loop(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").touch()
    files = ps.from_folder(str(tmp_path))
    assert chosen(files, CREW_FROM, training=True) == "crew"
    assert chosen(files, CREW_FROM - 1, training=True) == "threads"
    assert chosen(files, CREW_FROM, training=False) == "threads"
    assert chosen(files, CREW_FROM, training=True, gil=False) == "threads"
    # A cache in the memory of this process is the threads' own, and a list may not be picklable.
    assert chosen(files.cache("1MB"), CREW_FROM, training=True) == "threads"
    assert chosen(ps.from_dataset([1.0, 2.0]), CREW_FROM, training=True) == "threads"
    # A user's function need not be safe in threads.
    assert chosen(files.map(slow, random=False), CREW_FROM, training=True) == "processes"
    choice = choose(files.road(0), None, 12, "auto", 4, True, beside_training=True)
    assert str(choice) == (
        "a crew of 12 threads in 3 processes (12 threads would slow down the training loop)"
    )
