"""The zygote: loads the pipeline once, forks the workers, reports their end, and is replaced."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.pools import zygote
from penstock.engine.pools.processes import ProcessPool
from penstock.engine.pools.wire import Wire
from penstock.loader import Loader

pytestmark = pytest.mark.usefixtures("real_programs")

PATIENCE = 60.0
"""Seconds after which a test that waits for a process gives up. Nothing is measured by it."""

NUMBERS = [float(i) for i in range(64)]


def pool_of(loader: Loader) -> ProcessPool:
    assert isinstance(loader._feed, Engine)
    assert isinstance(loader._feed.pool, ProcessPool)
    return loader._feed.pool


def pids(loader: Loader) -> list[int]:
    """The process ids of the workers that have started."""
    workers = list(pool_of(loader)._workers.values())
    return [int(worker.process.pid or 0) for worker in workers if worker.ready]


def all_pids(loader: Loader) -> list[int]:
    """The process ids of all workers, as soon as all have started."""
    give_up = time.monotonic() + PATIENCE
    while len(found := pids(loader)) < len(pool_of(loader)._threads):
        assert time.monotonic() < give_up
        time.sleep(0.002)
    return found


def zygote_of(loader: Loader) -> int:
    found = pool_of(loader)._zygote
    assert found is not None
    assert found.pid is not None
    return found.pid


def ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class Loaded:
    """A map that notes every process that unpickles it, and may do something there."""

    def __init__(self, directory: Path, then: Any = None) -> None:
        self.directory = directory
        self.then = then

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        (self.directory / str(os.getpid())).touch()
        if self.then is not None:
            self.then()

    def __call__(self, value: float) -> float:
        return value


def loader_of(function: Any, workers: int = 2, **options: Any) -> Loader:
    pipeline = ps.from_dataset(np.arange(64.0)).map(function, random=False).batch(4)
    return pipeline.loader(workers=workers, kind="processes", shuffle=False, **options)


def epochs_until(loader: Loader, restarts: int) -> list[float]:
    """Run epochs until ``restarts`` workers were replaced, and return their samples."""
    seen: list[float] = []
    give_up = time.monotonic() + PATIENCE
    while not seen or (loader.stats().pool.restarts < restarts and time.monotonic() < give_up):
        seen += np.concatenate(list(loader)).tolist()
    return seen


def test_the_pipeline_is_loaded_once_for_all_workers_and_their_replacements(
    tmp_path: Path,
) -> None:
    with loader_of(Loaded(tmp_path)) as loader:
        epoch = iter(loader)
        seen = next(epoch).tolist()
        os.kill(pids(loader)[0], signal.SIGKILL)
        for batch in epoch:
            seen += batch.tolist()
        seen += epochs_until(loader, restarts=1)
        assert loader.stats().pool.restarts == 1
        assert os.listdir(tmp_path) == [str(zygote_of(loader))]
        assert {psutil.Process(pid).ppid() for pid in pids(loader)} == {zygote_of(loader)}
    assert seen == NUMBERS * (len(seen) // len(NUMBERS))


def test_a_killed_zygote_is_replaced_with_its_workers(tmp_path: Path) -> None:
    with loader_of(Loaded(tmp_path)) as loader:
        epoch = iter(loader)
        seen = next(epoch).tolist()
        first, workers = zygote_of(loader), all_pids(loader)
        os.kill(first, signal.SIGKILL)
        for batch in epoch:
            seen += batch.tolist()
        seen += epochs_until(loader, restarts=2)
        assert zygote_of(loader) != first
        assert not set(workers) & set(pids(loader))
        give_up = time.monotonic() + PATIENCE
        while not all(map(ended, workers)) and time.monotonic() < give_up:
            time.sleep(0.02)
        assert all(map(ended, workers))
        assert loader.stats().pool.restarts == 2
    assert seen == NUMBERS * (len(seen) // len(NUMBERS))


def test_a_stopped_zygote_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "REPORT_LIMIT", 0.05)
    with loader_of(Loaded(tmp_path)) as loader:
        epoch = iter(loader)
        seen = next(epoch).tolist()
        first, workers = zygote_of(loader), all_pids(loader)
        os.kill(first, signal.SIGSTOP)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for batch in epoch:
            seen += batch.tolist()
        seen += epochs_until(loader, restarts=2)
        assert zygote_of(loader) != first
        assert ended(first)
    assert seen == NUMBERS * (len(seen) // len(NUMBERS))


def test_closing_ends_the_zygote(tmp_path: Path) -> None:
    loader = loader_of(Loaded(tmp_path))
    assert np.concatenate(list(loader)).tolist() == NUMBERS
    family = [zygote_of(loader), *pids(loader)]
    loader.close()
    assert all(map(ended, family))


def leave_with_7(value: float) -> float:
    if value == 3.0:
        os._exit(7)
    return value


def test_the_exit_code_of_a_worker_is_reported() -> None:
    with loader_of(leave_with_7, on_error="skip") as loader:
        assert np.concatenate(list(loader)).tolist() == [x for x in NUMBERS if x != 3.0]
        bad = loader.stats().bad_samples
    assert [(sample.index, sample.error) for sample in bad] == [(3, "ended with exit code 7")]


def start_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def test_a_pipeline_that_starts_threads_when_loaded_gets_worker_programs(tmp_path: Path) -> None:
    with loader_of(Loaded(tmp_path, start_a_thread)) as loader:
        assert np.concatenate(list(loader)).tolist() == NUMBERS
        assert {psutil.Process(pid).ppid() for pid in pids(loader)} == {os.getpid()}
        assert loader.stats().pool.restarts == 0
        # The zygote, and each worker that has started by now.
        assert len(os.listdir(tmp_path)) >= 2


def test_threads_of_libraries_that_expect_forks_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = zygote.other_threads()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        found = zygote.other_threads()
        assert len(found) == len(before) + 1
        monkeypatch.setattr(zygote, "SAFE_THREADS", zygote.SAFE_THREADS | set(found))
        assert zygote.other_threads() == []
    finally:
        stop.set()
        thread.join()


def state_of_numpy(value: float, directory: Path) -> float:
    """The state of NumPy's generator, once both workers have come here.

    The first sample is tried alone, for its type.
    """
    (directory / str(os.getpid())).touch()
    give_up = time.monotonic() + PATIENCE
    while value and len(os.listdir(directory)) < 2 and time.monotonic() < give_up:
        time.sleep(0.005)
    return float(np.random.get_state()[1][:8].sum())  # type: ignore[index]


def test_workers_do_not_share_the_state_of_numpys_generator(tmp_path: Path) -> None:
    with loader_of(partial(state_of_numpy, directory=tmp_path)) as loader:
        states = np.concatenate(list(loader)).tolist()
    assert len(set(states)) == 2


def test_a_worker_that_cannot_be_forked_is_an_error_from_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    ours, theirs = Wire.pair()
    worker, other = socket.socketpair()
    work: Any = None
    nursery = zygote._Nursery(Wire(theirs, zygote.VOCABULARY), work, None)
    with ours, theirs, worker, other:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fork", fork)
            nursery._fork(zygote.ForkWorker(5, 0, 1, 1, 0), worker.detach())
        received = Wire(ours, zygote.VOCABULARY).receive()
        assert received is not None
        assert received[0] == zygote.WorkerEnded(
            5, 1, "cannot create a process: [Errno 11] Resource temporarily unavailable"
        )
        assert other.recv(1) == b""  # the pool sees the end of this worker
    for fd in nursery._wake:
        os.close(fd)


def test_samples_are_not_blamed_for_the_end_of_the_zygote(tmp_path: Path) -> None:
    """Tasks of both workers are dealt again, perhaps to each other, and none is struck."""
    with loader_of(Loaded(tmp_path), on_error="skip", tiny_batch=1) as loader:
        seen = []
        for _ in range(3):
            epoch = iter(loader)
            seen.append(next(epoch).tolist())
            os.kill(zygote_of(loader), signal.SIGKILL)
            seen += [batch.tolist() for batch in epoch]
        assert loader.stats().bad == 0
    assert np.concatenate(seen).tolist() == NUMBERS * 3
