"""Decides when a request is repeated, and which objects are fetched next: pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

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


class Window:
    """Which objects are fetched ahead of the need for them, in the order in which they are needed.

    Objects are known by numbers of the caller. At most ``requests`` are on their way at once, and
    what was fetched and not taken yet is at most ``budget`` bytes, or one object.

    >>> window = Window(budget=100, requests=2)
    >>> window.expect([(1, 60), (2, 30), (3, 30)])
    >>> window.start(), window.start(), window.start()
    (1, 2, None)
    >>> window.arrived(1), window.taken(1), window.start()
    (None, None, 3)
    """

    def __init__(self, budget: int, requests: int) -> None:
        self._budget = budget
        self._requests = requests
        self._waiting: OrderedDict[int, int] = OrderedDict()
        self._held: dict[int, int] = {}
        self._flying: set[int] = set()
        self._bytes = 0

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
        self._begin(number, size)
        return number

    def demand(self, number: int, size: int) -> bool:
        """An object is needed now. Returns whether the caller must fetch it: nobody does yet."""
        if number in self._held:
            return False
        self._begin(number, size)
        return True

    def _begin(self, number: int, size: int) -> None:
        self._waiting.pop(number, None)
        self._held[number] = size
        self._flying.add(number)
        self._bytes += size

    def arrived(self, number: int) -> None:
        """The request for an object has ended."""
        self._flying.discard(number)

    def taken(self, number: int) -> None:
        """An object was handed over, or given up: it takes no more room."""
        self._bytes -= self._held.pop(number, 0)
        self._flying.discard(number)

    def forget(self) -> list[int]:
        """Expect nothing any more. Returns what was fetched and is not needed."""
        self._waiting.clear()
        return list(self._held)

    @property
    def bytes_held(self) -> int:
        """Bytes of objects that are on their way or were not taken yet."""
        return self._bytes
