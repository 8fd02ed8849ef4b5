"""The order contract: the indices of one epoch as a pure function of (n, seed, epoch)."""

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

    An index may repeat and may be left out. The result must depend on the arguments only: every
    rank computes it by itself, and computes it again after a resume. More methods are optional.
    ``length(n)`` returns the number of indices of any epoch, so that they need not be computed to
    be counted. ``at(n, seed, epoch, places)`` returns the indices at some places of the sequence,
    so that the whole epoch need not be computed before the first batch; an order that has ``at``
    must have every sample exactly once. ``keys_at`` is ``at`` for orders that repeat samples: it
    returns replica numbers, too, and gets places past the end, for padding. ``over(shards, name)``
    returns the order for a source with these shards. An attribute ``blocks = True`` lets ranks be
    dealt contiguous runs of the sequence. With ``ahead = False`` an epoch is asked for only after
    the epoch before it has ended: for orders that read what the training loop wrote.

    >>> class Backwards:
    ...     def indices(self, n, seed, epoch):
    ...         return np.arange(n)[::-1]
    >>> isinstance(Backwards(), Order)
    True
    """

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """The indices of one epoch over ``n`` samples, each from 0 to n - 1."""
        ...


@dataclass(frozen=True, slots=True)
class Sequential:
    """Every sample once, in the order of the source.

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
    """Every sample once, in a new random sequence each epoch.

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

    ``samples`` is the number of samples in an epoch. The default is the number of weights, or
    without replacement the number of weights above zero.

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
                f"Weighted is to draw {samples} samples without replacement, but only {positive} "
                f"of its {len(weights)} weights are above zero. Give samples={positive} or less, "
                "or replacement=True."
            )

    def indices(self, n: int, seed: int, epoch: int) -> NDArray[np.int64]:
        samples = self.length(n)
        weights: NDArray[np.float64] = np.asarray(self.weights)
        generator = Keyed(seed, "order/weighted").fresh(Key(index=0, epoch=epoch))
        places = np.flatnonzero(weights)
        positive = weights[places]
        if self.replacement:
            # Scaled by the largest weight, so that no sum overflows.
            sums = np.cumsum(positive / positive.max())
            slots = np.searchsorted(sums, generator.random(samples) * sums[-1], side="right")
            # A random number just below 1 may round up to the whole sum.
            chosen = np.minimum(slots, len(places) - 1)
        else:
            # Efraimidis and Spirakis: of exponential clocks whose rates are the weights, the
            # first to tick is a weighted draw, the second a weighted draw from the rest, and so on.
            with np.errstate(over="ignore"):
                clocks = generator.standard_exponential(len(places)) / positive
            chosen = np.argsort(clocks, kind="stable")[:samples]
        drawn: NDArray[np.int64] = places[chosen].astype(np.int64, copy=False)
        return drawn

    def length(self, n: int) -> int:
        if len(self.weights) != n:
            raise PipelineError(
                f"Weighted has {len(self.weights)} weights, but the source has {n} samples. "
                "Give one weight for each sample."
            )
        return cast(int, self.samples)

    def __repr__(self) -> str:
        return (
            f"Weighted({len(self.weights)} weights, samples={self.samples}, "
            f"replacement={self.replacement})"
        )


def length_of(order: Order, n: int) -> int | None:
    """The number of indices in any epoch of an order; ``None`` if it has no ``length``."""
    method = getattr(order, "length", None)
    if not callable(method):
        return None
    returned = method(n)
    try:
        length = operator.index(returned)
    except TypeError:
        length = -1
    if length < 0:
        raise PipelineError(
            f"{type(order).__name__}.length({n}) returned {returned!r}. Return the number of "
            "indices in an epoch, or leave the method out."
        )
    return length


def check(indices: Any, n: int, order: object) -> NDArray[np.int64]:
    """The indices that an order returned, checked and copied to a new int64 array.

    >>> check([2, 0, 3], n=3, order=Sequential())
    Traceback (most recent call last):
    ...
    penstock.errors.PipelineError: Sequential.indices returned 3 at place 2, but the source ...
    """
    method = f"{type(order).__name__}.indices"
    try:
        array = np.asarray(indices)
    except ValueError as error:
        raise PipelineError(
            f"{method} returned something that NumPy cannot make an array of ({error}). Return a "
            "flat array of whole numbers."
        ) from error
    if array.ndim != 1:
        raise PipelineError(
            f"{method} returned an array of shape {array.shape}. Return a flat array with the "
            "indices of the whole epoch; the loader cuts it into batches."
        )
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        hint = " (np.flatnonzero turns a mask into indices)" if array.dtype.kind == "b" else ""
        raise PipelineError(
            f"{method} returned {array.dtype} values; the first is {array[0]!r}. Return whole "
            f"numbers, such as an int64 array{hint}."
        )
    bad = (array < 0) | (array >= n)
    if bad.any():
        place = int(bad.argmax())
        raise PipelineError(
            f"{method} returned {int(array[place])} at place {place}, but the source has {n} "
            f"samples. Return indices from 0 to {n - 1}."
        )
    # A copy, because an order may return an array that it fills again for the next epoch.
    return array.astype(np.int64, copy=True)


def _weights(given: Any) -> NDArray[np.float64]:
    try:
        weights = np.array(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PipelineError(
            f"The weights of Weighted are not numbers ({error}). Give one number for each sample."
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
            f"Weight {place} of Weighted is {float(weights[place])}. Weights must be finite and "
            "not negative; give 0 to a sample that must never be drawn."
        )
    if not weights.any():
        raise PipelineError(
            f"All {len(weights)} weights of Weighted are zero, so nothing can be drawn. Give at "
            "least one sample a weight above zero."
        )
    weights.flags.writeable = False
    return weights


def whole(name: str, value: Any, least: int | None = None) -> int:
    """Check that an argument is a whole number, and not below ``least``; return it as an int."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        wanted = "a whole number" if least is None else f"a whole number, {least} or more"
        raise PipelineError(f"{name} is {value!r}; give {wanted}.")
    return number
