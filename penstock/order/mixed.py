"""Mixing: samples of several sources in exact shares, each source with passes of its own."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.order.deal import replica_numbers
from penstock.order.order import Order, check, length_of, whole
from penstock.order.plan import PartProgress

_Indices = NDArray[np.int64]

Weight = float | Sequence[float] | Callable[[int], float]
"""The weight of a source: a number, numbers by epoch (the last one stays), or a function of the
epoch."""

_DENOMINATOR = 1 << 20
"""Shares are fractions with smaller denominators, so that places up to 2**41 do not overflow."""


def part_seed(seed: int, name: str) -> int:
    """The seed of one source of a mix: it does not depend on the other sources."""
    digest = hashlib.blake2b(f"{seed}/mix/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class ExactShares:
    """Which source each place of an endless sequence belongs to, in exact shares.

    The two lightest groups of sources are joined until one group is left (a Huffman tree). At each
    joint, the first x places have round(x * share) of the left group. So every run of places has
    its share of each source: with two sources rounded up or down, with more sources at most two
    samples more or less. Any place can be computed by itself.

    >>> parts, numbers = ExactShares([3, 1]).at(np.arange(8))
    >>> parts.tolist(), numbers.tolist()
    ([0, 0, 1, 0, 0, 0, 1, 0], [0, 1, 0, 2, 3, 4, 1, 5])
    """

    def __init__(self, weights: Sequence[float]) -> None:
        groups: list[tuple[float, int, Any]] = [
            (weight, number, number) for number, weight in enumerate(weights) if weight > 0
        ]
        heapq.heapify(groups)
        self.parts, made = len(weights), len(weights)
        while len(groups) > 1:
            light, heavy = heapq.heappop(groups), heapq.heappop(groups)
            share = Fraction(heavy[0] / (light[0] + heavy[0])).limit_denominator(_DENOMINATOR)
            joint = (heavy[2], light[2], share.numerator, share.denominator)
            heapq.heappush(groups, (light[0] + heavy[0], made, joint))
            made += 1
        self._tree = groups[0][2]

    def at(self, places: _Indices) -> tuple[_Indices, _Indices]:
        """The source of each place, and the number of places before it of the same source."""
        parts, numbers = np.empty_like(places), np.empty_like(places)
        below: list[tuple[Any, _Indices, _Indices]] = [
            (self._tree, places, np.arange(len(places), dtype=np.int64))
        ]
        while below:
            node, x, where = below.pop()
            if isinstance(node, int):
                parts[where], numbers[where] = node, x
                continue
            left, right, numerator, denominator = node
            before = (2 * x * numerator + denominator) // (2 * denominator)
            after = (2 * (x + 1) * numerator + denominator) // (2 * denominator)
            goes_left = after > before
            below.append((left, before[goes_left], where[goes_left]))
            below.append((right, (x - before)[~goes_left], where[~goes_left]))
        return parts, numbers

    def counts(self, places: int) -> list[int]:
        """The number of places of each source among the first ``places``."""
        counts = [0] * self.parts
        below = [(self._tree, places)]
        while below:
            node, x = below.pop()
            if isinstance(node, int):
                counts[node] = x
                continue
            left, right, numerator, denominator = node
            of_left = (2 * x * numerator + denominator) // (2 * denominator)
            below += [(left, of_left), (right, x - of_left)]
        return counts


@dataclass(frozen=True)
class MixPart:
    """One source of a mix: ``n`` samples, and the order of one pass over them."""

    name: str
    n: int
    weight: Weight
    order: Order

    def weight_in(self, epoch: int) -> float:
        """The weight in an epoch. Raises PipelineError if it is not a number of 0 or more."""
        given: Any = self.weight
        if callable(given):
            given = given(epoch)
        elif isinstance(given, (Sequence, np.ndarray)):
            given = given[min(epoch, len(given) - 1)]
        try:
            weight = float(given)
        except (TypeError, ValueError):
            weight = math.nan
        if not (math.isfinite(weight) and weight >= 0):
            raise PipelineError(
                f"The weight of {self.name!r} in epoch {epoch} is {given!r}; give a number of 0 or "
                "more, a list of them by epoch, or a function of the epoch."
            )
        return weight

    @property
    def fixed(self) -> bool:
        """Whether the weight is the same in all epochs."""
        return not callable(self.weight) and not isinstance(self.weight, (Sequence, np.ndarray))


class _WeightPhase(NamedTuple):
    """A run of epochs with the same weights.

    ``first``: its first epoch; ``before``: samples of each source that were dealt before it.
    """

    weights: tuple[float, ...]
    first: int
    before: tuple[int, ...]


@dataclass(frozen=True)
class Mixed:
    """Samples of several sources in one sequence, in proportion to their weights.

    An epoch has ``samples`` samples. Each source goes through its own passes, one after the other:
    a pass has each sample of the source once, in an order of its own, and goes on in the next epoch
    where the last one ended. A sample that comes again within an epoch has another replica number.

    >>> from penstock.order import Sequential
    >>> web, code = MixPart("web", 6, 3.0, Sequential()), MixPart("code", 2, 1.0, Sequential())
    >>> order = Mixed((web, code), samples=8)
    >>> [order.indices(8, seed=0, epoch=epoch).tolist() for epoch in range(2)]
    [[0, 1, 6, 2, 3, 4, 7, 5], [0, 1, 6, 2, 3, 4, 7, 5]]
    """

    parts: tuple[MixPart, ...]
    samples: int
    _phases: list[_WeightPhase] = field(default_factory=list, init=False, repr=False, compare=False)
    _weighed: dict[int, tuple[float, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    blocks: ClassVar[bool] = True
    """Ranks are dealt contiguous runs, because only these have exact shares of each source."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", whole("samples of a mix", self.samples, 1))
        _ = self._lengths, self._phase(0)

    @property
    def runs_user_code(self) -> bool:
        """Whether a weight is a function of the user, or an order is a class of the user."""
        ours = all(type(p.order).__module__.partition(".")[0] == "penstock" for p in self.parts)
        return not ours or any(callable(part.weight) for part in self.parts)

    @property
    def ahead(self) -> bool:
        """Whether the orders of all parts allow it."""
        return all(getattr(part.order, "ahead", True) for part in self.parts)

    def indices(self, n: int, seed: int, epoch: int) -> _Indices:
        return self.keys_at(n, seed, epoch, np.arange(self.samples, dtype=np.int64))[0]

    def length(self, n: int) -> int:
        self._check(n)
        return self.samples

    def keys_at(
        self, n: int, seed: int, epoch: int, places: _Indices
    ) -> tuple[_Indices, _Indices | None]:
        """The samples at these places and their replica numbers; ``None`` if all are 0.

        Places past the end are padding: the epoch again, with other replica numbers.
        """
        self._check(n)
        phase, shares, base = self._phase(epoch)
        before = shares.counts(base)
        within = shares.counts(base + self.samples)
        again = places // self.samples
        parts, numbers = shares.at(places % self.samples + base)
        indices, replicas = np.empty_like(places), np.empty_like(places)
        most = 1
        for number, part in enumerate(self.parts):
            length = self._lengths[number]
            first = (phase.before[number] + before[number]) // length
            last = (phase.before[number] + max(before[number], within[number] - 1)) // length
            mine = np.flatnonzero(parts == number)
            passes, place = np.divmod(phase.before[number] + numbers[mine], length)
            own = part_seed(seed, part.name)
            for one in np.unique(passes).tolist():
                here = passes == one
                drawn, copies = _of_pass(part, own, one, place[here])
                indices[mine[here]] = self._starts[number] + drawn
                replicas[mine[here]] = one - first + (last - first + 1) * copies
            # Not the largest number that occurs here: that depends on where a run resumed.
            copies_in_pass = 1 if hasattr(part.order, "at") else length
            most = max(most, (last - first + 1) * copies_in_pass)
        if again.any():
            replicas += again * most
        return indices, replicas if replicas.any() else None

    def progress(self, epoch: int, position: int) -> list[PartProgress]:
        """What was dealt of each source when ``position`` samples of an epoch were."""
        phase, shares, base = self._phase(epoch)
        start, now = shares.counts(base), shares.counts(base + position)
        total = sum(phase.weights)
        return [
            PartProgress(
                part.name,
                phase.weights[i] / total,
                now[i] - start[i],
                (phase.before[i] + now[i]) / self._lengths[i],
            )
            for i, part in enumerate(self.parts)
        ]

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + part.n)
        return starts

    @cached_property
    def _lengths(self) -> list[int]:
        """The number of samples in a pass over each source."""
        lengths = []
        for part in self.parts:
            length = length_of(part.order, part.n)
            if not length:
                raise PipelineError(
                    f"{type(part.order).__name__}, the order of {part.name!r} in a mix, "
                    + ("has no samples." if length == 0 else "has no method length(n).")
                    + " A mix needs the number of samples in a pass, which must be the same for "
                    "all passes: add length(n), or use another order."
                )
            lengths.append(length)
        return lengths

    def _check(self, n: int) -> None:
        if n != self._starts[-1]:
            raise PipelineError(
                f"The sources of the mix have {self._starts[-1]} samples together, but the source "
                f"of the loader has {n}. Make the mix with ps.mix()."
            )

    def _weights(self, epoch: int) -> tuple[float, ...]:
        """Asked for once, because a function may cost something."""
        found = self._weighed.get(epoch)
        if found is None:
            found = tuple(part.weight_in(epoch) for part in self.parts)
            if not any(found):
                raise PipelineError(
                    f"All weights of the mix are 0 in epoch {epoch}. Give at least one source a "
                    "weight above 0."
                )
            self._weighed[epoch] = found
        return found

    def _phase(self, epoch: int) -> tuple[_WeightPhase, ExactShares, int]:
        """The phase of an epoch, its shares, and the place in the phase where the epoch begins."""
        fixed = all(part.fixed for part in self.parts)
        weights = self._weights(0 if fixed else epoch)
        phase = _WeightPhase(self._weights(0), 0, (0,) * len(self.parts))
        known = [p for p in self._phases if p.first <= epoch]
        if known:
            phase = known[-1]
        for e in range(epoch + 1 if fixed else phase.first + 1, epoch + 1):
            if self._weights(e) == phase.weights:
                continue
            dealt = _shares(phase.weights).counts((e - phase.first) * self.samples)
            before = tuple(a + b for a, b in zip(phase.before, dealt, strict=True))
            phase = _WeightPhase(self._weights(e), e, before)
            if not self._phases or self._phases[-1].first < e:
                self._phases.append(phase)
        return phase, _shares(weights), (epoch - phase.first) * self.samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_phases": [], "_weighed": {}}


@lru_cache(maxsize=64)
def _shares(weights: tuple[float, ...]) -> ExactShares:
    return ExactShares(weights)


def _of_pass(part: MixPart, seed: int, number: int, places: _Indices) -> tuple[_Indices, Any]:
    """The samples at these places of a pass, and how often each came in it before."""
    at = getattr(part.order, "at", None)
    if at is not None:
        return at(part.n, seed, number, places), 0
    indices, copies = _listed_pass(_ById(part.order), part.n, seed, number)
    return indices[places], 0 if copies is None else copies[places]


class _ById:
    """An order as a key of a cache: orders of users may not be hashable."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def __hash__(self) -> int:
        return id(self.order)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.order is self.order


@lru_cache(maxsize=8)
def _listed_pass(by_id: _ById, n: int, seed: int, number: int) -> tuple[_Indices, _Indices | None]:
    order = by_id.order
    indices = check(order.indices(n, seed, number), n, order)
    stated = length_of(order, n)
    if len(indices) != stated:
        raise PipelineError(
            f"{type(order).__name__} returned {len(indices)} indices for pass {number}, but its "
            f"length({n}) says {stated}. In a mix all passes must have that length."
        )
    return indices, replica_numbers(indices)
