"""Worker programs that are forks of one server process, instead of a Python of their own each.

To start Python and to import what the pipeline of a test needs takes up to seconds of CPU time, and
hundreds of tests start worker processes. A package whose ``conftest`` imports the two fixtures uses
them; its tests of the start itself use the fixture ``real_programs``.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import process as started
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import penstock
from penstock.engine.pools import launch, processes
from penstock.engine.pools.orphan import die_with_parent
from tests.support import warm

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


PROGRAM = launch.Program


@pytest.fixture(scope="package", autouse=True)
def warm_programs() -> Iterator[None]:
    """Worker programs that tests of this package start are forks of the server."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch, processes):
            patch.setattr(module, "Program", WarmProgram)
        yield


@pytest.fixture
def real_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker programs start as those of users do."""
    for module in (launch, processes):
        monkeypatch.setattr(module, "Program", PROGRAM)


class Descriptor:
    """A file descriptor, which the child receives as a number."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._fd),)


def _received(handle: Any) -> int:
    return int(handle.detach())


class WarmProgram:
    """Does what ``penstock.engine.pools.launch.Program`` does."""

    def __init__(
        self, socket_fd: int, parent: int, module: Literal["worker", "zygote"] = "worker"
    ) -> None:
        self.error, self.declined, self.innocent = "", False, False
        variables = {**dict.fromkeys(ONE_THREAD, "1"), **os.environ}
        fds = [Descriptor(fd) for fd in (socket_fd, 1, 2)]
        self._process = warm.server().Process(target=become, args=(module, variables, *fds))
        self._process.start()
        # Otherwise the next start in another thread polls it, while this one waits for it.
        started._children.discard(self._process)  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._code: int | None = None
        self.pid = self._process.pid

    def end(self, patience: float) -> int | None:
        with self._lock:
            if self._code is None:
                self._process.join(patience)
                if self._process.exitcode is None:
                    self._process.kill()
                    self._process.join()
                self._code = self._process.exitcode
                self._process.close()  # now, and not when garbage is collected in another test
            return self._code


def become(module: str, variables: Mapping[str, str], fd: int, output: int, errors: int) -> None:
    """Be a worker program, in a fork of the server."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    die_with_parent(os.getppid())
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.environ.clear()
    os.environ.update(variables)
    gc.freeze()  # a collection would copy the memory of the server's objects
    random.seed()
    np.random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(variables["OMP_NUM_THREADS"]))
    root = str(Path(penstock.__file__).resolve().parents[1])
    sys.argv[:] = ["-c", str(fd), str(os.getppid()), root, module]
    importlib.import_module(f"penstock.engine.pools.{module}").main()
