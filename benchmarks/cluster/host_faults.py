"""Faults of hosts: a node or Ray's head is killed, a link is cut, a host is slow, connections are
reset, a disk is full, a port gets garbage, a host is not admitted. Judges the batches of all ranks,
and how long the other host waits."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cluster.job import RankPlan
from benchmarks.cluster.ray_hosts import RECONNECT, RayHosts
from benchmarks.cluster.run import PORT, HostsRun, RankFailedError
from benchmarks.cluster.work import CutPhotos
from benchmarks.faults.run import SkippedFaultError
from benchmarks.faults.small_disk import SmallDisk
from benchmarks.faults.verdict import BatchRecord, Verdict
from benchmarks.harness.alone import ROOT
from benchmarks.harness.hosts import Host, hosts
from benchmarks.harness.measure import Spread, progress
from benchmarks.harness.report import Result, Table
from penstock.cluster.secrets import make_secrets

HOSTS = 2

SHARE = 0.65
"""Share of the samples that each host may cache."""

DISK = 5.3e6
"""Bytes per second of each host's disk: an SSD of 530 MB/s, 100 times slower."""

LINK, SLOW_LINK = "400mbit", "40mbit"
"""Usual and slow rate of a host's link: 40 Gb/s, 100 times slower, and a tenth of that."""

SLOWER = 10
"""How much slower a slow host's disk and node become."""

TURN = 0.1
"""Seconds of a turn of a slow node. It runs in the first part of a turn, and is stopped in the
rest."""

SLOW_TURNS = 30

GARBAGE_SECONDS = 5.0
"""How long a stranger sends garbage."""

DISK_ROOM = 0.3
"""Share of a host's cache for which its small disk has room."""

TRICKLE = "4mbit"
"""A rate at which a reply takes most of a second: long enough to be hit in the middle."""

STEP = 0.05

EPOCHS = 6

RESETS = 20
"""How often connections are reset, once for each batch, so that replies are hit too."""

SYS_PIDFD_GETFD = 438
"""The number of the system call, the same on all architectures."""

OTHER_RELEASE = """
import penstock.engine.pools.wire as wire

wire.RELEASE = "0.0 on another Python"
"""


@dataclass(frozen=True)
class HostFault:
    """A fault of the second host. ``provoke`` returns the time of the fault.

    ``environment``: variables of the second host's processes, made from a directory for their
    files. ``around``: entered before the ranks start; its value is given to ``provoke``, too.
    ``where``: of the caches.
    """

    name: str
    title: str
    provoke: Callable[..., float]
    epochs: int = EPOCHS
    environment: Callable[[Path], Mapping[str, str]] | None = None
    around: Callable[[HostsRun], AbstractContextManager[Any]] | None = None
    where: str = "memory"


@dataclass(frozen=True)
class HostFaultOutcome:
    """``wait``: longest seconds between two batches of the first host after the fault; ``own``: of
    the second one. ``defects``: reasons why the run failed. ``skipped``: why it did not run."""

    verdict: Verdict = field(default_factory=Verdict)
    wait: float | None = None
    own: float | None = None
    defects: tuple[str, ...] = ()
    skipped: str = ""


