"""Trainers on several hosts, fed by Penstock, by Ray Data and by the tf.data service.

Hosts are network namespaces on this machine, and share its cores: what counts is the rate of all
trainers together, each loader at its own best, without a step between two batches.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fed.work import KINDS, FedOutcome, FedWork, judge, read_log
from benchmarks.harness.alone import ROOT
from benchmarks.harness.arguments import count, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.environments import Interpreter, interpreter
from benchmarks.harness.hosts import Host, NoHostsError, hosts
from benchmarks.harness.measure import Spread, progress, turns
from benchmarks.harness.processes import end_node, wait_until
from benchmarks.harness.report import Result, Table
from penstock.cluster.secrets import make_secrets

TARGET = 1.5
"""Times the rate of the faster peer."""

PATIENCE = 60.0
"""Seconds without a batch after which a run has failed."""

NODE_PORT = 7411
RAY_PORT = 6379

TITLES = {"decoded": "photographs, decoded and cropped", "cached": "bytes of files, from memory"}


class FedRunError(Exception):
    """A process of a run has failed, or no batch came any more."""


class FedRun:
    """The processes of one run on these hosts, in a directory of their own."""

    def __init__(self, machines: Sequence[Host], work: FedWork, python: str) -> None:
        self.hosts = machines
        self.work = work
        self.python = python
        self.place = Path(tempfile.mkdtemp(prefix="fed-"))
        self._processes: list[tuple[subprocess.Popen[str], Path]] = []
        for rank in range(len(machines)):
            self.of(rank).mkdir()

    def of(self, rank: int) -> Path:
        """The directory of a host."""
        return self.place / f"host-{rank}"

    @property
    def addresses(self) -> str:
        return ",".join(host.address for host in self.hosts)

    def start(self, rank: int, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start a program on a host."""
        output = self.of(rank) / f"output-{len(self._processes)}"
        variables = {**os.environ, **environment}
        if self.python != sys.executable:
            variables.pop("PYTHONPATH", None)
            variables.pop("VIRTUAL_ENV", None)
        with output.open("wb") as out:
            process = self.hosts[rank].start(
                *words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=ROOT,
                env=variables,
            )
        self._processes.append((process, output))
        return process

    def check(self) -> None:
        """Raise FedRunError if a process has failed."""
        for process, output in self._processes:
            if process.poll():
                text = output.read_text(errors="replace")[-3000:]
                raise FedRunError(f"a process ended with {process.returncode}:\n{text}")

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        """Wait as long as batches come."""
        while True:
            before = self._log_bytes()
            try:
                wait_until(reached, self.check, PATIENCE, what)
                return
            except TimeoutError as error:
                if self._log_bytes() == before:
                    raise FedRunError(str(error)) from None

    def _log_bytes(self) -> int:
        logs = [self.of(rank) / "log" for rank in range(len(self.hosts))]
        return sum(log.stat().st_size for log in logs if log.exists())

    def end(self) -> None:
        """End all processes, also those that a program has started and left behind."""
        for process, _ in self._processes:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True)
                for child in children:
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for left in psutil.process_iter(["cmdline"]):
            if any(str(self.place) in word for word in left.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    left.kill()
        shutil.rmtree(self.place, ignore_errors=True)


Trainers = list["subprocess.Popen[str]"]


@contextmanager
def penstock_trainers(run: FedRun) -> Iterator[Trainers]:
    make_secrets(run.place / "secrets")
    trainers = []
    try:
        for rank, host in enumerate(run.hosts):
            trainers.append(
                run.start(
                    rank,
                    run.python,
                    "-m",
                    "benchmarks.fed.penstock_job",
                    run.work.as_json(),
                    str(rank),
                    str(run.of(rank)),
                    PENSTOCK_RUNTIME_DIR=str(run.of(rank) / "node"),
                    PENSTOCK_CLUSTER=f"{run.hosts[0].address}:{NODE_PORT}",
                    PENSTOCK_CLUSTER_ADDRESS=f"{host.address}:{NODE_PORT}",
                    PENSTOCK_CLUSTER_SECRET=str(run.place / "secrets"),
                    PENSTOCK_NODE_WORKERS=str(run.work.workers),
                    PENSTOCK_NODE_IDLE="2",
                )
            )
        yield trainers
    finally:
        for rank in range(len(run.hosts)):
            end_node(run.of(rank) / "node")


@contextmanager
def ray_trainers(run: FedRun) -> Iterator[Trainers]:
    ray = str(Path(run.python).with_name("ray"))
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT)}
    # In bytes; the least that Ray accepts is 75 MB.
    store = max(512 << 20, 4 * run.work.samples * run.work.size)
    shared = [
        f"--num-cpus={run.work.workers}",
        f"--object-store-memory={store}",
        "--block",
        "--disable-usage-stats",
    ]
    for rank, host in enumerate(run.hosts):
        words = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        words += [f"--temp-dir={run.place / 'ray'}"]
        if rank:
            words = [f"--address={run.hosts[0].address}:{RAY_PORT}"]
        own = f"--node-ip-address={host.address}"
        run.start(rank, ray, "start", *words, own, *shared, **quiet)
        # The second host needs the first; the time is not measured.
        time.sleep(8.0)
        run.check()
    job = [run.python, "-m", "benchmarks.fed.ray_job", run.work.as_json()]
    yield [run.start(0, *job, str(run.place), run.addresses, **quiet)]


@contextmanager
def tf_trainers(run: FedRun) -> Iterator[Trainers]:
    yield [
        run.start(
            rank,
            run.python,
            "-m",
            "benchmarks.fed.tf_job",
            run.work.as_json(),
            str(rank),
            str(run.of(rank)),
            run.addresses,
        )
        for rank in range(len(run.hosts))
    ]


