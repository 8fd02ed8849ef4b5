"""One run of a fault: starts members and their node in a separate directory, watches and disturbs
them, and ends them."""

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

from benchmarks.faults.member import MemberFiles, MemberLog, MemberPlan, count_batches, read_log
from benchmarks.faults.verdict import BatchRecord
from benchmarks.harness.alone import ROOT
from benchmarks.harness.processes import end_node, wait_until

TIMEOUT = 60.0
"""Seconds to wait for any event."""

LOOK_EVERY = 0.05
"""Seconds between two requests for the state of the node."""

STAGED = 16
"""Batches in the node's staging memory: few, so that a slow member soon finds batches dropped."""


class FaultRunError(Exception):
    """A member failed or timed out. The message contains the output of the members."""


class FaultRun:
    """The members of one run. ``plan`` is for all members; ``start`` takes changes to it."""

    def __init__(self, place: Path, plan: MemberPlan, workers: int) -> None:
        self.plan = plan
        self._place = place
        self._workers = workers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cut: set[str] = set()
        self._prepared: dict[int, int] = {}
        self._looked = 0.0

    def __enter__(self) -> FaultRun:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            # A process stopped by SIGSTOP reacts only to SIGKILL.
            process.kill()
            process.wait()
        end_node(self._node_place)

    @property
    def batches_per_epoch(self) -> int:
        return self.plan.work.batches

    @property
    def prepared(self) -> int:
        """Batches prepared by all nodes of this run, as of the last request for their state."""
        return sum(self._prepared.values())

    # Members.

    def start(self, *names: str, **changes: Any) -> None:
        """Start members and wait until they are ready: each then waits for ``go``."""
        for name in names:
            spec = {
                "plan": asdict(replace(self.plan, **changes)),
                "place": str(self._place),
                "name": name,
            }
            with self.files(name).output.open("wb") as out:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.faults.member", json.dumps(spec)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd=ROOT,
                    env=self._environment(),
                )
        for name in names:
            self._wait(self.files(name).ready.exists, f"{name} was not ready")

    def go(self, *names: str) -> float:
        """Let members begin. Returns the time."""
        for name in names:
            self.files(name).go.touch()
        return time.monotonic()

    def wait_for_batches(self, name: str, batches: int) -> float:
        """Wait until a member has received that many batches. Returns the time of the last one."""
        log = self.files(name).log
        failure = f"{name} had not received {batches} batches"
        self._wait(lambda: count_batches(log) >= batches, failure)
        return self.log(name).batches[batches - 1].at

    def send(self, name: str, number: signal.Signals) -> float:
        """Send a signal to a member. After SIGKILL it is not expected to complete its epochs."""
        if number == signal.SIGKILL:
            self.expect_cut_off(name)
        self._processes[name].send_signal(number)
        return time.monotonic()

    def expect_cut_off(self, name: str) -> None:
        """Do not expect this member to complete its last epoch."""
        self._cut.add(name)

    def wait_for_checkpoint(self, name: str) -> Path:
        """Wait for the checkpoint of a member. Returns its path."""
        state = self.files(name).state
        self._wait(state.exists, f"{name} had not written a checkpoint")
        return state

    def end(self) -> None:
        """Wait until all members have ended."""
        for name, process in self._processes.items():
            self._wait(partial(_has_ended, process), f"{name} had not ended")
        self._check()

    def files(self, name: str) -> MemberFiles:
        return MemberFiles(self._place, name)

    def log(self, name: str) -> MemberLog:
        return read_log(self.files(name).log)

    def received(self, *names: str) -> Sequence[BatchRecord]:
        """Batches of a member in all its processes, each resumed from the checkpoint of the one
        before."""
        *before, last = (self.log(name) for name in names)
        covered = [batch for log in before for batch in log.batches[: log.saved]]
        return [*covered, *last.batches]

    def is_complete(self, name: str) -> bool:
        """Whether a member is expected to complete its epochs."""
        return name not in self._cut

    # The node.

    def node(self) -> dict[str, Any]:
        node = self._node_state()
        if node is None:
            raise FaultRunError("there is no node")
        return node

    def kill_node(self) -> float:
        os.kill(int(self.node()["pid"]), signal.SIGKILL)
        return time.monotonic()

    def kill_worker(self) -> float:
        workers = psutil.Process(int(self.node()["pid"])).children(recursive=True)
        if not workers:
            raise FaultRunError("the node has no worker processes")
        workers[0].kill()
        return time.monotonic()

    @property
    def _node_place(self) -> Path:
        return self._place / "node"

    def _node_state(self) -> dict[str, Any] | None:
        from penstock.node.client import request_status
        from penstock.node.directory import NodeDirectory

        node = None
        # A node that is being killed may close the connection.
        with contextlib.suppress(OSError):
            node = request_status(NodeDirectory(self._node_place))
        if node is not None:
            prepared = sum(group["prepared"] for group in node["groups"])
            pid = int(node["pid"])
            self._prepared[pid] = max(self._prepared.get(pid, 0), prepared)
        return node

    # Waiting.

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PENSTOCK_RUNTIME_DIR": str(self._node_place),
            "PENSTOCK_NODE_WORKERS": str(self._workers),
            "PENSTOCK_NODE_STAGING": str(STAGED * self.plan.work.bytes),
            "PENSTOCK_NODE_IDLE": "2",
        }

    def _wait(self, reached: Callable[[], bool], failure: str) -> None:
        try:
            wait_until(reached, self._check, TIMEOUT, failure)
        except TimeoutError as error:
            raise FaultRunError(f"{error}; {self._outputs()}") from None

    def _check(self) -> None:
        for name, process in self._processes.items():
            if process.poll() not in (None, 0) and name not in self._cut:
                raise FaultRunError(f"{name} failed; {self._outputs()}")
        if time.monotonic() - self._looked > LOOK_EVERY:
            self._node_state()
            self._looked = time.monotonic()

    def _outputs(self) -> str:
        outputs = {
            name: self.files(name).output.read_text(errors="replace") for name in self._processes
        }
        tails = [f"{name} wrote: {text.strip()[-1000:]}" for name, text in outputs.items() if text]
        return "; ".join(tails) or "no member wrote any output"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None
