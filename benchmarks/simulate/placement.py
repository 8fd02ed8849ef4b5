"""How a partitioned cache scales: owners of samples, membership, and requests for a batch."""

from __future__ import annotations

import time
from argparse import Namespace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from benchmarks.simulate.machines import Machines, machine_bytes
from penstock.cluster.holdings import Holdings
from penstock.cluster.membership import Heartbeat, Machine
from penstock.cluster.partition import TOTAL_BYTES, Ask, Partition
from penstock.cluster.placement import NOBODY, FirstOwners, Placement
from penstock.order import Cursor, Deal, Shuffled
from penstock.store.admission import Admission

SCORES = 50_000_000
"""Scores to compute at most where every sample needs one for each machine: two seconds."""

AT_ONCE = (1, 4, 16, 64)
"""Batches that are asked for at once."""

TAIL = 1.5
"""Deviation of the logarithm of heavy-tailed sizes: a sample in a hundred is 33 times the median
and more."""

SEEDS = 5


def run(options: Namespace) -> Result:
    data: dict[str, list[dict[str, Any]]] = {"owners": [], "membership": [], "requests": []}
    for size in options.machines:
        progress(f"simulate: {size:,} machines")
        data["owners"].append(measure_owners(size, options.indices, options.sample_bytes))
        data["membership"].append(measure_membership(size))
        data["requests"] += measure_requests(size, options)
    return Result(
        (
            owners_table(data["owners"], options),
            membership_table(data["membership"]),
            requests_table(data["requests"], options),
        ),
        notes=notes(data, options),
        data=dict(data),
    )


def cluster(size: int) -> list[Machine]:
    names = [f"node-{number:04}.cluster.local" for number in range(size)]
    return [Machine(name, f"{name}:7000", 1, 64, 64 << 30) for name in names]


def heavy_tailed(count: int, mean: int) -> NDArray[np.float64]:
    sizes: NDArray[np.float64] = np.random.default_rng(0).lognormal(0.0, TAIL, count)
    sizes *= mean / sizes.mean()
    return sizes


# Owners.


