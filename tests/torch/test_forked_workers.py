"""Workers that the drop-in forks see this process as it is, and keep nothing of it."""

from __future__ import annotations

import _imp
import importlib
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import Dataset  # noqa: E402

from penstock.engine.engine import Engine  # noqa: E402
from penstock.engine.pools import launch  # noqa: E402
from penstock.engine.pools.processes import ProcessPool  # noqa: E402
from penstock.torch import DataLoader  # noqa: E402
from penstock.torch import dataloader as dropin  # noqa: E402

STATE = {"offset": 0.0}


class Made(Dataset[Any]):  # type: ignore[misc]
    """Samples that a function makes in the worker."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@pytest.fixture
def state() -> Iterator[dict[str, float]]:
    yield STATE
    STATE["offset"] = 0.0


def first(loader: Any) -> list[Any]:
    return next(iter(loader)).tolist()  # type: ignore[no-any-return]


def test_a_module_variable_changed_by_the_script_is_seen(state: dict[str, float]) -> None:
    state["offset"] = 5.0
    with DataLoader(Made(lambda i: STATE["offset"] + i), batch_size=8, num_workers=2) as loader:
        assert first(loader) == [5.0 + i for i in range(8)]


def test_a_function_that_the_script_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "sqrt", lambda value: -value)
    with DataLoader(Made(lambda i: math.sqrt(i)), batch_size=8, num_workers=1) as loader:
        assert first(loader) == [-float(i) for i in range(8)]


def test_torchs_default_type_is_seen() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with DataLoader(Made(lambda i: torch.zeros(1)), batch_size=8, num_workers=1) as loader:
            assert next(iter(loader)).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_an_open_file_can_be_read(tmp_path: Any) -> None:
    (tmp_path / "numbers").write_bytes(bytes(range(8)))
    with (
        open(tmp_path / "numbers", "rb") as file,
        DataLoader(
            Made(lambda i: os.pread(file.fileno(), 1, i)[0]), batch_size=8, num_workers=2
        ) as loader,
    ):
        assert first(loader) == list(range(8))


@pytest.mark.parametrize("persistent", [False, True])
def test_the_next_epoch_sees_the_process_as_it_is_then(
    persistent: bool, state: dict[str, float]
) -> None:
    made = Made(lambda i: (os.getpid(), STATE["offset"]))
    with DataLoader(made, batch_size=8, num_workers=1, persistent_workers=persistent) as loader:
        ((pid, offset),) = {(int(p), float(o)) for p, o in zip(*next(iter(loader)), strict=True)}
        state["offset"] = 7.0
        ((later, after),) = {(int(p), float(o)) for p, o in zip(*next(iter(loader)), strict=True)}
    assert offset == 0.0
    assert (pid == later, after) == ((True, 0.0) if persistent else (False, 7.0))


def test_workers_have_signal_handlers_of_their_own_and_one_thread() -> None:
    def facts(index: int) -> Any:
        return (
            signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            torch.get_num_threads(),
        )

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with DataLoader(Made(facts), batch_size=8, num_workers=1) as loader:
            batch = [values.tolist()[0] for values in next(iter(loader))]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert batch == [True, True, 0, 1]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}


def test_the_generators_of_each_worker_are_seeded_as_in_torch(tmp_path: Path) -> None:
    def seeds(index: int) -> Any:
        (tmp_path / str(os.getpid())).touch()
        give_up = time.monotonic() + 60
        # Until both workers have come here; the first sample is tried alone, for its type.
        while index and len(os.listdir(tmp_path)) < 2 and time.monotonic() < give_up:
            time.sleep(0.005)
        info = torch.utils.data.get_worker_info()
        return info.seed, torch.initial_seed(), random.random(), np.random.random()

    options: Any = {"batch_size": 1, "num_workers": 2, "random": False, "persistent_workers": True}
    with DataLoader(Made(seeds), seed=9, **options) as loader:
        rows = [[float(value) for value in batch] for batch in loader]
    assert {(given, used) for given, used, *_ in rows} == {(9.0, 9.0), (10.0, 10.0)}
    assert len({draw for _, _, *draws in rows for draw in draws}) == 2 * len(rows)


def test_workers_do_not_keep_the_sockets_of_other_workers() -> None:
    def inodes(index: int) -> Any:
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                found.append(os.stat(f"/proc/self/fd/{name}").st_ino)
            except OSError:  # the descriptor of the directory itself
                continue
        return np.array(sorted(found)[:4096] + [0] * (4096 - len(found)))

    with (
        DataLoader(Made(float), batch_size=4, num_workers=2) as other,
        DataLoader(Made(inodes), batch_size=4, num_workers=2) as loader,
    ):
        held = [iter(other)]
        next(held[0])
        batches = list(loader)
        ours = {inode for each in (other, loader) for inode in socket_inodes(each)}
    assert len(ours) == 4
    assert not ours & {int(inode) for batch in batches for inode in batch.flatten()}


def socket_inodes(loader: DataLoader) -> list[int]:
    feed = loader._loader._feed
    assert isinstance(feed, Engine)
    assert isinstance(feed.pool, ProcessPool)
    return [os.fstat(w.wire.socket.fileno()).st_ino for w in feed.pool._workers.values()]


def test_workers_run_no_exit_hook_of_the_script() -> None:
    script = """
