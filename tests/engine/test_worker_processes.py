"""Worker processes: user code runs only in them, they end with their parent, and are replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.pools import launch, restarts
from penstock.engine.pools.processes import ProcessPool
from penstock.engine.pools.restarts import FailedStarts
from penstock.errors import DeadlySampleError, PipelineError, WorkerError
from penstock.loader import Loader
from tests.support.hostile import deadly, hanging, in_a_worker, jitter, noted

pytestmark = pytest.mark.usefixtures("real_programs")

PATIENCE = 200.0
"""Seconds after which a test that waits for a process gives up. Nothing is measured by it."""


def pool_of(loader: Loader) -> ProcessPool:
    assert isinstance(loader._feed, Engine)
    assert isinstance(loader._feed.pool, ProcessPool)
    return loader._feed.pool


def pids(loader: Loader) -> dict[int, int | None]:
    return {number: worker.process.pid for number, worker in pool_of(loader)._workers.items()}


COLLATES: list[Any] = [None, np.stack]


@pytest.mark.parametrize("collate", COLLATES, ids=["stacked", "collate"])
@pytest.mark.parametrize("size", [1, 8])
def test_a_deadly_first_sample_is_skipped_like_any_other(size: int, collate: Any) -> None:
    here = os.getpid()
    numbers = ps.from_dataset(np.arange(16.0))
    pipeline = numbers.map(partial(deadly, home=here), random=False).batch(size, collate=collate)
    with pipeline.loader(workers=2, kind="processes", shuffle=False, on_error="skip") as loader:
        batches = [batch.tolist() for batch in loader]
        stats = loader.stats()
    assert [x for batch in batches for x in batch] == list(map(float, range(1, 16)))
    assert len(batches) == (15 if size == 1 else 2)
    assert [(bad.index, bad.stage, bad.error) for bad in stats.bad_samples] == [
        (0, "worker", "killed by SIGSEGV")
    ]


@pytest.mark.parametrize("collate", COLLATES, ids=["stacked", "collate"])
def test_a_deadly_first_sample_is_substituted_like_any_other(collate: Any) -> None:
    here = os.getpid()
    numbers = ps.from_dataset(np.arange(16.0))
    pipeline = numbers.map(partial(deadly, home=here), random=False).batch(8, collate=collate)
    substituted: Any = {"shuffle": False, "on_error": "substitute"}
    with pipeline.loader(workers=2, kind="processes", **substituted) as loader:
        first, second = (batch.tolist() for batch in loader)
        assert [bad.index for bad in loader.stats().bad_samples] == [0]
    assert first[1:] + second == list(map(float, range(1, 16)))
    assert first[0] in range(1, 16)


@pytest.mark.parametrize("collate", COLLATES, ids=["stacked", "collate"])
def test_a_deadly_first_sample_is_named(collate: Any) -> None:
    here = os.getpid()
    numbers = ps.from_dataset(np.arange(16.0))
    pipeline = numbers.map(partial(deadly, home=here), random=False).batch(8, collate=collate)
    with (
        pipeline.loader(workers=2, kind="processes", shuffle=False) as loader,
        pytest.raises(DeadlySampleError, match=r"^sample 0 .*SIGSEGV.*on_error") as caught,
    ):
        list(loader)
    assert caught.value.index == 0


def test_a_collate_that_kills_its_worker_is_an_error_even_when_skipping() -> None:
    def kill(samples: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    pipeline = ps.from_dataset(np.arange(16.0)).batch(8, collate=kill)
    with (
        pipeline.loader(workers=2, kind="processes", shuffle=False, on_error="skip") as loader,
        pytest.raises(DeadlySampleError, match="one of the 8 samples"),
    ):
        list(loader)


def test_a_first_sample_that_hangs_is_killed_after_the_timeout_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that only goes on when the sample hangs: no other sample can exceed the timeout.
    pool = partial(ProcessPool, clock=lambda: 20.0 * len(os.listdir(tmp_path)))
    monkeypatch.setattr("penstock.engine.pools.choose.ProcessPool", pool)
    here = os.getpid()
    numbers = ps.from_dataset(np.arange(8.0))
    pipeline = numbers.map(partial(hanging, home=here, announced=tmp_path), random=False).batch(4)
    options: Any = {"kind": "processes", "shuffle": False, "on_error": "skip", "timeout": 10.0}
    with pipeline.loader(workers=1, **options) as loader:
        batches = [batch.tolist() for batch in loader]
        bad = loader.stats().bad_samples
    assert batches == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert [(sample.index, sample.error) for sample in bad] == [(0, "no answer for 10 s")]


@pytest.mark.parametrize("collate", COLLATES, ids=["stacked", "collate"])
def test_samples_are_prepared_in_workers_only(collate: Any) -> None:
    here = os.getpid()
    numbers = ps.from_dataset(np.arange(40.0))
    pipeline = numbers.map(partial(in_a_worker, home=here), random=False).batch(4, collate=collate)
    with pipeline.loader(workers=2, kind="processes", shuffle=False) as loader:
        assert np.concatenate(list(loader)).tolist() == list(map(float, range(40)))


def test_samples_are_weighed_for_refurbish_in_workers_only(tmp_path: Path) -> None:
    numbers = ps.from_dataset(np.arange(40.0)).map(partial(noted, directory=tmp_path), random=False)
    pipeline = numbers.map(jitter).refurbish(2, size=4096).map(jitter).batch(4)
    kept = []
    for kind in ("processes", "threads"):
        with pipeline.loader(workers=2, kind=kind, shuffle=False) as loader:
            assert sum(len(batch) for batch in loader) == 40
            kept.append(loader.state_dict()["kept"])
        assert (str(os.getpid()) in os.listdir(tmp_path)) == (kind == "threads")
    assert kept[0] == kept[1] < 40


def test_a_dead_worker_is_noticed_while_a_process_that_it_forked_keeps_its_socket_open(
    tmp_path: Path,
) -> None:
    home = os.getpid()

    def die_beside_a_child(x: float) -> float:
        if x == 5.0 and os.getpid() != home and not (tmp_path / "child").exists():
            child = os.fork()
            if not child:
                signal.pause()
            (tmp_path / "child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    pipeline = ps.from_dataset(np.arange(16.0)).map(die_beside_a_child, random=False).batch(8)
    try:
        with pipeline.loader(workers=1, kind="processes", shuffle=False) as loader:
            assert np.concatenate(list(loader)).tolist() == list(map(float, range(16)))
            assert pool_of(loader).restarts == 1
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


# Workers end with their parent.

ORPHANS = """
import os, re, sys, time
import numpy as np

