"""Decides when a request is repeated, and which objects are fetched next: pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator

TRIES, LONGEST = 8, 120.0
"""Requests for one object, and seconds from the first to the last, before the error is reported.
Stores that limit the rate of requests, or are restarted, answer again within a minute."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before the second request; each later pause is twice as long, up to the longest."""


def pause_before(attempt: int, elapsed: float, chance: float) -> float | None:
    """Seconds to wait before request number ``attempt`` (from 1), or ``None``: give up.

    ``elapsed``: seconds since the first request. ``chance``: a random number in [0, 1), so that
    many clients do not come back at the same moment.

    >>> pause_before(2, 0.0, 0.0), pause_before(TRIES, 1.0, 0.0)
    (0.1, None)
    """
    longest = min(FIRST_PAUSE * 2.0 ** (attempt - 1), LONGEST_PAUSE)
    pause = longest * (0.5 + chance / 2)
    if attempt >= TRIES or elapsed + pause > LONGEST:
        return None
    return pause


class Hedging:
    """When a second request is made for an object that is late. The first answer counts.

    A request is late if it takes twice as long as 95 of 100 recent ones. At most ``SHARE`` of all
    requests are repeated, so that a store that is slow as a whole is not asked twice for all.

    >>> hedging = Hedging()
    >>> hedging.delay() is None
    True
    >>> for _ in range(Hedging.FEWEST):
    ...     hedging.record(0.1)
    >>> hedging.delay(), hedging.may_repeat()
    (0.2, True)
    """

    RECENT, FEWEST = 256, 32
    SHARE = 0.05
    SHORTEST = 0.02

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._requests = 0
        self.repeated = 0
        self._delay: float | None = None

    def record(self, seconds: float) -> None:
        """Note how long a request took that was answered."""
        self._recent.append(seconds)
        self._requests += 1
        if self._requests % self.FEWEST == 0:
            ordered = sorted(self._recent)
            self._delay = max(self.SHORTEST, 2.0 * ordered[(len(ordered) * 95) // 100])

    def delay(self) -> float | None:
        """Seconds after which a request is late; ``None`` as long as too few were measured."""
        return self._delay

    def may_repeat(self) -> bool:
        """Whether one more request may be repeated. If so, it is counted."""
        if self.repeated >= self.SHARE * self._requests:
            return False
        self.repeated += 1
        return True


class InFlightLimit:
    """How many bytes may be on their way at once: about as few as keep the link busy.

    All requests share the link. More bytes than it needs only wait for each other, and what a batch
    waits for waits with them. So there are ``first`` bytes at the start, and twice as many as long
    as bytes then arrive faster. Now and then it is tried again whether twice as many are faster, or
    half as many as fast. A trial is a round: the time in which that many bytes arrive.

    >>> flow = InFlightLimit(first=100)
    >>> for second in range(100):  # 100 bytes a second, however many are on their way
    ...     flow.full()
    ...     flow.arrived(100, second, flow.limit)
    >>> flow.limit
    100
    """

    FASTER, AS_FAST = 1.1, 0.9
    """The rate from which on twice as many bytes are kept, or half as many, relative to before."""

    SHORTEST = 0.05
    """Seconds of a round, at least: what takes less is not measured well."""

    EVERY = 8
    """Rounds from one trial to the next."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.restart()

    def restart(self) -> None:
        """Begin with few bytes again: a loader begins."""
        self.limit = self._before = self._first
        self._trying = False
        self._rate = self._refused = 0.0
        self._rounds_left = 1
        self._more_next = True
        self._begin_round(0)

    def _begin_round(self, earlier: int) -> None:
        """``earlier``: bytes that were on their way already."""
        self._earlier = earlier
        self._since: float | None = None
        self._bytes = 0
        self._full = False

    def full(self) -> None:
        """More bytes would be on their way if they were allowed."""
        self._full = True

    def arrived(self, nbytes: int, now: float, flying: int) -> None:
        """Bytes have arrived, and ``flying`` bytes are still on their way."""
        if self._earlier > 0:
            self._earlier -= nbytes
        elif self._since is None:
            self._since = now
        else:
            self._bytes += nbytes
            seconds = now - self._since
            if self._bytes >= self.limit and seconds >= self.SHORTEST:
                if self._trying:
                    self._judge(self._bytes / seconds)
                elif self._full:
                    self._settled(self._bytes / seconds)
                self._begin_round(flying)

    def _judge(self, rate: float) -> None:
        """Keep what was tried, or not."""
        self._trying = False
        more = self.limit > self._before
        if rate < self._rate * (self.FASTER if more else self.AS_FAST):
            self.limit = self._before
            self._refused = rate if more else 0.0
            return
        self._rate = rate
        if more:
            self._try(2 * self.limit)

    def _settled(self, rate: float) -> None:
        self._rate = rate
        self._rounds_left -= 1
        if self._refused > rate * self.FASTER:  # it was compared with a rate that was too high
            self._rounds_left, self._more_next = 0, True
        self._refused = 0.0
        if self._rounds_left <= 0:
            self._rounds_left = self.EVERY
            less = not self._more_next and self.limit > self._first
            self._more_next = not self._more_next
            self._try(max(self._first, self.limit // 2) if less else 2 * self.limit)

    def _try(self, limit: int) -> None:
        self._trying = True
        self._before, self.limit = self.limit, limit


class Window:
    """Which objects are fetched ahead of the need for them, in the order in which they are needed.

    Objects, or ranges of them, are known by numbers of the caller. At most ``requests`` are on
    their way at once, and what was fetched and not taken yet is at most ``budget`` bytes, or one
    object. ``first``: bytes that are on their way at the start, see ``InFlightLimit``.

    >>> window = Window(budget=100, requests=2)
    >>> window.expect([(1, 60), (2, 30), (3, 30)])
    >>> window.start(), window.start(), window.start()
    (1, 2, None)
    >>> window.arrived(1, now=0.1), window.taken(1), window.start()
    (None, None, 3)
    """

    def __init__(self, budget: int, requests: int, first: int = 8 << 20) -> None:
        self._budget = budget
        self._requests = requests
        self._flow = InFlightLimit(first)
        self._waiting: OrderedDict[int, int] = OrderedDict()
        self._held: dict[int, int] = {}
        self._flying: dict[int, int] = {}
        """By the number of its first object: the bytes of each request that is on its way."""
        self._bytes = self._bytes_flying = 0

    def expect(self, objects: Iterable[tuple[int, int]]) -> None:
        """These objects, with their sizes, will be needed after those announced before."""
        for number, size in objects:
            if number not in self._held:
                self._waiting.setdefault(number, size)

    def start(self) -> int | None:
        """The object to fetch next; ``None`` if there is none, or no room for it."""
        if not self._waiting or len(self._flying) >= self._requests:
            return None
        number, size = next(iter(self._waiting.items()))
        if self._bytes and self._bytes + size > self._budget:
            return None
        if self._flying and not self._is_open(size):
            return None
        self._begin(number, size)
        return number

    def _is_open(self, size: int) -> bool:
        if self._bytes_flying + size <= self._flow.limit:
            return True
        self._flow.full()
        return False

    def restart(self) -> None:
        """Begin with few bytes on their way again: a loader begins."""
        self._flow.restart()

    def waits(self, number: int) -> bool:
        """Whether an object was announced and is not fetched yet."""
        return number in self._waiting

    def demand(self, number: int, size: int) -> bool:
        """An object is needed now. Returns whether the caller must fetch it: nobody does yet."""
        if number in self._held:
            return False
        self._begin(number, size)
        return True

    def _begin(self, number: int, size: int) -> None:
        self._waiting.pop(number, None)
        self._held[number] = size
        self._flying[number] = size
        self._bytes += size
        self._bytes_flying += size

    def join(self, number: int, size: int, to: int, *, now: bool = False) -> bool:
        """Fetch an object with the request for the object ``to``. Returns whether it may be.

        ``now``: it is needed now. Otherwise it must wait for its turn, and fit into the budget.
        """
        if number in self._held:
            return False
        if not now and (number not in self._waiting or self._bytes + size > self._budget):
            return False
        if not now and not self._is_open(size):
            return False
        self._waiting.pop(number, None)
        self._held[number] = size
        self._flying[to] += size
        self._bytes += size
        self._bytes_flying += size
        return True

    def allow(self, budget: int) -> None:
        """Hold up to this number of bytes from now on."""
        self._budget = budget

    def arrived(self, number: int, now: float) -> None:
        """The request for an object has ended."""
        size = self._land(number)
        self._flow.arrived(size, now, self._bytes_flying)

    def _land(self, number: int) -> int:
        size = self._flying.pop(number, 0)
        self._bytes_flying -= size
        return size

    def surplus(self) -> Iterator[int]:
        """What has been held longest, while that is more than the budget and nothing is under way.

        Objects are mostly taken in their order. One that was announced and is never taken would
        hold its part of the budget for ever.
        """
        for number in list(self._held):
            if self._bytes <= self._budget:
                return
            if number not in self._flying:
                yield number

    def taken(self, number: int) -> None:
        """An object was handed over, or given up: it takes no more room."""
        self._waiting.pop(number, None)
        self._bytes -= self._held.pop(number, 0)
        self._land(number)

    @property
    def bytes_held(self) -> int:
        """Bytes of objects that are on their way or were not taken yet."""
        return self._bytes


class Neighbours:
    """Ranges of objects that wait to be fetched, so that ranges side by side become one request.

    >>> ranges = Neighbours(gap=10, longest=100)
    >>> for number, start in enumerate([0, 35, 70, 500]):
    ...     ranges.add(number, "a", start, start + 30)
    >>> list(ranges.beside(1))
    [2, 0]
    """

    MOST = 64
    """Ranges on either side of one that are looked at."""

    def __init__(self, gap: int, longest: int) -> None:
        self._gap, self._longest = gap, longest
        self._places: dict[int, tuple[Hashable, int, int]] = {}
        self._objects: dict[Hashable, list[tuple[int, int, int]]] = {}

    def add(self, number: int, name: Hashable, start: int, end: int) -> None:
        """A range of the object ``name`` waits."""
        if number not in self._places:
            self._places[number] = (name, start, end)
            insort(self._objects.setdefault(name, []), (start, end, number))

    def remove(self, number: int) -> None:
        """A range does not wait any more."""
        found = self._places.pop(number, None)
        if found is None:
            return
        name, start, end = found
        ranges = self._objects[name]
        del ranges[bisect_left(ranges, (start, end, number))]
        if not ranges:
            del self._objects[name]

    def beside(self, number: int) -> Iterator[int]:
        """The ranges after and before this one with small gaps between, up to a total length."""
        if number not in self._places:
            return
        name, start, end = self._places[number]
        ranges = self._objects[name]
        place = bisect_left(ranges, (start, end, number))
        after = ranges[place + 1 : place + 1 + self.MOST]
        before = ranges[max(0, place - self.MOST) : place]
        for first, last, other in after:
            if first > end + self._gap or max(end, last) - start > self._longest:
                break
            end = max(end, last)
            yield other
        for first, last, other in reversed(before):
            if last + self._gap < start or end - first > self._longest:
                break
            start = first
            yield other
