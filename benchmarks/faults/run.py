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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.member import (
    Checkpoint,
    EpochOutcome,
    MemberFiles,
    MemberPlan,
    count_batches,
    read_log,
    read_outcomes,
)
from benchmarks.faults.process_table import (
    kernel_stacks,
    kill_all,
    nodes_of,
    processes_of,
    request_stacks,
    shown,
    wait_for_none,
)
from benchmarks.faults.verdict import BatchRecord, Verdict, judge
from benchmarks.faults.work import References
from benchmarks.harness.alone import ROOT
from benchmarks.harness.processes import end_node, wait_until

HANG_LIMIT = 60.0
"""Seconds without progress after which a member is taken to hang."""

LEFT_LIMIT = 20.0
"""Seconds after which no process of a run may be left."""

STACK_SECONDS = 1.0
"""Seconds that processes get to write their stacks."""

ANSWER_SECONDS = 5.0
"""Seconds that a node gets to answer a request for its state."""

LOOK_EVERY = 0.05
"""Seconds between two requests for the state of the node."""

STAGED = 16
"""Batches in the node's staging memory: few, so that a slow member soon finds batches dropped."""


class FaultRunError(Exception):
    """A member failed. The message contains the output of the members."""


class HangError(FaultRunError):
    """A member made no progress for too long. The message contains the stacks of all processes."""


class SkippedFaultError(Exception):
    """A fault that cannot be provoked on this machine."""


@dataclass(frozen=True)
class NodeSettings:
    """Settings of the node: seconds after which it ends when idle, and bytes of staged batches
    (``None``: ``STAGED`` batches of the plan)."""

    idle: float = 2.0
    staging: int | None = None


@dataclass
class Judgement:
    """The verdict on all members of a run, and ``defects`` that it does not count."""

    verdict: Verdict = field(default_factory=Verdict)
    defects: list[str] = field(default_factory=list)


