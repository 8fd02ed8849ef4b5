"""A job with one worker that other hosts help: samples per second while hosts join and leave.

Hosts are network namespaces on one machine, and a sample takes a stated time of sleep: so the
number of workers can exceed that of cores, and what is measured is handing out, the network, and
the decisions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import penstock as ps
from benchmarks.harness.arguments import count, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.hosts import Host, NoHostsError, hosts
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from penstock.cluster.find import PORT
from penstock.cluster.secrets import make_secrets
from penstock.node.client import request_end, request_status, wait_for_exit
from penstock.node.directory import NodeDirectory

PHASES = (0, 1, 2, 3, 2, 1)
"""Hosts that help, one phase after the other: with 4 workers each this is figure 12 of FusionFlow
(4, 8, 12, 8, 4), after a phase without help."""

SIZE = 224 * 224 * 3
"""Bytes of a sample."""

PATIENCE = 120.0
"""Seconds that nodes may take to help, or to end."""


class Sleeps:
    """A map that takes ``seconds``, without using a core, and returns ``SIZE`` bytes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, number: Any) -> Any:
        time.sleep(self.seconds)
        return np.full((224, 224, 3), int(number) % 251, np.uint8), int(number)


def train(cost: float, batch: int, log: str) -> None:
    """Take batches for ever, and write the time of each. Runs in a process of its own."""
    pipeline = ps.from_dataset(np.arange(100_000)).map(Sleeps(cost), random=False).batch(batch)
    with (
        pipeline.loader(seed=0, cluster="auto") as loader,
        open(log, "w", buffering=1) as file,
    ):
        while True:
            for pixels, numbers in loader:
                if not (pixels[:, 0, 0, 0] == numbers % 251).all():
                    raise SystemExit("rows of another sample")
                file.write(f"{time.time()} {len(numbers)}\n")


class Nodes:
    """The node of the job, on the first host, and those that help, on the others."""

    def __init__(self, machines: Sequence[Host], place: Path, cores: int) -> None:
        self.machines = machines
        self.place = place
        self.cores = cores
        make_secrets(place / "secret")

    def _start(self, host: Host, name: str, *words: str) -> subprocess.Popen[str]:
        """Start a program on a host, whose node has the directory ``name``."""
        settings = {
            "PENSTOCK_RUNTIME_DIR": str(self.place / name),
            "PENSTOCK_CLUSTER": f"{self.machines[0].address}:{PORT}",
            "PENSTOCK_CLUSTER_ADDRESS": f"{host.address}:{PORT}",
            "PENSTOCK_CLUSTER_SECRET": str(self.place / "secret"),
            "PENSTOCK_NODE_WORKERS": "1",
            "PENSTOCK_NODE_IDLE": "5",
        }
        environment = {**os.environ, **settings}
        return host.start(sys.executable, *words, env=environment, stdout=subprocess.DEVNULL)

    @contextmanager
    def job(self, cost: float, batch: int) -> Iterator[Path]:
        """Train until the end of the block. Yields the file with the time of each batch."""
        log = self.place / "log"
        code = f"from benchmarks.remote import train; train({cost}, {batch}, {str(log)!r})"
        with self._start(self.machines[0], "job", "-c", code) as process:
            try:
                yield log
            finally:
                process.kill()

    def join(self, name: str, number: int) -> None:
        """Let host ``number`` of those that help lend its cores."""
        words = ["cluster", "join", f"{self.machines[0].address}:{PORT}"]
        words += ["--cores", str(self.cores)]
        with self._start(self.machines[1 + number], name, "-m", "penstock", *words) as joining:
            if joining.wait():
                raise ChildProcessError("penstock cluster join has failed")

    def end(self, name: str) -> None:
        directory = NodeDirectory(self.place / name)
        status = request_status(directory)
        if status is not None:
            request_end(directory)
            wait_for_exit(status["pid"])

    def helping(self) -> dict[str, Any]:
        """What other nodes have prepared for the job."""
        status = request_status(NodeDirectory(self.place / "job"))
        groups = [] if status is None else status["groups"]
        remote = groups[0]["remote"] if groups else None
        return {} if remote is None else dict(remote["machines"])

    def ready(self) -> int:
        return sum(found["state"] == "ready" for found in self.helping().values())


