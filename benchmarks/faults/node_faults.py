"""Faults of jobs that share a node: jobs that leave with work in hand, bad samples, a full disk,
few descriptors, and nonsense on the node's socket."""

from __future__ import annotations

import signal
import socket
from argparse import Namespace
from dataclasses import replace
from typing import Literal

import msgpack

from benchmarks.faults.fault import Event, Fault
from benchmarks.faults.job_faults import bad_sample_defects
from benchmarks.faults.process_table import Footprint
from benchmarks.faults.run import FaultRun, NodeSettings
from benchmarks.faults.small_disk import SmallDisk
from benchmarks.faults.work import NumberedSamples
from benchmarks.harness.processes import end_node

SLOW = NumberedSamples(400, 4, "processes", cost=0.05)
"""Samples so slow that workers are at them whenever a job leaves."""

TRIALS = 12
"""Jobs that leave: more than a node has workers."""

RESTARTS = 5
"""Times that a job is interrupted before it runs to its end."""

BAD_TIMEOUT = 6.0
"""Seconds after which a sample is taken to hang."""

SKIP = {"on_error": "skip", "timeout": BAD_TIMEOUT, "shuffle": False}

LARGE = NumberedSamples(512, 64, edge=147)
"""Batches of 4 MB."""

SHORT_GROUPS = 16
STAGING = 8 * LARGE.bytes
MOST_MEMORY = 2 * STAGING
"""Bytes of memfds that a node may have: the budget, and once more what a group leaves behind while
the next one begins."""

BESIDE = NumberedSamples(16_000, 4)
"""A training that goes on beside a fault for minutes, and then leaves."""

MORE = 20
"""Batches that a training must still receive after a fault."""

LOW_LIMIT = 128
"""Descriptors of a node that is started under a low limit."""


def _leave_with_work(run: FaultRun, options: Namespace) -> Event:
    trials = [f"trial-{number}" for number in range(TRIALS)]
    run.start("training", work=SLOW, group="training", epochs=1, step=0.1)
    for name in trials:
        run.start(name, work=SLOW, group=name, epochs=1, leave_at=2)
    run.go("training")
    run.wait_for_batches("training", 1)
    for name in trials:
        run.go(name)
        run.wait_for_end(name)
    return Event()


def _interrupt(run: FaultRun, options: Namespace) -> Event:
    for number in range(RESTARTS):
        name = f"run-{number}"
        run.start_and_go(name, work=SLOW, group="training", epochs=1)
        run.wait_for_batches(name, 2)
        run.send(name, signal.SIGINT)
        run.wait_for_end(name)
    run.start_and_go("last", work=SLOW, group="training", epochs=1)
    return Event()


def _crash(run: FaultRun, options: Namespace) -> Event:
    return _bad_sample(run, "crash")


def _hang(run: FaultRun, options: Namespace) -> Event:
    return _bad_sample(run, "hang")


def _bad_sample(run: FaultRun, trouble: Literal["crash", "hang"]) -> Event:
    node = _start_beside(run)
    defects = bad_sample_defects(run, trouble, SKIP, shared=True)
    return Event(defects=(*defects, *_end_beside(run, node)))


def _start_beside(run: FaultRun) -> int:
    """Start a training beside a fault. Returns the process of the node."""
    run.start_and_go("beside", work=BESIDE, group="beside", epochs=2, step=0.05)
    run.wait_for_batches("beside", 1)
    return int(run.node()["pid"])


def _end_beside(run: FaultRun, node: int) -> tuple[str, ...]:
    """Let the training beside a fault go on for a while, and leave. Returns defects of the node."""
    run.wait_for_more("beside", MORE)
    defects = _other_node(run, node)
    run.leave("beside")
    return defects


def _other_node(run: FaultRun, before: int) -> tuple[str, ...]:
    after = int(run.node()["pid"])
    return () if after == before else (f"the node (process {before}) died; {after} replaced it",)


def _fill_disk(run: FaultRun, options: Namespace) -> Event:
    with SmallDisk(run.runtime, 1 << 18) as disk:
        run.start("second", group="second")
        run.start_and_go("first", group="first", step=0.03)
        run.wait_for_batches("first", 3)
        disk.fill(run.runtime / "node.log")
        run.go("second")
        run.end()
        end_node(run.runtime)
    return Event()


def _short_groups(run: FaultRun, options: Namespace) -> Event:
    node, most = _start_beside(run), 0
    for number in range(SHORT_GROUPS):
        name = f"short-{number}"
        run.start_and_go(name, work=LARGE, group=name, epochs=1, leave_at=4)
        run.wait_for_end(name)
        footprint = Footprint.of(node)
        most = max(most, footprint.memfd if footprint is not None else 0)
    defects = _end_beside(run, node)
    if most > MOST_MEMORY:
        defects += (
            f"the node had {most >> 20} MB of shared memory after groups had gone, with a budget "
            f"of {STAGING >> 20} MB; the bound is {MOST_MEMORY >> 20} MB",
        )
    return Event(defects=defects)


