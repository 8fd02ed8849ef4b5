"""One run of a job on several hosts: starts a rank on each, and reads what their nodes report."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cluster.job import RankFiles, RankPlan
from benchmarks.cluster.work import Ledger, reference
from benchmarks.faults.member import count_batches, read_log
from benchmarks.faults.verdict import BatchRecord, Verdict, judge
from benchmarks.harness.alone import ROOT
from benchmarks.harness.hosts import Host
from benchmarks.harness.processes import end_node, wait_until
from penstock.cluster.secrets import make_secrets
from penstock.errors import PenstockError
from penstock.node.client import request_status
from penstock.node.directory import NodeDirectory

PORT = 7411

PATIENCE = 120.0
"""Seconds without a batch after which a rank is taken to hang."""

OUTPUT_TAIL = 4000
"""Characters of a failed process's output to keep."""


class RankFailedError(Exception):
    """A rank has failed or got stuck."""


@dataclass(frozen=True)
class Counters:
    """Counters of all hosts at one moment. ``reads``: by sample, reads from all disks;
    ``network``: bytes of samples that nodes received; ``hedged``: samples that were read from
    storage because another host was late."""

    reads: NDArray[np.int64]
    network: int
    hedged: int


class HostsRun:
    """A job with one rank on each of ``hosts``. ``outside``: a host without a rank."""

    def __init__(self, hosts: Sequence[Host], plan: RankPlan, outside: Host | None = None) -> None:
        # Short, because the path of a socket may have only about a hundred characters.
        self._files = tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True)
        self.place = Path(self._files.name)
        self.hosts = hosts
        self.outside = outside
        self.plan = plan
        self._environment: dict[int, Mapping[str, str]] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._ledgers: list[Ledger] = []
        make_secrets(self.secrets)
        for rank in range(len(hosts)):
            files = self.files(rank)
            files.place.mkdir()
            self._ledgers.append(Ledger(files.ledger, plan.work.items))

    def __enter__(self) -> HostsRun:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for host in self.hosts:
            host.mend()
        for rank in range(len(self.hosts)):
            end_node(self.files(rank).runtime)
        self._files.cleanup()

    def files(self, rank: int) -> RankFiles:
        return RankFiles(self.place / f"host-{rank}")

    def change(self, rank: int, environment: Mapping[str, str]) -> None:
        """Set environment variables for the processes of a rank, before ``start``."""
        self._environment[rank] = {**self._environment.get(rank, {}), **environment}

    def start(self) -> None:
        """Start all ranks. The first one's node is the first machine of the cluster."""
        for rank in range(len(self.hosts)):
            self._start(rank)

    @property
    def secrets(self) -> Path:
        return self.place / "secrets"

    def environment(self, rank: int) -> dict[str, str]:
        """The environment of the processes of a rank."""
        files = self.files(rank)
        return {
            **os.environ,
            "PENSTOCK_RUNTIME_DIR": str(files.runtime),
            "PENSTOCK_CACHE_DIR": str(files.cache),
            "PENSTOCK_CLUSTER": f"{self.hosts[0].address}:{PORT}",
            "PENSTOCK_CLUSTER_ADDRESS": f"{self.hosts[rank].address}:{PORT}",
            "PENSTOCK_CLUSTER_SECRET": str(self.secrets),
            "PENSTOCK_NODE_WORKERS": "2",
            # ``end_node`` ends the node. If that fails, it ends by itself.
            "PENSTOCK_NODE_IDLE": "2",
            **self._environment.get(rank, {}),
        }

    def _start(self, rank: int) -> None:
        files, host = self.files(rank), self.hosts[rank]
        words = [sys.executable, "-m", "benchmarks.cluster.job", self.plan.as_json()]
        with files.output.open("wb") as out:
            process = host.start(
                *words,
                str(rank),
                str(files.place),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=ROOT,
                env=self.environment(rank),
            )
        self._processes.append(process)

    # Waiting.

    def wait_at(self, gate: int) -> None:
        """Wait until all ranks have reached a gate."""
        self._wait(
            lambda: all(self.files(rank).reached(gate).exists() for rank in self.ranks),
            f"not all ranks had taken {gate} batches",
        )

    def open(self, gate: int) -> None:
        """Let all ranks pass a gate."""
        for rank in self.ranks:
            self.files(rank).opened(gate).touch()

    def wait_for_view(self) -> None:
        """Wait until each node knows all hosts and the room of their caches."""
        world = len(self.hosts)

        def known() -> bool:
            nodes = [self.node(rank) for rank in self.ranks]
            views = [node["cluster"]["machines"] for node in nodes if node and node.get("cluster")]
            rooms = [[machine["cache_bytes"] for machine in view] for view in views]
            return [len(room) for room in rooms] == [world] * world and all(map(all, rooms))

        self._wait(known, "not all nodes knew each other")

    def wait_for_batches(self, rank: int, count: int) -> None:
        """Wait until a rank has taken this many batches."""
        self.wait_for(lambda: count_batches(self.files(rank).log) >= count, f"{count} batches")

    def wait_for(self, reached: Callable[[], bool], what: str) -> None:
        self._wait(reached, f"there were not {what}")

    def wait_for_end(self) -> None:
        """Wait until all ranks have ended."""
        self._wait(
            lambda: all(process.poll() == 0 for process in self._processes),
            "not all ranks had ended",
        )

    def _wait(self, reached: Callable[[], bool], failure: str) -> None:
        # As long as batches arrive: how long a run takes depends on the rate of its disks.
        while True:
            before = self._batches()
            try:
                wait_until(reached, self._check, PATIENCE, failure)
                return
            except TimeoutError as error:
                if self._batches() == before:
                    raise RankFailedError(f"{error}; batches: {before}") from None

    def _batches(self) -> list[int]:
        return [count_batches(self.files(rank).log) for rank in self.ranks]

    def _check(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll():
                output = self.files(rank).output.read_text(errors="replace")[-OUTPUT_TAIL:]
                raise RankFailedError(f"rank {rank} ended with {process.returncode}:\n{output}")

    # Disks, nodes and counters.

    @property
    def ranks(self) -> range:
        return range(len(self.hosts))

    def throttle(self, rate: float, *ranks: int) -> None:
        """Limit the disks of these hosts, by default of all, to this many bytes per second."""
        for rank in ranks or self.ranks:
            self._ledgers[rank].rate = rate

    def node(self, rank: int) -> dict[str, Any] | None:
        """What the node of a host reports; ``None`` if it does not answer."""
        with contextlib.suppress(OSError, PenstockError):
            return request_status(NodeDirectory(self.files(rank).runtime), timeout=5.0)
        return None

    def kill_node(self, rank: int) -> float:
        """Kill the node of a host with -9. Returns the time."""
        node = self.node(rank)
        if node is None:
            raise RankFailedError(f"rank {rank} has no node")
        os.kill(int(node["pid"]), signal.SIGKILL)
        return time.monotonic()

    def counters(self) -> Counters:
        """The counters of all hosts."""
        reads = np.sum([ledger.reads() for ledger in self._ledgers], axis=0)
        network = hedged = 0
        for node in map(self.node, self.ranks if self.plan.cluster else ()):
            cluster = None if node is None else node.get("cluster")
            if cluster:
                network += sum(machine["received"] for machine in cluster["machines"])
                hedged += sum(cache["hedged"] for cache in cluster["caches"])
        return Counters(reads, network, hedged)

    # Results.

    def log(self, rank: int) -> tuple[BatchRecord, ...]:
        return read_log(self.files(rank).log)

    def judge(self) -> Verdict:
        """Compare the batches of all ranks with those of the same loaders alone."""
        plan, verdict = self.plan, Verdict()
        for rank in self.ranks:
            due = reference(plan.work, rank, plan.world, plan.epochs)
            log = self.log(rank)
            verdict += judge(log, due, ended=True)
            in_order = [batch.digest for epoch in due.values() for batch in epoch]
            if [batch.digest for batch in log] != in_order:
                verdict += Verdict(different=1)
        return verdict
