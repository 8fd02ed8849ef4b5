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
"""The directory from which ``benchmarks`` can be imported."""

WATCH_EVERY = 0.25
"""Seconds between two measurements of memory. Each costs the watched process about a
millisecond."""

END_TIMEOUT = 20.0
"""Seconds a process may take to end after a signal."""

OUTPUT_TAIL = 4000
"""Characters of a failed process's output to keep."""

PROTOCOL = 4
"""Pickle protocol for both directions. The process may run another version of Python."""


class AloneError(Exception):
    """The process failed or did not end in time. ``printed``: the end of its output."""

    def __init__(self, message: str, printed: str = "") -> None:
        super().__init__(message)
        self.printed = printed


@dataclass(frozen=True)
class Watched:
    """Return value of the function, and peak memory of its process tree (PSS, bytes)."""

    value: Any
    peak: int


def run_alone(
    function: Callable[..., Any],
    *args: Any,
    timeout: float,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Watched:
    """Run ``function(*args)`` in a fresh process. Function and arguments must pickle.

    ``environment`` is the complete environment of that process. ``None``: the same as here.
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
            output = printed.read_text(errors="replace").strip()
            last = output.splitlines()[-1] if output else f"ended with code {process.returncode}"
            raise AloneError(last.strip(), output[-OUTPUT_TAIL:])
        return Watched(pickle.loads(answer.read_bytes()), peak)


def memory_of_tree(pid: int) -> int:
    """Memory of a process and all its descendants, as PSS: shared pages count once."""
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
    """PSS from the kernel's summary. Reading it map by map would slow down the watched process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def cpu_of_tree() -> float:
    """CPU seconds of this process, its living descendants, and the children it has waited for."""
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
            raise AloneError(f"did not finish within {timeout:.0f} s and was ended")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all processes it started: they form one session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=END_TIMEOUT)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


class _Pickler(pickle.Pickler):
    """Pickles paths as text: the module of the path classes differs between Python versions."""

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