@dataclass(frozen=True)
class Feeder:
    """A contestant: its trainers, its environment, and the kinds of work that it can do."""

    title: str
    trainers: Callable[[FedRun], Any]
    env: str
    needs: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS

    def interpreter(self) -> Interpreter:
        return interpreter(self.env, self.needs)


PENSTOCK = Feeder('Penstock, `cluster="auto"`', penstock_trainers, "", ("penstock",))
PEERS = {
    "ray": Feeder("Ray Data, `streaming_split`", ray_trainers, "ray", ("ray.data", "simplejpeg")),
    # Python functions cannot be sent to its workers, so that it cannot cut files to a size.
    "tfservice": Feeder(
        "tf.data service", tf_trainers, "tfdata", ("tensorflow",), kinds=("decoded",)
    ),
}


def measure(feeder: Feeder, machines: Sequence[Host], work: FedWork) -> FedOutcome:
    """Run the trainers of a contestant to the end of their last epoch."""
    run = FedRun(machines, work, feeder.interpreter().python)
    try:
        started = time.monotonic()
        with feeder.trainers(run) as trainers:
            run.wait(
                lambda: all(process.poll() == 0 for process in trainers),
                f"{feeder.title}: trainers had not ended",
            )
        logs = [read_log(run.of(rank) / "log") for rank in range(len(machines))]
        return judge(work, started, logs)
    finally:
        run.end()


def run(options: Namespace) -> Result:
    chosen = [PENSTOCK, *(PEERS[name] for name in options.peers or ())]
    ready, wrong = [], []
    for feeder in chosen:
        missing = feeder.interpreter().why_not
        if missing:
            wrong.append(f"fed: {feeder.title} is left out: {missing}")
        else:
            ready.append(feeder)
    entries = [(kind, feeder) for kind in options.kinds for feeder in ready if kind in feeder.kinds]
    outcomes: dict[tuple[str, str], list[FedOutcome]] = {}
    try:
        for number, order in turns(len(entries), options.rounds):
            for kind, feeder in (entries[place] for place in order):
                progress(f"fed: round {number + 1} of {options.rounds}: {kind}, {feeder.title}")
                work = FedWork(
                    str(options.data),
                    kind,
                    options.items if kind == "decoded" else options.items // 2,
                    options.size,
                    options.batch,
                    options.epochs if kind == "decoded" else 8 * options.epochs,
                    options.workers,
                    options.hosts,
                    options.cache,
                )
                try:
                    with hosts(options.hosts) as machines:
                        for host in machines:
                            host.limit(f"{1e9 * options.link:.0f}bit")
                        outcome = measure(feeder, machines, work)
                except FedRunError as error:
                    wrong.append(f"fed: {kind}, {feeder.title}: {error}")
                    progress(f"  {error}")
                    continue
                progress(f"  {outcome}")
                outcomes.setdefault((kind, feeder.title), []).append(outcome)
    except NoHostsError as error:
        raise SystemExit(f"fed needs several hosts on this machine: {error}") from None
    return make_result(options, outcomes, wrong)


def make_result(
    options: Namespace, outcomes: dict[tuple[str, str], list[FedOutcome]], wrong: list[str]
) -> Result:
    """A table for each kind of work, with the ratio to the fastest peer of each round."""
    tables = []
    for kind in options.kinds:
        own = outcomes.get((kind, PENSTOCK.title), [])
        peers = [runs for (one, title), runs in outcomes.items() if one == kind and runs is not own]
        rows = []
        for (one, title), runs in outcomes.items():
            if one != kind:
                continue
            ratio = ""
            if runs is own and peers:
                best = [max(run.rate for run in turn) for turn in zip(*peers, strict=False)]
                spread = Spread.of(
                    [run.rate / peer for run, peer in zip(own, best, strict=False) if peer]
                )
                ratio = f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
                if spread.median < TARGET:
                    ratio += f"\ngoal: {TARGET}"
            lost, repeated = (sum(getattr(run, name) for run in runs) for name in _COUNTS)
            if runs is own and (lost or repeated):
                wrong.append(f"fed: {kind}, {title}: {lost} samples lost, {repeated} repeated")
            rates = Spread.of([run.rate for run in runs])
            rows.append((title, f"{rates.median:,.0f}", ratio, str(lost), str(repeated)))
        heads = (TITLES[kind], "samples/s", "against the faster peer", "lost", "repeated")
        tables.append(Table(f"fed: {options.hosts} hosts, {options.link:g} Gb/s", heads, (*rows,)))
    data = {
        f"{kind}, {title}": [asdict(run) for run in runs]
        for (kind, title), runs in outcomes.items()
    }
    return Result((*tables,), (), (*wrong,), {"fed": data})


_COUNTS = ("lost", "repeated")


def _arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(batch=32)
    parser.add_argument("--hosts", type=count, default=2, help="number of hosts (2)")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of work (all)"
    )
    parser.add_argument("--items", type=count, default=4000, help="samples of an epoch (4000)")
    parser.add_argument("--size", type=count, default=96 << 10, help="bytes of a sample (98304)")
    parser.add_argument(
        "--epochs", type=count, default=3, help="epochs; 8 times as many from memory (3)"
    )
    parser.add_argument(
        "--cache", default="4GB", metavar="SIZE", help="budget of Penstock's cache on a host (4GB)"
    )
    parser.add_argument("--link", type=positive, default=2.5, help="Gb/s of a host's link (2.5)")


BENCHMARK = Benchmark(
    "fed",
    "trainers on several hosts: Penstock, Ray Data and the tf.data service",
    run,
    _arguments,
    needs_data=True,
    peers=(*PEERS,),
)