def _middle(run: HostsRun) -> float:
    """Wait until both ranks are in the middle of the third epoch: the caches are full."""
    batches = run.plan.work.batches(HOSTS)
    for rank in run.ranks:
        run.wait_for_batches(rank, 2 * batches + batches // 2)
    return time.monotonic()


def _nothing(run: HostsRun) -> float:
    return _middle(run)


def _kill_node(run: HostsRun) -> float:
    _middle(run)
    return run.kill_node(1)


def _kill_replying(run: HostsRun) -> float:
    _middle(run)
    since = time.monotonic()
    node, host = run.node(1), run.hosts[1]
    if node is None:
        raise RankFailedError("the second host has no node")
    host.limit(TRICKLE)
    # More than heartbeats: samples are on their way, and the rest of them waits for the link.
    before = host.sent_bytes()
    run.wait_for(lambda: host.sent_bytes() > before + run.plan.work.size // 2, "a reply")
    os.kill(int(node["pid"]), 9)
    host.limit(LINK)
    return since


def _cut(seconds: float) -> Callable[[HostsRun], float]:
    def provoke(run: HostsRun) -> float:
        since = _middle(run)
        run.hosts[1].cut()
        time.sleep(seconds)
        run.hosts[1].mend()
        return since

    return provoke


def _reset(run: HostsRun) -> float:
    since = _middle(run)
    node, number = run.node(1), 0
    if node is not None:
        for _ in range(RESETS):
            number += reset_connections(int(node["pid"]))
            time.sleep(STEP)
    if not number:
        raise RankFailedError("the second host's node had no connections")
    return since


def _slow(run: HostsRun) -> float:
    since = _middle(run)
    run.hosts[1].limit(SLOW_LINK)
    run.throttle(DISK / SLOWER, 1)
    return since


def _slow_node(run: HostsRun) -> float:
    """Let the second host's node run for a tenth of the time."""
    since, node = _middle(run), run.node(1)
    if node is None:
        raise RankFailedError("the second host has no node")
    pid = int(node["pid"])
    try:
        for _ in range(SLOW_TURNS):
            time.sleep(TURN / SLOWER)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(TURN - TURN / SLOWER)
            os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)
    return since


def _garbage(run: HostsRun) -> float:
    """Send garbage to both nodes from a host without a rank."""
    since = _middle(run)
    assert run.outside is not None
    senders = []
    for host in run.hosts:
        words = [sys.executable, "-m", "benchmarks.cluster.stranger", f"{host.address}:{PORT}"]
        words += [str(run.secrets), str(GARBAGE_SECONDS)]
        pipe = subprocess.PIPE
        senders.append(run.outside.start(*words, stdout=pipe, stderr=pipe, cwd=ROOT))
    for sender in senders:
        sent, errors = sender.communicate()
        if sender.returncode:
            raise RankFailedError(f"garbage was answered:\n{errors}")
        progress(f"  garbage: {json.loads(sent)}")
    return since


@contextmanager
def _small_disk(run: HostsRun) -> Iterator[SmallDisk]:
    room = int(DISK_ROOM * run.plan.work.budget)
    with SmallDisk(run.files(1).cache, room) as disk:
        yield disk


def _full_disk(run: HostsRun, disk: SmallDisk) -> float:
    """The caches fill in the first epoch, and the second host's disk with them."""
    found = os.statvfs(disk.place)

    def is_full() -> bool:
        free = os.statvfs(disk.place).f_bavail * found.f_frsize
        return free < run.plan.work.size

    run.wait_for(is_full, "a full disk")
    return time.monotonic()


def _kill_ray_head(run: HostsRun, ray: RayHosts) -> float:
    _middle(run)
    nodes = [run.node(rank) for rank in run.ranks]
    if any(node is None or node["held_by"] != ["Ray"] for node in nodes):
        raise RankFailedError("Ray has not placed the nodes")
    since = ray.kill_head()

    def held() -> list[str]:
        after = [run.node(rank) for rank in run.ranks]
        if [node and node["pid"] for node in after] != [node and node["pid"] for node in nodes]:
            raise RankFailedError("the nodes have not outlived Ray")
        return [name for node in after if node is not None for name in node["held_by"]]

    # The Ray of the other host gives its head up, and ends: a second disturbance.
    run.wait_for(lambda: not held(), "an end of all keepers of Ray")
    return since


def _refused(run: HostsRun) -> float:
    since = _middle(run)
    node = run.node(0)
    if node is None or len(node["cluster"]["machines"]) != 1:
        raise RankFailedError("the second host was admitted to the cluster")
    return since


def reset_connections(pid: int) -> int:
    """Reset the TCP connections of a process between hosts. Returns their number."""
    libc = ctypes.CDLL(None, use_errno=True)
    process, number = os.pidfd_open(pid), 0
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                copy = libc.syscall(SYS_PIDFD_GETFD, process, int(name), 0)
                if copy < 0:
                    continue
                with socket.socket(fileno=copy) as sock:
                    if sock.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    sock.getpeername()
                    # An address of no family: the kernel resets the connection.
                    number += libc.connect(copy, ctypes.create_string_buffer(28), 28) == 0
    finally:
        os.close(process)
    return number


def _other_secrets(place: Path) -> dict[str, str]:
    make_secrets(place / "others")
    return {"PENSTOCK_CLUSTER_SECRET": str(place / "others")}


def _other_release(place: Path) -> dict[str, str]:
    (place / "sitecustomize.py").write_text(OTHER_RELEASE)
    return {"PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}


HOST_FAULTS = (
    HostFault("none", "nothing", _nothing),
    HostFault("node", "its node is killed with -9", _kill_node),
    HostFault("owner", "its node is killed with -9 while it replies", _kill_replying),
    HostFault("cut-1", "its link is cut for 1 s", _cut(1.0)),
    HostFault("cut-10", "its link is cut for 10 s", _cut(10.0), epochs=4 * EPOCHS),
    HostFault("cut-60", "its link is cut for 60 s", _cut(60.0), epochs=16 * EPOCHS),
    HostFault("reset", f"its connections are reset, {RESETS} times in a second", _reset),
    HostFault("slow", f"its link and its disk become {SLOWER} times slower", _slow),
    HostFault(
        "slow-node", f"its node runs for a tenth of {TURN * SLOW_TURNS:g} s only", _slow_node
    ),
    HostFault(
        "disk-full",
        "its cache is on a disk, which is full",
        _full_disk,
        around=_small_disk,
        where="disk",
    ),
    HostFault(
        "garbage",
        f"both ports get garbage from a third host for {GARBAGE_SECONDS:g} s",
        _garbage,
        epochs=3 * EPOCHS,
    ),
    HostFault(
        "ray-head",
        f"Ray's head on it is killed with -9, and all of Ray ends {RECONNECT} s later",
        _kill_ray_head,
        epochs=8 * EPOCHS,
        around=RayHosts,
    ),
    HostFault(
        "token", "it has another token and certificate", _refused, environment=_other_secrets
    ),
    HostFault("version", "it has another version", _refused, environment=_other_release),
)


def run_faults(options: Namespace) -> dict[str, list[HostFaultOutcome]]:
    """Provoke each fault once a round."""
    chosen = [
        fault
        for fault in HOST_FAULTS
        if not options.only_faults or fault.name in ("none", *options.only_faults)
    ]
    outcomes: dict[str, list[HostFaultOutcome]] = {fault.name: [] for fault in chosen}
    for number in range(options.rounds):
        for fault in chosen:
            progress(f"cluster: faults, round {number + 1} of {options.rounds}: {fault.title}")
            with hosts(HOSTS + 1) as machines:
                outcome = provoke(fault, machines, options)
            outcomes[fault.name].append(outcome)
            progress(f"  {outcome}")
    return outcomes


def provoke(fault: HostFault, machines: Sequence[Host], options: Namespace) -> HostFaultOutcome:
    """Provoke a fault of the second host. The last of ``machines`` has no rank."""
    work = CutPhotos(str(options.data), options.items, options.size, options.batch, SHARE)
    work = replace(work, where=fault.where)
    plan = RankPlan(work, HOSTS, fault.epochs, STEP, cluster=True)
    *members, outside = machines
    with HostsRun(members, plan, outside) as run, ExitStack() as stack:
        if fault.environment is not None:
            run.change(1, fault.environment(run.place))
        for host in members:
            host.limit(LINK)
        run.throttle(DISK)
        try:
            given = [] if fault.around is None else [stack.enter_context(fault.around(run))]
            run.start()
            since = fault.provoke(run, *given)
            run.wait_for_end()
        except RankFailedError as error:
            return HostFaultOutcome(defects=(str(error),))
        except SkippedFaultError as error:
            return HostFaultOutcome(skipped=str(error))
        return HostFaultOutcome(
            run.judge(),
            longest_gap(run.log(0), since),
            longest_gap(run.log(1), since),
        )


def longest_gap(log: Sequence[BatchRecord], since: float) -> float | None:
    """The longest seconds between two batches, the second of them after ``since``."""
    gaps = [end.at - begin.at for begin, end in pairwise(log) if end.at > since]
    return max(gaps, default=None)


def fault_result(outcomes: Mapping[str, Sequence[HostFaultOutcome]], options: Namespace) -> Result:
    """One row per fault. A sample that is lost, repeated or different makes the result invalid."""
    rows: list[tuple[str, ...]] = []
    wrong: list[str] = []
    notes: list[str] = []
    data: dict[str, Any] = {}
    for fault in HOST_FAULTS:
        seen = outcomes.get(fault.name, ())
        notes += [
            f"cluster: {fault.name} was not run: {one.skipped}" for one in seen if one.skipped
        ]
        seen = [one for one in seen if not one.skipped]
        if not seen:
            continue
        data[fault.name] = [asdict(outcome) for outcome in seen]
        total = sum((outcome.verdict for outcome in seen), Verdict())
        if not total.good:
            wrong.append(
                f"cluster: {fault.name}: {total.lost} samples lost, {total.repeated} repeated, "
                f"{total.different} batches differ from those of the loader alone"
            )
        wrong += [f"cluster: {fault.name}: {defect}" for one in seen for defect in one.defects]
        rows.append(
            (
                fault.title,
                f"{total.samples:,}",
                str(total.lost),
                str(total.repeated),
                str(total.different),
                _ms([outcome.wait for outcome in seen]),
                _ms([outcome.own for outcome in seen]),
            )
        )
    title = (
        f"cluster: what happens to the second of two hosts; {options.items} samples, caches of "
        f"{100 * SHARE:.0f} %, {1e3 * STEP:g} ms a batch; rounds: {options.rounds}"
    )
    heads = (
        "the second host",
        "samples received",
        "lost",
        "repeated",
        "batches that differ",
        "longest time between batches, first host, ms",
        "second host, ms",
    )
    tables = (Table(title, heads, tuple(rows)),)
    return Result(tables, tuple(notes), tuple(wrong), {"cluster, faults": data})


def _ms(seconds: Sequence[float | None]) -> str:
    known = [1e3 * value for value in seconds if value is not None]
    if not known:
        return ""
    spread = Spread.of(known)
    middle = f"{spread.median:,.0f}"
    return middle if len(known) == 1 else f"{middle}\nat most {spread.high:,.0f}"
