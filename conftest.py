"""Runs slow tests first, and checks that no test leaves anything behind: no process, no thread of
Penstock, no file in shared memory."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import suppress
from multiprocessing.forkserver import _forkserver as forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests.support.torchvision import load as load_torchvision

# What tests keep on disk is not mixed with what the user keeps.
_kept = tempfile.TemporaryDirectory(prefix="penstock-tests-")
os.environ.setdefault("PENSTOCK_CACHE_DIR", _kept.name)

# Before anything imports Triton: its kernels then run on CPU tensors, without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# No test may fail because the machine is busy. Otherwise this is so only where CI is set.
settings.register_profile("any-machine", settings(), deadline=None)
settings.load_profile("any-machine")

collect_ignore = [
    "penstock/torch/lightning.py",
    "penstock/image/on_device/jpeg_triton.py",
    "penstock/image/on_device/triton_ops.py",
]
"""One imports Lightning, which may be missing, or may fail to import torchvision; the other Triton,
which may be missing."""

SLOW = (
    "tests/torch/test_share.py",
    "tests/torch/test_distributed.py",
    "tests/torch/test_dataloader.py",
    "tests/torch/test_checkpoint_cost.py",
    "tests/inject/test_analysis.py",
    "tests/inject/test_scripts_run.py",
    "tests/project/test_docs.py",
    "tests/project/test_examples.py",
    "tests/store/test_damage.py",
)
"""Files with tests of many seconds, most of which start processes that import torch. They run
first, so that short tests are left to fill the last seconds of all workers."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell makes background jobs ignore Ctrl-C, and programs that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHM = Path("/dev/shm") / f"penstock-{os.getuid()}"


def pytest_unconfigure() -> None:
    # The workers of pytest-xdist end without the finalizers of Python.
    _kept.cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # What is imported stays until the end. To look through it again and again takes half of the
    # time of the collection, and much of that of tests that collect garbage.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(SLOW))


_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
"""Whether the kernel lists the children of a process. To search all processes for them takes
several milliseconds, after every test."""


def _children(pid: int | str) -> set[int]:
    """The children of a process; none if it has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    found: set[int] = set()
    for thread in threads:
        with suppress(OSError):  # the thread has just ended, and another has its children
            found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found


def _descendants() -> set[int]:
    if not _LISTS_CHILDREN:
        return {child.pid for child in psutil.Process().children(recursive=True)}
    below: set[int] = set()
    new = _children("self")
    while new:
        below |= new
        new = set[int]().union(*map(_children, new)) - below
    return below


def _workers() -> list[psutil.Process]:
    workers = []
    for pid in sorted(_descendants()):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            process = psutil.Process(pid)
            if _is_alive(process) and _is_ours(process):
                workers.append(process)
    return workers


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return False


def _is_ours(process: psutil.Process) -> bool:
    """Whether a process is one of Penstock's. The server of ``tests.support.warm`` stays, and what
    Python itself starts beside it."""
    words = " ".join(_command(process))
    if "penstock" not in words or "from multiprocessing.resource_tracker" in words:
        return False
    # Forks of the server have the same command as the server.
    server = getattr(forkserver, "_forkserver_pid", None)
    return "from multiprocessing.forkserver" not in words or process.pid != server


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _leftovers() -> list[str]:
    found = [f"process {p.pid}: {_command(p)[:3]}" for p in _workers()]
    found += [t.name for t in threading.enumerate() if t.name.startswith("penstock")]
    mine = f"run-{os.getpid()}-"
    if SHM.exists():
        found += [
            str(store)
            for run in SHM.iterdir()
            if run.name.startswith(mine)
            for store in run.iterdir()
            if store.is_dir()
        ]
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    if not _leftovers():
        return
    gc.collect()
    # A killed process takes a moment to end, on a busy machine a long one; a real leftover stays.
    deadline = time.monotonic() + 60
    while (left := _leftovers()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB. Skips the test where mounting one is not permitted."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="session")
def torchvision() -> Any:
    """torchvision, even if its compiled operators do not fit the installed torch.

    Its transforms need none of the operators.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module, _ = load_torchvision()
            importlib.import_module("torchvision.transforms.v2.functional")
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"torchvision cannot be imported: {error}")
    return module
