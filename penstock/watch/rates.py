"""How fast a loader is: the difference of two of its snapshots, over the time between them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.stats import CacheStats, StageStats, Stats
from penstock.watch.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class StopRate:
    """One stop: how many samples passed it a second, and what each cost there.

    ``share`` is its part of the work of all stops, 0 to 1; ``seconds_per_sample`` is ``None`` where
    no sample has passed.
    """

    name: str
    samples_per_second: float
    seconds_per_sample: float | None
    share: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened in the last ``seconds``.

    ``stall`` is the share of time in which the loop waited, ``utilisation`` the share in which the
    workers worked. ``hits`` has for each cache the share of samples that it had, or ``None`` where
    it was not asked.
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
    """What happened from one snapshot to the next; without one, since the loader began.

    ``still_waiting`` is for how long its loop has waited since the second.
    """
    if before is not None and _begun_anew(before, after):
        before = None
    seconds = after.elapsed - (before.elapsed if before else 0.0) + still_waiting
    wait = after.wait - (before.wait if before else 0.0) + still_waiting
    busy = after.pool.busy - (before.pool.busy if before else 0.0)
    room = seconds * max(1, after.pool.workers)
    return Rates(
        seconds=seconds,
        samples_per_second=_ratio(after.samples - (before.samples if before else 0), seconds),
        batches_per_second=_ratio(after.batches - (before.batches if before else 0), seconds),
        bytes_read_per_second=_ratio(
            after.bytes_read - (before.bytes_read if before else 0), seconds
        ),
        stall=_share(wait, seconds),
        utilisation=_share(busy, room),
        stops=_stops(before.stages if before else (), after.stages, seconds),
        hits=_hits(before.caches if before else (), after.caches),
    )


def rates(before: Snapshot | None, after: Snapshot, now: float) -> Rates:
    """The same of two snapshots of one loader, looked at ``now``."""
    waited = 0.0 if after.waiting is None else max(0.0, now - after.waiting)
    return between(None if before is None else before.stats, after.stats, waited)


def _begun_anew(before: Stats, after: Stats) -> bool:
    """A loader that took up a checkpoint may count from nothing again."""
    return (
        after.elapsed < before.elapsed
        or after.samples < before.samples
        or [one.name for one in after.stages] != [one.name for one in before.stages]
        or len(after.caches) != len(before.caches)
    )


def _stops(
    before: tuple[StageStats, ...], after: tuple[StageStats, ...], seconds: float
) -> tuple[StopRate, ...]:
    earlier = before or tuple(StageStats(one.name, 0, 0.0) for one in after)
    moved = [
        (new.name, new.samples - old.samples, max(0.0, new.seconds - old.seconds))
        for old, new in zip(earlier, after, strict=True)
    ]
    work = sum(spent for _, _, spent in moved)
    return tuple(
        StopRate(
            name,
            _ratio(samples, seconds),
            spent / samples if samples > 0 else None,
            _share(spent, work),
        )
        for name, samples, spent in moved
    )


def _hits(
    before: tuple[CacheStats, ...], after: tuple[CacheStats, ...]
) -> tuple[float | None, ...]:
    earlier = [(one.hits, one.misses) for one in before] or [(0, 0)] * len(after)
    found: list[float | None] = []
    for (hits, misses), new in zip(earlier, after, strict=True):
        asked = new.hits - hits + new.misses - misses
        found.append(_share(new.hits - hits, asked) if asked > 0 else None)
    return tuple(found)


def _ratio(much: float, seconds: float) -> float:
    return max(0.0, much / seconds) if seconds > 0 else 0.0


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
