"""Which batch is prepared next, who gets it and when it goes: pure, events in and decisions out.

Members ask for batches in the order in which they will take them. A batch is prepared once for all
who need it, given to each in its own order, and kept until the last of them has had it. Whoever
falls behind by more than there is room for finds a batch gone, asks for it, and has it prepared
again: that is all that being detached means, and what comes is the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

WINDOW = 2
"""Batches that a member is given before it takes them: one to go on with, one on its way."""

MERGE = 64
"""Batches by which a member may be behind another and still be worth helping to catch up: from
then on both are served by one preparation."""

GATHER = 30.0
"""Seconds after a member has joined in which batches that all have had are kept: the jobs of a
search are started one after the other, and each loads its framework first."""

GATHERED, MOST = 256 << 20, 512
"""Bytes that are kept for that at most, and how many batches are staged for whatever reason: with
thousands of small ones it would take longer to look through them than to prepare one again."""

Lag = Literal["detach", "wait"]


class Name(NamedTuple):
    """A batch, as all members know it: ``part`` tells ranks apart, ``digest`` what is in it."""

    part: str
    epoch: int
    number: int
    digest: str


class Give(NamedTuple):
    """Send this batch to this member."""

    member: int
    name: Name


class Drop(NamedTuple):
    """Nobody needs this batch any more."""

    name: Name


class Fail(NamedTuple):
    """Tell this member that the batch could not be prepared."""

    member: int
    name: Name
    error: bytes


Decision = Give | Drop | Fail


@dataclass(slots=True)
class Member:
    """One job, or one rank of it.

    ``wants`` are the batches it has asked for and not been given, in its order. Of those given
    (``held``) it looks at some still, and has not taken others yet (``untaken``).
    """

    part: str
    lag: Lag
    wants: dict[Name, None] = field(default_factory=dict)
    held: dict[Name, int] = field(default_factory=dict)
    untaken: dict[Name, None] = field(default_factory=dict)
    epoch: int = 0
    first: int = 0
    length: int | None = None
    done: int = 0
    taken: int = 0
    served: int = 0

    def needs(self, name: Name) -> bool:
        """Whether it will come to this batch, as far as it has said."""
        if name.part != self.part or name.epoch < self.epoch:
            return False
        return name.epoch > self.epoch or self.turn(name) >= self.done

    def turn(self, name: Name) -> int:
        """When in its epoch it comes to this batch: it may have begun in the middle."""
        if self.length is None:
            return name.number
        return (name.number - self.first) % self.length


@dataclass(slots=True)
class _Batch:
    status: Literal["wanted", "preparing", "staged"] = "wanted"
    nbytes: int = 0
    seekers: set[int] = field(default_factory=set)
    """Members that want it and have not been given it."""
    holders: set[int] = field(default_factory=set)


class State:
    """The batches and members of one group. ``budget`` bounds the bytes of all that is staged."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.members: dict[int, Member] = {}
        self.prepared_batches = 0
        self.given_batches = 0
        self.staged_batches = 0
        self._batches: dict[Name, _Batch] = {}
        self._open: dict[Name, None] = {}
        """Those that are wanted and that nobody prepares yet."""
        self._bytes = 0
        self._preparing = 0
        self._gone: dict[tuple[str, int], int] = {}
        self._gather = float("-inf")
        self._gathering = False
        self._largest = 0
        self._turn = 0

    # Members.

    def join(self, member: int, part: str, lag: Lag, now: float) -> None:
        self.members[member] = Member(part, lag)
        self._gather = now + GATHER

    def leave(self, member: int, now: float) -> list[Decision]:
        """It is gone, however it went; whatever was there for it alone goes too."""
        found = self.members.pop(member, None)
        if found is None:
            return []
        for name in [*found.wants, *found.held]:
            batch = self._batches[name]
            batch.seekers.discard(member)
            batch.holders.discard(member)
        return self._settle(now)

    def begin(
        self,
        member: int,
        epoch: int,
        length: int | None,
        first: int | None,
        done: int,
        now: float,
    ) -> tuple[int, list[Decision]]:
        """A member begins an epoch: with which batch, so that it can go along with the others.

        ``first`` is given by one that knows: it goes on with an epoch of which it has had ``done``
        batches before.
        """
        found = self.members[member]
        if first is None:
            first = self._live(member, epoch, length)
        found.epoch, found.first, found.length, found.done = epoch, first, length, done
        return first, self._settle(now)

    def _live(self, member: int, epoch: int, length: int | None) -> int:
        """The first batch from which on all are still to be had."""
        part = self.members[member].part
        gone = self._gone.get((part, epoch), 0)
        others = (one for number, one in self.members.items() if number != member)
        alive = any(one.part == part and one.epoch == epoch for one in others)
        return gone if alive and length is not None and gone < length else 0

    # What members say.

    def want(self, member: int, name: Name, now: float) -> list[Decision]:
        """It will take this batch, after those it has asked for before."""
        self.members[member].wants[name] = None
        if name not in self._batches:
            self._batches[name] = _Batch()
            self._open[name] = None
        self._batches[name].seekers.add(member)
        return self._settle(now, name)

    def rewind(self, member: int, now: float) -> list[Decision]:
        """It goes elsewhere, and wants nothing of what it asked for."""
        found = self.members[member]
        for name in found.wants:
            self._batches[name].seekers.discard(member)
        found.wants.clear()
        found.untaken.clear()
        return self._settle(now)

    def took(self, member: int, name: Name, now: float) -> list[Decision]:
        """Its loop has this batch now."""
        found = self.members[member]
        found.untaken.pop(name, None)
        found.taken += 1
        if name.epoch == found.epoch:
            found.done = max(found.done, found.turn(name) + 1)
        return self._settle(now, name)

    def released(self, member: int, name: Name, now: float) -> list[Decision]:
        """Nothing in it looks at the batch any more."""
        found = self.members[member]
        left = found.held.get(name, 0) - 1
        if left > 0:
            found.held[name] = left
            return []
        found.held.pop(name, None)
        if name in self._batches:
            self._batches[name].holders.discard(member)
        return self._settle(now, name)

    def tick(self, now: float) -> list[Decision]:
        """Time has passed."""
        return self._settle(now)

    # Preparing.

    def choose(self, now: float) -> tuple[Name | None, list[Decision]]:
        """The batch to prepare next, and what has to go for it."""
        wanted = [(key, name) for name in self._open if (key := self._urgency(name)) is not None]
        dropped: list[Decision] = []
        for key, name in sorted(wanted):
            # Whoever has to wait for room must not keep waiting one who need not.
            if self._room(name, dropped, starving=key[:2] == (0, 0)):
                batch = self._batches[name]
                batch.status = "preparing"
                del self._open[name]
                self._preparing += 1
                self._turn += 1
                for member in batch.seekers:
                    self.members[member].served = self._turn
                return name, dropped
        return None, dropped

    def prepared(self, name: Name, nbytes: int, now: float) -> list[Decision]:
        batch = self._batches[name]
        batch.status, batch.nbytes = "staged", nbytes
        self._preparing -= 1
        self._bytes += nbytes
        self.staged_batches += 1
        self._largest = max(self._largest, nbytes)
        self.prepared_batches += 1
        return self._settle(now, name)

    def failed(self, name: Name, error: bytes, now: float) -> list[Decision]:
        """It cannot be prepared: whoever wants it is told, and may want it again."""
        batch = self._batches.pop(name)
        self._preparing -= 1
        told: list[Decision] = []
        for member in sorted(batch.seekers):
            self.members[member].wants.pop(name, None)
            told.append(Fail(member, name, error))
        return told + self._settle(now, name)

    # Looking.

    def is_open(self, name: Name) -> bool:
        """Whether it is wanted and nobody prepares it yet."""
        return name in self._open

    @property
    def staged(self) -> int:
        """Bytes of what is prepared, and of what is being prepared as far as that is known."""
        return self._bytes + self._preparing * self._largest

    def lead(self, member: int) -> int:
        """Batches that are ready for it and not taken yet, before the first that is not."""
        found = self.members[member]
        count = len(found.untaken)
        for name in found.wants:
            if self._batches[name].status != "staged":
                break
            count += 1
        return count

    # Deciding.

    def _urgency(self, name: Name) -> tuple[int, int, int, int, Name] | None:
        """What comes first, as a number: the batch of the member that is furthest behind.

        That is the one with the least to go on with, then one that another preparation would soon
        make superfluous, then the one that was served longest ago.
        """
        found = None
        for member in self._batches[name].seekers:
            one = self.members[member]
            # How many it has to go through first, ready or not.
            ahead = len(one.untaken) + list(one.wants).index(name)
            key = (self.lead(member), ahead, -self._catching_up(one), one.served, name)
            found = key if found is None else min(found, key)
        return found

    def _catching_up(self, member: Member) -> bool:
        """Whether it is so little behind another that helping it saves the rest of its epoch."""
        if member.length is None:
            return False
        at = (member.first + member.done) % member.length
        for other in self.members.values():
            if other is member or (other.part, other.epoch) != (member.part, member.epoch):
                continue
            if other.length == member.length:
                there = (other.first + other.done) % member.length
                behind = (there - at) % member.length
                # Behind by what the other has had and it has still to come.
                if 0 < behind <= min(MERGE, other.done, member.length - member.done):
                    return True
        return False

    def _room(self, name: Name, dropped: list[Decision], *, starving: bool) -> bool:
        """Make room for this batch by dropping others; false where it has to wait for room.

        A member with nothing at all to go on with is made to wait only for one that all have
        agreed to wait for.
        """
        while self.staged + self._largest > self.budget or self.staged_batches >= MOST:
            victim = self._victim()
            if victim is None:
                return starving and not self._awaited(name)
            self._forget(victim)
            dropped.append(Drop(victim))
        return True

    def _victim(self) -> Name | None:
        """What can best be done without: what no one has asked for, and of that what comes last."""
        spare: list[tuple[int, int, int, Name]] = []
        for name, batch in self._batches.items():
            if batch.status != "staged" or batch.holders or batch.seekers:
                continue
            needing = [one for one in self.members.values() if one.needs(name)]
            if any(one.lag == "wait" for one in needing):
                continue
            # What is needed soonest is the last to go.
            soonest = min((one.turn(name) - one.done for one in needing), default=1 << 60)
            spare.append((-soonest, -name.epoch, -name.number, name))
        return min(spare)[3] if spare else None

    def _awaited(self, name: Name) -> bool:
        """Whether somebody who is to be waited for has yet to take what comes before this batch."""
        return any(
            member.lag == "wait" and member.needs(before)
            for before, batch in self._batches.items()
            if batch.status == "staged" and before.part == name.part
            for member in self.members.values()
            if (before.epoch, member.turn(before)) < (name.epoch, member.turn(name))
        )

    def _settle(self, now: float, name: Name | None = None) -> list[Decision]:
        """Give what can be given, and drop what nobody needs: ``name``, or any if it is none."""
        made: list[Decision] = []
        for number, member in self.members.items():
            made += self._give(number, member)
        was, self._gathering = self._gathering, now < self._gather
        # One by one: there may be hundreds that a laggard has still to come to.
        every = name is None or (was and not self._gathering)
        for one in list(self._batches) if every or name is None else [name]:
            batch = self._batches.get(one)
            if batch is None or batch.seekers or batch.holders or batch.status == "preparing":
                continue
            if batch.status == "wanted":
                del self._batches[one], self._open[one]
            elif not self._kept(one):
                self._forget(one)
                made.append(Drop(one))
        return made

    def _kept(self, name: Name) -> bool:
        if any(member.needs(name) for member in self.members.values()):
            return True
        # For those that join a little later, while there is room.
        live = any(m.part == name.part and m.epoch == name.epoch for m in self.members.values())
        return self._gathering and live and self.staged <= min(GATHERED, self.budget // 2)

    def _give(self, number: int, member: Member) -> list[Decision]:
        made: list[Decision] = []
        while member.wants and len(member.untaken) < WINDOW:
            name = next(iter(member.wants))
            batch = self._batches[name]
            if batch.status != "staged":
                break
            del member.wants[name]
            batch.seekers.discard(number)
            batch.holders.add(number)
            member.held[name] = member.held.get(name, 0) + 1
            member.untaken[name] = None
            self.given_batches += 1
            made.append(Give(number, name))
        return made

    def _forget(self, name: Name) -> None:
        self._bytes -= self._batches.pop(name).nbytes
        self.staged_batches -= 1
        key = (name.part, name.epoch)
        self._gone[key] = max(self._gone.get(key, 0), name.number + 1)
        oldest = min((member.epoch for member in self.members.values()), default=name.epoch)
        for part, epoch in [one for one in self._gone if one[1] < oldest]:
            del self._gone[part, epoch]