def _low_limit(run: FaultRun, options: Namespace) -> Event:
    run.start_and_go("first", descriptors=LOW_LIMIT)
    run.wait_for_batches("first", 1)
    run.start_and_go("second", "third")
    run.start_and_go("other", group="other", work=replace(run.plan.work, kind="processes"))
    return Event()


def _bad_name(run: FaultRun, options: Namespace) -> Event:
    place = run.place / "data"
    place.mkdir()
    work = NumberedSamples(64, 4, stages="files", bad=21, place=str(place))
    work.write_files()
    skip = {"on_error": "skip"}
    run.start_and_go("shared", work=work, group="names", options=skip)
    run.start_and_go("alone", work=work, group=None, options=skip)
    return Event()


def _kill_starting_node(run: FaultRun, options: Namespace) -> Event:
    run.start("a", "b")
    run.go("a")
    run.kill_starting_node()
    run.go("b")
    return Event()


def _send_nonsense(run: FaultRun, options: Namespace) -> Event:
    from penstock.node.directory import NodeDirectory

    node = _start_beside(run)
    directory = NodeDirectory(run.runtime)
    for packet in malformed_packets():
        peer = directory.connect()
        if peer is None:
            return Event(defects=_other_node(run, node))
        with peer:
            peer.settimeout(5.0)
            try:
                peer.send(packet)
                peer.recv(1 << 16)
            except OSError:
                continue
    mute = directory.connect()
    if mute is None:
        return Event(defects=_other_node(run, node))
    with mute:
        _request_and_never_read(mute)
        return Event(defects=_end_beside(run, node))


def malformed_packets() -> list[bytes]:
    """Packets that no member sends. The first byte says that the message follows (0), or is in a
    descriptor that comes along (1)."""
    messages: list[object] = [
        [],
        5,
        None,
        "look",
        {"a": 1},
        ["no such word"],
        ["look", "too", "many"],
        ["join", 2],
        ["want", 0, 0, b"", None, None],
        ["want", 0, 0, b"odd length", None, None],
        ["several", 5],
        ["several", [[], 5]],
        ["code", [], "/"],
        ["begin", "x", {}, None, None],
        ["took", None, None, None],
        ["released", 1, 2, "never given"],
        ["rewind"],
        ["end", "of"],
    ]
    deep = b"\0" + b"\x91" * 2000 + b"\x01"
    packed = [b"\0" + bytes(msgpack.packb(message)) for message in messages]
    return [b"\1", b"\0", b"\7abc", b"\0\xc1\xff\xff", deep, *packed]


def _request_and_never_read(peer: socket.socket) -> None:
    """Send requests until the node's answers and our requests fill the socket."""
    from penstock.engine.pools.wire import Wire
    from penstock.node.protocol import VOCABULARY, GetStatus

    wire = Wire(peer, VOCABULARY)
    try:
        for _ in range(5000):
            wire.post(GetStatus())
    except OSError:  # full, or the node has closed it
        return


NODE_FAULTS = (
    Fault(
        "leavers",
        f"{TRIALS} jobs leave with workers at their samples",
        "workers drop these samples; a long training in another group goes on",
        _leave_with_work,
    ),
    Fault(
        "interrupt",
        f"a job is interrupted (Ctrl-C) and started again, {RESTARTS} times",
        "each run begins at once, with the same node",
        _interrupt,
        node=NodeSettings(idle=30.0),
    ),
    Fault(
        "crash-shared",
        "a sample crashes its worker, first and in the middle; share=",
        "exactly this sample is skipped and listed; the node and other jobs go on",
        _crash,
    ),
    Fault(
        "hang-shared",
        "a sample hangs, first and in the middle; share=",
        "exactly this sample is skipped and listed; the node and other jobs go on",
        _hang,
    ),
    Fault(
        "disk-full",
        "the disk of the runtime directory is full",
        "jobs join and go on; lines of the log are lost",
        _fill_disk,
    ),
    Fault(
        "short-groups",
        f"{SHORT_GROUPS} groups come and go; memory of the node",
        f"at most {MOST_MEMORY >> 20} MB of shared memory, with a budget of {STAGING >> 20} MB",
        _short_groups,
        node=NodeSettings(staging=STAGING),
    ),
    Fault(
        "node-limit",
        f"the node is started with a limit of {LOW_LIMIT} descriptors",
        "jobs join and go on",
        _low_limit,
    ),
    Fault(
        "bad-name",
        "an unreadable file whose name is not UTF-8, with and without share=",
        "exactly this sample is skipped and listed",
        _bad_name,
    ),
    Fault(
        "node-start",
        "the node is killed with -9 while it starts",
        "the job starts another one",
        _kill_starting_node,
    ),
    Fault(
        "nonsense",
        "malformed packets to the node, and a peer that never reads",
        "the node closes these connections; jobs go on",
        _send_nonsense,
    ),
)