def measure_owners(size: int, indices: int, sample_bytes: int) -> dict[str, Any]:
    """Balance of first owners and of scores, and what moves if a machine leaves or joins."""
    machines = cluster(size)
    names = [machine.name for machine in machines]
    deal = Deal(Shuffled(), indices, 0, 256, world=size, tail="drop")
    started = time.process_time()
    first = FirstOwners.first_epoch("f", deal, names)
    building = time.process_time() - started
    everything = np.arange(indices)
    sizes = heavy_tailed(indices, sample_bytes)
    placement = Placement(first, machines)
    owners = placement.owners(everything)
    without = Placement(first, machines[1:])
    left = owners != without.owners(everything) + 1
    helper = Machine("zz-helper", "zz-helper:7000", 1, 64, 1 << 40)
    joined = owners != Placement(first, [*machines, helper]).owners(everything)
    some = np.arange(min(indices, max(1, SCORES // size)))
    unknown = FirstOwners("f", (), np.full(len(some), NOBODY, dtype=np.uint16))
    scored = Placement(unknown, machines).owners(some)
    one_more = Machine("zz-new", "zz-new:7000", 1, 64, 64 << 30)
    scored_after = Placement(unknown, [*machines, one_more]).owners(some)
    batch = np.random.default_rng(1).integers(0, indices, 256)
    return {
        "machines": size,
        "samples, most to mean": _imbalance(owners, np.ones(indices), size),
        "heavy-tailed bytes, most to mean": _imbalance(owners, sizes, size),
        "by score: samples, most to mean": _imbalance(scored, np.ones(len(some)), size),
        "samples for that": len(some),
        "moved by a leave": float(left.mean()),
        "moved by a join": float(joined.mean()),
        "by score: moved by a join": float((scored != scored_after).mean()),
        "table bytes": first.owner_of.nbytes,
        "view bytes": sum(map(machine_bytes, machines)),
        "seconds to compute the table": building,
        "us for the owners of 256": 1e6 * _cpu(lambda: placement.owners(batch)),
        "us for them after a leave": 1e6 * _cpu(lambda: without.owners(batch)),
    }


def _imbalance(owners: NDArray[np.intp], weights: NDArray[np.float64], size: int) -> float:
    """What the machine with the most owns, relative to the mean."""
    owned = np.bincount(owners, weights, minlength=size)
    return float(owned.max() / owned.mean())


def _cpu(act: Any, repeats: int = 50) -> float:
    act()
    started = time.process_time()
    for _ in range(repeats):
        act()
    return (time.process_time() - started) / repeats


def owners_table(rows: list[dict[str, Any]], options: Namespace) -> Table:
    return Table(
        f"owners of {options.indices:,} samples",
        (
            "machines",
            "samples, most / mean",
            "heavy-tailed bytes, most / mean",
            "by score: most / mean",
            "moved by a leave",
            "1 / n",
            "moved by a join",
            "by score: moved by a join",
            "table MB",
            "view KB",
            "s to compute the table",
            "us for 256 owners",
            "us after a leave",
        ),
        tuple(
            (
                f"{row['machines']:,}",
                f"{row['samples, most to mean']:.3f}",
                f"{row['heavy-tailed bytes, most to mean']:.3f}",
                f"{row['by score: samples, most to mean']:.3f}",
                f"{row['moved by a leave']:.4%}",
                f"{1 / row['machines']:.4%}",
                f"{row['moved by a join']:.4%}",
                f"{row['by score: moved by a join']:.4%}",
                f"{row['table bytes'] / 1e6:.1f}",
                f"{row['view bytes'] / 1e3:.1f}",
                f"{row['seconds to compute the table']:.2f}",
                f"{row['us for the owners of 256']:.0f}",
                f"{row['us for them after a leave']:.0f}",
            )
            for row in rows
        ),
    )


# Membership.


def measure_membership(size: int) -> dict[str, Any]:
    """Messages and bytes, and the seconds until all machines know of a change."""
    machines = Machines(size, SEEDS)
    row: dict[str, Any] = {"machines": size, "start": machines.run(60.0, machines.agree)}
    machines.run(5.0)
    (head,) = machines.heads()
    before = machines.traffic.messages, machines.traffic.nbytes, machines.traffic.at[head]
    machines.run(10.0)
    row["messages/s"] = (machines.traffic.messages - before[0]) / 10.0
    row["bytes/s"] = (machines.traffic.nbytes - before[1]) / 10.0
    row["messages/s at the head"] = (machines.traffic.at[head] - before[2]) / 10.0
    quiet = row["bytes/s"]
    row["us of the head per heartbeat"] = 1e6 * _heartbeat_cpu(machines, head)
    # Each change is followed by a quiet time.
    last = f"m{size - 1}"
    sent = machines.traffic.nbytes
    machines.start("new")
    row["join"] = machines.run(60.0, machines.agree)
    row["bytes of a join"] = machines.traffic.nbytes - sent - quiet * row["join"]
    machines.run(5.0)
    machines.kill("new")
    for name in {"m1", last}:
        machines.reset(name, "new")
    row["killed, reported"] = machines.run(60.0, machines.agree)
    machines.run(5.0)
    machines.start("new")
    machines.run(40.0, machines.agree)
    machines.kill("new")
    row["killed, silent"] = machines.run(60.0, machines.agree)
    machines.run(5.0)
    (head,) = machines.heads()
    machines.kill(head)
    row["head killed"] = machines.run(60.0, machines.agree)
    return row


def _heartbeat_cpu(machines: Machines, head: str) -> float:
    """CPU time of the head for one heartbeat without news."""
    beats = [
        Heartbeat(member.me, member.view.stamp, member.head, len(member.view.machines))
        for name, member in machines.members.items()
        if name != head
    ]
    preside, now = machines.members[head].heartbeat, machines.now
    return _cpu(lambda: [preside(beat, now) for beat in beats]) / len(beats)


def membership_table(rows: list[dict[str, Any]]) -> Table:
    return Table(
        "membership: messages, and seconds until all machines know of a change",
        (
            "machines",
            "messages/s",
            "of them at the head",
            "us of CPU for each",
            "KB/s in all",
            "all started",
            "one joins",
            "KB for that",
            "one killed, reported",
            "one killed, silent",
            "head killed",
        ),
        tuple(
            (
                f"{row['machines']:,}",
                f"{row['messages/s']:,.0f}",
                f"{row['messages/s at the head']:,.0f}",
                f"{row['us of the head per heartbeat']:.1f}",
                f"{row['bytes/s'] / 1e3:,.1f}",
                f"{row['start']:.1f} s",
                f"{row['join']:.1f} s",
                f"{max(0.0, row['bytes of a join']) / 1e3:,.0f}",
                f"{row['killed, reported']:.1f} s",
                f"{row['killed, silent']:.1f} s",
                f"{row['head killed']:.1f} s",
            )
            for row in rows
        ),
    )


# Requests.


def measure_requests(size: int, options: Namespace) -> list[dict[str, Any]]:
    """Requests for the batches of one machine in epoch 1, and the CPU time to decide on them."""
    machines = cluster(size)
    names = [machine.name for machine in machines]
    # Enough data for the most batches that are asked for at once.
    indices = max(options.indices, max(AT_ONCE) * options.batch * size)
    deal = Deal(Shuffled(), indices, 0, options.batch, world=size, tail="drop")
    first = FirstOwners.first_epoch("f", deal, names)
    placement = Placement(first, machines)
    epoch = deal.batches(Cursor(1))
    batches = [batch.indices.tolist() for batch in islice(epoch, max(AT_ONCE))]
    rows = []
    for at_once in AT_ONCE:
        row = _ask(names[0], placement, batches, at_once, options.sample_bytes)
        per_second = options.rate / options.batch * row["requests per batch"]
        row["requests/s"] = per_second
        # A machine asks as often as it is asked, and the cost is that of both sides.
        row["cores"] = per_second * (options.request_cost + row["seconds per request"])
        row["buffer bytes"] = at_once * options.batch * options.sample_bytes
        row["bytes/s"] = row["remote share"] * options.rate * options.sample_bytes
        rows.append({"machines": size, **row})
    return rows


def _ask(
    me: str, placement: Placement, batches: list[list[int]], at_once: int, nbytes: int
) -> dict[str, Any]:
    """Ask for batches, and answer at once with all samples."""
    admission = Admission(1 << 60)
    keys = np.concatenate([np.array(batch) for batch in batches])
    for key in keys[placement.owners(keys) == placement.names.index(me)].tolist():
        admission.offer(key, nbytes)
    holdings = Holdings(me, admission, lambda key: nbytes)
    room = 2 * at_once * len(batches[0]) * nbytes
    partition = Partition(me, placement, holdings, total_bytes=max(room, TOTAL_BYTES))
    started, now, requests = time.process_time(), 0.0, 0
    for start in range(0, len(batches), at_once):
        wanted = dict(enumerate(batches[start : start + at_once], start))
        open_asks = [ask for ask in partition.want(wanted, now) if isinstance(ask, Ask)]
        while open_asks:
            ask = open_asks.pop()
            now += 1e-6
            requests += 1
            present = dict.fromkeys(ask.keys, nbytes)
            more = partition.answered(ask.owner, ask.request, now, present)
            open_asks += [again for again in more if isinstance(again, Ask)]
        for batch in wanted:
            partition.used(batch, now)
    seconds = time.process_time() - started
    counts = partition.counts
    return {
        "batches at once": at_once,
        "requests per batch": requests / len(batches),
        "samples per request": counts.remote / max(1, requests),
        "remote share": counts.remote / counts.asked,
        "seconds per request": seconds / max(1, requests),
        "us per batch": 1e6 * seconds / len(batches),
    }


def requests_table(rows: list[dict[str, Any]], options: Namespace) -> Table:
    return Table(
        f"requests for batches of {options.batch}, {options.rate:,.0f} samples/s on each machine, "
        f"{1e3 * options.request_cost:g} ms a request",
        (
            "machines, batches at once",
            "from other machines",
            "requests per batch",
            "samples per request",
            "requests/s of a machine",
            "cores of a machine",
            "us to decide on a batch",
            "MB asked for at once",
            "Gbit/s each way",
        ),
        tuple(
            (
                f"{row['machines']:,}, {row['batches at once']}",
                f"{row['remote share']:.1%}",
                f"{row['requests per batch']:.1f}",
                f"{row['samples per request']:.1f}",
                f"{row['requests/s']:,.0f}",
                f"{row['cores']:.2f}",
                f"{row['us per batch']:,.0f}",
                f"{row['buffer bytes'] / 1e6:,.0f}",
                f"{8 * row['bytes/s'] / 1e9:.1f}",
            )
            for row in rows
        ),
    )


def notes(data: dict[str, list[dict[str, Any]]], options: Namespace) -> tuple[str, ...]:
    """The first size at which requests take more than a core."""
    single = [row for row in data["requests"] if row["batches at once"] == 1]
    over = [row for row in single if row["cores"] > 1.0]
    if not over:
        return (f"requests take less than a core of a machine, up to {options.machines[-1]:,}",)
    first = over[0]
    return (
        f"requests take more than a core of each machine from {first['machines']:,} machines on: "
        f"{first['requests per batch']:.0f} for a batch, {first['cores']:.1f} cores",
    )