import atexit, os, sys
from penstock.torch import DataLoader

class Data:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return float(index)

atexit.register(lambda: print("exit", flush=True))
loader = DataLoader(Data(), batch_size=2, num_workers=2)
for epoch in range(2):
    assert sum(len(batch) for batch in loader) == 8
sys.stdout.write("buffered ")
for epoch in range(2):
    assert sum(len(batch) for batch in loader) == 8
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "buffered exit\n", "")


def test_workers_that_multiprocessing_ends_at_exit_are_not_replaced() -> None:
    # The directory makes the hook of multiprocessing run before that which closes loaders.
    script = """
import tempfile
directory = tempfile.TemporaryDirectory()
import time
from penstock.engine.pools import processes
from penstock.torch import DataLoader

class Data:
    def __len__(self):
        return 8000
    def __getitem__(self, index):
        time.sleep(0.001)
        return float(index)

fork = processes.Fork

def counted(*args):
    print("fork", flush=True)
    return fork(*args)

processes.Fork = counted
epoch = iter(DataLoader(Data(), batch_size=2, num_workers=2))
next(epoch)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fork\n" * 2, "")


SLOW_MODULE = """
import pathlib, time
place = pathlib.Path(__file__).parent
(place / "begun").touch()
while not (place / "go_on").exists():
    time.sleep(0.002)
