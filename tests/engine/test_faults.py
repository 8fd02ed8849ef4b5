"""After a fault no sample is lost, nothing hangs, and no process or file is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock as ps
from penstock.engine.engine import Engine
from penstock.engine.pools.processes import ProcessPool
from penstock.errors import (
    DeadlySampleError,
    PipelineError,
    SampleError,
    ShapeError,
    SlotError,
    WorkerError,
)
from penstock.loader import Loader
from penstock.store import stale
from tests.support.contract import kill_worker, noise, plain

pytestmark = pytest.mark.usefixtures("real_programs")

KINDS: list[dict[str, Any]] = [
    {"workers": 0},
    {"workers": 2, "kind": "threads"},
    {"workers": 2, "kind": "processes"},
    {"workers": 5, "kind": "crew"},
]


def pool_of(loader: Loader) -> ProcessPool:
    assert isinstance(loader._feed, Engine)
    assert isinstance(loader._feed.pool, ProcessPool)
    return loader._feed.pool


def workers_of(loader: Loader) -> list[psutil.Process]:
    workers = sorted(pool_of(loader)._workers.items())
    return [psutil.Process(worker.process.pid) for _, worker in workers]


def slow(value: Any) -> Any:
    time.sleep(0.002)
    return value


def bad_seven(value: float) -> float:
    if value == 7:
        raise ZeroDivisionError("seven is bad")
    return value * 2


def test_a_killed_worker_loses_no_sample() -> None:
    pipeline = ps.from_dataset(np.arange(400.0)).map(slow, random=False).map(noise).batch(16)
    with pipeline.loader(workers=0, seed=4) as plain_loader:
        expected = [plain(batch) for batch in plain_loader]
    with pipeline.loader(workers=2, kind="processes", seed=4) as loader:
        seen = []
        for number, batch in enumerate(loader):
            seen.append(plain(batch))
            if number in (2, 9, 17):
                kill_worker(pool_of(loader), number % 2)
        stats = loader.stats()
    assert seen == expected
    assert stats.pool.restarts == 3
    assert stats.samples == 400


def test_a_stopped_worker_is_found_by_the_watchdog_and_its_samples_done_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A clock that jumps when the workers are stopped: on a busy machine no other task is late.
    jumped = [0.0]
    pool = partial(ProcessPool, clock=lambda: time.monotonic() + jumped[0])
    monkeypatch.setattr("penstock.engine.pools.choose.ProcessPool", pool)
    pipeline = ps.from_dataset(np.arange(400.0)).map(slow, random=False).batch(8)
    with pipeline.loader(workers=2, kind="processes", shuffle=False, timeout=10.0) as loader:
        epoch = iter(loader)
        seen = next(epoch).tolist()
        for worker in workers_of(loader):
            worker.send_signal(signal.SIGSTOP)
        jumped[0] = 20.0
        seen += [x for batch in epoch for x in batch.tolist()]
        assert loader.stats().pool.restarts >= 1
    assert seen == list(map(float, range(400)))


def killer(value: float) -> float:
    if value == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def test_a_sample_that_kills_its_worker_twice_is_named() -> None:
    pipeline = ps.from_dataset(np.arange(32.0)).map(killer, random=False).batch(16)
    with (
        pipeline.loader(workers=2, kind="processes", shuffle=False) as loader,
        pytest.raises(DeadlySampleError, match="SIGKILL") as caught,
    ):
        list(loader)
    assert caught.value.index == 13


@pytest.mark.parametrize("policy", ["skip", "substitute"])
def test_a_deadly_sample_can_be_left_out(policy: Any) -> None:
    pipeline = ps.from_dataset(np.arange(32.0)).map(killer, random=False).batch(16)
    with pipeline.loader(workers=2, kind="processes", shuffle=False, on_error=policy) as loader:
        batches = [batch.tolist() for batch in loader]
        stats = loader.stats()
    good = [float(i) for i in range(32) if i != 13]
    seen = [x for batch in batches for x in batch]
    if policy == "skip":
        assert seen == good
    else:
        assert len(seen) == 32
        assert seen[:13] + seen[14:] == good
        assert seen[13] in good
    assert (stats.bad, stats.bad_samples[0].index) == (1, 13)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_bad_sample_is_named_with_its_stage_and_the_remedy(options: Any) -> None:
    pipeline = ps.from_dataset(np.arange(32.0)).map(bad_seven, random=False).batch(8)
    with (
        pipeline.loader(**options, shuffle=False) as loader,
        pytest.raises(SampleError, match=r"index 7\) failed in bad_seven.*seven is bad") as caught,
    ):
        list(loader)
    assert caught.value.index == 7
    assert caught.value.stage == "bad_seven"
    assert 'on_error="skip"' in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "seven is bad" in caught.value.details


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_bad_samples_are_skipped_and_counted(options: Any) -> None:
    pipeline = ps.from_dataset(np.arange(32.0)).map(bad_seven, random=False).batch(8)
    with pipeline.loader(**options, shuffle=False, on_error="skip") as loader:
        batches = [batch.tolist() for batch in loader]
        stats = loader.stats()
    assert [len(batch) for batch in batches] == [7, 8, 8, 8]
    assert [x / 2 for batch in batches for x in batch] == [i for i in range(32) if i != 7]
    assert stats.bad == 1
    assert stats.bad_samples[0].index == 7
    assert stats.bad_samples[0].stage == "bad_seven"
    assert "seven is bad" in stats.bad_samples[0].error


def test_bad_samples_are_substituted_alike_in_every_pool() -> None:
    pipeline = ps.from_dataset(np.arange(32.0)).map(bad_seven, random=False).map(noise).batch(8)
    seen = []
    for options in KINDS:
        with pipeline.loader(**options, seed=2, on_error="substitute") as loader:
            seen.append([plain(batch) for batch in loader])
            assert loader.stats().bad == 1
    assert all(batches == seen[0] for batches in seen)
    assert [shape for _, shape, _ in seen[0]] == [(8,)] * 4


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_all_samples_bad_is_an_error_even_when_substituting(options: Any) -> None:
    def broken(value: float) -> float:
        raise OSError("no such disk")

    pipeline = ps.from_dataset(np.arange(20.0)).map(broken, random=False).batch(4)
    with (
        pipeline.loader(**options, on_error="substitute") as loader,
        pytest.raises(SampleError, match="the data or the pipeline is broken"),
    ):
        list(loader)


def test_skipping_every_sample_ends_the_epoch_with_no_batch() -> None:
    def broken(value: float) -> float:
        raise OSError("no such disk")

    pipeline = ps.from_dataset(np.arange(20.0)).map(broken, random=False).batch(4)
    for options in KINDS:
        with pipeline.loader(**options, on_error="skip") as loader:
            assert list(loader) == []
            assert loader.stats().bad == 20


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_after_an_error_the_loader_still_works(options: Any, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    flag.touch()

    def while_broken(value: float) -> float:
        if flag.exists() and value == 20:
            raise ValueError("not yet")
        return value

    pipeline = ps.from_dataset(np.arange(32.0)).map(while_broken, random=False).batch(8)
    with pipeline.loader(**options, shuffle=False) as loader:
        seen: list[float] = []
        with pytest.raises(SampleError):
            seen.extend(x for batch in loader for x in batch.tolist())
        state = loader.state_dict()
        flag.unlink()
        loader.load_state_dict(state)
        seen += [x for batch in loader for x in batch.tolist()]
        assert seen == list(map(float, range(32)))
        assert sum(len(batch) for batch in loader) == 32


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_sample_of_another_shape_is_named_with_the_remedies(options: Any) -> None:
    data = [np.zeros(3 if i != 11 else 4) for i in range(16)]
    with (
        ps.from_dataset(data).batch(8).loader(**options, shuffle=False) as loader,
        pytest.raises(ShapeError, match=r"index 11.*pad=0.*collate") as caught,
    ):
        list(loader)
    assert caught.value.index == 11
    assert "(4,)" in str(caught.value)
    assert "(3,)" in str(caught.value)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_batches_may_differ_in_shape_from_each_other(options: Any) -> None:
    data = [np.full(3 if i < 8 else 5, i) for i in range(16)]
    with ps.from_dataset(data).batch(4).loader(**options, shuffle=False) as loader:
        shapes = [batch.shape for batch in loader]
    assert shapes == [(4, 3), (4, 3), (4, 5), (4, 5)]


def test_batches_may_be_kept_as_long_as_wanted() -> None:
    pipeline = ps.from_dataset(np.arange(1000.0)).batch(10)
    for options in KINDS:
        with pipeline.loader(**options, shuffle=False) as loader:
            kept = list(loader)
        assert np.concatenate(kept).tolist() == list(map(float, range(1000)))


def test_keeping_more_batches_than_the_budget_is_an_error_until_some_are_freed() -> None:
    pipeline = ps.from_dataset(np.zeros((64, 1000))).batch(4)
    for options in KINDS[1:]:
        with pipeline.loader(**options, memory="400KB") as loader:
            epoch = iter(loader)
            kept: list[Any] = []
            with pytest.raises(SlotError, match="Copy what you keep"):
                kept.extend(epoch)
            assert len(kept) >= 3
            kept.clear()
            assert sum(len(batch) for batch in loader) == 64


def test_a_pipeline_that_cannot_be_pickled_is_an_error_with_a_remedy() -> None:
    import threading

    lock = threading.Lock()
    pipeline = ps.from_dataset(np.arange(4.0)).map(lambda x: (lock, x)[1], random=False).batch(2)
    with (
        pipeline.loader(workers=1, kind="processes") as loader,
        pytest.raises(PipelineError, match="__getstate__"),
    ):
        list(loader)


class Explodes:
    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("not in a worker")

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}

    def __call__(self, value: float) -> float:
        return value


def test_a_worker_that_cannot_start_is_an_error_with_its_traceback() -> None:
    pipeline = ps.from_dataset(np.arange(4.0)).map(Explodes(), random=False).batch(2)
    with (
        pipeline.loader(workers=2, kind="processes") as loader,
        pytest.raises(WorkerError, match="not in a worker"),
    ):
        list(loader)


SCRIPT = """
import sys, time, numpy as np, penstock as ps, os

