"""Decides which kept things are removed: a pure function of what there is, policy and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import show_size
from penstock.host.text import span

DAY = 86_400.0

NEVER = frozenset({"packed"})
"""Kinds that no policy removes: somebody has asked for these files by name."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When kept things are removed. Times are in seconds; ``None``: not for this reason.

    - ``budget``: bytes of everything kept; the things that were not used for longest go first.
    - ``unused``: time since the last use.
    - ``age``: time since a thing was made.
    - ``obsolete``: time since the last use of a thing that another one has replaced.
    """

    budget: int | None = None
    unused: float | None = 90 * DAY
    age: float | None = None
    obsolete: float | None = 7 * DAY


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the policy needs to know of a kept thing. ``line`` and ``expires``: see Provenance."""

    key: str
    kind: str
    identity: str
    line: str
    nbytes: int
    created: float
    last_use: float
    opened: int = 0
    in_use: bool = False
    pinned: bool = False
    expires: float | None = None

    @property
    def stays(self) -> bool:
        return self.in_use or self.pinned or self.kind in NEVER


def replaced_by(kept: Sequence[Candidate]) -> dict[str, Candidate]:
    """By key: the thing that has replaced another one.

    It is of the same line, was made after the last use of the other one, and was used twice; the
    newest counts. So two pipelines that take turns replace nothing.
    """
    found: dict[str, Candidate] = {}
    for old in kept:
        newer = [
            new
            for new in kept
            if new.line and new.line == old.line and new.identity != old.identity
            if new.created > old.last_use and new.opened >= 2
        ]
        if newer:
            found[old.key] = max(newer, key=lambda new: new.created)
    return found


def choose(kept: Sequence[Candidate], policy: Policy, now: float) -> list[tuple[Candidate, str]]:
    """What to remove, and why. Never what is in use, pinned or packed.

    >>> old = Candidate("a", "cache", "1", "photos", 100, created=0, last_use=50)
    >>> new = Candidate("b", "cache", "2", "photos", 100, created=60, last_use=90, opened=2)
    >>> choose([old, new], Policy(obsolete=30.0), now=100.0)[0][1]
    'replaced by 2, and not used for 50 s'
    """
    replaced = replaced_by(kept)
    chosen: dict[str, tuple[Candidate, str]] = {}
    for one in kept:
        reason = "" if one.stays else _reason(one, replaced.get(one.key), policy, now)
        if reason:
            chosen[one.key] = one, reason
    if policy.budget is not None:
        left = [one for one in kept if one.key not in chosen and one.kind not in NEVER]
        total = sum(one.nbytes for one in left)
        for one in sorted(left, key=lambda one: (one.last_use, one.key)):
            if total <= policy.budget:
                break
            if not one.stays:
                total -= one.nbytes
                over = f"kept things were over the budget of {show_size(policy.budget)}"
                chosen[one.key] = one, f"{over}, and it was not used for longest"
    return list(chosen.values())


def _reason(one: Candidate, newer: Candidate | None, policy: Policy, now: float) -> str:
    idle = now - one.last_use
    if one.expires is not None and now > one.expires:
        return "its time has passed"
    if newer is not None and policy.obsolete is not None and idle > policy.obsolete:
        return f"replaced by {newer.identity[:12]}, and not used for {span(idle, units=1)}"
    if policy.unused is not None and idle > policy.unused:
        return f"not used for {span(idle, units=1)}"
    if policy.age is not None and now - one.created > policy.age:
        return f"made {span(now - one.created, units=1)} ago"
    return ""
