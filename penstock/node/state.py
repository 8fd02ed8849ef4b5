"""Decides which batch a group prepares next, which members get it, and when it is dropped.

Pure: events in, decisions out. Members ask for batches in the order in which they will take them. A
batch is prepared once for all members that need it, given to each of them in the member's own
order, and kept until the last of them has taken it. A member that falls behind by more than the
budget has room for is *detached*: its next batches have been dropped, so it asks for them, and they
are prepared again. Preparing a batch again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

WINDOW = 2
"""Batches that a member is given before it takes them: one to take next, one on its way."""

MERGE = 64
"""A member at most this many batches behind another is helped to catch up: from then on one
preparation serves both."""

GATHER = 30.0
"""Seconds after a member has joined in which batches that all members have taken are kept: the jobs
of a search are started one after the other, and each loads its framework first."""

GATHERED, MOST = 256 << 20, 512
"""Bytes up to which batches are kept for that, and the most batches that are staged for any reason:
to search thousands of small batches would take longer than to prepare one again."""

Lag = Literal["detach", "wait"]


class BatchName(NamedTuple):
    """Identifies a batch for all members: ``part`` names a rank, ``digest`` the samples."""

    part: str
    epoch: int
    number: int
    digest: str


class Give(NamedTuple):
    """Send this batch to this member."""

    member: int
    name: BatchName


class Drop(NamedTuple):
    """Free the memory of this batch."""

    name: BatchName


class Fail(NamedTuple):
    """Report to this member that the batch could not be prepared."""

    member: int
    name: BatchName
    error: bytes


Decision = Give | Drop | Fail


@dataclass(slots=True)
class Member:
    """One job, or one rank of a job; or another machine whose jobs are in the same group.

    ``wants``: batches it has asked for and was not given yet, in its order. ``held``: batches it
    was given and has not released, and how many times it was given them. ``untaken``: those of them
    that its training loop has not taken yet. ``done``: batches taken of its epoch. ``served``: the
    last choice (see ``GroupState.choose``) that was for this member.

    ``remote``: it is another machine. It asks only for batches that this machine prepares for it,
    and gets them in any order. ``ahead``: of those it wants, how many batches its own members take
    before. ``had``: batches that it was given.
    """

    part: str
    lag: Lag
    wants: dict[BatchName, None] = field(default_factory=dict)
    held: dict[BatchName, int] = field(default_factory=dict)
    untaken: dict[BatchName, None] = field(default_factory=dict)
    epoch: int = 0
    first: int = 0
    length: int | None = None
    done: int = 0
    taken: int = 0
    served: int = 0
    remote: bool = False
    ahead: dict[BatchName, int] = field(default_factory=dict)
    had: set[BatchName] = field(default_factory=set)

    def needs(self, name: BatchName) -> bool:
        """Whether it has still to take this batch, in its epoch or a later one."""
        if name.part != self.part or name.epoch < self.epoch:
            return False
        return name.epoch > self.epoch or self.turn(name) >= self.done

    def turn(self, name: BatchName) -> int:
        """Position of this batch in its epoch, which may have begun in the middle."""
        if not self.length:
            return name.number
        return (name.number - self.first) % self.length


BatchStatus = Literal["wanted", "preparing", "staged"]


@dataclass(slots=True)
class _BatchRecord:
    status: BatchStatus = "wanted"
    nbytes: int = 0
    seekers: set[int] = field(default_factory=set)
    """Members that want the batch and were not given it yet."""
    holders: set[int] = field(default_factory=set)
    """Members that were given the batch and have not released it."""
    local: bool = False
    """Other machines get this batch elsewhere. It is not kept for them."""


class GroupState:
    """The batches and members of one group.

    ``budget``: bytes that staged batches may take. ``most_batches``: how many may be staged.
    """

    def __init__(self, budget: int, most_batches: int = MOST) -> None:
        self.budget = budget
        self.most_batches = most_batches
        self.members: dict[int, Member] = {}
        self.prepared_batches = 0
        self.received_batches = 0
        self.given_batches = 0
        self.staged_batches = 0
        self._batches: dict[BatchName, _BatchRecord] = {}
        self._open: dict[BatchName, None] = {}
        """Batches that are wanted, and whose preparation has not begun."""
        self._bytes = 0
        self._preparing = 0
        self._past_dropped: dict[tuple[str, int], int] = {}
        """By part and epoch: the number after the last batch that was dropped."""
        self._gather_until = float("-inf")
        self._gathering = False
        self._largest = 0
        self._choices = 0

    # Members.

    def join(self, member: int, part: str, lag: Lag, now: float, *, remote: bool = False) -> None:
        self.members[member] = Member(part, lag, remote=remote)
        self._gather_until = now + GATHER

    def leave(self, member: int, now: float) -> list[Decision]:
        """A member has left or died: drop the batches that were kept for it alone."""
        left = self.members.pop(member, None)
        if left is None:
            return []
        for name in [*left.wants, *left.held]:
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
        """A member begins an epoch. Returns the number of the first batch, and decisions.

        ``first``: the first batch, for a member that goes on with an epoch of which it has taken
        ``done`` batches. If it is ``None``, it is chosen so that the member goes along with others.
        """
        beginner = self.members[member]
        if first is None:
            first = self._live_batch(member, epoch, length)
        beginner.epoch, beginner.first, beginner.length, beginner.done = epoch, first, length, done
        return first, self._settle(now)

    def _live_batch(self, member: int, epoch: int, length: int | None) -> int:
        """The batch after the last dropped one of the epoch; 0 if no other member is in it."""
        part = self.members[member].part
        first = self._past_dropped.get((part, epoch), 0)
        live = self.is_live(part, epoch, beside=member)
        return first if live and length is not None and first < length else 0

    def is_live(self, part: str, epoch: int, beside: int | None = None) -> bool:
        """Whether a member is in this epoch, other than ``beside``."""
        others = (other for number, other in self.members.items() if number != beside)
        return any(other.part == part and other.epoch == epoch for other in others)

    def reached(self, part: str, epoch: int) -> int:
        """The batch after the last dropped one of the epoch; 0 if no member of this machine is in
        it."""
        here = (member for member in self.members.values() if not member.remote)
        live = any(member.part == part and member.epoch == epoch for member in here)
        return self._past_dropped.get((part, epoch), 0) if live else 0

    # Messages from members.

    def want(self, member: int, name: BatchName, now: float, ahead: int = 0) -> list[Decision]:
        """A member will take this batch, after those it has asked for before.

        ``ahead``: for another machine, see ``Member.ahead``.
        """
        self.members[member].wants[name] = None
        if self.members[member].remote:
            self.members[member].ahead[name] = ahead
        if name not in self._batches:
            self._batches[name] = _BatchRecord()
            self._open[name] = None
        self._batches[name].seekers.add(member)
        return self._settle(now, name)

    def withdraw(self, member: int, name: BatchName, now: float) -> list[Decision]:
        """A member does not want this batch any more."""
        self.members[member].wants.pop(name, None)
        self.members[member].ahead.pop(name, None)
        if name in self._batches:
            self._batches[name].seekers.discard(member)
        return self._settle(now, name)

    def rewind(self, member: int, now: float) -> list[Decision]:
        """A member withdraws all batches it has asked for."""
        rewound = self.members[member]
        for name in rewound.wants:
            self._batches[name].seekers.discard(member)
        rewound.wants.clear()
        rewound.untaken.clear()
        return self._settle(now)

    def took(self, member: int, name: BatchName, now: float) -> list[Decision]:
        """The training loop of a member has taken this batch."""
        taker = self.members[member]
        taker.untaken.pop(name, None)
        taker.taken += 1
        if name.epoch == taker.epoch:
            taker.done = max(taker.done, taker.turn(name) + 1)
        return self._settle(now, name)

    def released(self, member: int, name: BatchName, now: float) -> list[Decision]:
        """A member no longer uses this batch."""
        holder = self.members[member]
        left = holder.held.get(name, 0) - 1
        if left > 0:
            holder.held[name] = left
            return []
        holder.held.pop(name, None)
        if name in self._batches:
            self._batches[name].holders.discard(member)
        return self._settle(now, name)

    def tick(self, now: float) -> list[Decision]:
        """Time has passed."""
        return self._settle(now)

    # Preparing.

    def choose(
        self, now: float, fits: Callable[[BatchName], bool] | None = None
    ) -> tuple[BatchName | None, list[Decision]]:
        """Choose the batch to prepare next, and which batches to drop for it.

        ``fits``: only a batch for which this is true.
        """
        urgencies = [
            (urgency, name)
            for name in self._open
            if (fits is None or fits(name)) and (urgency := self._urgency(name)) is not None
        ]
        dropped: list[Decision] = []
        for urgency, name in sorted(urgencies):
            # If there is no room for this batch, there may still be room for a less urgent one.
            if self._make_room(name, dropped, starving=urgency[:2] == (0, 0)):
                batch = self._batches[name]
                batch.status = "preparing"
                del self._open[name]
                self._preparing += 1
                self._choices += 1
                for member in batch.seekers:
                    self.members[member].served = self._choices
                return name, dropped
        return None, dropped

    def prepared(
        self,
        name: BatchName,
        nbytes: int,
        now: float,
        *,
        received: bool = False,
        local: bool = False,
    ) -> list[Decision]:
        """A batch is ready: it was prepared here, or ``received`` from another machine.

        ``local``: other machines get it elsewhere.
        """
        batch = self._batches[name]
        batch.status, batch.nbytes, batch.local = "staged", nbytes, local
        self._preparing -= 1
        self._bytes += nbytes
        self.staged_batches += 1
        self._largest = max(self._largest, nbytes)
        if received:
            self.received_batches += 1
        else:
            self.prepared_batches += 1
        return self._settle(now, name)

    def failed(self, name: BatchName, error: bytes, now: float) -> list[Decision]:
        """A batch cannot be prepared. Members that want it get the error, and may ask again."""
        batch = self._batches.pop(name)
        self._preparing -= 1
        decisions: list[Decision] = []
        for member in sorted(batch.seekers):
            self.members[member].wants.pop(name, None)
            self.members[member].ahead.pop(name, None)
            decisions.append(Fail(member, name, error))
        return decisions + self._settle(now, name)

    def interrupted(self, name: BatchName) -> bool:
        """The preparation of a batch has ended without a result.

        Returns whether a member still wants it. It is then open, to be prepared again.
        """
        batch = self._batches[name]
        self._preparing -= 1
        if not batch.seekers:
            del self._batches[name]
            return False
        batch.status = "wanted"
        self._open[name] = None
        return True

    # Queries.

    def is_starving(self) -> bool:
        """Whether a member has no batch to take, and nothing but workers is missing for its next.

        A batch that waits for a member with ``lag="wait"`` needs that member, not workers.
        """
        for member in self.members.values():
            name = next(iter(member.wants), None)
            if name is None or member.untaken or member.remote:
                continue
            if self._batches[name].status == "preparing" or not self.waits_for(name):
                return True
        return False

    def next_wanted(self, member: int) -> tuple[BatchName, BatchStatus] | None:
        """The batch that a member waits for, and its status; ``None`` if it wants none."""
        name = next(iter(self.members[member].wants), None)
        return None if name is None else (name, self._batches[name].status)

    def waits_for(self, name: BatchName) -> list[int]:
        """Members with ``lag="wait"`` that must take other batches before this one has room."""
        if not self._is_full() or self._victim() is not None:
            return []
        return self._waited_for(name)

    def is_open(self, name: BatchName) -> bool:
        """Whether a batch is wanted and its preparation has not begun."""
        return name in self._open

    def open_batches(self) -> Sequence[BatchName]:
        """The batches that are wanted and whose preparation has not begun."""
        return list(self._open)

    def is_preparing(self, name: BatchName) -> bool:
        """Whether a batch is being prepared, here or on another machine."""
        batch = self._batches.get(name)
        return batch is not None and batch.status == "preparing"

    def batches_before(self, name: BatchName) -> int:
        """How many batches the member that needs this one soonest takes before it."""
        counts = [
            len(member.untaken) + list(member.wants).index(name)
            for number in self._batches[name].seekers
            if not (member := self.members[number]).remote
        ]
        return min(counts, default=0)

    def slowest(self, part: str) -> Member | None:
        """The member of this part on this machine that is furthest behind."""
        mine = [one for one in self.members.values() if one.part == part and not one.remote]
        return min(mine, key=lambda one: (one.epoch, one.done), default=None)

    @property
    def staged(self) -> int:
        """Bytes of staged batches, and an estimate for those that are being prepared."""
        return self._bytes + self._preparing * self._largest

    def lead(self, member: int) -> int:
        """Number of batches the member can take one after the other without waiting."""
        leading = self.members[member]
        count = len(leading.untaken)
        for name in leading.wants:
            if self._batches[name].status != "staged":
                break
            count += 1
        return count

    # Deciding.

    def _urgency(self, name: BatchName) -> tuple[int, int, int, int, BatchName] | None:
        """Sort key of a batch, smallest first; ``None`` if no member wants it.

        First come batches of the member with the fewest batches ready; then those of a member that
        is catching up, because one preparation will soon serve it and another; then those of the
        member that was served longest ago.
        """
        smallest = None
        for number in self._batches[name].seekers:
            member = self.members[number]
            if member.remote:
                # Never as urgent as a member here that has nothing to take: the other machine
                # prepares what comes too late.
                key = (member.ahead[name] + 1, member.ahead[name], 0, member.served, name)
                smallest = key if smallest is None else min(smallest, key)
                continue
            # Batches that it takes before this one, ready or not.
            ahead = len(member.untaken) + list(member.wants).index(name)
            key = (self.lead(number), ahead, -self._catching_up(member), member.served, name)
            smallest = key if smallest is None else min(smallest, key)
        return smallest

    def _catching_up(self, member: Member) -> bool:
        """Whether it is so little behind another that helping it saves the rest of its epoch."""
        if not member.length:
            return False
        at = (member.first + member.done) % member.length
        for other in self.members.values():
            if other is member or (other.part, other.epoch) != (member.part, member.epoch):
                continue
            if other.length == member.length:
                other_at = (other.first + other.done) % member.length
                behind = (other_at - at) % member.length
                # Only batches that the other has taken and this member has still to take count.
                if 0 < behind <= min(MERGE, other.done, member.length - member.done):
                    return True
        return False

    def _make_room(self, name: BatchName, dropped: list[Decision], *, starving: bool) -> bool:
        """Make room for this batch by dropping others; false if it has to wait for room.

        ``starving``: a member has no batch at all to take before this one. It waits for room only
        if a member with ``lag="wait"`` has still to take an earlier batch.
        """
        while self._is_full():
            victim = self._victim()
            if victim is None:
                return starving and not self._waited_for(name)
            self._forget(victim)
            dropped.append(Drop(victim))
        return True

    def _victim(self) -> BatchName | None:
        """The batch to drop: of those that no member has asked for, the one needed last."""
        spare: list[tuple[int, int, int, BatchName]] = []
        for name, batch in self._batches.items():
            if batch.status != "staged" or batch.holders or batch.seekers:
                continue
            needing = [one for one in self.members.values() if self._is_needed(name, one)]
            if any(member.lag == "wait" for member in needing):
                continue
            soonest = min((member.turn(name) - member.done for member in needing), default=1 << 60)
            spare.append((-soonest, -name.epoch, -name.number, name))
        return min(spare)[3] if spare else None

    def _is_full(self) -> bool:
        batches = self.staged_batches + self._preparing
        return self.staged + self._largest > self.budget or batches >= self.most_batches

    def _waited_for(self, name: BatchName) -> list[int]:
        """Members with ``lag="wait"`` that have still to take a batch before this one."""
        found = {
            number
            for earlier, batch in self._batches.items()
            if batch.status == "staged" and earlier.part == name.part
            for number, member in self.members.items()
            if member.lag == "wait"
            and member.needs(earlier)
            and (earlier.epoch, member.turn(earlier)) < (name.epoch, member.turn(name))
        }
        return sorted(found)

    def _settle(self, now: float, changed: BatchName | None = None) -> list[Decision]:
        """Give members the batches that are ready, and drop batches that are not needed.

        ``changed``: the only batch that may have to be dropped; ``None`` if any may.
        """
        decisions: list[Decision] = []
        for number, member in self.members.items():
            decisions += self._give(number, member)
        was, self._gathering = self._gathering, now < self._gather_until
        # As a rule one batch only: hundreds may be kept for a member that is far behind.
        every = changed is None or (was and not self._gathering)
        for name in list(self._batches) if every or changed is None else [changed]:
            batch = self._batches.get(name)
            if batch is None or batch.seekers or batch.holders or batch.status == "preparing":
                continue
            if batch.status == "wanted":
                del self._batches[name], self._open[name]
            elif not self._kept(name):
                self._forget(name)
                decisions.append(Drop(name))
        return decisions

    def _kept(self, name: BatchName) -> bool:
        if any(self._is_needed(name, member) for member in self.members.values()):
            return True
        # Kept for members that join a little later, while there is room.
        live = any(m.part == name.part and m.epoch == name.epoch for m in self.members.values())
        return self._gathering and live and self.staged <= min(GATHERED, self.budget // 2)

    def _is_needed(self, name: BatchName, member: Member) -> bool:
        """Whether a member has still to take this batch, from this machine."""
        if member.remote and (self._batches[name].local or name in member.had):
            return False
        return member.needs(name)

    def _give(self, number: int, member: Member) -> list[Decision]:
        decisions: list[Decision] = []
        if member.remote:
            return self._give_remote(number, member)
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
            decisions.append(Give(number, name))
        return decisions

    def _give_remote(self, number: int, member: Member) -> list[Decision]:
        decisions: list[Decision] = []
        for name in list(member.wants):
            batch = self._batches[name]
            if batch.status == "staged":
                del member.wants[name]
                member.ahead.pop(name, None)
                batch.seekers.discard(number)
                batch.holders.add(number)
                member.held[name] = member.held.get(name, 0) + 1
                member.had.add(name)
                decisions.append(Give(number, name))
        return decisions

    def _forget(self, name: BatchName) -> None:
        for member in self.members.values():
            member.had.discard(name)
        self._bytes -= self._batches.pop(name).nbytes
        self.staged_batches -= 1
        key = (name.part, name.epoch)
        self._past_dropped[key] = max(self._past_dropped.get(key, 0), name.number + 1)
        oldest = min((member.epoch for member in self.members.values()), default=name.epoch)
        for part, epoch in [old for old in self._past_dropped if old[1] < oldest]:
            del self._past_dropped[part, epoch]
