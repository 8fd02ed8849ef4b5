"""Decides which tiny-batches other machines prepare: pure, events in and decisions out.

A machine that lends its cores is first given a rehearsal: samples whose rows are thrown away. It
starts its workers for them, and shows how fast it is. Then it gets calls: tiny-batches that are
long enough to hide the way there and back, a few at a time. A machine that fails, or is late, gets
no more for a while, and begins with a rehearsal again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock.config import cluster_patience

CALLS = 3
"""Calls to one machine at the same time: one that it works on, one that waits there, and one that
is on its way."""

CALL_SECONDS = 0.1
"""The least time that the workers of the other machine should have to work on a call."""

HIDING = 2.0
"""A call should take this many times as long as the way there and back, so that the calls that wait
there last until the next one comes."""

CREDIT = 64 << 20
"""Bytes of rows that one machine may owe at the same time."""

LARGEST_CALL = 16 << 20
"""Bytes of rows of one call. They come back in one message."""

LATE, LEAST_LATE, MOST_LATE = 4.0, 2.0 * cluster_patience(), 30.0 * cluster_patience()
"""A call is late after ``LATE`` times the time that it should take, but not before ``LEAST_LATE``
seconds, and after ``MOST_LATE`` in any case. Its samples are then prepared by others."""

REHEARSAL = 120.0
"""Seconds that a rehearsal may take: worker processes start, and may import much."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds in which a machine that has failed gets nothing. They double with each failure."""

PAYS = 1.5
"""A row must take another machine this many times the time that this machine spends on receiving
it. Otherwise this machine prepares it itself, with less work."""

NEEDED = 1.0
"""Seconds in which this machine must have had more to do than it can, before it asks others: their
workers take memory there."""

FAILED_SAMPLES = 3
"""Calls in a row with bad samples after which a machine is taken not to see the data."""

SETTLED = 8
"""Calls that a machine has answered before it is judged whether it pays."""

NEWEST = 0.3
"""The weight of the newest measurement in the averages."""

LenderState = Literal["new", "rehearses", "ready", "pauses", "lacks the pipeline", "does not pay"]
Failure = Literal["lost", "slow", "busy", "nonsense", "sample", "recipe", "late"]


class Lender(NamedTuple):
    """A machine that lends ``cores``. ``incarnation`` changes when its node is restarted."""

    name: str
    incarnation: int
    cores: int


class Call(NamedTuple):
    """Give this machine a tiny-batch of at most ``samples``. A rehearsal is for no batch."""

    number: int
    lender: str
    samples: int
    rehearsal: bool = False


class Measured(NamedTuple):
    """What was measured of a call that was answered.

    ``nbytes``: of its rows, and of samples of caches on both ways. ``busy``: seconds of work, added
    over the workers of the other machine. ``receiving``: CPU seconds that this machine has spent on
    it. ``idle``: cores that the other machine has left.
    """

    samples: int
    nbytes: int
    busy: float
    receiving: float
    idle: float


@dataclass(frozen=True, slots=True)
class LenderStats:
    """What another machine has prepared. ``calls``: tiny-batches; ``again``: those of its
    tiny-batches that others had to prepare again."""

    state: LenderState
    cores: int
    calls: int
    samples: int
    nbytes: int
    again: int
    rate: float
    reason: str


@dataclass(slots=True)
class _Sent:
    lender: _LenderRecord
    samples: int
    since: float
    deadline: float
    rehearsal: bool
    alone: bool
    """No other call was on its way to this machine."""


@dataclass(slots=True)
class _LenderRecord:
    """A machine as this one sees it.

    ``rate``: samples per second, 0 if unknown. ``trip``: seconds of a call that are not work.
    ``row_bytes``: of one sample. ``own_cost`` and ``their_cost``: seconds per sample for receiving
    and for preparing it.
    """

    name: str
    incarnation: int
    cores: int
    state: LenderState = "new"
    until: float = 0.0
    pause: float = FIRST_PAUSE
    rate: float = 0.0
    trip: float = 0.0
    row_bytes: float = 0.0
    own_cost: float = 0.0
    their_cost: float = 0.0
    idle: float = 1.0
    ended: float = 0.0
    """When its last answer came."""
    reason: str = ""
    answered: int = 0
    failed_samples: int = 0
    """Calls in a row whose samples could not be prepared there."""
    calls: int = 0
    samples: int = 0
    nbytes: int = 0
    again: int = 0
    sent: dict[int, _Sent] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        return sum(sent.samples for sent in self.sent.values())