def work(x):
    time.sleep(0.001)
    return x

loader = (ps.from_dataset(np.arange(100000.0)).cache("64MB").map(work, random=False).batch(8)
          .loader(workers=2, kind={kind!r}))
for i, batch in enumerate(loader):
    if i == 3:
        print("going", os.getpid(), flush=True)
        sys.stdin.readline()
        {then}
print("done", flush=True)
"""


def run_script(kind: str, then: str, act: Any) -> tuple[int, str, list[int]]:
    """Run a training script in a process, call ``act`` with it, and list the children it left.

    Returns the exit code, the text on stderr and the process ids of children that are left.
    """
    code = textwrap.dedent(SCRIPT).format(kind=kind, then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    line = process.stdout.readline()
    assert line.startswith("going")
    family = [c.pid for c in psutil.Process(process.pid).children(recursive=True)]
    process.stdin.write("go on\n")
    process.stdin.flush()
    act(process)
    _, errors = process.communicate(timeout=60)
    deadline = time.monotonic() + 100
    while (left := [pid for pid in family if psutil.pid_exists(pid)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    # Two workers, or a crew in one process, and their zygote.
    assert len(family) == {"threads": 0, "processes": 3, "crew": 2}[kind]
    return process.returncode, errors, left


@pytest.mark.parametrize("kind", ["threads", "processes", "crew"])
def test_ctrl_c_ends_everything(kind: str) -> None:
    code, errors, left = run_script(kind, "", lambda p: os.killpg(p.pid, signal.SIGINT))
    assert left == []
    assert "KeyboardInterrupt" in errors
    assert errors.count("Traceback") == 1
    assert code != 0


@pytest.mark.parametrize("kind", ["threads", "processes", "crew"])
def test_sigterm_leaves_no_process(kind: str) -> None:
    code, _, left = run_script(kind, "", lambda p: p.terminate())
    assert (code, left) == (-signal.SIGTERM, [])


@pytest.mark.parametrize("kind", ["threads", "processes", "crew"])
def test_a_killed_trainer_leaves_no_process_and_the_next_run_removes_its_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(tmp_path))
    code, _, left = run_script(kind, "", lambda p: p.kill())
    assert (code, left) == (-signal.SIGKILL, [])
    # Threads keep samples in the memory of their process, so they leave no files.
    assert bool(stale()) == (kind != "threads")
    next_run = "from penstock.store import RunDir; RunDir.current().path"
    subprocess.run([sys.executable, "-c", next_run], check=True)
    assert stale() == []


@pytest.mark.parametrize("kind", ["threads", "processes", "crew"])
def test_an_exception_in_the_loop_and_a_forgotten_close_end_everything(kind: str) -> None:
    code, errors, left = run_script(kind, "raise KeyError('mine')", lambda p: None)
    assert (code, left) == (1, [])
    assert "KeyError: 'mine'" in errors
    code, errors, left = run_script(kind, "break", lambda p: None)
    assert (code, left, errors) == (0, [], "")


def test_a_forgotten_loader_is_collected_with_its_workers() -> None:
    gc.disable()
    try:
        for options in KINDS[1:]:
            loader = ps.from_dataset(np.arange(100.0)).cache("1MB").batch(4).loader(**options)
            engine = weakref.ref(loader._running_feed())
            for _ in range(2):  # an epoch, and the first batches of the next
                next(iter(loader))
                for _ in loader:
                    pass
            del loader, _
            assert engine() is None  # freed at once, without the garbage collector
    finally:
        gc.enable()


def test_a_fork_that_ends_leaves_the_loader_alone() -> None:
    with ps.from_dataset(np.arange(100.0)).cache("1MB").batch(4).loader(**KINDS[1]) as loader:
        epoch = iter(loader)
        next(epoch)
        child = os.fork()
        if child == 0:
            loader.close()
            loader._finalizer()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(epoch)) == 24
        list(loader)
        assert loader.stats().caches[0].hits == 100


@pytest.mark.parametrize("on_error", ["raise", "substitute"])
def test_a_bad_file_is_reported_with_each_remedy_once(tmp_path: Path, on_error: Any) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(b"\xff\xd8 is no picture")
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    pipeline = ps.from_files(files).map(ps.image.decode()).batch(2)
    loader = pipeline.loader(workers=0, on_error=on_error)
    with loader, pytest.raises(SampleError) as caught:
        next(iter(loader))
    text = str(caught.value)
    assert text.count("on_error") == (1 if on_error == "raise" else 0)
    assert text.count("Copy the file again") == 1
