"""What an order is: the indices of one epoch, as a pure function of (n, seed, epoch)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PipelineError
from penstock.keyed import Key, Keyed
from penstock.order.shuffle import shuffled


@runtime_checkable
class Order(Protocol):
    """Which samples make up an epoch, and in which sequence. Implement it for your own scheme.

    An index may repeat and may be left out. The answer must depend on nothing but the arguments:
    every rank works it out for itself, and again after a resume. An order that also has
    ``length(n)``, the number of indices of any epoch, saves working it out to be counted; one
    that deals every sample exactly once and has ``at(n, seed, epoch, places)``, the indices at
    some places, saves working out the whole epoch before the first batch.

    >>> class Backwards:
    ...     def indices(self, n, seed, epoch):
    ...         return np.arange(n)[::-1]
    >>> isinstance(Backwards(), Order)
    True
    """

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """The indices of one epoch over ``n`` samples, each of 0 to n - 1."""
        ...


@dataclass(frozen=True, slots=True)
class Sequential:
    """Every sample once, as the source has them.

    >>> Sequential().indices(4, seed=0, epoch=0).tolist()
    [0, 1, 2, 3]
    """

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return np.arange(n, dtype=np.int64)

    def at(self, n: int, seed: int, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return places

    def length(self, n: int) -> int:
        return n


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Every sample once, in another random sequence each epoch.

    >>> sorted(Shuffled().indices(4, seed=0, epoch=7).tolist())
    [0, 1, 2, 3]
    """

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        return self.at(n, seed, epoch, np.arange(n, dtype=np.int64))

    def at(self, n: int, seed: int, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return shuffled(n, seed, epoch, places)

    def length(self, n: int) -> int:
        return n


@dataclass(frozen=True, eq=False)
class Weighted:
    """Samples drawn in proportion to their weights.

    ``samples`` is how many make an epoch. It is by default as many as there are, or without
    replacement as many as have a weight above zero.

    >>> Weighted([0.0, 1.0, 0.0], samples=4).indices(3, seed=0, epoch=0).tolist()
    [1, 1, 1, 1]
    >>> Weighted([0.5, 0.0, 0.5])
    Weighted(3 weights, samples=3, replacement=True)
    """

    weights: Sequence[float] | NDArray[Any]
    samples: int | None = None
    replacement: bool = True

    def __post_init__(self) -> None:
        weights = _weights(self.weights)
        object.__setattr__(self, "weights", weights)
        positive = int(np.count_nonzero(weights))
        if self.samples is None:
            samples = len(weights) if self.replacement else positive
        else:
            samples = whole("samples", self.samples, least=1)
        object.__setattr__(self, "samples", samples)
        if not self.replacement and samples > positive:
            raise PipelineError(
                f"Weighted draws {samples} samples without replacement, and only {positive} "
                f"of its {len(weights)} weights are above zero. Ask for at most {positive}, or "
                "use replacement=True."
            )

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        samples = self.length(n)
        weights: NDArray[np.float64] = np.asarray(self.weights)
        generator = Keyed(seed, "order/weighted").fresh(Key(index=0, epoch=epoch))
        places = np.flatnonzero(weights)
        positive = weights[places]
        if self.replacement:
            # Scaled by the largest, so that no sum overflows.
            sums = np.cumsum(positive / positive.max())
            found = np.searchsorted(sums, generator.random(samples) * sums[-1], side="right")
            # A number just under 1 may round up to the whole sum.
            chosen = np.minimum(found, len(places) - 1)
        else:
            # Efraimidis and Spirakis: the first of exponential clocks that tick at the rate of
            # the weights is a weighted draw, the next one a draw from the rest, and so on.
            with np.errstate(over="ignore"):
                clocks = generator.standard_exponential(len(places)) / positive
            chosen = np.argsort(clocks, kind="stable")[:samples]
        drawn: NDArray[np.int64] = places[chosen].astype(np.int64, copy=False)
        return drawn

    def length(self, n: int) -> int:
        if len(self.weights) != n:
            raise PipelineError(
                f"Weighted has {len(self.weights)} weights, and the source has {n} samples. "
                "Give one weight for each sample."
            )
        return cast(int, self.samples)

    def __repr__(self) -> str:
        return (
            f"Weighted({len(self.weights)} weights, samples={self.samples}, "
            f"replacement={self.replacement})"
        )


def length_of(order: Order, n: int) -> int | None:
    """How many indices every epoch of an order has, if it can tell without working them out."""
    tell = getattr(order, "length", None)
    if not callable(tell):
        return None
    found = tell(n)
    try:
        length = operator.index(found)
    except TypeError:
        length = -1
    if length < 0:
        raise PipelineError(
            f"{type(order).__name__}.length({n}) returned {found!r}; return how many indices an "
            "epoch has, or leave the method out."
        )
    return length


def check(indices: Any, n: int, order: object) -> NDArray[np.int64]:
    """What an order returned, as an array of its own, once it is known to be usable.

    >>> check([2, 0, 3], n=3, order=Sequential())
    Traceback (most recent call last):
    ...
    penstock.errors.PipelineError: Sequential.indices returned 3 at place 2, and the source ...
    """
    what = f"{type(order).__name__}.indices"
    try:
        found = np.asarray(indices)
    except ValueError as error:
        raise PipelineError(
            f"{what} returned what is no array ({error}). Return a flat array of whole numbers."
        ) from error
    if found.ndim != 1:
        raise PipelineError(
            f"{what} returned an array of shape {found.shape}. Return a flat one: the indices of "
            "an epoch one after the other; batches are cut from it later."
        )
    if found.size == 0:
        return np.zeros(0, dtype=np.int64)
    if found.dtype.kind not in "iu":
        hint = " (np.flatnonzero turns a mask into indices)" if found.dtype.kind == "b" else ""
        raise PipelineError(
            f"{what} returned {found.dtype} values, the first is {found[0]!r}. Return whole "
            f"numbers, such as an int64 array{hint}."
        )
    bad = (found < 0) | (found >= n)
    if bad.any():
        place = int(bad.argmax())
        raise PipelineError(
            f"{what} returned {int(found[place])} at place {place}, and the source has {n} "
            f"samples. Return indices of 0 to {n - 1}."
        )
    # A copy, because an order may hand out an array that it fills again for the next epoch.
    return found.astype(np.int64, copy=True)


def _weights(given: Any) -> NDArray[np.float64]:
    try:
        weights = np.array(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PipelineError(
            f"The weights of Weighted are no numbers ({error}). Give one number for each sample."
        ) from error
    if weights.ndim != 1:
        raise PipelineError(
            f"The weights of Weighted have the shape {weights.shape}. Give one number for each "
            "sample, in a flat list or array."
        )
    bad = ~np.isfinite(weights) | (weights < 0)
    if bad.any():
        place = int(bad.argmax())
        raise PipelineError(
            f"Weight {place} of Weighted is {float(weights[place])}. Weights are finite and not "
            "negative; give 0 to a sample that is never to be drawn."
        )
    if not weights.any():
        raise PipelineError(
            f"All {len(weights)} weights of Weighted are zero, so nothing can be drawn. Give at "
            "least one sample a weight above zero."
        )
    weights.flags.writeable = False
    return weights


def whole(name: str, value: Any, least: int | None = None) -> int:
    """An argument that has to be a whole number."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or (least is not None and found < least):
        wanted = "a whole number" if least is None else f"a whole number, {least} or more"
        raise PipelineError(f"{name} is {value!r}; give {wanted}.")
    return found
