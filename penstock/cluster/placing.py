"""Decides on which machines of a Ray cluster nodes are placed, and which of them are seeds.

Pure: what Ray lists and what the keepers report in, decisions out. A *keeper* is an actor of Ray on
one machine; it starts the node there and keeps it in the cluster. One *supervisor* actor runs a
``NodePlacement``. It sends all its decisions again whenever it looks at the cluster, so a lost
message is made up for at the next look.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from penstock.cluster.secrets import Secrets

SEEDS = 3
"""Machines that may be the head: enough to find a new one if the first fails."""

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds before an actor that failed is placed again. The pause doubles each time."""

UNUSED = 120.0
"""Seconds without a job after which nodes that a loader has placed end. A sweep starts its next job
sooner, as a rule. They must end at all because Ray's autoscaler keeps machines that have actors."""

State = Literal["placing", "starting", "in", "failed"]


@dataclass(frozen=True, slots=True)
class RayMachine:
    """A machine that Ray lists as alive. ``node``: its id. ``host``: its address for others."""

    node: str
    host: str
    cpus: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """What is placed on every machine of a Ray cluster.

    - ``cores``, ``cache_bytes``: what each machine lends to jobs on other machines.
    - ``stay``: until ``penstock cluster leave --ray``; otherwise until no job uses the nodes.
    - ``secret``: directory of the secrets on the machine that began. ``fingerprint``: of their
      certificate, by which other machines know that they have the right ones.
    """

    cores: int
    cache_bytes: int
    stay: bool
    secret: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class KeeperReport:
    """What a keeper says of its machine.

    - ``address``: of the node for other machines; empty while it is not known.
    - ``machine``: the node's name in the cluster. ``pid``: of the node.
    - ``members``: jobs that are attached to the node. ``has_secrets``: it can read them.
    - ``secret``: directory of the secrets on that machine. ``reason``: why it is not in.
    """

    state: State = "placing"
    address: str = ""
    machine: str = ""
    pid: int = 0
    members: int = 0
    has_secrets: bool = False
    secret: str = ""
    reason: str = ""


class MachineKeeper(Protocol):
    """Keeps the node of one machine in the cluster. Runs in an actor; no method waits long."""

    def tend(self, seeds: tuple[str, ...], secrets: Secrets | None) -> KeeperReport:
        """What is wanted from now on. ``secrets``: if Ray may carry them."""

    def hand_over(self) -> Secrets | None:
        """The secrets, for a supervisor that was restarted."""

    def recipe(self, digest: str) -> bytes | None:
        """A recipe that a job of this machine has published."""

    def leave(self) -> None:
        """Let the node work alone again, and end it if no job uses it."""


class PlaceKeeper(NamedTuple):
    """Place a keeper on this machine that takes this many CPUs of Ray."""

    machine: RayMachine
    cpus: float


class ForgetKeeper(NamedTuple):
    """Ray no longer lists the machine of this keeper."""

    node: str


@dataclass(slots=True)
class _Placed:
    machine: RayMachine
    report: KeeperReport = field(default_factory=KeeperReport)
    failures: int = 0
    again: float | None = 0.0
    """When a keeper is to be placed; ``None`` if there is one."""


class NodePlacement:
    """The keepers of a Ray cluster.

    >>> options = PlacementOptions(0, 0, True, "/s", "f")
    >>> placement = NodePlacement(options, now=0.0)
    >>> [decision] = placement.look([RayMachine("n1", "10.0.0.1")], now=0.0)
    >>> decision.machine.host
    '10.0.0.1'
    >>> placement.reported("n1", KeeperReport("starting", "10.0.0.1:7411"), now=1.0)
    >>> placement.seeds
    ('10.0.0.1:7411',)
    """

    def __init__(self, options: PlacementOptions, now: float) -> None:
        self.options = options
        self.seeds: tuple[str, ...] = ()
        self._placed: dict[str, _Placed] = {}
        self._used = now
        """When a job was last attached to one of the nodes."""

    @property
    def reports(self) -> dict[str, tuple[RayMachine, KeeperReport]]:
        """By id of the Ray node: the machine, and what its keeper reported last."""
        return {node: (placed.machine, placed.report) for node, placed in self._placed.items()}

    @property
    def kept(self) -> list[str]:
        """Ids of the Ray nodes that have a keeper."""
        return [node for node, placed in self._placed.items() if placed.again is None]

    def look(self, machines: Iterable[RayMachine], now: float) -> list[PlaceKeeper | ForgetKeeper]:
        """Ray lists these machines. Returns what to do about keepers."""
        listed = {machine.node: machine for machine in machines}
        decisions: list[PlaceKeeper | ForgetKeeper] = []
        for node in [node for node in self._placed if node not in listed]:
            del self._placed[node]
            decisions.append(ForgetKeeper(node))
        for node, machine in listed.items():
            placed = self._placed.setdefault(node, _Placed(machine))
            if placed.again is not None and now >= placed.again:
                placed.again = None
                # More than the machine has would wait for ever.
                decisions.append(PlaceKeeper(machine, min(self.options.cores, machine.cpus)))
        self._choose_seeds()
        return decisions

    def reported(self, node: str, report: KeeperReport, now: float) -> None:
        """A keeper has answered."""
        placed = self._placed.get(node)
        if placed is None:
            return
        placed.report, placed.failures = report, 0
        if report.members:
            self._used = now
        self._choose_seeds()

    def silent(self, node: str) -> None:
        """A keeper has not answered in time: it starts, waits for CPUs, or its machine is slow."""
        placed = self._placed.get(node)
        if placed is not None and placed.report.state == "placing" and self.options.cores:
            reason = f"it waits for {min(self.options.cores, placed.machine.cpus):g} CPUs of Ray"
            placed.report = KeeperReport("placing", reason=reason)

    def failed(self, node: str, reason: str, now: float) -> None:
        """A keeper could not be placed, or has ended for good. It is placed again later."""
        placed = self._placed.get(node)
        if placed is None:
            return
        placed.report = KeeperReport("failed", placed.report.address, reason=reason)
        placed.again = now + min(FIRST_PAUSE * 2.0**placed.failures, LONGEST_PAUSE)
        placed.failures += 1

    def is_unused(self, now: float) -> bool:
        """Whether the nodes were placed for jobs only, and no job has used them for long."""
        return not self.options.stay and now - self._used > UNUSED

    def _choose_seeds(self) -> None:
        """Machines stay seeds as long as Ray lists them: all nodes must know the same seeds."""
        addresses = [placed.report.address for placed in self._placed.values()]
        known = [address for address in addresses if address]
        kept = [seed for seed in self.seeds if seed in known]
        new = [address for address in known if address not in kept]
        self.seeds = tuple((kept + new)[:SEEDS])
