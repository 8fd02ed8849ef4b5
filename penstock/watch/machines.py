"""The machines of a cluster as rows: what each has and holds, its traffic, and who is slow. Pure.

The rows are computed from the ``cluster`` part of a node's status, and from an earlier one for
rates. The terminal, the web page and the metrics show the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from penstock.cluster.request_times import quantile

ClusterStatus = Mapping[str, Any]
"""The ``cluster`` part of a node's status (``ClusterService.status``), or a part of it."""

COUNTED = 5
"""Least requests between two looks from which a machine is called slow."""

MUCH_SLOWER = 4.0
"""A machine is slow if its 95th percentile is this many times the median of the others'."""

TOLERATED = 0.02
"""A machine that answers within this many seconds is not slow: a wait that short does not
matter, and requests are never hedged earlier."""

OFTEN_HEDGED = 0.1
"""A machine is slow if at least this share of its requests was hedged."""


@dataclass(frozen=True, slots=True)
class MachineRow:
    """One machine of the cluster, as this machine sees it.

    - ``state``: ``alive``, ``suspected`` (it does not answer this machine) or ``gone``.
    - ``cores``, ``idle_cores``, ``samples``, ``used_bytes``, ``local``, ``remote``, ``storage`` and
      ``hedged`` are what the machine itself reports, ``None`` without a report. The last four count
      the samples of its batches: found on it, got from others, read from storage, and read from
      storage because another machine did not answer in time.
    - ``sent``, ``received``: bytes between this machine and that one, and per second.
    - ``requests``: requests of this machine to that one, of which ``failed`` were not answered.
      ``typical``, ``late``: the median
      and the 95th percentile of the seconds until their first answer, since the earlier status, or
      since the start if there was no request since.
    - ``hedged_requests``: requests of this machine that were read from storage instead.
    - ``slow``: this machine often waits for that one.
    """

    name: str
    address: str
    role: str
    state: str
    head: bool
    here: bool
    cores: int | None
    idle_cores: float | None
    cache_bytes: int
    used_bytes: int | None
    samples: int | None
    local: int | None
    remote: int | None
    storage: int | None
    hedged: int | None
    sent: int
    received: int
    sent_per_second: float
    received_per_second: float
    requests: int
    failed: int
    hedged_requests: int
    typical: float | None
    late: float | None
    slow: bool = False


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One cache over all machines that have reported.

    ``here``, ``elsewhere`` and ``storage`` count samples of batches on all of them: found on the
    machine that needed it, got from another machine, read from storage. ``unsent``: times that a
    sample was not sent because it needs a pickle.
    """

    content: str
    machines: int
    samples: int
    used_bytes: int
    budget: int
    here: int
    elsewhere: int
    storage: int
    hedged: int
    unsent: int


@dataclass(frozen=True, slots=True)
class ClusterRows:
    """The machines and caches of a cluster at one moment."""

    machine: str
    address: str
    view: str
    machines: tuple[MachineRow, ...]
    caches: tuple[CacheRow, ...]

    @property
    def present(self) -> int:
        """Machines that have not gone."""
        return sum(row.state != "gone" for row in self.machines)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(
    cluster: ClusterStatus, before: ClusterStatus | None = None, seconds: float = 0.0
) -> ClusterRows:
    """The rows of a status. ``before``: an earlier one, ``seconds`` ago, for rates since then."""
    earlier: dict[str, ClusterStatus] = {}
    if before is not None and before["machine"] == cluster["machine"]:
        earlier = {machine["name"]: machine for machine in before["machines"]}
    rows, recent = [], []
    for machine in cluster["machines"]:
        old = earlier.get(machine["name"])
        if old is not None and old["requests"] > machine["requests"]:
            old = None  # the node was restarted, and counts from zero again
        rows.append(_row(machine, old, seconds))
        recent.append(_recent(machine, old))
    slow = slow_machines(rows, recent)
    return ClusterRows(
        cluster["machine"],
        cluster["address"],
        cluster["view"],
        tuple(replace(row, slow=row.name in slow) for row in rows),
        cache_rows(cluster),
    )


def _row(machine: ClusterStatus, old: ClusterStatus | None, seconds: float) -> MachineRow:
    report = machine["report"] or {}
    caches = report.get("caches", ())

    def total(name: str) -> int | None:
        return sum(cache[name] for cache in caches) if report else None

    def rate(name: str) -> float:
        change = 0 if old is None else machine[name] - old[name]
        return change / seconds if seconds > 0 and change > 0 else 0.0

    times = _times(machine, old)
    return MachineRow(
        name=machine["name"],
        address=machine["address"],
        role=machine["role"],
        state=machine["state"],
        head=machine["is"]["head"],
        here=machine["is"]["this machine"],
        cores=report.get("cores"),
        idle_cores=report.get("idle_cores"),
        cache_bytes=machine["cache_bytes"],
        used_bytes=total("bytes"),
        samples=total("samples"),
        local=total("local"),
        remote=total("remote"),
        storage=total("storage"),
        hedged=total("hedged"),
        sent=machine["sent"],
        received=machine["received"],
        sent_per_second=rate("sent"),
        received_per_second=rate("received"),
        requests=asked_of(machine),
        failed=machine["failed"],
        hedged_requests=machine["hedged_requests"],
        typical=quantile(times, 0.5),
        late=quantile(times, 0.95),
    )


def _times(machine: ClusterStatus, old: ClusterStatus | None) -> list[int]:
    """Counts of the requests since the earlier status by time; of all, if there were none."""
    now = list(machine["times"])
    if old is None:
        return now
    since = [count - last for count, last in zip(now, old["times"], strict=True)]
    return since if any(since) else now


def _recent(machine: ClusterStatus, old: ClusterStatus | None) -> tuple[int, int]:
    """Requests to a machine since the earlier status, and how many of them were hedged."""
    now, last = asked_of(machine), (0 if old is None else asked_of(old))
    hedged = machine["hedged_requests"] - (0 if old is None else old["hedged_requests"])
    return now - last, max(0, hedged)


def asked_of(machine: ClusterStatus) -> int:
    """Requests to a machine. A hedged one may not have ended yet."""
    ended: int = machine["requests"] + machine["failed"]
    hedged: int = machine["hedged_requests"]
    return max(hedged, ended)


def slow_machines(rows: Sequence[MachineRow], recent: Sequence[tuple[int, int]]) -> set[str]:
    """Names of the machines that this one often waits for.

    ``recent``: of each row, the requests since the earlier look, and those that were hedged.
    """
    asked = [
        (row, requests, hedged)
        for row, (requests, hedged) in zip(rows, recent, strict=True)
        if requests + hedged >= COUNTED and not row.here
    ]
    slow = set()
    for row, requests, hedged in asked:
        others = [
            other.late for other, _, _ in asked if other is not row and other.late is not None
        ]
        usual = max(TOLERATED, MUCH_SLOWER * median(others)) if others else None
        late = usual is not None and row.late is not None and row.late > usual
        if late or hedged >= OFTEN_HEDGED * (requests + hedged):
            slow.add(row.name)
    return slow


def cache_rows(cluster: ClusterStatus) -> tuple[CacheRow, ...]:
    """The caches over all machines that have reported, the largest first."""
    found: dict[str, list[ClusterStatus]] = {}
    for machine in cluster["machines"]:
        for cache in (machine["report"] or {}).get("caches", ()):
            found.setdefault(cache["content"], []).append(cache)

    def total(caches: Sequence[ClusterStatus], name: str) -> int:
        return sum(cache[name] for cache in caches)

    rows = [
        CacheRow(
            content,
            len(caches),
            *(total(caches, name) for name in ("samples", "bytes", "budget")),
            *(total(caches, name) for name in ("local", "remote", "storage", "hedged", "unsent")),
        )
        for content, caches in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.used_bytes))


# As text.


def lines_of(rows: ClusterRows) -> list[str]:
    """The machines and caches as lines for a terminal."""
    from penstock.config import show_size
    from penstock.host.text import aligned, many

    facts = [
        ("cluster", f"{many(rows.present, 'machine')}, view {rows.view}"),
        ("this machine", f"{rows.machine} at {rows.address}"),
    ]
    facts += [("slow", line) for line in slow_lines(rows)]
    for cache in rows.caches:
        facts.append(
            (
                f"cache {cache.content[:12]}",
                f"{many(cache.samples, 'sample')}, {show_size(cache.used_bytes)} of "
                f"{show_size(cache.budget)} on {many(cache.machines, 'machine')}; found here "
                f"{cache.here:,}, on other machines {cache.elsewhere:,}, read from storage "
                f"{cache.storage:,}, of these {cache.hedged:,} hedged"
                + ("; samples that need a pickle are not sent" if cache.unsent else ""),
            )
        )
    machines = aligned([MACHINE_HEADS, *map(_machine_cells, rows.machines)], right=set(range(4, 9)))
    others = [row for row in rows.machines if not row.here]
    traffic = aligned([TRAFFIC_HEADS, *map(_traffic_cells, others)], right=set(range(1, 8)))
    return [*aligned(facts), "", *machines, *(["", *traffic] if others else [])]


MACHINE_HEADS = (
    "machine",
    "address",
    "role",
    "state",
    "idle cores",
    "cache",
    "holds",
    "found here, elsewhere, in storage",
)

TRAFFIC_HEADS = (
    "machine",
    "sent to it",
    "per s",
    "got from it",
    "per s",
    "answers in",
    "95% in",
    "hedged",
)


def _machine_cells(row: MachineRow) -> tuple[str, ...]:
    from penstock.config import show_size

    idle = "?"
    if row.cores is not None and row.idle_cores is not None:
        idle = f"{row.idle_cores:.1f} of {row.cores}"
    return (
        row.name,
        row.address,
        row.role,
        ", ".join(_notes(row)),
        idle,
        show_size(row.cache_bytes),
        "?" if row.used_bytes is None else show_size(row.used_bytes),
        "?" if row.local is None else f"{row.local:,}, {row.remote:,}, {row.storage:,}",
    )


def _traffic_cells(row: MachineRow) -> tuple[str, ...]:
    from penstock.config import show_size

    return (
        row.name,
        show_size(row.sent),
        show_size(row.sent_per_second),
        show_size(row.received),
        show_size(row.received_per_second),
        milliseconds(row.typical),
        milliseconds(row.late),
        f"{row.hedged_requests:,}",
    )


def _notes(row: MachineRow) -> Iterator[str]:
    yield row.state
    if row.head:
        yield "head"
    if row.here:
        yield "this machine"
    if row.slow:
        yield "slow"


def milliseconds(seconds: float | None) -> str:
    """A time in milliseconds, ``-`` if there is none.

    >>> milliseconds(0.0123), milliseconds(0.5), milliseconds(None)
    ('12.3 ms', '500 ms', '-')
    """
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def slow_lines(rows: ClusterRows) -> list[str]:
    """A sentence on each machine that this one often waits for."""
    return [
        f"{row.name}: 95% of its answers begin within {milliseconds(row.late)}, and "
        f"{row.hedged_requests:,} of {row.requests:,} requests were read from storage instead"
        for row in rows.machines
        if row.slow
    ]