class Lending:
    """The machines that lend their cores to one pipeline, and the calls that they have.

    >>> lending = Lending()
    >>> lending.machines([Lender("b", 1, 4)], now=0.0)
    []
    >>> lending.left(100, now=0.0)
    >>> rehearsal = lending.next_call(NEEDED)
    >>> rehearsal
    Call(number=1, lender='b', samples=4, rehearsal=True)
    >>> lending.sent(rehearsal, 4, 2.0)
    >>> lending.answered(1, Measured(4, 400, 0.4, 1e-4, 4.0), 2.2)
    >>> lending.next_call(2.2)
    Call(number=2, lender='b', samples=4, rehearsal=False)
    """

    def __init__(self) -> None:
        self._peers: dict[str, _LenderRecord] = {}
        self._gone: dict[str, _LenderRecord] = {}
        self._sent: dict[int, _Sent] = {}
        self._last = 0
        self._short_since: float | None = None
        """Since when the workers of this machine leave samples to others."""

    # Queries.

    @property
    def cores(self) -> int:
        """Cores of other machines that get calls at present."""
        return sum(peer.cores for peer in self._peers.values() if peer.state == "ready")

    def deadline(self, number: int) -> float | None:
        """When a call is late; ``None`` if it is not wanted any more."""
        sent = self._sent.get(number)
        return None if sent is None else sent.deadline

    def next_late(self, now: float) -> float | None:
        """Seconds until a call is late; ``None`` if there is none."""
        due = [sent.deadline for sent in self._sent.values()]
        return max(0.0, min(due) - now) if due else None

    def stats(self) -> Mapping[str, LenderStats]:
        """What each machine has prepared, also those that are gone."""
        return {
            peer.name: LenderStats(
                peer.state,
                peer.cores,
                peer.calls,
                peer.samples,
                peer.nbytes,
                peer.again,
                peer.rate,
                peer.reason,
            )
            for peer in {**self._gone, **self._peers}.values()
        }

    # Events.

    def machines(self, lenders: Iterable[Lender], now: float) -> list[int]:
        """The machines that lend cores have changed. Returns the calls of those that are gone."""
        named = {lender.name: lender for lender in lenders if lender.cores > 0}
        lost: list[int] = []
        for name, peer in list(self._peers.items()):
            lender = named.get(name)
            if lender is None or lender.incarnation != peer.incarnation:
                lost += list(peer.sent)
                self._gone[name] = self._peers.pop(name)
        for number in lost:
            self.failed(number, "lost", "it has left the cluster", now)
        for name, lender in named.items():
            known = self._peers.get(name)
            if known is not None:
                known.cores = lender.cores
                continue
            before = self._gone.pop(name, None)
            made = self._peers[name] = _LenderRecord(name, lender.incarnation, lender.cores)
            if before is not None:
                made.calls, made.samples = before.calls, before.samples
                made.nbytes, made.again = before.nbytes, before.again
        return lost

    def ways_changed(self) -> None:
        """There is another way to give pipelines to other machines."""
        for peer in self._peers.values():
            if peer.state == "lacks the pipeline":
                peer.state = "new"

    def left(self, samples: int, now: float) -> None:
        """The workers of this machine leave this many samples of the open batches to others."""
        if not samples:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now

    def next_call(self, now: float) -> Call | None:
        """The next call to make. Report it with ``sent``, if there are samples for it."""
        needed = self._short_since is not None and now - self._short_since >= NEEDED
        for peer in self._peers.values():
            if peer.state in _PAUSED and now >= peer.until:
                peer.state = "new"
            if peer.state == "new" and needed:
                return Call(self._last + 1, peer.name, max(1, peer.cores), rehearsal=True)
        able = [peer for peer in self._peers.values() if self._takes_calls(peer)]
        if not able:
            return None
        # The one that has work for the shortest time.
        peer = min(able, key=lambda peer: peer.in_flight / max(peer.rate, 1e-9))
        return Call(self._last + 1, peer.name, call_size(peer.rate, peer.trip, peer.row_bytes))

    def _takes_calls(self, peer: _LenderRecord) -> bool:
        # A machine whose own jobs use its cores gets one call at a time, to see when that ends.
        most = CALLS if peer.idle >= 1 else 1
        size = call_size(peer.rate, peer.trip, peer.row_bytes)
        owed = (peer.in_flight + size) * peer.row_bytes
        return peer.state == "ready" and len(peer.sent) < most and (not peer.sent or owed <= CREDIT)

    def sent(self, call: Call, samples: int, now: float) -> None:
        """A call is on its way, with this many samples."""
        peer = self._peers[call.lender]
        self._last = call.number
        if call.rehearsal:
            peer.state, limit = "rehearses", REHEARSAL
        else:
            should = (peer.in_flight + samples) / max(peer.rate, 1e-9) + peer.trip
            limit = min(MOST_LATE, max(LEAST_LATE, LATE * should))
        sent = _Sent(peer, samples, now, now + limit, call.rehearsal, not peer.sent)
        self._sent[call.number] = peer.sent[call.number] = sent

    def answered(self, number: int, found: Measured, now: float) -> None:
        """The rows of a call have arrived. Calls that were given up are ignored."""
        sent = self._sent.pop(number, None)
        if sent is None:
            return
        peer = sent.lender
        del peer.sent[number]
        took = max(1e-6, now - sent.since)
        # Calls that wait behind others last longer; the time between two answers shows the rate.
        worked = took if sent.alone else max(1e-6, now - max(peer.ended, sent.since))
        work = found.busy / max(1, peer.cores)
        trip = max(0.0, took - work) if sent.alone else peer.trip
        # A rehearsal starts workers, which says little about the trip and the rate.
        if sent.rehearsal:
            trip = min(trip, work)
            worked = max(1e-6, work + trip)
        peer.ended = now
        peer.rate = _average(peer.rate, found.samples / worked)
        peer.trip = _average(peer.trip, trip)
        peer.row_bytes = _average(peer.row_bytes, found.nbytes / found.samples)
        peer.own_cost = _average(peer.own_cost, found.receiving / found.samples)
        peer.their_cost = _average(peer.their_cost, found.busy / found.samples)
        peer.idle = found.idle
        peer.answered += 1
        if not sent.rehearsal:
            peer.calls += 1
            peer.samples += found.samples
            peer.nbytes += found.nbytes
            peer.pause = FIRST_PAUSE
        peer.state, peer.reason, peer.failed_samples = "ready", "", 0
        if peer.answered >= SETTLED and peer.their_cost < PAYS * peer.own_cost:
            peer.state, peer.until = "does not pay", now + LONGEST_PAUSE
            peer.answered = 0
            peer.reason = "receiving its rows takes longer than preparing them"

    def failed(self, number: int, failure: Failure, reason: str, now: float) -> bool:
        """A call has failed. Returns whether it was still wanted: its samples must be dealt again.

        ``sample``: samples could not be prepared there. They may be bad, so the machine is only
        paused if it happens with all its calls: it may not see the data.
        """
        sent = self._sent.pop(number, None)
        if sent is None:
            return False
        peer = sent.lender
        peer.sent.pop(number, None)
        peer.reason = reason
        if not sent.rehearsal:
            peer.again += 1
        if failure == "recipe":
            peer.state = "lacks the pipeline"
            return True
        if failure == "busy":
            peer.state, peer.until = "pauses", now + FIRST_PAUSE
            return True
        if failure == "sample" and not sent.rehearsal:
            peer.failed_samples += 1
            if peer.failed_samples < FAILED_SAMPLES:
                return True
        if peer.state != "lacks the pipeline":
            peer.state, peer.until = "pauses", now + peer.pause
            peer.pause = min(LONGEST_PAUSE, 2 * peer.pause)
        return True

    def late(self, now: float) -> list[int]:
        """Give up the calls that are late. Their samples must be dealt again."""
        numbers = [number for number, sent in self._sent.items() if now >= sent.deadline]
        for number in numbers:
            seconds = now - self._sent[number].since
            self.failed(number, "late", f"no answer after {seconds:.1f} s", now)
        return numbers

    def forget_calls(self) -> None:
        """The pool is closed: no call is wanted any more."""
        for peer in self._peers.values():
            peer.sent.clear()
            if peer.state == "rehearses":
                peer.state = "new"
        self._sent.clear()


_PAUSED = ("pauses", "does not pay")


def call_size(rate: float, trip: float, row_bytes: float) -> int:
    """Samples of a call to a machine with this rate (samples per second).

    >>> call_size(200.0, 0.002, 1e5), call_size(200.0, 0.2, 1e5), call_size(5000.0, 0.2, 1e5)
    (20, 80, 167)
    """
    seconds = max(CALL_SECONDS, HIDING * trip)
    most = LARGEST_CALL / max(1.0, row_bytes)
    return max(1, int(min(rate * seconds, most)))


def _average(before: float, new: float) -> float:
    return new if not before else before + NEWEST * (new - before)
