"""What machines report about themselves, and whom to ask for it while a user watches. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

EVERY = 1.0
"""Seconds between two requests for reports."""

WATCHED = 6.0
"""Seconds after a look in which reports are asked for. Without a look, nothing is sent."""

AT_ONCE = 32
"""Machines that are asked every ``EVERY`` seconds. In a larger cluster they take turns."""

OLD = 60.0
"""Seconds after which a report is not shown any more."""

MOST_CACHES = 32
"""Caches in a report."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """One cache on one machine: what it holds, and where the samples of its batches were found.

    ``guest``: kept for jobs on other machines. ``hedged``: of those from storage, the samples that
    another machine did not send in time. ``unsent``: times that a sample was not sent because it
    needs a pickle.
    """

    content: str
    samples: int
    bytes: int
    budget: int
    guest: bool
    local: int
    remote: int
    storage: int
    hedged: int
    unsent: int


@dataclass(frozen=True, slots=True)
class MachineReport:
    """A machine about itself. ``sent``, ``received``: bytes of samples, from and to all others."""

    cores: int
    idle_cores: float
    sent: int
    received: int
    caches: tuple[CacheReport, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def report_of(plain: Mapping[str, Any]) -> MachineReport | None:
    """The report in the answer of another machine; ``None`` if it is malformed.

    >>> report = MachineReport(8, 2.5, 10, 20, (CacheReport("c", 1, 2, 3, False, 4, 5, 6, 7, 0),))
    >>> report_of(report.as_dict()) == report, report_of({"cores": "many"})
    (True, None)
    """
    caches = plain.get("caches")
    if not isinstance(caches, (list, tuple)) or len(caches) > MOST_CACHES:
        return None
    try:
        found = tuple(_checked(CacheReport, cache) for cache in caches)
        report: MachineReport = _checked(MachineReport, {**plain, "caches": found})
        return report
    except (KeyError, TypeError):
        return None


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "tuple[CacheReport, ...]": (tuple,),
}


def _checked(kind: Any, plain: Mapping[str, Any]) -> Any:
    """A record of this kind; fields that it does not have are dropped. Raises on a wrong type."""
    values = {}
    for wanted in fields(kind):
        value = plain[wanted.name]
        if not isinstance(value, _KINDS[str(wanted.type)]):
            raise TypeError(f"{wanted.name} is {type(value).__name__}")
        if isinstance(value, (int, float)) and not 0 <= value < 2**63:
            raise TypeError(f"{wanted.name} is {value}")
        values[wanted.name] = value
    return kind(**values)


class Survey:
    """The last report of each other machine.

    >>> survey = Survey()
    >>> survey.due(["b", "c"], now=0.0)
    []
    >>> survey.watched(now=0.0)
    >>> survey.due(["b", "c"], now=0.0), survey.due(["b", "c"], now=0.5)
    (['b', 'c'], [])
    """

    def __init__(self) -> None:
        self._until = float("-inf")
        self._next = float("-inf")
        self._asked: dict[str, float] = {}
        self._reports: dict[str, tuple[float, MachineReport]] = {}

    def watched(self, now: float) -> None:
        """Somebody looks at the machines of the cluster."""
        self._until = now + WATCHED

    def due(self, names: Iterable[str], now: float) -> list[str]:
        """The machines to ask for a report now: those that were not asked for longest."""
        if now >= self._until or now < self._next:
            return []
        self._next = now + EVERY
        known = list(names)
        self._asked = {name: self._asked[name] for name in known if name in self._asked}
        never = float("-inf")
        chosen = sorted(known, key=lambda name: self._asked.get(name, never))[:AT_ONCE]
        self._asked.update(dict.fromkeys(chosen, now))
        return chosen

    def reported(self, name: str, report: MachineReport, now: float) -> None:
        self._reports[name] = (now, report)

    def of(self, name: str, now: float) -> tuple[float, MachineReport] | None:
        """The age and the content of a machine's last report; ``None`` without a recent one."""
        when, report = self._reports.get(name, (float("-inf"), None))
        if report is None or now - when > OLD:
            self._reports.pop(name, None)
            return None
        return now - when, report
