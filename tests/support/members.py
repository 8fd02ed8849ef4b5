"""Jobs for tests of sharing: real processes that report by lines of JSON and wait for input."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from penstock.node.client import request_status
from penstock.node.member import DEPTH
from tests.support import warm

PATIENCE = 100.0
"""Seconds that a job may take to end, on a busy machine too."""


class Job:
    """A script in its own process. It prints lines of JSON, and may wait in ``input()``."""

    def __init__(self, script: str, *arguments: object) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def read(self) -> Any:
        """The next value that the script prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self._errors.seek(0)
            raise AssertionError(f"a job has ended:\n{self._errors.read()}")
        return json.loads(line)

    def go(self) -> None:
        """Let the script return from its ``input()``."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Close the script's input, wait for its end, and kill it if it does not end."""
        with self._errors, self.process:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()


class WarmJob:
    """A ``Job`` that need not import torch, because it is a fork of a process that has."""

    def __init__(self, script: str, *arguments: object) -> None:
        self._folder = tempfile.TemporaryDirectory()
        place = Path(self._folder.name)
        (place / "job.py").write_text(script)
        self._errors = place / "errors"
        given, to_it = multiprocessing.Pipe(duplex=False)
        from_it, printed = multiprocessing.Pipe(duplex=False)
        words = [str(argument) for argument in arguments]
        self._process = warm.start(
            place / "job.py", words, os.environ, self._errors, output=printed, given=given
        )
        for theirs in (given, printed):
            theirs.close()
        self._input = os.fdopen(os.dup(to_it.fileno()), "w")
        self._output = os.fdopen(os.dup(from_it.fileno()))
        for ours in (to_it, from_it):
            ours.close()

    def read(self) -> Any:
        line = self._output.readline()
        if not line:
            self._process.join(PATIENCE)
            raise AssertionError(f"a job has ended:\n{self._errors.read_text()}")
        return json.loads(line)

    def go(self) -> None:
        self._input.write("\n")
        self._input.flush()

    def end(self) -> None:
        with self._folder, self._output, self._input:
            self._input.close()
            self._process.join(PATIENCE)
            self._process.kill()
            self._process.join()


J = TypeVar("J", Job, WarmJob)


@contextmanager
def jobs(*started: J) -> Iterator[list[J]]:
    """These jobs, which are ended on exit."""
    try:
        yield list(started)
    finally:
        for job in started:
            job.end()


def group(name: str) -> dict[str, Any]:
    """The status of a group."""
    status = request_status()
    assert status is not None, "no node is running"
    return next(group for group in status["groups"] if group["name"] == name)


def prepared_once(name: str, batches: int) -> bool:
    """Whether a group has prepared ``batches``, and at most those requested of the next epoch."""
    return bool(batches <= group(name)["prepared"] <= batches + DEPTH)
