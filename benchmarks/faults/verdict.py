"""What a member's diary says: samples lost and repeated, batches that differ, and how long it
waited. Pure: diaries in, verdicts out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Batch(NamedTuple):
    """A batch as it was had: when, in which epoch, which samples, and a digest of all its bytes."""

    at: float
    epoch: int
    indices: tuple[int, ...]
    digest: str


Epochs = Mapping[int, Sequence[Batch]]
"""What a loader delivers that shares with nobody, by epoch."""


@dataclass(frozen=True)
class Verdict:
    """Over all epochs of a member; ``different`` batches are not to be had without sharing."""

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


def judged(had: Sequence[Batch], reference: Epochs, *, ended: bool) -> Verdict:
    """What a member had, against what it should have had.

    One that ``ended`` by itself has had its last epoch whole; of one that was cut off, all up to
    there is due.
    """
    by_epoch: dict[int, list[Batch]] = {}
    for batch in had:
        by_epoch.setdefault(batch.epoch, []).append(batch)
    last = max(by_epoch, default=-1)
    found = Verdict()
    for epoch in range(last + 1):
        whole = ended or epoch < last
        found += _epoch(by_epoch.get(epoch, []), reference[epoch], whole=whole)
    return found


def _epoch(had: Sequence[Batch], reference: Sequence[Batch], *, whole: bool) -> Verdict:
    due = list(reference) if whole else _turned(had, reference)
    wanted = Counter(index for batch in due for index in batch.indices)
    given = Counter(index for batch in had for index in batch.indices)
    right = Counter(batch.digest for batch in due)
    return Verdict(
        samples=given.total(),
        lost=sum(1 for index in wanted if index not in given),
        repeated=sum(max(0, times - max(1, wanted[index])) for index, times in given.items()),
        different=(Counter(batch.digest for batch in had) - right).total(),
    )


def _turned(had: Sequence[Batch], reference: Sequence[Batch]) -> list[Batch]:
    """As many batches as were had, from the first of them on: an epoch may begin in the middle."""
    digests = [batch.digest for batch in reference]
    first = digests.index(had[0].digest) if had and had[0].digest in digests else 0
    turned = [*reference[first:], *reference[:first]]
    return turned[: len(had)]


@dataclass(frozen=True)
class Wait:
    """Seconds from one batch to the next: what was usual, and the longest since something
    happened."""

    usual: float
    longest: float

    @property
    def more(self) -> float:
        return max(0.0, self.longest - self.usual)


def waited(had: Sequence[Batch], since: float) -> Wait | None:
    """How long a member waited; ``None`` where it had too little before or after."""
    times = [batch.at for batch in had]
    gaps = [(end, end - begin) for begin, end in pairwise(times)]
    before = [gap for end, gap in gaps if end <= since]
    after = [gap for end, gap in gaps if end > since]
    if not before or not after:
        return None
    return Wait(statistics.median(before), max(after))
