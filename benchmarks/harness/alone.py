"""Runs a function in a fresh process, and watches the memory of that process and its children."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
"""Where ``benchmarks`` can be imported from, whatever the current directory is."""

WATCH_EVERY = 0.25
"""Seconds between two looks at memory. A look costs the watched process about a millisecond."""

ENDING = 20.0
"""Seconds a process may take to end after it was asked to."""

KEPT = 4000
"""Characters of what a failed process said that are worth showing."""

PROTOCOL = 4
"""Of the pickles that go to and fro: the process may run another version of Python."""


class AloneError(Exception):
    """The process failed, or did not end in time; ``printed`` is the end of what it said."""

    def __init__(self, message: str, printed: str = "") -> None:
        super().__init__(message)
        self.printed = printed


@dataclass(frozen=True)
class Watched:
    """What the function returned, and the most memory its process tree took (PSS, bytes)."""

    value: Any
    peak: int


def alone(
    function: Callable[..., Any],
    *args: Any,
    timeout: float,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Watched:
    """``function(*args)`` in a process of its own. Both must pickle.

    ``environment`` is the whole environment of that process; ``None`` leaves it as it is here.
    """
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as place:
        job, answer, printed = (Path(place) / name for name in ("job", "answer", "printed"))
        job.write_bytes(_pickled((function, args)))
        with printed.open("wb") as out:
            process = subprocess.Popen(
                [python, "-m", "benchmarks.harness.alone", str(job), str(answer)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=ROOT,
                env=environment,
            )
        try:
            peak = _watch(process, timeout)
        finally:
            _end(process)
        if process.returncode != 0 or not answer.exists():
            said = printed.read_text(errors="replace").strip()
            last = said.splitlines()[-1] if said else f"ended with code {process.returncode}"
            raise AloneError(last.strip(), said[-KEPT:])
        return Watched(pickle.loads(answer.read_bytes()), peak)


def memory_of_tree(pid: int) -> int:
    """The memory of a process and all below it: PSS, so that what they share counts once."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in family:
        try:
            total += _pss(process.pid) or process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _pss(pid: int) -> int:
    """As the kernel adds it up: to read it map by map would take time from those watched."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def cpu_of_tree() -> float:
    """CPU seconds of this process, its living children, and those it has waited for."""
    root = psutil.Process()
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return float(total)


def _watch(process: subprocess.Popen[bytes], timeout: float) -> int:
    peak = 0
    give_up = time.monotonic() + timeout
    while True:
        try:
            process.wait(timeout=WATCH_EVERY)
            return peak
        except subprocess.TimeoutExpired:
            peak = max(peak, memory_of_tree(process.pid))
        if time.monotonic() > give_up:
            raise AloneError(f"not done after {timeout:.0f} s; it was ended")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started: they are a session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=ENDING)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


class _Pickler(pickle.Pickler):
    """Paths travel as text: their classes live in other modules from one Python to the next."""

    def reducer_override(self, value: Any) -> Any:
        return (_path, (str(value),)) if isinstance(value, PurePath) else NotImplemented


def _pickled(value: Any) -> bytes:
    written = io.BytesIO()
    _Pickler(written, PROTOCOL).dump(value)
    return written.getvalue()


def _path(text: str) -> Path:
    return Path(text)


def _main(job: str, answer: str) -> None:
    function, args = pickle.loads(Path(job).read_bytes())
    value = function(*args)
    Path(answer).write_bytes(_pickled(value))


if __name__ == "__main__":
    _main(*sys.argv[1:])
