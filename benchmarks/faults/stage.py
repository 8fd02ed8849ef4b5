"""Where a fault is provoked: members and their node in a place of their own, started, watched,
disturbed and cleared away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.member import Diary, Life, Papers, read, written
from benchmarks.faults.verdict import Batch
from benchmarks.harness.alone import ROOT
from benchmarks.jobs.board import wait_until
from benchmarks.jobs.run import end_node

PATIENCE = 60.0
"""Seconds that anything may take beyond what members sleep."""

LOOK_EVERY = 0.05
"""Seconds from one look at the node to the next."""

STAGED = 16
"""Batches that the node has room for: few, so that whoever falls behind is soon too far behind."""


class StageError(Exception):
    """A member failed, or nothing happened for too long; the message has what it said."""


class Stage:
    """One fault's members. ``life`` is what all do; each may be told otherwise when started."""

    def __init__(self, place: Path, life: Life, workers: int) -> None:
        self.life = life
        self._place = place
        self._workers = workers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cut: set[str] = set()
        self._prepared: dict[int, int] = {}
        self._looked = 0.0

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            # One that was stopped dies only of this.
            process.kill()
            process.wait()
        end_node(self._node_place)

    @property
    def epoch(self) -> int:
        """Batches in an epoch."""
        return self.life.work.batches

    @property
    def prepared(self) -> int:
        """Batches that all nodes together have prepared, as far as was seen."""
        return sum(self._prepared.values())

    # Members.

    def start(self, *names: str, **changes: Any) -> None:
        """Start members, which then wait; all have imported what they need when this returns."""
        for name in names:
            told = {
                "life": asdict(replace(self.life, **changes)),
                "place": str(self._place),
                "name": name,
            }
            with self.papers(name).said.open("wb") as out:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.faults.member", json.dumps(told)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd=ROOT,
                    env=self._environment(),
                )
        for name in names:
            self._wait(self.papers(name).ready.exists, f"{name} has not begun")

    def go(self, *names: str) -> float:
        """Let members begin; the moment at which they could."""
        for name in names:
            self.papers(name).go.touch()
        return time.monotonic()

    def has(self, name: str, batches: int) -> float:
        """Wait until a member has had so many batches; the moment at which it had the last."""
        diary = self.papers(name).diary
        self._wait(lambda: written(diary) >= batches, f"{name} has not had {batches} batches")
        return self.diary(name).batches[batches - 1].at

    def send(self, name: str, number: signal.Signals) -> float:
        """Send a signal; one that is killed is not expected to come to its end."""
        if number == signal.SIGKILL:
            self.cut(name)
        self._processes[name].send_signal(number)
        return time.monotonic()

    def cut(self, name: str) -> None:
        """This member will not have all of its last epoch."""
        self._cut.add(name)

    def saved(self, name: str) -> Path:
        """The checkpoint of a member, when it has written one."""
        state = self.papers(name).state
        self._wait(state.exists, f"{name} has written no checkpoint")
        return state

    def end(self) -> None:
        """Wait until all members have come to their end."""
        for name, process in self._processes.items():
            self._wait(partial(_is_over, process), f"{name} has not ended")
        self._check()

    def papers(self, name: str) -> Papers:
        return Papers(self._place, name)

    def diary(self, name: str) -> Diary:
        return read(self.papers(name).diary)

    def had(self, *names: str) -> Sequence[Batch]:
        """What a member had, in one process or in several, each from the other's checkpoint on."""
        *before, last = (self.diary(name) for name in names)
        known = [batch for diary in before for batch in diary.batches[: diary.saved]]
        return [*known, *last.batches]

    def ended(self, name: str) -> bool:
        """Whether it came to its end by itself."""
        return name not in self._cut

    # The node.

    def node(self) -> dict[str, Any]:
        found = self._look()
        if found is None:
            raise StageError("there is no node")
        return found

    def kill_node(self) -> float:
        os.kill(int(self.node()["pid"]), signal.SIGKILL)
        return time.monotonic()

    def kill_worker(self) -> float:
        workers = psutil.Process(int(self.node()["pid"])).children(recursive=True)
        if not workers:
            raise StageError("the node has no worker processes")
        workers[0].kill()
        return time.monotonic()

    @property
    def _node_place(self) -> Path:
        return self._place / "node"

    def _look(self) -> dict[str, Any] | None:
        from penstock.node.look import look
        from penstock.node.place import Place

        found = None
        # A node that is just being killed may hang up.
        with contextlib.suppress(OSError):
            found = look(Place(self._node_place))
        if found is not None:
            prepared = sum(group["prepared"] for group in found["groups"])
            pid = int(found["pid"])
            self._prepared[pid] = max(self._prepared.get(pid, 0), prepared)
        return found

    # Waiting.

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PENSTOCK_RUNTIME_DIR": str(self._node_place),
            "PENSTOCK_NODE_WORKERS": str(self._workers),
            "PENSTOCK_NODE_STAGING": str(STAGED * self.life.work.bytes),
            "PENSTOCK_NODE_IDLE": "2",
        }

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        try:
            wait_until(reached, self._check, PATIENCE, what)
        except TimeoutError as error:
            raise StageError(f"{error}; {self._words()}") from None

    def _check(self) -> None:
        for name, process in self._processes.items():
            if process.poll() not in (None, 0) and name not in self._cut:
                raise StageError(f"{name} failed; {self._words()}")
        if time.monotonic() - self._looked > LOOK_EVERY:
            self._look()
            self._looked = time.monotonic()

    def _words(self) -> str:
        said = {
            name: self.papers(name).said.read_text(errors="replace") for name in self._processes
        }
        words = [f"{name} said: {text.strip()[-1000:]}" for name, text in said.items() if text]
        return "; ".join(words) or "nobody said anything"


def _is_over(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None