class Phase(NamedTuple):
    """``began`` and ``ended``: of the measurement, once ``helpers`` nodes help; ``waited``: for
    that."""

    helpers: int
    waited: float
    began: float
    ended: float


def run_phases(nodes: Nodes, log: Path, seconds: float) -> list[Phase]:
    phases: list[Phase] = []
    joined: list[str] = []
    _wait(lambda: log.exists() and log.stat().st_size > 0, True)
    for helpers in PHASES:
        progress(f"remote: {helpers} hosts help")
        asked = time.time()
        while len(joined) < helpers:
            joined.append(f"helper-{len(phases)}-{len(joined)}")
            nodes.join(joined[-1], len(joined) - 1)
        while len(joined) > helpers:
            nodes.end(joined.pop())
        _wait(nodes.ready, helpers)
        # What was prepared before has to leave the queues.
        time.sleep(min(2.0, seconds))
        began = time.time()
        time.sleep(seconds)
        phases.append(Phase(helpers, began - asked, began, time.time()))
    return phases


def _wait(found: Callable[[], int], wanted: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while found() != wanted:
        if time.monotonic() > deadline:
            raise TimeoutError("the hosts do not help; the logs of their nodes say why")
        time.sleep(0.1)


def run(options: Namespace) -> Result:
    place = Path(tempfile.mkdtemp(prefix="penstock-remote-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        try:
            machines = stack.enter_context(hosts(1 + max(PHASES)))
        except NoHostsError as error:
            raise SystemExit(f"remote needs several hosts on this machine: {error}") from None
        for host in machines:
            host.limit(f"{1e9 * options.link:.0f}bit")
        nodes = Nodes(machines, place, options.cores)
        names = [f"helper-{phase}-{number}" for phase in range(len(PHASES)) for number in range(3)]
        for name in ["job", *names]:
            stack.callback(nodes.end, name)
        with nodes.job(options.cost, options.batch) as log:
            phases = run_phases(nodes, log, options.seconds)
            prepared = nodes.helping()
        taken = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    rows, data = [], []
    for phase in phases:
        samples = sum(n for when, n in taken if phase.began <= when < phase.ended)
        rate = samples / (phase.ended - phase.began)
        most = (1 + phase.helpers * options.cores) / options.cost
        data.append({**phase._asdict(), "rate": rate, "most": most})
        rows.append(
            (
                f"{phase.helpers} x {options.cores} + 1",
                f"{rate:,.0f}",
                f"{most:,.0f}",
                f"{rate / most:.0%}",
                f"{phase.waited:.1f}",
            )
        )
    start = taken[0][0]
    per_second = Counter(int(when - start) for when, _ in taken)
    series = [per_second[second] for second in range(max(per_second) + 1)]
    heads = ("workers", "samples/s", "sum of the workers", "share", "s until it is reached")
    title = f"remote: a job with 1 worker, {options.cost * 1000:g} ms and {SIZE:,} bytes a sample, "
    title += f"batches of {options.batch}, links of {options.link:g} Gb/s"
    lent = ", ".join(
        f"{found['tiny_batches']:,} tiny-batches ({found['again']} again)"
        for found in prepared.values()
    )
    notes = (
        f"remote: batches in each second: {' '.join(map(str, series))}",
        f"remote: prepared by hosts that help: {lent}",
    )
    found = {"phases": data, "batches_per_second": series, "helpers": prepared}
    return Result((Table(title, heads, tuple(rows)),), notes, (), {"remote": found})


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--cores", type=count, default=4, help="workers of each host (4)")
    parser.add_argument(
        "--cost", type=positive, default=0.02, metavar="SECONDS", help="of a sample (0.02)"
    )
    parser.add_argument("--link", type=positive, default=2.5, help="Gb/s of a host's link (2.5)")


BENCHMARK = Benchmark(
    "remote",
    "a job with one worker that other hosts help, while they join and leave",
    run,
    _arguments,
    seconds=8.0,
)