directory, start = sys.argv[1:]

def busy(value):
    open(os.path.join(directory, str(os.getpid())), "w").close()
    if {holds_gil}:
        re.match(r"(a+)+$", "a" * 60 + "b")  # backtracks for years, and holds the GIL
    while True:
        time.sleep(60)

class Data:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return busy(float(index))

if start == "fork":
    from penstock.torch import DataLoader
    loader = DataLoader(
        Data(), batch_size=4, num_workers=2, collate_fn=list, multiprocessing_context="fork"
    )
else:
    import penstock as ps
    # With a collate function no batch waits until the first sample has shown the layout.
    pipeline = ps.from_dataset(Data()).batch(1, collate=list)
    loader = pipeline.loader(workers=2, kind="processes")
print("ready", flush=True)
next(iter(loader))
"""


def wait_until(reached: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + PATIENCE
    while not reached():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def announced(tmp_path: Path) -> Iterator[Path]:
    """A directory in which workers announce themselves. What is left of them is killed."""
    directory = tmp_path / "announced"
    directory.mkdir()
    yield directory
    for name in os.listdir(directory):
        try:
            os.kill(int(name), signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize("start", ["program", "fork"])
@pytest.mark.parametrize("state", ["holds the GIL", "stopped"])
def test_workers_end_with_a_killed_parent(state: str, start: str, announced: Path) -> None:
    if start == "fork":
        pytest.importorskip("torch")
    code = ORPHANS.format(holds_gil=state == "holds the GIL")
    training = subprocess.Popen([sys.executable, "-c", code, str(announced), start])
    try:
        # Both are at work. One that was stopped before it asked for a signal at the death of its
        # parent would stay.
        assert wait_until(lambda: len(os.listdir(announced)) == 2)
        workers = psutil.Process(training.pid).children(recursive=True)
        if state == "stopped":
            for worker in workers:
                worker.suspend()
    finally:
        training.kill()
        training.wait()
    assert len(workers) == (2 if start == "fork" else 3)  # programs: and the zygote
    assert wait_until(lambda: all(gone(worker) for worker in workers))


def test_workers_outlive_the_thread_that_first_iterates() -> None:
    pipeline = ps.from_dataset(np.arange(64.0)).batch(4)
    with pipeline.loader(workers=2, kind="processes", shuffle=False) as loader:
        epoch: list[Iterator[Any]] = []
        seen: list[float] = []

        def first_batch() -> None:
            epoch.append(iter(loader))
            seen.extend(next(epoch[0]).tolist())

        thread = threading.Thread(target=first_batch)
        thread.start()
        thread.join()
        for batch in epoch[0]:
            seen += batch.tolist()
        # A worker that is not forked yet has the process id of the zygote.
        zygote = pool_of(loader)._zygote
        assert zygote is not None
        assert wait_until(lambda: len({*pids(loader).values(), zygote.pid}) == 3)
        before = pids(loader)
        # Idle workers that the kernel has killed are seen here at the latest.
        assert [len(batch) for batch in loader] == [4] * 16
        assert pids(loader) == before
        assert loader.stats().pool.restarts == 0
    assert seen == list(map(float, range(64)))


# Workers that end before they are ready.


def test_a_worker_killed_at_its_start_is_tried_again_with_growing_pauses() -> None:
    starts = FailedStarts()
    pauses = [starts.pause(0, outside=True) for _ in range(restarts.MOST_KILLED)]
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, None]
    starts.ready(0)
    assert starts.pause(0, outside=True) == 0.0
    # Each worker counts for itself: all of them may be killed at the same time.
    assert starts.pause(1, outside=True) == 0.0


def test_a_worker_that_fails_by_itself_is_tried_once_more() -> None:
    starts = FailedStarts()
    assert [starts.pause(3, outside=False) for _ in range(2)] == [0.0, None]


class KillAtStart:
    """Kills the first processes that a pool starts, before they can be ready."""

    def __init__(self, kills: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = kills
        start = launch.Program

        def program(*args: Any) -> Any:
            started = start(*args)
            if self.left:
                self.left -= 1
                assert started.pid is not None
                os.kill(started.pid, signal.SIGKILL)
            return started

        monkeypatch.setattr(launch, "Program", program)


def test_more_kills_than_workers_at_the_start_do_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE", 0.001)
    killer = KillAtStart(7, monkeypatch)
    with (
        ps.from_dataset(np.arange(64.0))
        .batch(4)
        .loader(workers=2, kind="processes", shuffle=False) as loader
    ):
        with pytest.warns(RuntimeWarning, match="times and ended each time before it was ready"):
            seen = np.concatenate(list(loader))
        assert seen.tolist() == list(map(float, range(64)))
        # Each kill hits the zygote of the pool, and the workers that wait for it.
        assert 7 <= loader.stats().pool.restarts <= 14
    assert killer.left == 0


@pytest.mark.filterwarnings("ignore:worker .* ended each time:RuntimeWarning")
def test_workers_that_are_always_killed_are_an_error_and_the_next_epoch_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE", 0.001)
    killer = KillAtStart(1000, monkeypatch)
    with ps.from_dataset(np.arange(8.0)).batch(4).loader(workers=2, kind="processes") as loader:
        with pytest.raises(WorkerError, match=r"8 times .*SIGKILL.*out of memory"):
            list(loader)
        killer.left = 0
        assert sum(len(batch) for batch in loader) == 8


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
    ],
)
def test_workers_that_cannot_start_are_an_error_with_the_reason(
    program: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.pools.launch._BOOT", textwrap.dedent(program))
    with (
        ps.from_dataset(np.arange(8.0)).batch(4).loader(workers=2, kind="processes") as loader,
        pytest.raises(WorkerError, match=f"2 times .*{reason}"),
    ):
        list(loader)


def test_processes_that_cannot_be_created_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE", 0.001)
    start, failures = launch.Program, iter(range(3))

    def program(*args: Any) -> Any:
        if next(failures, None) is not None:
            raise BlockingIOError("Resource temporarily unavailable")
        return start(*args)

    monkeypatch.setattr(launch, "Program", program)
    with (
        ps.from_dataset(np.arange(8.0)).batch(4).loader(workers=1, kind="processes") as loader,
        pytest.warns(RuntimeWarning, match="cannot create a process: Resource"),
    ):
        assert sum(len(batch) for batch in loader) == 8


def test_a_worker_that_never_becomes_ready_is_killed_if_there_is_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "penstock.engine.pools.launch._BOOT", "import signal\nwhile True: signal.pause()"
    )
    now = iter(range(0, 10**9, 1000))
    pool = partial(ProcessPool, clock=lambda: float(next(now)))
    monkeypatch.setattr("penstock.engine.pools.choose.ProcessPool", pool)
    with (
        ps.from_dataset(np.arange(8.0))
        .batch(4)
        .loader(workers=1, kind="processes", timeout=5.0) as loader,
        pytest.raises(WorkerError, match="not ready after"),
    ):
        list(loader)


def test_a_pipeline_that_cannot_be_pickled_leaves_no_descriptor_open() -> None:
    lock = threading.Lock()
    pipeline = ps.from_dataset(np.arange(4.0)).map(lambda value: lock and value, random=False)

    def fails() -> int:
        with (
            pipeline.batch(2).loader(workers=1, kind="processes") as loader,
            pytest.raises(PipelineError, match="cannot be pickled"),
        ):
            next(iter(loader))
        return len(os.listdir("/proc/self/fd"))

    assert fails() == fails()