"""


def test_a_module_that_another_thread_imports_can_be_imported_in_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text(SLOW_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=importlib.import_module, args=("slow_to_import",), daemon=True)
    thread.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.002)
    waiting = threading.Event()
    sleep = time.sleep

    def note(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            waiting.set()
        sleep(seconds)

    # The import ends once the loader waits for it.
    monkeypatch.setattr(time, "sleep", note)

    def release() -> None:
        waiting.wait()
        (tmp_path / "go_on").touch()

    released = threading.Thread(target=release, daemon=True)
    released.start()

    def make(index: int) -> float:
        importlib.import_module("slow_to_import")
        return float(index)

    with DataLoader(Made(make), batch_size=8, num_workers=2, timeout=60) as loader:
        assert first(loader) == list(map(float, range(8)))
    thread.join()
    released.join()
    sys.modules.pop("slow_to_import")


def test_the_import_lock_is_free_in_workers_and_here() -> None:
    with DataLoader(Made(lambda i: _imp.lock_held()), batch_size=8, num_workers=2) as loader:
        assert first(loader) == [False] * 8
    assert not _imp.lock_held()


def test_an_import_that_does_not_end_does_not_hold_up_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless_import.py").write_text(SLOW_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=importlib.import_module, args=("endless_import",))
    thread.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.002)
    with launch.no_imports(0.01):
        assert _imp.lock_held()
    (tmp_path / "go_on").touch()
    thread.join()
    sys.modules.pop("endless_import")


def test_a_loop_in_another_thread_forks_too(state: dict[str, float]) -> None:
    state["offset"] = 2.0
    seen = []
    with DataLoader(Made(lambda i: STATE["offset"]), batch_size=8, num_workers=2) as loader:
        thread = threading.Thread(target=lambda: seen.extend(first(loader)))
        thread.start()
        thread.join()
    assert seen == [2.0] * 8


# Where workers are not forked.


def is_child(index: int) -> bool:
    """Whether the worker is a fork of this process: it has the value of its variable."""
    return STATE["offset"] == 3.0


@pytest.mark.parametrize("context", ["spawn", "forkserver", multiprocessing.get_context("spawn")])
def test_workers_are_not_forked_if_the_script_asks_for_it(
    context: Any, state: dict[str, float]
) -> None:
    state["offset"] = 3.0
    options: Any = {"batch_size": 8, "num_workers": 1, "multiprocessing_context": context}
    with DataLoader(Made(is_child), **options) as loader:
        assert first(loader) == [False] * 8


def test_workers_are_forked_beside_cuda_as_torch_does(
    state: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    state["offset"] = 3.0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with DataLoader(Made(is_child), batch_size=8, num_workers=1) as loader:
        assert first(loader) == [True] * 8
        assert "not forked" not in repr(loader)


class OnDevice(torch.Tensor):  # type: ignore[name-defined, misc]
    """A tensor that says that it is on a CUDA device."""

    @property
    def is_cuda(self) -> bool:
        return True


def test_workers_are_not_forked_if_the_dataset_holds_a_cuda_tensor(
    state: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state["offset"] = 3.0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(dropin, "holds_cuda_tensor", lambda dataset: True)
    with DataLoader(Made(is_child), batch_size=8, num_workers=1) as loader:
        assert "not forked: the dataset holds a tensor on a CUDA device" in repr(loader)
        with caplog.at_level("INFO", logger="penstock.torch"):
            assert first(loader) == [False] * 8
    assert "the dataset holds a tensor on a CUDA device" in caplog.text


def test_cuda_tensors_of_a_dataset_are_found() -> None:
    from torch.utils.data import ConcatDataset, Subset, TensorDataset

    here, there = torch.zeros(2), torch.zeros(2).as_subclass(OnDevice)
    assert not dropin.holds_cuda_tensor(TensorDataset(here))
    assert not dropin.holds_cuda_tensor(list(range(100_000)))
    for dataset in (
        TensorDataset(here, there),
        Subset(TensorDataset(there), [0]),
        ConcatDataset([TensorDataset(here), TensorDataset(there)]),
        [here, there],
        {"a": here, "b": [there]},
    ):
        assert dropin.holds_cuda_tensor(dataset)


class Decoded(list[Any]):
    """A list whose items are made when it is read, by index only."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("read")

    def __iter__(self) -> Any:
        raise AssertionError("read")


class Opened(Mapping[str, Any]):
    """A mapping that opens a file for each of its values."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError("read")

    def __iter__(self) -> Any:
        return iter("ab")

    def __len__(self) -> int:
        return 2


def test_the_search_for_cuda_tensors_reads_no_sample() -> None:
    there = torch.zeros(2).as_subclass(OnDevice)
    assert dropin.holds_cuda_tensor(Decoded([there]))
    assert not dropin.holds_cuda_tensor([Decoded([1]), Opened()])


def test_the_start_method_of_multiprocessing_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    start = dropin.StartAsTorch([])
    assert start.why_not_fork() == ""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "forkserver")
    assert "'forkserver'" in start.why_not_fork()
