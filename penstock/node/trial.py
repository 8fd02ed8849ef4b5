"""Loads the pipeline of a job in a process of its own first: if it crashes there, the node lives.

To unpickle a pipeline imports the user's modules and runs their code.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgpack

from penstock.engine.pools.launch import how_it_ended
from penstock.engine.pools.messages import pack_error
from penstock.engine.pools.restarts import FailedStarts, killed_from_outside
from penstock.engine.slots import shared_file
from penstock.errors import WorkerError
from penstock.serialize import unpack

POLL = 0.2
"""Seconds between two looks at whether the group is being closed."""

_LOADED = b"loaded"
"""What a process reports whose pipeline is loaded. An exit code of 0 says little: user code may end
the process."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from penstock.node.trial import main; main()"
)


class TrialError(Exception):
    """The pipeline cannot be loaded. ``frame``: the packed error, which is not unpacked here."""

    def __init__(self, frame: bytes, text: str) -> None:
        super().__init__(text)
        self.frame = frame


def load_on_trial(
    fd: int,
    path: list[str],
    directory: str,
    closing: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Load the pipeline in this shared file in another process. Raises TrialError if that fails.

    A process that is killed from outside is replaced. It is killed if the group is ``closing``.
    """
    trials = FailedStarts()
    while not closing():
        code, written = _load_once(fd, path, directory, closing)
        if written == _LOADED:
            return
        if written:
            frame, text = msgpack.unpackb(written, unicode_errors="surrogatepass")
            raise TrialError(frame, text)
        if closing():
            break
        pause = trials.pause(0, outside=True) if killed_from_outside(code) else None
        if pause is None:
            error = WorkerError(
                f"the pipeline cannot be loaded: a process that unpickled it was "
                f"{how_it_ended(code)}. Its output is in the log of the node."
                if code < 0
                else "the pipeline cannot be loaded: a process that unpickled it "
                f"{how_it_ended(code)}."
            )
            raise TrialError(pack_error(error), str(error))
        sleep(pause)
    # What was not loaded to the end on trial is not loaded in the node.
    error = WorkerError("the group was closed before its pipeline was loaded")
    raise TrialError(pack_error(error), str(error))


def _load_once(
    fd: int, path: list[str], directory: str, closing: Callable[[], bool]
) -> tuple[int, bytes]:
    """Load the pipeline in a process. Returns its exit code, and what it reported."""
    root = str(Path(__file__).resolve().parents[2])
    report = shared_file(0)
    try:
        # Its standard input closes when this process ends, however that happens.
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(fd), str(report), json.dumps([root, *path])],
            stdin=subprocess.PIPE,
            pass_fds=[fd, report],
            cwd=directory,
        )
        try:
            while process.poll() is None and not closing():
                try:
                    process.wait(POLL)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
            code = process.wait()
            if process.stdin is not None:
                process.stdin.close()
        return code, os.pread(report, os.fstat(report).st_size, 0)
    finally:
        os.close(report)


def main() -> None:
    """Load a pipeline. Arguments: the descriptors of the pipeline and of the file for an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        unpack(mmap.mmap(int(sys.argv[1]), 0, access=mmap.ACCESS_COPY))
        report = _LOADED
    except BaseException as error:
        packed = [pack_error(error), str(error)]
        report = msgpack.packb(packed, unicode_errors="surrogatepass")
    os.write(int(sys.argv[2]), report)
    # Skip the interpreter's shutdown: libraries with threads of their own may hang in it.
    os._exit(0)


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)