class FaultRun:
    """The members of one run. ``plan`` is for all members; ``start`` takes changes to it."""

    def __init__(
        self,
        place: Path,
        plan: MemberPlan,
        workers: int,
        settings: NodeSettings | None = None,
        hang_limit: float = HANG_LIMIT,
    ) -> None:
        self.plan = plan
        self.place = place
        self.workers = workers
        self._settings = settings or NodeSettings()
        self.hang_limit = hang_limit
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._plans: dict[str, MemberPlan] = {}
        self._cut: set[str] = set()
        self._ended_by_signal: set[str] = set()
        self._prepared: dict[int, int] = {}
        self._looked = 0.0
        self.hangs = 0
        """Members that were killed because they hung."""

    def __enter__(self) -> FaultRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> list[str]:
        """End all processes of this run. Returns those that did not end within ``LEFT_LIMIT``."""
        for process in self._processes.values():
            # A process stopped by SIGSTOP reacts only to SIGKILL.
            process.kill()
            process.wait()
        # A node that hangs does not answer: it is one of those that are left.
        with contextlib.suppress(Exception):
            end_node(self.runtime)
        left = wait_for_none(partial(processes_of, self.runtime), LEFT_LIMIT)
        found = [shown([pid]) for pid in left]
        kill_all(left)
        return found

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
            plan = self._plans[name] = replace(self.plan, **changes)
            spec = {"plan": asdict(plan), "place": str(self.place), "name": name}
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
            self.wait(name, self.files(name).ready.exists, f"{name} was not ready")

    def go(self, *names: str) -> float:
        """Let members begin. Returns the time."""
        for name in names:
            self.files(name).go.touch()
        return time.monotonic()

    def start_and_go(self, *names: str, **changes: Any) -> None:
        self.start(*names, **changes)
        self.go(*names)

    def wait_for_batches(self, name: str, batches: int) -> float:
        """Wait until a member has received that many batches. Returns the time of the last one."""
        log = self.files(name).log
        failure = f"{name} had not received {batches} batches"
        self.wait(name, lambda: count_batches(log) >= batches, failure)
        return self.log(name)[batches - 1].at

    def send(self, name: str, number: signal.Signals) -> float:
        """Send a signal to a member. After SIGKILL or SIGINT it is not expected to complete its
        epochs."""
        if number in (signal.SIGKILL, signal.SIGINT):
            self._cut.add(name)
            self._ended_by_signal.add(name)
        self._processes[name].send_signal(number)
        return time.monotonic()

    def wait_for_more(self, name: str, batches: int) -> None:
        """Wait until a member has received that many batches from now on."""
        self.wait_for_batches(name, count_batches(self.files(name).log) + batches)

    def leave(self, name: str) -> None:
        """Let a member leave after its next batch."""
        self._cut.add(name)
        self.files(name).leave.touch()

    def wait_for_checkpoint(self, name: str) -> Path:
        """Wait for the checkpoint of a member. Returns its path."""
        state = self.files(name).state
        self.wait(name, state.exists, f"{name} had not written a checkpoint")
        return state

    def wait_for_end(self, name: str) -> None:
        """Wait until a member has ended."""
        self.wait(name, partial(self.has_ended, name), f"{name} had not ended")
        self._check()

    def has_ended(self, name: str) -> bool:
        return self._processes[name].poll() is not None

    def defects_of_end(self, name: str) -> list[str]:
        """Wait until a member has ended, and report its failure instead of raising it: for faults
        that try several cases. A member that hangs is killed."""
        try:
            self.wait_for_end(name)
        except FaultRunError as error:
            self.hangs += isinstance(error, HangError)
            self.send(name, signal.SIGKILL)
            self._processes[name].wait()
            return [str(error)]
        return []

    def end(self) -> None:
        """Wait until all members have ended."""
        for name in self._processes:
            self.wait_for_end(name)

    def children(self, name: str) -> list[psutil.Process]:
        """The worker processes of a member; none if it has ended."""
        try:
            return list(psutil.Process(self._processes[name].pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def files(self, name: str) -> MemberFiles:
        return MemberFiles(self.place, name)

    def log(self, name: str) -> tuple[BatchRecord, ...]:
        return read_log(self.files(name).log)

    def outcomes(self, name: str) -> list[EpochOutcome]:
        return read_outcomes(self.files(name).outcome)

    def received(self, *names: str) -> Sequence[BatchRecord]:
        """Batches of a member in all its processes, each resumed from the checkpoint of the one
        before."""
        *before, last = names
        covered = [batch for name in before for batch in self.log(name)[: self._saved(name)]]
        return [*covered, *self.log(last)]

    def _saved(self, name: str) -> int:
        state = self.files(name).state
        return Checkpoint.read(state).batches if state.exists() else 0

    def is_complete(self, name: str) -> bool:
        """Whether a member is expected to complete its epochs."""
        return name not in self._cut and self._plans[name].leave_at is None

    def judge(self, references: References) -> Judgement:
        """Compare the batches of all members with those of undisturbed loaders.

        A member that did not end by itself is judged up to its last batch.
        """
        judgement = Judgement()
        resumed = {plan.resume: name for name, plan in self._plans.items() if plan.resume}
        for name, plan in self._plans.items():
            if plan.resume:
                continue
            chain = [name]
            while (state := str(self.files(chain[-1]).state)) in resumed:
                chain.append(resumed[state])
            last = chain[-1]
            ended = self.is_complete(last) and self._processes[last].poll() == 0
            reference = references.of(plan.work, plan.epochs, plan.options)
            judgement.verdict += judge(self.received(*chain), reference, ended=ended)
            outcomes = self.outcomes(last)
            if ended and outcomes and set(outcomes[-1].bad) != plan.work.bad_samples:
                judgement.defects.append(
                    f"{last} listed the bad samples {list(outcomes[-1].bad)} instead of "
                    f"{sorted(plan.work.bad_samples)}"
                )
        return judgement

    # The node.

    @property
    def runtime(self) -> Path:
        """The runtime directory of the members and their node."""
        return self.place / "node"

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

    def kill_starting_node(self) -> None:
        """Kill the node as soon as its process exists."""
        found: list[int] = []

        def appeared() -> bool:
            found[:] = nodes_of(self.runtime)
            return bool(found)

        wait_until(appeared, lambda: None, self.hang_limit, "no node had started")
        kill_all(found)

    def _node_state(self) -> dict[str, Any] | None:
        from penstock.errors import PenstockError
        from penstock.node.client import request_status
        from penstock.node.directory import NodeDirectory

        node = None
        # A node that is being killed may close the connection, and one that hangs does not answer.
        with contextlib.suppress(OSError, PenstockError):
            node = request_status(NodeDirectory(self.runtime), timeout=ANSWER_SECONDS)
        if node is not None:
            prepared = sum(group["prepared"] for group in node["groups"])
            pid = int(node["pid"])
            self._prepared[pid] = max(self._prepared.get(pid, 0), prepared)
        return node

    # Waiting.

    def _environment(self) -> dict[str, str]:
        staging = self._settings.staging or STAGED * self.plan.work.bytes
        return {
            **os.environ,
            "PENSTOCK_RUNTIME_DIR": str(self.runtime),
            "PENSTOCK_NODE_WORKERS": str(self.workers),
            "PENSTOCK_NODE_STAGING": str(staging),
            "PENSTOCK_NODE_IDLE": str(self._settings.idle),
        }

    def wait(self, name: str, reached: Callable[[], bool], failure: str) -> None:
        """Wait for an event. A member that makes no progress for too long hangs."""
        while True:
            before = self._progress(name)
            try:
                wait_until(reached, self._check, self.hang_limit, failure)
            except TimeoutError as error:
                if self._progress(name) == before:
                    raise HangError(f"{error}; {self._stacks()}") from None
            else:
                return

    def _progress(self, name: str) -> int:
        return count_batches(self.files(name).log)

    def _check(self) -> None:
        for name, process in self._processes.items():
            if process.poll() not in (None, 0) and name not in self._ended_by_signal:
                raise FaultRunError(f"{name} ended with {process.poll()}; {self._outputs([name])}")
        if time.monotonic() - self._looked > LOOK_EVERY:
            self._node_state()
            self._looked = time.monotonic()

    def _stacks(self) -> str:
        """The Python stacks of members, in their output, and of the node, in its log; and where
        all processes wait in the kernel."""
        pids = processes_of(self.runtime)
        request_stacks(pids)
        time.sleep(STACK_SECONDS)
        log = self.runtime / "node.log"
        node = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        return "\n".join(
            [self._outputs(most=4000), f"the node wrote: {node}", kernel_stacks(pids)],
        )

    def _outputs(self, names: Sequence[str] = (), most: int = 1000) -> str:
        texts = {
            name: self.files(name).output.read_text(errors="replace").strip()
            for name in names or self._processes
        }
        tails = [f"{name} wrote: {text[-most:]}" for name, text in texts.items() if text]
        return "; ".join(tails) or "no output"
