"""A Ray cluster on the hosts of a run: it places the nodes, and its head can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec

import psutil

from benchmarks.cluster.run import HostsRun, RankFailedError
from benchmarks.faults.run import SkippedFaultError

PORT = 6379

START_LIMIT = 120.0
"""Seconds that Ray may take to start on a host."""

RECONNECT = 10
"""Seconds after which Ray's processes on other hosts give up a head that does not answer, and end.
Ray's default is 60; a shorter time lets that happen within the run, too."""

MEMORY = 100 << 20
"""Bytes of Ray's object store on each host. Nothing is put there."""

OTHERS = ("penstock.node", "benchmarks.cluster.job")
"""Parts of the commands of processes on a host that are not Ray's."""


class RayHosts:
    """Ray on all hosts of a run, with its head on the last one. Start the ranks after it."""

    def __init__(self, run: HostsRun) -> None:
        if find_spec("ray") is None:
            raise SkippedFaultError('Ray is not installed: pip install "penstock[cluster]"')
        self._run = run
        self._place = run.place / "ray"
        self._place.mkdir()
        self.head = len(run.hosts) - 1
        self.address = f"{run.hosts[self.head].address}:{PORT}"
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> RayHosts:
        try:
            for rank in sorted(self._run.ranks, key=lambda rank: rank != self.head):
                self._start(rank)
                self._wait_for(rank)
        except BaseException:
            self.__exit__()
            raise
        for rank in self._run.ranks:
            self._run.change(rank, {"PENSTOCK_CLUSTER": "ray", "RAY_ADDRESS": self.address})
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def _start(self, rank: int) -> None:
        host, files = self._run.hosts[rank], self._run.files(rank)
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        words += ["--disable-usage-stats", "--num-cpus=1", f"--object-store-memory={MEMORY}"]
        words += [f"--node-ip-address={host.address}"]
        if rank == self.head:
            words += ["--head", f"--port={PORT}", "--include-dashboard=false"]
            words += [f"--temp-dir={self._place}"]
        else:
            words += [f"--address={self.address}"]
        environment = {
            **self._run.environment(rank),
            "RAY_TMPDIR": str(self._place),
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT),
        }
        # The keeper that Ray places finds the addresses itself.
        for name in ("PENSTOCK_CLUSTER", "PENSTOCK_CLUSTER_ADDRESS"):
            environment.pop(name)
        with (files.place / "ray.log").open("wb") as log:
            self._processes[rank] = host.start(
                *words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def _wait_for(self, rank: int) -> None:
        """Wait until Ray runs on a host. ``ray start`` says so."""
        log, end = self._run.files(rank).place / "ray.log", time.monotonic() + START_LIMIT
        while "Ray runtime started" not in log.read_text(errors="replace"):
            if self._processes[rank].poll() is not None or time.monotonic() > end:
                raise RankFailedError(f"Ray does not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """The processes of Ray on all hosts."""
        return [pid for rank in self._processes for pid in self.processes_of(rank)]

    def processes_of(self, rank: int) -> list[int]:
        """The processes of Ray on a host: all but Penstock's nodes and the rank."""
        found = []
        for pid in self._run.hosts[rank].processes():
            words = _words_of(pid)
            if words and not any(name in words for name in OTHERS):
                found.append(pid)
        return found

    def kill_head(self) -> float:
        """Kill all processes of Ray on the head's host with -9. Returns the time."""
        since, pids = time.monotonic(), self.processes_of(self.head)
        if not any("gcs_server" in _words_of(pid) for pid in pids):
            raise RankFailedError("Ray's head does not run")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return since


def _words_of(pid: int) -> str:
    """The command of a process; empty if it has ended."""
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""
