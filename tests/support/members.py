"""Jobs for tests of sharing: real processes that report by lines of JSON and wait for input."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.node.client import request_status
from penstock.node.member import DEPTH


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
        """Close the script's input, wait for its end, and kill it after 20 s."""
        with self._errors, self.process:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()


@contextmanager
def jobs(*started: Job) -> Iterator[list[Job]]:
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
