"""Verdicts on the batches of a member: samples lost and repeated, batches that differ, and the
longest wait. Pure functions of the members' logs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class BatchRecord(NamedTuple):
    """A batch that a member received: when, in which epoch, which samples, and a digest of its
    bytes."""

    at: float
    epoch: int
    indices: tuple[int, ...]
    digest: str


Reference = Mapping[int, Sequence[BatchRecord]]
"""The batches of an unshared loader, by epoch."""


@dataclass(frozen=True)
class Verdict:
    """Counts over all epochs of a member. ``different``: batches that an unshared loader does not
    deliver."""

    samples: int = 0
    lost: int = 0
    repeated: int = 0
    different: int = 0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.samples + other.samples,
            self.lost + other.lost,
            self.repeated + other.repeated,
            self.different + other.different,
        )

    @property
    def good(self) -> bool:
        return not (self.lost or self.repeated or self.different)


def judge(received: Sequence[BatchRecord], reference: Reference, *, ended: bool) -> Verdict:
    """Compare the batches of a member with those of an unshared loader.

    ``ended``: the member ended by itself, so it must have all epochs of the reference. A member
    that was cut off must have all batches up to that point.
    """
    by_epoch: dict[int, list[BatchRecord]] = {}
    for batch in received:
        by_epoch.setdefault(batch.epoch, []).append(batch)
    last = max(reference if ended else by_epoch, default=-1)
    verdict = Verdict()
    for epoch in range(last + 1):
        whole = ended or epoch < last
        verdict += _judge_epoch(by_epoch.pop(epoch, []), reference.get(epoch, []), whole=whole)
    for batches in by_epoch.values():  # of epochs that the member should not have
        verdict += _judge_epoch(batches, [], whole=True)
    return verdict


def _judge_epoch(
    received: Sequence[BatchRecord], reference: Sequence[BatchRecord], *, whole: bool
) -> Verdict:
    due = list(reference) if whole else _due_batches(received, reference)
    wanted = Counter(index for batch in due for index in batch.indices)
    given = Counter(index for batch in received for index in batch.indices)
    right = Counter(batch.digest for batch in due)
    return Verdict(
        samples=given.total(),
        lost=sum(1 for index in wanted if index not in given),
        repeated=sum(max(0, times - max(1, wanted[index])) for index, times in given.items()),
        different=(Counter(batch.digest for batch in received) - right).total(),
    )


def _due_batches(
    received: Sequence[BatchRecord], reference: Sequence[BatchRecord]
) -> list[BatchRecord]:
    """The batches that are due, as many as were received. An epoch may begin in the middle, so they
    are counted from the first batch received."""
    digests = [batch.digest for batch in reference]
    start = received[0].digest if received else ""
    first = digests.index(start) if start in digests else 0
    rotated = [*reference[first:], *reference[:first]]
    return rotated[: len(received)]


@dataclass(frozen=True)
class Wait:
    """Seconds between batches: the median before an event, and the longest after it."""

    usual: float
    longest: float

    @property
    def more(self) -> float:
        """Seconds by which the longest wait exceeds the usual one."""
        return max(0.0, self.longest - self.usual)


def longest_wait(received: Sequence[BatchRecord], since: float) -> Wait | None:
    """How long a member waited after the event at ``since``; ``None`` with too few batches."""
    times = [batch.at for batch in received]
    gaps = [(end, end - begin) for begin, end in pairwise(times)]
    before = [gap for end, gap in gaps if end <= since]
    after = [gap for end, gap in gaps if end > since]
    if not before or not after:
        return None
    return Wait(statistics.median(before), max(after))
