"""Jobs for tests of sharing: real processes that say when they are ready, and wait to be told."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.node.look import look
from penstock.node.member import DEPTH


class Job:
    """A script in a process of its own. It tells things as lines of JSON, and goes on when told."""

    def __init__(self, script: str, *arguments: object) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def told(self) -> Any:
        """What it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self._errors.seek(0)
            raise AssertionError(f"a job has ended:\n{self._errors.read()}")
        return json.loads(line)

    def go(self) -> None:
        """Let it go on with its ``input()``."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Let it end by itself if it can."""
        with self._errors, self.process:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()


@contextmanager
def jobs(*started: Job) -> Iterator[list[Job]]:
    """These jobs, ended at the end whatever happens."""
    try:
        yield list(started)
    finally:
        for job in started:
            job.end()


def group(name: str) -> dict[str, Any]:
    """What the node says of a group."""
    said = look()
    assert said is not None, "there is no node"
    return next(one for one in said["groups"] if one["name"] == name)


def prepared_once(name: str, batches: int) -> bool:
    """Whether a group has prepared this many, and what was asked for ahead of the next epoch."""
    return bool(batches <= group(name)["prepared"] <= batches + DEPTH)
