"""Decides which job of a group copies a batch to their device, and who uses that copy.

Pure: events in, decisions out. Jobs that get the same batches on one device ask before they copy a
batch. The first to ask makes the copy, in a *place*: memory of its own that the others have mapped.
The others read the copy from there, into memory of their own. A place is used again when all have
read it. Nobody is kept waiting for a job that is slow, stopped or dead: whoever finds no copy makes
one for itself alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.node.state import BatchName

PLACES = 4
"""Places of a job: the copies that it keeps for others. A job takes batches up to two ahead of its
loop, so jobs that run side by side need four."""

EXPIRES = 16
"""Batches after which a copy that a job has not asked for is not kept for it, and batches for which
such a job is not counted on."""

REMEMBERED = 256
"""Batches that are known to have been asked for by a job."""


class MakeCopy(NamedTuple):
    """Copy the batch. ``place``: where the others can read it; ``None``: for itself alone.

    ``readers``: the jobs that may read it.
    """

    member: int
    name: BatchName
    place: int | None
    readers: tuple[int, ...]


class UseCopy(NamedTuple):
    """Read the batch from a place of another job.

    ``version``: of the memory there. ``layout``: the tensors in it. ``handle``: by which this job
    maps the memory; ``None`` if it has mapped this version before.
    """

    member: int
    name: BatchName
    owner: int
    place: int
    version: int
    layout: str
    handle: bytes | None


class OwnerLeft(NamedTuple):
    """A job has left: its places must be unmapped."""

    member: int
    owner: int


class MayLeave(NamedTuple):
    """Nobody reads the places of a job that wants to leave."""

    member: int


CopyDecision = MakeCopy | UseCopy | OwnerLeft | MayLeave


@dataclass(slots=True)
class _Job:
    """A job that delivers to the device.

    ``asked``: the batches that it asked for last. ``behind``: for how many more of its batches
    nobody counts on it. ``copies``: the batches in its places.
    """

    asked: dict[BatchName, None] = field(default_factory=dict)
    behind: int = 0
    copies: dict[int, BatchName] = field(default_factory=dict)
    leaving: bool = False
    may_leave: bool = False


@dataclass(slots=True)
class _Copy:
    """The copy of a batch. ``waiting``: jobs that wait until it is made."""

    owner: int
    place: int
    made: bool = False
    version: int = 0
    layout: str = ""
    age: int = 0
    waiting: list[int] = field(default_factory=list)
    reading: set[int] = field(default_factory=set)


class DeviceCopies:
    """The copies of one group on one device.

    >>> name = BatchName("0/1 x 8", 0, 0, "f00d")
    >>> copies = DeviceCopies()
    >>> copies.join(1), copies.join(2)
    (None, None)
    >>> copies.ask(1, name)[0].place, copies.ask(2, name)
    (0, [])
    >>> copies.made(1, name, 1, "", {2: b"handle"})[0].handle
    b'handle'
    """

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._copies: dict[BatchName, _Copy] = {}
        self._handles: dict[tuple[int, int, int], tuple[int, bytes | None]] = {}
        """By reader, owner and place: version and handle; the handle is ``None`` once it is sent.
        A handle can be used once."""
        self.alone = 0
        """Batches that a job copied for itself."""
        self.shared = 0
        """Batches that were copied for several jobs."""
        self.read = 0
        """Batches that a job read from the copy of another."""

    @property
    def members(self) -> list[int]:
        """The jobs that take part."""
        return list(self._jobs)

    def join(self, member: int) -> None:
        """A job delivers the group's batches to this device."""
        self._jobs[member] = _Job()

    def ask(self, member: int, name: BatchName) -> list[CopyDecision]:
        """A job is about to copy a batch. If nothing is decided, another makes the copy now."""
        job = self._jobs[member]
        job.asked.pop(name, None)
        job.asked[name] = None
        if len(job.asked) > REMEMBERED:
            del job.asked[next(iter(job.asked))]
        found = self._copies.get(name)
        decisions: list[CopyDecision] = []
        if found is not None and found.owner != member:
            job.behind = 0
            if found.made:
                decisions += self._use(member, name, found)
            else:
                found.waiting.append(member)
        elif found is not None:  # it asks again, for another loop over the same batches
            decisions.append(self._alone(member, name))
        else:
            decisions.append(self._make(member, name))
            job.behind = max(0, job.behind - 1)
        for copy in self._copies.values():
            copy.age += copy.owner == member
        return decisions + self._settle()

    def _make(self, member: int, name: BatchName) -> MakeCopy:
        job = self._jobs[member]
        readers = [
            number
            for number, other in self._jobs.items()
            if number != member and not other.leaving and self._counts_on(other, name)
        ]
        free = [place for place in range(PLACES) if place not in job.copies]
        if not readers or not free or job.behind or job.leaving:
            return self._alone(member, name)
        job.copies[free[0]] = name
        self._copies[name] = _Copy(member, free[0])
        self.shared += 1
        everyone = tuple(number for number in self._jobs if number != member)
        return MakeCopy(member, name, free[0], everyone)

    def _alone(self, member: int, name: BatchName) -> MakeCopy:
        self.alone += 1
        return MakeCopy(member, name, None, ())

    @staticmethod
    def _counts_on(job: _Job, name: BatchName) -> bool:
        """Whether this job is expected to ask for a batch soon."""
        return not job.behind and name not in job.asked

    def _use(self, member: int, name: BatchName, copy: _Copy) -> list[CopyDecision]:
        key = member, copy.owner, copy.place
        version, handle = self._handles.get(key, (-1, None))
        if version != copy.version:  # it joined after the copy was made
            return [self._alone(member, name)]
        self._handles[key] = version, None
        copy.reading.add(member)
        self.read += 1
        return [UseCopy(member, name, copy.owner, copy.place, version, copy.layout, handle)]

    def made(
        self, member: int, name: BatchName, version: int, layout: str, handles: dict[int, bytes]
    ) -> list[CopyDecision]:
        """A job has made a copy that others can read. ``handles``: new ones, by reader."""
        copy = self._copies.get(name)
        if copy is None or copy.owner != member or copy.made:
            return []
        copy.made, copy.version, copy.layout = True, version, layout
        for reader, handle in handles.items():
            if reader in self._jobs:
                self._handles[reader, member, copy.place] = version, handle
        waiting, copy.waiting = copy.waiting, []
        decisions: list[CopyDecision] = []
        for reader in waiting:
            decisions += self._use(reader, name, copy)
        return decisions + self._settle()

    def end(self, member: int, name: BatchName) -> list[CopyDecision]:
        """A job has read a copy, waits for it no longer, or could not make its own for others."""
        copy = self._copies.get(name)
        if copy is None:
            return []
        decisions: list[CopyDecision] = []
        if copy.owner == member and not copy.made:
            decisions += self._forget(name)
        elif member in copy.waiting:
            copy.waiting.remove(member)
        copy.reading.discard(member)
        return decisions + self._settle()

    def _forget(self, name: BatchName) -> list[CopyDecision]:
        """There will be no copy: those that wait for it make another."""
        copy = self._copies.pop(name)
        owner = self._jobs.get(copy.owner)
        if owner is not None:
            owner.copies.pop(copy.place, None)
        decisions: list[CopyDecision] = []
        for number, member in enumerate(copy.waiting):
            if number == 0:
                decisions.append(self._make_for(member, name, copy.waiting[1:]))
            elif name in self._copies:
                self._copies[name].waiting.append(member)
            else:
                decisions.append(self._alone(member, name))
        return decisions

    def _make_for(self, member: int, name: BatchName, waiting: list[int]) -> MakeCopy:
        # Those who wait have asked for it already, so they are not counted on.
        for other in waiting:
            self._jobs[other].asked.pop(name, None)
        decision = self._make(member, name)
        for other in waiting:
            self._jobs[other].asked[name] = None
        return decision

    def leaving(self, member: int) -> list[CopyDecision]:
        """A job wants to leave, as soon as nobody reads its copies. It makes no more of them."""
        self._jobs[member].leaving = True
        unmade = [
            name for name, one in self._copies.items() if one.owner == member and not one.made
        ]
        decisions = [decision for name in unmade for decision in self._forget(name)]
        return decisions + self._settle()

    def leave(self, member: int) -> list[CopyDecision]:
        """A job has left or died."""
        left = self._jobs.pop(member, None)
        if left is None:
            return []
        self._handles = {key: one for key, one in self._handles.items() if member not in key[:2]}
        decisions: list[CopyDecision] = [OwnerLeft(other, member) for other in self._jobs]
        for copy in self._copies.values():
            copy.reading.discard(member)
            if member in copy.waiting:
                copy.waiting.remove(member)
        for name in [name for name, copy in self._copies.items() if copy.owner == member]:
            decisions += self._forget(name)
        return decisions + self._settle()

    def _settle(self) -> list[CopyDecision]:
        """Give back the places that nobody reads or will read."""
        for name, copy in list(self._copies.items()):
            if not copy.made or copy.reading:
                continue
            wanting = [
                job
                for number, job in self._jobs.items()
                if number != copy.owner and self._counts_on(job, name)
            ]
            owner = self._jobs[copy.owner]
            if wanting and copy.age > EXPIRES:
                for job in wanting:
                    job.behind = EXPIRES
            elif wanting and not owner.leaving:
                continue
            del owner.copies[copy.place]
            del self._copies[name]
        decisions: list[CopyDecision] = []
        for number, job in self._jobs.items():
            if job.leaving and not job.may_leave and not job.copies:
                job.may_leave = True
                decisions.append(MayLeave(number))
        return decisions
