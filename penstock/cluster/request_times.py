"""How long other machines take to answer requests: counts by machine, and frozen copies of them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the counted intervals, in seconds. A request in a local network takes about a
millisecond, and one that takes longer than 1 s is read from storage instead."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The requests to one machine.

    ``requests`` were answered, ``failed`` were not. ``seconds``: from the request to its first
    answer, over all answered requests. ``times[i]``: those that took at most ``BOUNDS[i]``, and
    longer than the bound before; the last one counts those above all bounds.
    """

    requests: int = 0
    failed: int = 0
    seconds: float = 0.0
    times: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _RequestCounts:
    requests: int = 0
    failed: int = 0
    seconds: float = 0.0
    times: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))


class RequestTimes:
    """Counts requests by machine. Several threads may use it at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, _RequestCounts] = {}

    def timed(self, machine: str, answers: Iterator[T]) -> Iterator[T]:
        """The answers of a request that begins now. A request that raises has failed.

        >>> moments = iter([0.0, 0.004])
        >>> times = RequestTimes(lambda: next(moments))
        >>> list(times.timed("b", iter("xy"))), times.of("b").seconds
        (['x', 'y'], 0.004)
        """
        began = self._clock()
        waits = True
        try:
            for answer in answers:
                if waits:
                    self._answered(machine, self._clock() - began)
                    waits = False
                yield answer
        except Exception:
            with self._lock:
                self._of(machine).failed += 1
            raise

    def of(self, machine: str) -> RequestStats:
        with self._lock:
            counts = self._counts.get(machine)
            if counts is None:
                return RequestStats()
            return RequestStats(counts.requests, counts.failed, counts.seconds, tuple(counts.times))

    def _answered(self, machine: str, seconds: float) -> None:
        with self._lock:
            counts = self._of(machine)
            counts.requests += 1
            counts.seconds += seconds
            counts.times[bisect_left(BOUNDS, seconds)] += 1

    def _of(self, machine: str) -> _RequestCounts:
        return self._counts.setdefault(machine, _RequestCounts())


def quantile(times: Sequence[int], share: float) -> float | None:
    """Seconds within which this share of requests was answered; ``None`` without requests.

    ``times`` are counts by interval, as in ``RequestStats``. Within an interval the result is
    interpolated, and above all bounds it is the last bound.

    >>> quantile([0, 4] + [0] * 11, 0.5)
    0.0015
    >>> quantile([0] * 13, 0.5) is None
    True
    """
    total = sum(times)
    if not total:
        return None
    wanted, passed = share * total, 0
    for number, (count, above) in enumerate(zip(times, BOUNDS, strict=False)):
        if count and passed + count >= wanted:
            below = BOUNDS[number - 1] if number else 0.0
            return below + (above - below) * (wanted - passed) / count
        passed += count
    return BOUNDS[-1]
