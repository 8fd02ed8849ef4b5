"""The speed of a loader: the difference of two of its snapshots, over the time between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.stats import CacheStats, StageStats, Stats
from penstock.watch.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class StopRate:
    """The speed and cost of one stop.

    ``seconds_per_sample`` is ``None`` if no sample passed the stop. ``share`` is its part of the
    work of all stops, 0 to 1.
    """

    name: str
    samples_per_second: float
    seconds_per_sample: float | None
    share: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Averages over an interval of ``seconds``.

    ``stall`` is the share of time in which the training loop waited, ``utilisation`` the share in
    which the workers worked. ``hits`` has the hit rate of each cache, ``None`` for a cache without
    lookups in the interval.
    """

    seconds: float
    samples_per_second: float
    batches_per_second: float
    bytes_read_per_second: float
    stall: float
    utilisation: float
    stops: tuple[StopRate, ...]
    hits: tuple[float | None, ...]


def between(before: Stats | None, after: Stats, still_waiting: float = 0.0) -> Rates:
    """Rates from ``before`` to ``after``; from the loader's first batch if ``before`` is ``None``.

    ``still_waiting``: seconds that the training loop has waited since ``after`` was taken.
    """
    if before is not None and _restarted(before, after):
        before = None
    seconds = after.elapsed - (before.elapsed if before else 0.0) + still_waiting
    wait = after.wait - (before.wait if before else 0.0) + still_waiting
    busy = after.pool.busy - (before.pool.busy if before else 0.0)
    worker_seconds = seconds * max(1, after.pool.workers)
    return Rates(
        seconds=seconds,
        samples_per_second=_ratio(after.samples - (before.samples if before else 0), seconds),
        batches_per_second=_ratio(after.batches - (before.batches if before else 0), seconds),
        bytes_read_per_second=_ratio(
            after.bytes_read - (before.bytes_read if before else 0), seconds
        ),
        stall=_share(wait, seconds),
        utilisation=_share(busy, worker_seconds),
        stops=_stops(before.stages if before else (), after.stages, seconds),
        hits=_hits(before.caches if before else (), after.caches),
    )


def rates(before: Snapshot | None, after: Snapshot, now: float) -> Rates:
    """Rates between two snapshots of one loader. A wait that goes on counts up to ``now``."""
    waited = 0.0 if after.waiting is None else max(0.0, now - after.waiting)
    return between(None if before is None else before.stats, after.stats, waited)


def distinct(names: Sequence[str]) -> list[str]:
    """The names with a number added to each repetition, so that no two are equal.

    >>> distinct(["source", "scale", "scale"])
    ['source', 'scale', 'scale 2']
    """
    unique: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in unique:
            number += 1
            candidate = f"{name} {number}"
        unique.append(candidate)
    return unique


def _restarted(before: Stats, after: Stats) -> bool:
    """Whether the counters began at zero again, as they may after loading a checkpoint."""
    return (
        after.elapsed < before.elapsed
        or after.samples < before.samples
        or [stage.name for stage in after.stages] != [stage.name for stage in before.stages]
        or len(after.caches) != len(before.caches)
    )


def _stops(
    before: tuple[StageStats, ...], after: tuple[StageStats, ...], seconds: float
) -> tuple[StopRate, ...]:
    earlier = before or tuple(StageStats(stage.name, 0, 0.0) for stage in after)
    changes = [
        (new.name, new.samples - old.samples, max(0.0, new.seconds - old.seconds))
        for old, new in zip(earlier, after, strict=True)
    ]
    work = sum(spent for _, _, spent in changes)
    return tuple(
        StopRate(
            name,
            _ratio(samples, seconds),
            spent / samples if samples > 0 else None,
            _share(spent, work),
        )
        for name, samples, spent in changes
    )


def _hits(
    before: tuple[CacheStats, ...], after: tuple[CacheStats, ...]
) -> tuple[float | None, ...]:
    earlier = [(cache.hits, cache.misses) for cache in before] or [(0, 0)] * len(after)
    hit_rates: list[float | None] = []
    for (hits, misses), new in zip(earlier, after, strict=True):
        lookups = new.hits - hits + new.misses - misses
        hit_rates.append(_share(new.hits - hits, lookups) if lookups > 0 else None)
    return tuple(hit_rates)


def _ratio(amount: float, seconds: float) -> float:
    return max(0.0, amount / seconds) if seconds > 0 else 0.0


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
